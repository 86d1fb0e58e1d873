"""`hf-posenc list | inspect | patch | convert | unpatch | extend | eval | bench | plot | explore | model-card | push`

One file per subcommand. What they share: `arguments` (arguments of several commands), `catalog` (what is known without torch),
`completion` (what the Tab key offers), `output` (text or JSON), `folders` and `texts` (what is read and written), `figures`
(the commands of plot).
"""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperCommand, TyperGroup
except ImportError as error:
    raise SystemExit(f'hf-posenc needs typer and rich ({error}): pip install "hf-posenc[cli]"') from None

import hf_posenc
from hf_posenc.evaluation import terminals

console = Console(soft_wrap=True)
DEBUG = "--debug"
WITH_TORCH = ("__main__", "figures", "folders", "texts")
"""Modules here that commands import when they run. The others import no torch, so that help and completion are immediate."""
FOREIGN_CODE = "execute custom code"
"""What Transformers' error for a checkpoint with code of its own says."""


def is_expected(error: Exception) -> bool:
    """Whether bad input, a missing extra, a full disk or an unreachable Hub raised it. Anything else is a bug and gets a
    traceback."""
    from huggingface_hub.errors import HTTPError  # of the HTTP library that huggingface_hub uses
    from safetensors import SafetensorError

    return isinstance(error, (ValueError, OSError, ImportError, HTTPError, SafetensorError))


@contextlib.contextmanager
def asking_on_a_terminal() -> Iterator[None]:
    """Without a terminal, Transformers refuses a checkpoint's code instead of asking whether to run it."""
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    if sys.stdin is None or not sys.stdin.isatty():
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _hint(error: str) -> str:
    """What to do about an error on the command line, where it isn't what to do in Python."""
    if "import the module that defines" in error:
        return " (here: hf-posenc --import MODULE …)"
    if FOREIGN_CODE in error:
        return (
            " (here: run the command on a terminal, which asks first; or hf-posenc --import MODULE …, with a module that "
            "registers the model's classes)"
        )
    return ""


class Group(TyperGroup):
    """Prints expected errors in one line and exits with code 1; with --debug, anywhere on the line, they get a traceback."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        terminals.set_up()
        return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, BrokenPipeError):  # `hf-posenc list | head`: typer ends without a word
            raise
        except Exception as error:
            option = getattr(error, "option_name", None)  # of an option that the subcommand hasn't
            if hasattr(error, "message") and any(option in parameter.opts for parameter in self.params):
                error.message = f"{option} goes before the subcommand: {ctx.command_path} {option} …"
            if ctx.params.get("debug") or not is_expected(error):
                raise
            said = f"[bold red]Error:[/] {escape(str(error) + _hint(str(error)))}"
            Console(stderr=True, soft_wrap=True).print(said, highlight=False)
            raise typer.Exit(1) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        end = args.index("--") if "--" in args else len(args)
        if DEBUG in args[:end]:
            args = [word for place, word in enumerate(args) if word != DEBUG or place >= end]
            ctx.params["debug"] = True
        return super().resolve_command(ctx, args)


class ModelCommand(TyperCommand):
    """A command that works with models: torch, Transformers, and the public names of hf_posenc are imported when it runs."""

    def invoke(self, ctx: Any) -> Any:
        importlib.import_module("hf_posenc.api")
        with asking_on_a_terminal():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # --max_length is --max-length
    help="Change the position encoding of a Transformers model.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(hf_posenc.__version__)
        raise typer.Exit


@app.callback()
def options(
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module with custom encodings. Can be repeated.", show_default="none"),
    ] = None,
    debug: Annotated[
        bool, typer.Option(DEBUG, envvar="HF_POSENC_DEBUG", help="Show tracebacks of errors, anywhere on the line.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    terminals.import_modules(modules or ())


for _module in pkgutil.iter_modules(__path__):
    if _module.name not in WITH_TORCH:
        importlib.import_module(f"{__name__}.{_module.name}")
