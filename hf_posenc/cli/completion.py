"""Shell completion of argument values. typer and the shell complete subcommands, options, and paths."""

from collections.abc import Callable

from hf_posenc.cli.catalog import catalog
from hf_posenc.cli.catalog import encodings as known


def encodings(incomplete: str) -> list[tuple[str, str]]:
    """Names and aliases with their titles. After a `+`, these complete the next part of a composition."""
    before, plus, _ = incomplete.rpartition("+")
    titles = {each: row["title"] for name, row in known().items() for each in (name, *row["aliases"])}
    return [(f"{before}{plus}{name}", title) for name, title in sorted(titles.items())]


def one_of(values: str) -> Callable[[], list[str]]:
    """The completion of an option whose values are in the catalog."""
    return lambda: catalog()[values]
