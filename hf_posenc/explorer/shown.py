"""What the page shows in Gradio, of encodings and of models. Functions return what changes, by component."""

from collections.abc import Iterator
from typing import Any

import gradio as gr
from huggingface_hub.errors import HTTPError

from hf_posenc.explorer import encodings, models
from hf_posenc.explorer.fields import sizes_of
from hf_posenc.explorer.forms import Encoding

EXPECTED = (ValueError, OSError, ImportError, HTTPError)
"""Raised by what a reader wrote, or by an unreachable Hub: the page says it. Anything else is a bug."""
CAPTIONS = {
    "decay": "By distance",
    "bias": "Scores by query and key",
    "vectors": "Vectors",
    "waves": "Some columns of the vectors",
    "similarity": "Dot products of the vectors",
}
NOTHING = "It neither adds vectors nor acts on scores: there is nothing to draw."
Changes = dict[Any, Any]


class Problem:
    """A place for the words of an error."""

    def __init__(self) -> None:
        self.place = gr.Markdown(visible=False, elem_classes="problem")

    def says(self, words: Any = "") -> Changes:
        return {self.place: gr.update(value=str(words), visible=bool(str(words)))}


class Figure:
    """A figure beneath its caption; nothing where there is none."""

    def __init__(self, caption: str) -> None:
        with gr.Accordion(caption, visible=False) as self.frame:
            self.plot = gr.Plot(label=caption, show_label=False)
        self.parts = [self.frame, self.plot]

    def shows(self, figure: Any = None) -> Changes:
        return {self.frame: gr.update(visible=figure is not None), self.plot: figure}


class OfEncoding:
    """Figures, numbers, facts and code of one encoding. without: figures that are left out."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.problem = Problem()
        with gr.Column() as self.rest:
            self.facts = gr.Markdown()
            self.figures = {name: Figure(CAPTIONS[name]) for name in encodings.FIGURES if name not in without}
            with gr.Accordion("In numbers", open=False):
                self.numbers = gr.Textbox(show_label=False, lines=8, max_lines=24, elem_classes="numbers")
            with gr.Accordion("In a model"):
                self.code = gr.Code(language="python", show_label=False, interactive=False, lines=1)
        self.parts = [self.problem.place, self.rest, self.facts, self.numbers, self.code]
        self.parts += [part for figure in self.figures.values() for part in figure.parts]

    def changes(self, encoding: Encoding, dark: bool, *fields: Any) -> Changes:
        sizes = sizes_of(*fields)
        try:
            drawn = encodings.figures(encoding, sizes, dark)
            shown: Changes = {
                self.rest: gr.update(visible=True),
                self.facts: encodings.facts(encoding),
                self.numbers: encodings.numbers(encoding, sizes),
                self.code: encodings.code(encoding),
            }
        except EXPECTED as error:
            return {self.rest: gr.update(visible=False)} | self.problem.says(error)
        for name, figure in self.figures.items():
            shown |= figure.shows(drawn.get(name))
        return shown | self.problem.says("" if drawn else NOTHING)


class Decays:
    """Several encodings by distance, in one figure."""

    def __init__(self) -> None:
        self.problem, self.figure = Problem(), Figure("By distance, side by side")
        self.parts = [self.problem.place, *self.figure.parts]

    def changes(self, one: Encoding, other: Encoding, dark: bool, *fields: Any) -> Changes:
        try:
            figure = encodings.decays([one, other], sizes_of(*fields), dark)
        except EXPECTED as error:
            return self.figure.shows() | self.problem.says(error)
        return self.figure.shows(figure) | self.problem.says()


class OfModels:
    """Reports, figures and numbers of a model and of what is beside it."""

    def __init__(self) -> None:
        self.problem = Problem()
        self.reports = gr.Textbox(label="How they know word order", visible=False, lines=3, elem_classes="reports")
        self.figures = {
            "probing 0": Figure("Attention among identical words, where position alone decides"),
            "probing 1": Figure("Attention among identical words in what is beside it"),
            "attention": Figure("Attention by distance, on the texts"),
            "receptive_field": Figure("How far away the tokens are on which a state depends"),
        }
        self.numbers = gr.Textbox(label="In numbers", visible=False, lines=12, max_lines=40, elem_classes="numbers")
        self.parts = [self.problem.place, self.reports, self.numbers]
        self.parts += [part for figure in self.figures.values() for part in figure.parts]

    def changes(
        self, max_parameters: int, name: str, other: str | None, encoding: Encoding | None, texts: str, dark: bool
    ) -> Iterator[Changes]:
        """As they are measured. other: the model beside it; encoding: the one that the same model has beside it; or None."""
        nothing = {self.reports: gr.update(visible=False), self.numbers: gr.update(visible=False)} | self.problem.says()
        for figure in self.figures.values():
            nothing |= figure.shows()
        yield nothing
        try:
            subjects = [models.load(name, max_parameters)]
            if other is not None:
                subjects.append(models.load(other, max_parameters))
            if encoding is not None:
                subjects.append(models.with_encoding(subjects[0], encoding))
            subjects = models.told_apart(subjects)
            reports = "\n\n".join(f"{each.label}\n{each.report()}" for each in subjects)
            yield {self.reports: gr.update(value=reports, visible=True)}
            lines = [line for line in map(str.strip, texts.splitlines()) if line]
            for what, found in models.measured(subjects, lines, dark):
                if what == "numbers":
                    yield {self.numbers: gr.update(value=found, visible=True)}
                else:
                    yield self.figures[what].shows(found)
        except EXPECTED as error:
            yield self.problem.says(error)
