"""push_to_hub: the real client against a Hub on loopback, pushing in one process and loading in another."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_posenc
from conftest import ROOT, VOCABULARY, patched, stock
from hub_server import TOKEN, USER, Commit, Repo, serve

BY_HAND = "# My model\n\nTrained with love.\n"
LICENCE = "---\nlicense: mit\nlanguage:\n- de\n---\n"
"""What the Hub's website leaves in a new repo for which a licence was chosen."""

PUSH = """
import sys, json, torch, hf_posenc
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download
from transformers import BertTokenizer
from conftest import patched, randomize, stock, tokens

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

host = stock("bert")
host.config.name_or_path = "me/base"
model = hf_posenc.patch(host, "sinusoidal+alibi", max_length=64).eval()
push(model, "me/model", tokenizer=tokenizer)
push(model, "me/model", tokenizer=tokenizer)
push(randomize(model, seed=5), "me/model", tokenizer=tokenizer)
results["tokenizer"] = tokenizer.model_max_length

masked = patched("bert", "alibi", head="ForMaskedLM")
masked.config.position_encoding["host"]["name_or_path"] = "checkpoint 7"
push(masked, "unlimited", tokenizer=tokenizer, private=True, commit_message="Here it is")
push(masked, "me/unlimited", private=False)
push(stock("bert"), "me/stock", tokenizer=tokenizer)
card = Path(hf_hub_download("me/stock", "README.md")).read_text().replace("`BertModel`", "My own `BertModel`")
HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="me/stock")
push(stock("bert", seed=1), "me/stock", tokenizer=tokenizer)
heads = patched("gpt2", "rope", head="DoubleHeadsModel")
heads.config.position_encoding["host"]["name_or_path"] = "no-such-model"
push(heads, "me/heads")
push(patched("bert", "window"), "me/window")
layer = hf_posenc.PositionEmbedding("sinusoidal", hidden_size=8, max_length=16)
results["me/layer"] = [hf_posenc.push_to_hub(layer, "me/layer").oid]

alibi, rope = patched("bert", "alibi"), patched("bert", "rope")
push(alibi, "me/by-hand")
push(alibi, "me/licence")
push(rope, "me/licence")
push(alibi, "me/shards")
push(alibi, "me/bad-token", token="hf_bad")
push(alibi, "you/model")
alibi.push_to_hub("me/own-method")
torch.save(alibi(tokens(length=9))[0], folder / "own-method.pt")

from typer.testing import CliRunner
from hf_posenc.cli import app

masked.save_pretrained(folder / "saved")
tokenizer.save_pretrained(folder / "saved")
done = CliRunner().invoke(app, ["push", str(folder / "saved"), "me/from-shell", "--private", "--message", "From a shell"])
results["shell"] = [done.exit_code, done.stdout.strip()]
done = CliRunner().invoke(app, ["push", str(folder / "saved"), "you/model"])
results["refused"] = [done.exit_code, done.stderr]
(folder / "results.json").write_text(json.dumps(results))
"""

LOAD = """
import re, sys, json, torch
from pathlib import Path
from huggingface_hub import hf_hub_download
from transformers import AutoModel, AutoTokenizer
from conftest import tokens

folder, results = Path(sys.argv[1]), {}
for name in ("model", "unlimited", "stock", "heads", "layer", "licence", "shards", "by-hand", "own-method"):
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
(folder / "loaded.json").write_text(json.dumps(results))
"""


def run(code, folder, hub, home):
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / home), "HF_HUB_OFFLINE": "0"}
    settings |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The Hub after PUSH; what PUSH got back; what LOAD saw."""
    folder = tmp_path_factory.mktemp("hub")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    with serve() as hub:
        for name, files in {
            "base": {},
            "by-hand": {"README.md": BY_HAND},
            "licence": {"README.md": LICENCE},
            "shards": {"model-00001-of-00002.safetensors": "old", "model.safetensors.index.json": "old", "notes.txt": "mine"},
        }.items():
            start = Commit("start", {path: content.encode() for path, content in files.items()})
            hub.repos[f"{USER}/{name}"] = Repo(commits=[start])
        errors = run(PUSH, folder, hub, "home")
        log = list(hub.log)
        run(LOAD, folder, hub, "another-home")
        results, loaded = (json.loads((folder / name).read_text()) for name in ("results.json", "loaded.json"))
        yield SimpleNamespace(repos=hub.repos, results=results, loaded=loaded, errors=errors, log=log)


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


def test_another_process_loads_the_same_model_as_the_card_says(pushed):
    classes = {name: result["class"] for name, result in pushed.loaded.items()}
    assert classes == {
        "model": "PosEncBertModel",
        "unlimited": "PosEncBertForMaskedLM",
        "stock": "BertModel",
        "heads": "PosEncGPT2DoubleHeadsModel",
        "layer": "PositionEmbedding",
        "licence": "PosEncBertModel",
        "shards": "PosEncBertModel",
        "by-hand": "PosEncBertModel",
        "own-method": "PosEncBertModel",
    }
    assert {name for name, result in pushed.loaded.items() if not result["by_card"]} == {"by-hand", "own-method"}
    assert all(result["equal"] for name, result in pushed.loaded.items() if name != "layer")


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
    assert set(one.files) - set(start.files) == {
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
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["hf-posenc", "sinusoidal", "alibi"],
    }
    for words in (
        "# model\n",
        "`PosEncBertModel`",
        "`sinusoidal`: `base=10000.0`",
        "<https://arxiv.org/abs/1706.03762>",
        "- position encoding `alibi`: <https://arxiv.org/abs/2108.12409>\n",
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
    assert set(pushed.repos["me/shards"].commits[-1].files) == {"README.md", "config.json", "model.safetensors", "notes.txt"}


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
    # Here as below: the tests run offline, so anything sent would be another error.
    with pytest.raises(ValueError, match=words):
        hf_posenc.push_to_hub(make(), "me/model")


@ADAPTERS
def test_merged_adapters_are_no_obstacle(token):
    with pytest.raises(OfflineModeIsEnabled):
        hf_posenc.push_to_hub(with_adapters().merge_and_unload(), "me/model")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"repo_id": "me/my model"}, "me/my model"),
        ({"repo_id": "datasets/me/model"}, "datasets/me/model"),
        ({"repo_id": None}, "Repo id"),
        ({"tokenizer": "bert-base-uncased"}, "a tokenizer of Transformers is needed, not 'bert-base-uncased'"),
    ],
)
def test_malformed_arguments_are_refused(token, arguments, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.push_to_hub(stock("bert"), **{"repo_id": "me/model", **arguments})


def test_no_token(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="hf auth login"):
        hf_posenc.push_to_hub(stock("bert"), "me/model")
