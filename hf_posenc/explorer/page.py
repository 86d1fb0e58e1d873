"""The layout of the Gradio page, with tabs for one encoding, two encodings, and models."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from hf_posenc.explorer.budget import MAX_CHARACTERS, MAX_WRITTEN, Limits
from hf_posenc.explorer.components import Changes, Decays, Left, OfEncoding, OfModels
from hf_posenc.explorer.fields import changes, picker, sizes
from hf_posenc.explorer.gate import Visitors

TITLE = """# Position encodings
What they add to the inputs of a model, what they do to its attention, and what a trained model does with its own.
"""
NOTHING, SAME, ANOTHER = "nothing", "the same model with another encoding", "another model"
TEXTS = """\
The ship left the harbour before dawn, and nobody on the pier could say whether it would come back before the winter storms.
When the old clock in the tower struck nine, the market was already full of people who had come to buy bread and wool.
A letter that was written in haste is often read at leisure, and what it meant to hide is the first thing that is seen.
"""
DRAWINGS: dict[str, Any] = {"concurrency_id": "drawings", "concurrency_limit": 2, "api_visibility": "private"}
MEASUREMENTS: dict[str, Any] = {"concurrency_id": "measurements", "concurrency_limit": 1, "api_visibility": "private"}
"""How many requests run concurrently. Drawings don't wait for measurements, which take longer."""
WAITING = 64
"""The maximum number of requests in the queue."""
IS_DARK = "() => document.body.classList.contains('dark')"


def page(limits: Limits | None = None, visitors: Visitors | None = None) -> gr.Blocks:
    """Build the page without serving it.

    Args:
        limits: limits on requests. Default: `Limits()`.
        visitors: the connected visitors, updated by `Gate`. If given, requests of visitors who leave are stopped.
    """
    given = limits or Limits(), visitors
    with gr.Blocks(title="Position encodings", analytics_enabled=False) as made:
        with gr.Row():
            with gr.Column(scale=6):
                gr.Markdown(TITLE)
            with gr.Column(scale=1, min_width=150):
                dark = gr.Checkbox(label="Dark figures", container=False, elem_id="dark")
        with gr.Tab("An encoding"):
            _one(made.load, dark, *given)
        with gr.Tab("Two encodings") as two:
            _two(two.select, dark, *given)
        with gr.Tab("A model"):
            _of_models(dark, *given)
        made.load(None, None, dark, js=IS_DARK)
    return made.queue(api_open=False, max_size=WAITING, default_concurrency_limit=8)


def _left(visitors: Visitors | None, request: gr.Request) -> Left:
    return visitors.left(request.session_hash) if visitors else lambda: False


def _one(opened: Any, dark: gr.Checkbox, limits: Limits, visitors: Visitors | None) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            encoding, fields = picker("Encoding", "sinusoidal"), sizes()
        with gr.Column(scale=3):
            shown = OfEncoding()
    events = [opened, encoding.change, dark.change, *changes(fields)]
    _redraw(events, shown, [encoding, dark, *fields], limits, visitors)


def _two(opened: Any, dark: gr.Checkbox, limits: Limits, visitors: Visitors | None) -> None:
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
    _redraw([*events, *(each.change for each in pickers)], decays, [*pickers, dark, *fields], limits, visitors)
    for encoding, parts in zip(pickers, shown, strict=True):
        _redraw([*events, encoding.change], parts, [encoding, dark, *fields], limits, visitors)


def _redraw(
    events: list[Any], shown: OfEncoding | Decays, inputs: list[Any], limits: Limits, visitors: Visitors | None
) -> None:
    """Redraw on these events. If several occur during a drawing, only the last one is drawn afterwards."""

    def draw(request: gr.Request, *values: Any) -> Iterator[Changes]:
        yield from shown.changes(limits, _left(visitors, request), *values)

    gr.on(events, draw, inputs, shown.parts, trigger_mode="always_last", show_progress="minimal", **DRAWINGS)


def _of_models(dark: gr.Checkbox, limits: Limits, visitors: Visitors | None) -> None:
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            place = "A Hub ID" if limits.hub_only else "A local path or a Hub ID"
            name = gr.Textbox(label="Model", info=place, elem_id="model", max_lines=1, max_length=MAX_WRITTEN)
            comparison = gr.Radio([NOTHING, SAME, ANOTHER], value=NOTHING, label="Compare with", elem_id="comparison")
            with gr.Column(visible=False) as with_encoding:
                encoding = picker("Its other encoding", "alibi")
                gr.Markdown("As `patch` sets it, without training. A learned encoding has its initial values.")
            other = gr.Textbox(label="The other model", visible=False, elem_id="other", max_lines=1, max_length=MAX_WRITTEN)
            texts = gr.Textbox(TEXTS, label="Texts, one in each line", lines=6, max_lines=12, max_length=MAX_CHARACTERS)
            start = gr.Button("Measure", variant="primary")
        with gr.Column(scale=3):
            shown = OfModels()

    def measure(
        request: gr.Request, name: str, comparison: str, encoding: dict[str, Any], other: str, texts: str, dark: bool
    ) -> Iterator[Changes]:
        given = name, other if comparison == ANOTHER else None, encoding if comparison == SAME else None, texts, dark
        yield from shown.changes(limits, _left(visitors, request), *given)

    comparison.change(
        lambda said: (gr.update(visible=said == SAME), gr.update(visible=said == ANOTHER)),
        comparison,
        [with_encoding, other],
        api_visibility="private",
    )
    inputs = [name, comparison, encoding, other, texts, dark]
    gr.on([start.click, name.submit], measure, inputs, shown.parts, **MEASUREMENTS)
