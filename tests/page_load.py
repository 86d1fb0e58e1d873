"""Load test of the explorer page. Visitors draw, measure, leave early, and send requests that exceed the limits.

python tests/page_load.py --minutes 10 --visitors 10 --model PATH > scripts/results/page_load.txt
"""

import argparse
import collections
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from hf_posenc.evaluation import terminals

SERVER = """
import sys
from hf_posenc import explorer
if __name__ == "__main__":
    page = explorer.serve(port=0, block=False, max_memory=4, max_seconds=120)
    print(page.local_url, flush=True)
    page.block_thread()
"""
CAUSAL = "as usual of the encoding"
TEXT = "The ship left the harbour before dawn, and nobody on the pier could say whether it would come back.\n"
WAIT = 240
"""The seconds that a visitor waits for a response."""


@dataclass
class Counts:
    """The responses, durations, and peak memory of a test. A lock protects them from concurrent updates."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    peak: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))

    def add(self, kind: str, answer: str, seconds: float) -> None:
        with self.lock:
            self.answers[f"{kind}: {answer}"] += 1
            self.seconds[kind].append(seconds)


class Visitor:
    """A visitor who opens one session after another until the test ends. KINDS lists the methods that make requests."""

    def __init__(self, address: str, model: str, counts: Counts, seed: int) -> None:
        self.client = httpx.Client(base_url=address, timeout=WAIT)
        self.model, self.counts, self.random, self.number = model, counts, random.Random(seed), 0
        self.name = f"visitor{seed}"
        self.events: dict[str, int] = {}
        """The number of the main event of each trigger."""
        for each in self.client.get("/config").json()["dependencies"]:
            for _, trigger in each["targets"]:
                if each["backend_fn"] and len(each["inputs"]) >= 6:
                    self.events.setdefault(trigger, each["id"])

    def visit(self, end: float) -> None:
        while time.monotonic() < end:
            kind = self.random.choices([*KINDS], [*KINDS.values()])[0]
            self.number += 1
            began = time.monotonic()
            try:
                answer = getattr(self, kind)()
            except Exception as error:
                answer = f"FAULT: {type(error).__name__}: {error}"
            self.counts.add(kind, answer, time.monotonic() - began)
            time.sleep(self.random.uniform(0, 2))

    def draw(self) -> str:
        return self._answer("load", None, False, self._choice(16, 64, 128), self._choice(32, 128, 256), 8, CAUSAL)

    def draw_large(self) -> str:
        return self._answer("load", None, False, 256, 1024, 16, CAUSAL)

    def draw_beyond(self) -> str:
        return self._answer("load", None, False, 10**6, 1024, 16, CAUSAL)

    def measure(self) -> str:
        return self._answer("submit", self.model, "nothing", None, "", TEXT, False)

    def measure_beyond(self) -> str:
        name, text = self._choice(("/nowhere", TEXT), ("x" * 300, TEXT), (self.model, TEXT * 40), (self.model, "x" * 20_000))
        return self._answer("submit", name, "nothing", None, "", text, False)

    def leave(self) -> str:
        """Send a request, then close the connection without waiting for the response."""
        with self._ask("submit", self.model, "nothing", None, "", TEXT * 8, False) as stream:
            lines = stream.iter_lines()  # closes the connection when it is deleted
            next(lines)
            time.sleep(self.random.uniform(0, 3))
        return "left"

    def ask_and_forget(self) -> str:
        """Send a request without opening the connection for the response."""
        self._ask("load", None, False, 256, 1024, 16, CAUSAL)
        return "forgotten"

    def intrude(self) -> str:
        method, path = self._choice(("POST", "upload"), ("GET", "file=/etc/passwd"), ("POST", "queue/join"))
        content = b"x" * 300_000 if method == "POST" else None
        return str(self.client.request(method, f"/gradio_api/{path}", content=content).status_code)

    def _choice(self, *values: Any) -> Any:
        return self.random.choice(values)

    def _ask(self, event: str, *values: Any) -> Any:
        """Join the queue, and return the connection for the response, which is not open yet."""
        session = f"{self.name}_{self.number}"
        body = {"data": [*values], "fn_index": self.events[event], "session_hash": session}
        answer = self.client.post("/gradio_api/queue/join", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        return self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session})

    def _answer(self, event: str, *values: Any) -> str:
        problem = ""
        with self._ask(event, *values) as stream:
            for line in stream.iter_lines():
                message: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: ") else {"msg": ""}
                output = message.get("output") or {}
                problem = _problem(output) or problem
                if message["msg"] == "process_completed":
                    if not message["success"]:
                        return f"error: {output.get('error')}"
                    return f"says: {problem}" if problem else "answered"
                if message["msg"] in ("unexpected_error", "close_stream"):
                    return f"FAULT: {message}"
        return "FAULT: the connection was closed"


KINDS = dict(draw=40, draw_large=4, draw_beyond=4, measure=6, measure_beyond=8, leave=8, ask_and_forget=4, intrude=8)
"""The kinds of requests, and how frequent they are."""


def _problem(output: dict[str, Any]) -> str:
    """The message that the page shows instead of a result. It is in the first component of each event."""
    values = output.get("data") or []
    first = values[0] if values else None
    if isinstance(first, dict) and first.get("visible") and first.get("value"):
        return str(first["value"])
    if isinstance(first, list):  # the difference from the previous output
        return " ".join(str(each[2]) for each in first if each[1] == ["value"] and each[2])
    return ""


def watch(server: psutil.Process, counts: Counts, stop: threading.Event) -> None:
    """Record the peak memory of the server, of its largest child process, and of all processes together.

    Each process counts its proportional share of shared pages.
    """
    while not stop.wait(2):
        sizes = {}
        for process in [server, *server.children(recursive=True)]:
            try:
                sizes[process.pid] = process.memory_full_info().pss / 2**20
            except psutil.Error:
                continue
        of_server = sizes.pop(server.pid, 0.0)
        found = {"server": of_server, "largest child": max(sizes.values(), default=0), "all": of_server + sum(sizes.values())}
        for name, size in found.items():
            counts.peak[name] = max(counts.peak[name], size)
        counts.peak["number of children"] = max(counts.peak["number of children"], len(sizes))


def shortened(answer: str) -> str:
    return re.sub(r"visitor\d+_\d+", "…", re.sub(r"x{20,}", "x…", answer))[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--visitors", type=int, default=10)
    parser.add_argument("--model", required=True, help="local path of a small model")
    arguments = parser.parse_args()
    counts, stop = Counts(), threading.Event()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        server = psutil.Process(running.pid)
        address = running.stdout.readline().strip()  # type: ignore[union-attr]
        visitors = [Visitor(address, arguments.model, counts, seed) for seed in range(arguments.visitors)]
        visitors[0].draw()  # starts the process from which requests are forked
        before = resources(server)
        end = time.monotonic() + 60 * arguments.minutes
        threads = [threading.Thread(target=visitor.visit, args=(end,)) for visitor in visitors]
        threads.append(threading.Thread(target=watch, args=(server, counts, stop)))
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join()
        stop.set()
        threads[-1].join()
        for visitor in visitors:
            visitor.client.close()
        time.sleep(10)  # longer than the server tolerates the absence of a visitor
        after = resources(server)
        running.kill()
        errors.seek(0)
        tracebacks = collections.Counter(re.findall(r"^Traceback.*\n(?: .*\n|\n)*(\S.*)", errors.read(), re.MULTILINE))
    total = sum(counts.answers.values())
    print(f"{len(visitors)} visitors, {arguments.minutes:g} minutes: {total} requests, {tracebacks} tracebacks of the server")
    print("\nseconds by kind of request: number, median, 95th percentile, longest")
    for kind, seconds in sorted(counts.seconds.items()):
        ninety_fifth = statistics.quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
        print(f"  {kind:15} {len(seconds):5} {statistics.median(seconds):7.2f} {ninety_fifth:7.2f} {max(seconds):7.2f}")
    merged: collections.Counter[str] = collections.Counter()
    for answer, number in counts.answers.items():
        merged[shortened(answer)] += number
    for title, found in (("answers", merged), ("tracebacks of the server", tracebacks)):
        print(f"\n{title}", *(f"  {number:5} {text[:150]}" for text, number in sorted(found.items())), sep="\n")
    print("\npeak memory in MiB", *(f"  {name}: {size:.0f}" for name, size in counts.peak.items()), sep="\n")
    for name, *values in zip(("child processes", "threads", "open files"), before, after, strict=True):
        print(f"{name} before and after: {values[0]}, {values[1]}")


def resources(server: psutil.Process) -> tuple[int, int, int]:
    return len(server.children(recursive=True)), server.num_threads(), server.num_fds()


if __name__ == "__main__":
    terminals.set_up()
    main()
