"""The code saved with a model loads with trust_remote_code=True if hf_posenc isn't installed."""

import ast
import functools
import importlib
import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertModel

import hf_posenc
from conftest import ROOT, run_python
from hf_posenc.serialization import mixins, remote_code
from models import ENCODINGS, HOSTS, REGISTERED, VARIANTS, by_structure, first, patched, stock, suits, tiny, tokens

PACKAGE = ROOT / "hf_posenc"
AUTO = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
}
HOSTS_APART = [host.values[0] for host in by_structure(HOSTS) if not host.marks]
"""Models whose layers are built differently from those of earlier models."""
ALONE = ("alibi", "learned", "shaw", "t5", "relative_key_query", "sinusoidal+alibi")
"""Encodings whose models contain no code of other encodings."""
_BERTS = [name for name in ENCODINGS if suits("bert", name) and name not in (*ALONE, "pope")]
TOGETHER = ("+".join(_BERTS), "pope", "cope+fox", "xpos")
"""All other encodings, combined in one model if they are compatible."""
OWN = '''
import torch

import hf_posenc


class Window(hf_posenc.PositionEncoding, type="own-window"):
    """Mine."""

    width: int = 2

    def distance_bias(self, distance):
        return torch.where(distance.abs() > self.width, -5.0, 0.0)[None]
'''


class Careless(hf_posenc.PositionEncoding, type="own-careless"):
    """Defined in a notebook."""

    __module__ = "__main__"

    def distance_bias(self, distance):
        return distance[None]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's module."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_encodings.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("own_encodings")


def save_all(folder, models):
    """Saves each model with its inputs and output, and the names of Auto classes in cases.json."""
    auto = {}
    for name, (model, inputs) in models.items():
        model.save_pretrained(folder / name)
        with torch.no_grad():
            torch.save((inputs, first(model(**inputs))), folder / f"{name}.pt")
        auto[name] = next((auto for head, auto in AUTO.items() if type(model).__name__.endswith(head)), "AutoModel")
    (folder / "cases.json").write_text(json.dumps(auto))


def seen_without_the_package(folder, models):
    """Saves models, given as name -> (model, inputs). Returns the results of a process without hf_posenc that loads them."""
    save_all(folder, models)
    environment = {"PYTHONPATH": str(ROOT / "tests"), "HF_MODULES_CACHE": str(folder / "modules")}
    run_python("import sys, bare; bare.main(sys.argv[1])", folder, fresh=True, **environment)
    return json.loads((folder / "seen.json").read_text())


def padded():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def of_hosts(hosts):
    return {host: (patched(host, "learned+shaw", HOSTS[host].head, max_length=16), padded()) for host in hosts}


def of_encoding(encoding):
    host = "bert" if suits("bert", encoding) else "gpt2"
    return patched(host, encoding, HOSTS[host].head), padded()


def of_encodings(encodings):
    return {encoding.replace("+", "-and-"): of_encoding(encoding) for encoding in encodings}


@pytest.fixture(scope="module")
def bare(own, tmp_path_factory):
    """The results of a process without hf_posenc that loaded saved models, and the models' directory."""
    folder, models = tmp_path_factory.mktemp("bare"), of_hosts(HOSTS_APART)
    models |= of_encodings([*ALONE, "own-window+learned"])
    models |= {f"together-{number}": of_encoding(encoding) for number, encoding in enumerate(TOGETHER)}
    each = patched("bert", {"type": "relative+alibi", "relative__per_layer": True, "alibi__slopes": "learned"})
    models["bert-per-layer"] = each, padded()
    layer = hf_posenc.PositionEmbedding("learned", hidden_size=8, max_length=16).eval()
    models["layer"] = layer, {"inputs_embeds": torch.randn(2, 5, 8)}
    models["calibrated"] = hf_posenc.convert(stock("bert"), "alibi", texts=[{"input_ids": tokens()}] * 4), padded()
    models["images"] = hf_posenc.patch(tiny("ViTModel"), "rope_2d"), {"pixel_values": torch.randn(2, 3, 32, 32)}
    with pytest.warns(UserWarning):
        patched("bert", "own-careless").save_pretrained(folder / "careless")
    return seen_without_the_package(folder, models), folder


def assert_equal_everywhere(seen):
    """The outputs are equal after loading, after saving and loading again, and after pickling."""
    assert {name: each["equal"] for name, each in seen.items()} == {name: [True, True, True] for name in seen}


def test_loads_without_the_package_and_again(bare):
    seen, _ = bare
    assert_equal_everywhere(seen)
    assert seen["gpt2"]["class"] == "PosEncGPT2LMHeadModel" and seen["layer"]["class"] == "PositionEmbedding"
    assert len(seen) == len(HOSTS_APART) + len(ALONE) + len(TOGETHER) + 5
    assert {*"+".join((*ALONE, *TOGETHER)).split("+")} >= {*ENCODINGS}


@pytest.mark.slow
def test_each_encoding_loads_alone_without_the_package(tmp_path):
    others = [encoding for encoding in VARIANTS if encoding not in ALONE]
    seen = seen_without_the_package(tmp_path, of_encodings(others))
    assert_equal_everywhere(seen)
    assert len(seen) == len(others)


@functools.cache
def modules_that_are_imported(code):
    """The names of imported files in the same directory."""
    relative = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and node.level]
    return {
        f"{module}.py" for node in relative for module in ([node.module] if node.module else [each.name for each in node.names])
    }


def test_code_imports_what_is_saved_with_it():
    """This holds for any other encodings of the model."""
    for encoding in ENCODINGS:
        code = remote_code.files("hf_posenc.modeling.derived", [(REGISTERED[encoding], {})], hf_posenc.PosEncBertConfig())
        assert f"posenc_encodings_{encoding}.py" in code
        for name, text in code.items():
            assert modules_that_are_imported(text) <= code.keys(), (encoding, name)


@pytest.mark.slow
def test_the_other_hosts_load_without_the_package(tmp_path):
    seen = seen_without_the_package(tmp_path, of_hosts(HOSTS.keys() - {*HOSTS_APART}))
    assert_equal_everywhere(seen)
    assert len(seen) == len(HOSTS) - len(HOSTS_APART)


def test_saving_again_without_the_package_writes_the_same_folder(bare):
    seen, folder = bare
    for name in seen:
        before, after = folder / name, folder / "again" / name
        assert sorted(os.listdir(before)) == sorted(os.listdir(after))
        assert all((after / file).read_bytes() == (before / file).read_bytes() for file in os.listdir(before)), name


def copy_of(module):
    """The file name of the copy of a module of hf_posenc."""
    return f"posenc_{module.lstrip('_').replace('.', '_')}.py"


RUNS_IT = {
    "encodings": ("base", "construction", "context", "options", "registry"),
    "attention": ("custom", "dispatch"),
    "architectures": ("components.component", "structure"),
    "modeling": ("cache_positions", "derived", "hooks", "install", "offsets", "position_ids"),
    "serialization": ("copies", "mixins"),
}
"""The modules that each checkpoint carries, whatever its encoding. None of them detects components, starts processes, rewrites
sources, or saves what isn't in memory.
"""
BIASES = ("bias_backends", "distance_table")
LEARNED = ("learned", "tables", "mapped_tables", "table_interpolation", "sinusoidal")  # whose table can start as sinusoids


def test_only_what_is_needed_is_saved(bare):
    _, folder = bare
    common = {f"{package}.{name}" for package, names in RUNS_IT.items() for name in names}
    common |= {"_compat", "_versions", "configuration", "signatures", "architectures.components.position_tables"}
    for name, encodings, backends in (
        ("alibi", {"alibi"}, BIASES),
        ("t5", {"t5"}, {*BIASES, "blockwise"}),
        ("learned", {*LEARNED}, ()),
        ("sinusoidal-and-alibi", {"sinusoidal", "alibi", "composition"}, BIASES),
        ("own-window-and-learned", {*LEARNED, "composition"}, BIASES),
    ):
        files = {path.name for path in (folder / name).glob("*.py")} - {"modeling_posenc.py"}
        needed = common | {f"encodings.{each}" for each in encodings} | {f"attention.{each}" for each in backends}
        assert files == {copy_of(each) for each in needed} | OWN_CODE.get(name, set()), name
    assert (folder / "calibrated" / f"{copy_of('architectures.contributions')}").is_file()
    assert (folder / "images" / f"{copy_of('architectures.own_tokens')}").is_file()
    needed = {f"encodings.{name}" for name in (*RUNS_IT["encodings"], *LEARNED)} | {"_compat", "_versions", "configuration"}
    needed |= {"modeling.embedding", *(f"serialization.{name}" for name in ("copies", "mixins"))}
    assert {path.name for path in (folder / "layer").glob("posenc_*.py")} == {copy_of(each) for each in needed}


OWN_CODE = {"own-window-and-learned": {"posenc_package.py", "posenc_own_own_encodings.py"}}


def test_custom_attentions_are_carried_by_models_that_have_some(tmp_path):
    patched("mpnet", "alibi").save_pretrained(tmp_path)
    assert {"posenc_attention_known_models.py", "posenc_attention_intercept.py"} <= {*os.listdir(tmp_path)}


def test_copies_differ_from_the_package_in_their_imports_alone(bare):
    _, folder = bare
    for copy in (folder / "sinusoidal-and-alibi").glob("posenc_*.py"):
        name = copy.stem
        modules = {copy_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts)): path for path in PACKAGE.rglob("*.py")}
        original = modules[copy.name]

        def others(path):
            """The statements without imports, and without the errors that replace some imports."""
            tree = ast.parse(path.read_text())

            def is_import(node):
                is_error = isinstance(node, ast.Raise) and "is not saved with the model" in ast.unparse(node)
                return is_error or isinstance(node, (ast.Import, ast.ImportFrom))

            for node in ast.walk(tree):
                for field in ("body", "orelse"):
                    if isinstance(getattr(node, field, None), list):
                        kept = [each for each in getattr(node, field) if not is_import(each)]
                        setattr(node, field, kept)
            return ast.dump(tree)

        assert others(copy) == others(original), name


def test_config_names_every_auto_class(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoConfig"] == "modeling_posenc.PosEncBertConfig"
    assert auto_map["AutoModel"] == "modeling_posenc.PosEncBertModel"
    assert auto_map["AutoModelForMaskedLM"] == "modeling_posenc.PosEncBertForMaskedLM"
    assert auto_map["AutoModelForSequenceClassification"] == "modeling_posenc.PosEncBertForSequenceClassification"


def test_a_config_saved_alone_carries_the_code(tmp_path):
    hf_posenc.PosEncBertConfig(position_encoding="alibi").save_pretrained(tmp_path / "config")
    assert {"config.json", "modeling_posenc.py", "posenc_encodings_alibi.py"} <= set(os.listdir(tmp_path / "config"))
    assert AutoConfig.from_pretrained(tmp_path / "config").position_encoding["type"] == "alibi"


def test_a_config_carries_the_same_code_whatever_is_imported(tmp_path):
    for name in ("bert", "t5"):
        patched(name, "relative").save_pretrained(tmp_path / name / "model")
    hf_posenc.patch(tiny("CLIPModel"), "alibi", submodel="text_model").save_pretrained(tmp_path / "clip" / "model")
    code = """if True:
        import sys
        from pathlib import Path
        import hf_posenc
        from transformers import AutoConfig
        for folder in Path(sys.argv[1]).iterdir():
            AutoConfig.from_pretrained(folder / "model").save_pretrained(folder / "config")
    """
    run_python(code, tmp_path, fresh=True)
    for folder in tmp_path.iterdir():
        model, config = ({path.name for path in (folder / name).glob("*.py")} for name in ("model", "config"))
        assert model == config, folder.name


OWN_COMPONENT = """
from torch import nn

from hf_posenc.architectures.components.position_tables import PositionTable


class OwnTable(PositionTable):
    @classmethod
    def claims(cls, module):
        return isinstance(module, nn.Embedding) and module.num_embeddings == 31

    @classmethod
    def find(cls, stack, modules):
        return (cls(path, module) for path, module in modules.items() if cls.claims(module))
"""


def test_a_custom_component_is_saved_and_can_be_defined_again(tmp_path, monkeypatch):
    from hf_posenc.architectures.components import PositionComponent

    monkeypatch.setattr(PositionComponent, "kinds", [*PositionComponent.kinds])
    (tmp_path / "own_component.py").write_text(OWN_COMPONENT)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(importlib.import_module("own_component"))
    model = patched("bert", "alibi", max_position_embeddings=31)
    seen = seen_without_the_package(tmp_path / "saved", {"own": (model, padded())})
    assert_equal_everywhere(seen)


def test_an_unpatched_model_carries_nothing(tmp_path):
    patched("bert", "alibi").save_pretrained(tmp_path / "patched")
    model = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path / "patched"))
    model.save_pretrained(tmp_path / "stock")
    assert set(os.listdir(tmp_path / "stock")) == {"config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert type(AutoModel.from_pretrained(tmp_path / "stock")) is BertModel


@pytest.mark.parametrize("encoding", ["own-careless", "own-careless+alibi"])
def test_what_cant_be_saved_is_named_and_nothing_is_lost(tmp_path, encoding):
    model = patched("bert", encoding)
    model.config.auto_map = {"AutoModel": "old.Code"}  # from an earlier save
    words = r"Careless is defined in __main__, .*\(from my_encodings import Careless\)"
    with pytest.warns(UserWarning, match=words) as warned:
        model.save_pretrained(tmp_path)
    assert "It loads where hf-posenc is installed and __main__.Careless is imported" in str(warned[0].message)
    assert set(os.listdir(tmp_path)) == {"config.json", "model.safetensors", "modeling_posenc.py"}
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "modeling_posenc.PosEncBertConfig"}
    assert torch.equal(first(AutoModel.from_pretrained(tmp_path)(tokens())), first(model(tokens())))


@pytest.mark.parametrize("after", ["alibi", "own-careless"])
def test_code_of_a_model_that_is_replaced_does_not_stay(own, tmp_path, after):
    """Otherwise, a user's file that the model no longer uses would be pushed with it."""
    patched("bert", "own-window+learned").save_pretrained(tmp_path / "model")
    assert {"posenc_own_own_encodings.py", "posenc_encodings_learned.py"} <= {*os.listdir(tmp_path / "model")}
    (tmp_path / "model" / "posenc_mine.py").write_text("# not saved with the model")
    for folder in ("model", "new"):
        model = patched("bert", after)
        if after == "alibi":
            model.save_pretrained(tmp_path / folder)
        else:
            with pytest.warns(UserWarning):
                model.save_pretrained(tmp_path / folder)
    assert {*os.listdir(tmp_path / "model")} == {*os.listdir(tmp_path / "new"), "posenc_mine.py"}


def test_a_pickle_of_a_model_with_its_own_code_in_another_process(tmp_path):
    """Pickle imports the modules of the code one by one, including those that register the parts of a composition."""
    layer = hf_posenc.PositionEmbedding("sinusoidal+learned", hidden_size=8, max_length=16).eval()
    models = {"model": (patched("bert", "learned+shaw"), padded()), "layer": (layer, {"inputs_embeds": torch.randn(2, 5, 8)})}
    save_all(tmp_path, models)
    for step in ("pickled", "unpickled"):
        code = f"import sys, remote_code_worker; remote_code_worker.{step}(sys.argv[1])"
        run_python(code, tmp_path, fresh=True, HF_MODULES_CACHE=str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def beside(bare):
    """The results of a process that imported the package after it had loaded models with their own code."""
    _, folder = bare
    (folder / "other-versions").mkdir()
    for path in (folder / "alibi").iterdir():
        content = path.read_bytes()
        if path.name == "posenc_versions.py":
            assert b'("5.15", "6")' in content
            content = content.replace(b'("5.15", "6")', b'("98", "99")')
        (folder / "other-versions" / path.name).write_bytes(content)
    run_python("import sys, remote_code_worker; remote_code_worker.beside(sys.argv[1])", folder)
    return json.loads((folder / "said.json").read_text())


def test_what_is_not_loaded_says_why(beside):
    """Without the package and without trust_remote_code=True, Transformers raises the error, and no code runs."""
    assert "contains custom code" in beside["untrusted"] and "trust_remote_code=True" in beside["untrusted"]
    assert beside["ran"] == []
    words = "'own-careless' isn't saved with it. Run pip install "
    assert beside["left behind"].startswith("ImportError") and words in beside["left behind"]
    assert "is tested with transformers 98 or newer" in beside["other versions"]


def test_models_that_run_their_own_code_beside_the_package(beside):
    """If the package is imported, it takes precedence over trust_remote_code=True, also for models saved without it.

    Each copy of the code has its own attention functions. `patch` and `unpatch` raise an error for such a model.
    """
    own = dict.fromkeys(("alibi", "t5", "alibi for other versions"), "transformers_modules")
    assert beside["modules"] == own | dict.fromkeys(("shaw", "gpt2 None", "gpt2 True"), "hf_posenc")
    assert all(beside["equal"].values()) and beside["functions"] == 4
    for change in ("patch", "unpatch"):
        assert beside[change].startswith("ValueError") and "Import hf_posenc, then load it again" in beside[change]


def test_a_copy_takes_no_strangers(own_registry, monkeypatch, tmp_path):
    class Stranger(hf_posenc.PositionEncoding, type="stranger"):
        def embed(self, positions):
            return None

    model = patched("bert", "stranger")
    monkeypatch.setattr(mixins, "IS_COPY", True)
    with pytest.raises(ValueError, match="Stranger can't.*own code"):
        model.config.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
