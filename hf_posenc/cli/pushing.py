"""hf-posenc push"""

from typing import Annotated

import typer

import hf_posenc
from hf_posenc.cli import app, console
from hf_posenc.cli.patching import load, load_tokenizer


@app.command("push")
def push(
    folder: Annotated[str, typer.Argument(help="Folder of a saved model.")],
    repo_id: Annotated[str, typer.Argument(help="Where to: user/name.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; default: your account's.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
) -> None:
    """Push a model, its tokenizer and a model card to the Hub, in one commit.

    [bold]hf-posenc push bert-alibi me/bert-alibi --private[/]

    The token is the one of [bold]hf auth login[/], or the environment's HF_TOKEN.
    """
    model, tokenizer = load(folder), load_tokenizer(folder)
    done = hf_posenc.push_to_hub(model, repo_id, tokenizer=tokenizer, private=private, commit_message=message)
    console.print(done.repo_url, markup=False)
