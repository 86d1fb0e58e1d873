"""Vectors that an attention adds to its output, depending on its weights: shaw's vectors for values, and custom encodings with
`value_bias`.
"""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel

import hf_posenc
from closeness import assert_apart, assert_close
from hf_posenc.attention import dispatch
from hf_posenc.encodings import Geometry, PositionContext
from models import HOSTS, backends, first, randomize, randomize_encoding, stock, tiny, tokens
from oracles import future, heads, in_pieces

VALUES = {"type": "shaw", "terms": "keys+values", "max_distance": 3}


ALL_TERMS = {**VALUES, "terms": "keys+queries+values"}


MASK = torch.ones(2, 11, dtype=torch.long)


MASK[1, :4] = 0


def patched(host, encoding=VALUES, head="Model", **changes):
    return randomize_encoding(hf_posenc.patch(stock(host, head, **changes), encoding))


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Positions of new tokens, the number of cached keys, whether positions increase by one, and the positions of all keys.


POSITIONS = {
    "from 0": ([[0, 1, 2, 3]], 0, True, [[0, 1, 2, 3]] * 2),
    "left padding": ([[0, 0, 1, 2], [0, 1, 2, 3]], 0, True, [[-1, 0, 1, 2], [0, 1, 2, 3]]),
    "cached": ([[5, 6, 7], [3, 4, 5]], 5, True, [[0, 1, 2, 3, 4, 5, 6, 7], [-2, -1, 0, 1, 2, 3, 4, 5]]),
    "jumping": ([[9, 2, 2, 30], [3, 2, 1, 0]], 0, False, [[9, 2, 2, 30], [3, 2, 1, 0]]),
    "jumping behind a cache": ([[7, 3], [2, 20]], 3, False, [[4, 5, 6, 7, 3], [-1, 0, 1, 2, 20]]),
}


@pytest.mark.parametrize("max_distance", [1, 3, 40])  # 40: more rows than distances
@pytest.mark.parametrize(("positions", "past", "consecutive", "keys_at"), POSITIONS.values(), ids=POSITIONS)
def test_sums_and_gradients(max_distance, positions, past, consecutive, keys_at):
    """The result is sum_j alpha_ij a_ij, term by term in float64."""
    encoding = hf_posenc.list_encodings()["shaw"](Geometry(18, 3, 6), max_distance=max_distance, terms="keys+values").double()
    table = encoding.value_weight.data = random(2 * max_distance + 1, 6, seed=9)
    queries, keys = len(positions[0]), len(keys_at[0])
    weights = random(2, 3, queries, keys).softmax(-1).requires_grad_()
    start = torch.tensor([[-row[0]] for row in keys_at[: len(positions)]])
    known = None if consecutive else torch.tensor(keys_at[: len(positions)])
    context = PositionContext(encoding, torch.tensor(positions), past, start, known)
    real = torch.tensor([row[-queries:] for row in keys_at]) >= 0  # [B, Q]
    upstream = random(2, 3, queries, 6, seed=2) * real[:, None, :, None]
    result = encoding("value_bias", weights, context)
    result.backward(upstream)
    expected = torch.zeros(2, 3, queries, 6, dtype=torch.float64)
    by_weight, by_table = torch.zeros_like(weights), torch.zeros_like(table)
    for b in range(2):
        for i in range(queries):
            for j in range(keys):
                distance = keys_at[b][j] - (positions * 2)[b][i]
                row = max(-max_distance, min(max_distance, distance)) + max_distance
                for h in range(3):
                    expected[b, h, i] += weights.detach()[b, h, i, j] * table[row]
                    by_weight[b, h, i, j] = (upstream[b, h, i] * table[row]).sum()
                    by_table[row] += weights.detach()[b, h, i, j] * upstream[b, h, i]
    result, expected = (each * real[:, None, :, None] for each in (result, expected))
    for ours, theirs in ((result, expected), (weights.grad, by_weight), (encoding.value_weight.grad, by_table)):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("host", ["bert", "gpt2", "megatron-bert"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_by_the_papers_equations(host, implementation):
    """An attention in a model follows equations 1 to 4 in float64, including the gradients of both tables."""
    model = patched(host).double()
    if implementation not in backends(model):
        pytest.skip(f"{host} has one implementation of attention")
    model.set_attn_implementation(implementation)
    layer = model.get_submodule(HOSTS[host].layers)[0]
    block = layer.attn if host == "gpt2" else layer.attention.self
    seen = {}
    projected = {"gpt2": ["c_attn"]}.get(host, ["query", "key", "value"])
    for name in projected:
        block.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    if host == "gpt2":
        block.c_proj.register_forward_pre_hook(lambda _, args: seen.update(output=args[0]))
    else:
        block.register_forward_hook(lambda _, __, output: seen.update(output=output[0]))
    model(tokens(1, 7))
    states = seen["c_attn"].chunk(3, -1) if host == "gpt2" else [seen[name] for name in projected]
    query, key, value = map(heads, states)
    keys_table, values_table = block.posenc.weight, block.posenc.value_weight
    output = []
    for h in range(4):
        for i in range(7):
            reach = range(i + 1) if HOSTS[host].causal else range(7)
            rows = [max(-3, min(3, j - i)) + 3 for j in reach]
            entries = [(query[0, h, i] * (key[0, h, j] + keys_table[row])).sum() for j, row in zip(reach, rows, strict=True)]
            weights = (torch.stack(entries) / math.sqrt(8)).softmax(0)
            terms = [weights[j] * (value[0, h, j] + values_table[row]) for j, row in zip(reach, rows, strict=True)]
            output.append(sum(terms))
    expected = torch.stack(output).reshape(4, 7, 8).transpose(0, 1).flatten(1)
    torch.testing.assert_close(seen["output"][0], expected, atol=1e-12, rtol=0)
    upstream = random(7, 32)
    theirs = torch.autograd.grad((expected * upstream).sum(), (keys_table, values_table), retain_graph=True)
    ours = torch.autograd.grad((seen["output"][0] * upstream).sum(), (keys_table, values_table))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)


@torch.no_grad()
def test_decoding_at_distances_beyond_the_table():
    model = patched("gpt2", {**VALUES, "max_distance": 5000})
    whole = first(model(tokens(), attention_mask=MASK))
    assert_close(in_pieces(model, tokens(), (6, 7, 8), MASK)[MASK.bool()], whole[MASK.bool()])


@pytest.mark.parametrize("host", ["gpt2", "mpnet"])
def test_weights_are_those_behind_dropout(host, own_registry):
    seen = []

    class Watching(hf_posenc.PositionEncoding, type="watching"):
        observes = True

        def value_bias(self, weights, context):
            seen.append(weights.detach())

    model = hf_posenc.patch(stock(host, **{name: 0.5 for name in HOSTS[host].no_dropout}), "watching")
    for training in (False, True):
        model.train(training)(tokens())
    before, after = seen[:2], seen[2:]
    for weights in before:
        assert_close(weights.sum(-1), torch.ones(2, 4, 11))
        assert not HOSTS[host].causal or not weights[..., future(11)].any()
    assert len(after) == 2 and all(0.3 < (weights[:, :, -1] == 0).float().mean() < 0.7 for weights in after)


@pytest.mark.parametrize("host", ["bert", "gpt2", "llama", "mpnet"])
@torch.no_grad()
def test_an_encoding_of_values_alone(host, own_registry):
    """Without a bias of scores, the model's masks for SDPA (none, or boolean ones) still apply."""

    class Means(hf_posenc.PositionEncoding, type="means"):
        """The mean distance from a query to the keys it attends to, in each feature."""

        def value_bias(self, weights, context):
            mean = (weights * context.distances(weights.shape[3])[:, None]).sum(-1, keepdim=True)
            return mean.expand(-1, -1, -1, self.geometry.head_dim)

    model = hf_posenc.patch(stock(host), "means")
    assert Means.mechanisms() == ("value_bias",) and "per_layer" in Means.option_types() and not Means.is_relative()
    outputs = []
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        outputs.append([first(model(tokens())), first(model(tokens(), attention_mask=MASK))[MASK.bool()]])
        assert_close(outputs[-1], outputs[0])
    assert_close(first(model(tokens(), attention_mask=MASK))[1, 4:], first(model(tokens()[1:, 4:]))[0])
    none = hf_posenc.patch(stock(host), "none")
    assert_apart(first(none(tokens())), outputs[0][0])


@pytest.mark.parametrize("kind", ["shaw+rope", "learned+shaw", "shaw+alibi"])
@torch.no_grad()
def test_compositions(kind):
    """The vectors of values act in addition to the other part."""
    options = {"shaw__terms": "keys+values", "shaw__max_distance": 3}
    model = randomize_encoding(hf_posenc.patch(stock("bert"), kind, **options))
    expected = first(model(tokens(), attention_mask=MASK))
    model.set_attn_implementation("eager")
    assert_close(first(model(tokens(), attention_mask=MASK))[MASK.bool()], expected[MASK.bool()])
    for name, parameter in model.named_parameters():
        if "value_weight" in name:
            parameter.zero_()
    assert_apart(first(model(tokens(), attention_mask=MASK)), expected)


def test_tables_and_mechanisms_by_terms():
    kind = hf_posenc.list_encodings()["shaw"]
    for terms, tables, locations in (
        ("keys+queries", ["weight"] * 2, ("score_bias",)),
        ("keys+queries+values", ["weight", "value_weight"] * 2, ("score_bias", "value_bias")),
    ):
        model = patched("bert", {"type": "shaw", "terms": terms})
        assert [name.rpartition(".")[2] for name in model.state_dict() if ".posenc." in name] == tables
        assert hf_posenc.inspect(model).locations.keys() == {*locations}
        assert kind.mechanisms(kind.checked_options({"terms": terms})) == locations
        assert not any("value_weight" in name for name in hf_posenc.unpatch(model).state_dict())
    assert kind.mechanisms() == ("score_bias", "value_bias")
    assert kind.mechanisms(kind.checked_options({})) == ("score_bias",)
    with pytest.raises(ValueError, match=r"shaw\.terms='values'.*'keys\+values'"):
        hf_posenc.patch(stock("bert"), "shaw", terms="values")


@torch.no_grad()
def test_attentions_can_be_had():
    model = patched("bert")
    model.set_attn_implementation("eager")
    outputs = model(tokens(), output_attentions=True)
    assert len(outputs.attentions) == 2
    for weights in outputs.attentions:
        assert_close(weights.sum(-1), torch.ones(2, 4, 11))
    assert_close(outputs[0], first(model(tokens())))


def test_long_sums_in_half_precision():
    """4,095 weights of one row sum to a number that bfloat16 can't represent."""
    encoding = hf_posenc.list_encodings()["shaw"](Geometry(8, 1, 8), max_distance=1, terms="keys+values")
    torch.nn.init.ones_(encoding.value_weight)
    context = PositionContext(encoding, torch.tensor([[4095]]), 4095, torch.zeros(1, 1, dtype=torch.long))
    weights = torch.full((1, 1, 1, 4096), 2.0**-12, dtype=torch.bfloat16)
    weights[..., 9] = 0
    assert_close(encoding.to(torch.bfloat16)("value_bias", weights, context).float(), torch.ones(1, 1, 1, 8) - 2.0**-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_tokens_aside(implementation, monkeypatch):
    """A class token gets no vectors and gives none: its output uses only the values, and its weight adds nothing to other
    outputs.
    """
    stock = tiny("ViTModel", num_hidden_layers=1, image_size=16)
    model = randomize_encoding(hf_posenc.patch(stock, VALUES))
    model.set_attn_implementation(implementation)
    (block,) = (each for each in model.modules() if isinstance(vars(each).get("posenc_state"), dispatch.AttentionState))
    seen, original = [], dispatch.value_bias

    def watch(encodings, weights, size, context):
        seen.append((weights, original(encodings, weights, size, context)))
        return seen[-1][1]

    monkeypatch.setattr(dispatch, "value_bias", watch)
    model(torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    ((weights, added),) = seen
    assert weights.shape == (1, 4, 5, 5) and not added[:, :, 0].any()
    for i in range(4):
        rows = [max(-3, min(3, j - i)) + 3 for j in range(4)]
        expected = sum(weights[0, :, 1 + i, 1 + j, None] * block.posenc.value_weight[row] for j, row in enumerate(rows))
        assert_close(added[0, :, 1 + i], expected)


@torch.no_grad()
def test_cross_attention():
    """The distance between a decoder token and an encoder token is that of their positions, without padding."""
    model = hf_posenc.patch(
        tiny("BartModel", num_hidden_layers=1, decoder_layers=1), VALUES, where=["encoder", "decoder", "cross"]
    )
    model = randomize_encoding(model)
    assert len([name for name, _ in model.named_parameters() if "value_weight" in name]) == 3
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        given = tokens(2, 5)
        outputs.append(first(model(tokens(), attention_mask=MASK, decoder_input_ids=given)))
        assert_close(outputs[-1][1:], first(model(tokens()[1:, 4:], decoder_input_ids=given[1:])))
    assert_close(*outputs)


def test_values_of_another_size():
    """Latent attention has values of a different size, and so does the table."""
    model = tiny("DeepseekV3Model", num_hidden_layers=1, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6)
    model = randomize_encoding(hf_posenc.patch(model, VALUES))
    posenc = model.layers[0].self_attn.posenc
    assert posenc.weight.shape == (7, 8) and posenc.value_weight.shape == (7, 6)
    outputs = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs.append(first(model(tokens())))
    assert_close(*outputs)
    posenc.value_weight = torch.nn.Parameter(torch.zeros(7, 8))
    with pytest.raises(ValueError, match=r"value_bias of 'shaw' returned shape \(2, 4, 11, 8\).*\(2, 4, 11, 6\)"):
        model(tokens())


WRITTEN_OUT = {
    "deberta-v2": ({"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "value_proj.bias"),  # B and H in one axis
    "lilt": ({"channel_shrink_ratio": 2}, "self.value.bias"),  # values of boxes come first
    "squeezebert": ({"embedding_size": 48}, "value.bias"),
    "wavlm": ({"conv_dim": [8], "conv_kernel": [2], "conv_stride": [1], "num_conv_pos_embeddings": 4,
               "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 1}, "v_proj.bias"),  # with its projections
}  # fmt: skip
"""Models with custom attention code: sizes, and the bias of values."""


@pytest.mark.parametrize("kind", WRITTEN_OUT)
@torch.no_grad()
def test_attentions_that_are_written_out(kind):
    """One vector for all distances equals adding it to all values."""
    sizes, bias = WRITTEN_OUT[kind]
    shared = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = randomize(AutoModel.from_config(AutoConfig.for_model(kind, **shared, **sizes))).eval()
    if kind == "wavlm":
        inputs = {"input_values": torch.rand(1, 12, generator=torch.Generator().manual_seed(1))}
    else:
        inputs = {"input_ids": tokens()}
    model = hf_posenc.patch(model, VALUES)
    vector = torch.linspace(-1, 1, 12)
    tables = [parameter for name, parameter in model.named_parameters() if "value_weight" in name]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith(bias)]
    assert len(tables) == len(biases) == 2
    for table in tables:
        table.zero_()
    without = first(model(**inputs))
    for each in biases:
        each += vector.repeat(4)
    expected = first(model(**inputs))
    for each, table in zip(biases, tables, strict=True):
        each -= vector.repeat(4)
        table += vector
    assert_apart(expected, without)
    assert_close(first(model(**inputs)), expected)


@pytest.mark.parametrize("kind", ["falcon", "xlnet"])
@torch.no_grad()
def test_weights_of_attentions_that_are_written_out(kind, monkeypatch):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, d_model=32, n_layer=1, n_head=4, d_inner=48)
    model = randomize(AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=61, **sizes))).eval()
    model = randomize_encoding(hf_posenc.patch(model, VALUES))
    seen, original = [], dispatch.value_bias
    monkeypatch.setattr(dispatch, "value_bias", lambda *args: seen.append(args[1]) or original(*args))
    outputs = []
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        outputs.append(first(model(tokens())))
        assert_close(outputs[-1], outputs[0])
    assert len(seen) == len(outputs)
    for weights in seen:
        assert weights.shape == (2, 4, 11, 11)
        assert_close(weights.sum(-1), torch.ones(2, 4, 11))
    keys = hf_posenc.patch(hf_posenc.unpatch(model), {**VALUES, "terms": "keys"})
    state = {name: each for name, each in model.state_dict().items() if "value_weight" not in name}
    keys.load_state_dict(state)
    for name, each in model.named_parameters():
        if "value_weight" in name:
            each.zero_()
    assert_close(first(model(tokens())), first(keys(tokens())))  # computed as a whole by torch's function


def test_an_attention_that_makes_no_product_of_weights(monkeypatch):
    model = patched("mpnet")
    monkeypatch.setattr("hf_posenc.attention.intercept.SOFTMAX", ())
    with pytest.raises(RuntimeError, match="MPNetSelfAttention didn't multiply weights"):
        model(tokens())


def test_outputs_scaled_by_a_sink_are_refused():
    model = tiny("GraniteSWAModel")
    words = r"GraniteSWAAttention.*shaw"
    with pytest.raises(hf_posenc.UnsupportedModelError, match=words) as error:
        hf_posenc.patch(model, VALUES)
    assert error.value.reason == "attention whose weights aren't known"
    hf_posenc.patch(model, "shaw")


def test_an_eager_function_without_weights(monkeypatch):
    model = patched("bert")
    eager = dispatch.host_function(model.encoder.layer[0].attention.self, "eager")
    monkeypatch.setattr(dispatch, "host_function", lambda *_: lambda *a, **k: (eager(*a, **k)[0], None))
    with pytest.raises(ValueError, match="eager attention.*its weights, which 'shaw' needs"):
        model(tokens())


@torch.no_grad()
def test_grouped_queries_without_an_eager_function(monkeypatch):
    """If a model has no eager function, BERT's is used, which doesn't repeat keys and values."""
    model = patched("llama")
    expected = first(model(tokens()))
    module = __import__(type(model.layers[0].self_attn).__module__, fromlist=["x"])
    monkeypatch.delattr(module, "eager_attention_forward")
    monkeypatch.setattr(type(model.layers[0].self_attn), "forward", _llama_forward)
    assert_close(first(model(tokens())), expected)


def _llama_forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, cache=None, **kwargs):
    """The forward of LlamaAttention, in a module without an eager function."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    function = dispatch.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    kwargs.pop("keys_are_rotated", None)
    output, weights = function(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    return self.o_proj(output.flatten(2)), weights
