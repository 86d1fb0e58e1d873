"""Vision-language models whose parent passes positions in time, height, and width to its text model."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, DynamicCache

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import CACHE, LLAMA, first, randomize, randomize_encoding

IMAGE, START, END = 60, 58, 57


TEXT = LLAMA | dict(vocab_size=61, head_dim=8, max_position_embeddings=64, eos_token_id=None)


SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}


VISION = dict(depth=1, hidden_size=32, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)


OUT = dict(out_hidden_size=32, intermediate_size=32)


TOKENS = dict(image_token_id=IMAGE, video_token_id=59, vision_start_token_id=START, vision_end_token_id=END)


FAMILIES = {
    "qwen2_vl": (TEXT, VISION | dict(embed_dim=32, mlp_ratio=1), TOKENS),
    "qwen2_5_vl": (TEXT, VISION | OUT | dict(window_size=16, fullatt_block_indexes=[0]), TOKENS),
    "qwen3_vl": (TEXT, VISION | OUT | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]), TOKENS),
    "glm4v": (
        TEXT,
        VISION | OUT | dict(image_size=16),
        dict(image_token_id=IMAGE, video_token_id=59, image_start_token_id=START, image_end_token_id=END),
    ),
    "qwen3_5": (
        TEXT
        | dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2, linear_num_key_heads=2)
        | dict(linear_key_head_dim=8, linear_value_head_dim=8),
        VISION | OUT | dict(num_position_embeddings=16),
        TOKENS,
    ),
}


every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ("qwen2_vl", "qwen3_vl") else pytest.mark.slow) for name in FAMILIES]
)
ENCODING = "sinusoidal+rope+alibi+shaw"
LENGTH = 12
"""The number of tokens in each text, four of which represent an image."""


def build(family):
    text, vision, ids = FAMILIES[family]
    config = CONFIG_MAPPING[family](text_config=text | {"rope_parameters": SECTIONS}, vision_config=vision, **ids)
    torch.manual_seed(0)
    return randomize(AutoModelForImageTextToText.from_config(config).eval())


def patched(family, encoding=ENCODING):
    return randomize_encoding(hf_posenc.patch(build(family), encoding, submodel="language_model"))


def inputs(more=None, left=0):
    """Two texts with one image each, optionally with more tokens after them and left padding."""
    ids = torch.tensor([[5, 6, START, *[IMAGE] * 4, END, 7, 8, 9, 10], [11, 6, START, *[IMAGE] * 4, END, 12, 13, 14, 15]])
    ids = ids if more is None else torch.cat([ids, more], dim=1)
    ids, mask = torch.nn.functional.pad(ids, (left, 0)), torch.nn.functional.pad(torch.ones_like(ids), (left, 0))
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([[1, 4, 4]] * 2)
    types = (ids == IMAGE).int()
    return dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=types, pixel_values=pixels, image_grid_thw=grid)


@every_family
@torch.no_grad()
def test_tokens_are_counted(family, tmp_path):
    """The text model gives the same output as for positions 0, 1, 2, and so on, whatever the parent computes from the image's
    grid.
    """
    stock, model, given = build(family), patched(family), {}
    text = model.model.language_model
    hook = text.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    whole = first(model(**inputs()))
    hook.remove()
    assert given["position_ids"].shape == (3, 2, LENGTH)
    assert not torch.equal(given["position_ids"][1], given["position_ids"][2])
    arguments = {name: value for name, value in given.items() if name not in ("position_ids", CACHE)}
    alone = first(text(**arguments, position_ids=torch.arange(LENGTH)[None]))
    assert_close(model.lm_head(alone), whole)
    assert_apart(model.lm_head(first(text(**arguments, position_ids=3 * torch.arange(LENGTH)[None]))), whole)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert_equal(first(again(**inputs())), whole)
    assert_equal(first(hf_posenc.unpatch(again)(**inputs())), first(stock(**inputs())))


@every_family
@pytest.mark.parametrize("encoding", [ENCODING, "none"])
@torch.no_grad()
def test_generate(family, encoding):
    """Generation with images, after padding, and from a continued cache equals a full forward pass."""
    model = patched(family, encoding)
    settings = dict(do_sample=False, eos_token_id=None, suppress_tokens=[IMAGE, 59, START, END], max_new_tokens=3)
    settings |= dict(return_dict_in_generate=True, output_logits=True)
    for implementation in ("static", "dynamic"):
        made = model.generate(**inputs(), cache_implementation=implementation, **settings)
        logits = torch.stack(made.logits, 1)
        assert_close(logits, first(model(**inputs(made.sequences[:, LENGTH:])))[:, LENGTH - 1 : -1])
        behind = model.generate(**inputs(left=3), cache_implementation=implementation, **settings)
        assert_close(torch.stack(behind.logits, 1), logits)
    ids = torch.cat([made.sequences, torch.tensor([[4], [5]])], dim=1)
    mask = torch.ones_like(ids)
    more = model.generate(input_ids=ids, attention_mask=mask, **{CACHE: made.past_key_values}, **settings)
    whole = first(model(**inputs(more.sequences[:, LENGTH:])))
    assert_close(torch.stack(more.logits, 1), whole[:, ids.shape[1] - 1 : -1])


# Explicit position_ids for the text model


@torch.no_grad()
def test_rows_of_ids():
    """A row of text positions takes precedence. Rows of a grid don't give text positions, so tokens are counted."""
    text, ids = patched("qwen2_vl", "sinusoidal+shaw").model.language_model, torch.arange(3, 12)[None]
    grid = torch.tensor([0, 1, 2, 2, 2, 2, 4, 5, 6]).expand(3, 1, -1)
    plain = first(text(ids))
    assert_close(first(text(ids, position_ids=grid)), plain)
    jumping = torch.tensor([[0, 1, 2, 7, 8, 9, 10, 11, 12]])
    expected = first(text(ids, position_ids=jumping))
    assert_apart(expected, plain)
    assert_close(first(text(ids, position_ids=torch.cat([jumping[None], grid]))), expected)


@torch.no_grad()
def test_packed_texts():
    """Two packed texts need the row of text positions, which separates them as in the original model."""
    text, ids = patched("qwen2_vl", "rope+shaw").model.language_model, torch.arange(3, 12)[None]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    apart = torch.cat([first(text(ids[:, :4])), first(text(ids[:, 4:]))], dim=1)
    assert_close(first(text(ids, position_ids=packed.expand(4, 1, -1), use_cache=False)), apart)
    with pytest.raises(ValueError, match=r"shape \(3, 1, 9\).*\[batch, length\].*\[4, batch, length\]"):
        text(ids, position_ids=packed.expand(3, 1, -1), use_cache=False)


@torch.no_grad()
def test_chunks_of_text_behind_an_image():
    """An image's grid is shorter than its tokens, so the parent shifts later positions. This shift changes nothing."""
    model = patched("qwen2_vl", "sinusoidal+alibi")
    given, cache = inputs(), DynamicCache(config=model.config.text_config)
    whole = first(model(**given))
    start = {name: value[:, :9] if value.shape[:2] == (2, LENGTH) else value for name, value in given.items()}
    first(model(**start, **{CACHE: cache}, use_cache=True))
    rest = first(model(given["input_ids"][:, 9:], **{CACHE: cache}, use_cache=True))
    assert_close(rest, whole[:, 9:])
