"""One commit to the Hub that is made once, whatever the network does: the client repeats neither creating nor committing."""

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
"""How often a request is made which the Hub doesn't answer, or answers with one of TRANSIENT."""
PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds after the first attempt, doubled after each; and the most, whatever the Hub asks for (its windows are 300 s)."""
TRANSIENT = (429, 500, 502, 503, 504)
UNANSWERED = (HTTPError, json.JSONDecodeError)
"""What the client raises of a request that failed: refused, cut off, answered by a proxy's HTML."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class Change:
    """What is to be in a repo. It goes in, whole, on top of the commit `parent`, or not at all.

    revision: a branch or "refs/pr/N"; None: main.
    create_pr: as a pull request against it.
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
        """The commit that holds the change: a new one, unless there is one already.

        Raises:
            HfHubHTTPError: the Hub refused; with status 412, another commit is on top of `parent`.
            ConnectionError: no answer in ATTEMPTS attempts.
        """
        if self.create_pr and (stored := self._stored()):
            return stored
        attempt = 0
        while True:
            attempt += 1
            try:
                # Not upload_folder, which may spread files over several commits.
                return self.api.create_commit(
                    self.repo_id,
                    [*self.deletions, *self.additions],
                    commit_message=self.message,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    parent_commit=self.parent,
                )
            except UNANSWERED as error:
                if (status := _status(error)) not in (None, 412, *TRANSIENT):
                    raise
                # It may have been made, and the answer be lost.
                if stored := self._stored():
                    return stored
                if status == 412:
                    error.append_to_message(
                        f"\nSomebody else has pushed to {self.repo_id} meanwhile, and nothing was committed: look at it, then "
                        "push again"
                    )
                    raise
                _wait(error, attempt)

    def _stored(self) -> CommitInfo | None:
        """The head of the branch, or an open pull request, if the change is in it."""
        places: list[tuple[str | None, str | None]] = [(self.revision, None)]
        if self.create_pr:
            asked = partial(self.api.get_repo_discussions, self.repo_id, discussion_status="open")
            opened = retry(lambda: list(asked(discussion_type="pull_request")))
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


def retry(request: Callable[[], T]) -> T:
    """The answer to a request which may be made more than once. Raises as `Change.commit`."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except UNANSWERED as error:
            _wait(error, attempt)


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _wait(error: Exception, attempt: int) -> None:
    """Pause before the next attempt; raises where none would help, and after the last."""
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
    asked = _asked(error.response.headers) if isinstance(error, HfHubHTTPError) else 0.0
    pause = min(max(PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.0), asked), LONGEST_PAUSE)
    # Not the error's own text, which has whatever a server chose to say.
    said = type(error).__name__ if status is None else f"status {status}"
    logger.warning("the Hub: %s; attempt %d of %d in %.1f s", said, attempt + 1, ATTEMPTS, pause)
    time.sleep(pause)


def _asked(headers: Any) -> float:
    """Seconds for which the Hub asks: its own header, or Retry-After as a number or a date; 0 where there is none."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = headers.get("Retry-After", "").strip()
    try:
        return float(asked) if asked.isdigit() else parsedate_to_datetime(asked).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
