"""`hf-posenc list | inspect | patch | convert | unpatch | extend | export | eval | bench | plot | explore | model-card | push`

Each subcommand has its own module. These modules are shared:

- `arguments`: arguments of several commands
- `catalog`: data that is available without torch
- `completion`: shell completion
- `output`: text and JSON output
- `folders`, `texts`: reading and writing models and texts
- `figures`: the commands of `hf-posenc plot`
"""

import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

from hf_posenc._versions import install

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from typer.core import TyperCommand, TyperGroup
except ImportError as error:
    raise SystemExit(f"The hf-posenc command needs typer and rich ({error}). Run: {install('cli')}") from None

import hf_posenc
from hf_posenc.evaluation import terminals

console = Console(soft_wrap=True)
DEBUG = "--debug"
WITH_TORCH = ("figures", "folders", "texts")
"""Modules that commands import only when they run. The others don't import torch, so help and completion are fast."""
FOREIGN_CODE = "execute custom code"
"""Part of Transformers' error message for a checkpoint with custom code."""


def is_expected(error: Exception) -> bool:
    """Whether bad input, a missing extra, a full disk, or an unreachable Hub caused the error.

    Any other error is a bug and is shown with its traceback.
    """
    from huggingface_hub.errors import HTTPError
    from safetensors import SafetensorError

    return isinstance(error, (ValueError, OSError, ImportError, HTTPError, SafetensorError))


@contextlib.contextmanager
def asking_on_a_terminal() -> Iterator[None]:
    """Without a terminal, makes Transformers reject a checkpoint's custom code instead of asking whether to run it."""
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    if sys.stdin is None or not sys.stdin.isatty():
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _hint(error: str) -> str:
    """The remedy on the command line, for errors whose remedy differs from the one in Python. Otherwise empty."""
    end = "" if error.endswith(".") else "."
    if "import the module that defines" in error.lower():
        return f"{end} On the command line, run: hf-posenc --import MODULE …"
    if FOREIGN_CODE in error:
        return (
            f"{end} On the command line, run the command in a terminal, which asks first. Or register the model's classes in a "
            "module and run: hf-posenc --import MODULE …"
        )
    return ""


def _unwrapped(text: str) -> str:
    """Help text with each paragraph on one line, because typer keeps the line breaks. Labels and examples keep their lines."""
    return re.sub(r"(?<=\S)\n(?=\S)(?!\[bold\])", " ", inspect.cleandoc(text))


class Group(TyperGroup):
    """Prints expected errors on one line and exits with code 1. With --debug, anywhere on the line, it shows the traceback."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        terminals.set_up()
        return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, BrokenPipeError):  # typer handles a closed pipe, such as `hf-posenc list | head`
            raise
        except Exception as error:
            option = getattr(error, "option_name", None)  # an option that the subcommand doesn't have
            if hasattr(error, "message") and any(option in parameter.opts for parameter in self.params):
                error.message = f"{option} must be before the subcommand: {ctx.command_path} {option} …"
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


class Command(TyperCommand):
    """A command whose help text has each paragraph on one line."""

    def __init__(self, *arguments: Any, help: str | None = None, **settings: Any) -> None:
        super().__init__(*arguments, help=_unwrapped(help or ""), **settings)


class ModelCommand(Command):
    """A command that uses models."""

    def invoke(self, ctx: Any) -> Any:
        with asking_on_a_terminal():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # --max_length is --max-length
    help="Replace, extend, and analyze position encodings in Transformers models.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(hf_posenc.__version__)
        raise typer.Exit


@app.callback()
def options(
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module with custom encodings. Can be repeated.", show_default="none"),
    ] = None,
    debug: Annotated[
        bool, typer.Option(DEBUG, envvar="HF_POSENC_DEBUG", help="Show tracebacks. Valid anywhere on the command line.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    terminals.import_modules(modules or ())


for _module in pkgutil.iter_modules(__path__):
    if _module.name not in WITH_TORCH:
        importlib.import_module(f"{__name__}.{_module.name}")
