"""Options and names of encodings, the versions we work with, and the rules of the house which a test can hold."""

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
from packaging.specifiers import SpecifierSet
from transformers import GenerationMixin, PreTrainedModel

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc import _compat, _versions
from hf_posenc.architectures.components import PositionComponent
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import Geometry, GreaterThan, PositionEncoding, build, canonical, encoding_class, list_encodings
from hf_posenc.serialization.user_code import flat
from models import ENCODINGS, stock

GEOMETRY = Geometry(hidden_size=8, num_attention_heads=2, head_dim=4, max_length=10)
LEARNED = {"storage": "float32", "file": None, "init": "normal", "std": 0.02, "trained_rows": None}


pytestmark = pytest.mark.usefixtures("own_registry")


def define(code, module="a_notebook"):
    """Run a class definition as a notebook cell would; its namespace."""
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


@pytest.mark.parametrize("given", ["sinusodial", {"type": "sinusodial"}, "PositionEncoding", ""])
def test_unknown_encoding(given):
    with pytest.raises(ValueError, match="unknown position encoding") as error:
        canonical(given)
    assert all(repr(name) in str(error.value) for name in ENCODINGS)
    assert "import the module that defines its class" in str(error.value)


@pytest.mark.parametrize(
    "given", [None, 3, ["alibi"], {}, {"base": 3.0}, {"type": None}, {"type": ["alibi"]}, hf_posenc.PositionEncoding]
)
def test_what_is_no_encoding(given):
    with pytest.raises(ValueError, match="a name or a dict") as error:
        canonical(given)
    assert all(repr(name) in str(error.value) for name in ENCODINGS)


@pytest.mark.parametrize(
    ("kind", "verbs"),
    [
        ("none", ()),
        ("sinusoidal", ("embed",)),
        ("learned", ("embed",)),
        ("normalized", ("embed",)),
        ("counter", ("embed",)),
        ("relative", ("distance_bias",)),
        ("alibi", ("distance_bias",)),
        ("rope", ("rotate",)),
        ("logn", ("rotate",)),
        ("t5", ("distance_bias",)),
        ("shaw", ("score_bias", "value_bias")),
        ("sinusoidal+rope+alibi", ("embed", "rotate", "distance_bias")),
        ("none+shaw", ("score_bias", "value_bias")),
    ],
)
def test_mechanisms(kind, verbs):
    assert encoding_class(kind).mechanisms() == verbs


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


@pytest.mark.parametrize("name", ENCODINGS)
def test_unknown_option(name):
    allowed = encoding_class(name).option_types()
    with pytest.raises(
        ValueError, match=rf"'{name}' has no option 'bass'( \(did you mean 'bases?'\?\))?, 'wrong'; it"
    ) as error:
        canonical({"type": name, "wrong": 1, "bass": 2})
    assert all(repr(option) in str(error.value) for option in allowed)
    if not allowed:
        assert "no options" in str(error.value)


WRONG = [
    ("sinusoidal", "base", "10000", "a finite number above 1"),
    ("sinusoidal", "base", True, "a finite number above 1"),
    ("sinusoidal", "base", None, "a finite number above 1"),
    ("sinusoidal", "base", [10000.0], "a finite number above 1"),
    ("sinusoidal", "base", 1, "a finite number above 1"),
    ("sinusoidal", "base", 1.0, "a finite number above 1"),
    ("sinusoidal", "base", -5.0, "a finite number above 1"),
    ("sinusoidal", "base", math.nan, "a finite number above 1"),
    ("sinusoidal", "base", math.inf, "a finite number above 1"),
    pytest.param("sinusoidal", "base", 10**400, "a finite number above 1", id="beyond all floats"),
    ("sinusoidal", "scale", math.nan, "a finite number or 'learned'"),
    ("sinusoidal", "scale", "learnt", "a finite number or 'learned'"),
    ("sinusoidal", "scale", False, "a finite number or 'learned'"),
    ("sinusoidal", "layout", "halves", "'interleaved' or 'concatenated'"),
    ("sinusoidal", "layout", 0, "'interleaved' or 'concatenated'"),
    ("learned", "std", 0.0, "a finite number above 0"),
    ("learned", "std", -math.inf, "a finite number above 0"),
    ("learned", "init", "zeros", "'normal' or 'sinusoidal' or 'host'"),
    ("relative", "max_distance", True, "an integer above 0"),
    ("relative", "max_distance", 5.0, "an integer above 0"),
    ("relative", "max_distance", 0, "an integer above 0"),
    ("relative", "max_distance", None, "an integer above 0"),
    ("relative", "per_layer", 1, "True or False"),
    ("shaw", "per_layer", None, "True or False"),
    ("alibi", "slopes", "trained", "'fixed' or 'learned'"),
    ("alibi", "sides", "both", "'symmetric' or 'one_sided' or 'asymmetric'"),
    ("kerple", "kernel", "linear", "'log' or 'power'"),
    ("sandwich", "size", 64.0, "an integer above 0"),
    ("sandwich", "base", 1, "a finite number above 1"),
    ("rope", "theta", 1, "a finite number above 1"),
    ("rope", "layout", "interleave", "'half' or 'interleaved'"),
    ("logn", "trained_length", 1, "an integer above 1 or None"),
    ("logn", "trained_length", 512.0, "an integer above 1 or None"),
    ("logn", "scale", 1.0, "'fixed' or 'learned'"),
]


@pytest.mark.parametrize(("kind", "option", "value", "allowed"), WRONG)
def test_wrong_types_and_ranges(kind, option, value, allowed):
    with pytest.raises(ValueError) as error:
        canonical({"type": kind, option: value})
    assert str(error.value) == f"{kind}.{option}={value!r}: allowed is {allowed}"


@pytest.mark.parametrize("kind", ["sinusoidal", "rotary"])
def test_options_are_checked_by_the_constructor_too(kind):
    with pytest.raises(ValueError, match="allowed is a finite number"):
        encoding_class(kind)(GEOMETRY, **{"theta" if kind == "rotary" else "base": "7"})


def taking(annotation):
    """An encoding with one option, a required one."""

    class Own(PositionEncoding, type="own"):
        option: annotation

    return Own


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, -3, -3),
        (float, 2, 2.0),
        (float, -1.5, -1.5),
        (bool, True, True),
        (str, "", ""),
        (Any, {"a": [1]}, {"a": [1]}),
        (int | None, None, None),
        (int | None, 3, 3),
        (Literal["a", 1, None], 1, 1),
        (Literal["a", 1, None], None, None),
        (Annotated[int, GreaterThan(2)], 3, 3),
        (Annotated[float, GreaterThan(2)], 3, 3.0),
        (Annotated[float | None, GreaterThan(0)], None, None),
        (Annotated[float | None, GreaterThan(0)], 1, 1.0),
        (Annotated[float | Literal["auto"], GreaterThan(0)], "auto", "auto"),
        (Annotated[float | Literal["auto"], GreaterThan(0)], 3, 3.0),
        (tuple[float, ...], [1.5, 2.5], (1.5, 2.5)),
        (tuple[float, ...], (1.5,), (1.5,)),
        (tuple[float, ...], [], ()),
        (tuple[float, ...], [100, 2.5], (100.0, 2.5)),
        (tuple[str, ...] | None, ["a", "b"], ("a", "b")),
        (tuple[int, str], [1, "a"], (1, "a")),
    ],
    ids=str,
)
def test_values_arrive_in_the_annotated_type(annotation, value, expected):
    taking(annotation)
    actual = canonical({"type": "own", "option": value})
    assert actual == {"type": "own", "option": expected} and type(actual["option"]) is type(expected)
    if isinstance(expected, tuple):
        assert [type(item) for item in actual["option"]] == [type(item) for item in expected]
    module = build(actual, GEOMETRY)
    assert module.option == expected and f"option={expected!r}" in repr(module)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 3.0),
        (int, True),
        (int, "3"),
        (int, None),
        (float, True),
        (float, math.nan),
        (float, -math.inf),
        (float, "1.0"),
        (bool, 1),
        (bool, "False"),
        (str, 1),
        (int | None, False),
        (int | None, 1.0),
        (Literal["a", 1], True),
        (Literal["a", 1], 1.0),
        (Literal["a", 1], "b"),
        (Annotated[int, GreaterThan(2)], 2),
        (Annotated[float, GreaterThan(2)], 2.0),
        (Annotated[float | None, GreaterThan(0)], 0),
        (Annotated[float | Literal["auto"], GreaterThan(0)], 0),
        (Annotated[float | Literal["auto"], GreaterThan(0)], "manual"),
        (tuple[float, ...], 3.0),
        (tuple[float, ...], ["a"]),
        (tuple[float, ...], [1.0, math.inf]),
        (tuple[float, ...], [True]),
        (tuple[str, ...], "ab"),
        (tuple[int, str], [1, 2]),
        (tuple[int, str], [1]),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused(annotation, value):
    taking(annotation)
    with pytest.raises(ValueError, match=rf"own\.option={re.escape(repr(value))}: allowed is "):
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


# Own encodings.


def test_own_encoding_by_one_class():
    """As in the docstring of PositionEncoding: usable by name, alias and dict at once."""

    class Window(hf_posenc.PositionEncoding, type="window", aliases=("near",)):
        """Nothing further than `width` tokens away is seen."""

        width: Annotated[int, GreaterThan(0)] = 128

        def distance_bias(self, distance):
            return torch.where(distance.abs() > self.width, -torch.inf, 0.0)[None]

    assert list_encodings()["window"] is Window and "near" not in list_encodings()
    assert canonical("near") == {"type": "window", "width": 128, "per_layer": False}
    module = build(canonical({"type": "window", "width": 2}), GEOMETRY)
    assert module.distance_bias(torch.arange(-3, 4)).tolist() == [[-torch.inf, 0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf]]
    with pytest.raises(ValueError, match=r"window\.width=0: allowed is an integer above 0"):
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
    with pytest.raises(ValueError, match="no option 'shared'; it takes 'width'"):
        canonical({"type": "own", "shared": 1})


def test_per_layer_is_an_option_of_what_biases():
    """Beside the options of its own, with the class's default; also of an encoding that doesn't say so."""

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
    """Its vectors are added once, by the stack."""

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
        with pytest.raises(ValueError, match=r"'(both|each)' embeds, which the stack does once .* per_layer has to be False"):
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

    with pytest.raises(ValueError, match="'needy' needs the option 'width', 'depth'"):
        canonical("needy")
    with pytest.raises(ValueError, match="'needy' needs the option 'depth'"):
        canonical({"type": "needy", "width": 2})
    assert canonical({"type": "needy", "width": 2, "depth": 3}) == {"type": "needy", "width": 2, "depth": 3, "height": 1}


CELL = """
class Mine(PositionEncoding, type="mine", aliases=("my",)):
    width: int = {width}
"""


def test_a_cell_run_again_replaces_its_class():
    first = define(CELL.format(width=1))["Mine"]
    second = define(CELL.format(width=2))["Mine"]
    assert first is not second
    assert encoding_class("mine") is encoding_class("my") is second
    assert canonical("my") == {"type": "mine", "width": 2}


def test_options_of_a_cell_with_postponed_annotations():
    cell = define("from __future__ import annotations\n" + CELL.format(width=3))
    assert canonical("mine") == {"type": "mine", "width": 3} and cell["Mine"].option_types() == {"width": int}


@pytest.mark.parametrize("name", ["mine", "my"])
@pytest.mark.parametrize("place", ["type", "alias"])
def test_another_class_under_a_taken_name(name, place):
    first = define(CELL.format(width=1))["Mine"]
    names = f"type={name!r}" if place == "type" else f"type='another', aliases=({name!r},)"
    with pytest.raises(ValueError, match=rf"{name!r} is taken by a_notebook\.Mine: give Other another"):
        define(f"class Other(PositionEncoding, {names}): ...")
    with pytest.raises(ValueError, match="is taken by a_notebook"):
        define(CELL.format(width=1), module="another_notebook")
    assert encoding_class("mine") is encoding_class("my") is first and "another" not in list_encodings()


@pytest.mark.parametrize("name", ["alibi", "rotary", "nope"])
def test_names_of_the_package_are_taken(name):
    with pytest.raises(ValueError, match=rf"{name!r} is taken by hf_posenc\.encodings\."):
        define(f"class Mine(PositionEncoding, type={name!r}): ...")


def test_an_encoding_is_an_ordinary_module():
    """Hashable, with parameters and a repr; the constructor takes options as keywords."""

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
        # Dict and keywords side by side, a part called by an alias.
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
        ("alibi+alibbi", "unknown position encoding 'alibbi'"),
        ("alibi+", "unknown position encoding ''"),
        ("alibi + rope", "unknown position encoding 'alibi '"),
        ("alibi+rope+alibi", r"'alibi\+rope\+alibi' has the same encoding twice"),
        ("absolute+learned", "the same encoding twice"),
        ("relative_key+relative_key_query", "the same encoding twice"),
        ({"type": "sinusoidal+alibi", "base": 3.0}, r"'sinusoidal\+alibi' has no part 'base'.*sinusoidal__option=… or alibi__"),
        ({"type": "sinusoidal+alibi", "rope": {"theta": 3.0}}, "has no part 'rope'"),
        ({"type": "sinusoidal+alibi", "rope__theta": 3.0}, "has no part 'rope'"),
        ({"type": "sinusoidal+alibi", "sinusoidal__bass": 3.0}, r"'sinusoidal' has no option 'bass' \(.*\); it takes 'base'"),
        ({"type": "sinusoidal+alibi", "sinusoidal": {"bass": 3.0}}, "'sinusoidal' has no option 'bass'"),
        (
            {"type": "sinusoidal+alibi", "alibi__slope": 1},
            r"'alibi' has no option 'slope' \(.*'slopes'\?\); it takes 'slopes', 'sides', 'per_layer'",
        ),
        ({"type": "sinusoidal+alibi", "sinusoidal": 3.0}, r"sinusoidal\+alibi\['sinusoidal'\]=3.0: allowed is a dict"),
        ({"type": "sinusoidal+alibi", "sinusoidal": None}, r"\['sinusoidal'\]=None: allowed is a dict"),
        ({"type": "sinusoidal+alibi", "sinusoidal__base": "3"}, r"^sinusoidal\.base='3': allowed is a finite number above 1"),
        ({"type": "alibi+absolute", "absolute": {"std": 0}}, r"^learned\.std=0: allowed is a finite number above 0"),
    ],
    ids=str,
)
def test_wrong_compositions(given, words):
    with pytest.raises(ValueError, match=words):
        canonical(given)


def test_compositions_are_not_listed():
    assert encoding_class("alibi+rope") is encoding_class("alibi+rotary") is not encoding_class("rope+alibi")
    assert not any("+" in name for name in list_encodings())


def test_a_composition_is_pickled_into_a_new_process(tmp_path):
    """Where nobody has asked for it yet."""
    module = build(canonical({"type": "learned+shaw+t5", "t5__num_buckets": 8}), GEOMETRY)
    (tmp_path / "whole.pickle").write_bytes(pickle.dumps(module))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    code = (
        "import pickle, sys, torch, pathlib;"
        "folder = pathlib.Path(sys.argv[1]);"
        "module = pickle.loads((folder / 'whole.pickle').read_bytes());"
        "weights = torch.load(folder / 'weights.pt');"
        "assert module.state_dict().keys() == weights.keys();"
        "assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items());"
        "print(module.type, type(module).__qualname__, module.t5.num_buckets)"
    )
    assert run_python(code, tmp_path).split() == ["learned+shaw+t5", "learned+shaw+t5", "8"]


def test_a_cell_run_again_replaces_its_class_in_compositions():
    define(CELL.format(width=1))
    first = encoding_class("my+alibi")
    assert first is encoding_class("mine+alibi") and canonical("my+alibi")["mine"] == {"width": 1}
    second_part = define(CELL.format(width=2))["Mine"]
    second = encoding_class("mine+alibi")
    assert second is not first and second.parts["mine"] is second_part
    assert canonical("alibi+mine")["mine"] == canonical("mine+alibi")["mine"] == {"width": 2}
    module = build(canonical("mine+alibi"), GEOMETRY)
    assert type(module.mine) is second_part


@pytest.mark.parametrize("name", ["a+b", "a__b", "", "a.b", "a b", "_a", "a_", "a--b", "ä"])
def test_names_which_would_not_fit_into_compositions(name):
    for names in (f"type={name!r}", f"type='own', aliases=({name!r},)"):
        with pytest.raises(ValueError, match=rf"{re.escape(repr(name))} can't be the name of an encoding: allowed are letters"):
            define(f"class Own(PositionEncoding, {names}): ...")
    assert name not in PositionEncoding.registered and "own" not in PositionEncoding.registered


RESERVED = [
    "type",
    "aliases",
    "geometry",
    "calibration",
    "max_length",
    "layers",
    "host",
    "original",
    "inject",
    "where",
    "keep_original",
    "submodel",
]


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names(name):
    with pytest.raises(ValueError, match=rf"{name!r} can't be the name of an encoding.*'submodel'"):
        define(f"class Own(PositionEncoding, type={name!r}): ...")
    with pytest.raises(ValueError, match=rf"Own can't name an option '{name}': those are hf_posenc's own"):
        define(f"class Own(PositionEncoding, type='own'):\n    {name}: int = 1")
    assert name not in PositionEncoding.registered and "own" not in PositionEncoding.registered


def test_a_name_that_a_composition_could_not_hold(own_registry):
    with pytest.raises(ValueError, match="'rows' can't be the name of an encoding: it is an attribute of all encodings"):

        class Rows(PositionEncoding, type="rows"):
            pass

    assert "rows" not in PositionEncoding.registered


@pytest.mark.parametrize("name", ENCODINGS)
def test_title_and_paper_are_those_of_the_file(name):
    cls = encoding_class(name)
    first = sys.modules[cls.__module__].__doc__.partition("\n")[0]
    assert first == (f"{cls.title}: {', '.join(cls.paper)}" if cls.paper else f"{cls.title}.")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("paper = 'https://example.org'", "Own.paper='https://example.org': allowed is a list in which each value is a string"),
        ("title = 3", "Own.title=3: allowed is a string"),
    ],
)
def test_wrong_title_and_paper(line, words):
    with pytest.raises(ValueError, match=words):
        define(f"class Own(PositionEncoding, type='own'):\n    {line}")
    assert "own" not in PositionEncoding.registered


def test_options_and_modules_by_part():
    alibi, both = encoding_class("alibi"), encoding_class("none+relative_key")
    assert alibi.component_classes() == {"alibi": alibi} and list(both.component_classes()) == ["none", "shaw"]
    assert alibi.by_part({"layers": [1]}) == {"alibi": {"layers": [1]}}  # nothing is checked yet
    given = {"relative_key": {"layers": [1]}, "shaw__max_distance": 3, "none__layers": [0]}
    assert both.by_part(given) == {"none": {"layers": [0]}, "shaw": {"layers": [1], "max_distance": 3}}
    module = build(canonical("none+shaw"), GEOMETRY)
    assert module.named_parts() == {"none": module.none, "shaw": module.shaw}
    assert module.shaw.named_parts() == {"shaw": module.shaw}
    assert list(both.for_stack(GEOMETRY).named_parts()) == ["none"]
    assert both.component_classes()["shaw"].for_stack(GEOMETRY).named_parts() == {}


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
    stated = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert {name: SpecifierSet(specifier) for name, specifier in _versions.REQUIRED.items()} == {
        name: stated[name] for name in ("torch", "transformers")
    }


def install(monkeypatch, **versions):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or real(name))


@pytest.mark.parametrize("package", ["transformers", "torch"])
@pytest.mark.parametrize("version", ["1.0.0", "99.0"])
def test_versions_out_of_range(monkeypatch, package, version):
    install(monkeypatch, **{package: version})
    with pytest.raises(ImportError) as error:
        _versions.check()
    message, specifier = str(error.value), _versions.REQUIRED[package]
    assert f"{version} is installed" in message and f'pip install "{package}{specifier}"' in message
    assert f"works with {package}{specifier}" in message


def test_versions_in_range(monkeypatch):
    """Nightly and local builds count too."""
    _versions.check()
    install(monkeypatch, torch="2.14.0.dev20260101+cu130", transformers="5.24.0rc1")
    _versions.check()


# The rules of the house.

ORDER = [
    {"_versions", "_compat", "signatures", "progress"},
    {"encodings"},
    {"configuration"},
    {"attention", "serialization"},
    {"architectures", "figures"},
    {"modeling"},
    {"inspection"},
    {"conversion", "evaluation", "diagnostics"},
    {"hub", "plots", "training"},
    {"explorer"},
    {"cli"},
]
"""A package, or a module of the root, imports from the lines above its own alone. A new one needs a place here."""

PACKAGE = ROOT / "hf_posenc"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
ENCODING_MODULES = [path for path in MODULES if path.parent.name == "encodings"]


def imported(path):
    """What a file imports, wherever in it: `import a.b` -> a.b, `from a import b` -> a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path):
    return {name for name in imported(path) if name.partition(".")[0] == "hf_posenc"}


DOCUMENTED = {
    *("_modules", "_buffers", "_parameters", "_apply"),
    *("_attn_implementation", "_from_config", "_upcast_and_reordered_attn", "_replace"),
}
"""Private by name only: the state of `nn.Module`, what models of Transformers share, GPT-2's attention, a NamedTuple method."""


def privates(path):
    """The private attributes of others that a file mentions: those that no class or function of the package is named by."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))


def test_private_apis_are_used_in_compat_only():
    trees = [ast.parse(path.read_text()) for path in MODULES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in MODULES
        if path.name != "_compat.py"
        for name in privates(path)
        if re.fullmatch(r"_(?!_|posenc_)\w+", name) and name not in own | DOCUMENTED
    }
    assert not found


@pytest.mark.parametrize("name", _compat.OVERRIDDEN)
def test_overridden_methods_exist(name):
    assert callable(getattr(PreTrainedModel, name, None) or getattr(GenerationMixin, name))


def rank(module):
    return next((index for index, group in enumerate(ORDER) if module in group), None)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_order(path):
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert rank(module) is not None, f"{module} has no place in ORDER"
    for name in ours(path):
        if name == "hf_posenc" and module in ("cli", "training"):  # they use the public API
            continue
        other = name.split(".")[1] if "." in name else None
        assert rank(other) is not None, f"{path.name} imports {name}, which is no module of ours"
        assert other == module or rank(other) < rank(module), f"{module} imports {other}"


@pytest.mark.parametrize("path", ENCODING_MODULES, ids=lambda path: path.name)
def test_encodings_know_nothing_of_hosts(path):
    allowed = {"hf_posenc", "torch", "safetensors", "numpy", *sys.stdlib_module_names}
    others = {name for name in imported(path) if name.partition(".")[0] not in allowed}
    if path.name == "frequency_rules.py":
        others = {name for name in others if not name.startswith("transformers.modeling_rope_utils")}
    assert not others


FOUNDATION = [
    *("options", "mapped_tables", "context", "table_interpolation", "frequency_rules", "base"),
    *("composition", "registry", "determinism", "construction", "rotation", "tables", "catalog"),
]
"""The modules of encodings/ that are no encodings. Each imports from those to its left alone."""


@pytest.mark.parametrize("path", ENCODING_MODULES, ids=lambda path: path.name)
def test_import_order_of_encodings(path):
    names = [each.split(".") for each in ours(path) if not each.startswith("hf_posenc._compat.")]
    assert all(name[:2] == ["hf_posenc", "encodings"] and len(name) == 4 for name in names), "from the module that defines it"
    others, own = {name[2] for name in names}, path.stem
    if own in FOUNDATION:
        assert others <= set(FOUNDATION[: FOUNDATION.index(own)])
    elif own != "__init__":
        assert not others & {"composition", "registry"}


def test_modules_bear_names_of_their_own():
    """Neither that of a public function, which would hide it, nor one of the standard library."""
    names = {path.stem for path in MODULES if path.parent == PACKAGE} | {"encodings"}
    assert not names & ({*hf_posenc.__all__, "utils"} | sys.stdlib_module_names - {"encodings"})


def test_copies_of_modules_have_files_of_their_own():
    """With a model they are in one folder, whatever package they are from."""
    names = [".".join(("hf_posenc", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES]
    copies = [flat(name).casefold() for name in names if not name.endswith("__init__")]
    assert {name for name in copies if copies.count(name) > 1} == set()


MEASURING = {"diagnostics", "evaluation", "plots", "progress", "explorer", "serialization", "training"}
"""Modules that programs and commands share; they know nothing of how models are patched."""


PROGRAMS = sorted(path for name in ("scripts", "benchmarks", "experiments", "tools") for path in (ROOT / name).rglob("*.py"))
"""What isn't installed."""
BESIDE = {"scripts": {"benchmarks", "experiments"}, "benchmarks": set(), "experiments": set(), "tools": {"benchmarks"}}
"""A folder of programs -> the others that it imports from; the package imports from none."""


@pytest.mark.parametrize("path", [*MODULES, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_import_order_of_programs(path):
    """Experiments may break: nothing needs them other than their commands."""
    folder = path.relative_to(ROOT).parts[0]
    others = {name.partition(".")[0] for name in imported(path)} & {*BESIDE, "tests"}
    assert others <= {folder, *BESIDE.get(folder, ())} - {"hf_posenc"}


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_scripts_are_thin(path):
    """Whatever they do can be imported, and run as a module."""
    nodes = ast.parse(path.read_text()).body
    assert not [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)]


def test_programs_use_the_public_api_alone():
    for path in PROGRAMS:
        used = {name.removeprefix("hf_posenc.") for name in ours(path) if name != "hf_posenc"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf_posenc":
                used.add(node.attr)
        used = {name for name in used if name.partition(".")[0] not in MEASURING}
        assert all(name in hf_posenc.__all__ or name.startswith("PosEnc") for name in used), path.name


@pytest.mark.parametrize("path", [*MODULES, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_tokenizers_are_loaded_in_one_place(path):
    """Transformers makes a tokenizer without a vocabulary where there is none; `tokenizer_files` rejects it."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    loaded = [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "from_pretrained"]
    names = {ast.unparse(call.value) for call in loaded if re.search(r"Tokenizer|Processor", ast.unparse(call.value))}
    assert not names or path.name == "tokenizer_files.py", names


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_print_on_any_terminal(path):
    """Else a table that is printed at the end, after an hour, may raise UnicodeEncodeError."""
    if (text := path.read_text("utf-8")).count('\nif __name__ == "__main__":\n') and "hf_posenc" in text:
        exempt = {"app.py", "v4_worker.py"}  # a page; run by other versions of Transformers
        assert path.name in exempt or '"__main__":\n    terminals.set_up()\n' in text


@pytest.mark.parametrize("path", [*MODULES, *PROGRAMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_progress_bars_are_those_of_one_module(path):
    assert path.name == "progress.py" or not any(name.startswith("tqdm") for name in imported(path))


@pytest.mark.parametrize("name", hf_posenc.__all__)
def test_public_names(name):
    assert getattr(hf_posenc, name).__doc__


def test_unknown_public_name():
    with pytest.raises(AttributeError, match=r"'hf_posenc' has no attribute 'pach' \(did you mean 'patch'\?\)"):
        _ = hf_posenc.pach
    with pytest.raises(AttributeError, match=r"no class 'BertForMaskdLM' \(did you mean 'BertForMaskedLM'\?\) in Transformers"):
        _ = hf_posenc.PosEncBertForMaskdLM


def test_dir_shows_the_public_names():
    """Neither the modules, which tab completion would offer, nor classes, which would be made by asking for each."""
    assert dir(hf_posenc) == sorted([*hf_posenc.__all__, "__version__"])


def test_importing_builds_no_class():
    """And imports no host's modeling file; the Auto classes know the derived names nevertheless. Transformers iterates over
    their mappings for its error messages, and finds these names there."""
    run_python(
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
""",
        fresh=True,
    )


def test_no_module_outside_sources_names_a_kind_of_source():
    """A kind of source is one file: without rotary.py, say, rotary hosts are refused, and nothing else changes."""
    names = {kind.__name__ for kind in PositionComponent.kinds}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("components", "cli"):  # the CLI's tables are rich's
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            used = {getattr(node, "id", None) or getattr(node, "name", None) for node in nodes}
            assert not names & used, path.name


def test_without_the_file_of_a_kind_its_hosts_are_refused(monkeypatch):
    kinds = [kind for kind in PositionComponent.kinds if kind.__name__ != "RotaryEmbedding"]
    assert len(kinds) == len(PositionComponent.kinds) - 1
    monkeypatch.setattr(PositionComponent, "kinds", kinds)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="rotary_emb") as refused:
        hf_posenc.patch(stock("llama"), "alibi")
    assert refused.value.reason == "other sources of position"
    hf_posenc.patch(stock("bert"), "alibi")
