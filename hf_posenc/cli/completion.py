"""What the Tab key completes, beside subcommands, options and paths, which typer and the shell know."""

from collections.abc import Callable, Sequence

from hf_posenc.encodings import PositionEncoding


def encodings(incomplete: str) -> list[tuple[str, str]]:
    """Names and aliases with their titles; behind the + of a composition, those of its next part."""
    before, plus, _ = incomplete.rpartition("+")
    return [(f"{before}{plus}{name}", kind.title) for name, kind in sorted(PositionEncoding.registered.items())]


def one_of(names: Sequence[str]) -> Callable[[], list[str]]:
    """For an option that takes one of these names."""
    return lambda: [*names]
