"""Restricts the requests to the server of the page, and tracks which visitors are connected."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

GRACE = 3.0
"""Seconds without a connection after which a visitor has left. A browser joins the queue before it opens the connection."""
MAX_BODY = 2**18
"""The maximum size of a request in bytes."""
STREAM = "/gradio_api/queue/data"
READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|pwa_icon|gradio_api/(info|app_id|startup-events|theme\.css))/?"
    rf"|/(static|assets|svelte)/.*|/pwa_icon/\d+|/gradio_api/heartbeat/\w+|{STREAM}"
)
"""The paths that a Gradio page without files, accounts, and named endpoints reads."""
WRITTEN = re.compile(r"/gradio_api/queue/join")


class Visitors:
    """The connected sessions. Results are sent through a connection that stays open until the last result."""

    def __init__(self) -> None:
        self._connected: Counter[str] = Counter()

    def enter(self, session: str) -> None:
        self._connected[session] += 1

    def leave(self, session: str) -> None:
        self._connected[session] -= 1
        if not self._connected[session]:
            del self._connected[session]

    def left(self, session: str | None) -> Callable[[], bool]:
        """A function that returns whether this session has been disconnected for longer than GRACE."""
        seen = time.monotonic()

        def left() -> bool:
            nonlocal seen
            now = time.monotonic()
            if session in self._connected:
                seen = now
            return now - seen > GRACE

        return left


class Gate:
    """ASGI middleware that accepts only requests of the page itself, and adds connected sessions to `visitors`.

    Uploads, files, proxies, and direct calls get status 403. Inputs that could refer to files or URLs, which Gradio would open,
    get 400. Large requests get 413, and requests that don't declare their size get 411.
    """

    def __init__(self, app: Any, visitors: Visitors) -> None:
        self.app, self.visitors = app, visitors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        if refusal := _refusal(scope):
            return await _answer(send, *refusal)
        if scope["method"] == "POST":
            body = await _body(receive)
            if not _plain(body):
                return await _answer(
                    send, 400, "The inputs of this page are texts, numbers, and choices. Open it in a browser."
                )
            return await self.app(scope, _again(body, receive), send)
        if scope["path"] != STREAM:
            return await self.app(scope, receive, send)
        session = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
        self.visitors.enter(session)
        try:
            await self.app(scope, receive, send)
        finally:
            self.visitors.leave(session)


def _refusal(scope: Any) -> tuple[int, str] | None:
    method, path = scope["method"], scope["path"]
    allowed = {"GET": READ, "HEAD": READ, "POST": WRITTEN}.get(method)
    if allowed is None or not allowed.fullmatch(path):
        return 403, f"This page doesn't offer {method} on this path. Open it in a browser."
    headers = dict(scope["headers"])
    size = headers.get(b"content-length", b"" if method == "POST" or b"transfer-encoding" in headers else b"0")
    if not size.isdigit():
        return 411, "The request doesn't declare its size. Send Content-Length."
    if int(size) > MAX_BODY:
        return 413, f"The request has {int(size):,} bytes. Up to {MAX_BODY:,} are allowed. Enter a shorter text."
    return None


async def _answer(send: Any, status: int, words: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words.encode()})


async def _body(receive: Any) -> bytes:
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


def _plain(body: bytes) -> bool:
    """Whether a request is a JSON object whose inputs are neither objects nor lists."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return False
    inputs = given.get("data") if isinstance(given, dict) else None
    return isinstance(inputs, list) and not any(isinstance(each, dict | list) for each in inputs)


def _again(body: bytes, receive: Any) -> Callable[[], Any]:
    """A `receive` function for a request whose body was already read."""
    messages = [{"type": "http.request", "body": body}]

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again
