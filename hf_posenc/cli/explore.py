"""hf-posenc explore"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app, console


@app.command("explore", cls=ModelCommand)
def explore(
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 listens on all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 chooses a free port.")] = 7860,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    max_parameters: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of parameters of a model to load, including buffers.", show_default="500 million"
        ),
    ] = None,
    max_memory: Annotated[float | None, typer.Option(help="Maximum memory of a measurement in GiB.", show_default="6")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Maximum duration of a measurement in seconds.", show_default="300")
    ] = None,
    hub_only: Annotated[
        bool | None,
        typer.Option(
            "--hub-only/--local-models",
            help="Accept only Hub IDs, or also local paths.",
            show_default="hub-only if other machines can reach the page",
        ),
    ] = None,
) -> None:
    """Open the interactive explorer: compare encodings and inspect a model's positions.

    Example:
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
    console.print(f"The explorer is at {page.local_url} (press Ctrl+C to stop it).", markup=False, highlight=False)
    page.block_thread()
