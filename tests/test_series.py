"""Time series with several channels: PatchTST.

Shapes: B batch, C channels, L patches, H heads, E head_dim, D hidden_size.
"""

import copy
import math

import pytest
import torch
import transformers

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import randomize_encoding, tiny
from tools import check_support

B, C, L, PATCH, D, H = 2, 3, 6, 4, 32, 4
E = D // H
KINDS = {
    "computed": {},
    "learned": {"positional_encoding_type": "random", "positional_dropout": 0.1},
    "class token": {"use_cls_token": True},
    "after": {"use_cls_token": True, "pre_norm": False, "norm_type": "layernorm"},
}
"""Name -> config: a sinusoidal table, a learned one, a class token before the patches, or norms after each sublayer."""
ENCODINGS = ("none", "sinusoidal", "learned", "rope", "alibi", "shaw")
every_kind = pytest.mark.parametrize("kind", KINDS)


def stock(kind="class token", **changes):
    return tiny("PatchTSTModel", **{"pre_norm": True, **KINDS[kind], **changes})


def patched(model, encoding, **options):
    return randomize_encoding(hf_posenc.patch(model, encoding, **options))


def series(seed=0):
    """A series `[B, time, C]`."""
    return torch.randn(B, L * PATCH, C, generator=torch.Generator().manual_seed(seed))


def reordered(values, order):
    """The same patches in another order."""
    return values.view(B, L, PATCH, C)[:, order].reshape(values.shape)


@torch.no_grad()
def states(model, values):
    """Hidden states `[B, C, tokens, D]`."""
    return model(values).last_hidden_state


def sine(position, index):
    angle = position / 10000 ** ((index - index % 2) / D)
    return math.cos(angle) if index % 2 else math.sin(angle)


def alibi(head, query, key):
    """The bias of ALiBi in a bidirectional attention."""
    return -(2.0 ** (-8 * (head + 1) / H)) * abs(key - query)


VECTORS = torch.tensor([[sine(position, index) for index in range(D)] for position in range(L)], dtype=torch.float64)


@torch.no_grad()
def by_loops(model, values, bias=None, inject=None):
    """Hidden states `[B, C, tokens, D]` in float64, for each channel, and for each query of each head. The first token is a
    class token.

    bias: a function of head, query position, and key position that is added to a score. inject: where VECTORS are added.
    """
    model = copy.deepcopy(model).double()
    encoder, (values, *_) = model.encoder, model.scaler(values.double(), torch.ones_like(values).double())
    patches = encoder.embedder(model.patchifier(values))
    vectors = torch.cat([torch.zeros(1, D), VECTORS])
    rows = []
    for channel in patches.flatten(0, 1):
        hidden = torch.cat([encoder.positional_encoder.cls_token[0, 0], channel])
        hidden = hidden + vectors if inject == "input" else hidden
        for layer in encoder.layers:
            hidden = hidden + vectors if inject == "every_layer" else hidden
            attended = attention(layer.self_attn, norm(layer.norm_sublayer1, hidden), bias)
            hidden = hidden + (attended + vectors if inject == "after_attention" else attended)
            hidden = hidden + layer.ff(norm(layer.norm_sublayer3, hidden))
        rows.append(hidden)
    return torch.stack(rows).unflatten(0, (B, C))


def norm(module, hidden):
    return module(hidden[None])[0]


def attention(module, hidden, bias):
    """Attention output `[tokens, D]`."""
    queries, keys, values = (project(hidden).unflatten(-1, (H, E)) for project in (module.q_proj, module.k_proj, module.v_proj))
    heads = torch.empty_like(queries)
    for head in range(H):
        for i, query in enumerate(queries[:, head]):
            scores = torch.stack([query @ key / math.sqrt(E) for key in keys[:, head]])
            for j in range(1, len(scores)):
                if bias is not None and i > 0:  # the class token has no distance
                    scores[j] += bias(head, i - 1, j - 1)
            heads[i, head] = scores.softmax(dim=-1) @ values[:, head]
    return module.out_proj(heads.flatten(-2))


@pytest.mark.parametrize(
    ("encoding", "options", "expected"),
    [
        ("none", {}, {}),
        *(("sinusoidal", {"inject": inject}, {"inject": inject}) for inject in ("every_layer", "after_attention")),
        ("sinusoidal+alibi", {}, {"inject": "input", "bias": alibi}),
    ],
)
def test_by_loops(encoding, options, expected):
    model = stock()
    actual = states(hf_posenc.patch(model, encoding, **options), series())
    assert actual.shape == (B, C, 1 + L, D)
    assert_close(actual.double(), by_loops(model, series(), **expected))


@every_kind
def test_order(kind):
    """Without positions, the model doesn't distinguish orders of patches. With any encoding, it doesn't distinguish orders of
    channels.
    """
    model, values, order = stock(kind), series(), torch.tensor([3, 1, 5, 0, 2, 4])
    tokens = torch.cat([torch.arange(0, 1), 1 + order]) if model.config.use_cls_token else order
    assert_apart(states(model, reordered(values, order)), states(model, values)[:, :, tokens])
    for encoding in ENCODINGS if kind == "class token" else ("none", "sinusoidal+rope+shaw"):
        new = patched(model, encoding)
        there, here = states(new, reordered(values, order)), states(new, values)
        (assert_close if encoding == "none" else assert_apart)(there, here[:, :, tokens])
        assert_close(states(new, values[:, :, [2, 0, 1]]), here[:, [2, 0, 1]])


@pytest.mark.parametrize("kind", ["computed", "learned"])
def test_unpatch(kind):
    """The unpatched model is bit-identical to the original, for a trained or fixed table."""
    model, values = stock(kind), series()
    table = model.encoder.positional_encoder.position_enc
    assert table.requires_grad == (kind == "learned")
    new = patched(model, "sinusoidal+shaw")
    assert not any("position_enc" in name for name, _ in new.named_parameters())
    back = hf_posenc.unpatch(new)
    assert_equal(states(back, values), states(model, values))
    assert back.encoder.positional_encoder.position_enc.requires_grad == table.requires_grad


def test_attention_to_channels_is_refused(tmp_path):
    with pytest.raises(hf_posenc.UnsupportedModelError, match="channel_attention=True") as error:
        hf_posenc.patch(stock(channel_attention=True), "rope")
    assert error.value.reason == "attention to channels"
    hf_posenc.patch(stock(), "rope").save_pretrained(tmp_path)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="channel_attention=True"):
        transformers.AutoModel.from_pretrained(tmp_path, channel_attention=True)


@every_kind
def test_its_own_table(kind):
    """The table as a learned encoding gives the original output, except for the row of the class token."""
    model = stock(kind)
    if model.config.use_cls_token:
        with torch.no_grad():
            model.encoder.positional_encoder.position_enc[0] = 0
    assert_close(states(hf_posenc.patch(model, "learned", init="host"), series()), states(model, series()))


@pytest.mark.parametrize(
    ("kind", "encoding"), [("computed", "sinusoidal"), ("class token", "sinusoidal"), ("learned", "learned")]
)
def test_inspection(kind, encoding):
    report = hf_posenc.inspect(stock(kind))
    assert (report.encoding, report.max_length) == (encoding, L)
    report = hf_posenc.inspect(patched(stock(kind), "sinusoidal", max_length=L))
    assert report.locations == {"embed": ("encoder.positional_encoder",)} and report.max_length == L


@pytest.mark.slow
def test_every_check_of_reach():
    verdict = check_support.judge("patchtst")
    assert verdict.verified and verdict.encodings == check_support.checks.ENCODINGS, verdict
