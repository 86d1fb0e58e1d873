"""push_to_hub with the real client and a Hub on loopback. hub_worker.py pushes in one process and loads in another."""

import json
import resource
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from packaging.version import Version
from transformers import BertTokenizer
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from typer.testing import CliRunner

import hf_posenc
from conftest import WORDS, said_by_python
from hf_posenc.cli import app
from hf_posenc.hub.eval_results import checked_evaluation, result_files
from hub_server import TOKEN, USER, Commit, Fault, Repo, refuse, serve, with_foreign_commit
from models import INSTALLED, patched, slow, stock, tokens

BY_HAND = "# My model\n\nTrained with love.\n"
LICENCE = "---\nlicense: mit\nlanguage:\n- de\n---\n"
"""The model card that the Hub's website makes in a new repository with a license."""


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


def run(function, folder, hub, home, *arguments, **settings):
    """Runs a function of hub_worker with a directory in a separate process, and returns its standard error."""
    about_the_hub = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / home)}
    settings = {**about_the_hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **settings}
    code = f"import sys, hub_worker; hub_worker.{function}(*sys.argv[1:])"
    return said_by_python(code, folder, *arguments, fresh=True, **settings)[1]


def repo_of(files, **more):
    files = {path: content.encode() if isinstance(content, str) else content for path, content in files.items()}
    return Repo(commits=[Commit("start", files)], **more)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The Hub after `pushes`, the results of `pushes`, and the results of `loads`."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    (folder / "length.png").write_bytes(b"\x89PNG of lengths")
    torch.save(tokens(), folder / "tokens.pt")
    measured = {"evaluation": folder / "evaluation.json", "figures": [folder / "length.png"]}
    ready = hf_posenc.push_to_hub(patched("bert", "rope"), "me/ready", save_directory=folder / "ready", **measured)
    assert ready == folder / "ready"
    stock("bert").save_pretrained(folder / "base")
    old = {"model-00001-of-00002.safetensors": "old", "model.safetensors.index.json": "old"}
    with serve(part_size=1 << 15) as hub:
        for name in ("gated", "hidden", "closed", "public"):
            files = {"README.md": "---\nlicense: other\nlicense_name: lab-1\n---\n", "config.json": "{}"}
            hub.repos[f"lab/{name}"] = repo_of(files, private=name == "hidden", gated=name == "gated")
        hub.faults.append(Fault("GET /api/models/lab/closed ", refuse(403, "ask for access", "GatedRepo"), times=9))
        hub.faults.append(Fault("POST /api/models/me/foreign/commit/", with_foreign_commit("me/foreign")))
        for name, files in {
            "by-hand": {"README.md": BY_HAND},
            "licence": {"README.md": LICENCE},
            "shards": {**old, "notes.txt": "mine", "posenc_old.py": "old"},
            "base": contents(folder / "base"),
        }.items():
            hub.repos[f"{USER}/{name}"] = repo_of(files)
        errors = run("pushes", folder, hub, "home")
        log = list(hub.log)
        run("loads", folder, hub, "another-home")
        asked = len(hub.log)
        errors += run("places", folder, hub, "another-home", "", HF_HUB_OFFLINE="1")
        assert len(hub.log) == asked
        results, loaded = (json.loads((folder / name).read_text()) for name in ("results.json", "loaded.json"))
        yield SimpleNamespace(folder=folder, hub=hub, repos=hub.repos, results=results, loaded=loaded, errors=errors, log=log)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_of(repo):
    """The files of the last commit, except those that the Hub adds."""
    return {path: content for path, content in repo.commits[-1].files.items() if path != ".gitattributes"}


def card_of(repo):
    """The metadata and text of a card."""
    _, front, text = repo.commits[-1].files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(front), text


def test_from_a_shell(pushed):
    code, shown, _ = pushed.results["shell"]
    assert code == 0 and shown.endswith("/me/from-shell"), shown
    repo = pushed.repos[f"{USER}/from-shell"]
    assert repo.private and repo.commits[-1].message == "From a shell"
    assert json.loads(files_of(repo)["config.json"])["architectures"] == ["PosEncBertForMaskedLM"]
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= files_of(repo).keys()
    code, _, error = pushed.results["refused"]
    assert code == 1 and "Error: 403" in error and "Traceback" not in error


@pytest.mark.parametrize("places", [("me/branches: rope", "me/trained: trained"), slow(())], ids=["some", "all"])
def test_loads_without_the_package_and_then_without_the_hub(pushed, places, tmp_path):
    run("places", pushed.folder, pushed.hub, tmp_path, "bare", *places)
    asked = len(pushed.hub.log)
    assert asked > len(pushed.log)
    run("places", pushed.folder, pushed.hub, tmp_path, "bare", *places, HF_HUB_OFFLINE="1")
    assert len(pushed.hub.log) == asked


def test_another_process_loads_the_same_model_as_the_card_says(pushed):
    loaded = {name: result for name, result in pushed.loaded.items() if isinstance(result, dict)}
    others = {"unlimited": "PosEncBertForMaskedLM", "stock": "BertModel", "heads": "PosEncGPT2DoubleHeadsModel"}
    others["layer"] = "PositionEmbedding"
    assert {name: result["class"] for name, result in loaded.items()} == dict.fromkeys(loaded, "PosEncBertModel") | others
    assert {name for name, result in loaded.items() if not result["by_card"]} == {"by-hand", "own-method"}
    assert all(result["equal"] for name, result in loaded.items() if name != "layer") and len(loaded) == 11
    lengths = {name: loaded[name]["model_max_length"] for name in ("model", "unlimited", "stock")}
    assert lengths == {"model": 64, "unlimited": VERY_LARGE_INTEGER, "stock": 24}
    assert loaded["model"]["ids"] == [2, 8, 9, 3] and pushed.results["tokenizer"] == 99


def test_one_commit_for_a_change_and_none_for_no_change(pushed):
    repo, (first, again, changed) = pushed.repos["me/model"], pushed.results["me/model"]
    start, one, two = repo.commits
    assert (one.sha, one.sha, two.sha) == (first, again, changed)
    assert pushed.log.count("POST /api/models/me/model/commit/main") == 2
    added = {path for path in one.files if not path.endswith(".py")} - set(start.files)
    assert added == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path for path in two.files if two.files[path] != one.files[path]} == {"model.safetensors"}
    # If another push had come between, the Hub would have rejected this one instead of overwriting it.
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
        "- position encoding `alibi`: `slopes='fixed'`, `sides='symmetric'`, `per_layer=False`\n",
        "`distance_bias` in `encoder.layer.0.attention.self` and 1 more",
        "maximum length: 64 tokens",
        "hf_posenc.unpatch(model)",
        "pip install",
    ):
        assert words in text
    metadata, text = card_of(pushed.repos["me/unlimited"])
    assert metadata["pipeline_tag"] == "fill-mask" and "maximum length: no limit" in text
    for name in ("unlimited", "heads"):
        assert "base_model" not in card_of(pushed.repos[f"me/{name}"])[0]
    assert "hf_posenc." not in card_of(pushed.repos["me/stock"])[1].partition("<!--")[0]
    assert "pipeline_tag" not in card_of(pushed.repos["me/layer"])[0]
    assert "its class `Window` is not part of hf-posenc" in card_of(pushed.repos["me/window"])[1]


def test_the_text_of_a_card_is_kept_and_its_metadata_are_new(pushed):
    metadata, text = card_of(pushed.repos["me/by-hand"])
    assert text == BY_HAND and metadata["tags"] == ["hf-posenc", "alibi"]
    assert "model.safetensors" in files_of(pushed.repos["me/by-hand"])
    assert "My own `BertModel`" in card_of(pushed.repos["me/stock"])[1]
    metadata, text = card_of(pushed.repos["me/licence"])
    assert metadata["license"] == "mit" and metadata["language"] == ["de"]
    assert metadata["tags"] == ["hf-posenc", "rope"] and "`alibi`" in text


def test_weights_of_an_earlier_push_go_and_other_files_stay(pushed):
    files = files_of(pushed.repos["me/shards"]).keys()
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
    assert refused.startswith("ValueError: me/unlimited exists and is private. Omit private=False")
    assert [commit.message for commit in pushed.repos["me/unlimited"].commits] == ["initial commit", "Here it is"]


def test_what_the_hub_refuses_leaves_nothing_behind(pushed):
    (bad,), (foreign,) = pushed.results["me/bad-token"], pushed.results["you/model"]
    assert "401" in bad and "Invalid credentials" in bad
    assert "403" in foreign and "namespace" in foreign
    assert "me/bad-token" not in pushed.repos and "you/model" not in pushed.repos


def test_what_was_measured_goes_along_and_goes_again(pushed):
    start, measured, bare = pushed.repos["me/measured"].commits
    added = {"evaluation.json", *result_files(EVALUATION)}
    assert len(added) > 1 and added == set(measured.files) - set(bare.files)
    assert json.loads(measured.files["evaluation.json"]) == checked_evaluation(EVALUATION)
    assert measured.files["length.png"] == (pushed.folder / "length.png").read_bytes()
    assert "length.png" in measured.files["README.md"].decode() and "length.png" in bare.files["README.md"].decode()
    assert card_of(pushed.repos["me/measured"])[0].get("metrics") is None


def test_a_ready_folder_is_what_a_push_sends_at_once_or_later(pushed):
    assert contents(pushed.folder / "kept") == files_of(pushed.repos["me/kept"])
    code, shown, _ = pushed.results["ready"]
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


def test_a_commit_of_somebody_else_is_not_overwritten(pushed):
    refused, again = pushed.results["me/foreign"]
    first, foreign, last = pushed.repos["me/foreign"].commits
    assert refused.startswith("HfHubHTTPError: ") and "412" in refused and "A commit has happened since" in refused
    assert foreign.files == {**first.files, "notes.txt": b"theirs"}
    assert last.sha == again and last.files["notes.txt"] == b"theirs" and "model.safetensors" in last.files


def test_the_client_of_other_code_stays_as_it_is(pushed):
    assert pushed.results["the client of others"]


def test_branches_and_pull_requests(pushed):
    repo, (main, branch, opened, added) = pushed.repos["me/branches"], pushed.results["me/branches"]
    assert [line.sha for line in repo.commits[1:]] == [main]
    assert [line.sha for line in repo.branches["rope"][1:]] == [main, branch]
    assert [line.sha for line in repo.branches["refs/pr/1"][1:]] == [main, opened, added]
    assert set(repo.branches) == {"main", "rope", "refs/pr/1"}


def test_a_pull_request_to_a_repo_of_others_and_the_push_of_a_trainer(pushed):
    repo, (opened, refused) = pushed.repos["lab/public"], pushed.results["lab/public"]
    assert repo.branches["refs/pr/1"][-1].sha == opened and "you may not write to lab/public" in refused
    assert len(repo.commits) == 1
    assert [pushed.repos["me/trained"].commits[-1].sha] == pushed.results["me/trained"]


def test_weights_in_parts_and_in_shards(pushed):
    assert "POST /me/model.git/info/lfs/complete" in pushed.log
    assert "model-00002-of-00002.safetensors" in pushed.repos["me/sharded"].commits[-1].files
    at_once = pushed.repos["me/at-once"].commits[-1].files
    saved = {path.name: path.read_bytes() for path in (pushed.folder / "at-once").iterdir()}
    assert saved.items() <= at_once.items()
    assert "posenc_encodings_rope.py" in saved


def test_what_can_not_be_loaded_says_why(pushed):
    for name, words in {
        "gated": "gated repo",
        "hidden": "is not a local folder and is not a valid model identifier",
        "anonymous": "is not a local folder and is not a valid model identifier",
        "no revision": "no-such is not a valid git identifier",
    }.items():
        if name == "anonymous" and Version("5.18") > INSTALLED:  # it loads from the cache
            continue
        assert words in pushed.loaded[name], pushed.loaded[name]
    assert TOKEN not in pushed.errors and TOKEN not in json.dumps([pushed.results, pushed.loaded])


# Without a Hub.


def test_offline_a_folder_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    where = hf_posenc.push_to_hub(patched("bert", "alibi"), "me/model", private=True, revision="next")
    assert where == Path("model") and {"README.md", "config.json", "model.safetensors"} <= set(contents(tmp_path / "model"))
    assert "hf-posenc push model me/model --private --revision=next" in caplog.text
    assert "hf upload me/model model . --private --revision=next" in caplog.text


def test_names_notes_and_units_are_pushed_as_they_are(tmp_path):
    labels = {0: "/r/politics", 1: "C:\\Users\\joe"}
    notes = ["1,000 tokens /s on /data/a b", "--api-key abc, sk-Proj1234567890abcdefghij"]
    result = {**EVALUATION["results"][0], "unit": "tokens /s", "metric": "~/mrr"}
    measured = {"notes": notes, "results": [result], "command": "/home/joe/train.py --hub_token abc"}
    (tmp_path / "a.svg").write_text("<!-- /home/joe/x -->")
    model = stock("bert", "ForSequenceClassification", id2label=labels)
    ready = hf_posenc.push_to_hub(
        model, "me/model", evaluation=measured, figures=[tmp_path / "a.svg"], save_directory=tmp_path / "ready"
    )
    pushed = json.loads((ready / "evaluation.json").read_text())
    assert pushed["notes"] == notes and pushed["command"] == measured["command"]
    assert (pushed["results"][0]["unit"], pushed["results"][0]["metric"]) == ("tokens /s", "~/mrr")
    assert json.loads((ready / "config.json").read_text())["id2label"] == {str(key): name for key, name in labels.items()}


def test_a_full_disk_is_an_oserror(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            hf_posenc.push_to_hub(stock("bert"), "me/model", save_directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


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


def test_a_folder_made_offline_is_renewed(tmp_path):
    alibi, rope = patched("bert", "alibi"), patched("bert", "rope")
    push = partial(hf_posenc.push_to_hub, repo_id="me/model", save_directory=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    push(alibi)
    before = contents(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")
    push(rope)
    card = tmp_path / "README.md"
    card.write_text(card.read_text().replace("`PosEncBertModel`", "My own `PosEncBertModel`"))
    push(alibi)
    after = contents(tmp_path)
    assert "My own" in after.pop("README.md").decode() and before.pop("README.md") and after == before


ADAPTERS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""A warning that peft causes."""


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
        (lambda: torch.compile(stock("bert"), backend="eager"), r"OptimizedModule.*model\._orig_mod"),
        (lambda: torch.nn.DataParallel(stock("bert")), "DataParallel"),
        (with_adapters, "merge_and_unload"),
        (lambda: with_adapters().base_model.model, "merge_and_unload"),
        (lambda: torch.nn.Linear(2, 2), "Linear.*PreTrainedModel.*Transformers"),
        (lambda: "bert-base-uncased", r"bert\-base\-uncased"),
    ],
)
def test_a_model_that_is_none_is_refused(token, make, words):
    # As in the next tests, nothing is written. The tests run offline, so nothing is sent.
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
        ({"tokenizer": "bert-base-uncased"}, r"bert\-base\-uncased.*Transformers"),
        ({"evaluation": {"mrr": 0.6}}, "mrr"),
        ({"evaluation": "nowhere.json"}, "nowhere.json can't be read as JSON"),
        ({"evaluation": __file__}, "test_hub.py can't be read as JSON"),
        ({"figures": ["nowhere.png"]}, "'nowhere.png' must be the path of an image"),
        ({"figures": [__file__]}, "test_hub.py' must be the path of an image"),
        ({"token": "hf_go od"}, "token contains a space"),
        ({"token": "hf_good\n"}, "token contains a space"),
        ({"evaluation": {**EVALUATION, "notes": [f"made with {TOKEN}"]}}, "Hub"),
        ({"commit_message": f"with {TOKEN}"}, "commit_message.*Hub"),
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
