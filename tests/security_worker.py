"""Loads untrusted checkpoints in a separate process, and records every file that it opens and any code that runs."""

import json
import os
import sys


def main(root):
    opened, results = [], {}
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    from transformers import AutoModel

    def attempt(name, make):
        opened.clear()
        try:
            model = make()
            results[name] = {"class": f"{type(model).__module__}.{type(model).__name__}"}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            model = None
        results[name].update(ran=os.path.exists(root + "/ran.txt"), opened=sorted(set(opened)))
        return model

    def load(name, **arguments):
        return attempt(" ".join([name, *arguments]), lambda: AutoModel.from_pretrained(f"{root}/{name}", **arguments))

    attempt("without the package", lambda: AutoModel.from_pretrained(root + "/code"))
    import hf_posenc

    load("code")
    load("code", trust_remote_code=True)
    for name in ("pickle", "index", "elsewhere", "named", "wide", "kind", "missing"):
        load(name)
    load("pickle", use_safetensors=False)
    load("wide", ignore_mismatched_sizes=True)
    models = {name: load(name) for name in sorted(os.listdir(root)) if name.startswith("place")}
    with open(root + "/loaded.json", "w") as file:
        json.dump(results, file)
    for name, model in models.items():
        hf_posenc.push_to_hub(model, "me/" + name)
