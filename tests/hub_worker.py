"""The functions that tests of the Hub run in separate processes, because its client reads its settings on import."""

import json
import re
import sys
from pathlib import Path

import torch


def told(error):
    return f"{type(error).__name__}: {error}"


def pushes(folder):
    """Make the pushes that test_hub checks."""
    from huggingface_hub import HfApi, get_session, hf_hub_download
    from safetensors.torch import save_file
    from transformers import AutoModel, BertTokenizer, Trainer, TrainingArguments
    from typer.testing import CliRunner

    import hf_posenc
    from hf_posenc.cli import app
    from models import patched, randomize, stock, tokens

    class Window(hf_posenc.PositionEncoding, type="window"):
        __module__ = "__main__"

        def distance_bias(self, distance):
            return torch.where(distance.abs() > 3, -torch.inf, 0.0)[None]

    folder, results, api = Path(folder), {}, HfApi()
    hooks = {kind: list(each) for kind, each in get_session().event_hooks.items()}
    tokenizer = BertTokenizer(str(folder / "vocab.txt"), model_max_length=99)

    def push(model, name, **arguments):
        try:
            commit = hf_posenc.push_to_hub(model, name, **arguments)
            results.setdefault(name, []).append(commit.oid)
            torch.save(model(tokens(length=9))[0], folder / f"{name.partition('/')[2] or name}.pt")
        except Exception as error:
            results.setdefault(name, []).append(told(error))

    def push_of(model, base, name, **arguments):
        model.config.position_encoding["original"]["name_or_path"] = base
        push(model, name, **arguments)

    model = hf_posenc.patch(AutoModel.from_pretrained("me/base"), "sinusoidal+alibi", max_length=64).eval()
    for change in (None, None, randomize):
        push(change(model, seed=5) if change else model, "me/model", tokenizer=tokenizer)
    results["tokenizer"] = tokenizer.model_max_length

    masked = patched("bert", "alibi", head="ForMaskedLM")
    push_of(masked, "checkpoint 7", "unlimited", tokenizer=tokenizer, private=True, commit_message="Here it is")
    push(masked, "me/unlimited", private=False)
    push(stock("bert"), "me/stock", tokenizer=tokenizer)
    card = Path(hf_hub_download("me/stock", "README.md")).read_text().replace("`BertModel`", "My own `BertModel`")
    api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="me/stock")
    push(stock("bert", seed=1), "me/stock", tokenizer=tokenizer)
    push_of(patched("gpt2", "rope", head="DoubleHeadsModel"), "no-such-model", "me/heads")
    push(patched("bert", "window"), "me/window")
    layer = hf_posenc.PositionEmbedding("sinusoidal", hidden_size=8, max_length=16)
    results["me/layer"] = [hf_posenc.push_to_hub(layer, "me/layer").oid]
    table = folder / "table.safetensors"
    save_file({"table": torch.randn(24, 32)}, table)
    push(hf_posenc.patch(stock("bert"), "learned", storage="memory-mapped", file=str(table)), "me/mapped")
    table.unlink()

    alibi, rope = patched("bert", "alibi"), patched("bert", "rope")
    for each, name in ((alibi, "by-hand"), (alibi, "licence"), (rope, "licence"), (alibi, "shards")):
        push(each, f"me/{name}")
    for _ in range(2):  # somebody else commits during the first
        push(alibi, "me/foreign")
    push(alibi, "me/bad-token", token="hf_bad")
    push(alibi, "you/model")
    alibi.push_to_hub("me/own-method")
    torch.save(alibi(tokens(length=9))[0], folder / "own-method.pt")

    evaluation = json.loads((folder / "evaluation.json").read_text())
    push(alibi, "me/measured", evaluation=evaluation, figures=[folder / "length.png"])
    push(alibi, "me/measured")
    push(alibi, "me/kept", save_directory=folder / "kept")
    for name in ("gated", "hidden", "closed"):
        push_of(alibi, f"lab/{name}", f"me/of-{name}")

    push(alibi, "me/branches")
    push(rope, "me/branches", revision="rope")
    push(rope, "me/branches", create_pr=True, commit_message="RoPE")
    push(masked, "me/branches", revision="refs/pr/1")
    push(masked, "lab/public", create_pr=True)
    push(masked, "lab/public")

    rope.push_to_hub("me/sharded", max_shard_size="40KB")
    rope.save_pretrained(folder / "at-once", push_to_hub=True)
    rope.save_pretrained(folder / "inner")
    api.create_repo("me/nested")
    api.upload_folder(repo_id="me/nested", folder_path=folder / "inner", path_in_repo="deep/inner")

    settings = dict(hub_model_id="me/trained", push_to_hub=True, max_steps=1, save_strategy="no", report_to=[], use_cpu=True)
    classifier = patched("bert", "alibi", head="ForSequenceClassification")
    rows = [{"input_ids": ids, "labels": 1} for ids in tokens()]
    trainer = Trainer(classifier, TrainingArguments(str(folder / "trained"), disable_tqdm=True, **settings), train_dataset=rows)
    trainer.train()
    results["me/trained"] = [trainer.push_to_hub().oid]
    models = {"alibi": alibi, "rope": rope, "masked": masked, "trained": classifier.eval()}
    torch.save({name: model(tokens())[0] for name, model in models.items()}, folder / "outputs.pt")

    masked.save_pretrained(folder / "saved")
    tokenizer.save_pretrained(folder / "saved")
    for name, arguments in {
        "ready": ["ready", "me/ready", "--create-pr"],
        "shell": ["saved", "me/from-shell", "--private", "--commit-message", "From a shell"],
        "refused": ["saved", "you/model"],
    }.items():
        done = CliRunner().invoke(app, ["push", str(folder / arguments[0]), *arguments[1:]])
        results[name] = [done.exit_code, done.stdout.strip(), done.stderr]
    results["the client of others"] = get_session().event_hooks == hooks
    (folder / "results.json").write_text(json.dumps(results))


def loads(folder):
    """Load each pushed model as its card says or with an Auto class, and record the errors of invalid loads."""
    from huggingface_hub import hf_hub_download
    from transformers import AutoModel, AutoTokenizer

    from models import tokens

    folder, results = Path(folder), {}
    names = (
        "model",
        "unlimited",
        "stock",
        "heads",
        "layer",
        "licence",
        "shards",
        "by-hand",
        "own-method",
        "measured",
        "mapped",
    )
    for name in names:
        card = Path(hf_hub_download(f"me/{name}", "README.md")).read_text()
        written = {}
        if code := re.search("```python\n(.*?)```", card, re.DOTALL):
            exec(code[1], written)
        model = written.get("model") or AutoModel.from_pretrained(f"me/{name}")
        result = results[name] = {"class": type(model).__name__, "by_card": "model" in written}
        if (folder / f"{name}.pt").exists():
            result["equal"] = torch.equal(model(tokens(length=9))[0], torch.load(folder / f"{name}.pt"))
    for name in ("model", "unlimited", "stock"):
        tokenizer = AutoTokenizer.from_pretrained(f"me/{name}")
        results[name] |= {"model_max_length": tokenizer.model_max_length, "ids": tokenizer("w3 w4").input_ids}

    def refused(name, **arguments):
        try:
            AutoModel.from_pretrained(name, **arguments)
        except Exception as error:
            return told(error)

    results["gated"] = refused("lab/gated")
    results["hidden"] = refused("lab/hidden")
    results["anonymous"] = refused("me/unlimited", token=False)
    results["no revision"] = refused("me/branches", revision="no-such")
    (folder / "loaded.json").write_text(json.dumps(results))
    places(folder, "")


PLACES = (
    ("alibi", "me/branches", {}),
    ("rope", "me/branches", {"revision": "rope"}),
    ("masked", "me/branches", {"revision": "refs/pr/1"}),
    ("rope", "me/sharded", {}),
    ("rope", "me/nested", {"subfolder": "deep/inner"}),
    ("alibi", "me/kept", {}),
    ("trained", "me/trained", {}),
)


def places(folder, bare, *chosen):
    """Check that loads from PLACES give the outputs of the pushed models.

    bare: whether to hide this package.
    chosen: the places to load. Empty for all.
    """
    more = {}
    if bare:
        from bare import HIDDEN, hide

        hide()
        more = {"trust_remote_code": True}
    else:
        import hf_posenc
    import transformers

    folder = Path(folder)
    outputs, tokens = torch.load(folder / "outputs.pt"), torch.load(folder / "tokens.pt")
    heads = {"masked": transformers.AutoModelForMaskedLM, "trained": transformers.AutoModelForSequenceClassification}
    for expected, name, arguments in PLACES:
        if chosen and f"{name}: {expected}" not in chosen or bare and "subfolder" in arguments:
            continue  # Transformers loads code only from the root
        model = heads.get(expected, transformers.AutoModel).from_pretrained(name, **arguments, **more)
        assert torch.equal(model(tokens)[0], outputs[expected]), (name, arguments)
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & HIDDEN if bare else hf_posenc.__name__ in loaded
