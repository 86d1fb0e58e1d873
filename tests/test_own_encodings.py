"""Encodings defined outside the library."""

import functools
import math
import random
from typing import Annotated

import numpy
import pytest
import torch
from transformers import AutoModel

import hf_posenc
import valued
from closeness import assert_close, assert_equal, scale
from conftest import run_python
from hf_posenc.encodings import GreaterThan
from models import ENCODINGS, HOSTS, by_structure, first, randomize_encoding, stock, suits, tokens
from oracles import future, gpt2_query_key, in_pieces


class Window(hf_posenc.PositionEncoding, type="test-window"):
    """Hides tokens further than `width` away."""

    width: Annotated[int, GreaterThan(0)] = 2

    def distance_bias(self, distance):
        return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]


class Recency(hf_posenc.PositionEncoding, type="test-recency"):
    """A bias by content and absolute position, which grows with the key's position."""

    def score_bias(self, query, key, context):
        keys = context.key_positions(key.shape[2]).to(query.dtype)
        return (query @ key.transpose(-1, -2)).tanh() * keys[:, None, None, :]


class Stretch(hf_posenc.PositionEncoding, type="test-stretch"):
    """A scaling of queries and keys with parameters in each layer."""

    per_layer = True

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.weight = torch.nn.Parameter(torch.empty(geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.weight)

    def rotate(self, query, key, context):
        factor = 1 + context.positions[:, None, :, None] * self.weight
        return tuple(None if states is None else states * factor for states in (query, key))


class Liking(hf_posenc.PositionEncoding, type="test-liking"):
    """A bias by content and distance."""

    def score_bias(self, query, key, context):
        return (query @ key.mT).tanh() * context.distances(key.shape[2])[:, None]


def scratch(encoding):
    return AutoModel.from_config(hf_posenc.PosEncBertConfig(**{**HOSTS["bert"].sizes, "position_encoding": encoding}))


@pytest.mark.parametrize("host", by_structure(HOSTS))
def test_own_distance_bias(host):
    model = hf_posenc.patch(stock(host, **HOSTS[host].one_layer), "test-window", width=3)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        ids = tokens(1, 20)
        before = first(model(ids))
        ids[0, 15] = (ids[0, 15] + 1) % 50 + 3
        changed = (first(model(ids)) - before).abs().amax(-1)[0] > 1e-5 * scale(before)
        expected = torch.zeros(20, dtype=torch.bool)
        expected[15 if HOSTS[host].causal else 12 : 19] = True
        assert torch.equal(changed, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_own_score_bias(side):
    model = hf_posenc.patch(stock("gpt2", "LMHeadModel"), "test-recency")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real = slice(3, 9) if side == "left" else slice(0, 6)
    mask[0] = 0
    mask[0, real] = 1
    batch = model(ids, attention_mask=mask).logits
    assert_close(batch[:1, real], model(ids[:1, real]).logits)
    assert_close(in_pieces(model, ids, (5, 6), mask)[mask.bool()], batch[mask.bool()])


def test_loading_an_own_encoding_needs_its_class(tmp_path):
    model = hf_posenc.patch(stock("bert"), "test-window", width=4)
    with pytest.warns(UserWarning, match="saved without its code"):  # this file imports other test modules by their full names
        model.save_pretrained(tmp_path)
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))
    code = (
        "import sys, hf_posenc\nfrom transformers import AutoModel\n"
        "try: AutoModel.from_pretrained(sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    message = run_python(code, tmp_path)
    assert "test-window" in message and "import the module that defines its class" in message


@pytest.mark.parametrize("kind", ["test-stretch", "test-liking"])
@torch.no_grad()
def test_own_encodings_by_layer(kind):
    model = randomize_encoding(hf_posenc.patch(stock("gpt2"), kind))
    model.set_attn_implementation("eager")
    output = model(tokens(), output_attentions=True, output_hidden_states=True)
    positions = torch.arange(11)
    for block, hidden, actual in zip(model.h, output.hidden_states, output.attentions, strict=False):
        query, key = gpt2_query_key(block, hidden)
        if kind == "test-stretch":
            query, key = (states * (1 + positions[:, None] * block.attn.posenc.weight) for states in (query, key))
        scores = query @ key.mT * 8**-0.5
        if kind == "test-liking":
            scores = scores + (query @ key.mT).tanh() * (positions[None, :] - positions[:, None])
        assert_close(actual, scores.masked_fill(future(11), -torch.inf).softmax(-1))
    # The cache stores keys after `rotate`.
    assert_close(in_pieces(model, tokens(), (6, 7)), first(output))


@pytest.mark.parametrize("way", ["patch", "from scratch", "half precision"])
def test_values_made_in_init_are_kept(way):
    """The values are those that the class itself initializes."""
    for kind in valued.KINDS:
        torch.manual_seed(0)
        host = stock("bert").bfloat16() if way == "half precision" else stock("bert")
        model = scratch(kind) if way == "from scratch" else hf_posenc.patch(host, kind)
        encodings = [e for e in model.modules() if isinstance(e, hf_posenc.PositionEncoding) and e.type == kind]
        assert len(encodings) == (2 if kind == "test-modules" else 1)
        for encoding in encodings:
            expected = type(encoding)(encoding.geometry)
            if kind == "test-filled":
                expected.reset_parameters()
            given = {**dict(encoding.named_parameters()), **dict(encoding.named_buffers())}
            for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
                actual = given[name]
                if name in ("several.0", "several.1", "table.weight", "out.0.weight", "out.0.bias"):
                    assert actual.isfinite().all() and actual.float().std(unbiased=False) < 3 and actual.any()
                    # torch's initialization of an Embedding and a Linear, not BERT's with 0.02
                    assert name != "table.weight" or 0.6 < actual.float().std() < 1.4
                else:
                    assert torch.equal(actual, tensor.to(actual.dtype)), (kind, name)
            if kind == "test-buffers":
                assert torch.equal(encoding.plain, expected.plain) and encoding.scale == expected.scale
        if kind == "test-modules":
            assert not torch.equal(encodings[0].table.weight, encodings[1].table.weight)  # layers have different initial values


COME_BACK = """
import sys, torch, valued, hf_posenc
from transformers import AutoModel
from models import tokens
for kind, value in torch.load(sys.argv[1] + "/expected.pt").items():
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModel.from_pretrained(sys.argv[1] + "/" + kind, dtype=dtype)
        print(kind, dtype, (model(tokens())[0] - value).abs().max().item() / value.abs().max().item())
"""


def test_values_made_in_init_come_back(tmp_path):
    expected = {}
    for kind in ("+".join(valued.KINDS), *valued.KINDS):
        model = hf_posenc.patch(stock("gpt2"), kind)
        model.save_pretrained(tmp_path / kind)
        assert (tmp_path / kind / "posenc_own_valued.py").is_file()
        expected[kind] = first(model(tokens())).detach()
    torch.save(expected, tmp_path / "expected.pt")
    for line in run_python(COME_BACK, tmp_path).splitlines():
        assert float(line.split()[-1]) <= (0.0 if "float32" in line else 0.05), line


class Random(hf_posenc.PositionEncoding, type="test-random"):
    """An encoding with only a random value."""

    place: str = "saved"
    PLACES = {
        "plain": lambda: torch.rand(4),
        "number": lambda: torch.rand(()).item(),
        "numbers": lambda: {"slopes": [torch.rand(()).item(), 2.0]},
        "array": lambda: numpy.random.rand(4),
        "others": lambda: [torch.nn.Parameter(torch.rand(4)), torch.tensor(torch.nan), numpy.arange(3), object()],
        "seeded": lambda: torch.rand(4, generator=torch.Generator().manual_seed(3)),
    }

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        if self.place in ("saved", "buffer"):
            self.register_buffer("noise", torch.rand(4), persistent=self.place == "saved")
        elif self.place == "module":
            self.inner = torch.nn.Module()
            self.inner.noise = random.random()
        elif self.place == "empty":
            self.weight = torch.nn.Parameter(torch.empty(4))
        else:
            self.noise = self.PLACES[self.place]()

    def distance_bias(self, distance):
        return distance[None] * 0.0


def test_layers_and_models_share_no_constant(own_registry):
    """Each layer of each model has its own copy of a tensor that an `__init__` reads from elsewhere."""
    constant = torch.linspace(0.0, 1.0, 8)

    class Constant(hf_posenc.PositionEncoding, type="constant-in-test"):
        per_layer = True

        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.weight = torch.nn.Parameter(constant[:4])
            self.register_buffer("power", constant[4:].expand(2, 4))

        def distance_bias(self, distance):
            return self.weight[:, None] * distance.abs() ** self.power[0, :, None]

    patched = hf_posenc.patch(stock("bert"), "constant-in-test")
    for models in ([patched, hf_posenc.patch(stock("bert"), "constant-in-test")], [type(patched)(patched.config)]):
        tensors = [each for model in models for name, each in model.state_dict().items() if "self.posenc." in name]
        assert len({each.untyped_storage().data_ptr() for each in [constant, *tensors]}) == 1 + 4 * len(models)
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)


def test_what_would_come_back_differently_is_refused():
    for place in ("buffer", "plain", "number", "module", "numbers", "array"):
        with pytest.raises(ValueError, match=r"noise of the 'test-random' encoding isn't saved.*persistent buffer"):
            hf_posenc.patch(stock("bert"), "test-random", place=place)
    with pytest.raises(ValueError, match=r"Random.weight .*uninitialized memory.*__init__"):
        hf_posenc.patch(stock("bert"), "test-random", place="empty")
    for place in ("seeded", "saved", "others"):
        hf_posenc.patch(stock("bert"), "test-random", place=place)


def test_an_encoding_draws_nothing_from_torchs_generator():
    """A model from scratch has the same other weights with every encoding. Another seed changes the encoding's weights."""
    reference, own = None, []
    for encoding in (*filter(lambda name: suits("bert", name), ENCODINGS), "sinusoidal+rope+relative+shaw", *valued.KINDS):
        torch.manual_seed(5)
        model = scratch(encoding)
        after = torch.rand(1)
        host = {name: value for name, value in model.state_dict().items() if "posenc" not in name}
        assert_equal({**host, "next": after}, reference := reference or {**host, "next": after})
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        own.append(scratch("relative").posenc.weight)
    assert torch.equal(own[0], own[2]) and not torch.equal(own[0], own[1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"forward": lambda self, positions: positions}, "Idle can't define forward"),
        ({"distance_vectors": lambda self, distance: distance}, "Idle defines distance_vectors without score_bias"),
        (
            {"distances_bias": lambda self, distance: distance},
            r"Idle.distances_bias is never called \(did you mean 'distance_bias'\?\)",
        ),
        (
            {"__init__": lambda self, geometry: None, "distance_bias": lambda self, distance: None},
            r"Idle.__init__ takes no 'per_layer'. Define it as __init__\(self, geometry, \*\*options\)",
        ),
        ({"conflict": "rope"}, "Idle.conflict is a str. .*classmethod"),
    ],
)
def test_classes_that_would_never_act(own_registry, content, words):
    with pytest.raises(ValueError, match=words):
        type("Idle", (hf_posenc.PositionEncoding,), content, type="test-idle")
    assert "test-idle" not in hf_posenc.PositionEncoding.registered


def test_an_encoding_without_a_mechanism(own_registry):
    type("Idle", (hf_posenc.PositionEncoding,), {}, type="test-idle")
    model = stock("bert")
    with pytest.raises(ValueError, match="'test-idle' overrides none of 'embed', .*'value_bias', so it has no effect"):
        hf_posenc.patch(model, "test-idle")


def test_options_that_are_not_passed_on(own_registry):
    """The config would store a value that the encoding ignores."""

    class Rate(hf_posenc.PositionEncoding, type="test-rate"):
        rate: float = 2.0

        def __init__(self, geometry, **options):
            super().__init__(geometry)

        def distance_bias(self, distance):
            return -self.rate * distance.abs()[None]

    assert hf_posenc.patch(stock("bert"), "test-rate").posenc.rate == 2.0
    for encoding, option in (("test-rate", {"rate": 3.0}), ("rope+test-rate", {"test-rate__rate": 3.0})):
        with pytest.raises(ValueError, match=r"Rate.__init__ doesn't pass 'rate' on.*super\(\).__init__\(geometry, \*\*opt"):
            hf_posenc.patch(stock("bert"), encoding, **option)


def test_a_decorated_init_takes_what_the_decorator_takes(own_registry):
    def with_options(init):
        @functools.wraps(init)
        def init_with_options(self, geometry, **options):
            init(self, geometry, options)

        return init_with_options

    class Decorated(hf_posenc.PositionEncoding, type="test-decorated"):
        rate: float = 2.0

        @with_options
        def __init__(self, geometry, options):
            super().__init__(geometry, **options)

        def distance_bias(self, distance):
            return -self.rate * distance.abs()[None]

    assert hf_posenc.patch(stock("bert"), "test-decorated", rate=3.0).posenc.rate == 3.0


@pytest.mark.parametrize(
    ("mechanism", "result", "words"),
    [
        ("embed", lambda positions: None, r"embed of 'test-idle' returned None. Return \[..., L, 32\]"),
        ("embed", lambda positions: positions.float(), r"embed of 'test-idle' returned \(1, 32\)"),
        ("embed", lambda positions: positions[..., None].float(), r"embed of 'test-idle' returned \(1, 32, 1\)"),
        ("embed", lambda positions: torch.ones(32), r"embed of 'test-idle' returned \(32,\)"),
        ("rotate", lambda query, key, context: query, r"rotate of 'test-idle' returned \(2, 4, 32, 8\). Return a pair"),
        ("distance_bias", lambda distance: None, "distance_bias of 'test-idle' returned None. Return a tensor"),
        ("distance_bias", lambda distance: torch.ones(63, 4), r"\(63, 4\) for 63 distances. Return \[H, N\]"),
        ("distance_bias", lambda distance: torch.ones(8, 63), "biases for 8 heads. Return 1 or 4"),
        ("score_bias", lambda query, key, context: None, "score_bias of 'test-idle' returned None"),
        ("value_bias", lambda weights, context: None, "value_bias of 'test-idle' returned None"),
    ],
)
def test_results_without_an_effect_or_of_another_shape(own_registry, mechanism, result, words):
    type("Idle", (hf_posenc.PositionEncoding,), {mechanism: lambda self, *args: result(*args)}, type="test-idle")
    for encoding in ("test-idle", "rope+test-idle"):
        model = hf_posenc.patch(stock("bert", max_position_embeddings=32), encoding)
        with pytest.raises(ValueError, match=words):
            model(tokens(2, 32))


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))])
def test_modules_that_a_method_would_hide(own_registry, value):
    class Hidden(hf_posenc.PositionEncoding, type="test-hidden"):
        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.rows = value

        def embed(self, positions):
            return None

    with pytest.raises(ValueError, match=r"Hidden.rows can't.*a parameter: .* such as rows_table"):
        hf_posenc.patch(stock("bert"), "test-hidden")


def test_a_bias_of_one_axis(own_registry):
    class Flat(hf_posenc.PositionEncoding, type="test-flat"):
        def distance_bias(self, distance):
            return -distance.abs().float()

    model = hf_posenc.patch(stock("bert"), "test-flat")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.raises(ValueError, match=r"distance_bias of 'test-flat' returned \(21,\).*\[H, N\]"):
            model(tokens(1, 11))


class Odd(hf_posenc.PositionEncoding, type="test-odd"):
    """Values that a torch module can hold, valid and invalid ones."""

    holds: str = "complex"

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        match self.holds:
            case "complex":
                self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
            case "legacy":
                self.weight = torch.nn.Parameter(torch.Tensor(4))
            case "integers":
                self.register_buffer("index", torch.empty(4, dtype=torch.long))
            case "generator":
                self.draw = torch.Generator().manual_seed(3)
            case "lstm":
                self.lstm = torch.nn.LSTM(2, 2)
            case "tied":
                self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
                self.b.weight = self.a.weight
            case "lazy":
                self.lazy = torch.nn.LazyLinear(2)
            case "sparse":
                self.register_buffer("table", torch.eye(4).to_sparse())

    def reset_parameters(self):
        if self.holds == "legacy":
            torch.nn.init.ones_(self.weight)
        if self.holds == "integers":
            self.index.copy_(torch.arange(4))

    def distance_bias(self, distance):
        return distance[None] * 0.0


def test_what_an_encoding_may_hold():
    """The test repeats, because reused memory can look initialized."""
    for _ in range(3):
        made = {
            holds: hf_posenc.patch(stock("bert").bfloat16(), "test-odd", holds=holds).posenc
            for holds in ("complex", "legacy", "integers", "generator", "lstm")
        }
        turn = made["complex"].turn
        assert turn.is_complex() and turn[1].imag.item() == pytest.approx(math.sin(1.0))
        assert made["legacy"].weight.tolist() == [1.0] * 4 and made["integers"].index.tolist() == [0, 1, 2, 3]
    for holds, words in {
        "tied": "Odd.b.weight and a.weight .*same tensor",
        "lazy": "Odd.lazy.weight has no shape",
        "sparse": "Odd.table is a sparse",
    }.items():
        with pytest.raises(ValueError, match=words):
            hf_posenc.patch(stock("bert"), "test-odd", holds=holds)
