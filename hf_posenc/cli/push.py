"""hf-posenc push"""

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.output import AsJson, Output


@app.command("push", cls=ModelCommand)
def push(
    folder: Annotated[Path, typer.Argument(help="Local path of a saved model.")],
    repo_id: Annotated[str, typer.Argument(help="Hub ID of the repository: user/name.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository.", show_default="your account's")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, created from main if it doesn't exist.", show_default="main")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    commit_message: Annotated[
        str | None, typer.Option(help="Commit message.", show_default="Upload, with the model's class and encoding")
    ] = None,
    save_directory: Annotated[
        Path | None,
        typer.Option(help="Directory for a copy of the pushed files.", show_default="none; offline, the repository's name"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Push a model, its tokenizer, its evaluation, and a model card to the Hub in one commit.

    The command also pushes evaluation.json and images from the model's directory, and shows them in the card. It doesn't push
    other files.

    The token comes from hf auth login or the environment variable HF_TOKEN. Offline (HF_HUB_OFFLINE=1), the command writes all
    files to a directory and uploads nothing.

    Example:
    [bold]hf-posenc push bert-alibi me/bert-alibi --private[/]
    """
    from huggingface_hub import is_offline_mode

    import hf_posenc
    from hf_posenc.cli.folders import load_model
    from hf_posenc.hub.eval_results import EVALUATION
    from hf_posenc.hub.push import IMAGES
    from hf_posenc.serialization.saved_files import check_there
    from hf_posenc.serialization.tokenizer_files import load_tokenizer

    check_there(folder)
    if (folder / "modules.json").exists():
        raise ValueError(
            f"{folder} is a SentenceTransformer, and this command would push it without its other modules (such as pooling). "
            f"In Python, call SentenceTransformer({str(folder)!r}).push_to_hub({repo_id!r})."
        )
    out = Output(as_json)
    if is_offline_mode() and save_directory is None and Path(repo_id.rpartition("/")[2]).resolve() == folder.resolve():
        save_directory = Path(f"{folder}-to-push")
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    card, evaluation = folder / "README.md", folder / EVALUATION
    figures = [path for path in sorted(folder.glob("*")) if path.suffix.lower() in IMAGES and path.is_file()]
    if card.is_file():
        out.message(f"{card} isn't pushed. To use it, push it afterwards:")
        out.message(f"  hf upload {repo_id} {card} README.md")
    if tokenizer is None:
        out.message(f"{folder} contains no tokenizer, so none is pushed.")
    done = hf_posenc.push_to_hub(
        model,
        repo_id,
        tokenizer=tokenizer,
        evaluation=evaluation if evaluation.is_file() else None,
        figures=figures,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        save_directory=save_directory,
    )
    if isinstance(done, Path):  # offline
        out.result(str(done))
        out.document({"repo_id": repo_id, "pushed": False, "folder": str(done)})
        return
    url = str(done.pr_url or done.repo_url)
    out.result(url)
    out.document({"repo_id": repo_id, "pushed": True, "url": url, "commit": done.oid})
