"""Requests to the Hub with time limits and exponential backoff.

huggingface_hub shares one client among all threads. This client has no time limit, and sleeps for as long as a server asks.
Two event hooks are added to it, which affect only the requests of a push.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from huggingface_hub import get_session
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status, parse_ratelimit_headers

ATTEMPTS = 6
"""Maximum attempts per request."""
PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before the second attempt, doubled for each further one, and the maximum. The Hub's rate limits are per 300 s."""
TRANSIENT = (429, 500, 502, 503, 504)

T = TypeVar("T")
logger = logging.getLogger(__name__)


class HubSession:
    """The requests of one push.

    timeout: maximum seconds without data while connecting, sending, or receiving.
    deadline: maximum seconds from now for all requests, with retries and pauses.

    Raises ValueError unless both are positive numbers.
    """

    def __init__(self, timeout: float, deadline: float) -> None:
        for name, value in (("timeout", timeout), ("deadline", deadline)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} is {value!r}, but must be a positive number of seconds.")
        self.timeout, self.deadline, self.end = timeout, deadline, time.monotonic() + deadline

    def send(self, request: Callable[[], T], recovered: Callable[[Exception], T | None] = lambda error: None) -> T:
        """The result of a request, retried on timeouts, lost connections, invalid responses, 429, and transient 5xx.

        Args:
            request: calls only huggingface_hub, because any error that huggingface_hub doesn't document counts as an invalid
                response.
            recovered: called with the error of each failed attempt. Its result, if any, replaces that of the request.

        Raises:
            ValueError: the input is malformed.
            HfHubHTTPError: the Hub rejected the request.
            ConnectionError: the Hub gave no valid response in ATTEMPTS attempts.
            TimeoutError: the deadline has passed.
            OSError: a local file can't be read or written.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._result(request)
            except Exception as raised:
                error = _reason(raised)
                if not _is_of_the_hub(error):
                    raise error from error.__cause__
                if (result := recovered(error)) is not None:
                    return result
                self._pause(error, attempt)

    def _result(self, request: Callable[[], T]) -> T:
        """Run the request in a thread that is abandoned at the deadline, because name resolution and hf_xet can't be stopped.

        The hooks then block further requests of that thread.
        """
        for kind, hook in (("request", _limit), ("response", _refuse_to_sleep)):
            if hook not in (hooks := get_session().event_hooks[kind]):
                hooks.append(hook)
        answer: Future[T] = Future()

        def run() -> None:
            LIMITS.set(self)
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        thread = threading.Thread(target=copy_context().run, args=(run,), name="hf_posenc request", daemon=True)
        thread.start()
        try:
            thread.join(min(max(self.left(), 0), threading.TIMEOUT_MAX))
        except BaseException:  # Ctrl-C
            self.end = -math.inf
            raise
        if not answer.done():
            raise self.late()
        return answer.result()

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def late(self) -> TimeoutError:
        return TimeoutError(
            f"The push didn't finish before its deadline of {self.deadline:g} s. Push again with a later one. Uploaded files "
            "aren't sent again, and a commit that was made isn't repeated."
        )

    def _pause(self, error: Exception, attempt: int) -> None:
        """Wait before the next attempt. Raises if this was the last one, or if a retry can't help or would come too late."""
        status = status_of(error)
        if status is not None and status not in TRANSIENT:
            raise error
        if attempt == ATTEMPTS:
            if isinstance(error, HfHubHTTPError):
                again = "push again later, what is uploaded won't be sent twice"
                error.append_to_message(f"\nThat was attempt {ATTEMPTS}: {again}")
                raise error
            said = str(error).encode(errors="backslashreplace").decode()[:200]  # a server controls part of this text
            how = f"({said})" if isinstance(error, HTTPError) else f"as a Hub does ({type(error).__name__}: {said})"
            raise ConnectionError(
                f"The Hub didn't answer {how} in {ATTEMPTS} attempts. Push again later, or set HF_HUB_OFFLINE=1 to write all "
                "files to a local directory."
            ) from error
        requested = _retry_after(error.response.headers) if isinstance(error, HfHubHTTPError) else 0.0
        pause = min(max(PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0), requested), LONGEST_PAUSE)
        if pause >= self.left():
            raise self.late() from error
        # A server controls the error's text, so it isn't logged.
        reason = type(error).__name__ if status is None else f"status {status}"
        logger.warning("The Hub: %s. Attempt %d of %d in %.1f s.", reason, attempt + 1, ATTEMPTS, pause)
        time.sleep(pause)


LIMITS: ContextVar[HubSession | None] = ContextVar("hf_posenc_requests", default=None)
"""The push that a request belongs to."""


def _limit(request: Any) -> None:
    """Hook of the shared client that sets the time limits of a push for its requests."""
    if (push := LIMITS.get()) is not None:
        if push.left() <= 0:
            raise push.late()
        given, longest = request.extensions.get("timeout", {}), min(push.timeout, push.left())
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {kind: min(given.get(kind) or longest, longest) for kind in kinds}


def _refuse_to_sleep(response: Any) -> None:
    """Hook of the shared client that raises where the client would sleep for as long as the server asks.

    `HubSession` sleeps within its limits.
    """
    if LIMITS.get() is not None and response.status_code in TRANSIENT and _retry_after(response.headers) > 0:
        response.read()
        hf_raise_for_status(response)


def status_of(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _reason(error: Exception) -> Exception:
    """The original error, because huggingface_hub wraps those of failed uploads and cache lookups."""
    while isinstance(error, (RuntimeError, LocalEntryNotFoundError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _is_of_the_hub(error: Exception) -> bool:
    """Whether the Hub or the network caused an error, not malformed input or this machine."""
    malformed = isinstance(error, (HFValidationError, Warning)) or isinstance(error.__cause__, BadRequestError)
    # huggingface_hub also raises OSErrors for invalid responses. Those of the operating system have an errno.
    local = isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno is not None)
    return isinstance(error, (HTTPError, ConnectionError)) or not (malformed or local)


def _retry_after(headers: Any) -> float:
    """Seconds to wait from the Hub's rate-limit header, or from Retry-After (a number or a date). 0 without either."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "").strip()
    try:
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0
