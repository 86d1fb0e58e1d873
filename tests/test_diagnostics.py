"""Diagnostics of encodings, compared with analytic results and with loops over floats."""

import cmath
import json
import math
import statistics

import pytest
import torch

import hf_posenc
from hf_posenc import diagnostics
from hf_posenc.diagnostics import matrix_properties
from models import patched, shared
from oracles import make

pytestmark = pytest.mark.usefixtures("own_registry")

SMALL = dict(hidden_size=16, num_attention_heads=2)
EIGHT = dict(hidden_size=64, num_attention_heads=8)
NAN, INF = math.nan, math.inf


def close(actual, expected, within=1e-9):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=within, atol=within, equal_nan=True)


def embedding(function):
    """An encoding whose vectors are the lists of floats that a function returns for each position."""

    class Own(hf_posenc.PositionEncoding, type="own"):
        def embed(self, positions):
            return torch.tensor([function(position) for position in positions.tolist()], dtype=torch.float64)

    return "own"


# Results.


def test_results_as_json():
    matrix = torch.tensor([[[1.0, NAN], [-INF, 2.5]]], dtype=torch.float64)
    result = diagnostics.Similarity("own", "scores", matrix, None)
    given = json.loads(result.to_json())
    about = {"diagnostic": "Similarity", "encoding": "own", "quantity": "scores", "cosine": None}
    assert given == {**about, "matrix": [[[1.0, None], ["-inf", 2.5]]]}
    assert result == diagnostics.Similarity("own", "scores", matrix.clone(), None)
    assert result != diagnostics.Similarity("own", "scores", matrix + 1, None)
    with pytest.raises(AttributeError):
        result.encoding = "other"


EVERY = ("similarity", "decay", "properties", "uniqueness", "precision", "shift_error", "wavelengths")


@pytest.mark.parametrize("encoding", sorted(name for name, cls in hf_posenc.list_encodings().items() if cls.axes == 1))
def test_every_encoding_is_measured_or_refused_by_name(encoding):
    given = {"type": encoding, **({"trained_length": 8} if encoding in ("fope", "logn", "self_extend") else {})}
    measured = set()
    for name in EVERY:
        try:
            result = getattr(diagnostics, name)(given, length=12, **SMALL)
        except ValueError as error:
            assert repr(encoding) in str(error)
            continue
        measured.add(name)
        assert json.loads(result.to_json()) == result.to_dict()
        assert str(result).startswith(f"{encoding}: ") and "nan" not in str(result)
    verbs = hf_posenc.list_encodings()[encoding].mechanisms()
    assert ({*EVERY[:5]} <= measured) == bool(verbs) and ("shift_error" in measured) == ("embed" in verbs)


# Similarity and decay.


def test_similarity():
    """The similarity equals that of given vectors, a rotation, a causal bias, and the sum of a rotation and a bias.

    For a rotation, a query and a key of ones give 2 cos(d f) for each pair of features, scaled by 1/√E.
    """
    found = diagnostics.similarity(embedding(lambda p: [p + 1.0, 1.0]), 3, hidden_size=2, num_attention_heads=1)
    close(found.matrix, [[[2.0, 3, 4], [3, 5, 7], [4, 7, 10]]])
    close(found.cosine[0, 0, 2], 4 / math.sqrt(2 * 10))
    found = diagnostics.similarity("rope", 5, hidden_size=8, num_attention_heads=2)
    products = [
        [sum(2 * math.cos((j - i) * 10000 ** (-2 * pair / 4)) for pair in range(2)) for j in range(5)] for i in range(5)
    ]
    products = torch.tensor([products], dtype=torch.float64)
    close(found.matrix, (products / 2).tolist())
    close(found.cosine, (products / 4).tolist())
    found = diagnostics.similarity("alibi", 3, causal=True, **EIGHT)
    assert found.matrix.shape == (8, 3, 3) and found.cosine is None
    close(found.matrix[0], [[0, NAN, NAN], [-0.5, 0, NAN], [-1, -0.5, 0]])
    both, rope, alibi = (diagnostics.similarity(name, 6, **SMALL).matrix for name in ("rope+alibi", "rope", "alibi"))
    assert rope.shape[0] == 1
    close(both, (rope + alibi).tolist())


def test_decay():
    """The decay equals that of ALiBi, of the dot products (i + 1)(j + 1), and of a window. At distance -1, these products are
    2, 6, and 12.
    """
    found = diagnostics.decay("alibi", 20, **EIGHT)
    assert found.distances == tuple(range(-19, 20)) and found.bound is None
    close(found.mean, [[-(2.0**-head) * abs(d) for d in found.distances] for head in range(1, 9)])
    assert not found.spread.any()
    found = diagnostics.decay(embedding(lambda p: [p + 1.0]), 4, hidden_size=1, num_attention_heads=1)
    place = found.distances.index(-1)
    close(found.mean[0, place], statistics.mean([2, 6, 12]))
    close(found.spread[0, place], statistics.pstdev([2, 6, 12]))

    class Window(hf_posenc.PositionEncoding, type="own_window"):
        def distance_bias(self, distance):
            return torch.where(distance.abs() > 1, -torch.inf, 0.0)[None]

    found = diagnostics.decay("own_window", 4, causal=True, **SMALL)
    assert found.distances == (-3, -2, -1, 0) and not found.spread.any()
    assert json.loads(found.to_json())["mean"] == [["-inf", "-inf", 0.0, 0.0]]


def test_bound_of_rope():
    found = diagnostics.decay({"type": "rope", "theta": 100.0}, 9, hidden_size=12, num_attention_heads=2)
    for distance, bound in zip(found.distances, found.bound.tolist(), strict=True):
        waves = [cmath.exp(1j * distance * 100 ** (-2 * pair / 6)) for pair in range(3)]
        sums = [abs(sum(waves[: last + 1])) for last in range(3)]
        close(bound, sum(sums) / (1 + 2 + 3))
    assert diagnostics.decay("xpos", 9, **SMALL).bound is None


# The properties of Wang et al.


def loops(matrix, near=None):
    """Translation invariance, monotonicity, and symmetry of a matrix that is given as lists."""
    size = range(len(matrix))
    cells = {(i, j): matrix[i][j] for i in size for j in size if math.isfinite(matrix[i][j])}
    beside = {place: value for place, value in cells.items() if place[0] != place[1]}
    total = statistics.pvariance(beside.values()) * len(beside)
    diagonals = [[value for (i, j), value in beside.items() if j - i == d] for d in range(-len(matrix), len(matrix))]
    within = sum(statistics.pvariance(values) * len(values) for values in diagonals if values)
    right = count = 0
    for i, j in cells:
        for k in size:
            on_one_side = (j - i) * (k - i) >= 0 and abs(k - i) > abs(j - i)
            if on_one_side and (i, k) in cells and (near is None or abs(k - i) <= near):
                right += 1 if cells[i, j] > cells[i, k] else 0.5 if cells[i, j] == cells[i, k] else 0
                count += 1
    pairs = {(i, j): value for (i, j), value in beside.items() if (j, i) in beside}
    mean = statistics.mean(pairs.values()) if pairs else NAN
    same = sum(((value + pairs[j, i]) / 2 - mean) ** 2 for (i, j), value in pairs.items())
    whole = sum((value - mean) ** 2 for value in pairs.values())
    return 1 - within / total, right / count, same / whole if pairs else NAN


@pytest.mark.parametrize("causal", [False, True])
def test_matrix_properties(causal):
    matrix = torch.randint(-3, 4, (2, 7, 7), generator=torch.Generator().manual_seed(0)).double()
    matrix[0, 3, 5] = matrix[0, 5, 3] = -INF
    if causal:
        matrix = matrix.masked_fill(matrix_properties.distances(7) > 0, NAN)
    for place in range(2):
        given = matrix[place].tolist()
        invariance, falling, same = loops(given)
        close(matrix_properties.translation_invariance(matrix, 1e-9)[place], invariance)
        close(matrix_properties.monotonicity(matrix, 1e-9)[place], falling)
        close(matrix_properties.monotonicity(matrix, 1e-9, near=2)[place], loops(given, near=2)[1])
        close(matrix_properties.symmetry(matrix, 1e-9)[place], same)


def test_properties():
    """The properties hold for ALiBi, asymmetric biases, growing vectors, and equal vectors. The asymmetric biases decrease by m
    for earlier keys, and by √2 m for later keys.
    """
    found = diagnostics.properties("alibi", 12, **EIGHT)
    for name in ("translation_invariance", "monotonicity", "local_monotonicity", "symmetry"):
        close(getattr(found, name), [1.0] * 8)
    found = diagnostics.properties({"type": "alibi", "sides": "asymmetric"}, 8, **SMALL)
    assert found.monotonicity.eq(1).all() and found.translation_invariance.eq(1).all() and (found.symmetry < 1).all()
    growing = diagnostics.properties(embedding(lambda p: [p + 1.0]), 12, hidden_size=1, num_attention_heads=1)
    assert growing.translation_invariance < 0.2 and growing.symmetry == 1
    flat = diagnostics.properties(embedding(lambda p: [1.0]), 12, hidden_size=1, num_attention_heads=1)
    assert flat.translation_invariance.isnan() and flat.monotonicity.isnan() and "undefined" in str(flat)


# Shifts.


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_sinusoids_are_shifted_by_one_matrix(layout):
    encoding = {"type": "sinusoidal", "layout": layout}
    found = diagnostics.shift_error(encoding, 64, offsets=(1, 5, 30), **SMALL)
    assert max(found.error) < 1e-6
    module = make(encoding["type"], layout=layout)
    matrix, positions = module.shift_matrix(5), torch.arange(20)
    close(module.embed(positions + 5), (module.embed(positions) @ matrix.T).tolist())


def test_shift_error_by_hand():
    """p(t) = (t²,), k = 2: the best factor is fitted on even t, and its error is measured on odd t. Random vectors have no such
    matrix.
    """
    found = diagnostics.shift_error(embedding(lambda p: [float(p * p)]), 9, offsets=[2], hidden_size=1, num_attention_heads=1)
    even, odd = range(0, 7, 2), range(1, 7, 2)
    factor = sum(t**2 * (t + 2) ** 2 for t in even) / sum(t**4 for t in even)
    mean = statistics.mean((t + 2) ** 2 for t in odd)
    error = sum(((t + 2) ** 2 - factor * t**2) ** 2 for t in odd) / sum(((t + 2) ** 2 - mean) ** 2 for t in odd)
    close(found.error[0], math.sqrt(error))
    assert min(diagnostics.shift_error("learned", length=64, hidden_size=96, num_attention_heads=2).error) > 0.8


# Uniqueness and precision.


def test_uniqueness():
    """From position 4 of 9, a symmetric bias distinguishes distances 0 to 4. From the end of a decoder, it
    distinguishes all.
    """
    found = diagnostics.uniqueness(embedding(lambda p: [p // 2 * 3.0, 0.0]), 8, hidden_size=2, num_attention_heads=1)
    assert (found.distinct, found.least, found.nearest) == (4, 0.0, (0, 1))
    counted = diagnostics.uniqueness("counter", 8, **SMALL)
    assert (counted.distinct, counted.least, counted.relative) == (8, 1.0, 1.0)
    for encoding, causal, distinct in (
        ("alibi", None, 5),
        ("alibi", True, 9),
        ({"type": "relative", "max_distance": 2}, None, 5),
        ("rope", None, 9),
    ):
        assert diagnostics.uniqueness(encoding, 9, causal=causal, **SMALL).distinct == distinct, encoding


def test_precision():
    """bfloat16 has 8 significant bits, so 257 becomes 256, also when multiplied by slopes 2^-h. float16 has 11 bits.

    Pairs of positions that are equal in float64 remain equal.
    """
    dtypes = (torch.float32, torch.bfloat16)
    for encoding, sizes in (("counter", SMALL), ("alibi", EIGHT), ("alibi", {**EIGHT, "causal": True})):
        found = diagnostics.precision(encoding, 300, dtypes=dtypes, **sizes)
        assert found.dtypes == ("float32", "bfloat16") and found.told_apart == (300, 257), encoding
        assert found.error[0] == 0 and found.error[1] == pytest.approx(1 / 299)
    late = embedding(lambda p: [p + 2040.0])
    assert diagnostics.precision(late, 20, dtypes=(torch.float16,), hidden_size=1, num_attention_heads=1).told_apart == (9,)
    found = diagnostics.precision({"type": "self_extend", "trained_length": 8}, 24, **SMALL)
    assert len({*found.told_apart}) == 1 and found.told_apart[0] < 24


def test_what_a_head_does_not_see_counts_for_the_others():
    """One head sees 4 positions, and another one distinguishes all. The difference of -inf and -inf doesn't become NaN."""

    class Window(hf_posenc.PositionEncoding, type="own_window"):
        sees_all = True

        def distance_bias(self, distance):
            window = torch.where(distance.abs() > 3, -torch.inf, 0.0).double()
            return torch.stack([window, distance.double() if self.sees_all else window])

    found = diagnostics.uniqueness("own_window", 20, causal=True, **SMALL)
    assert found.distinct == 20 and found.least == pytest.approx(math.sqrt(8)) and found.relative == pytest.approx(1)
    rounded = diagnostics.precision("own_window", 20, causal=True, **SMALL)
    assert {*rounded.told_apart, *rounded.distinct} == {20}
    Window.sees_all = False
    assert diagnostics.uniqueness("own_window", 20, causal=True, **SMALL).distinct == 2


# Wavelengths.


def test_wavelengths():
    close(diagnostics.wavelengths("sinusoidal", hidden_size=4, num_attention_heads=1).wavelengths, [math.tau, 100 * math.tau])
    plain = diagnostics.wavelengths("rope", 100, **SMALL)
    close(plain.wavelengths, [math.tau * 10000 ** (2 * pair / 8) for pair in range(4)])
    close(plain.turns, (100 / plain.wavelengths).tolist())
    linear = diagnostics.wavelengths({"type": "rope", "rope_type": "linear", "factor": 2.0}, **SMALL)
    close(linear.wavelengths, (2 * plain.wavelengths).tolist())
    dynamic = {"type": "rope", "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
    theta = 10000 * (2 * 64 / 32 - 1) ** (8 / 6)
    close(diagnostics.wavelengths(dynamic, 32, **SMALL).wavelengths, plain.wavelengths.tolist())
    found = diagnostics.wavelengths(dynamic, 64, **SMALL).wavelengths
    close(found, [math.tau * theta ** (2 * pair / 8) for pair in range(4)])
    still = diagnostics.wavelengths({"type": "rope", "rope_type": "proportional", "partial_rotary_factor": 0.5}, **SMALL)
    assert still.wavelengths.isinf().sum() == 2 and still.to_dict()["wavelengths"][-1] == "inf"
    scaled = diagnostics.wavelengths({"type": "fourier", "scale": 0.5}, **SMALL)
    module = diagnostics.wavelengths({"type": "fourier"}, **SMALL)
    close(scaled.frequencies, (module.frequencies / 2).tolist())


# Arguments.


def layer():
    return hf_posenc.PositionEmbedding("learned", 16, max_length=12)


def test_modules_are_taken_as_they_are():
    given = layer()
    found = diagnostics.similarity(given, 12)
    table = given.posenc.weight
    close(found.matrix[0], (table.double() @ table.double().T).tolist())
    assert diagnostics.similarity(given.posenc, 12) == found
    assert table.dtype == torch.float32 and table.requires_grad


@pytest.mark.parametrize(
    ("encoding", "here", "missing"),
    [({"type": "rope+t5", "t5": {"per_layer": True}}, "rope", "t5"), ("alibi+fox", "alibi", "fox")],
)
def test_a_part_that_is_elsewhere_is_missed(encoding, here, missing):
    model = patched("llama", encoding)
    for module, has, lacks in ((model.posenc, here, missing), (model.layers[0].self_attn.posenc, missing, here)):
        with pytest.raises(ValueError, match=f"the part {has} .*not {lacks}.*get_submodule.'{has}'"):
            diagnostics.similarity(module, 6)
        assert diagnostics.similarity(module.get_submodule(has), 6).encoding == has


def test_the_modules_of_an_encoding_with_per_layer():
    embedded = shared("llama", "sinusoidal+shaw").posenc  # all additive parts are here
    assert diagnostics.similarity(embedded, 6, quantity="vectors").matrix.isfinite().any()
    with pytest.raises(ValueError, match="the part sinusoidal .*not shaw"):
        diagnostics.similarity(embedded, 6, quantity="scores")
    with pytest.raises(ValueError, match="per_layer=True"):
        diagnostics.similarity(shared("llama", "shaw").posenc, 6)


def test_seeds():
    first, again, other = (diagnostics.similarity("learned", 8, seed=seed, **SMALL) for seed in (0, 0, 1))
    assert first == again and first != other
    state = torch.get_rng_state()
    diagnostics.precision("rope", 8, **SMALL)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diagnostics.similarity(layer(), 13), "length=13.*learned"),
        (lambda: diagnostics.similarity(layer(), hidden_size=8), "hidden_size"),
        (lambda: diagnostics.similarity("none"), "none"),
        (lambda: diagnostics.similarity("alibi", quantity="vectors"), "alibi.*distance_bias.*scores"),
        (lambda: diagnostics.decay("sinusoidal+alibi"), "scores.*quantity='vectors'"),
        (lambda: diagnostics.similarity("sinusoidal_2d"), "requires 2-D positions"),
        (lambda: diagnostics.similarity("alibbi"), "did you mean 'alibi'"),
        (lambda: diagnostics.similarity("alibi", 1), "length=1.*integer above 1"),
        (lambda: diagnostics.similarity("alibi", heads=4), "hidden_size.*num_attention_heads"),
        (lambda: diagnostics.similarity("alibi", hidden_size=10), "hidden_size=10.*num_attention_heads=12"),
        (lambda: diagnostics.similarity(torch.nn.Linear(2, 2)), "Linear"),
        (lambda: diagnostics.similarity("learned", 9, max_length=8), "length=9.*learned"),
        (lambda: diagnostics.similarity("cope", causal=False), "'cope' requires causal attention"),
        (lambda: diagnostics.shift_error("rope"), "rope"),
        (lambda: diagnostics.shift_error("sinusoidal", 256, offsets=[200]), "offsets=200"),
        (lambda: diagnostics.shift_error("sinusoidal", 7, offsets=[4]), "offsets=4.*length=7"),
        (lambda: diagnostics.shift_error("sinusoidal", 6, offsets=[3]), "offsets=3"),
        (lambda: diagnostics.shift_error("sinusoidal", offsets=4), "offsets=4 .*a list"),
        (lambda: diagnostics.shift_error("sinusoidal", length=0), "length=0.*integer above 1"),
        (lambda: diagnostics.wavelengths("alibi"), "alibi"),
        (lambda: diagnostics.wavelengths("sinusoidal+rope"), "several sinusoidal parts, sinusoidal, rope"),
        (lambda: diagnostics.precision("rope", dtypes=[torch.int8]), r"torch\.int8"),
        (lambda: diagnostics.properties("rope", near=0), "near=0.*integer above 0"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
