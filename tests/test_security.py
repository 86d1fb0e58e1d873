"""Limits on untrusted configs and checkpoints: they can't request more memory than declared, run code, or open files outside
their directory.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModel

import hf_posenc
from conftest import run_python
from hub_server import TOKEN, serve
from models import BERT, VOCABULARY, patched, stock, tokens

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


# Sizes that are rejected before memory is allocated.


HOST = {"name_or_path": "", "rows": 24, "kept": True}
TOO_LARGE = {
    "max_length": lambda: tiny({"type": "learned", "max_length": HUGE}),
    "max_length within integers": lambda: tiny({"type": "learned", "max_length": 2**24}, hidden_size=128),
    "max_length of patch": lambda: hf_posenc.patch(stock("bert"), "learned", max_length=HUGE),
    "original": lambda: tiny({"type": "alibi", "original": {**HOST, "rows": 2**24}}, hidden_size=128),
    "a layer": lambda: hf_posenc.PositionEmbedding("learned", 128, max_length=2**24),
}


@pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_before_memory_is_taken(make):
    with Requested() as requested, pytest.raises(ValueError, match=r"(up to|at most) (16777216|1073741824)"):
        make()
    assert requested.largest < 2**20


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


STRANGE = {
    "no type": ({}, "a name or a dict"),
    "a long name": ("x" * 60_000, "Unknown position encoding"),
    "an integer that can't be written": ({"type": "rope", "theta": 10**5000}, "an integer of 16610 bits"),
    "a long value": ({"type": "rope", "theta": ["y" * 900] * 50}, "must be a finite number"),
    "a long part": ({"type": "alibi+rope", "rope": "y" * 9_000}, "must be a dict"),
    "no number": ({"type": "rope", "theta": float("nan")}, "a finite number"),
    "no length": ({"type": "alibi", "max_length": True}, "an integer above 0"),
    "an empty table": ({"type": "alibi", "original": {**HOST, "rows": 0}}, "max_length=0"),
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


# Paths in a config.


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


def learned(file):
    return {"storage": "memory-mapped", "file": file}


BODY = {"model_type": "posenc-bert", **BERT, "vocab_size": VOCABULARY}
DOCUMENTS = {
    "one": lambda file: {**BODY, "position_encoding": {"type": "learned", **learned(file)}},
    "part": lambda file: {**BODY, "position_encoding": {"type": "alibi+learned", "learned": learned(file)}},
    "prefix": lambda file: {**BODY, "position_encoding": {"type": "absolute+rope", "absolute__file": file}},
    "own": lambda file: {**BODY, "position_encoding": {"type": "test-map", "charts": [file]}},
    "where": lambda file: {
        "model_type": "posenc-bart",
        "position_encoding": {"type": "t5", "where": {"encoder": {"type": "learned", **learned(file)}, "decoder": {}}},
    },
    "layer": lambda file: {
        "model_type": "posenc-embedding",
        "position_encoding": {"type": "learned", **learned(file)},
        "hidden_size": 32,
        "max_length": 16,
    },
}
"""A config.json that names a file."""


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_path_in_a_config_is_never_opened(paths, document):
    for file in FORBIDDEN:
        (paths / "model" / "config.json").write_text(json.dumps(document(file)))
        for load in (
            lambda: AutoModel.from_config(AutoConfig.from_pretrained(paths / "model")),
            lambda: AutoModel.from_pretrained(paths / "model"),
            lambda file=file: AutoConfig.for_model(**document(file)),
            lambda: hf_posenc.inspect(paths / "model"),
        ):
            with pytest.raises(ValueError, match="names a file, and nothing was opened"):
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
