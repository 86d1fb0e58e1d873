"""A process that can import only torch, transformers, and their dependencies.

It loads each model that cases.json lists, with the saved code of the model. It saves and reloads the model, and compares the
outputs.
"""

import json
import pickle
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HIDDEN = {"hf_posenc", "accelerate", "datasets", "peft", "sentence_transformers", "sklearn", "typer", "rich"}


class Bare(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


def hide():
    sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]


def main(folder):
    hide()
    import torch
    import transformers

    from memory import poison_empty

    poison_empty(setattr)
    folder, seen = Path(folder), {}
    for name, auto in json.loads((folder / "cases.json").read_text()).items():
        inputs, expected = torch.load(folder / f"{name}.pt")
        loads = getattr(transformers, auto).from_pretrained
        model = loads(folder / name, trust_remote_code=True)
        model.save_pretrained(folder / "again" / name)
        again = loads(folder / "again" / name, trust_remote_code=True)
        with torch.no_grad():
            outputs = [each(**inputs)[0] for each in (model, again, pickle.loads(pickle.dumps(model)))]
        seen[name] = {"class": type(model).__name__, "equal": [torch.equal(output, expected) for output in outputs]}
    assert not HIDDEN & {name.partition(".")[0] for name in sys.modules}
    (folder / "seen.json").write_text(json.dumps(seen))
