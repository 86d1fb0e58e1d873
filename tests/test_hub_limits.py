"""push_to_hub with a Hub that accepts a request and then falls silent. For each request, the push ends in time and gives the
reason.

All pushes of a test run at once, in threads of one process. The client of another library in this process gets no time limit.
In `make test`, the pushes use a simulated clock, and nothing waits.
"""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from hf_posenc.hub.requests import HubSession
from hub_server import USER, Commit, Fault, Repo, refuse, serve, silent, silent_after, stall, trickle
from models import patched, slow
from test_hub import EVALUATION, contents, run

STEPS = {
    "create": ('POST /api/repos/create .*"name": ?"{name}"', {}),
    "refs": ("GET /api/models/me/{name}/refs ", {"revision": "next"}),
    "branch": ("POST /api/models/me/{name}/branch/", {"revision": "next"}),
    "info": ("GET /api/models/me/{name}(/revision/[0-9a-z]+)? ", {}),
    "card-head": ("HEAD /me/{name}/resolve/[0-9a-f]+/README.md ", {}),
    "card": ("GET /me/{name}/resolve/[0-9a-f]+/README.md ", {}),
    "evaluation": ("GET /me/{name}/resolve/[0-9a-f]+/evaluation.json ", {}),
    "base": ("GET /api/models/lab/of-{name} ", {"base": "lab/of-{name}"}),
    "yaml": ("POST /api/validate-yaml .*me/{name}[^-]", {}),
    "preupload": ("POST /api/models/me/{name}/preupload/", {}),
    "batch": ("POST /me/{name}.git/info/lfs/objects/batch ", {}),
    "put": ("PUT /cdn/me/{name}/", {}),
    "complete": ("POST /me/{name}.git/info/lfs/complete ", {}),
    "verify": ("POST /me/{name}.git/info/lfs/verify ", {}),
    "commit": ("POST /api/models/me/{name}/commit/", {}),
    "requests": ("GET /api/models/me/{name}/discussions ", {"create_pr": True}),
}
"""Every request of a push, and the arguments that make a push send it."""


def pushes(folder, cases, limits, part_size=1 << 15, waiting=False):
    """The results of pushes. cases: name -> step, act, times, unread."""
    patched("bert", "alibi", seed=0).save_pretrained(folder / "old", max_shard_size="40KB")
    old = contents(folder / "old") | {
        "README.md": b"---\nlicense: mit\n---\n",
        "evaluation.json": json.dumps(EVALUATION).encode(),
    }
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    calls = {}
    with serve(part_size) as hub:
        for name, (step, act, times, unread) in cases.items():
            on, arguments = STEPS[step]
            named = {key: value.format(name=name) if isinstance(value, str) else value for key, value in arguments.items()}
            calls[name] = {**limits, **named}
            on = on.replace("{name}", re.escape(name))
            hub.faults.append(Fault(on if not unread else on.partition(" .*")[0], act, times, unread))
            if step != "create":
                hub.repos[f"{USER}/{name}"] = Repo(commits=[Commit("old", old)])
            hub.repos[f"lab/of-{name}"] = Repo()
        (folder / "calls.json").write_text(json.dumps(calls))
        run("limits", folder, hub, "home", waiting)
        results = json.loads((folder / "results.json").read_text())
        unmet = [name for name, fault in zip(cases, hub.faults, strict=True) if fault.times == cases[name][2]]
        return SimpleNamespace(results=results, repos=hub.repos, old=old, unmet=unmet)


def whole(done, name):
    """Checks that the head of each branch is the old or the new model, never a part of either. Returns the number of new
    commits.
    """
    repo, made = done.repos.get(f"{USER}/{name}", Repo()), 0
    for place, line in repo.branches.items():
        for commit in line:
            files = commit.files
            if "model.safetensors" in files:
                assert {"README.md", "config.json", "evaluation.json", "modeling_posenc.py"} <= files.keys(), (name, place)
                assert "model-00001-of-00002.safetensors" not in files, (name, place)
            else:
                assert files in (done.old, Repo().commits[0].files), (name, place)
        made += "model.safetensors" in line[-1].files
        assert sum("model.safetensors" in commit.files for commit in line) <= 1, (name, place)
    return made


ALWAYS = 10**6
ASLEEP = ("preupload", refuse(429, **{"Retry-After": "86400"}), ALWAYS, False)
KINDS = {
    "silent": {f"at-{step}": (step, silent, ALWAYS, False) for step in STEPS}
    | {"reply": ("commit", silent_after, 1, False), "sleep": ASLEEP},
    "once": {f"at-{step}": (step, silent, 1, False) for step in STEPS},
    "stall": {f"at-{step}": (step, stall, ALWAYS, False) for step in STEPS} | {"sleep": ASLEEP},
    "trickle": {f"at-{step}": (step, trickle, ALWAYS, False) for step in STEPS},
}
DEADLINES = {"silent": 10, "once": 60, "stall": 10, "trickle": 8}
WAITING = ("stall", "trickle")
"""Kinds of faults in which the Hub and its clients wait in real time."""
SPARE, PAUSE = 30, 8  # seconds of slack after a deadline (a push without one would never end), and of a client's pause


@pytest.fixture(scope="module", params=["silent", *(slow(kind) for kind in KINDS if kind != "silent")])
def hushed(request, tmp_path_factory):
    kind, limits = request.param, {"timeout": 0.5, "deadline": DEADLINES[request.param]}
    return kind, pushes(tmp_path_factory.mktemp("silent"), KINDS[kind], limits, waiting=kind in WAITING)


def test_silence_ends_in_time_and_by_name(hushed):
    kind, done = hushed
    late = f"TimeoutError: The push didn't finish before its deadline of {DEADLINES[kind]} s"
    assert not done.unmet
    for name in KINDS[kind]:
        result = done.results[name]
        assert result["seconds"] < DEADLINES[kind] + (SPARE if kind in WAITING else PAUSE), (name, result)
        if kind == "once" or name == "reply":
            lines = done.repos[f"{USER}/{name}"].branches.values()
            assert "oid" in result, (name, result)
            assert result["oid"] in {line[-1].sha for line in lines} and whole(done, name) == 1, name
        else:
            expected = late if kind == "trickle" else (late, "ConnectionError: The Hub didn't answer (timed out) in 2 att")
            assert result["error"].startswith(expected), (name, result)
            assert result["seconds"] < DEADLINES[kind] or name != "sleep", "what can't be in time ends at once"
            assert whole(done, name) == 0 or (kind, name) == ("trickle", "at-commit"), name
    assert done.results["its client"] and not done.results["limits of others"]


def test_a_request_that_nothing_stops_is_left_at_the_deadline():
    """The request is abandoned at its deadline, as name resolution would be."""
    never, began = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"its deadline of 0\.05 s"):
        HubSession(timeout=9, deadline=0.05).send(lambda: never.wait(SPARE))
    never.set()
    assert time.monotonic() - began < SPARE


@pytest.mark.slow
def test_a_hub_that_stops_reading(tmp_path):
    """The Hub stops reading during an upload that is larger than all buffers in between."""
    (tmp_path / "large.png").write_bytes(bytes(2**24))
    limits = {"timeout": 0.5, "deadline": 4, "figures": [str(tmp_path / "large.png")]}
    done = pushes(tmp_path, {"half": ("put", stall, ALWAYS, True)}, limits, part_size=2**26, waiting=True)
    assert done.results["half"]["error"].startswith("TimeoutError: the push") and done.results["half"]["seconds"] < 4 + SPARE
    assert not done.unmet and not whole(done, "half")
