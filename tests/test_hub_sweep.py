"""push_to_hub with every kind of fault at every request: it succeeds, or raises a documented error in time.

If a push reports success, the new model is there. Otherwise, the repository has the old model or the new one.
"""

import itertools
from collections import Counter

import pytest

from hub_server import USER, cut, garble, lose_reply, refuse, say, silent
from models import slow
from test_hub_limits import ALWAYS, SPARE, STEPS, pushes, whole

DEEP = b"[" * 100_000
HTML = b"<html>Please log in to the hotel's network</html>"
KINDS = {
    **{f"status-{code}": refuse(code) for code in (302, 400, 401, 403, 404, 409, 412, 418, 429, 500, 501, 503)},
    "retry-after": refuse(503, **{"Retry-After": "9" * 400}),
    "ratelimit": refuse(429, **{"ratelimit": '"api";r=0;t=99999999999'}),
    "cut": cut,
    "lost": lose_reply,
    "silent": silent,
    "empty": say(b""),
    "html": say(HTML),
    "html-400": refuse(400, body=HTML),
    "bytes": say(b"\xff\xfe\x00"),
    "deep": say(DEEP),
    "deep-400": refuse(400, body=DEEP),
    "null": say(None),
    "list": say([]),
    "number": say(5),
    "text": say("x"),
    "object": say({}),
    "error": say({"error": "no"}),
    "values-null": garble(None),
    "values-number": garble(7),
    "values-list": garble([]),
    "values-object": garble({"a": None}),
    "values-text": garble("\ud800"),
    "gzip": say(b"no gzip", **{"Content-Encoding": "gzip"}),
    "charset": say(b"{}", **{"Content-Type": "application/json; charset=none"}),
    "headers": say(b"{}", **{"X-Large": "x" * 200_000}),
    "short": say(b"{}", **{"Content-Length": "9"}),
    "length": say(b"{}", **{"Content-Length": "many"}),
    "loop": say(b"", 307, Location="/api/validate-yaml"),
    "away": say(b"", 307, Location="http://[::1"),
}
DOCUMENTED = {"ValueError", "HfHubHTTPError", "ConnectionError", "TimeoutError", "OSError"}
FAST = ("values-null", "deep")
DEADLINE = 3


@pytest.mark.parametrize("kinds", [slow(FAST), *(slow((kind,)) for kind in KINDS)], ids="+".join)
def test_sweep(kinds, tmp_path):
    """Every kind of fault occurs at every request, once and always. For FAST, one kind in turn occurs at each
    request, always.
    """
    if kinds == FAST:
        turns = zip(STEPS, itertools.cycle(FAST))
        cases = {f"{step}-{kind}": (step, KINDS[kind], ALWAYS, False) for step, kind in turns}
    else:
        often = {"once": 1, "always": ALWAYS}
        cases = {f"{step}-{name}": (step, KINDS[kinds[0]], times, False) for step in STEPS for name, times in often.items()}
    done = pushes(tmp_path, cases, {"timeout": 0.5, "deadline": DEADLINE})
    outcomes = Counter()
    for name in cases:
        result = done.results[name]
        assert result["seconds"] < DEADLINE + SPARE, (name, result)
        made = whole(done, name)
        if "oid" in result:
            lines = done.repos[f"{USER}/{name}"].branches.values()
            assert made == 1 and result["oid"] in {line[-1].sha for line in lines}, (name, result)
            outcomes["done"] += 1
        else:
            documented = [kind for kind in result["kinds"] if kind in DOCUMENTED]
            assert documented, (name, result)
            assert documented[0] != "OSError", (name, result)  # it is for local files, which are valid here
            assert documented[0] != "ValueError" or name.startswith("yaml"), (name, result)
            assert result["error"].isprintable() or "\n" in result["error"], (name, result)
            outcomes[documented[0]] += 1
    print(*kinds, dict(outcomes), "unmet", done.unmet)
    assert sum(outcomes.values()) == len(cases)
