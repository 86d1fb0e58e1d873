"""Options and names of encodings, supported versions, and the design rules of the code that a test can check."""

import ast
import copy
import json
import math
import pickle
import re
import sys
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

import pytest
import torch
from packaging.requirements import Requirement

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc import _versions
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import Geometry, GreaterThan, PositionEncoding, build, canonical, encoding_class, list_encodings
from models import ENCODINGS
from oracles import make

GEOMETRY = Geometry(hidden_size=8, num_attention_heads=2, head_dim=4, max_length=10)


LEARNED = {"storage": "float32", "file": None, "init": "normal", "std": 0.02, "trained_rows": None}


pytestmark = pytest.mark.usefixtures("own_registry")


def define(code, module="a_notebook"):
    """Runs a class definition as a notebook cell would, and returns its namespace."""
    namespace = {"__name__": module, "PositionEncoding": PositionEncoding}
    exec(compile(code, "<cell>", "exec", dont_inherit=True), namespace)
    return namespace


SINUSOIDAL = {
    "type": "sinusoidal",
    "base": 10000.0,
    "layout": "interleaved",
    "scale": 1.0,
    "bases": None,
    "frequencies": "fixed",
    "trained_length": None,
}


# Names.


def test_list_encodings():
    listed = hf_posenc.list_encodings()
    assert tuple(name for name, cls in listed.items() if cls.__module__.startswith("hf_posenc.") and cls.axes == 1) == ENCODINGS
    for name, cls in listed.items():
        assert issubclass(cls, hf_posenc.PositionEncoding) and cls.type == name and cls.__doc__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", {"type": "none"}),
        ("nope", {"type": "none"}),
        ("alibi", {"type": "alibi", "slopes": "fixed", "sides": "symmetric", "per_layer": False}),
        (
            {"type": "alibi", "slopes": "learned", "per_layer": True},
            {"type": "alibi", "slopes": "learned", "sides": "symmetric", "per_layer": True},
        ),
        ("counter", {"type": "counter"}),
        ("normalized", {"type": "normalized"}),
        ("absolute", {"type": "learned", **LEARNED}),
        ({"type": "learnable", "std": 1}, {"type": "learned", **LEARNED, "std": 1.0}),
        ({"type": "rotary", "layout": "interleaved"}, {"type": "rope", "theta": 10000.0, "layout": "interleaved"}),
        ({"type": "logn", "trained_length": 9}, {"type": "logn", "trained_length": 9, "scale": "fixed"}),
        ("relative", {"type": "relative", "max_distance": 128, "per_layer": False}),
        ("kerple", {"type": "kerple", "kernel": "log", "per_layer": False}),
        ({"type": "sandwich", "base": 3}, {"type": "sandwich", "size": 128, "base": 3.0, "per_layer": False}),
        ("t5", {"type": "t5", "num_buckets": 32, "max_distance": 128, "per_layer": False}),
        ("sinusoidal", SINUSOIDAL),
        ({"type": "sinusoidal", "bases": [10, 100.0]}, {**SINUSOIDAL, "bases": (10.0, 100.0)}),
    ],
)
def test_canonical(given, expected):
    before = dict(given) if isinstance(given, dict) else given
    actual = canonical(given)
    assert actual == expected and [type(v) for v in actual.values()] == [type(v) for v in expected.values()]
    assert canonical(actual) == actual and given == before
    assert type(build(actual, GEOMETRY)) is encoding_class(given if isinstance(given, str) else given["type"])


@pytest.mark.parametrize(
    ("given", "words"),
    [(given, "Unknown position encoding") for given in ("sinusodial", {"type": "sinusodial"}, "PositionEncoding", "")]
    + [(given, "a name or a dict") for given in (None, 3, ["alibi"], {}, {"base": 3.0}, {"type": None}, {"type": ["alibi"]})],
    ids=str,
)
def test_what_is_no_encoding(given, words):
    with pytest.raises(ValueError, match=words) as error:
        canonical(given)
    assert all(repr(name) in str(error.value) for name in ENCODINGS)
    assert ("import the module that defines its class" in str(error.value)) == words.startswith("Unknown")


def test_mechanisms_of_an_own_encoding():
    class Both(PositionEncoding, type="both"):
        def score_bias(self, query, key, context): ...

        def embed(self, positions): ...

    class More(Both, type="more"):
        def rotate(self, query, key, context): ...

    assert PositionEncoding.mechanisms() == ()
    assert Both.mechanisms() == ("embed", "score_bias")
    assert More.mechanisms() == ("embed", "rotate", "score_bias")


# Options.


def test_unknown_option():
    for name in ENCODINGS:
        allowed = encoding_class(name).option_types()
        words = rf"'{name}' has no option 'bass'( \(did you mean 'bases?'\?\))?, 'wrong'"
        with pytest.raises(ValueError, match=words) as error:
            canonical({"type": name, "wrong": 1, "bass": 2})
        assert all(repr(option) in str(error.value) for option in allowed)
        assert allowed or "Its options: none" in str(error.value)


RANGES = [
    ("sinusoidal", "base", ("10000", True, None, [10000.0], 1, -5.0, math.nan, math.inf, 10**400), "a finite number above 1"),
    ("sinusoidal", "scale", (math.nan, "learnt", False), "a finite number or 'learned'"),
    ("sinusoidal", "layout", ("halves", 0), "'interleaved' or 'concatenated'"),
    ("sinusoidal", "bases", (10.0, (1.0, 10.0)), "None or a list in which each value is a finite number above 1"),
    ("learned", "std", (0.0, -math.inf), "a finite number above 0"),
    ("relative", "max_distance", (True, 5.0, 0, None), "an integer above 0"),
    ("relative", "per_layer", (1, None), "True or False"),
    ("logn", "trained_length", (1, 512.0), "an integer above 1 or None"),
]


@pytest.mark.parametrize(("kind", "option", "values", "allowed"), RANGES)
def test_wrong_types_and_ranges(kind, option, values, allowed):
    """The constructor checks them also."""
    for value in values:
        with pytest.raises(ValueError) as one:
            canonical({"type": kind, option: value})
        with pytest.raises(ValueError) as other:
            encoding_class(kind)(GEOMETRY, **{option: value})
        assert str(one.value) == str(other.value) == f"{kind}.{option}={value!r} isn't valid. It must be {allowed}."


def test_all_ranges():
    """Each encoding rejects invalid values of its options."""
    for kind, options in {
        "alibi": {"slopes": "trained", "sides": "both"},
        "cope": {"max_position": 1},
        "fire": {"c": 0.0, "threshold": -3.0, "width": 0},
        "fope": {"gain": -0.1, "theta": 1.0},
        "fourier": {"gamma": 0.0, "scale": -1.0, "width": 0},
        "kerple": {"kernel": "linear"},
        "learned": {"init": "zeros"},
        "logn": {"scale": 1.0},
        "rope": {"theta": 1, "layout": "interleave"},
        "rope_2d": {"frequencies": "learned", "theta": 1.0},
        "sandwich": {"size": 64.0, "base": 1},
        "sinusoidal": {"frequencies": "trained"},
        "sinusoidal_2d": {"first": "x"},
        "tupe": {"untie_cls": 1},
        "xpos": {"gamma": 0.0, "scale_base": -1.0, "theta": 1.0, "layout": "halves"},
    }.items():
        for option, value in options.items():
            with pytest.raises(ValueError, match=re.escape(f"{kind}.{option}={value!r} isn't valid. It must be ")):
                make(kind, trained=9, max_length=9, axes=2 if kind.endswith("2d") else 1, **{option: value})


LONG, LLAMA3 = {"rope_type": "longrope"}, {"rope_type": "llama3", "factor": 2.0}
YARN, DYNAMIC = {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}
CONTRADICTIONS = [
    ("cope", {"max_position": 0}, r"cope\.max_position=0 .* integer above 1"),
    *(("deberta", {"buckets": few, "max_distance": 128}, f"buckets={few}, .*=128 .* 0.* even") for few in (5, 2, 128, 256)),
    ("fope", {"trained": None}, "fope.trained_length=None: .* example trained_length=512"),
    ("fope", {"head_dim": 7}, "head_dim is 7, an odd number"),
    ("fourier", {"features": 7}, "fourier.features=7 .* even.* Use 8"),
    ("rope", {"head_dim": 7}, "head_dim is 7"),
    ("rope", {"rope_type": "ntk"}, "rope.rope_type='ntk'.*'default' or 'linear'"),
    ("rope", {"rope_type": "linear"}, "rope_type='linear' requires 'factor'. Set factor=…"),
    ("rope", {**LONG, "factor": 2.0}, "requires 'short_factor', 'long_factor'. Set short_factor=…, long_factor=…"),
    ("rope", LLAMA3, "requires 'low_freq_factor', 'high_freq_factor'"),
    ("rope", {"factor": 2.0}, "factor=2.0 .*rope_type='default' .*none.* use rope_type='linear' or"),
    ("rope", {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast=3.0 .*'factor'.* Omit.*rope_type='yarn'"),
    ("rope", {"rope_type": "linear", "factor": 0.0}, "rope.factor=0.0.*above 0"),
    ("rope", {"rope_type": "linear", "factor": "4"}, "rope.factor='4'"),
    ("rope", {"rope_type": "linear", "facto": 4.0}, "did you mean 'factor'"),
    ("rope", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 .* up to 1"),
    ("rope", {"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0 .*above 0"),
    ("rope", {"partial_rotary_factor": 0.4}, "head_dim is 8, .*=0.4 rotates 3, .* set partial_rotary_factor=0.3125"),
    ("rope", {"partial_rotary_factor": 0.1}, "rotates 0, fewer than 2.* set partial_rotary_factor=0.3125"),
    ("rope", {"rope_type": "proportional", "partial_rotary_factor": 0.1}, "rotates 0, fewer than 2"),
    ("rope", {**DYNAMIC, "partial_rotary_factor": 0.25}, "rotates 2, fewer than 4.* set .*=0.5625"),
    ("rope", {**YARN, "mscale": 1.0}, "mscale and mscale_all_dim must"),
    ("rope", {**YARN, "beta_slow": 40.0}, "beta_slow=40.0 .* below beta_fast=32.0"),
    ("rope", {**YARN, "original_max_position_embeddings": 1}, "original_max_position_embeddings=1 "),
    ("rope", {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "=4.0 .* below high_freq_factor=4.0"),
    ("rope", {**LONG, "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}, "long_factor has 3 values, .* 4 rotated"),
    ("rope", {**LONG, "short_factor": [], "long_factor": [1.0] * 4}, "short_factor has 0 values, .* 4 rotated"),
    ("rope", {**LONG, "short_factor": [0.0] * 4, "long_factor": [1.0] * 4}, "short_factor=.*above 0"),
    ("rope_2d", {"axes": 2, "head_dim": 6}, "divisible by 4, .* head_dim is 6. .*'sinusoidal_2d'"),
    ("rope_2d", {"axes": 2, "head_dim": 0, "heads": 0}, "divisible by 4, .* head_dim is 0"),
    *(("sandwich", {"size": size}, rf"sandwich\.size={size} .*even and at most 8192") for size in (1, 127, 8194)),
    ("sinusoidal", {"base": 100.0, "bases": (10.0, 20.0)}, r"base=100 and sinusoidal.bases=\(10.0, 20.0\)"),
    ("sinusoidal", {"bases": (10.0,) * 9}, "hidden_size=16 allows 1 to 8"),
    ("sinusoidal", {"bases": ()}, "allows 1 to 8"),
    ("sinusoidal", {"trained_length": 8}, "trained_length=8 .*frequencies='fixed'"),
    ("sinusoidal", {"trained_length": 8, "frequencies": "learned"}, "trained_length=8 .*frequencies='learned'"),
    ("sinusoidal", {"trained": None, "frequencies": "dynamic"}, "needs trained_length, above 1"),
    ("sinusoidal_2d", {"axes": 2, "hidden_size": 3}, "at least 4, .* hidden_size is 3"),
    ("sinusoidal_2d", {"axes": 3}, "requires 2-D positions .* 3-D"),
    *(("t5", {"num_buckets": few, "max_distance": 128}, f"t5.num_buckets={few}, .* a multiple of 4") for few in (2, 30, 33)),
    *(("t5", {"max_distance": far}, rf"t5\.max_distance={far} .* above") for far in (32, 20)),
    ("xpos", {"head_dim": 7, "is_causal": True}, "head_dim is 7, an odd number"),
]


@pytest.mark.parametrize(("kind", "options", "words"), CONTRADICTIONS)
def test_contradictions(kind, options, words):
    """Options can contradict each other and the sizes of a model."""
    with pytest.raises(ValueError, match=words):
        make(kind, **options)


@pytest.mark.parametrize(
    ("annotation", "taken", "refused"),
    [
        (int, [(-3, -3)], [3.0, True, "3", None]),
        (float, [(2, 2.0), (-1.5, -1.5)], [True, math.nan, -math.inf, "1.0"]),
        (bool, [(True, True)], [1, "False"]),
        (str, [("", "")], [1]),
        (Any, [({"a": [1]}, {"a": [1]})], []),
        (int | None, [(None, None), (3, 3)], [False, 1.0]),
        (Literal["a", 1, None], [(1, 1), (None, None)], [True, 1.0, "b"]),
        (Annotated[int, GreaterThan(2)], [(3, 3)], [2]),
        (Annotated[float, GreaterThan(2)], [(3, 3.0)], [2.0]),
        (Annotated[float | None, GreaterThan(0)], [(None, None), (1, 1.0)], [0]),
        (Annotated[float | Literal["auto"], GreaterThan(0)], [("auto", "auto"), (3, 3.0)], [0, "manual"]),
        (tuple[float, ...], [([1.5, 100], (1.5, 100.0)), ((1.5,), (1.5,)), ([], ())], [3.0, ["a"], [1.0, math.inf], [True]]),
        (tuple[str, ...] | None, [(["a", "b"], ("a", "b"))], ["ab"]),
        (tuple[int, str], [([1, "a"], (1, "a"))], [[1, 2], [1]]),
    ],
    ids=str,
)
def test_values_arrive_in_the_annotated_type(annotation, taken, refused):
    class Own(PositionEncoding, type="own"):
        option: annotation

    for value, expected in taken:
        actual = canonical({"type": "own", "option": value})
        assert actual == {"type": "own", "option": expected} and type(actual["option"]) is type(expected)
        if isinstance(expected, tuple):
            assert [*map(type, actual["option"])] == [*map(type, expected)]
        module = build(actual, GEOMETRY)
        assert module.option == expected and f"option={expected!r}" in repr(module)
    for value in refused:
        with pytest.raises(ValueError, match=rf"own\.option={re.escape(repr(value))} isn't valid"):
            canonical({"type": "own", "option": value})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("alibbi", "alibi"),
        ("sinusodial+alibi", "sinusoidal"),
        ("relative_keys", "relative_key"),
        ({"type": "rope", "thet": 3.0}, "theta"),
        ({"type": "alibi+rope", "rope__thet": 3.0}, "theta"),
        ({"type": "alibi+rope", "rop__theta": 3.0}, "rope"),
        ({"type": "alibi+shaw", "relative_kez__terms": "keys"}, "relative_key"),
        ({"type": "alibi", "max_len": 99}, "max_length"),
        ({"type": "alibi", "keep_originals": True}, "keep_original"),
        ({"type": "sinusoidal", "inject": "every_layers"}, "every_layer"),
    ],
    ids=str,
)
def test_did_you_mean(given, name):
    with pytest.raises(ValueError, match=rf"\(did you mean '{name}'\?\)"):
        PositionSpec.parse(given)


@pytest.mark.parametrize(
    "given", ["", "a" * 60_000, "zzz", {"type": "alibi", "keep_original": True}], ids=lambda each: str(each)[:9]
)
def test_nothing_like_it(given):
    with pytest.raises(ValueError) as error:
        PositionSpec.parse(given)
    assert "did you mean" not in str(error.value)


# Custom encodings.


def test_own_encoding_by_one_class():
    """A custom encoding as in the docstring of PositionEncoding works by name, alias, and dict without registration."""

    class Window(hf_posenc.PositionEncoding, type="window", aliases=("near",)):
        """Hides tokens further than `width` away."""

        width: Annotated[int, GreaterThan(0)] = 128

        def distance_bias(self, distance):
            return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]

    assert list_encodings()["window"] is Window and "near" not in list_encodings()
    assert canonical("near") == {"type": "window", "width": 128, "per_layer": False}
    module = build(canonical({"type": "window", "width": 2}), GEOMETRY)
    assert module.distance_bias(torch.arange(-3, 4)).tolist() == [[-torch.inf, 0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf]]
    with pytest.raises(ValueError, match=r"window\.width=0 .*integer above 0"):
        canonical({"type": "window", "width": 0})


def test_inherited_options():
    class Parent(PositionEncoding, type="parent"):
        first: int = 1
        second: float = 2.0
        constant: ClassVar[int] = 3
        plain = 4

    class Child(Parent, type="child", aliases=("kid",)):
        third: str = "c"
        first: int = 10

    assert canonical("parent") == {"type": "parent", "first": 1, "second": 2.0}
    assert canonical({"type": "kid", "second": 5}) == {"type": "child", "first": 10, "second": 5.0, "third": "c"}
    assert list(Child.option_types()) == ["first", "second", "third"]


@pytest.mark.parametrize("annotation", [ClassVar[int], ClassVar], ids=str)
def test_class_variables_are_no_options(annotation):
    class Own(PositionEncoding, type="own"):
        shared: annotation = 3
        width: int = 4

    assert Own.option_types() == {"width": int} and canonical("own") == {"type": "own", "width": 4}
    with pytest.raises(ValueError, match="no option 'shared'.* 'width'"):
        canonical({"type": "own", "shared": 1})


def test_per_layer_is_an_option_of_what_biases():
    """Encodings with a bias have `per_layer` as an additional option, with the class's default. This includes classes that
    don't declare it.
    """

    class Own(PositionEncoding, type="own"):
        width: int = 2

        def score_bias(self, query, key, context): ...

    class Each(Own, type="each"):
        per_layer = True

    class Turned(PositionEncoding, type="turned"):
        per_layer = True

        def rotate(self, query, key, context): ...

    assert canonical("own") == {"type": "own", "width": 2, "per_layer": False}
    assert canonical("each") == {"type": "each", "width": 2, "per_layer": True}
    assert canonical("turned") == {"type": "turned"}
    kinds = {name for name in ENCODINGS if "per_layer" in encoding_class(name).option_types()}
    assert kinds == {name for name in ENCODINGS if {"distance_bias", "score_bias"} & {*encoding_class(name).mechanisms()}}
    assert {"alibi", "relative", "shaw", "t5"} <= kinds
    with pytest.raises(ValueError, match="'rope' has no option 'per_layer'"):
        canonical({"type": "rope", "per_layer": True})


def test_what_embeds_is_not_of_each_layer():
    """Additive vectors are added once, by the layer stack."""

    class Both(PositionEncoding, type="both"):
        def embed(self, positions): ...

        def distance_bias(self, distance): ...

    class Each(Both, type="each"):
        per_layer = True

    assert (
        canonical("both")
        == {"type": "both", "per_layer": False}
        == {**canonical({"type": "each", "per_layer": False}), "type": "both"}
    )
    for given in ({"type": "both", "per_layer": True}, "each", {"type": "alibi+both", "both__per_layer": True}, "alibi+each"):
        with pytest.raises(ValueError, match=r"'(both|each)' .* per_layer must be False"):
            canonical(given)


def test_attributes_of_the_base_class_are_no_options():
    for name in ("geometry", "calibration", "aliases"):
        with pytest.raises(ValueError, match=f"no option '{name}'"):
            canonical({"type": "alibi", name: 1})


def test_a_class_without_a_type_is_not_registered():
    class Parent(PositionEncoding, type="parent"):
        pass

    class Helper(Parent):
        pass

    assert list_encodings()["parent"] is Parent
    assert Helper not in list_encodings().values()


def test_missing_required_option():
    class Needy(PositionEncoding, type="needy"):
        width: int
        depth: int
        height: int = 1

    with pytest.raises(ValueError, match="'needy' requires the option 'width', 'depth'"):
        canonical("needy")
    with pytest.raises(ValueError, match="'needy' requires the option 'depth'"):
        canonical({"type": "needy", "width": 2})
    assert canonical({"type": "needy", "width": 2, "depth": 3}) == {"type": "needy", "width": 2, "depth": 3, "height": 1}


CELL = """
class Mine(PositionEncoding, type="mine", aliases=("my",)):
    width: int = {width}
"""


def test_a_cell_run_again_replaces_its_class():
    """This also holds in compositions."""
    first = define(CELL.format(width=1))["Mine"]
    whole = encoding_class("my+alibi")
    assert whole is encoding_class("mine+alibi") and canonical("my+alibi")["mine"] == {"width": 1}
    second = define("from __future__ import annotations\n" + CELL.format(width=2))["Mine"]
    assert first is not second and second.option_types() == {"width": int}
    assert encoding_class("mine") is encoding_class("my") is encoding_class("mine+alibi").parts["mine"] is second
    assert encoding_class("mine+alibi") is not whole
    assert canonical("my") == {"type": "mine", "width": 2}
    assert canonical("alibi+mine")["mine"] == canonical("mine+alibi")["mine"] == {"width": 2}
    assert type(build(canonical("mine+alibi"), GEOMETRY).mine) is second


@pytest.mark.parametrize("name", ["mine", "my"])
@pytest.mark.parametrize("place", ["type", "alias"])
def test_another_class_under_a_taken_name(name, place):
    first = define(CELL.format(width=1))["Mine"]
    names = f"type={name!r}" if place == "type" else f"type='another', aliases=({name!r},)"
    with pytest.raises(ValueError, match=rf"{name!r} is already used by a_notebook\.Mine\. Give Other"):
        define(f"class Other(PositionEncoding, {names}): ...")
    with pytest.raises(ValueError, match="already used by a_notebook"):
        define(CELL.format(width=1), module="another_notebook")
    assert encoding_class("mine") is encoding_class("my") is first and "another" not in list_encodings()


@pytest.mark.parametrize("name", ["alibi", "rotary", "nope"])
def test_names_of_the_package_are_taken(name):
    with pytest.raises(ValueError, match=rf"{name!r} is already used by hf_posenc\.encodings\."):
        define(f"class Mine(PositionEncoding, type={name!r}): ...")


def test_an_encoding_is_an_ordinary_module():
    """An encoding is hashable, and has parameters and a repr. Its constructor takes options as keywords."""

    class Own(PositionEncoding, type="own"):
        width: int = 2

        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.weight = torch.nn.Parameter(torch.zeros(self.width))

    module = Own(GEOMETRY, width=3)
    parent = torch.nn.Sequential(module)
    assert {module} and [p.shape for p in parent.parameters()] == [(3,)] and module.geometry is GEOMETRY
    assert "Own(width=3)" in repr(parent)


# Compositions.

SHAW = {"max_distance": 128, "terms": "keys", "per_layer": True}


BOTH, ALIBI = {**SHAW, "terms": "keys+queries"}, {"slopes": "fixed", "sides": "symmetric", "per_layer": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("alibi+none", {"type": "alibi+none", "alibi": ALIBI, "none": {}}),
        ("absolute+rotary", {"type": "learned+rope", "learned": LEARNED, "rope": {"theta": 10000.0, "layout": "half"}}),
        ("absolute+relative_key", {"type": "learned+shaw", "learned": LEARNED, "shaw": SHAW}),
        ("absolute+relative_key_query", {"type": "learned+shaw", "learned": LEARNED, "shaw": BOTH}),
        ("relative_key_query+absolute", {"type": "shaw+learned", "shaw": BOTH, "learned": LEARNED}),
        (
            {"type": "relative_key_query+alibi+t5", "t5": {"num_buckets": 8}, "shaw__max_distance": 5},
            {
                "type": "shaw+alibi+t5",
                "shaw": {**BOTH, "max_distance": 5},
                "alibi": ALIBI,
                "t5": {"num_buckets": 8, "max_distance": 128, "per_layer": False},
            },
        ),
        ({"type": "none+relative_key_query", "shaw__terms": "keys"}, {"type": "none+shaw", "none": {}, "shaw": SHAW}),
        # A dict and keywords together, and a part with an alias.
        (
            {"type": "none+shaw", "shaw": {"max_distance": 3}, "relative_key__terms": "keys+queries"},
            {"type": "none+shaw", "none": {}, "shaw": {**BOTH, "max_distance": 3}},
        ),
        (
            {"type": "none+learned", "absolute": {"std": 1}},
            {"type": "none+learned", "none": {}, "learned": {**LEARNED, "std": 1.0}},
        ),
    ],
    ids=str,
)
def test_canonical_compositions(given, expected):
    before = copy.deepcopy(given)
    actual = canonical(given)
    assert actual == expected and list(actual) == list(expected) and given == before
    assert canonical(actual) == canonical(json.loads(json.dumps(actual))) == actual
    module = build(actual, GEOMETRY)
    assert type(module) is encoding_class(actual["type"]) and module.type == actual["type"]
    assert [name for name, _ in module.named_children()] == actual["type"].split("+")
    assert all(repr(module).count(type(part).__name__ + "(") == 1 for part in module.children())
    for name, part in module.named_children():
        assert {option: getattr(part, option) for option in actual[name]} == actual[name]


@pytest.mark.parametrize(("alias", "terms"), [("relative_key", "keys"), ("relative_key_query", "keys+queries")])
def test_an_alias_may_carry_options(alias, terms):
    assert canonical(alias) == {"type": "shaw", **SHAW, "terms": terms}
    assert canonical({"type": alias, "max_distance": 5}) == {"type": "shaw", **SHAW, "max_distance": 5, "terms": terms}
    other = "keys" if terms != "keys" else "keys+queries"
    assert canonical({"type": alias, "terms": other})["terms"] == other
    assert encoding_class(alias).aliases[alias] == {"terms": terms}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("alibi+alibbi", "Unknown position encoding 'alibbi'"),
        ("alibi+", "Unknown position encoding ''"),
        ("alibi + rope", "Unknown position encoding 'alibi '"),
        ("alibi+rope+alibi", r"'alibi\+rope\+alibi' has the same encoding twice"),
        ("absolute+learned", "the same encoding twice"),
        ("relative_key+relative_key_query", "the same encoding twice"),
        ({"type": "sinusoidal+alibi", "base": 3.0}, r"'sinusoidal\+alibi' has no part 'base'.*sinusoidal__option=… or alibi__"),
        ({"type": "sinusoidal+alibi", "rope": {"theta": 3.0}}, "has no part 'rope'"),
        ({"type": "sinusoidal+alibi", "rope__theta": 3.0}, "has no part 'rope'"),
        ({"type": "sinusoidal+alibi", "sinusoidal__bass": 3.0}, r"'sinusoidal' has no option 'bass' \(.*\).* 'base'"),
        ({"type": "sinusoidal+alibi", "sinusoidal": {"bass": 3.0}}, "'sinusoidal' has no option 'bass'"),
        (
            {"type": "sinusoidal+alibi", "alibi__slope": 1},
            r"'alibi' has no option 'slope' \(.*'slopes'\?\).* 'slopes', 'sides', 'per_layer'",
        ),
        ({"type": "sinusoidal+alibi", "sinusoidal": 3.0}, r"sinusoidal\+alibi\['sinusoidal'\]=3.0 .* a dict"),
        ({"type": "sinusoidal+alibi", "sinusoidal": None}, r"\['sinusoidal'\]=None .* a dict"),
        ({"type": "sinusoidal+alibi", "sinusoidal__base": "3"}, r"^sinusoidal\.base='3' .*finite number above 1"),
        ({"type": "alibi+absolute", "absolute": {"std": 0}}, r"^learned\.std=0 .*finite number above 0"),
    ],
    ids=str,
)
def test_wrong_compositions(given, words):
    with pytest.raises(ValueError, match=words):
        canonical(given)


def test_compositions_are_not_listed():
    assert encoding_class("alibi+rope") is encoding_class("alibi+rotary") is not encoding_class("rope+alibi")
    assert not any("+" in name for name in list_encodings())


RESERVED = ["type", "aliases", "geometry", "calibration", "max_length", "layers", "host", "original"]
RESERVED += ["inject", "where", "keep_original", "submodel"]


def test_names_which_would_not_fit():
    """A name must be valid in compositions, distinct from names of hf_posenc, and usable as an attribute of an encoding."""
    rows = [(name, "can't be the name .* letters") for name in ("a+b", "a__b", "", "a.b", "a b", "_a", "a_", "a--b", "ä")]
    rows += [(name, "can't be the name .*'submodel'") for name in RESERVED]
    rows += [("rows", "can't be the name .* attribute")]
    for name, words in rows:
        for names in (f"type={name!r}", f"type='own', aliases=({name!r},)"):
            with pytest.raises(ValueError, match=rf"{re.escape(repr(name))} {words}"):
                define(f"class Own(PositionEncoding, {names}): ...")
        assert name not in PositionEncoding.registered and "own" not in PositionEncoding.registered
    for name in RESERVED:
        with pytest.raises(ValueError, match=rf"Own can't have .* reserved names: '{name}'"):
            define(f"class Own(PositionEncoding, type='own'):\n    {name}: int = 1")


def test_title_and_paper():
    for cls in map(encoding_class, ENCODINGS):
        first = sys.modules[cls.__module__].__doc__.partition("\n")[0]
        assert first == (f"{cls.title}: {', '.join(cls.paper)}" if cls.paper else f"{cls.title}.")
    for line, words in (
        ("paper = 'org'", "Own.paper='org' .* a list in which"),
        ("title = 3", "Own.title=3 .* a string"),
    ):
        with pytest.raises(ValueError, match=words):
            define(f"class Own(PositionEncoding, type='own'):\n    {line}")
    assert "own" not in PositionEncoding.registered


def test_names_of_two_words():
    for name in ("two_words", "two-words", "words_2d", "A1"):
        define(f"class Own{name.replace('-', 'x')}(PositionEncoding, type={name!r}): ...")
        assert canonical(f"{name}+alibi") == {"type": f"{name}+alibi", name: {}, "alibi": ALIBI}
        assert build(canonical(f"alibi+{name}"), GEOMETRY).type == f"alibi+{name}"


# Versions.


def test_versions_are_those_of_pyproject():
    """The code saved with a model has no pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {each.name: str(each.specifier) for each in map(Requirement, project["dependencies"])}
    assert {name: f">={oldest}" for name, (oldest, _) in _versions.TESTED.items()} == {
        name: stated[name] for name in ("torch", "transformers")
    }


def install(monkeypatch, **versions):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or real(name))


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_versions_out_of_range(package, monkeypatch):
    """The warning states the known failures and the remedy."""
    oldest, untested = _versions.TESTED[package]
    install(monkeypatch, **{package: {"transformers": "5.14.1", "torch": "2.5.1"}[package]})
    with pytest.warns(UserWarning, match=re.escape(_versions.FAILS[package])) as caught:
        _versions.check()
    assert f'pip install "{package}>={oldest}"' in str(caught[0].message)
    install(monkeypatch, **{package: f"{untested}.0.1"})
    with pytest.warns(UserWarning, match=f"isn't tested with {package} {untested} or newer, and {untested}.0.1 is installed"):
        _versions.check()


def test_versions_in_range(monkeypatch):
    """Nightly and local builds are accepted."""
    for versions in ({}, {"torch": "2.16.0.dev20260101+cu130", "transformers": "5.24.0rc1"}, {"transformers": "5.15.0.dev0"}):
        install(monkeypatch, **versions)
        _versions.check()


# The design rules of the code.

ORDER = [
    {"_versions", "_compat", "signatures", "progress"},
    {"encodings"},
    {"configuration"},
    {"attention"},
    {"architectures", "figures"},
    {"serialization"},
    {"modeling"},
    {"inspection"},
    {"conversion", "evaluation", "diagnostics"},
    {"hub", "plots", "training"},
    {"explorer", "studies"},
    {"api"},
    {"compare"},
    {"cli"},
    {"__main__"},
]
"""A package, or a module of the root, imports only from the lines above its own. A new one must be added here."""


PACKAGE = ROOT / "hf_posenc"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ENCODING_MODULES = [path for path in MODULES if path.parent.name == "encodings"]


def imported(path):
    """All imports of a file, at any level: `import a.b` -> a.b, `from a import b` -> a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def ours(path):
    return {name for name in imported(path) if name.partition(".")[0] == "hf_posenc"}


def rank(module):
    return next((index for index, group in enumerate(ORDER) if module in group), None)


def test_import_order():
    for path in MODULES:
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert rank(module) is not None, f"{module} has no place in ORDER"
        for name in ours(path):
            if name == "hf_posenc" and module in ("cli", "studies", "training"):  # they use the public API
                continue
            other = name.split(".")[1] if "." in name else None
            assert rank(other) is not None, f"{path} imports {name}, which is no module of ours"
            assert other == module or rank(other) < rank(module), f"{path} imports {other}"


FOUNDATION = [
    *("options", "mapped_tables", "context", "table_interpolation", "frequency_rules", "base"),
    *("composition", "registry", "determinism", "construction", "rotation", "tables", "catalog"),
]
"""The modules of encodings/ that aren't encodings. Each imports only from those to its left."""


def test_import_order_of_encodings():
    """Modules of encodings don't import other packages, such as those for architectures."""
    allowed = {"hf_posenc", "torch", "safetensors", "numpy", *sys.stdlib_module_names}
    for path in ENCODING_MODULES:
        others = {name for name in imported(path) if name.partition(".")[0] not in allowed}
        if path.name == "frequency_rules.py":
            others = {name for name in others if not name.startswith("transformers.modeling_rope_utils")}
        assert not others, path.name
        names = [each.split(".") for each in ours(path) if not each.startswith("hf_posenc._compat.")]
        assert all(name[:2] == ["hf_posenc", "encodings"] and len(name) == 4 for name in names), (
            f"{path}: from the defining module"
        )
        others, own = {name[2] for name in names}, path.stem
        if own in FOUNDATION:
            assert others <= set(FOUNDATION[: FOUNDATION.index(own)]), path.name
        elif own != "__init__":
            assert not others & {"composition", "registry"}, path.name


def test_public_names():
    """`dir` shows neither modules, which tab completion would offer, nor derived classes, which asking for them would build."""
    assert all(getattr(hf_posenc, name).__doc__ for name in hf_posenc.__all__)
    assert dir(hf_posenc) == sorted([*hf_posenc.__all__, "__version__"])
    with pytest.raises(AttributeError, match=r"'hf_posenc' has no attribute 'pach' \(did you mean 'patch'\?\)"):
        _ = hf_posenc.pach
    with pytest.raises(AttributeError, match=r"Transformers.*BertForMaskdLM.*BertForMaskedLM"):
        _ = hf_posenc.PosEncBertForMaskdLM


def test_importing_builds_no_class(tmp_path):
    """Importing builds no class and imports no modeling file, but the Auto classes know the derived names.

    Transformers iterates over their mappings for its error messages, and finds these names. A composition can be unpickled
    before it is first used.
    """
    module = build(canonical({"type": "learned+shaw+t5", "t5__num_buckets": 8}), GEOMETRY)
    (tmp_path / "pickle").write_bytes(pickle.dumps((module, module.state_dict())))
    said = run_python(
        """
import sys
import hf_posenc
from hf_posenc.modeling import derived as modeling
hosts = [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n and ".auto." not in n]
assert not hosts, hosts
made = {n for n, v in vars(modeling).items() if isinstance(v, type) and n.startswith("PosEnc")}
assert made == {"PosEncConfigMixin", "PosEncModelMixin"}, made
from transformers import AutoConfig
assert type(AutoConfig.for_model("posenc-bert")).__name__ == "PosEncBertConfig"
assert "transformers.models.bert.modeling_bert" not in sys.modules
from transformers.models.auto import modeling_auto
assert modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES["posenc-bert"] == "PosEncBertForMaskedLM"
names = {config.__name__ for config in modeling_auto.MODEL_MAPPING}
assert {"PosEncBertConfig", "BertConfig", "PositionEmbeddingConfig"} <= names

import pathlib, pickle, torch
module, weights = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
torch.testing.assert_close(dict(module.state_dict()), dict(weights), rtol=0, atol=0)
print(module.type, type(module).__qualname__, module.t5.num_buckets)
""",
        tmp_path / "pickle",
        fresh=True,
    )
    assert said.split() == ["learned+shaw+t5", "learned+shaw+t5", "8"]
