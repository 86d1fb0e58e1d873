"""The page's content for encodings: figures, facts, numbers, and the code to patch a model with them."""

import base64
import inspect
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_posenc import diagnostics, plots
from hf_posenc.diagnostics.encoding_input import label, quantities
from hf_posenc.diagnostics.registry import DIAGNOSTICS, page_figures
from hf_posenc.encodings import at_most, canonical, catalog, encoding_class
from hf_posenc.explorer.budget import Budget
from hf_posenc.explorer.option_fields import Encoding

BYTES = 64
"""Bytes that a drawing reserves for each value of an encoding, for three copies in float32 and the others in float64."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of encodings.

    causal: None for the default of the encoding.
    """

    length: int = 64
    hidden_size: int = 128
    num_attention_heads: int = 8
    causal: bool | None = None

    def given(self) -> dict[str, Any]:
        """Keyword arguments for a diagnostic, without those that are None."""
        return {name: size for name, size in asdict(self).items() if size is not None}


def shown(encoding: Encoding, sizes: Sizes, dark: bool, budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield one dict with the page's content for an encoding. "figures" are data URLs.

    Raises ValueError for an invalid encoding, option, or size, before anything larger than the budget is built.
    """
    with at_most(budget.memory // BYTES):
        drawn = {name: picture(figure) for name, figure in figures(encoding, sizes, dark).items()}
        yield {"figures": drawn, "facts": facts(encoding), "numbers": numbers(encoding, sizes), "code": code(encoding)}


def compared(encodings: list[Encoding], sizes: Sizes, dark: bool, budget: Budget) -> Iterator[str | None]:
    """Yield the figure of `decays` as a data URL, or None. Raises the same errors as `shown`."""
    with at_most(budget.memory // BYTES):
        figure = decays(encodings, sizes, dark)
        yield None if figure is None else picture(figure)


def picture(figure: Any) -> str:
    """A figure as a PNG in a data URL."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def figures(encoding: Encoding, sizes: Sizes, dark: bool = False) -> dict[str, Any]:
    """Name -> figure, for an encoding. Empty if it neither adds vectors nor changes attention scores.

    Raises ValueError for an invalid encoding, option, or size.
    """
    made = {}
    for name, figure in page_figures(*quantities(encoding)).items():
        taken = inspect.signature(figure.draw).parameters
        given = {"quantity": figure.needs, **sizes.given(), "dark": dark}
        made[name] = figure.draw(
            [encoding] if figure.several else encoding, **{name: value for name, value in given.items() if name in taken}
        )
    return made


def decays(encodings: list[Encoding], sizes: Sizes, dark: bool = False) -> Any:
    """A figure of encodings by distance: scores, or the dot products of vectors if an encoding doesn't change scores.

    None if no encoding has either.
    """
    found = []
    for encoding in encodings:
        if measured := quantities(encoding):
            result = diagnostics.decay(encoding, quantity=measured[-1], **sizes.given())
            found.append(replace(result, encoding=label(encoding)))
    return plots.decay(found, dark=dark) if found else None


def numbers(encoding: Encoding, sizes: Sizes) -> str:
    """The results of the page's diagnostics as text."""
    found = []
    for each in DIAGNOSTICS.values():
        if each.on_page and each.needs == "encoding":
            found += [each.measure(encoding, quantity=quantity, **sizes.given()) for quantity in quantities(encoding)]
        elif each.on_page and each.needs in quantities(encoding):
            found.append(each.measure(encoding, **sizes.given()))
    return "\n\n".join(map(str, found))


def facts(encoding: Encoding) -> str:
    """The title, facts, and papers of an encoding, in Markdown."""
    kind = encoding_class(canonical(encoding)["type"])
    entry = catalog.entry(kind)
    said = [f"{heading}: {fact}" for heading, fact in entry.facts().items()] + [f"<{paper}>" for paper in entry.papers]
    return f"### {entry.title or kind.type}\n{' · '.join(said)}"


def code(encoding: Encoding) -> str:
    """The call that patches a model with an encoding, and the equivalent command."""
    options = {name: value for name, value in encoding.items() if name != "type"}
    given = repr({"type": encoding["type"], **options} if options else encoding["type"])
    words = [f"--option {shlex.quote(f'{name}={_written(value)}')}" for name, value in options.items()]
    command = " ".join(["hf-posenc patch MODEL", shlex.quote(encoding["type"]), *words, "--output-dir FOLDER"])
    return f"hf_posenc.patch(model, {given})\n# or\n# {command}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
