"""The registry of diagnostics and figures.

A file that registers its functions here needs nothing else: `hf_posenc.diagnostics` and `hf_posenc.plots` have them by their
names, each figure is a command of `hf-posenc plot`, and `hf-posenc explore` shows those that are marked for its page.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from hf_posenc.encodings import PositionEncoding

Function = TypeVar("Function", bound=Callable[..., Any])
Measured = Literal["vectors", "encoding", "model", "texts"]
"""What a diagnostic measures: an encoding that adds vectors, any encoding, a model, or a model on texts."""
Drawn = Literal["vectors", "scores", "record", "model", "texts"]
"""What a figure draws: the vectors or scores of an encoding, a record of a script, or the results of a diagnostic of models."""


@dataclass(frozen=True)
class Diagnostic:
    """A function of `hf_posenc.diagnostics`.

    measure: `(encoding, length, **sizes)`, with `quantity=` unless it needs vectors; `(model, *, length)`; or
        `(model, texts, *, tokenizer, length)`.
    on_page: whether the page shows its numbers, and its figure if it has one.
    """

    measure: Callable[..., Any]
    needs: Measured
    on_page: bool


@dataclass(frozen=True)
class Figure:
    """A function of `hf_posenc.plots`.

    draw: `(subject, *, dark, path, **options)`; its public name is without "draw_". The first paragraph of its docstring is the
        help text of its command. Arguments with a `Help` are options of the command. The page sets those that are sizes.
    example: the arguments of the command in its example.
    caption: its heading on the page; without one, the page doesn't show it.
    measure: the diagnostic whose results it draws.
    settings: arguments of `measure`, where figures have other defaults.
    """

    draw: Callable[..., Any]
    needs: Drawn | None
    example: str
    caption: str | None
    measure: Callable[..., Any] | None
    settings: dict[str, Any]

    @property
    def subject(self) -> inspect.Parameter | None:
        """The positional argument: an `encoding`, `encodings`, a `record`, a `result`, or `results` by name."""
        first = next(iter(inspect.signature(self.draw).parameters.values()))
        return None if first.kind is first.KEYWORD_ONLY else first

    @property
    def several(self) -> bool:
        """Whether it draws several encodings or results side by side."""
        return self.subject is not None and self.subject.name.endswith("s")


@dataclass(frozen=True)
class Help:
    """What a command says about an argument, within Annotated. default: the words for None."""

    text: str
    default: str | None = None


DIAGNOSTICS: dict[str, Diagnostic] = {}
FIGURES: dict[str, Figure] = {}


def page_figures(*needs: str) -> dict[str, Figure]:
    """The figures on the page that draw one of these, by name."""
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
    """Register a function of `hf_posenc.diagnostics`, see `Diagnostic`."""

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
    """Register a function of `hf_posenc.plots`, see `Figure`. of: a diagnostic of models, or what else it draws."""

    def register(draw: Function) -> Function:
        measure = of if callable(of) else None
        needs: Any = DIAGNOSTICS[measure.__name__].needs if measure else of
        draw.__name__ = draw.__qualname__ = draw.__name__.removeprefix("draw_")
        draw.__module__ = "hf_posenc.plots"
        FIGURES[draw.__name__] = Figure(draw, needs, example, caption, measure, settings)
        return draw

    return register
