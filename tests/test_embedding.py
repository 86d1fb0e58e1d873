"""The embedding layer: what it adds, where, and whether it behaves as an ordinary module. test_vectors.py tests the vectors.

Shapes: B batch, L tokens, D hidden_size.
"""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

import hf_posenc
from conftest import run_python
from hf_posenc import PositionEmbedding, TokenPositionEmbedding
from hf_posenc.encodings import list_encodings
from models import slow
from oracles import drawn, padded, sinusoids

D, MAX = 6, 20


LAYERS = {
    "sinusoidal": dict(encoding="sinusoidal"),
    "concatenated": dict(encoding={"type": "sinusoidal", "layout": "concatenated"}, base=50.0),
    "learned scale": dict(encoding="sinusoidal", scale="learned"),
    "learned": dict(encoding="learned", max_length=MAX),
    "learned from sinusoids": dict(encoding="absolute", max_length=MAX, init="sinusoidal"),
    "normalized": dict(encoding="normalized"),
    "counter": dict(encoding="counter"),
    "fourier": dict(encoding="fourier", features=8, width=3),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name, **changes):
    """A layer of the list, with parameters drawn from N(0, 1)."""
    return drawn(PositionEmbedding(**{"hidden_size": D, **LAYERS[name], **changes}), seed=1).eval()


def embeds(*shape, seed=0):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def vectors(layer, positions):
    """The vectors of one text, `[L, D]`."""
    return layer.posenc("embed", torch.as_tensor(list(positions))).float()


def close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_every_encoding_that_embeds_is_tested():
    tested = {make(name).posenc.type for name in LAYERS}
    assert tested == {name for name, cls in list_encodings().items() if "embed" in cls.mechanisms() and cls.axes == 1}


# The added vectors.


@every_layer
def test_vectors_are_added(name):
    """Without position_ids, the layer adds the vectors of positions 0, 1, 2, and so on, also with a 4-D mask. Explicit
    position_ids take precedence.
    """
    layer, inputs, rows = make(name), embeds(2, 4), [[7, 3, 3, 0], [1, 12, 5, 2]]
    close(layer(inputs), inputs + vectors(layer, range(4)))
    assert torch.equal(layer(inputs, attention_mask=torch.zeros(2, 1, 4, 4)), layer(inputs))
    for past in (0, 4):
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).repeat(1, 1 + past // 4)
        expected = inputs + torch.stack([vectors(layer, row) for row in rows])
        close(layer(inputs, position_ids=torch.tensor(rows), attention_mask=mask, past_length=past), expected)
    # One row for all texts, with or without a batch dimension.
    for ids in (torch.tensor(rows[1]), torch.tensor(rows[1:]), torch.tensor(rows[1:], dtype=torch.int32)):
        close(layer(inputs, position_ids=ids), inputs + vectors(layer, rows[1]))


def test_sinusoids_are_added():
    inputs = torch.zeros(1, 9, D)
    close(make("sinusoidal")(inputs), sinusoids([range(9)], D))
    close(PositionEmbedding("sinusoidal", D, scale=3)(inputs), 3 * sinusoids([range(9)], D), 1e-5)


@every_layer
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(name, side):
    layer, width = make(name, max_length=MAX), 7
    for dtype, lengths in ((torch.long, (5, 2, 1)), (torch.bool, (4, 1, 3))):
        texts, mask = embeds(3, width, seed=3), torch.zeros(3, width, dtype=dtype)
        for row, length in enumerate(lengths):
            mask[row, slice(width - length, width) if side == "left" else slice(0, length)] = 1
        outputs = layer(texts, attention_mask=mask)
        for row, shown in enumerate(mask.bool()):
            close(outputs[row][shown], layer(texts[row, shown][None])[0])
    # Padding needs no positions beyond the table.
    _, mask = padded(torch.ones(2, MAX - 3, dtype=torch.long), (1, 2), side)
    assert layer(embeds(2, MAX), attention_mask=mask).isfinite().all()


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "normalized"])
@pytest.mark.parametrize("padding", [0, 3])
def test_chunks_equal_the_whole(name, padding):
    """Processing chunks gives the same output as the whole text. This doesn't hold for `normalized`, whose fractions change as
    the text grows.
    """
    layer, inputs, mask = make(name), embeds(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :padding] = 0
    whole = layer(inputs, attention_mask=mask)
    for bounds in ((0, 4, 5, 11), (0, 10, 11)):
        chunks = [
            layer(inputs[:, start:stop], attention_mask=mask[:, :stop] if padding else None, past_length=start)
            for start, stop in itertools.pairwise(bounds)
        ]
        close(torch.cat(chunks, dim=1), whole)


def test_tokens_that_the_mask_hides_take_no_position():
    layer, inputs, mask = make("learned"), embeds(1, 5), torch.tensor([[1, 0, 1, 1, 1]])
    whole = layer(inputs, attention_mask=mask)
    chunks = [layer(inputs[:, :4], attention_mask=mask[:, :4]), layer(inputs[:, 4:], attention_mask=mask, past_length=4)]
    close(torch.cat(chunks, dim=1), whole)
    close(whole, layer(inputs, position_ids=torch.tensor([[0, 0, 1, 2, 3]])))


@every_layer
def test_max_length_is_a_promise(name):
    layer = make(name, max_length=7)
    for length, past in ((8, 0), (3, 5), (2, 6)):
        with pytest.raises(ValueError, match="8 positions.*max_length=7"):
            layer(embeds(1, length), past_length=past)
        assert layer(embeds(1, length - 1), past_length=past).shape == (1, length - 1, D)
    if "max_length" not in LAYERS[name]:
        assert make(name)(embeds(1, 3000)).isfinite().all()


def test_dropout_acts_on_the_sum_in_training_alone():
    layer, inputs = make("learned", dropout=0.5), embeds(4, MAX)
    expected = inputs + layer.posenc.weight
    assert torch.equal(layer(inputs), expected)
    torch.manual_seed(0)
    trained = layer.train()(inputs)
    dropped = trained == 0
    assert 0.4 < dropped.double().mean() < 0.6
    torch.testing.assert_close(trained[~dropped], 2 * expected[~dropped])
    assert torch.equal(make("learned").train()(inputs), expected)


# Shape, dtype, and device.


@every_layer
def test_sequence_first_is_transposed(name):
    inputs, mask = embeds(3, 5), torch.ones(3, 5, dtype=torch.long)
    mask[0, :2], mask[1, 3:] = 0, 0
    layer, other = make(name), make(name, batch_first=False)
    for arguments in ({}, {"attention_mask": mask}, {"position_ids": torch.tensor([[4, 0, 1, 9, 2]])}):
        expected = layer(inputs, **arguments)
        assert torch.equal(other(inputs.transpose(0, 1), **arguments), expected.transpose(0, 1))


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_the_input(name, dtype):
    layer, inputs = make(name), embeds(2, 5).to(dtype)
    expected = inputs.double() + vectors(layer, range(5)).double()
    for each in (layer, copy.deepcopy(layer).to(dtype)):
        output = each(inputs)
        assert output.dtype == dtype
        close(output.double(), expected, 8 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("name", ["learned", "learned scale"])
def test_device_and_dtype_arguments(name):
    for dtype in (torch.bfloat16, torch.float64):
        layer = hf_posenc.PositionEmbedding(hidden_size=D, dtype=dtype, **LAYERS[name])
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    layer = hf_posenc.PositionEmbedding(hidden_size=D, device="meta", **LAYERS[name])
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    tokens = hf_posenc.TokenPositionEmbedding(10, hidden_size=D, device="meta", dtype=torch.bfloat16, **LAYERS[name])
    assert {(parameter.device.type, parameter.dtype) for parameter in tokens.parameters()} == {("meta", torch.bfloat16)}


# Saving, copying, and compiling.


def test_reload_in_a_new_process(tmp_path):
    """The layers reload through the Auto classes, with only hf_posenc and transformers imported."""
    expected = {}
    for name in LAYERS:
        layer = make(name, max_length=MAX, dropout=0.25)
        layer.save_pretrained(tmp_path / name)
        expected[name] = {"output": layer(embeds(2, 9)), "config": layer.config.position_encoding}
        expected[name]["half"] = layer.to(torch.bfloat16)(embeds(2, 9).bfloat16())
    first = make("learned", batch_first=False)
    first.save_pretrained(tmp_path / "sequence first")
    expected["sequence first"] = {"output": first(embeds(2, 9)), "config": first.config.position_encoding}
    torch.save({"inputs": embeds(2, 9), "expected": expected}, tmp_path / "expected.pt")
    run_python(RELOAD, tmp_path)


RELOAD = """
import sys, warnings
warnings.simplefilter("error")
import torch, hf_posenc
from transformers import AutoModel
from memory import poison_empty
poison_empty(setattr)

path = sys.argv[1]
saved = torch.load(path + "/expected.pt")
inputs = saved["inputs"]
for name, expected in saved["expected"].items():
    layer = AutoModel.from_pretrained(path + "/" + name)
    assert type(layer) is hf_posenc.PositionEmbedding and not layer.training, name
    assert layer.config.position_encoding == expected["config"], name
    assert torch.equal(layer(inputs), expected["output"]), name
    if "half" in expected:
        assert layer.dropout.p == 0.25 and layer.config.max_length == 20
        half = hf_posenc.PositionEmbedding.from_pretrained(path + "/" + name, dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} <= {torch.bfloat16}, name
        assert torch.equal(half(inputs.bfloat16()), expected["half"]), name
"""


class ParentConfig(PreTrainedConfig):
    model_type = "parent"


class Parent(PreTrainedModel):
    """A custom model that contains the layer."""

    config_class = ParentConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(D, D)
        self.positions = hf_posenc.PositionEmbedding("learned", D, max_length=MAX, init="sinusoidal")
        self.post_init()


def test_in_a_model_of_ones_own(tmp_path):
    """Existing weights are loaded. If a checkpoint has no positions, they keep their initial values."""
    parent = Parent(ParentConfig())
    nn.init.normal_(parent.positions.posenc.weight)
    parent.save_pretrained(tmp_path / "whole")
    loaded = Parent.from_pretrained(tmp_path / "whole")
    assert torch.equal(loaded.positions.posenc.weight, parent.positions.posenc.weight)
    weights = {name: value for name, value in parent.state_dict().items() if name.startswith("linear")}
    parent.save_pretrained(tmp_path / "part", state_dict=weights)
    loaded = Parent.from_pretrained(tmp_path / "part")
    assert torch.equal(loaded.linear.weight, parent.linear.weight)
    close(loaded.positions.posenc.weight.detach(), sinusoids([range(MAX)], D)[0])


def test_configs_and_files_are_checked(tmp_path):
    """A missing table raises an error, as in a patched model."""
    config = AutoConfig.for_model("posenc-embedding", position_encoding="absolute", hidden_size=D, max_length=5)
    layer = AutoModel.from_config(config)
    assert type(layer) is PositionEmbedding and layer.posenc.weight.shape == (5, D)
    assert config.position_encoding.items() >= {"type": "learned", "init": "normal", "std": 0.02}.items()
    with pytest.raises(ValueError, match="'sinusoidal' has no option 'theta'"):
        AutoConfig.for_model("posenc-embedding", position_encoding={"type": "sinusoidal", "theta": 3})
    for arguments in ({"base": 3.0}, {"hidden_size": 9}, {"max_length": 3}, {"dropuot": 0.5}):  # they would be ignored
        with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
            PositionEmbedding(config, **arguments)
    layer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'learned'.*'counter'|'counter'.*'learned'"):
        AutoModel.from_pretrained(tmp_path, position_encoding="counter")
    assert AutoModel.from_pretrained(tmp_path, position_encoding={"type": "absolute"}).posenc.type == "learned"
    layer.save_pretrained(tmp_path, state_dict={"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="posenc.weight"):
        AutoModel.from_pretrained(tmp_path)


@every_layer
def test_copies(name):
    layer, inputs = make(name), embeds(2, 9)
    expected = layer(inputs)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(inputs), expected)
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
    assert torch.equal(layer(inputs), expected)


@pytest.mark.parametrize("name", [name if name == "learned" else slow(name) for name in LAYERS])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    layer, inputs = make(name), embeds(2, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for arguments in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(9) + 2}):
        assert torch.equal(compiled(inputs, **arguments), layer(inputs, **arguments))
    with pytest.raises(ValueError, match="max_length"):
        torch.compile(make(name, max_length=8), backend="eager")(inputs)


# Token ids to hidden states.


@every_layer
@pytest.mark.parametrize("batch_first", [True, False])
def test_token_position_embedding(name, batch_first):
    torch.manual_seed(0)
    layer = TokenPositionEmbedding(
        10, **{"hidden_size": D, "batch_first": batch_first, "padding_idx": 0, **LAYERS[name]}
    ).eval()
    ids, mask = torch.tensor([[0, 0, 3, 9], [4, 4, 1, 2]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    given = ids if batch_first else ids.T
    for arguments, rows in (
        ({}, [range(4)] * 2),
        ({"attention_mask": mask}, [[0, 0, 0, 1], range(4)]),
        ({"position_ids": torch.tensor([[3, 1, 2, 2]])}, [[3, 1, 2, 2]] * 2),
        ({"past_length": 2}, [range(2, 6)] * 2),
    ):
        output = layer(given, **arguments)
        output = output if batch_first else output.transpose(0, 1)
        shown = mask.bool() if "attention_mask" in arguments else torch.ones(2, 4, dtype=torch.bool)
        expected = layer.tokens.weight[ids] + torch.stack([vectors(layer.positions, row) for row in rows])
        close(output[shown], expected[shown])
    assert not layer.tokens.weight[0].any()
    layer(given).square().sum().backward()
    assert not layer.tokens.weight.grad[0].any()
    assert all(parameter.grad.any() for parameter in layer.parameters())


def test_token_position_embedding_drops_out_the_sum():
    layer = TokenPositionEmbedding(10, "counter", D, dropout=1.0)
    assert not layer.train()(torch.tensor([[1, 2, 3]])).any()
    assert layer.eval()(torch.tensor([[1, 2, 3]])).any()


# Unsupported arguments.


@pytest.mark.parametrize(
    "kind",
    ["alibi", "logn", "none", "relative", "rotary", "sinusoidal+logn", "alibi+none", "rope+sinusoidal", "sinusoidal+shaw"],
)
def test_encodings_that_do_not_embed_belong_into_a_model(kind):
    with pytest.raises(ValueError, match=r"hf_posenc\.patch\(model, '"):
        PositionEmbedding(kind, D)
    layer = PositionEmbedding("sinusoidal+learned", D, max_length=5, learned__std=1)
    close(layer(torch.zeros(1, 5, D)), layer.posenc.learned.weight + sinusoids([range(5)], D))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"hidden_size": size}, f"hidden_size={size}") for size in (None, 0, True, 8.0)),
        *(({"encoding": "learned", "max_length": longest}, f"max_length={longest}") for longest in (0, -1, 2.5)),
        ({"encoding": "learned"}, "Pass max_length"),
        ({"max_length": True}, "max_length=True"),
        ({"dropout": 1.5}, "1.5"),
        ({"rows": 5}, "no option 'rows'"),
        ({"encoding": {"type": "sinusoidal", "base": 0.5}}, "sinusoidal.base=0.5"),
        ({"encoding": "sinusodial"}, "Unknown position encoding 'sinusodial'"),
        ({"encoding": None}, "a name or a dict"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PositionEmbedding(**{"encoding": "sinusoidal", "hidden_size": 8, **arguments})


@pytest.mark.parametrize("shape", [(5, D), (2, 5, D + 1), (2, 5, 1), (1, 2, 5, D)])
def test_wrong_input_shapes(shape):
    with pytest.raises(ValueError, match=rf"shape \({', '.join(map(str, shape))}\).*{D}"):
        make("sinusoidal")(torch.zeros(shape))


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        (1, {"position_ids": torch.zeros(2, 5, dtype=torch.long)}),
        (2, {"position_ids": torch.zeros(3, 5, dtype=torch.long)}),
        (2, {"position_ids": torch.zeros(2, 1, dtype=torch.long)}),
        (2, {"position_ids": torch.zeros(4, dtype=torch.long)}),
        (1, {"attention_mask": torch.ones(3, 5)}),
        (2, {"attention_mask": torch.ones(3, 5)}),
        (2, {"attention_mask": torch.ones(2, 4)}),
        (2, {"attention_mask": torch.ones(2, 5), "past_length": 3}),
    ],
)
def test_positions_and_masks_that_do_not_fit_the_input(batch, arguments):
    """Broadcasting would change the output shape, or count positions from the wrong end."""
    with pytest.raises(ValueError, match="position_ids|attention_mask"):
        make("sinusoidal")(embeds(batch, 5), **arguments)


@pytest.mark.parametrize("ids", [[[0, MAX]], [[-1, 0]]])
def test_position_ids_beyond_the_table(ids):
    low, high = min(ids[0]), max(ids[0])
    message = f"from {low} to {high} don't fit {MAX} learned" if high < MAX else f"{MAX + 1} positions are more"
    with pytest.raises(ValueError, match=message):
        make("learned")(embeds(1, 2), position_ids=torch.tensor(ids))
    assert make("learned")(embeds(1, 2), position_ids=torch.tensor([[0, MAX - 1]])).isfinite().all()
