"""The components of the page in Gradio that show encodings and models. Methods return what changes, by component."""

from collections.abc import Callable, Iterator
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
"""Whether the visitor who waits for a result has left."""


class Problem:
    """A place for the words of an error."""

    def __init__(self) -> None:
        self.place = gr.Markdown(visible=False, elem_classes="problem")

    def says(self, words: Any = "") -> Changes:
        return {self.place: gr.update(value=str(words), visible=bool(str(words)))}


class Figure:
    """A figure beneath its caption; nothing where there is none."""

    def __init__(self, caption: str | None) -> None:
        with gr.Accordion(caption, visible=False) as self.frame:
            self.plot = gr.Plot(label=caption, show_label=False)
        self.parts = [self.frame, self.plot]

    def shows(self, picture: str | None = None) -> Changes:
        """picture: a data URL."""
        plot = None if picture is None else PlotData(type="matplotlib", plot=picture)
        return {self.frame: gr.update(visible=picture is not None), self.plot: plot}


class OfEncoding:
    """Figures, numbers, facts and code of one encoding. without: figures that are left out."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.problem = Problem()
        with gr.Column() as self.rest:
            self.facts = gr.Markdown()
            self.figures = {
                name: Figure(each.caption) for name, each in page_figures("vectors", "scores").items() if name not in without
            }
            with gr.Accordion("In numbers", open=False):
                self.numbers = gr.Textbox(show_label=False, lines=8, max_lines=24, elem_classes="numbers")
            with gr.Accordion("In a model"):
                self.code = gr.Code(language="python", show_label=False, interactive=False, lines=1)
        self.parts = [self.problem.place, self.rest, self.facts, self.numbers, self.code]
        self.parts += [part for figure in self.figures.values() for part in figure.parts]

    def changes(self, limits: Limits, left: Left, encoding: Encoding, dark: bool, *fields: Any) -> Iterator[Changes]:
        try:
            given = _checked(encoding), sizes_of(*fields), dark, limits.drawing
            for found in results(encodings.shown, *given, budget=limits.drawing, left=left):
                shown: Changes = {
                    self.rest: gr.update(visible=True),
                    self.facts: found["facts"],
                    self.numbers: found["numbers"],
                    self.code: found["code"],
                }
                for name, figure in self.figures.items():
                    shown |= figure.shows(found["figures"].get(name))
                yield shown | self.problem.says("" if found["figures"] else NOTHING)
        except Refused as refused:
            yield {self.rest: gr.update(visible=False)} | self.problem.says(refused)


class Decays:
    """Several encodings by distance, in one figure."""

    def __init__(self) -> None:
        self.problem, self.figure = Problem(), Figure("By distance, side by side")
        self.parts = [self.problem.place, *self.figure.parts]

    def changes(
        self, limits: Limits, left: Left, one: Encoding, other: Encoding, dark: bool, *fields: Any
    ) -> Iterator[Changes]:
        try:
            given = [_checked(one), _checked(other)], sizes_of(*fields), dark, limits.drawing
            for picture in results(encodings.compared, *given, budget=limits.drawing, left=left):
                yield self.figure.shows(picture) | self.problem.says()
        except Refused as refused:
            yield self.figure.shows() | self.problem.says(refused)


class OfModels:
    """Reports, figures and numbers of a model and of what is beside it."""

    def __init__(self) -> None:
        self.problem = Problem()
        self.reports = gr.Textbox(label="How they know word order", visible=False, lines=3, elem_classes="reports")
        self.figures = {}
        for name, each in {**page_figures("model"), **page_figures("texts")}.items():
            if each.several:
                self.figures[name] = Figure(each.caption)
            else:
                self.figures[f"{name} 0"] = Figure(each.caption)
                self.figures[f"{name} 1"] = Figure(f"{each.caption}: the other model")
        self.numbers = gr.Textbox(label="In numbers", visible=False, lines=12, max_lines=40, elem_classes="numbers")
        self.parts = [self.problem.place, self.reports, self.numbers]
        self.parts += [part for figure in self.figures.values() for part in figure.parts]

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
        """As they are measured. other: the model beside it; encoding: the one that the same model has beside it; or None."""
        nothing = {self.reports: gr.update(visible=False), self.numbers: gr.update(visible=False)} | self.problem.says()
        for figure in self.figures.values():
            nothing |= figure.shows()
        yield nothing
        try:
            names = [checked_field("The model", each) for each in ([name] if other is None else [name, other])]
            given = names, encoding and _checked(encoding), texts, dark, limits
            for what, found in results(models.shown, *given, budget=limits.model, left=left):
                if what in self.figures:
                    yield self.figures[what].shows(found)
                else:
                    yield {getattr(self, what): gr.update(value=found, visible=True)}
        except Refused as refused:
            yield self.problem.says(refused)


def _checked(encoding: Encoding) -> Encoding:
    return encoding | {"type": checked_field("The encoding", encoding["type"])}
