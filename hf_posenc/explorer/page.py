"""The page in Gradio: a tab for one encoding, one for two of them, one for models."""

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from hf_posenc.explorer.fields import changes, picker, sizes
from hf_posenc.explorer.models import MAX_PARAMETERS
from hf_posenc.explorer.shown import Changes, Decays, OfEncoding, OfModels

TITLE = """# Position encodings
What they add to the inputs of a model, what they do to its attention, and what a trained model makes of its own.
"""
NOTHING, SAME, ANOTHER = "nothing", "the same model with another encoding", "another model"
TEXTS = """\
The ship left the harbour before dawn, and nobody on the pier could say whether it would come back before the winter storms.
When the old clock in the tower struck nine, the market was already full of people who had come to buy bread and wool.
A letter that was written in haste is often read at leisure, and what it meant to hide is the first thing that is seen.
"""
IS_DARK = "() => document.body.classList.contains('dark')"


def page(max_parameters: int = MAX_PARAMETERS) -> gr.Blocks:
    """The page, not yet served. `max_parameters`: of the largest model that it takes."""
    with gr.Blocks(title="Position encodings", analytics_enabled=False) as made:
        with gr.Row():
            with gr.Column(scale=6):
                gr.Markdown(TITLE)
            with gr.Column(scale=1, min_width=150):
                dark = gr.Checkbox(label="Dark figures", container=False, elem_id="dark")
        with gr.Tab("An encoding"):
            _one(made.load, dark)
        with gr.Tab("Two encodings") as two:
            _two(two.select, dark)
        with gr.Tab("A model"):
            _of_models(dark, max_parameters)
        made.load(None, None, dark, js=IS_DARK)
    return made


def _one(opened: Any, dark: gr.Checkbox) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            encoding, fields = picker("Encoding", "sinusoidal"), sizes()
        with gr.Column(scale=3):
            shown = OfEncoding()
    events = [opened, encoding.change, dark.change, *changes(fields)]
    _redraw(events, shown.changes, [encoding, dark, *fields], shown.parts)


def _two(opened: Any, dark: gr.Checkbox) -> None:
    pickers, shown = [], []
    with gr.Row():
        for label, first in (("First", "alibi"), ("Second", "t5")):
            with gr.Column(min_width=280):
                pickers.append(picker(label, first))
    fields, decays = sizes(), Decays()
    with gr.Row():
        for _ in pickers:
            with gr.Column(min_width=280):
                shown.append(OfEncoding(without=("decay",)))
    events = [opened, dark.change, *changes(fields)]
    _redraw([*events, *(each.change for each in pickers)], decays.changes, [*pickers, dark, *fields], decays.parts)
    for encoding, parts in zip(pickers, shown, strict=True):
        _redraw([*events, encoding.change], parts.changes, [encoding, dark, *fields], parts.parts)


def _redraw(events: list[Any], changes: Callable[..., Changes], inputs: list[Any], outputs: list[Any]) -> None:
    """Of several events during a drawing the last one is drawn after it."""
    gr.on(events, changes, inputs, outputs, trigger_mode="always_last", show_progress="minimal", api_visibility="private")


def _of_models(dark: gr.Checkbox, max_parameters: int) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            name = gr.Textbox(label="Model", info="A folder, or an id on the Hub", elem_id="model", max_lines=1)
            beside = gr.Radio([NOTHING, SAME, ANOTHER], value=NOTHING, label="Beside it", elem_id="beside")
            with gr.Column(visible=False) as with_encoding:
                encoding = picker("Its other encoding", "alibi")
                gr.Markdown("Put in as `patch` does it, without training: a learned encoding shows its first values.")
            other = gr.Textbox(label="The other model", visible=False, elem_id="other", max_lines=1)
            texts = gr.Textbox(TEXTS, label="Texts, one in each line", lines=6, max_lines=12)
            start = gr.Button("Measure", variant="primary")
        with gr.Column(scale=3):
            shown = OfModels()

    def measure(name: str, beside: str, encoding: dict[str, Any], other: str, texts: str, dark: bool) -> Iterator[Changes]:
        yield from shown.changes(
            max_parameters, name, other if beside == ANOTHER else None, encoding if beside == SAME else None, texts, dark
        )

    beside.change(
        lambda said: (gr.update(visible=said == SAME), gr.update(visible=said == ANOTHER)),
        beside,
        [with_encoding, other],
        api_visibility="private",
    )
    inputs = [name, beside, encoding, other, texts, dark]
    gr.on([start.click, name.submit], measure, inputs, shown.parts, api_visibility="private")
