"""hf-posenc compare"""

from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app


@app.command(
    "compare",
    cls=ModelCommand,
    add_help_option=False,  # `--help` and all other options are those of hf_posenc.compare
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def compare(
    context: typer.Context,
    options: Annotated[list[str] | None, typer.Argument(help="Flags of a study, or a YAML file with them.")] = None,
) -> None:
    """Compare encodings in a controlled study: equal models, data, and order of data, by seed.

    Example:
    [bold]hf-posenc compare --tasks classification --encodings none rope --steps 20 --seeds 0 --output_dir study[/]
    """
    from hf_posenc._versions import install

    try:
        from hf_posenc.compare import main
        from hf_posenc.studies import study
    except ImportError as error:
        raise ImportError(f"Studies need more packages ({error}). Run: {install('all')}") from None
    study.quiet()
    given = options or []
    modules = context.parent.params.get("modules") if context.parent else None
    if modules and "--import" not in given:  # `hf-posenc --import MODULE compare`: parallel processes import it, too
        given = [*given, "--import", *modules]
    main(given)
