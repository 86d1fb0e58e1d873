"""Limits on untrusted configs and checkpoints: they can't request more memory than declared, run code, or open files outside
their directory.
"""

import functools
import gc
import json
import os
import re
import sys
from contextlib import suppress
from datetime import timedelta
from itertools import islice, permutations
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModel

import hf_posenc
from conftest import run_python
from hf_posenc import configuration
from hf_posenc.encodings import canonical, encoding_class, list_encodings, options
from hf_posenc.encodings.composition import Composition
from hf_posenc.modeling.embedding import PositionEmbeddingConfig
from hub_server import TOKEN, serve
from models import BERT, ENCODINGS, VOCABULARY, patched, stock, tokens

HUGE = 10**12


class Requested(TorchDispatchMode):
    """Records the number of values in the largest new tensor. The meta device uses no memory."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def tiny(position_encoding, **changes):
    """A patched BERT from a config only."""
    sizes = {**BERT, "vocab_size": VOCABULARY, **changes}
    return AutoModel.from_config(hf_posenc.PosEncBertConfig(**sizes, position_encoding=position_encoding))


# Fuzzing `position_encoding`.

LOWERED = 2**18
"""MAX_VALUES while fuzzing. Tensors above it are detected, and don't harm the machine."""
NAMES = sorted({*ENCODINGS, *(alias for cls in map(encoding_class, ENCODINGS) for alias in cls.aliases)})
HOSTILE = st.sampled_from(
    [
        *(0, -1, 2**14, 2**20, 2**24, 2**24 + 1, HUGE, -HUGE, 10**400),
        *(float("nan"), float("inf"), 1e308, -1e308, 5e-324, True, False, None),
        *("", "+", "x" * 50_000, "\ud800", "../../etc/passwd", "__class__", "alibi+" * 300 + "rope"),
        *([], {}, [[[[[[[[[[]]]]]]]]]], [1.0] * 70_000, {"type": "alibi"}, {1: 2}, {None: "x"}),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | HOSTILE
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4), max_leaves=12
)
LENGTHS = st.sampled_from([1, 4, 8, 32, 129, 1024, 4095, 4096, 4097, 2**13, 2**13 + 1, 2**14, 2**20, 2**24])
HOSTS = st.fixed_dictionaries({"name_or_path": st.text(), "rows": LENGTHS, "kept": st.booleans()})
PLACEMENT = {"max_length": st.none() | LENGTHS, "original": st.none() | HOSTS, "inject": st.sampled_from(configuration.INJECT)}


def right(annotation):
    """Values of an option's type, of any size."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return right(arguments[0])
    if origin in (Union, UnionType):
        return st.one_of(map(right, arguments))
    if origin is tuple:
        return st.lists(right(arguments[0]), max_size=8)
    if annotation in (bool, str, NoneType):
        return {bool: st.booleans(), str: st.text(max_size=20), NoneType: st.none()}[annotation]
    return {Literal: st.sampled_from(arguments or [None]), None: LENGTHS if annotation is int else st.floats(1.01, 1e9)}[origin]


@st.composite
def nearly_right(draw):
    """A dict of the right form, in which one value may be anything."""
    parts = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique_by=encoding_class))
    options = {part: {name: right(kind) for name, kind in encoding_class(part).option_types().items()} for part in parts}
    whole = {part: st.fixed_dictionaries({}, optional=each) for part, each in options.items()}
    fields = {**(whole if len(parts) > 1 else options[parts[0]]), **PLACEMENT}
    given = {"type": "+".join(parts), **draw(st.fixed_dictionaries({}, optional=fields))}
    wrong = draw(st.none() | st.sampled_from(sorted(given)))
    if wrong is not None:
        inside = given[wrong] if isinstance(given[wrong], dict) and given[wrong] and draw(st.booleans()) else given
        inside[draw(st.sampled_from(sorted(inside))) if inside is not given else wrong] = draw(ANYTHING)
    return given


def check_built_or_refused(position_encoding):
    with Requested() as requested, suppress(ValueError):
        try:
            model = tiny(position_encoding).eval()
            with torch.no_grad():
                model(tokens(1, 5))
        except ValueError as error:
            assert len(str(error)) < 2_000, "an error that prints what it was given"
            raise
    assert requested.largest <= LOWERED


FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=30),  # a hang, not a slow machine
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def lowered(monkeypatch):
    monkeypatch.setattr(options, "MAX_VALUES", LOWERED)


@settings(FUZZ, max_examples=75)
@given(nearly_right() | nearly_right() | ANYTHING)
def test_fuzz(lowered, position_encoding):
    """Any value in a config gives a model or a ValueError. There is no hang, and no tensor above the limit."""
    check_built_or_refused(position_encoding)


@pytest.mark.slow
@settings(FUZZ, max_examples=2_000)
@given(nearly_right() | nearly_right() | ANYTHING)
def test_fuzz_at_length(lowered, position_encoding):
    check_built_or_refused(position_encoding)


# Sizes that are rejected before memory is allocated.


HOST = {"name_or_path": "", "rows": 24, "kept": True}
TOO_LARGE = {
    "max_length": lambda: tiny({"type": "learned", "max_length": HUGE}),
    "max_length of what needs no table": lambda: tiny({"type": "alibi", "max_length": HUGE}),
    "max_length within integers": lambda: tiny({"type": "learned", "max_length": 2**24}, hidden_size=128),
    "max_length of patch": lambda: hf_posenc.patch(stock("bert"), "learned", max_length=HUGE),
    "relative": lambda: tiny({"type": "relative", "max_distance": HUGE}),
    "relative, many heads": lambda: tiny({"type": "relative", "max_distance": 2**24}, hidden_size=64, num_attention_heads=64),
    "shaw": lambda: tiny({"type": "shaw", "max_distance": HUGE}),
    "shaw, several layers": lambda: tiny({"type": "shaw", "max_distance": 2**23}, num_hidden_layers=9),
    "t5": lambda: tiny({"type": "t5", "num_buckets": HUGE, "max_distance": HUGE + 1}),
    "a part": lambda: tiny({"type": "relative+alibi", "relative": {"max_distance": HUGE}}),
    "two parts": lambda: tiny(
        {"type": "relative+learned", "max_length": 2**24, "relative": {"max_distance": 2**24}}, num_attention_heads=16
    ),
    "host": lambda: tiny({"type": "alibi", "original": {**HOST, "rows": HUGE}}),
    "host within integers": lambda: tiny({"type": "alibi", "original": {**HOST, "rows": 2**24}}, hidden_size=128),
    "a layer's max_length": lambda: hf_posenc.PositionEmbedding("learned", 8, max_length=HUGE),
    "a layer's max_length within integers": lambda: hf_posenc.PositionEmbedding("learned", 128, max_length=2**24),
    "a layer's hidden_size": lambda: AutoModel.from_config(
        PositionEmbeddingConfig(position_encoding="sinusoidal", hidden_size=HUGE)
    ),
}


@pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_before_memory_is_taken(make):
    with Requested() as requested, pytest.raises(ValueError, match=r"(up to|at most) (16777216|1073741824)"):
        make()
    assert requested.largest < 2**20


@pytest.mark.parametrize(("per_layer", "side"), [(False, 2**20), (True, 24_000)])
def test_encodings_of_a_users_own_are_counted(monkeypatch, per_layer, side):
    monkeypatch.setattr(hf_posenc.PositionEncoding, "registered", dict(hf_posenc.PositionEncoding.registered))

    class Squares(hf_posenc.PositionEncoding, type="squares"):
        side: int = 2

        def __init__(self, geometry, **options):
            super().__init__(geometry, **options)
            self.register_buffer("square", torch.zeros(self.side, self.side))

        def score_bias(self, query, key, context):
            return None

    Squares.per_layer = per_layer
    with Requested() as requested, pytest.raises(ValueError, match=rf"up to \({side}, {side}\), .* at most 1073741824"):
        tiny({"type": "squares", "side": side})
    assert requested.largest < 2**20
    model = tiny({"type": "squares", "side": 64})
    owner = model.encoder.layer[1].attention.self if per_layer else model
    assert owner.posenc.square.shape == (64, 64)


def test_a_long_max_distance_costs_a_short_input_nothing():
    """Shaw's vectors, one for each distance, are not all multiplied with each query."""
    far = patched("bert", {"type": "shaw", "max_distance": 2**16, "terms": "keys+queries"}).double()
    near = patched("bert", {"type": "shaw", "max_distance": 16, "terms": "keys+queries"}).double()
    for layer, same in zip(far.encoder.layer, near.encoder.layer, strict=True):
        middle = layer.attention.self.posenc.weight[2**16 - 16 : 2**16 + 17]
        same.attention.self.posenc.weight.data.copy_(middle)
    mask = torch.ones(2, 11, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)
    with torch.no_grad(), Requested() as requested:
        outputs = far(tokens(), attention_mask=mask)[0]
    torch.testing.assert_close(outputs, near(tokens(), attention_mask=mask)[0])
    assert requested.largest <= far.encoder.layer[0].attention.self.posenc.weight.numel()


# Invalid values.


CIRCLE, WIDE = {"type": "alibi"}, []
CIRCLE["again"] = CIRCLE
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(2_000), {})
WIDE += [WIDE] * 1_000
STRANGE = {
    "no type": ({}, "a name or a dict"),
    "a long name": ("x" * 60_000, "Unknown position encoding"),
    "a very long name": ("x" * 10**7, "more than 65536"),
    "one part 300 times": ("alibi+" * 300 + "rope", "the same encoding twice"),
    "no parts": ("+" * 1_000, "Unknown position encoding"),
    "an integer that can't be written": ({"type": "rope", "theta": 10**5000}, "an integer of 16610 bits"),
    "the same as an option": ({"type": "relative", "max_distance": 10**5000}, "up to 16777216"),
    "the same as a length": ({"type": "alibi", "max_length": 10**5000}, "an integer of 16610 bits"),
    "many options": ({"type": "rope", **dict.fromkeys(map(str, range(9_000)), 1)}, "Its options: 'theta', 'layout'"),
    "a long value": ({"type": "rope", "theta": ["y" * 900] * 50}, "must be a finite number"),
    "a long host": ({"type": "rope", "original": ["y" * 900] * 50}, "which patch writes"),
    "a long part": ({"type": "alibi+rope", "rope": "y" * 9_000}, "must be a dict"),
    "another key than a string": ({"type": "rope", 3: 4, "x": 5}, "3 can't be a key"),
    "a tuple for a key": ({"type": "rope", "theta": [{(1, 2): 3}]}, "can't be a key"),
    "half a character": ({"type": "rope", "layout": "\ud800"}, "surrogate"),
    "deep": ({"type": "alibi", "a": DEEP}, "deeper than 8"),
    "in itself": (CIRCLE, "deeper than 8"),
    "in itself, many times": ({"type": "rope", "theta": WIDE}, "more than 65536"),
    "no number": ({"type": "rope", "theta": float("nan")}, "a finite number"),
    "no length": ({"type": "alibi", "max_length": True}, "an integer above 0"),
    "an empty host table": ({"type": "alibi", "original": {**HOST, "rows": 0}}, "max_length=0"),
}


@pytest.mark.parametrize(("position_encoding", "reason"), STRANGE.values(), ids=STRANGE)
def test_strange_values_are_refused_in_few_words(position_encoding, reason):
    with pytest.raises(ValueError, match=reason) as error:
        hf_posenc.PosEncBertConfig(position_encoding=position_encoding)
    assert len(str(error.value)) < 1_000


def test_a_strange_config_with_position_encoding_given_beside_it():
    beside = {"type": "rope", "theta": {}, "original": {"kept": True}}
    for saved in (None, "rope", 3, {}, {"type": 3}, {"type": "rope", "theta": None, "original": 7}):
        with pytest.raises(ValueError):
            hf_posenc.PosEncBertConfig.from_dict({"position_encoding": saved}, position_encoding=beside)


def test_dropout_is_a_probability():
    for dropout in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="from 0 to 1"):
            hf_posenc.PositionEmbedding("sinusoidal", 8, dropout=dropout)


def test_refused_compositions_leave_nothing_behind():
    before, seen = set(Composition.__subclasses__()), 0
    for names in islice(permutations(list_encodings(), 3), 0, None, 50):
        with pytest.raises(ValueError, match="has no part|can't be.*one layer"):
            canonical({"type": "+".join(names), "other": {}})
        seen += 1
    gc.collect()
    assert seen > 100 and set(Composition.__subclasses__()) == before


# Paths in a config. `spelled` writes one encoding with a file in all spellings that canonical() accepts, in all places.


class Atlas(hf_posenc.PositionEncoding, type="test-atlas", aliases={"test-map": {"scale": 2.0}}):
    """A custom encoding with an option that names files."""

    scale: float = 1.0
    charts: tuple[Path, ...] | None = None

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        for chart in self.charts or ():
            open(chart).close()

    def embed(self, positions):
        return self.scale * torch.zeros(*positions.shape, self.geometry.hidden_size)


OWN = {name: hf_posenc.PositionEncoding.registered.pop(name) for name in ("test-atlas", "test-map")}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Registers Atlas only for the tests of this file, because other files list all encodings."""
    hf_posenc.PositionEncoding.registered.update(OWN)
    yield
    for name in OWN:
        del hf_posenc.PositionEncoding.registered[name]


OPENED, FORBIDDEN = [], []
"""The opened files among the watched paths."""


def watch(event, args):
    if event == "open" and FORBIDDEN and isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]) in FORBIDDEN:
        OPENED.append(args[0])
        raise RuntimeError(f"{args[0]} was opened")


sys.addaudithook(watch)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Files that must not be opened, and a directory for configs."""
    root = tmp_path_factory.mktemp("paths")
    save_file({"weight": torch.zeros(16, 32)}, root / "table.safetensors")
    (root / "text").write_text("root:x:0:0")
    os.mkfifo(root / "pipe")
    (root / "model").mkdir()
    FORBIDDEN.extend(str(root / name) for name in ("table.safetensors", "text", "pipe", "missing"))
    yield root
    FORBIDDEN.clear()


@st.composite
def spelled(draw, file, layered):
    """An encoding that names this file, in a spelling that a config can have."""
    called, options = draw(
        st.sampled_from(
            [
                (("learned", "absolute", "learnable"), {"storage": "memory-mapped", "file": file}),
                (("learned", "absolute", "learnable"), {"file": file}),
                (("test-atlas", "test-map"), {"charts": [file]}),
            ]
        )
    )
    name = draw(st.sampled_from(called))
    layers = layered and draw(st.booleans())
    if draw(st.booleans()):
        return {"type": name, **options, **({"layers": [0], "inject": "every_layer"} if layers else {})}
    twice = layered and draw(st.booleans())  # the same encoding in other layers, as the part learned_2
    other = called[0] if twice else draw(st.sampled_from(["alibi", "t5", "rope"]))
    names = [other, name] if twice or draw(st.booleans()) else [name, other]
    written = {"type": "+".join(names)}
    part = f"{called[0]}_2" if twice else draw(st.sampled_from(called))
    if layers or twice:
        options = {**options, "layers": [1]}
        written["inject"] = "every_layer"
    if twice:
        written[f"{other}__layers"] = "0:1"
    for option, value in options.items():
        if draw(st.booleans()):
            written[f"{part}__{option}"] = value
        else:
            written.setdefault(part, {})[option] = value
    return written


@st.composite
def documents(draw, file):
    """A config.json that names the file, and the encoding in it."""
    place = draw(st.sampled_from(["bert", "layer", "submodel", "inner", "pair", "where", "options"]))
    encoding = draw(spelled(file, layered=place not in ("layer", "where", "options")))
    if place == "layer":
        return {"model_type": "posenc-embedding", "position_encoding": encoding, "hidden_size": 32, "max_length": 16}, encoding
    patched = {"model_type": "posenc-bert", **BERT, "vocab_size": VOCABULARY, "position_encoding": encoding}
    if place == "submodel":
        return {"model_type": "posenc-clip", "position_encoding": {**encoding, "submodel": "text_model"}}, encoding
    if place == "inner":
        return {
            "model_type": "llava",
            "text_config": {"model_type": "posenc-llama", **BERT, "position_encoding": encoding},
        }, encoding
    if place == "pair":
        return {"model_type": "encoder-decoder", "encoder": {"model_type": "bert"}, "decoder": patched}, encoding
    if place in ("where", "options"):  # an encoding of one layer stack, or options for an encoding of the whole model
        options = {name: value for name, value in encoding.items() if name != "type"}
        inner, outer = (encoding, {"type": "t5"}) if place == "where" else (options, {"type": encoding["type"]})
        roles = draw(st.permutations(["encoder", "decoder"]))
        encoding = {**outer, "where": dict(zip(roles, (inner, {}), strict=True))}
        return {"model_type": "posenc-bart", "d_model": 32, "position_encoding": encoding}, encoding
    return patched, encoding


def path_objects(value):
    """All paths in a canonical encoding."""
    if isinstance(value, dict):
        return [each for inner in value.values() for each in path_objects(inner)]
    if isinstance(value, tuple):
        return [each for inner in value for each in path_objects(inner)]
    return [value] if isinstance(value, Path) else []


@settings(FUZZ, max_examples=60)
@given(st.data())
def test_a_path_in_a_config_is_never_opened(paths, data):
    file = data.draw(st.sampled_from(FORBIDDEN))
    document, encoding = data.draw(documents(file))
    named = configuration.PositionSpec.parse(encoding, in_code=True).to_dict()  # in code, the same spelling names the file
    assert path_objects(named) == [Path(file)] * str(encoding).count(file)
    folder = paths / "model"  # without the pipe, which raises an error itself
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    kind = hf_posenc.PosEncBertModel
    for load in (
        lambda: AutoModel.from_config(AutoConfig.from_pretrained(folder)),
        lambda: AutoModel.from_pretrained(folder),
        lambda: AutoConfig.for_model(**document),
        lambda: hf_posenc.inspect(folder),
        lambda: kind.config_class(position_encoding=encoding),
    ):
        with pytest.raises(ValueError, match="names a file, and nothing was opened"):
            load()
    for load in (
        lambda: kind.config_class.from_json_file(folder / "config.json"),
        lambda: kind.from_pretrained(folder, position_encoding="learned"),
    ):
        with suppress(ValueError, OSError):  # if the config is for another class
            load()
    assert not OPENED


@pytest.mark.filterwarnings("ignore:.*test_security.py can.t be saved with the model")
def test_a_path_in_code_is_opened_and_not_saved(paths, tmp_path):
    """The path is a string argument of a function, or a `Path` in a config."""
    FORBIDDEN.clear()
    file = str(paths / "table.safetensors")
    options = {"storage": "memory-mapped", "file": file, "max_length": 16}
    config = hf_posenc.PosEncBertConfig(
        **BERT, vocab_size=VOCABULARY, position_encoding={"type": "learned", **options, "file": Path(file)}
    )
    models = {
        "patch": lambda: hf_posenc.patch(stock("bert"), "learned", **options),
        "composition": lambda: hf_posenc.patch(
            stock("bert"), {"type": "learned+alibi", "absolute": dict(list(options.items())[:2])}, max_length=16
        ),
        "config": lambda: AutoModel.from_config(config),
        "own": lambda: hf_posenc.patch(stock("bert"), "test-map", charts=[paths / "text"]),
    }
    for name, make in models.items():
        model = make()
        model.config.save_pretrained(tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())["position_encoding"]
        assert str(paths) not in json.dumps(written) and "null" in json.dumps(written)
        assert str(paths) not in str(model.config) and str(paths) in repr(model.config.position_encoding)
    with pytest.raises(ValueError, match=r"pipe: it isn't a regular file"):
        hf_posenc.patch(stock("bert"), "learned", **{**options, "file": str(paths / "pipe")})


def test_an_option_that_names_a_file_has_a_default():
    with pytest.raises(ValueError, match=r"Chart.file names a file, and paths.*a model. Give the option a def"):

        class Chart(hf_posenc.PositionEncoding, type="test-chart"):
            file: Path


# Untrusted checkpoints, each loaded in one new process that records every opened file and all code that runs.

PAYLOAD = """
from pathlib import Path
Path({marker!r}).open("a").write("code of a checkpoint ran\\n")
from hf_posenc.modeling import PosEncBertConfig, PosEncBertModel
"""
PLACES = (
    "../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "https://example.org/model",
    "me/../../whoami-v2",
    "..",
    "a?b=c#d",
    "x\n---\nlicense: mit",
)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """The result for each checkpoint, and the local Hub with its requests."""
    root = tmp_path_factory.mktemp("strangers")
    marker = str(root / "ran.txt")

    def save(name, **changes):
        folder = root / name
        patched("bert", "relative").save_pretrained(folder)
        for file in folder.glob("*.py"):
            file.unlink()
        config = json.loads((folder / "config.json").read_text())
        config.pop("auto_map", None)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    classes = {"AutoConfig": "posenc_modeling.PosEncBertConfig", "AutoModel": "posenc_modeling.PosEncBertModel"}
    (save("code", auto_map=classes) / "posenc_modeling.py").write_text(PAYLOAD.format(marker=marker))

    class Payload:
        def __reduce__(self):
            return exec, (f"open({marker!r}, 'a').write('a pickle ran')",)

    folder = save("pickle")
    (folder / "model.safetensors").unlink()
    torch.save(Payload(), folder / "pytorch_model.bin")

    def index(name, shard, **changes):
        folder = save(name, **changes)
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    torch.save(Payload(), index("index", "weights.bin") / "weights.bin")
    index("elsewhere", "../code/model.safetensors")
    torch.save(Payload(), save("named", transformers_weights="adapter_model.bin") / "adapter_model.bin")

    def weights(name, change):
        folder = save(name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    weights("wide", lambda tensors: tensors.update({"posenc.weight": torch.zeros(4, 9)}))
    weights("kind", lambda tensors: tensors.update({"posenc.weight": torch.ones(4, 257, dtype=torch.int8)}))
    weights("missing", lambda tensors: tensors.pop("posenc.weight"))
    for number, place in enumerate(PLACES):
        model = patched("bert", "alibi")
        model.config.position_encoding["original"]["name_or_path"] = place
        model.save_pretrained(root / f"place{number}")
    with serve() as hub:
        settings = dict(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN, HF_HOME=f"{root}/home", HF_HUB_DISABLE_XET="1")
        code = "import sys, security_worker; security_worker.main(sys.argv[1])"
        run_python(code, root, fresh=True, **{**settings, "HF_HUB_OFFLINE": "0"})
    return json.loads((root / "loaded.json").read_text()), hub


def test_no_code_of_a_checkpoint_runs(strangers):
    """Without the package and trust_remote_code=True, loading raises an error. With the package, its own classes are used, even
    with trust_remote_code=True.
    """
    loaded, _ = strangers
    assert "trust_remote_code=True" in loaded["without the package"]["error"]
    for name in ("code", "code trust_remote_code"):
        assert loaded[name]["class"] == "hf_posenc.modeling.derived.PosEncBertModel"
    assert not any(result["ran"] for result in loaded.values())


def test_a_pickle_is_not_opened(strangers):
    loaded, _ = strangers
    for name, file in (
        ("pickle", "pytorch_model.bin"),
        ("pickle use_safetensors", "pytorch_model.bin"),
        ("index", "weights.bin"),
        ("named", "adapter_model.bin"),
    ):
        words = r"ValueError: .*" + re.escape(file) + " is not a safetensors file and was not opened"
        assert re.match(words, loaded[name]["error"])
        assert not any(path.endswith(file) for path in loaded[name]["opened"])


def test_weights_outside_the_folder_or_that_do_not_fit(strangers):
    loaded, _ = strangers
    assert "names '../code/model.safetensors', which isn't a file in its directory" in loaded["elsewhere"]["error"]
    assert loaded["wide"]["error"].startswith("RuntimeError: You set `ignore_mismatched_sizes` to `False`")
    assert "mismatched_keys posenc.weight. The config has other sizes" in loaded["wide ignore_mismatched_sizes"]["error"]
    assert "missing_keys posenc.weight" in loaded["missing"]["error"]
    assert "class" in loaded["kind"], "another dtype is converted"


def test_a_config_names_no_place_to_go_to(strangers):
    """`name_or_path` of the original model is only shown. Loading and pushing don't open it, and request it only
    as a repo id.
    """
    loaded, hub = strangers
    for number, place in enumerate(PLACES):
        result = loaded[f"place{number}"]
        assert result["class"] == "hf_posenc.modeling.derived.PosEncBertModel"
        assert not any("passwd" in path or "example.org" in path or path == place for path in result["opened"])
        card = hub.repos[f"me/place{number}"].commits[-1].files["README.md"].decode()
        assert place not in card
    asked = re.findall(r"/api/models/(\S*)", "\n".join(hub.log))
    assert asked and all(name.startswith("me/place") for name in asked)
    assert not any(".." in line or "passwd" in line or "example.org" in line for line in hub.log)
