"""One commit to the Hub. A commit whose response was lost isn't made twice.

huggingface_hub retries neither the creation of a repository nor a commit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.constants import REGEX_COMMIT_OID
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.sha import git_hash

from hf_posenc.hub.requests import TRANSIENT, HubSession, status_of

LARGE = 2**20
"""Size in bytes from which a text file is uploaded separately, as binary files are."""


class Api(HfApi):
    """The Hub's API, with binary and large files uploaded one by one in the calling thread.

    The time limits of a push apply only to that thread.
    """

    def preupload_lfs_files(self, repo_id: str, additions: Iterable[CommitOperationAdd], **options: Any) -> None:
        texts: list[CommitOperationAdd] = []
        for addition in additions:
            if b"\0" in addition.upload_info.sample or addition.upload_info.size >= LARGE:
                super().preupload_lfs_files(repo_id, [addition], **options)
            else:
                texts.append(addition)
        super().preupload_lfs_files(repo_id, texts, **options)


@dataclass
class PendingCommit:
    """Additions and deletions to be made in a single commit on top of the commit `parent`.

    revision: a branch or "refs/pr/N". None for main.
    create_pr: open a pull request against `revision` instead.
    """

    api: Api
    requests: HubSession
    repo_id: str
    additions: list[CommitOperationAdd]
    deletions: list[CommitOperationDelete]
    message: str
    revision: str | None
    create_pr: bool
    parent: str | None

    def commit(self) -> CommitInfo:
        """Make a commit with the change, or return the existing one.

        Raises:
            HfHubHTTPError: the Hub rejected a request. With status 412, another commit is on top of `parent`.
            ValueError, ConnectionError, TimeoutError, OSError: as `HubSession.send`.
        """
        if self.create_pr and (stored := self._stored()):
            return stored
        return self.requests.send(self._create, self._recovered)

    def _create(self) -> CommitInfo:
        # upload_folder may divide the files among several commits.
        commit = self.api.create_commit(
            self.repo_id,
            [*self.deletions, *self.additions],
            commit_message=self.message,
            revision=self.revision,
            create_pr=self.create_pr,
            parent_commit=self.parent,
        )
        commit_id(commit.oid)
        return commit

    def _recovered(self, error: Exception) -> CommitInfo | None:
        """The commit if it was made although its request failed, because the response may have been lost."""
        status = status_of(error)
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
            opened = self.requests.send(lambda: list(discussions(discussion_type="pull_request")))
            places = [(request.git_reference, request.url) for request in opened if request.title == self.message]
        for place, url in places:
            if sha := self.requests.send(partial(self._head_with_it, place)):
                commit_url = f"{self.api.endpoint}/{self.repo_id}/commit/{sha}"
                return CommitInfo(commit_url, self.message, "", sha, self.api.endpoint, url)
        return None

    def _head_with_it(self, revision: str | None) -> str | None:
        """The ID of the head if it contains the change."""
        head = self.api.model_info(self.repo_id, revision=revision, files_metadata=True)
        there = {file.rfilename: file for file in head.siblings or ()}

        def same(addition: CommitOperationAdd) -> bool:
            file = there.get(addition.path_in_repo)
            if file is None or file.lfs is not None:
                return file is not None and file.lfs.sha256 == addition.upload_info.sha256.hex()
            with addition.as_file() as content:
                return file.blob_id == git_hash(content.read())

        gone = there.keys().isdisjoint(deletion.path_in_repo for deletion in self.deletions)
        return commit_id(head.sha) if gone and all(map(same, self.additions)) else None


def commit_id(given: Any) -> str:
    """A commit ID from a response of the Hub. Raises ValueError for anything else."""
    if not isinstance(given, str) or not REGEX_COMMIT_OID.fullmatch(given):
        raise ValueError(f"{given!r:.80} isn't a commit ID.")
    return given
