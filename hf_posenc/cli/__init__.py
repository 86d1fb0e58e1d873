"""The command `hf-posenc list | inspect | patch | convert | unpatch | extend | eval | bench | plot | explore | card | push`.

One file per subcommand, two for `plot`; all files here are imported. What they share: `arguments` (arguments of several
commands), `completing` (what the Tab key offers), `output` (text or JSON), `folders` and `texts` (what is read and written).

They are named listing, patching, …: modules `patch` and `inspect` would hide a public function and a standard module.
"""

import importlib
import pkgutil
import sys
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperGroup
except ImportError as error:
    raise SystemExit(f'hf-posenc needs typer and rich ({error}): pip install "hf-posenc[cli]"') from None

from huggingface_hub.errors import HTTPError  # of the HTTP library that huggingface_hub uses
from safetensors import SafetensorError

import hf_posenc
from hf_posenc import terminals

console = Console(soft_wrap=True)
EXPECTED = (ValueError, OSError, ImportError, HTTPError, SafetensorError)
"""Raised by bad input, missing extras, a full disk or an unreachable Hub. Anything else is a bug and gets a traceback."""
DEBUG = "--debug"


class Group(TyperGroup):
    """Prints expected errors in one line and exits with code 1; with --debug, anywhere on the line, they get a traceback."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        terminals.escape_unprintable()
        return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `hf-posenc list | head`: typer ends without a word
            raise
        except EXPECTED as error:
            if ctx.params.get("debug"):
                raise
            hint = " (here: hf-posenc --import MODULE …)" if "import the module that defines" in str(error) else ""
            Console(stderr=True, soft_wrap=True).print(f"[bold red]Error:[/] {escape(str(error))}{hint}", highlight=False)
            raise typer.Exit(1) from None
        except Exception as error:
            option = getattr(error, "option_name", None)  # of an option that the subcommand hasn't
            if hasattr(error, "message") and any(option in parameter.opts for parameter in self.params):
                error.message = f"{option} goes before the subcommand: {ctx.command_path} {option} …"
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        end = args.index("--") if "--" in args else len(args)
        if DEBUG in args[:end]:
            args = [word for place, word in enumerate(args) if word != DEBUG or place >= end]
            ctx.params["debug"] = True
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # --max_length is --max-length
    help="Another position encoding in a Transformers model.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(hf_posenc.__version__)
        raise typer.Exit


@app.callback()
def options(
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module that defines encodings of your own; may be repeated.", show_default="none"),
    ] = None,
    debug: Annotated[
        bool, typer.Option(DEBUG, envvar="HF_POSENC_DEBUG", help="Errors with a traceback; anywhere on the line.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if modules:
        sys.path.insert(0, "")
    for name in modules or ():
        importlib.import_module(name)


for _module in pkgutil.iter_modules(__path__):
    if _module.name != "__main__":
        importlib.import_module(f"{__name__}.{_module.name}")
