"""push_to_hub through what goes wrong on the way: one fault, one repo, one test. The real client, a Hub on loopback.

Each repo begins with an old model in two shards, which the push replaces by a single file: a half push wouldn't load.
"""

import json
from types import SimpleNamespace

import pytest

from hub_server import TOKEN, USER, Commit, Fault, Repo, answered, cut, lose_reply, refuse, serve, with_foreign_commit
from models import patched
from test_hub import run

PUSH = """
import json, logging, sys, torch, hf_posenc
from pathlib import Path
from huggingface_hub import logging as hub_logging
from transformers import AutoModel
from hf_posenc.hub import requests
from models import patched, randomize, tokens

requests.PAUSE, requests.ATTEMPTS = 0.01, 3
logging.basicConfig(level=logging.DEBUG)
hub_logging.set_verbosity_debug()
folder, results = Path(sys.argv[1]), {}
model = patched("bert", "alibi", seed=1)
new = model(tokens())[0]
calls = json.loads((folder / "calls.json").read_text())

def push(name, arguments):
    try:
        return {"oid": hf_posenc.push_to_hub(model, f"me/{name}", **arguments).oid}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

def load(name, arguments):
    revision = "refs/pr/1" if "create_pr" in arguments else arguments.get("revision", "main")
    try:
        return "new" if torch.equal(AutoModel.from_pretrained(f"me/{name}", revision=revision)(tokens())[0], new) else "old"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

for name, arguments in calls.items():
    print(f"<{name}>", file=sys.stderr)
    results[name] = {**push(name, arguments), "head": load(name, arguments)}
    print(f"</{name}>", file=sys.stderr)
    results[name] |= {"again": push(name, arguments), "then": load(name, arguments)}
(folder / "results.json").write_text(json.dumps(results))
"""


def then_504(handler, answer):
    lose_reply(handler, answer)
    refuse(504)(handler, answer)


FAULTS = {
    "create-500": [Fault('POST /api/repos/create .*"create-500"', refuse(500))],
    "create-lost": [Fault('POST /api/repos/create .*"create-lost"', lose_reply)],
    "unreachable": [Fault('POST /api/repos/create .*"unreachable"', cut, times=3)],
    "card-500": [Fault("GET /me/card-500/resolve/[0-9a-f]+/README.md", refuse(500))],
    "yaml-503": [Fault("POST /api/validate-yaml .*me/yaml-503", refuse(503, body=b"<html>no service</html>"))],
    "yaml-400": [
        Fault("POST /api/validate-yaml .*me/yaml-400", refuse(400, body={"errors": [{"message": '"license" must be known'}]}))
    ],
    "branch-503": [Fault("POST /api/models/me/branch-503/branch/", refuse(503))],
    "preupload-429": [Fault("POST /api/models/me/preupload-429/preupload/", refuse(429))],
    "put-cut": [Fault("PUT /cdn/me/put-cut/", cut)],
    "put-500": [Fault("PUT /cdn/me/put-500/", refuse(500))],
    "get-500": [Fault("GET /cdn/me/get-500/", refuse(500))],
    "commit-429": [Fault("POST /api/models/me/commit-429/commit/", refuse(429, **{"Retry-After": "1"}))],
    "commit-503": [Fault("POST /api/models/me/commit-503/commit/", refuse(503), times=2)],
    "commit-down": [Fault("POST /api/models/me/commit-down/commit/", refuse(503, "maintenance"), times=3)],
    "reply-lost": [Fault("POST /api/models/me/reply-lost/commit/", lose_reply)],
    "reply-504": [Fault("POST /api/models/me/reply-504/commit/", then_504)],
    "reply-of-pr-lost": [Fault("POST /api/models/me/reply-of-pr-lost/commit/", lose_reply)],
    "foreign": [Fault("POST /api/models/me/foreign/commit/", with_foreign_commit(answered, "me/foreign"))],
    "foreign-cut": [Fault("POST /api/models/me/foreign-cut/commit/", with_foreign_commit(cut, "me/foreign-cut"))],
    "refused": [Fault("POST /api/models/me/refused/commit/", refuse(403, "this repo is locked"))],
}
ARGUMENTS = {"branch-503": {"revision": "next"}, "reply-of-pr-lost": {"create_pr": True}}
NEW_REPOS = ("create-500", "create-lost", "unreachable")


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """What the pushes got back, what was logged during the first of each repo, and the Hub afterwards."""
    folder = tmp_path_factory.mktemp("faults")
    patched("bert", "alibi", seed=0).save_pretrained(folder / "old", max_shard_size="40KB")
    files = {path.name: path.read_bytes() for path in (folder / "old").iterdir()}
    assert "model-00002-of-00002.safetensors" in files
    (folder / "calls.json").write_text(json.dumps({name: ARGUMENTS.get(name, {}) for name in FAULTS}))
    with serve() as hub:
        for name, faults in FAULTS.items():
            hub.faults += faults
            if name not in NEW_REPOS:
                hub.repos[f"{USER}/{name}"] = Repo(commits=[Commit("old", {**files, "README.md": b"---\nlicense: mit\n---\n"})])
        errors = run(PUSH, folder, hub, "home")
        results = json.loads((folder / "results.json").read_text())
        logs = {name: errors.partition(f"<{name}>")[2].partition(f"</{name}>")[0] for name in FAULTS}
        yield SimpleNamespace(
            unused=[fault.on for fault in hub.faults if fault.times],
            repos=hub.repos,
            results=results,
            logs=logs,
            errors=errors,
            said=json.dumps(results),
        )


def survived(pushed, name, commits=2):
    """It is as if nothing had happened: the model is there, whole, by one commit, and the same push again changes nothing."""
    result, (*_, last) = pushed.results[name], (line := pushed.repos[f"{USER}/{name}"].commits)
    assert result == {"oid": last.sha, "head": "new", "again": {"oid": last.sha}, "then": "new"}
    assert len(line) == commits
    assert "model-00001-of-00002.safetensors" not in last.files
    return pushed.logs[name]


def refused(pushed, name, commits=2):
    """The push failed, and the head was what it had been; the next went through. What the user saw."""
    result, line = pushed.results[name], pushed.repos[f"{USER}/{name}"].commits
    assert result["head"] == "old" and result["again"] == {"oid": line[-1].sha} and result["then"] == "new"
    assert len(line) == commits
    return result["error"]


def test_each_fault_was_met(pushed):
    assert not pushed.unused


def test_500_at_create(pushed):
    assert "the Hub: status 500; attempt 2 of 3" in survived(pushed, "create-500")


def test_reply_to_create_lost(pushed):
    assert "the Hub: RemoteProtocolError; attempt 2 of 3" in survived(pushed, "create-lost")


def test_a_hub_that_does_not_answer(pushed):
    result = pushed.results["unreachable"]
    assert result["error"].startswith("ConnectionError: the Hub doesn't answer (Server disconnected")
    assert "push again later, or set HF_HUB_OFFLINE=1" in result["error"]
    assert "RepositoryNotFoundError" in result["head"] or "is not a local folder" in result["head"]
    assert result["then"] == "new"


def test_500_at_the_card_that_is_there(pushed):
    assert "the Hub: status 500; attempt 2 of 3" in survived(pushed, "card-500")


def test_a_503_in_html_at_the_check_of_the_card(pushed):
    assert "the Hub: JSONDecodeError; attempt 2 of 3" in survived(pushed, "yaml-503")


def test_a_card_that_the_hub_refuses(pushed):
    error = refused(pushed, "yaml-400")
    assert error == 'ValueError: Invalid metadata in README.md.\n- "license" must be known'


def test_503_at_a_new_branch(pushed):
    result, branches = pushed.results["branch-503"], pushed.repos["me/branch-503"].branches
    assert result == {"oid": branches["next"][-1].sha, "head": "new", "again": {"oid": result["oid"]}, "then": "new"}
    assert [len(branches[name]) for name in ("main", "next")] == [1, 2]


@pytest.mark.parametrize("name", ["preupload-429", "put-cut", "put-500"])
def test_what_the_client_itself_survives(pushed, name):
    assert "Retrying in" in survived(pushed, name)


def test_500_at_a_download(pushed):
    """Of a load, not of a push: the client doesn't ask again, and the next load does."""
    result = pushed.results["get-500"]
    assert "500" in result["head"] and result["then"] == "new"
    assert result["again"]["oid"] == result["oid"] and len(pushed.repos["me/get-500"].commits) == 2


def test_429_at_commit(pushed):
    assert "the Hub: status 429; attempt 2 of 3 in 1.0 s" in survived(pushed, "commit-429")


def test_503_at_commit(pushed):
    log = survived(pushed, "commit-503")
    assert "the Hub: status 503; attempt 2 of 3 in 0.0 s" in log and "attempt 3 of 3" in log


def test_a_hub_that_stays_down(pushed):
    error = refused(pushed, "commit-down")
    assert error.startswith("HfHubHTTPError: ") and "503" in error and "maintenance" in error
    assert error.endswith("That was attempt 3: push again later, what is uploaded won't be sent twice")


@pytest.mark.parametrize("name", ["reply-lost", "reply-504"])
def test_reply_lost_after_the_commit_was_stored(pushed, name):
    survived(pushed, name)


def test_reply_lost_after_a_pull_request_was_opened(pushed):
    result, branches = pushed.results["reply-of-pr-lost"], pushed.repos["me/reply-of-pr-lost"].branches
    assert {name: len(line) for name, line in branches.items()} == {"main": 1, "refs/pr/1": 2}
    assert result == {"oid": branches["refs/pr/1"][-1].sha, "head": "new", "again": {"oid": result["oid"]}, "then": "new"}


@pytest.mark.parametrize("name", ["foreign", "foreign-cut"])
def test_a_foreign_commit_in_between(pushed, name):
    error = refused(pushed, name, commits=3)
    assert error.startswith("HfHubHTTPError: ") and "412" in error
    assert f"Somebody else has pushed to me/{name} meanwhile, and nothing was committed" in error
    assert pushed.repos[f"me/{name}"].commits[-1].files["notes.txt"] == b"theirs"


def test_what_is_refused_is_not_asked_again(pushed):
    assert "this repo is locked" in refused(pushed, "refused")
    assert "attempt" not in pushed.logs["refused"]


def test_the_token_is_nowhere(pushed):
    assert TOKEN not in pushed.errors and TOKEN not in pushed.said
    for repo in pushed.repos.values():
        for commit in (commit for line in repo.branches.values() for commit in line):
            assert all(TOKEN.encode() not in content for content in [commit.message.encode(), *commit.files.values()])
