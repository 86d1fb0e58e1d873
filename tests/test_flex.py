"""Biases in flex attention.

On a CPU, flex attention has no backward pass. These tests apply its `score_mod` and block mask to all scores by hand.
"""

import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from closeness import assert_close
from hf_posenc import _compat
from hf_posenc.attention import bias_backends
from models import CACHE, first, patched, tokens
from oracles import gradients, padded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # in Transformers' own flex code

SHAW = {"type": "shaw", "max_distance": 2}
BY_DISTANCE = [
    *("alibi", "t5", "relative", "kerple", "rope+alibi", SHAW, {**SHAW, "terms": "keys+queries"}),
    {"type": "alibi", "slopes": "learned", "per_layer": True},
    *({"type": "deberta", "max_distance": 2, "terms": terms} for terms in ("c2p", "p2c")),
    {"type": "deberta", "max_distance": 9, "buckets": 4},
    {"type": "shaw+t5", "shaw": {"max_distance": 2}},
]
DENSE = ["fire", "tupe", "transformer_xl", "shaw"]
"""Encodings whose bias isn't by distance, or has more vectors than there are keys."""


@pytest.fixture
def by_hand(monkeypatch):
    """Applies `score_mod` to all scores, and records the sizes of the tensors that it reads."""

    class Read(list):
        tensors: dict

    sizes = Read()

    def attend(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options):
        assert enable_gqa == (query.shape[1] != key.shape[1])
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
        read = inspect.getclosurevars(score_mod).nonlocals
        sizes.tensors = {name: each for name, each in read.items() if isinstance(each, torch.Tensor)}
        sizes.append(max(each.numel() for each in sizes.tensors.values()))
        index = torch.meshgrid(
            *map(torch.arange, scores.shape),
            indexing="ij",
        )
        scores = score_mod(scores, *index)
        if block_mask is not None:
            scores = torch.where(block_mask.mask_mod(*index), scores, torch.finfo(torch.float32).min)
        return (scores.softmax(-1) @ value.to(scores.dtype)).to(value.dtype)

    monkeypatch.setattr(bias_backends, "compiled_flex_attention", lambda: attend)
    monkeypatch.setattr(_compat, "has_flex_attention", lambda tensor: True)
    return sizes


def assert_alike(model, side, flex="flex_attention", length=11):
    """Compares outputs and gradients with those of a dense bias. In eager attention, Llama computes the softmax in float32."""
    ids, mask = (tokens(2, length), None) if side is None else padded(tokens(2, length), [length, length - 4], side)
    real, results = torch.ones_like(ids).bool() if mask is None else mask.bool(), []
    for implementation in ("sdpa", flex):
        model.set_attn_implementation(implementation)
        output = first(model(ids, attention_mask=mask))[real]
        results.append((output.detach(), gradients(model, lambda _, output=output: output.square().sum())))
    assert_close(results[1][0], results[0][0])
    assert_close(results[1][1], results[0][1], rtol=1e-3, atol=1e-4)
    return ids.shape[1]


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("encoding", [*BY_DISTANCE, *DENSE], ids=str)
@pytest.mark.parametrize("host", ["bert", "llama"])
def test_outputs_and_gradients(by_hand, host, encoding, side):
    """Llama is causal, and has fewer heads for keys than for queries."""
    model = patched(host, encoding).double()
    length = assert_alike(model, side)
    assert len(by_hand) == model.config.num_hidden_layers
    assert encoding in DENSE or max(by_hand) < 2 * model.config.num_attention_heads * length**2


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
@torch.no_grad()
def test_values_in_half_precision(by_hand, encoding):
    """They are added to float32 scores as float32. Half precision would round those of keys that count by up to 0.125."""
    model = patched("bert", encoding, max_position_embeddings=300)
    bias = model.posenc("distance_bias", torch.arange(-299, 300))
    model.bfloat16().set_attn_implementation("flex_attention")
    model(tokens(1, 300))
    values = by_hand.tensors["values"]
    assert values.dtype == torch.float32
    assert_close(values, bias if encoding == "alibi" else bias.bfloat16().float())


@pytest.mark.parametrize("encoding", ["alibi", "t5", SHAW])
@torch.no_grad()
def test_a_decoding_step(by_hand, encoding):
    """One query has a dense bias. Compiled code for flex attention would contain the number of cached keys."""
    model, (ids, mask) = patched("llama", encoding).double(), padded(tokens(2), [11, 7], "left")
    model.set_attn_implementation("flex_attention")
    whole = first(model(ids, attention_mask=mask))
    before = model(ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True)
    by_hand.clear()
    for end in (-1, None):
        step = ids[:, -2:end][:, -1:]
        output = model(step, attention_mask=mask[:, :end], **{CACHE: before.past_key_values})
        assert_close(first(output)[:, 0], whole[:, -2 if end else -1])
    assert not by_hand


@pytest.mark.parametrize("encoding", ["alibi", "t5", SHAW])
@pytest.mark.parametrize("host", ["bert", "llama"])
def test_masks_and_positions_of_a_user(by_hand, host, encoding):
    """A 4-D mask without position_ids, holes in a mask, and texts that are packed in one row."""
    model, ids = patched(host, encoding).double(), tokens(2, 11)
    hole, index = torch.ones(2, 11, dtype=torch.long), torch.arange(11)
    hole[:, 5] = 0
    packed = torch.cat([torch.arange(5), torch.arange(6)])[None].expand(2, -1)
    own = (index <= index[:, None]) & (packed[0].diff(prepend=packed[0, :1]) < 0).cumsum(0).eq(0) if host == "llama" else None
    for inputs in ({"attention_mask": hole}, {"position_ids": packed}, {"attention_mask": own}):
        if own is not None and inputs.get("attention_mask") is own:
            inputs = {"attention_mask": own.expand(2, 1, 11, 11) | torch.eye(11).bool()}
        found = []
        for implementation in ("sdpa", "flex_attention"):
            model.set_attn_implementation(implementation)
            found.append(first(model(ids, **inputs)))
        assert_close(found[1], found[0])
    assert by_hand


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("encoding", ["alibi", "t5", SHAW, "fire"], ids=str)
@pytest.mark.parametrize("host", ["bert", "llama"])
def test_flex_attention_in_place_of_sdpa(by_hand, monkeypatch, host, encoding, side):
    """From a number of keys on that a GPU has measured, SDPA's masks and causality apply, unless a bias is for all pairs."""
    monkeypatch.setattr(bias_backends, "FLEX_MIN_KEYS", 11)
    monkeypatch.setattr(bias_backends, "FLEX_MIN_QUERIES", 2)
    model = patched(host, encoding).double()
    dense = first(model(tokens(2, 10)))
    assert not by_hand and dense.isfinite().all()
    ids, mask = (tokens(2), None) if side is None else padded(tokens(2), [11, 7], side)
    real, outputs = torch.ones_like(ids).bool() if mask is None else mask.bool(), []
    for least in (11, None):
        monkeypatch.setattr(bias_backends, "FLEX_MIN_KEYS", least)
        outputs.append(first(model(ids, attention_mask=mask))[real])
    assert_close(*outputs)
    assert len(by_hand) == (0 if encoding == "fire" else 2)


@pytest.mark.parametrize("implementation", ["flex_attention", "eager"])
@pytest.mark.parametrize("encoding", ["alibi", SHAW, "rope+t5"], ids=str)
@pytest.mark.parametrize("host", ["bert", "llama"])
def test_on_a_cpu(host, encoding, implementation):
    """Flex attention gives outputs and gradients on a CPU, too."""
    assert_alike(patched(host, encoding), "right", implementation)


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch compiles for flex attention."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    monkeypatch.setattr(bias_backends, "compiled_flex_attention", lambda: compiled)
    monkeypatch.setattr(_compat, "has_flex_attention", lambda tensor: True)
    return lambda: [graph for graph in counter.graphs if len(graph.graph.nodes) > 1]  # One of torch's own is empty.


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
@torch.no_grad()
def test_graphs_for_all_lengths(graphs, encoding):
    """20 lengths and two batch sizes take two graphs, because a batch of 1 has its own."""
    model = patched("bert", encoding, max_position_embeddings=400, num_hidden_layers=1)
    for batch in (1, 2):
        for length in range(130, 330, 10):
            ids, mask = padded(tokens(batch, length), [length, length - 7][:batch], "right")
            found = []
            for implementation in ("sdpa", "flex_attention"):
                model.set_attn_implementation(implementation)
                found.append(first(model(ids, attention_mask=mask))[mask.bool()])
            assert_close(*found)
    assert len(graphs()) == 2


@torch.no_grad()
def test_more_graphs_than_torch_compiles_by_default(graphs):
    model = patched("bert", "alibi", num_hidden_layers=1)
    model.set_attn_implementation("flex_attention")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for batch in (1, 2):
            ids, mask = padded(tokens(batch), [11, 7][:batch], "right")
            for each in (None, mask):
                model.to(dtype)(ids, attention_mask=each)
    assert len(graphs()) == 12
