"""Write docs/reference/cli.md from the commands of hf-posenc: python -m tools.reference"""

from importlib.metadata import entry_points
from pathlib import Path

import click
from typer.main import get_command

from hf_posenc.evaluation import terminals
from hf_posenc.serialization.atomic import write_text

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Install the extra `cli` for `hf-posenc`. `hf-posenc COMMAND --help` describes every option with its default and tested examples.
Options have the names of the keyword arguments in Python. `--json` prints reports for programs, `--debug` shows tracebacks, and
`hf-posenc --install-completion` enables completion.

<!-- commands by tools/reference.py: begin -->

| command | purpose | arguments and options |
|---|---|---|
"""


def page() -> str:
    """The page, with one row per command."""
    (program,) = entry_points(group="console_scripts", name="hf-posenc")
    rows = [_row(name, command) for name, command in sorted(get_command(program.load()).commands.items()) if not command.hidden]  # type: ignore[attr-defined]
    return HEAD + "".join(rows) + "\n<!-- commands by tools/reference.py: end -->\n"


def _row(name: str, command: click.Command) -> str:
    purpose = (command.help or "").strip().partition("\n\n")[0].replace("\n", " ")
    names = [max(each.opts, key=len) if each.param_type_name == "option" else each.name.upper() for each in command.params]
    return f"| `{name}` | {purpose} | {', '.join(f'`{each}`' for each in names if each != '--help')} |\n"


if __name__ == "__main__":
    terminals.set_up()
    write_text(PAGE, page())
