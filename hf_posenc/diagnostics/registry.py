"""The registry of diagnostics and figures.

Functions that a file registers here become available in `hf_posenc.diagnostics` and `hf_posenc.plots`. Each figure becomes a
command of `hf-posenc plot`, and `hf-posenc explore` shows those that are marked for its page.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from hf_posenc.encodings import PositionEncoding

Function = TypeVar("Function", bound=Callable[..., Any])
Measured = Literal["vectors", "encoding", "model", "texts"]
"""The input of a diagnostic: an encoding that adds vectors, any encoding, a model, or a model with texts."""
Drawn = Literal["vectors", "scores", "record", "model", "texts"]
"""The input of a figure: vectors or scores of an encoding, a record of a script, or results of a diagnostic of models."""


@dataclass(frozen=True)
class Diagnostic:
    """A function of `hf_posenc.diagnostics`.

    measure: a function `(encoding, length, **sizes)`, with `quantity=` unless it needs vectors, `(model, *, length)`, or
        `(model, texts, *, tokenizer, length)`.
    on_page: whether the page shows its numbers, and its figure if it has one.
    """

    measure: Callable[..., Any]
    needs: Measured
    on_page: bool


@dataclass(frozen=True)
class Figure:
    """A function of `hf_posenc.plots`.

    draw: a function `(subject, *, dark, path, **options)`. Its public name omits "draw_". The first paragraph of its docstring
        is the help text of its command. Arguments with a `Help` are options of the command. The page sets size arguments.
    example: arguments of the command in its example.
    caption: heading on the page. Without one, the page doesn't show the figure.
    measure: the diagnostic whose results it draws.
    settings: arguments of `measure` for which the figure has other defaults.
    """

    draw: Callable[..., Any]
    needs: Drawn | None
    example: str
    caption: str | None
    measure: Callable[..., Any] | None
    settings: dict[str, Any]

    @property
    def subject(self) -> inspect.Parameter | None:
        """The positional argument, named `encoding`, `encodings`, `record`, `result`, or `results`."""
        first = next(iter(inspect.signature(self.draw).parameters.values()))
        return None if first.kind is first.KEYWORD_ONLY else first

    @property
    def several(self) -> bool:
        """Whether the figure compares several encodings or results."""
        return self.subject is not None and self.subject.name.endswith("s")


@dataclass(frozen=True)
class Help:
    """The help text of an argument, used in Annotated. default: the text for a default of None."""

    text: str
    default: str | None = None


DIAGNOSTICS: dict[str, Diagnostic] = {}
FIGURES: dict[str, Figure] = {}


def page_figures(*needs: str) -> dict[str, Figure]:
    """The figures on the page that draw one of these inputs, by name."""
    return {name: each for name, each in FIGURES.items() if each.caption and each.needs in needs}


Encoding = str | Mapping[str, Any] | PositionEncoding
"""A name, a dict `{"type": name, **options}`, or a module, such as that of a trained model."""
Path = str | os.PathLike[str] | None
Dark = Annotated[bool, Help("Colors for a dark page.")]
Length = Annotated[int, Help("Number of positions.")]
HiddenSize = Annotated[int, Help("Number of features of a vector.")]
NumHeads = Annotated[int, Help("Number of attention heads.")]
Causal = Annotated[bool | None, Help("Whether queries see no later keys.", "if the encoding is for decoders only")]
Layers = Annotated[Sequence[int] | None, Help("A layer, from 0. Can be repeated.", "up to 4")]
TextLength = Annotated[int, Help("Maximum length of a text, in tokens.")]


def diagnostic(needs: Measured, *, on_page: bool = False) -> Callable[[Function], Function]:
    """Register a function of `hf_posenc.diagnostics` (see `Diagnostic`)."""

    def register(measure: Function) -> Function:
        DIAGNOSTICS[measure.__name__] = Diagnostic(measure, needs, on_page)
        return measure

    return register


def figure(
    of: Callable[..., Any] | Literal["vectors", "scores", "record"] | None,
    *,
    example: str = "",
    caption: str | None = None,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Register a function of `hf_posenc.plots` (see `Figure`). of: a diagnostic of models, or another input that it draws."""

    def register(draw: Function) -> Function:
        measure = of if callable(of) else None
        needs: Any = DIAGNOSTICS[measure.__name__].needs if measure else of
        draw.__name__ = draw.__qualname__ = draw.__name__.removeprefix("draw_")
        draw.__module__ = "hf_posenc.plots"
        FIGURES[draw.__name__] = Figure(draw, needs, example, caption, measure, settings)
        return draw

    return register
