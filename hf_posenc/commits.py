"""Commits to the Hub with retries. A commit whose reply was lost isn't made twice.

The client itself retries neither the creation of a repo nor a commit.
"""

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import parse_ratelimit_headers
from huggingface_hub.utils.sha import git_hash

ATTEMPTS = 6
"""Maximum attempts per request."""
PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before the second attempt, doubled after each; and the maximum, since the Hub's rate limits are per 300 s."""
TRANSIENT = (429, 500, 502, 503, 504)
UNANSWERED = (HTTPError, json.JSONDecodeError)
"""Raised by the client if a request was refused, cut off, or answered with a proxy's HTML."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class Change:
    """Additions and deletions to be made in a single commit on top of the commit `parent`.

    revision: a branch or "refs/pr/N"; None: main.
    create_pr: open a pull request against `revision` instead.
    """

    api: HfApi
    repo_id: str
    additions: list[CommitOperationAdd]
    deletions: list[CommitOperationDelete]
    message: str
    revision: str | None
    create_pr: bool
    parent: str | None

    def commit(self) -> CommitInfo:
        """A new commit with the change, or the existing one.

        Raises:
            HfHubHTTPError: the Hub refused; with status 412, another commit is on top of `parent`.
            ConnectionError: no answer in ATTEMPTS attempts.
        """
        if self.create_pr and (stored := self._stored()):
            return stored
        return retry(self._create, self._recovered)

    def _create(self) -> CommitInfo:
        # Not upload_folder, which may spread files over several commits.
        return self.api.create_commit(
            self.repo_id,
            [*self.deletions, *self.additions],
            commit_message=self.message,
            revision=self.revision,
            create_pr=self.create_pr,
            parent_commit=self.parent,
        )

    def _recovered(self, error: Exception) -> CommitInfo | None:
        """The commit if it was made although its request failed: the reply may be lost."""
        status = _status(error)
        if status not in (None, 412, *TRANSIENT):
            return None
        stored = self._stored()
        if stored is None and isinstance(error, HfHubHTTPError) and status == 412:
            error.append_to_message(
                f"\nSomebody else has pushed to {self.repo_id} meanwhile, and nothing was committed: look at it, then "
                "push again"
            )
        return stored

    def _stored(self) -> CommitInfo | None:
        """The head of the branch, or of an open pull request, if it contains the change."""
        places: list[tuple[str | None, str | None]] = [(self.revision, None)]
        if self.create_pr:
            discussions = partial(self.api.get_repo_discussions, self.repo_id, discussion_status="open")
            opened = retry(lambda: list(discussions(discussion_type="pull_request")))
            places = [(request.git_reference, request.url) for request in opened if request.title == self.message]
        for place, url in places:
            head = retry(partial(self.api.model_info, self.repo_id, revision=place, files_metadata=True))
            if self._is_in(head):
                commit_url = f"{self.api.endpoint}/{self.repo_id}/commit/{head.sha}"
                return CommitInfo(commit_url, self.message, "", str(head.sha), self.api.endpoint, url)
        return None

    def _is_in(self, head: ModelInfo) -> bool:
        there = {file.rfilename: file for file in head.siblings or ()}

        def same(addition: CommitOperationAdd) -> bool:
            file = there.get(addition.path_in_repo)
            if file is None or file.lfs is not None:
                return file is not None and file.lfs.sha256 == addition.upload_info.sha256.hex()
            with addition.as_file() as content:
                return file.blob_id == git_hash(content.read())

        return there.keys().isdisjoint(gone.path_in_repo for gone in self.deletions) and all(map(same, self.additions))


def retry(request: Callable[[], T], recovered: Callable[[Exception], T | None] = lambda error: None) -> T:
    """The result of a request, retried with exponential backoff on timeouts, 429 and 5xx.

    Args:
        recovered: called with the error of each failed attempt; its result, if any, replaces that of the request.

    Raises:
        HfHubHTTPError: the Hub refused.
        ConnectionError: no answer in ATTEMPTS attempts.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except UNANSWERED as error:
            if (result := recovered(error)) is not None:
                return result
            _wait(error, attempt)


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _wait(error: Exception, attempt: int) -> None:
    """Pauses before the next attempt. Raises after the last one, and if a retry can't help."""
    status = _status(error)
    if status is not None and status not in TRANSIENT:
        raise error
    if attempt == ATTEMPTS:
        if isinstance(error, HfHubHTTPError):
            error.append_to_message(f"\nThat was attempt {ATTEMPTS}: push again later, what is uploaded won't be sent twice")
            raise error
        raise ConnectionError(
            f"the Hub doesn't answer ({error}), in {ATTEMPTS} attempts: push again later, or set HF_HUB_OFFLINE=1 to have "
            "everything written to a folder"
        ) from error
    requested = _retry_after(error.response.headers) if isinstance(error, HfHubHTTPError) else 0.0
    pause = min(max(PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0), requested), LONGEST_PAUSE)
    # Without the error's text, which a server chooses.
    reason = type(error).__name__ if status is None else f"status {status}"
    logger.warning("the Hub: %s; attempt %d of %d in %.1f s", reason, attempt + 1, ATTEMPTS, pause)
    time.sleep(pause)


def _retry_after(headers: Any) -> float:
    """Seconds to wait by the Hub's rate-limit header, else by Retry-After (a number or a date); 0 without either."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "").strip()
    try:
        return float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
