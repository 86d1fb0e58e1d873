"""Attentions that scale queries or keys before their product, with encodings whose scores have terms without a query.

The reference implementations are float64 loops over the formulas, and an equal model that scales the product.
"""

import math
from itertools import product

import pytest
import torch

import hf_posenc
from closeness import assert_apart, assert_close
from models import randomize_encoding, tiny, tokens

LENGTH, HEADS, SPAN, BASE = 7, 4, 3, 50.0
ENCODINGS = {
    "deberta": dict(max_distance=SPAN),
    "transformer_xl": dict(base=BASE),
    "pope": dict(theta=BASE),
    "shaw": dict(max_distance=SPAN, terms="keys+queries"),
}
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
POSITIONS = {"relative_attention": True, "max_relative_positions": 16, "position_biased_input": False}
MODELS = {
    "XGLMModel": ("layers.0.self_attn", "q_proj", "k_proj", {}),
    "XLMModel": ("attentions.0", "q_lin", "k_lin", {}),
    "DebertaV2Model": ("encoder.layer.0.attention.self", "query_proj", "key_proj", dict(POSITIONS, pos_att_type=["c2p"])),
    "DebertaModel": ("encoder.layer.0.attention.self", "in_proj", "in_proj", dict(POSITIONS, pos_att_type=["c2p", "p2c"])),
}
"""Model -> its first attention, the projections of queries and keys, and changes of its config."""


def patched(model, encoding):
    return randomize_encoding(hf_posenc.patch(model, encoding, **ENCODINGS[encoding]))


def score(encoding, own, query, key, head, i, j):
    """The score of a query and a key `[E]`, before scaling, with the parameters of the attention's encoding."""
    if encoding == "deberta":
        rows = [min(max(apart, -SPAN), SPAN - 1) + SPAN for apart in (i - j, j - i)]
        return query @ key + query @ own["relative_keys"][head, rows[0]] + key @ own["relative_queries"][head, rows[1]]
    if encoding == "transformer_xl":
        size = own["weight"].shape[-1]
        angles = [(i - j) * BASE ** (-2 * n / size) for n in range(size // 2)]
        waves = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        vector = own["weight"][head] @ waves
        return (query + own["content"][head]) @ key + (query + own["position"][head]) @ vector
    if encoding == "pope":
        size = len(query)
        return sum(
            math.log1p(math.exp(query[c]))
            * math.log1p(math.exp(key[c]))
            * math.cos((i - j) * BASE ** (-c / size) - own["weight"][head, c])
            for c in range(size)
        )
    vector = own["weight"][min(max(j - i, -SPAN), SPAN) + SPAN]
    return query @ (key + vector) + key @ vector


@pytest.mark.parametrize("name", MODELS)
@every_encoding
@torch.no_grad()
def test_weights_are_those_of_the_formula(name, encoding):
    path, *projections, changes = MODELS[name]
    model = patched(tiny(name, attn_implementation="eager", **changes), encoding)
    attention, found = model.get_submodule(path), {}
    for each in projections:
        attention.get_submodule(each).register_forward_hook(
            lambda module, args, output, each=each: found.update({each: output})
        )
    weights = model(tokens(2, LENGTH), output_attentions=True).attentions[0]
    of_query, of_key = (found[each].double().unflatten(-1, (HEADS, -1)) for each in projections)
    if name == "DebertaModel":
        of_query, of_key, _ = of_query.chunk(3, dim=-1)
        of_query = of_query + attention.q_bias.double().unflatten(-1, (HEADS, -1))
    parts = 1 + len(changes.get("pos_att_type", ()))
    scores = torch.full((2, HEADS, LENGTH, LENGTH), -torch.inf, dtype=torch.float64)
    # Encodings whose parameters all layers share are in the stack.
    own = {
        key: each.double()
        for module in (model.posenc, getattr(attention, "posenc", None))
        if module is not None
        for key, each in module.named_parameters()
    }
    for batch, head, i, j in product(range(2), range(HEADS), range(LENGTH), range(LENGTH)):
        if name != "XGLMModel" or j <= i:
            query, key = of_query[batch, i, head], of_key[batch, j, head]
            scores[batch, head, i, j] = score(encoding, own, query, key, head, i, j) / math.sqrt(parts * len(query))
    assert_close(weights.double(), scores.softmax(-1))


@every_encoding
@torch.no_grad()
def test_longformer_with_a_window_of_all_tokens_is_roberta(encoding):
    """Longformer scales queries, and RoBERTa scales the product."""
    roberta = tiny("RobertaModel", pad_token_id=1)
    sizes = {name: getattr(roberta.config, name) for name in ("hidden_act", "layer_norm_eps", "max_position_embeddings")}
    longformer = tiny("LongformerModel", attention_window=2 * LENGTH, pad_token_id=1, **sizes)
    for each in longformer.modules():
        if hasattr(each, "query_global"):
            each.query_global, each.key_global, each.value_global = each.query, each.key, each.value
    left = longformer.load_state_dict(roberta.state_dict(), strict=False)
    assert not left.unexpected_keys and all("_global" in key for key in left.missing_keys)
    ids = {"input_ids": tokens(2, LENGTH).clamp(min=3)}
    assert_close(longformer(**ids)[0], roberta(**ids)[0])
    expected = patched(roberta, encoding)(**ids)[0]
    assert_close(patched(longformer, encoding)(**ids)[0], expected)
    assert_close(patched(longformer, encoding)(**ids, global_attention_mask=torch.ones(2, LENGTH).long())[0], expected)
    assert_apart(expected, hf_posenc.patch(roberta, "none")(**ids)[0])
