"""The Gradio components that show encodings and models. Methods return updates by component."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from hf_posenc.diagnostics.registry import page_figures
from hf_posenc.explorer import encodings, models
from hf_posenc.explorer.budget import Limits, Refused, checked_field
from hf_posenc.explorer.fields import sizes_of
from hf_posenc.explorer.option_fields import Encoding
from hf_posenc.explorer.work import results

NOTHING = "It neither adds vectors nor acts on scores: there is nothing to draw."
Changes = dict[Any, Any]
Left = Callable[[], bool]
"""Returns whether the visitor who waits for a result has left."""


class Section:
    """An error message, and figures with captions. Figures without a picture are hidden."""

    def __init__(self) -> None:
        self.problem = gr.Markdown(visible=False, elem_classes="problem")
        self.figures: dict[str, tuple[Any, Any]] = {}
        self.parts: list[Any] = [self.problem]

    def add(self, name: str, caption: str | None) -> None:
        with gr.Accordion(caption, visible=False) as frame:
            self.figures[name] = frame, gr.Plot(label=caption, show_label=False)
        self.parts += self.figures[name]

    def says(self, words: Any = "") -> Changes:
        return {self.problem: gr.update(value=str(words), visible=bool(str(words)))}

    def draws(self, pictures: Mapping[str, str | None]) -> Changes:
        """pictures: figure name -> data URL, or None to hide the figure."""
        changes: Changes = {}
        for name, picture in pictures.items():
            frame, plot = self.figures[name]
            changes[frame] = gr.update(visible=picture is not None)
            changes[plot] = None if picture is None else PlotData(type="matplotlib", plot=picture)
        return changes


class OfEncoding(Section):
    """Figures, numbers, facts, and code of one encoding.

    without: names of figures to omit.
    """

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        super().__init__()
        with gr.Column() as self.rest:
            self.facts = gr.Markdown()
            for name, figure in page_figures("vectors", "scores").items():
                if name not in without:
                    self.add(name, figure.caption)
            with gr.Accordion("In numbers", open=False):
                self.numbers = gr.Textbox(show_label=False, lines=8, max_lines=24, elem_classes="numbers")
            with gr.Accordion("In a model"):
                self.code = gr.Code(language="python", show_label=False, interactive=False, lines=1)
        self.parts += [self.rest, self.facts, self.numbers, self.code]

    def changes(self, limits: Limits, left: Left, encoding: Encoding, dark: bool, *fields: Any) -> Iterator[Changes]:
        try:
            given = _checked(encoding), sizes_of(*fields), dark, limits.drawing
            for found in results(encodings.shown, *given, budget=limits.drawing, left=left):
                texts = {self.facts: found["facts"], self.numbers: found["numbers"], self.code: found["code"]}
                pictures = {name: found["figures"].get(name) for name in self.figures}
                words = "" if found["figures"] else NOTHING
                yield {self.rest: gr.update(visible=True), **texts, **self.draws(pictures), **self.says(words)}
        except Refused as refused:
            yield {self.rest: gr.update(visible=False)} | self.says(refused)


class Decays(Section):
    """One figure that compares encodings by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.add("decay", "By distance, side by side")

    def changes(
        self, limits: Limits, left: Left, one: Encoding, other: Encoding, dark: bool, *fields: Any
    ) -> Iterator[Changes]:
        try:
            given = [_checked(one), _checked(other)], sizes_of(*fields), dark, limits.drawing
            for picture in results(encodings.compared, *given, budget=limits.drawing, left=left):
                yield self.draws({"decay": picture}) | self.says()
        except Refused as refused:
            yield self.draws({"decay": None}) | self.says(refused)


class OfModels(Section):
    """Reports, figures, and numbers of one or two models."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = gr.Textbox(label="How they know word order", visible=False, lines=3, elem_classes="reports")
        for name, figure in {**page_figures("model"), **page_figures("texts")}.items():
            if figure.several:
                self.add(name, figure.caption)
            else:
                self.add(f"{name} 0", figure.caption)
                self.add(f"{name} 1", f"{figure.caption}: the other model")
        self.numbers = gr.Textbox(label="In numbers", visible=False, lines=12, max_lines=40, elem_classes="numbers")
        self.parts += [self.reports, self.numbers]

    def changes(
        self,
        limits: Limits,
        left: Left,
        name: str,
        other: str | None,
        encoding: Encoding | None,
        texts: str,
        dark: bool,
    ) -> Iterator[Changes]:
        """Yield each result as soon as it is measured.

        other: a second model, or None.
        encoding: a second encoding to measure the same model with, or None.
        """
        hidden = {part: gr.update(visible=False) for part in (self.reports, self.numbers)}
        yield hidden | self.draws(dict.fromkeys(self.figures)) | self.says()
        try:
            names = [checked_field("The model", each) for each in ([name] if other is None else [name, other])]
            given = names, encoding and _checked(encoding), texts, dark, limits
            for what, found in results(models.shown, *given, budget=limits.model, left=left):
                if what in self.figures:
                    yield self.draws({what: found})
                else:
                    yield {getattr(self, what): gr.update(value=found, visible=True)}
        except Refused as refused:
            yield self.says(refused)


def _checked(encoding: Encoding) -> Encoding:
    return encoding | {"type": checked_field("The encoding", encoding["type"])}
