"""The functions that tests of saved code run in separate processes."""

import json
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch


def pickled(folder):
    """Pickle the models of a directory, after loading them with their saved code."""
    from transformers import AutoModel

    for name in json.loads(Path(folder, "cases.json").read_text()):
        model = AutoModel.from_pretrained(Path(folder, name), trust_remote_code=True)
        Path(folder, f"{name}.pickle").write_bytes(pickle.dumps(model))


def unpickled(folder):
    sys.path.insert(0, os.environ["HF_MODULES_CACHE"])
    for name in json.loads(Path(folder, "cases.json").read_text()):
        inputs, expected = torch.load(Path(folder, f"{name}.pt"))
        with torch.no_grad():
            output = pickle.loads(Path(folder, f"{name}.pickle").read_bytes())(**inputs)[0]
        assert torch.equal(output, expected), name


def beside(folder):
    """Load models with their saved code, then import the package and load other models.

    The function writes its observations to said.json.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    folder, said = Path(folder), {}

    def equal(model, name):
        inputs, expected = torch.load(folder / f"{name}.pt")
        with torch.no_grad():
            return torch.equal(model(**inputs)[0], expected)

    def error_of(call, *arguments, **more):
        try:
            call(*arguments, **more)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    said["untrusted"] = error_of(AutoModel.from_pretrained, folder / "alibi", trust_remote_code=False)
    said["ran"] = [name for name in sys.modules if name.startswith("transformers_modules")]
    said["left behind"] = error_of(AutoModel.from_pretrained, folder / "careless", trust_remote_code=True)
    load = AutoModelForMaskedLM.from_pretrained
    models = {name: load(folder / name, trust_remote_code=True) for name in ("alibi", "t5")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models["alibi for other versions"] = load(folder / "other-versions", trust_remote_code=True)
    said["other versions"] = " ".join(str(each.message) for each in caught)

    import hf_posenc

    models["shaw"] = load(folder / "shaw", trust_remote_code=True)
    for trust in (None, True):
        again = folder / "again" / "gpt2"
        models[f"gpt2 {trust}"] = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=trust)
    said["modules"] = {name: type(model).__module__.partition(".")[0] for name, model in models.items()}
    said["equal"] = {name: equal(model, name.partition(" ")[0]) for name, model in models.items()}
    said["functions"] = len([name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("hf_posenc_")])
    said["unpatch"] = error_of(hf_posenc.unpatch, models["alibi"])
    said["patch"] = error_of(hf_posenc.patch, models["alibi"], "alibi")
    (folder / "said.json").write_text(json.dumps(said))
