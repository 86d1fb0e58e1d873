"""push_to_hub at a Hub that accepts and falls silent, at each of its requests: it ends in time, and says why.

All pushes of a test run at once, in threads of one process, where a client of somebody else's stays without a limit.
"""

import json
import re
from types import SimpleNamespace

import pytest

import hf_posenc
from hub_server import USER, Commit, Fault, Repo, refuse, serve, stall, stall_after, trickle
from models import patched, stock
from test_hub import EVALUATION, run

PUSH = """
import copy, json, sys, threading, time, hf_posenc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from huggingface_hub import get_session
from transformers import AutoModel
from hf_posenc.hub import requests
from models import patched

requests.PAUSE, requests.ATTEMPTS = 0.01, 2
folder = Path(sys.argv[1])
calls, evaluation = json.loads((folder / "calls.json").read_text()), json.loads((folder / "evaluation.json").read_text())
model = patched("bert", "alibi", seed=1)
client = get_session()

def push(name):
    arguments, pushed = dict(calls[name]), copy.deepcopy(model)
    if base := arguments.pop("base", None):
        pushed.config.position_encoding["original"]["name_or_path"] = base
    start = time.monotonic()
    try:
        result = {"oid": hf_posenc.push_to_hub(pushed, f"me/{name}", evaluation=evaluation, **arguments).oid}
    except BaseException as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        result = {"error": f"{type(error).__name__}: {error}", "kinds": kinds}
    return {**result, "seconds": time.monotonic() - start}

with ThreadPoolExecutor(20) as pool:
    results = dict(zip(calls, pool.map(push, calls)))
results["its client"] = get_session() is client and client.timeout.read is None
hub_request = client.build_request("GET", "http://127.0.0.1/")
[hook(hub_request) for hook in client.event_hooks["request"]]
results["limits of others"] = [limit for limit in hub_request.extensions["timeout"].values() if limit is not None]
results["threads"] = [thread.name for thread in threading.enumerate()]
(folder / "results.json").write_text(json.dumps(results))
"""

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
"""Every request of a push, and what makes a push send it."""


def pushes(folder, cases, limits, part_size=1 << 15):
    """What came of pushes. cases: name -> step, act, times, unread."""
    patched("bert", "alibi", seed=0).save_pretrained(folder / "old", max_shard_size="40KB")
    old = {path.name: path.read_bytes() for path in (folder / "old").iterdir()}
    old |= {"README.md": b"---\nlicense: mit\n---\n", "evaluation.json": json.dumps(EVALUATION).encode()}
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
        run(PUSH, folder, hub, "home")
        results = json.loads((folder / "results.json").read_text())
        unmet = [name for name, fault in zip(cases, hub.faults, strict=True) if fault.times == cases[name][2]]
        return SimpleNamespace(results=results, repos=hub.repos, old=old, unmet=unmet)


def whole(done, name):
    """The head of each branch is the old model or the new one, never a part of either. Returns the number of new commits."""
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
KINDS = {
    "stall": {step: (step, stall, ALWAYS, False) for step in STEPS}
    | {
        "reply": ("commit", stall_after, 1, False),
        "slow": ("info", trickle, ALWAYS, False),
        "sleep": ("preupload", refuse(429, **{"Retry-After": "86400"}), ALWAYS, False),
    },
    "trickle": {step: (step, trickle, ALWAYS, False) for step in STEPS},
    "once": {step: (step, stall, 1, False) for step in STEPS},
}
DEADLINES = {"stall": 10, "trickle": 4, "once": 60}
SPARE = 30  # s that a busy machine may take beyond a deadline; a push without one would wait for ever


@pytest.fixture(scope="module", params=["stall", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("trickle", "once"))])
def silent(request, tmp_path_factory):
    limits = {"timeout": 0.5, "deadline": DEADLINES[request.param]}
    return request.param, pushes(tmp_path_factory.mktemp("silent"), KINDS[request.param], limits)


def test_silence_ends_in_time_and_by_name(silent):
    kind, done = silent
    late = f"TimeoutError: the push wasn't done by its deadline of {DEADLINES[kind]} s"
    assert not done.unmet
    for name in KINDS[kind]:
        result = done.results[name]
        assert result["seconds"] < DEADLINES[kind] + SPARE, (name, result)
        if kind == "once" or name == "reply":
            lines = done.repos[f"{USER}/{name}"].branches.values()
            assert "oid" in result, (name, result)
            assert result["oid"] in {line[-1].sha for line in lines} and whole(done, name) == 1, name
        else:
            expected = late if kind == "trickle" else (late, "ConnectionError: the Hub doesn't answer (timed out), in 2 att")
            assert result["error"].startswith(expected), (name, result)
            assert result["seconds"] < DEADLINES[kind] or name != "sleep", "what can't be in time ends at once"
            assert whole(done, name) == 0 or (kind, name) == ("trickle", "commit"), name


def test_the_client_of_others_is_left_as_it_is(silent):
    _, done = silent
    assert done.results["its client"] and not done.results["limits of others"]


@pytest.mark.slow
def test_a_hub_that_stops_reading(tmp_path):
    """In the middle of an upload that is larger than all buffers on the way."""
    (tmp_path / "large.png").write_bytes(bytes(2**24))
    limits = {"timeout": 0.5, "deadline": 4, "figures": [str(tmp_path / "large.png")]}
    done = pushes(tmp_path, {"half": ("put", stall, ALWAYS, True)}, limits, part_size=2**26)
    assert done.results["half"]["error"].startswith("TimeoutError: the push") and done.results["half"]["seconds"] < 4 + SPARE
    assert not done.unmet and not whole(done, "half")


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "60", None, True])
@pytest.mark.parametrize("name", ["timeout", "deadline"])
def test_a_limit_is_a_positive_number(name, limit):
    with pytest.raises(ValueError, match=f"{name} is {re.escape(repr(limit))}: give a positive number of seconds"):
        hf_posenc.push_to_hub(stock("bert"), "me/model", **{name: limit})
