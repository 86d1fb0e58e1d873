"""The files of custom encodings, saved with a model. They either load elsewhere, or aren't saved and a warning gives the
reason.
"""

import importlib
import json
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.serialization import remote_code
from models import first, patched, tokens

IMPORTS = "import torch\nfrom hf_posenc import PositionEncoding\n"
CLASS = """

class Own(PositionEncoding, type="TYPE"):
    '''Mine.'''

    def distance_bias(self, distance):
        return -(factor() * distance.abs()[None])
"""
BESIDE = {
    "package/__init__.py": "SLOPE = 2.0\nfrom .one import Own\n",
    "package/helpers.py": "SECOND = 3.0\ndef slope(): return 1.5\n",
    "package/late.py": "LATE = 7.0\n",
    "package/inner/__init__.py": "INNER = 0.5\n",
    "package/inner/deep.py": "from ..helpers import slope as third\n",
    "absolute.py": "def slope(): return 2.0\n",
    "slopes.json": "2.0",
}


def read():
    """Expected result of a file -> its module's name -> its text, and the words of the warning."""
    text = (ROOT / "tests" / "own_encodings.txt").read_bytes().decode()
    kinds = {"loads": {}, "fails": {}}
    for kind, name, body in re.findall(r"^=== (\w+): (.+)\n((?:(?!=== ).*\n)*)", text, re.MULTILINE):
        module = name if "." in name else f"own_{name.replace(' ', '_')}"
        code, _, words = body.strip("\n ").partition("\n=> ")
        code = code if "from hf_posenc" in code.partition("def ")[0] and "import torch" in code else IMPORTS + code
        code = (code if "class Own" in code or "# class" in code else code + CLASS) + "\n"
        kinds[kind][module] = re.sub(r"\bTYPE\b", type_of(module), code), words
    return kinds


def type_of(module):
    return "own-" + module.removeprefix("own_").replace("_", "-").replace(".", "-")


KINDS = read()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A directory of a user's modules. All are imported, and some of them are changed afterwards."""
    folder = tmp_path_factory.mktemp("own")
    installed = folder / "site-packages"  # the directory of the package

    def path_of(name):
        return (installed if name.startswith("package") else folder) / name

    for name, text in BESIDE.items():
        path_of(name).parent.mkdir(exist_ok=True, parents=True)
        path_of(name).write_text(text)
    texts = {module: text for kind in KINDS.values() for module, (text, _) in kind.items()}
    texts["own_lines"] = texts["own_lines"].replace("\n", "\r\n")
    texts["own_mark"] = "\ufeff" + texts["own_mark"]
    for module, text in texts.items():
        path = path_of(f"{module.replace('.', '/')}.py")
        path.write_bytes(text.encode("latin-1" if module == "own_latin" else "utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.syspath_prepend(installed)
        patch.setattr(hf_posenc.PositionEncoding, "registered", {**hf_posenc.PositionEncoding.registered})
        patch.setattr(sys, "dont_write_bytecode", True)  # bytecode may be mistaken for that of an edited file
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the escape sequence
            modules = {module: importlib.import_module(module) for module in texts}
        path = folder / "own_edited.py"
        path.write_text(path.read_text().replace("2.0", "3.0"))
        modules["own_set"].FACTOR = 5.0
        modules["own_initial"].STD = 2.0
        modules["own_made_elsewhere"].make("own-made-elsewhere")
        yield folder


def code_for(modules):
    """The files that are saved for these encodings, together in one model."""
    classes = [hf_posenc.PositionEncoding.registered[type_of(module)] for module in modules]
    config = hf_posenc.PosEncBertConfig(hidden_size=32, num_attention_heads=4, position_encoding="none")
    return remote_code.files("hf_posenc.modeling.derived", [(cls, cls.checked_options({})) for cls in classes], config)


@pytest.fixture(scope="module")
def saved(own, tmp_path_factory):
    """Models with all encodings that load, and the results of a process without the package that loaded them."""
    folder = tmp_path_factory.mktemp("saved")
    model = patched("bert", "+".join(map(type_of, KINDS["loads"])), "ForMaskedLM")
    model.save_pretrained(folder / "all")
    with torch.no_grad():
        torch.save(({"input_ids": tokens()}, first(model(tokens()))), folder / "all.pt")
    (folder / "cases.json").write_text(json.dumps({"all": "AutoModelForMaskedLM"}))
    environment = {"PYTHONPATH": str(ROOT / "tests"), "HF_MODULES_CACHE": str(folder / "modules")}
    run_python("import sys, bare; bare.main(sys.argv[1])", folder, fresh=True, **environment)
    return folder


def test_files_are_copied_whole_and_bit_equal_elsewhere(own, saved):
    """The copies are identical, except for imports of the package and of the user's other modules."""
    assert json.loads((saved / "seen.json").read_text())["all"]["equal"] == [True, True, True]
    modules = {"package", "package.helpers", "package.late", "package.inner", "package.inner.deep", *KINDS["loads"]}
    names = {f"posenc_own_{module.replace('.', '_')}.py" for module in modules}
    assert {path.name for path in (saved / "all").glob("posenc_own_*.py")} == names
    for module in ("own_text", "own_dataclass", "own_executed", "own_feed", "own_lines"):
        original, copy = (own / f"{module}.py").read_text(), (saved / "all" / f"posenc_own_{module}.py").read_text()
        assert copy == original.replace("from hf_posenc import", "from .posenc_package import")


@pytest.mark.parametrize("module", KINDS["fails"])
def test_what_cant_be_loaded_is_refused(own, module):
    with pytest.raises(ValueError, match=f"{module.replace('.', '/')}.py can't.*the model: .*{KINDS['fails'][module][1]}"):
        code_for([module])


STEPS = """
import random
import torch
from hf_posenc import PositionEncoding

import os

STEP = 2.0
TABLE = [1.0, 2.0]
ROWS = torch.ones(2)
NOTHING = None
NAME, PLACE = __name__, os.path.dirname(__file__)


def scaled(value, by=1.0):
    return value * by


class Steps(PositionEncoding, type="own-steps"):
    '''Mine.'''

    size: float = 1.0

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.weight = torch.nn.Parameter(torch.full((geometry.hidden_size,), random.random()))

    def embed(self, positions):
        return (positions[..., None] // STEP) * self.size * self.weight
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hf_posenc.PositionEncoding, "registered", {**hf_posenc.PositionEncoding.registered})
    yield importlib.import_module("own_steps")
    del sys.modules["own_steps"]


def test_saving_leaves_the_process_as_it_was(module, tmp_path, caplog):
    """The log has one line for each file, and the state of random numbers doesn't change."""
    layer = hf_posenc.PositionEmbedding("own-steps", hidden_size=4)
    drawn = random.getstate(), torch.get_rng_state()
    layer.save_pretrained(tmp_path / "model")
    layer.config.save_pretrained(tmp_path / "config")
    assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
    for folder in ("model", "config"):
        assert (tmp_path / folder / "posenc_own_own_steps.py").is_file()
    assert not [name for name in sys.modules if name.startswith("posenc_copies_")]
    said = [record.getMessage() for record in caplog.records if record.name == "hf_posenc.serialization.remote_code"]
    assert said == [f"{module.__file__} is saved with the model in full. Anyone who loads the model can read it."]
    module.STEP = 3.0
    with pytest.warns(UserWarning, match=r"own_steps.STEP is 3.0 here, and 2.0 where the.*imported again"):
        layer.save_pretrained(tmp_path / "changed")
    assert {path.name for path in (tmp_path / "changed").glob("*.py")} == {"modeling_posenc.py"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("TABLE", lambda module: module.TABLE.append(3.0)),
        ("ROWS", lambda module: module.ROWS.zero_()),
        ("NOTHING", lambda module: setattr(module, "NOTHING", 1)),
        ("scaled", lambda module: setattr(module.scaled, "__defaults__", (2.0,))),
        ("Steps.size", lambda module: setattr(module.Steps, "size", 3.0)),
    ],
)
def test_values_that_were_changed_from_outside_are_refused(module, tmp_path, name, change):
    layer = hf_posenc.PositionEmbedding("own-steps", hidden_size=4)
    layer.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "posenc_own_own_steps.py").is_file()  # the module's own name and directory differ in a copy
    change(module)
    with pytest.warns(UserWarning, match=rf"own_steps\.{name} is .* where the.*imported again"):
        layer.save_pretrained(tmp_path / "changed")


def test_a_full_disk_is_a_reason_and_another_time_it_may_not_be(module, tmp_path, monkeypatch):
    layer = hf_posenc.PositionEmbedding("own-steps", hidden_size=4, size=2.0)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.warns(UserWarning, match="the copies.*temporary directory: .*No such file"):
            layer.save_pretrained(tmp_path / "model")
    layer.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "posenc_own_own_steps.py").is_file()


def test_files_that_cant_be_copied(module, tmp_path):
    config = hf_posenc.PosEncBertConfig(position_encoding="none")

    def refuses(words, *classes):
        with pytest.raises(ValueError, match=words):
            remote_code.files("hf_posenc.modeling.derived", [(cls, {}) for cls in classes], config)

    (tmp_path / "own_").mkdir()
    for name in ("own_/steps", "own__steps"):
        (tmp_path / f"{name}.py").write_text(STEPS.replace("own-steps", name.replace("/", "-").replace("_", "x")))
    others = [importlib.import_module(name) for name in ("own_.steps", "own__steps")]
    refuses(
        r"own_/steps.py and .*own__steps.py would both be saved as posenc_own_own__steps.py", *(each.Steps for each in others)
    )
    path = Path(module.__file__)
    path.write_text("x = \n")
    refuses("own_steps.py can't be saved with the model, because it can't be read: invalid syntax", module.Steps)
    path.unlink()
    refuses("can't be read: .*No such file", module.Steps)
    del sys.modules["own_steps"]
    refuses("Steps is defined in own_steps, no file", module.Steps)
    sys.modules["own_steps"] = module
