"""What the Tab key completes, beside subcommands, options and paths, which typer and the shell know."""

from collections.abc import Callable

from hf_posenc.cli.catalog import catalog
from hf_posenc.cli.catalog import encodings as known


def encodings(incomplete: str) -> list[tuple[str, str]]:
    """Names and aliases with their titles; behind the + of a composition, those of its next part."""
    before, plus, _ = incomplete.rpartition("+")
    titles = {each: row["title"] for name, row in known().items() for each in (name, *row["aliases"])}
    return [(f"{before}{plus}{name}", title) for name, title in sorted(titles.items())]


def one_of(values: str) -> Callable[[], list[str]]:
    """For an option that takes one of these values of the catalog."""
    return lambda: catalog()[values]
