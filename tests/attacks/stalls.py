"""A push to a Hub that stops answering, at each of its requests: it ends in time, by an error that it names."""

import functools
import inspect
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub

import hf_posenc
from attacks.cases import Case, Comparison, Hanging, Refused, Settings, new_folder
from attacks.subjects import patched, stock
from hub_server import TOKEN, USER, Commit, Fault, Hub, Repo, serve

PATIENCE, DEADLINE, LIMIT = 1.0, 4.0, 12.0
"""Seconds that one request may take, that a push may take, and after which it counts as hanging."""
DOCUMENTED = (ValueError, ConnectionError, TimeoutError, huggingface_hub.errors.HfHubHTTPError)


def cases(settings: Settings) -> Iterator[Case]:
    ways: dict[str, Callable[..., None]] = {"no answer": silent, "half an answer": half, "a byte at a time": drip}
    for attack, act in ways.items():
        for step in (step for step in steps() if act is silent or not step.startswith("HEAD")):
            run = functools.partial(pushed, step, act)
            yield Case(attack, "hub", step, run, limit=LIMIT + 10)


def silent(handler: Any, answer: Callable[[], None]) -> None:
    handler.server.over.wait(LIMIT)
    handler.close_connection = True


def half(handler: Any, answer: Callable[[], None]) -> None:
    """Says that more will come, which doesn't."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"')
    silent(handler, answer)


def drip(handler: Any, answer: Callable[[], None]) -> None:
    """Never silent for long, never done."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(int(LIMIT * 4)):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        if handler.server.over.wait(0.25):
            break
    handler.close_connection = True


@functools.cache
def model() -> Any:
    return patched(stock("bert"), "alibi")


@functools.cache
def steps() -> tuple[str, ...]:
    """The requests of a push that goes well, as patterns: each once."""
    with hub() as server:
        result = in_a_child(server, 10 * LIMIT)
        if isinstance(result, BaseException):
            raise result
        ours = (request for request in server.log if re.search(f"/{USER}/|/repos/|yaml", request))  # the client asks for others
        return tuple(dict.fromkeys(re.sub("[0-9a-f]{40,}", "[0-9a-f]+", request) for request in ours))


def hub() -> Any:
    """A Hub with an earlier push in it, whose card is to be read."""
    manager = serve()

    class Prepared:
        def __enter__(self) -> Hub:
            server = manager.__enter__()
            server.repos[f"{USER}/model"] = Repo(commits=[Commit("old", {"README.md": b"---\nlicense: mit\n---\n"})])
            server.over = threading.Event()
            return server

        def __exit__(self, *error: Any) -> None:
            manager.__exit__(*error)

    return Prepared()


def pushed(step: str, act: Callable[..., None]) -> Iterator[Comparison]:
    with hub() as server:
        server.faults.append(Fault(step, act, times=100))
        try:
            begin, result = time.monotonic(), in_a_child(server, LIMIT)
        finally:
            server.over.set()
        if isinstance(result, DOCUMENTED):
            raise Refused(f"{type(result).__name__} after {time.monotonic() - begin:.0f} s: {result}")
        if isinstance(result, BaseException):
            raise result
        yield time.monotonic() - begin < LIMIT, True
    yield result, server.repos[f"{USER}/model"].commits[-1].sha


def in_a_child(server: Hub, limit: float) -> Any:
    """What a push gives or raises, in a process that can be killed. Raises Hanging if it has to be."""
    model()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, pickle.dumps(push(server.endpoint)))
        finally:
            os._exit(0)
    os.close(writing)
    ended = threading.Timer(limit, os.kill, (child, signal.SIGKILL))
    ended.start()
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    ended.cancel()
    os.waitpid(child, 0)
    if not said:
        raise Hanging
    return pickle.loads(said)


def push(endpoint: str) -> Any:
    constants = huggingface_hub.constants  # of this process alone, which ends after the push
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_CACHE = endpoint, True, new_folder()
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    known = inspect.signature(hf_posenc.push_to_hub).parameters
    patience: dict[str, Any] = {name: value for name, value in (("timeout", PATIENCE), ("deadline", DEADLINE)) if name in known}
    try:
        return hf_posenc.push_to_hub(model(), f"{USER}/model", token=TOKEN, **patience).oid
    except Exception as error:
        return error
