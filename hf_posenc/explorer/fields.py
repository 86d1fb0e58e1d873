"""The Gradio fields of the page, for an encoding with its options and for sizes."""

from functools import partial
from typing import Any

import gradio as gr

from hf_posenc.encodings import list_encodings
from hf_posenc.explorer import option_fields
from hf_posenc.explorer.budget import MAX_WRITTEN, checked_field
from hf_posenc.explorer.encodings import Sizes

CAUSAL = {"as usual of the encoding": None, "no, as in an encoder": False, "yes, as in a decoder": True}


def picker(label: str, first: str) -> gr.State:
    """Fields for an encoding and its options. Returns a state with `{"type": name, option: value}`."""
    chosen = gr.State({"type": first})
    name = gr.Dropdown(
        [name for name, kind in list_encodings().items() if kind.axes == 1],  # others are for image patches
        value=first,
        label=label,
        info="Or write several in one: rope+alibi",
        allow_custom_value=True,
        elem_id=f"encoding-{label.lower().replace(' ', '-')}",
    )
    name.change(lambda given: {"type": given if isinstance(given, str) else ""}, name, chosen, api_visibility="private")
    with gr.Accordion("Options", open=False):

        @gr.render(inputs=name)
        def options(given: str | None) -> None:
            try:
                found = option_fields.fields(checked_field("The encoding", given))
            except ValueError:  # The page shows the error in place of the encoding.
                return
            for field in found:
                _option(field, chosen)
            if not found:
                gr.Markdown(f"`{given}` has none.")

    return chosen


def _option(field: option_fields.Field, chosen: gr.State) -> None:
    write = partial(_written, field)
    if field.values:
        default = "" if field.default is None else field.default
        values = [("none", "")] * (field.default is None) + [(str(value), value) for value in field.values]
        choice = gr.Dropdown(values, value=default, label=field.option, interactive=True)
        choice.input(write, [chosen, choice], chosen, trigger_mode="multiple", api_visibility="private")
        return
    box = gr.Textbox(
        label=field.option,
        placeholder="none" if field.default is None else f"{field.default}",
        info=field.allowed,
        max_lines=1,
        max_length=MAX_WRITTEN,
        interactive=True,
    )
    gr.on([box.submit, box.blur], write, [chosen, box], chosen, trigger_mode="multiple", api_visibility="private")


def _written(field: option_fields.Field, encoding: option_fields.Encoding, written: Any) -> option_fields.Encoding:
    try:
        return option_fields.changed(
            encoding, field, checked_field(field.option, written) if isinstance(written, str) else written
        )
    except ValueError as error:
        raise gr.Error(str(error)) from None


def sizes() -> list[Any]:
    """The fields that `sizes_of` reads."""
    with gr.Accordion("Sizes", open=False):
        return [
            gr.Slider(8, 256, value=64, step=8, label="Positions"),
            gr.Slider(16, 1024, value=128, step=16, label="Hidden size"),
            gr.Slider(1, 16, value=8, step=1, label="Attention heads"),
            gr.Radio([*CAUSAL], value=next(iter(CAUSAL)), label="Do queries see earlier keys alone?"),
        ]


def sizes_of(length: int, hidden_size: int, num_attention_heads: int, causal: str) -> Sizes:
    return Sizes(int(length), int(hidden_size), int(num_attention_heads), CAUSAL[causal])


def changes(fields: list[Any]) -> list[Any]:
    """The change events of these fields. For a slider, this is its release event."""
    return [field.release if isinstance(field, gr.Slider) else field.change for field in fields]
