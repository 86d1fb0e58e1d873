"""Attentions over local windows or blocks and global tokens: Longformer, LED, LongT5, Pegasus-X."""

import pickle

import pytest
import torch

import hf_posenc
from closeness import assert_apart, assert_close
from models import randomize_encoding, tiny, tokens

LENGTH = 11
WINDOWED = {
    "LongformerModel": dict(attention_window=[4, 6], pad_token_id=1),
    "LEDModel": dict(attention_window=[4, 4], pad_token_id=1),
    "LongT5Model": dict(local_radius=2, decoder_start_token_id=0),
    "PegasusXModel": dict(block_size=4, num_global_tokens=3, stagger_local_blocks=True),
}
"""Class -> changes of the config, with windows or blocks shorter than the input."""
every_model = pytest.mark.parametrize("name", WINDOWED)


def inputs_of(name, masked=None, seen=()):
    """A batch, in which a mask hides some tokens, and some are global."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if masked is not None:
        mask[1, masked] = 0
    given = {"input_ids": tokens(2, LENGTH), "attention_mask": mask}
    if name.startswith(("Longformer", "LED")) and seen:
        given["global_attention_mask"] = torch.zeros(2, LENGTH, dtype=torch.long)
        given["global_attention_mask"][:, list(seen)] = 1
    return given if name == "LongformerModel" else {**given, "decoder_input_ids": tokens(2, 5)}


def states(model, given, padding=False):
    """The encoder's hidden states of real tokens, or also those of padding."""
    output = model(**given)
    states = getattr(output, "encoder_last_hidden_state", output[0])
    return states if padding else states[given["attention_mask"].bool()]


@every_model
@pytest.mark.parametrize("masked", [None, slice(8, None), slice(0, 3)], ids=["whole", "right", "left"])
@torch.no_grad()
def test_without_an_effect_the_scores_are_the_originals(name, masked):
    """With biases of 0, all pairs are compared, and the result is that of the original code."""
    model = tiny(name, **WINDOWED[name])
    given, new = inputs_of(name, masked, seen=(0, 4)), hf_posenc.patch(model, "t5")
    for key, parameter in new.named_parameters():
        if "posenc." in key:
            parameter.zero_()
    of_padding = name in ("LongformerModel", "LEDModel")  # whose attention outputs are 0 there
    assert_close(*(states(each, given, of_padding) for each in (new, hf_posenc.patch(model, "none"))))


def layer_of(model):
    """The module that computes the first attention of the encoder."""
    kinds = ("LongformerSelfAttention", "LEDEncoderSelfAttention", "LongT5LocalAttention", "PegasusXGlobalLocalAttention")
    return next(module for module in model.modules() if type(module).__name__ in kinds)


def projected(module, hidden, *names):
    """Queries, keys, and values `[B, H, L, E]` of an attention with 4 heads."""
    return [getattr(module, name)(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for name in names]


def slopes(length):
    """ALiBi's biases `[H, L, L]` for 4 heads."""
    index = torch.arange(float(length))
    return torch.stack([-(index - index[:, None]).abs() * 2.0 ** (-2 * head) for head in (1, 2, 3, 4)])


def expected_of(name, module, hidden, other, seen):
    """The output of an attention with ALiBi, pair by pair."""
    index = torch.arange(LENGTH)
    apart = (index - index[:, None]).abs()
    if name == "LongT5Model":
        query, key, value = projected(module, hidden, "q", "k", "v")
        scores = (query @ key.mT + slopes(LENGTH)).masked_fill(apart > 2, -torch.inf)
        return module.o((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    if name == "PegasusXModel":
        both = torch.cat([other, hidden], dim=1)
        query, key, value = projected(module, both, "q_proj", "k_proj", "v_proj")
        bias = torch.nn.functional.pad(slopes(LENGTH), (3, 0, 3, 0))
        hidden_pairs = torch.nn.functional.pad(index[:, None] // 4 != index // 4, (3, 0, 3, 0))
        scores = (query @ key.mT / query.shape[-1] ** 0.5 + bias).masked_fill(hidden_pairs, -torch.inf)
        return module.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))[:, 3:]
    is_global = torch.isin(index, torch.tensor(seen))
    query, key, value = projected(module, hidden, "query", "key", "value")
    scores = query @ key.mT / query.shape[-1] ** 0.5 + slopes(LENGTH)
    local = scores.masked_fill((apart > 2) & ~is_global, -torch.inf).softmax(-1) @ value
    query, key, value = projected(module, hidden, "query_global", "key_global", "value_global")
    everywhere = (query @ key.mT / query.shape[-1] ** 0.5 + slopes(LENGTH)).softmax(-1) @ value
    return torch.where(is_global[:, None], everywhere, local).transpose(1, 2).flatten(2)


@every_model
@torch.no_grad()
def test_a_bias_is_added_within_windows_and_for_global_tokens(name):
    model = hf_posenc.patch(tiny(name, **WINDOWED[name]), "alibi")
    module, seen, calls = layer_of(model), (0, 4), []
    module.register_forward_hook(lambda module, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True)
    model(**inputs_of(name, seen=seen))
    args, kwargs, output = calls[0]
    hidden, *others = (*args, *(kwargs[key] for key in kwargs if key.endswith("hidden_states")))
    other = others[0] if others else None
    assert_close(output[0][:, :LENGTH], expected_of(name, module, hidden[:, :LENGTH], other, seen))


@every_model
@pytest.mark.parametrize(("encoding", "sees_order"), [("none", False), ("rope", True), ("shaw", True)])
@torch.no_grad()
def test_rotations_and_biases_by_content(name, encoding, sees_order):
    """In windows that are longer than the input, the order of tokens is only known from the encoding."""
    model = randomize_encoding(hf_posenc.patch(tiny(name), encoding))
    given = inputs_of(name)
    model = pickle.loads(pickle.dumps(model))
    forward, backward = (states(model, {**given, "input_ids": ids}) for ids in (given["input_ids"], given["input_ids"].flip(1)))
    backward = backward.unflatten(0, (2, LENGTH)).flip(1).flatten(0, 1)
    (assert_apart if sees_order else assert_close)(backward, forward)


@pytest.mark.parametrize("name", WINDOWED)
def test_attention_weights_by_window_are_not_returned(name):
    model = hf_posenc.patch(tiny(name, **WINDOWED[name]), "alibi")
    with pytest.raises(ValueError, match=r"Omit output_attentions"):
        model(**inputs_of(name), output_attentions=True)
    hf_posenc.patch(tiny(name, **WINDOWED[name]), "none")(**inputs_of(name), output_attentions=True)
