"""push_to_hub: the real client against a Hub on loopback, pushing in one process and loading in another."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import BertTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from typer.testing import CliRunner

import hf_posenc
from conftest import said_by_python
from hf_posenc.cli import app
from hf_posenc.hub.eval_results import checked_evaluation, result_files
from hub_server import TOKEN, USER, Commit, Fault, Repo, refuse, serve
from models import VOCABULARY, patched, slow, stock, tokens

BY_HAND = "# My model\n\nTrained with love.\n"
LICENCE = "---\nlicense: mit\nlanguage:\n- de\n---\n"
"""What the Hub's website leaves in a new repo for which a licence was chosen."""

PUSH = """
import sys, json, torch, hf_posenc
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download
from safetensors.torch import save_file
from transformers import AutoModel, BertTokenizer
from models import patched, randomize, stock, tokens

class Window(hf_posenc.PositionEncoding, type="window"):
    def distance_bias(self, distance):
        return torch.where(distance.abs() > 3, -torch.inf, 0.0)[None]

folder, results = Path(sys.argv[1]), {}
tokenizer = BertTokenizer(str(folder / "vocab.txt"), model_max_length=99)

def push(model, name, **arguments):
    try:
        commit = hf_posenc.push_to_hub(model, name, **arguments)
        results.setdefault(name, []).append(commit.oid)
        torch.save(model(tokens(length=9))[0], folder / f"{name.partition('/')[2] or name}.pt")
    except Exception as error:
        results.setdefault(name, []).append(f"{type(error).__name__}: {error}")

host = AutoModel.from_pretrained("me/base")
model = hf_posenc.patch(host, "sinusoidal+alibi", max_length=64).eval()
push(model, "me/model", tokenizer=tokenizer)
push(model, "me/model", tokenizer=tokenizer)
push(randomize(model, seed=5), "me/model", tokenizer=tokenizer)
results["tokenizer"] = tokenizer.model_max_length

masked = patched("bert", "alibi", head="ForMaskedLM")
masked.config.position_encoding["original"]["name_or_path"] = "checkpoint 7"
push(masked, "unlimited", tokenizer=tokenizer, private=True, commit_message="Here it is")
push(masked, "me/unlimited", private=False)
push(stock("bert"), "me/stock", tokenizer=tokenizer)
card = Path(hf_hub_download("me/stock", "README.md")).read_text().replace("`BertModel`", "My own `BertModel`")
HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="me/stock")
push(stock("bert", seed=1), "me/stock", tokenizer=tokenizer)
heads = patched("gpt2", "rope", head="DoubleHeadsModel")
heads.config.position_encoding["original"]["name_or_path"] = "no-such-model"
push(heads, "me/heads")
push(patched("bert", "window"), "me/window")
layer = hf_posenc.PositionEmbedding("sinusoidal", hidden_size=8, max_length=16)
results["me/layer"] = [hf_posenc.push_to_hub(layer, "me/layer").oid]
table = folder / "table.safetensors"
save_file({"table": torch.randn(24, 32)}, table)
push(hf_posenc.patch(stock("bert"), "learned", storage="memory-mapped", file=str(table)), "me/mapped")
table.unlink()

alibi, rope = patched("bert", "alibi"), patched("bert", "rope")
push(alibi, "me/by-hand")
push(alibi, "me/licence")
push(rope, "me/licence")
push(alibi, "me/shards")
push(alibi, "me/bad-token", token="hf_bad")
push(alibi, "you/model")
alibi.push_to_hub("me/own-method")
torch.save(alibi(tokens(length=9))[0], folder / "own-method.pt")

evaluation = json.loads((folder / "evaluation.json").read_text())
push(alibi, "me/measured", evaluation=evaluation, figures=[folder / "length.png"])
push(alibi, "me/measured")
push(alibi, "me/kept", save_directory=folder / "kept")
for name in ("lab/gated", "lab/hidden", "lab/closed"):
    alibi.config.position_encoding["original"]["name_or_path"] = name
    push(alibi, "me/of-" + name.partition("/")[2])
push(alibi, "me/unreadable")

push(alibi, "me/branches")
push(rope, "me/branches", revision="rope")
HfApi().create_tag("me/branches", tag="v1")
push(rope, "me/branches", revision="v1")
push(rope, "me/branches", revision=results["me/branches"][0])
push(rope, "me/branches", revision="none", create_pr=True)
push(rope, "me/branches", create_pr=True, commit_message="RoPE")
push(rope, "me/branches", create_pr=True, commit_message="RoPE")
push(masked, "me/branches", revision="refs/pr/1")
push(masked, "lab/public", create_pr=True)
push(masked, "lab/public")

rope.push_to_hub("me/sharded", max_shard_size="40KB")
rope.save_pretrained(folder / "at-once", push_to_hub=True)
rope.save_pretrained(folder / "inner")
HfApi().create_repo("me/nested")
HfApi().upload_folder(repo_id="me/nested", folder_path=folder / "inner", path_in_repo="deep/inner")

from transformers import Trainer, TrainingArguments

settings = TrainingArguments(
    str(folder / "trained"), hub_model_id="me/trained", push_to_hub=True, max_steps=1, save_strategy="no",
    per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True,
)
classifier = patched("bert", "alibi", head="ForSequenceClassification")
trainer = Trainer(classifier, settings, train_dataset=[{"input_ids": ids, "labels": 1} for ids in tokens()])
trainer.train()
results["me/trained"] = [trainer.push_to_hub().oid]
models = {"alibi": alibi, "rope": rope, "masked": masked, "trained": classifier.eval()}
torch.save({name: model(tokens())[0] for name, model in models.items()}, folder / "outputs.pt")

from typer.testing import CliRunner
from hf_posenc.cli import app

done = CliRunner().invoke(app, ["push", str(folder / "ready"), "me/ready", "--create-pr"])
results["ready"] = [done.exit_code, done.stdout.strip()]
masked.save_pretrained(folder / "saved")
tokenizer.save_pretrained(folder / "saved")
flags = ["--private", "--commit-message", "From a shell"]
done = CliRunner().invoke(app, ["push", str(folder / "saved"), "me/from-shell", *flags])
results["shell"] = [done.exit_code, done.stdout.strip()]
done = CliRunner().invoke(app, ["push", str(folder / "saved"), "you/model"])
results["refused"] = [done.exit_code, done.stderr]
(folder / "results.json").write_text(json.dumps(results))
"""

PLACES = """
outputs = torch.load(folder / "outputs.pt")
for expected, name, arguments in (
    ("alibi", "me/branches", {}),
    ("alibi", "me/branches", {"revision": "v1"}),
    ("rope", "me/branches", {"revision": "rope"}),
    ("masked", "me/branches", {"revision": "refs/pr/1"}),
    ("rope", "me/sharded", {}),
    ("rope", "me/nested", {"subfolder": "deep/inner"}),
    ("alibi", "me/kept", {}),
    ("trained", "me/trained", {}),
):
    heads = {"masked": transformers.AutoModelForMaskedLM, "trained": transformers.AutoModelForSequenceClassification}
    if "subfolder" in arguments and more:
        continue  # Transformers takes code from the root alone
    if sys.argv[2:] and f"{name}: {expected}" not in sys.argv[2:]:
        continue
    model = heads.get(expected, transformers.AutoModel).from_pretrained(name, **arguments, **more)
    assert torch.equal(model(tokens())[0], outputs[expected]), (name, arguments)
"""
"""Loaded from the Hub, and then without it, from the cache."""

LOAD = (
    """
import re, sys, json, torch, transformers
from pathlib import Path
from huggingface_hub import hf_hub_download
from transformers import AutoModel, AutoTokenizer
from models import tokens

folder, results, more = Path(sys.argv[1]), {}, {}
for name in (
    "model", "unlimited", "stock", "heads", "layer", "licence", "shards", "by-hand", "own-method", "measured", "mapped"
):
    card = Path(hf_hub_download(f"me/{name}", "README.md")).read_text()
    written = {}
    if code := re.search("```python\\n(.*?)```", card, re.DOTALL):
        exec(code[1], written)
    model = written.get("model") or AutoModel.from_pretrained(f"me/{name}")
    result = {"class": type(model).__name__, "by_card": "model" in written}
    if (folder / f"{name}.pt").exists():
        result["equal"] = torch.equal(model(tokens(length=9))[0], torch.load(folder / f"{name}.pt"))
    results[name] = result
for name in ("model", "unlimited", "stock"):
    tokenizer = AutoTokenizer.from_pretrained(f"me/{name}")
    results[name] |= {"model_max_length": tokenizer.model_max_length, "ids": tokenizer("w3 w4").input_ids}

def refused(name, **arguments):
    try:
        AutoModel.from_pretrained(name, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

results["gated"] = refused("lab/gated")
results["hidden"] = refused("lab/hidden")
results["anonymous"] = refused("me/unlimited", token=False)
results["no revision"] = refused("me/branches", revision="no-such")
"""
    + PLACES
    + """
(folder / "loaded.json").write_text(json.dumps(results))
"""
)

OFFLINE = (
    """
import sys, torch, transformers, hf_posenc
from pathlib import Path
from models import tokens

folder, more = Path(sys.argv[1]), {}
"""
    + PLACES
)

BARE = (
    """
import sys
import bare

bare.hide()
import torch, transformers
from pathlib import Path

folder, more = Path(sys.argv[1]), {"trust_remote_code": True}
tokens = lambda: torch.load(folder / "tokens.pt")
"""
    + PLACES
    + """
assert not bare.HIDDEN & {name.partition(".")[0] for name in sys.modules}
"""
)
"""The same where this package is not installed."""


EVALUATION = {
    "command": "python scripts/distill.py --seed 0",
    "training": {"datasets": [{"name": "standard library pages", "id": None}], "steps": 340},
    "results": [
        {
            "model": "distilled",
            "this": True,
            "task": "retrieval",
            "dataset": {"name": "pages", "id": "lab/pages", "task_id": "retrieval", "split": "test"},
            "metric": "mrr",
            "value": 0.625,
            "interval": [0.569, 0.681],
            "length": 256,
            "count": 183,
            "seeds": None,
        }
    ],
}


def run(code, folder, hub, home, *arguments, **settings):
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        **settings,
    }
    return said_by_python(code, folder, *arguments, fresh=True, **settings)[1]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The Hub after PUSH; what PUSH got back; what LOAD saw."""
    folder = tmp_path_factory.mktemp("hub")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    (folder / "length.png").write_bytes(b"\x89PNG of lengths")
    ready = patched("bert", "rope")
    measured = {"evaluation": folder / "evaluation.json", "figures": [folder / "length.png"]}
    assert hf_posenc.push_to_hub(ready, "me/ready", save_directory=folder / "ready", **measured) == folder / "ready"
    with serve(part_size=1 << 15) as hub:
        for name in ("gated", "hidden", "closed", "public"):
            licence = b"---\nlicense: other\nlicense_name: lab-1\n---\n"
            start = Commit("start", {"README.md": licence, "config.json": b"{}"})
            hub.repos[f"lab/{name}"] = Repo(private=name == "hidden", gated=name == "gated", commits=[start])
        hub.faults.append(Fault("GET /api/models/lab/closed ", refuse(403, "ask for access", "GatedRepo"), times=9))
        hub.faults.append(Fault("HEAD /me/unreadable/resolve/.*README", refuse(403, "ask for access", "GatedRepo"), times=9))
        for name, files in {
            "unreadable": {"README.md": BY_HAND},
            "by-hand": {"README.md": BY_HAND},
            "licence": {"README.md": LICENCE},
            "shards": {
                "model-00001-of-00002.safetensors": "old",
                "model.safetensors.index.json": "old",
                "notes.txt": "mine",
                "posenc_old.py": "old",
            },
        }.items():
            start = Commit("start", {path: content.encode() for path, content in files.items()})
            hub.repos[f"{USER}/{name}"] = Repo(commits=[start])
        stock("bert").save_pretrained(folder / "base")
        files = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
        hub.repos["me/base"] = Repo(commits=[Commit("start", files)])
        errors = run(PUSH, folder, hub, "home")
        log = list(hub.log)
        run(LOAD, folder, hub, "another-home")
        asked = len(hub.log)
        errors += run(OFFLINE, folder, hub, "another-home", HF_HUB_OFFLINE="1")
        assert len(hub.log) == asked
        results, loaded = (json.loads((folder / name).read_text()) for name in ("results.json", "loaded.json"))
        yield SimpleNamespace(folder=folder, hub=hub, repos=hub.repos, results=results, loaded=loaded, errors=errors, log=log)


def test_from_a_shell(pushed):
    code, shown = pushed.results["shell"]
    assert code == 0 and shown.endswith("/me/from-shell"), shown
    repo = pushed.repos[f"{USER}/from-shell"]
    assert repo.private and repo.commits[-1].message == "From a shell"
    assert json.loads(repo.commits[-1].files["config.json"])["architectures"] == ["PosEncBertForMaskedLM"]
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= set(repo.commits[-1].files)
    code, error = pushed.results["refused"]
    assert code == 1 and "Error: 403" in error and "Traceback" not in error


def card_of(repo):
    """A card's metadata and its text."""
    _, front, text = repo.commits[-1].files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize("places", [("me/branches: rope", "me/trained: trained"), slow(())], ids=["some", "all"])
def test_loads_without_the_package_and_then_without_the_hub(pushed, places, tmp_path):
    torch.save(tokens(), pushed.folder / "tokens.pt")
    run(BARE, pushed.folder, pushed.hub, tmp_path, *places)
    asked = len(pushed.hub.log)
    assert asked > len(pushed.log)
    run(BARE, pushed.folder, pushed.hub, tmp_path, *places, HF_HUB_OFFLINE="1")
    assert len(pushed.hub.log) == asked


def test_another_process_loads_the_same_model_as_the_card_says(pushed):
    loaded = {name: result for name, result in pushed.loaded.items() if isinstance(result, dict)}
    classes = {name: result["class"] for name, result in loaded.items()}
    assert classes == {
        "model": "PosEncBertModel",
        "unlimited": "PosEncBertForMaskedLM",
        "stock": "BertModel",
        "heads": "PosEncGPT2DoubleHeadsModel",
        "layer": "PositionEmbedding",
        "mapped": "PosEncBertModel",
        "licence": "PosEncBertModel",
        "shards": "PosEncBertModel",
        "by-hand": "PosEncBertModel",
        "own-method": "PosEncBertModel",
        "measured": "PosEncBertModel",
    }
    assert {name for name, result in loaded.items() if not result["by_card"]} == {"by-hand", "own-method"}
    assert all(result["equal"] for name, result in loaded.items() if name != "layer")


def test_the_tokenizer_follows_the_usable_length(pushed):
    lengths = {name: pushed.loaded[name]["model_max_length"] for name in ("model", "unlimited", "stock")}
    assert lengths == {"model": 64, "unlimited": VERY_LARGE_INTEGER, "stock": 24}
    assert pushed.loaded["model"]["ids"] == [2, 8, 9, 3]
    assert pushed.results["tokenizer"] == 99


def test_one_commit_for_a_change_and_none_for_no_change(pushed):
    repo, (first, again, changed) = pushed.repos["me/model"], pushed.results["me/model"]
    start, one, two = repo.commits
    assert (one.sha, one.sha, two.sha) == (first, again, changed)
    assert pushed.log.count("POST /api/models/me/model/commit/main") == 2
    assert {path for path in one.files if not path.endswith(".py")} - set(start.files) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path for path in two.files if two.files[path] != one.files[path]} == {"model.safetensors"}
    # A push that came between would have been refused rather than covered.
    assert one.parent == start.sha and two.parent == one.sha
    assert one.message == "Upload PosEncBertModel (sinusoidal+alibi)"


def test_the_card_is_made_from_the_model(pushed):
    metadata, text = card_of(pushed.repos["me/model"])
    assert metadata == {
        "base_model": "me/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["hf-posenc", "sinusoidal", "alibi"],
    }
    for words in (
        "# model\n",
        "`PosEncBertModel`",
        "`sinusoidal`: `base=10000.0`",
        "<https://arxiv.org/abs/1706.03762>",
        "- position encoding `alibi`: `slopes='fixed'`, `sides='symmetric'`, `per_layer=False`, <https://arxiv.org/abs/2108.12409>\n",
        "`distance_bias` at `encoder.layer.0.attention.self` and 1 more",
        "longest input: 64 tokens",
        "hf_posenc.unpatch(model)",
        "pip install hf-posenc",
    ):
        assert words in text
    metadata, text = card_of(pushed.repos["me/unlimited"])
    assert metadata["pipeline_tag"] == "fill-mask" and "longest input: no limit" in text
    for name in ("unlimited", "heads"):
        assert "base_model" not in card_of(pushed.repos[f"me/{name}"])[0]
    assert "hf_posenc." not in card_of(pushed.repos["me/stock"])[1].partition("<!--")[0]
    assert "pipeline_tag" not in card_of(pushed.repos["me/layer"])[0]
    assert "its class `Window` is not part of hf-posenc" in card_of(pushed.repos["me/window"])[1]


def test_a_card_by_hand_is_kept(pushed):
    assert pushed.repos["me/by-hand"].commits[-1].files["README.md"].decode() == BY_HAND
    assert "me/by-hand: its README.md was written by hand and stays as it is" in pushed.errors
    assert "My own `BertModel`" in card_of(pushed.repos["me/stock"])[1]
    assert len(pushed.repos["me/stock"].commits) == 4
    assert "me/licence" not in pushed.errors
    metadata, text = card_of(pushed.repos["me/licence"])
    assert metadata["license"] == "mit" and metadata["language"] == ["de"]
    assert metadata["tags"] == ["hf-posenc", "rope"] and "alibi" not in text


def test_weights_of_an_earlier_push_go_and_other_files_stay(pushed):
    files = pushed.repos["me/shards"].commits[-1].files
    assert {path for path in files if not path.endswith(".py")} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "notes.txt",
    }
    assert "posenc_old.py" not in files


def test_private_is_passed_on_and_never_ignored(pushed):
    assert pushed.repos["me/unlimited"].private and not pushed.repos["me/model"].private
    (refused,) = pushed.results["me/unlimited"]
    assert refused.startswith("ValueError: me/unlimited exists and is private: leave private=False out")
    assert [commit.message for commit in pushed.repos["me/unlimited"].commits] == ["initial commit", "Here it is"]


def test_what_the_hub_refuses_leaves_nothing_behind(pushed):
    (bad,), (foreign,) = pushed.results["me/bad-token"], pushed.results["you/model"]
    assert "401" in bad and "Invalid credentials" in bad
    assert "403" in foreign and "namespace" in foreign
    assert "me/bad-token" not in pushed.repos and "you/model" not in pushed.repos


def test_what_was_measured_and_its_figures_go_along_and_go_again(pushed):
    start, measured, bare = pushed.repos["me/measured"].commits
    added = {"evaluation.json", "length.png", *result_files(EVALUATION)}
    assert len(added) > 2 and added == set(measured.files) - set(bare.files)
    assert json.loads(measured.files["evaluation.json"]) == checked_evaluation(EVALUATION)
    assert measured.files["length.png"] == (pushed.folder / "length.png").read_bytes()
    assert "length.png" in measured.files["README.md"].decode() and "length.png" not in bare.files["README.md"].decode()


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_ready_folder_is_what_a_push_sends(pushed):
    files = pushed.repos["me/kept"].commits[-1].files
    assert contents(pushed.folder / "kept") == {path: content for path, content in files.items() if path != ".gitattributes"}


def test_a_folder_made_offline_is_pushed_later(pushed):
    code, shown = pushed.results["ready"]
    assert code == 0 and shown.endswith("/me/ready/discussions/1"), shown
    files = pushed.repos["me/ready"].branches["refs/pr/1"][-1].files
    assert contents(pushed.folder / "ready") == {path: content for path, content in files.items() if path != ".gitattributes"}
    assert {"evaluation.json", "length.png", *result_files(EVALUATION)} < set(files)


def test_the_licence_of_the_base_where_it_can_be_seen(pushed):
    licence = {"license": "other", "license_name": "lab-1"}
    for name, expected in {
        "gated": {"base_model": "lab/gated", **licence},
        "closed": {"base_model": "lab/closed"},
        "hidden": {},
    }.items():
        metadata, _ = card_of(pushed.repos[f"me/of-{name}"])
        assert {key: metadata[key] for key in metadata if key in ("base_model", *licence)} == expected
    metadata, _ = card_of(pushed.repos["me/licence"])
    assert metadata["license"] == "mit"


def test_a_card_that_can_not_be_read_stays(pushed):
    last = pushed.repos["me/unreadable"].commits[-1]
    assert last.files["README.md"].decode() == BY_HAND and "model.safetensors" in last.files


def test_branches_tags_and_pull_requests(pushed):
    repo, (main, branch, tag, commit, none, opened, again, added) = pushed.repos["me/branches"], pushed.results["me/branches"]
    assert [line.sha for line in repo.commits[1:]] == [main]
    assert [line.sha for line in repo.branches["rope"][1:]] == [main, branch]
    assert tag == "ValueError: revision 'v1' is a tag, which stays as it is: name a branch (main, rope)"
    assert commit == f"ValueError: revision '{main}' is a commit, which stays as it is: name a branch (main, rope)"
    assert none.startswith("ValueError: me/branches has no branch 'none' to open a pull request against")
    assert [line.sha for line in repo.branches["refs/pr/1"][1:]] == [main, opened, added] and again == opened
    assert set(repo.branches) == {"main", "rope", "refs/pr/1"}


def test_a_pull_request_to_a_repo_of_others(pushed):
    repo, (opened, refused) = pushed.repos["lab/public"], pushed.results["lab/public"]
    assert repo.branches["refs/pr/1"][-1].sha == opened and "you may not write to lab/public" in refused
    assert len(repo.commits) == 1


def test_the_push_of_a_trainer(pushed):
    assert [pushed.repos["me/trained"].commits[-1].sha] == pushed.results["me/trained"]


def test_weights_in_parts_and_in_shards(pushed):
    assert "POST /me/model.git/info/lfs/complete" in pushed.log
    assert "model-00002-of-00002.safetensors" in pushed.repos["me/sharded"].commits[-1].files
    at_once = pushed.repos["me/at-once"].commits[-1].files
    saved = {path.name: path.read_bytes() for path in (pushed.folder / "at-once").iterdir()}
    assert saved.items() <= at_once.items() and b'"position_encoding"' in saved["model.safetensors"]
    assert "posenc_encodings_rope.py" in saved


def test_what_can_not_be_loaded_says_why(pushed):
    for name, words in {
        "gated": "gated repo",
        "hidden": "is not a local folder and is not a valid model identifier",
        "anonymous": "is not a local folder and is not a valid model identifier",
        "no revision": "no-such is not a valid git identifier",
    }.items():
        assert words in pushed.loaded[name], pushed.loaded[name]


def test_the_token_is_nowhere(pushed):
    assert TOKEN not in pushed.errors and TOKEN not in json.dumps([pushed.results, pushed.loaded])


def test_offline_a_folder_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    where = hf_posenc.push_to_hub(patched("bert", "alibi"), "me/model", private=True, revision="next")
    assert where == Path("model") and {"README.md", "config.json", "model.safetensors"} <= set(contents(tmp_path / "model"))
    assert "hf-posenc push model me/model --private --revision=next" in caplog.text
    assert "hf upload me/model model . --private --revision=next" in caplog.text


def test_a_tokenizer_is_pushed_without_code_elsewhere(tmp_path, caplog):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na")
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"), auto_map={"AutoTokenizer": ["someone/else--code.Odd", None]})
    push = partial(hf_posenc.push_to_hub, patched("bert", "alibi"), "me/model", save_directory=tmp_path / "ready")
    push(tokenizer=tokenizer)
    assert not [file for file in (tmp_path / "ready").rglob("*.json") if "someone" in file.read_text()]
    assert "(someone/else--code.Odd). The copy doesn't refer to it" in caplog.text and "auto_map" in tokenizer.init_kwargs


def test_from_a_shell_offline(tmp_path, caplog):
    patched("bert", "alibi").save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / "README.md").write_text(BY_HAND)
    (tmp_path / "mine" / "evaluation.json").write_text(json.dumps(EVALUATION))
    (tmp_path / "mine" / "a.png").touch()
    done = CliRunner().invoke(app, ["push", str(tmp_path / "mine"), "me/it", "--save-directory", str(tmp_path / "ready")])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == str(tmp_path / "ready")
    assert f"hf upload me/it {tmp_path / 'mine' / 'README.md'} README.md" in done.stdout
    assert {"a.png", "evaluation.json", "README.md"} < set(contents(tmp_path / "ready"))
    assert (tmp_path / "ready" / "README.md").read_text() != BY_HAND


def test_a_folder_made_offline_is_renewed(tmp_path, caplog):
    alibi, rope = patched("bert", "alibi"), patched("bert", "rope")
    push = partial(hf_posenc.push_to_hub, repo_id="me/model", save_directory=tmp_path)
    push(alibi)
    before = contents(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")
    push(rope)
    push(alibi)
    assert contents(tmp_path) == before
    card = tmp_path / "README.md"
    card.write_text(card.read_text().replace("`PosEncBertModel`", "My own `PosEncBertModel`"))
    push(hf_posenc.PosEncBertModel.from_pretrained(tmp_path))
    assert "My own" in card.read_text() and f"{card} was written by hand and stays as it is" in caplog.text
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"something else in it .* \(notes.txt\): choose another save_directory"):
        push(alibi)
    card.unlink()
    with pytest.raises(ValueError, match="something else in it"):
        push(alibi)
    with pytest.raises(ValueError, match="is a file"):
        push(alibi, save_directory=tmp_path / "notes.txt")


ADAPTERS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""Of peft's own making."""


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def with_adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(patched("bert", "alibi"), peft.LoraConfig(target_modules=["query"]))


@ADAPTERS
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.compile(stock("bert"), backend="eager"),
            "wrapped in OptimizedModule: push what is inside, model._orig_mod",
        ),
        (lambda: torch.nn.DataParallel(stock("bert")), "wrapped in DataParallel: push what is inside, model.module"),
        (with_adapters, "merge_and_unload"),
        (lambda: with_adapters().base_model.model, "merge_and_unload"),
        (lambda: torch.nn.Linear(2, 2), "a PreTrainedModel of Transformers is needed, not Linear"),
        (lambda: "bert-base-uncased", "needed, not 'bert-base-uncased'"),
    ],
)
def test_a_model_that_is_none_is_refused(token, make, words):
    # Here as below: nothing is written, and the tests run offline, so nothing is sent.
    with pytest.raises(ValueError, match=words):
        hf_posenc.push_to_hub(make(), "me/model")


@ADAPTERS
def test_merged_adapters_are_no_obstacle(tmp_path):
    hf_posenc.push_to_hub(with_adapters().merge_and_unload(), "me/model", save_directory=tmp_path)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"repo_id": "me/my model"}, "me/my model"),
        ({"repo_id": "datasets/me/model"}, "datasets/me/model"),
        ({"repo_id": None}, "Repo id"),
        ({"tokenizer": "bert-base-uncased"}, "a tokenizer of Transformers is needed, not 'bert-base-uncased'"),
        ({"evaluation": {"mrr": 0.6}}, "has 'mrr': known are command, training, results"),
        ({"evaluation": "nowhere.json"}, "nowhere.json can't be read as JSON"),
        ({"evaluation": __file__}, "test_hub.py can't be read as JSON"),
        ({"figures": ["nowhere.png"]}, "'nowhere.png' must be the path of an image"),
        ({"figures": [__file__]}, "test_hub.py' must be the path of an image"),
        ({"token": "hf_go od"}, "the token has a blank"),
        ({"token": "hf_good\n"}, "the token has a blank"),
        ({"evaluation": {**EVALUATION, "notes": [f"made with {TOKEN}"]}}, "evaluation.json has your token for the Hub"),
        ({"commit_message": f"with {TOKEN}"}, "commit_message has your token for the Hub"),
    ],
)
def test_malformed_arguments_are_refused(token, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as refused:
        hf_posenc.push_to_hub(stock("bert"), **{"repo_id": "me/model", **arguments})
    assert TOKEN not in str(refused.value) and "hf_go" not in str(refused.value) and not list(tmp_path.iterdir())


def test_two_figures_of_one_name(tmp_path):
    (tmp_path / "other").mkdir()
    figures = [tmp_path / "a.png", tmp_path / "other" / "a.png"]
    for figure in figures:
        figure.touch()
    with pytest.raises(ValueError, match="have the same name"):
        hf_posenc.push_to_hub(stock("bert"), "me/model", figures=figures, save_directory=tmp_path / "ready")


def test_no_token(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="hf auth login"):
        hf_posenc.push_to_hub(stock("bert"), "me/model")
