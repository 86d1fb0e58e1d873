"""push_to_hub with faults: one fault in each repository, with the real client and a Hub on loopback.

Each repository starts with an old model in two shards. The push replaces it by a single file, so a half push wouldn't load.
"""

import json
from types import SimpleNamespace

import pytest

from hub_server import TOKEN, USER, Commit, Fault, Repo, answered, cut, lose_reply, refuse, serve, with_foreign_commit
from models import patched
from test_hub import contents, run


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
    """The results of the pushes, the log of the first push to each repository, and the Hub afterwards."""
    folder = tmp_path_factory.mktemp("faults")
    patched("bert", "alibi", seed=0).save_pretrained(folder / "old", max_shard_size="40KB")
    files = {**contents(folder / "old"), "README.md": b"---\nlicense: mit\n---\n"}
    assert "model-00002-of-00002.safetensors" in files
    (folder / "calls.json").write_text(json.dumps({name: ARGUMENTS.get(name, {}) for name in FAULTS}))
    with serve() as hub:
        for name, faults in FAULTS.items():
            hub.faults += faults
            if name not in NEW_REPOS:
                hub.repos[f"{USER}/{name}"] = Repo(commits=[Commit("old", files)])
        errors = run("faults", folder, hub, "home")
        results = json.loads((folder / "results.json").read_text())
        logs = {name: errors.partition(f"<{name}>")[2].partition(f"</{name}>")[0] for name in FAULTS}
        assert not [fault.on for fault in hub.faults if fault.times], "not every fault was met"
        yield SimpleNamespace(repos=hub.repos, results=results, logs=logs, errors=errors)


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("create-500", "The Hub: status 500. Attempt 2 of 3"),
        ("create-lost", "The Hub: RemoteProtocolError. Attempt 2 of 3"),
        ("card-500", "The Hub: status 500. Attempt 2 of 3"),
        ("yaml-503", "The Hub: JSONDecodeError. Attempt 2 of 3"),
        ("preupload-429", "Retrying in"),  # logged by the client itself, as are the next two
        ("put-cut", "Retrying in"),
        ("put-500", "Retrying in"),
        ("commit-429", "The Hub: status 429. Attempt 2 of 3 in 1.0 s"),
        ("commit-503", "The Hub: status 503. Attempt 3 of 3"),
        ("reply-lost", ""),
        ("reply-504", ""),
    ],
)
def test_it_is_as_if_nothing_had_happened(pushed, name, logged):
    """One commit contains the complete model, and repeating the push changes nothing."""
    result, (*_, last) = pushed.results[name], (line := pushed.repos[f"{USER}/{name}"].commits)
    assert result == {"oid": last.sha, "head": "new", "again": {"oid": last.sha}, "then": "new"}
    assert len(line) == 2 and "model-00001-of-00002.safetensors" not in last.files
    assert logged in pushed.logs[name]


@pytest.mark.parametrize(
    ("name", "branches"), [("branch-503", {"main": 1, "next": 2}), ("reply-of-pr-lost", {"main": 1, "refs/pr/1": 2})]
)
def test_as_if_nothing_had_happened_beside_main(pushed, name, branches):
    result, lines = pushed.results[name], pushed.repos[f"{USER}/{name}"].branches
    assert {line: len(commits) for line, commits in lines.items()} == branches
    last = lines[[*branches][1]][-1].sha
    assert result == {"oid": last, "head": "new", "again": {"oid": last}, "then": "new"}


@pytest.mark.parametrize(
    ("name", "start", "words", "commits"),
    [
        ("yaml-400", 'ValueError: Invalid metadata in README.md.\n- "license" must be known', "", 2),
        ("commit-down", "HfHubHTTPError: ", "That was attempt 3: push again later, what is uploaded won't be sent twice", 2),
        ("foreign", "HfHubHTTPError: ", "Somebody else has pushed to me/foreign meanwhile, and nothing was committed", 3),
        ("foreign-cut", "HfHubHTTPError: ", "Somebody else has pushed to me/foreign-cut meanwhile, and nothing was", 3),
        ("refused", "HfHubHTTPError: ", "this repo is locked", 2),
    ],
)
def test_a_push_that_fails_changes_nothing_and_the_next_goes_through(pushed, name, start, words, commits):
    result, line = pushed.results[name], pushed.repos[f"{USER}/{name}"].commits
    assert result["head"] == "old" and result["again"] == {"oid": line[-1].sha} and result["then"] == "new"
    assert result["error"].startswith(start) and words in result["error"] and len(line) == commits
    for said in {"commit-down": ("503", "maintenance"), "foreign": ("412",), "foreign-cut": ("412",)}.get(name, ()):
        assert said in result["error"]
    assert name != "refused" or "attempt" not in pushed.logs[name], "what is refused is not asked again"
    assert "foreign" not in name or line[-1].files["notes.txt"] == b"theirs"


def test_a_hub_that_does_not_answer(pushed):
    result = pushed.results["unreachable"]
    assert result["error"].startswith("ConnectionError: The Hub didn't answer (Server disconnected")
    assert "Push again later, or set HF_HUB_OFFLINE=1" in result["error"]
    assert "RepositoryNotFoundError" in result["head"] or "is not a local folder" in result["head"]
    assert result["then"] == "new"


def test_500_at_a_download(pushed):
    """The fault is in a load, not in a push. The client doesn't retry, and the next load succeeds."""
    result = pushed.results["get-500"]
    assert "500" in result["head"] and result["then"] == "new"
    assert result["again"]["oid"] == result["oid"] and len(pushed.repos["me/get-500"].commits) == 2


def test_the_token_is_nowhere(pushed):
    assert TOKEN not in pushed.errors and TOKEN not in json.dumps(pushed.results)
    for repo in pushed.repos.values():
        for commit in (commit for line in repo.branches.values() for commit in line):
            assert all(TOKEN.encode() not in content for content in [commit.message.encode(), *commit.files.values()])
