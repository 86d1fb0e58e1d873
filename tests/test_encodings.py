"""The inputs of encodings and their combination: contexts of a forward pass, compositions, and parts in a layer stack or its
attentions.

test_vectors.py, test_rotations.py, test_distance_biases.py, and test_content_biases.py test the formulas.

Shapes: B batch, L tokens, H heads, E head_dim, D hidden_size.
"""

import json

import pytest
import torch
from transformers import AutoModel

import hf_posenc
from closeness import assert_apart, assert_close
from hf_posenc.encodings import Geometry, PositionContext, PositionEncoding, positions_of
from models import ENCODINGS, first, patched, randomize_encoding, stock, tiny, tokens
from oracles import context_of, in_pieces, make, random

# One encoding.


@pytest.mark.parametrize(
    ("kind", "is_causal", "expected"),
    [
        ("learned", False, True),
        ("learned", True, True),
        ("tupe", False, True),
        ("normalized", True, True),
        ("normalized", False, False),
    ]
    + [("alibi+learned", False, True), ("alibi+normalized", True, True), ("alibi+normalized", False, False)]
    + [(kind, True, False) for kind in ("alibi", "counter", "logn", "none", "relative", "rope", "sinusoidal", "alibi+rope")],
)
def test_what_needs_a_longest_length(kind, is_causal, expected):
    """In a causal layer stack, `normalized` would divide by the length of the text, which changes at each step."""
    if not expected:
        make(kind, is_causal=is_causal)
        return
    with pytest.raises(ValueError, match="needs max_length, .* Pass max_length"):
        make(kind, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["alibi", "counter", "logn", "normalized", "rope", "sinusoidal"])
def test_the_default_dtype_does_not_matter(kind):
    """Integers above 256 and most angles can't be represented in bfloat16."""
    encoding, positions = make(kind), torch.arange(250, 400)[None]
    states, context = random(1, 4, 150, 8), context_of(encoding, positions)

    def results():
        context.computed.clear()
        found = [encoding.embed(positions), encoding.distance_bias(positions[0]), encoding.rotate(states, None, context)[0]]
        return [result.double() for result in found if result is not None]

    expected, before = results(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        actual = results()
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", [*ENCODINGS, "relative_key_query", "learned+shaw", "sinusoidal+rope+t5"])
def test_verbs_an_encoding_lacks_do_nothing(kind):
    encoding = make(kind, max_length=40, is_causal=True)
    query, key, context = random(1, 4, 40, 8), random(1, 4, 40, 8), context_of(encoding, torch.arange(40)[None])
    verbs = {*encoding.mechanisms()} - (set() if encoding.needs_attention_weights() else {"value_bias"})
    results = {
        "embed": encoding.embed(torch.arange(3)),
        "distance_bias": encoding.distance_bias(torch.arange(3)),
        "score_bias": encoding.score_bias(query, key, context),
        "value_bias": encoding.value_bias((query @ key.mT).softmax(-1), context),
    }
    assert {verb for verb, result in results.items() if result is not None} == verbs - {"rotate"}
    rotated = encoding.rotate(query, key, context)
    assert (rotated[0] is query and rotated[1] is key) == ("rotate" not in verbs)


# Positions of one forward pass.


def test_once_computes_once_in_each_pass():
    calls = []

    def compute(value):
        calls.append(value)
        return value

    context, other = (context_of(PositionEncoding(Geometry(4)), torch.arange(3)[None]) for _ in range(2))
    assert [context.cached("a", lambda: compute(1)) for _ in range(3)] == [1, 1, 1]
    assert context.cached("b", lambda: compute(None)) is None
    assert context.cached("b", lambda: compute(2)) is None
    assert other.cached("a", lambda: compute(3)) == 3
    assert calls == [1, None, 3]


@pytest.mark.parametrize(
    ("start", "keys", "first_key", "expected"),
    [
        pytest.param([[0]], None, 0, [[0, 1, 2]], id="consecutive"),
        pytest.param([[-4]], None, 0, [[4, 5, 6, 7, 8]], id="offset"),
        pytest.param([[1], [3]], None, 0, [[-1, 0, 1, 2, 3], [-3, -2, -1, 0, 1]], id="left padding"),
        pytest.param([[1], [3]], None, 2, [[1, 2, 3], [-1, 0, 1]], id="left padding behind a window"),
        pytest.param([[0]], [[9, 4, 4]], 0, [[9, 4, 4]], id="jumping"),
        pytest.param([[0]], [[9, 4, 4], [1, 2, 7]], 1, [[4, 4], [2, 7]], id="jumping behind a window"),
        pytest.param([[0]], [[4, 5, 2]], 0, [[4, 5, 2, 2, 2]], id="more keys than positions"),
    ],
)
def test_key_positions(start, keys, first_key, expected):
    context = PositionContext(
        PositionEncoding(Geometry(4)),
        positions=torch.arange(1)[None],
        past=0,
        start=torch.tensor(start),
        keys=None if keys is None else torch.tensor(keys),
        first_key=first_key,
    )
    actual = context.key_positions(len(expected[0]))
    assert not actual.is_floating_point() and actual.tolist() == expected
    assert context.is_contiguous is (keys is None)


MASKS = {
    "full": [1, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 0, 0],
    "left": [0, 0, 1, 1, 1, 1],
    "both": [0, 1, 1, 1, 1, 0],
    "hole": [0, 1, 0, 1, 1, 1],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_positions_count_from_the_first_shown_token(mask, past, dtype):
    shown = [index for index, value in enumerate(mask) if value]
    batch = torch.tensor([mask, MASKS["full"]]).to(dtype)
    positions, start = positions_of(6 - past, past, batch, batch.device)
    assert start.tolist() == [[shown[0]], [0]]
    assert positions[1].tolist() == list(range(past, 6))
    for index, position in zip(range(past, 6), positions[0].tolist(), strict=True):
        assert 0 <= position <= shown[-1] - shown[0]
        if index in shown:
            assert position == index - shown[0]


@pytest.mark.parametrize("mask", [None, torch.zeros(2, 1, 4, 7)], ids=["no mask", "4-D mask"])
@pytest.mark.parametrize("past", [3, torch.tensor(3)], ids=["int", "tensor"])
def test_positions_without_a_2d_mask_are_those_of_the_keys(mask, past):
    positions, start = positions_of(4, past, mask, torch.device("cpu"))
    assert positions.tolist() == [[3, 4, 5, 6]] and start.tolist() == [[0]]


# Compositions.


def test_a_composition_sums_what_its_parts_add():
    kind = "counter+t5+relative+shaw+sinusoidal"
    torch.manual_seed(0)
    whole, positions = make(kind), torch.tensor([[4, 5, 9]])
    parts = {name: make(name) for name in kind.split("+")}
    for name, part in parts.items():
        part.load_state_dict(getattr(whole, name).state_dict())
    torch.testing.assert_close(whole.embed(positions), parts["counter"].embed(positions) + parts["sinusoidal"].embed(positions))
    distance = torch.arange(-9, 10)
    expected = parts["t5"].distance_bias(distance) + parts["relative"].distance_bias(distance)
    torch.testing.assert_close(whole.distance_bias(distance), expected)
    states, context = random(1, 4, 3, 8, dtype=torch.float32), context_of(whole, positions).for_attention(0.3)
    assert torch.equal(whole.score_bias(states, states, context), parts["shaw"].score_bias(states, states, context))
    assert {name.partition(".")[0] for name, _ in whole.named_parameters()} == {"t5", "relative", "shaw"}


def test_a_composition_rotates_in_the_order_of_its_name():
    class Swap(PositionEncoding, type="test-swap"):
        """Doesn't commute with rotations."""

        def rotate(self, query, key, context):
            return tuple(None if states is None else states.flip(-1) * 2 for states in (query, key))

    query, key, positions = random(1, 4, 3, 8), random(1, 4, 3, 8, seed=1), torch.tensor([[1, 2, 30]])
    rope, swap = make("rope"), make("test-swap")
    for kind, parts in (("rope+test-swap", (rope, swap)), ("test-swap+none+rope", (swap, rope))):
        whole = make(kind)
        context = context_of(whole, positions)
        expected = query, key
        for part in parts:
            expected = part.rotate(*expected, context_of(part, positions))
        assert all(map(torch.equal, whole.rotate(query, key, context), expected))
        assert torch.equal(whole.rotate(query, None, context)[0], expected[0])
        assert torch.equal(whole.rotate(None, key, context)[1], expected[1])
    assert not torch.equal(make("rope+test-swap").rotate(query, key, context)[0], expected[0])


def test_a_composition_adopts_the_host_table():
    whole, table = make("alibi+learned", max_length=7, learned__init="host"), random(5, 16, dtype=torch.float32)
    whole.init_from_original_table(table)
    assert torch.equal(whole.learned.weight[:5], table)


@pytest.mark.parametrize(
    ("kind", "stack", "attention"),
    [
        ("shaw", set(), {"weight"}),
        ("t5", {"weight"}, set()),
        ("learned+shaw", {"learned.weight"}, {"shaw.weight"}),
        ("shaw+t5+alibi", {"t5.weight"}, {"shaw.weight"}),
        ("alibi+sinusoidal", set(), set()),
        ("learned+t5", {"learned.weight", "t5.weight"}, set()),
    ],
)
def test_who_owns_what(kind, stack, attention):
    """The layer stack holds what all layers share. Each attention holds its separate parameters. Nothing is in both."""
    names = [name for name in hf_posenc.patch(stock("bert"), kind, keep_original=False).state_dict() if "posenc." in name]
    assert {name.removeprefix("posenc.") for name in names if name.startswith("posenc.")} == stack
    assert {name.partition(".posenc.")[2] for name in names if ".posenc." in name} == attention


@pytest.mark.parametrize("host", ["bert", "gpt2", "mpnet"])
@torch.no_grad()
def test_a_composition_is_all_of_its_parts(host):
    """Removing a part changes the outputs. Reordering the parts or adding `none` doesn't."""
    expected = first(patched(host, "sinusoidal+rope+alibi")(tokens()))
    for less in ("rope+alibi", "sinusoidal+alibi", "sinusoidal+rope"):
        assert_apart(first(patched(host, less)(tokens())), expected)
    assert_close(first(patched(host, "alibi+rope+sinusoidal+none")(tokens())), expected)


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("pope+rope", "'pope' uses the magnitudes .*'rope' changes"),
        ("pope+shaw", "'pope' makes queries and keys twice .*'shaw'"),
        ("fox+rope", "the gates of 'fox' depend on keys"),
    ],
)
def test_what_cannot_act_in_one_layer(encoding, reason):
    one, other = encoding.split("+")
    for name in (encoding, f"{other}+{one}"):
        with pytest.raises(ValueError, match=f"combined in one layer: {reason}.*separate layers .*__layers=…"):
            hf_posenc.patch(stock("gpt2"), name)
    layered = {f"{one}__layers": [0], f"{other}__layers": [1]}
    assert first(hf_posenc.patch(stock("gpt2"), encoding, **layered)(tokens())).isfinite().all()


@pytest.mark.parametrize("encoding", ["pope+alibi", "fox+logn", "tupe+pope", "fire+pope"])
def test_what_can(encoding):
    model, ids = patched("gpt2", encoding), tokens(2, 12)
    assert_close(in_pieces(model, ids, (5, 11)), first(model(ids)))


def test_options_of_a_composition_are_saved(tmp_path):
    options = {"sinusoidal": {"base": 77.0, "layout": "concatenated", "scale": "learned"}}
    model = hf_posenc.patch(
        stock("bert"),
        {"type": "sinusoidal+rotary+alibi", **options},
        rotary__theta=50,
        rope__layout="interleaved",
        max_length=9,
    )
    randomize_encoding(model).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["position_encoding"]
    rope, alibi = {"theta": 50.0, "layout": "interleaved"}, {"slopes": "fixed", "sides": "symmetric", "per_layer": False}
    host = saved.pop("original")
    options["sinusoidal"] |= {"bases": None, "frequencies": "fixed", "trained_length": None}
    assert host["kept"] and saved == {
        "type": "sinusoidal+rope+alibi", **options, "rope": rope, "alibi": alibi, "inject": "input", "max_length": 9
    }  # fmt: skip
    assert "posenc.sinusoidal.factor" in model.state_dict()
    assert hf_posenc.inspect(model).options == {**options, "rope": rope, "alibi": alibi}
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens(length=9))), first(model(tokens(length=9))))
    with pytest.raises(ValueError, match=r"10 tokens.*max_length=9 of this model's 'sinusoidal\+rope\+alibi'"):
        model(tokens(length=10))

    # Options given on loading replace the saved ones in each part.
    given = {"type": "sinusoidal+rope+alibi", "rope": {"theta": 5.0}, "sinusoidal": {"base": 3.0}}
    other = AutoModel.from_pretrained(tmp_path, position_encoding=given)
    expected = {"sinusoidal": {**options["sinusoidal"], "base": 3.0}, "rope": {**rope, "theta": 5.0}, "alibi": alibi}
    assert {part: other.config.position_encoding[part] for part in expected} == expected
    assert other.config.position_encoding["max_length"] == 9 and other.config.position_encoding["original"] == host
    assert (other.posenc.rope.theta, other.posenc.rope.layout, other.posenc.sinusoidal.base) == (5.0, "interleaved", 3.0)
    given = {"type": "sinusoidal+rotary+alibi", "rope__theta": 6.0}
    assert AutoModel.from_pretrained(tmp_path, position_encoding=given).posenc.rope.theta == 6.0
    same = AutoModel.from_pretrained(tmp_path, position_encoding="sinusoidal+rotary+alibi")
    assert torch.equal(first(same(tokens(length=9))), first(model(tokens(length=9))))
    for wrong in ("sinusoidal+rope", "rope+sinusoidal+alibi", "sinusoidal", "alibi"):
        with pytest.raises(ValueError, match=r"saved with the 'sinusoidal\+rope\+alibi' encoding, not"):
            AutoModel.from_pretrained(tmp_path, position_encoding=wrong)


# Parts of a model.


def two_inputs(length):
    return {"input_ids": tokens(1, length), "decoder_input_ids": tokens(1, 7)}


@pytest.mark.parametrize("max_length", [12, 128])
@torch.no_grad()
def test_a_length_of_the_encoder_alone(max_length, tmp_path):
    """The decoder keeps its own positions and the length of its table."""
    bart = tiny("BartModel")
    rows = bart.config.max_position_embeddings
    model = hf_posenc.patch(bart, "alibi", where="encoder", max_length=max_length)
    assert model.config.max_position_embeddings == hf_posenc.unpatch(model).config.max_position_embeddings == rows
    model.save_pretrained(tmp_path)
    assert torch.equal(
        first(AutoModel.from_pretrained(tmp_path)(**two_inputs(max_length))), first(model(**two_inputs(max_length)))
    )
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        model(**two_inputs(max_length + 1))
    assert first(hf_posenc.extend(model, max_length=200)(**two_inputs(200))).isfinite().all()


@pytest.mark.parametrize("max_length", [None, 64])
@torch.no_grad()
def test_a_part_of_clip_reads_longer_texts(max_length):
    clip, text = tiny("CLIPModel"), tokens(1, 40)
    model = hf_posenc.patch(clip, "alibi", submodel="text_model", max_length=max_length)
    alone = hf_posenc.patch(clip.text_model, "alibi", max_length=64)
    assert torch.equal(first(model.text_model(input_ids=text)), first(alone(input_ids=text)))


@pytest.mark.parametrize("where", [{"encoder": "rope", "decoder": "alibi"}, {"encoder": "rope", "cross": None}])
def test_an_encoding_that_would_act_nowhere(where):
    bart = tiny("BartModel")
    with pytest.raises(ValueError, match=r"applies nowhere|None as an encoding"):
        hf_posenc.patch(bart, "shaw", where=where)
    assert hf_posenc.inspect(hf_posenc.patch(bart, "shaw", where={"encoder": {}, "decoder": "alibi"}))
