"""What the page shows of encodings: figures, facts, numbers, and the code that puts them into a model."""

import base64
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_posenc import diagnostics, plots
from hf_posenc.diagnostics.encoding_input import ON_SCORES
from hf_posenc.encodings import at_most, canonical, catalog, encoding_class, options_of
from hf_posenc.explorer.budget import Budget
from hf_posenc.explorer.forms import Encoding
from hf_posenc.plots.drawn import label

FIGURES = ("decay", "bias", "vectors", "waves", "similarity")
"""The kinds of figures, as `hf_posenc.plots` names them, in the order in which they are shown."""
BYTES = 64
"""The memory that a drawing reserves for each value of an encoding: three copies in float32, the rest in float64."""
LARGEST_MAP = 48
"""Number of positions of the maps of heads at most: more can't be told apart on a page."""


@dataclass(frozen=True)
class Sizes:
    """Those with which encodings are built. causal: None for what is usual of the encoding."""

    length: int = 64
    hidden_size: int = 128
    num_attention_heads: int = 8
    causal: bool | None = None

    def given(self) -> dict[str, Any]:
        """As keywords of `hf_posenc.diagnostics`."""
        sizes = {"hidden_size": self.hidden_size, "num_attention_heads": self.num_attention_heads}
        return sizes if self.causal is None else sizes | {"causal": self.causal}


def ways(encoding: Encoding) -> tuple[bool, bool]:
    """Whether an encoding adds vectors to inputs, and whether it acts on scores."""
    given = canonical(encoding)
    verbs = encoding_class(given["type"]).mechanisms(options_of(given))
    return "embed" in verbs, not ON_SCORES.isdisjoint(verbs)


def shown(encoding: Encoding, sizes: Sizes, dark: bool, budget: Budget) -> Iterator[dict[str, Any]]:
    """One dict: what the page shows of an encoding. "figures" are data URLs.

    Raises ValueError for an encoding, an option or a size that isn't allowed, before anything larger than the budget is built.
    """
    with at_most(budget.memory // BYTES):
        drawn = {name: picture(figure) for name, figure in figures(encoding, sizes, dark).items()}
        yield {"figures": drawn, "facts": facts(encoding), "numbers": numbers(encoding, sizes), "code": code(encoding)}


def compared(encodings: list[Encoding], sizes: Sizes, dark: bool, budget: Budget) -> Iterator[str | None]:
    """One figure, as a data URL: `decays`, with the errors of `shown`."""
    with at_most(budget.memory // BYTES):
        figure = decays(encodings, sizes, dark)
        yield None if figure is None else picture(figure)


def picture(figure: Any) -> str:
    """A figure as a PNG in a data URL."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def figures(encoding: Encoding, sizes: Sizes, dark: bool = False) -> dict[str, Any]:
    """Name -> figure, of those of FIGURES that the encoding has: none where it neither adds vectors nor acts on scores.

    Raises ValueError for an encoding, an option or a size that there isn't.
    """
    vectors, scores = ways(encoding)
    made: dict[str, Any] = {}
    if vectors:
        given: Any = {"length": sizes.length, "hidden_size": sizes.hidden_size, "dark": dark}
        made |= {
            "vectors": plots.vectors(encoding, **given),
            "waves": plots.waves(encoding, **given),
            "similarity": plots.similarity(encoding, **given),
        }
    if scores:
        length = min(LARGEST_MAP, sizes.length)
        found = diagnostics.similarity(encoding, length, quantity="scores", **sizes.given())
        made["bias"] = plots.bias(replace(found, encoding=label(encoding)), dark=dark)
        made["decay"] = decays([encoding], sizes, dark)
    return made


def decays(encodings: list[Encoding], sizes: Sizes, dark: bool = False) -> Any:
    """Side by side what the encodings make of distance: those that act on scores there, others by the dot products of their
    vectors. None where no encoding does either."""
    found = []
    for encoding in encodings:
        vectors, scores = ways(encoding)
        if vectors or scores:
            result = diagnostics.decay(encoding, sizes.length, quantity="scores" if scores else "vectors", **sizes.given())
            found.append(replace(result, encoding=label(encoding)))
    return plots.decay(found, dark=dark) if found else None


def numbers(encoding: Encoding, sizes: Sizes) -> str:
    """What `hf_posenc.diagnostics` measures."""
    vectors, scores = ways(encoding)
    found: list[Any] = []
    for quantity, acts in (("vectors", vectors), ("scores", scores)):
        if acts:
            given: Any = {"quantity": quantity, **sizes.given()}
            found.append(diagnostics.properties(encoding, sizes.length, **given))
            found.append(diagnostics.uniqueness(encoding, sizes.length, **given))
    if vectors:
        found.append(diagnostics.shift_error(encoding, sizes.length, **sizes.given()))
    return "\n\n".join(map(str, found))


def facts(encoding: Encoding) -> str:
    """What it is, and its papers, in Markdown."""
    kind = encoding_class(canonical(encoding)["type"])
    entry = catalog.entry(kind)
    said = [f"{heading}: {fact}" for heading, fact in entry.facts().items()] + [f"<{paper}>" for paper in entry.papers]
    return f"### {entry.title or kind.type}\n{' · '.join(said)}"


def code(encoding: Encoding) -> str:
    """The call that puts it into a model, and the same as a command."""
    options = {name: value for name, value in encoding.items() if name != "type"}
    given = repr({"type": encoding["type"], **options} if options else encoding["type"])
    words = [f"--option {shlex.quote(f'{name}={_written(value)}')}" for name, value in options.items()]
    command = " ".join(["hf-posenc patch MODEL", shlex.quote(encoding["type"]), *words, "--output-dir FOLDER"])
    return f"hf_posenc.patch(model, {given})\n# or\n# {command}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
