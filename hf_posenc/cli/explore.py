"""hf-posenc explore"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app, console


@app.command("explore", cls=ModelCommand)
def explore(
    host: Annotated[str, typer.Option(help="The address to listen on. 0.0.0.0: all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on. 0: a free one.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    max_parameters: Annotated[
        int | None, typer.Option(min=1, help="Maximum size of a model, with its buffers.", show_default="500 million")
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="Maximum memory of a measurement of models, in GiB.", show_default="6")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Maximum duration of a measurement of models.", show_default="300")
    ] = None,
    hub_only: Annotated[
        bool | None,
        typer.Option(
            "--hub-only/--local-models",
            help="Accept Hub IDs only, or local paths also.",
            show_default="Hub IDs only, if other machines can reach the page",
        ),
    ] = None,
) -> None:
    """Serve an interactive page: encodings and their options, two side by side, and what a model does with its positions.

    [bold]hf-posenc explore --port 8000 --no-browser[/]
    """
    from hf_posenc import explorer
    from hf_posenc.explorer.budget import MAX_PARAMETERS

    page = explorer.serve(
        host,
        port,
        browser=browser,
        max_parameters=max_parameters or MAX_PARAMETERS,
        max_memory=max_memory,
        max_seconds=max_seconds,
        hub_only=hub_only,
        block=False,
    )
    console.print(f"The page is at {page.local_url} (Ctrl+C ends it).", markup=False, highlight=False)
    page.block_thread()
