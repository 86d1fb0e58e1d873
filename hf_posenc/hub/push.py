"""push_to_hub uploads weights, config, code, tokenizer, card, evaluation, and figures in one commit."""

import json
import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    is_offline_mode,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc import _compat
from hf_posenc.hub.cards import model_card, updated_card, user_classes
from hf_posenc.hub.eval_results import EVALUATION, checked_evaluation, result_files
from hf_posenc.hub.repository import base_metadata, left_over, merged
from hf_posenc.inspection import inspect
from hf_posenc.serialization import atomic
from hf_posenc.serialization.saved_files import read_json
from hf_posenc.serialization.tokenizer_files import copied

IMAGES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
logger = logging.getLogger(__name__)


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    evaluation: dict[str, Any] | str | os.PathLike[str] | None = None,
    figures: Sequence[str | os.PathLike[str]] = (),
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    save_directory: str | os.PathLike[str] | None = None,
    token: str | None = None,
) -> CommitInfo | Path:
    """Upload a patched or original model, or a `PositionEmbedding`, with all its files and a model card, in one commit.

    If the repository has a README.md, its text is kept, and its metadata are updated. Files of earlier pushes (shards, code,
    evaluation) that this one lacks are deleted. If nothing has changed, no commit is made.

    Offline (HF_HUB_OFFLINE=1), nothing is uploaded. The files are written to a local directory, and a log message contains the
    commands that push them later.

    Args:
        model: a complete Transformers model, not wrapped and without adapters.
        repo_id: "name" or "namespace/name". The repository is created if it doesn't exist.
        tokenizer: uploaded with `model_max_length` set to the model's maximum length. The object itself isn't changed.
        evaluation: the content of evaluation.json, or the path of such a file. The card shows it, and it is uploaded as
            evaluation.json and .eval_results.
        figures: paths of images. They are uploaded next to the card under their file names.
        private: whether a new repository is private. Default: the namespace's setting.
        revision: a branch, or "refs/pr/N" to add a commit to a pull request. Default: main. A missing branch is created from
            main unless `create_pr` is set.
        create_pr: open a pull request against `revision` instead.
        commit_message: default: the model's class and encoding.
        save_directory: local directory for a copy of the files. Offline, the default is the repository's name in the current
            directory.
        token: default: the token of `hf auth login` or HF_TOKEN.

    Returns:
        The commit, or the head of the branch if nothing has changed. Offline, the local directory.

    Raises:
        ValueError: the model is incomplete, an argument is invalid, or no token was found. The upload would contain the token.
            `private` differs from the existing repository. The Hub rejects the card's metadata. In all these cases, nothing was
            uploaded.
        huggingface_hub.errors.HTTPError: the Hub can't be reached or rejected a request, or someone else pushed a commit first.
            Nothing was committed.
        OSError: a local file can't be read or written.
    """
    _refuse_unless_whole(model)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer is {tokenizer!r}. Pass a Transformers tokenizer (AutoTokenizer.from_pretrained).")
    if evaluation is not None:
        evaluation = checked_evaluation(evaluation if isinstance(evaluation, dict) else read_json(Path(evaluation)))
    images = _images(figures)
    validate_repo_id("" if repo_id is None else repo_id)
    offline, token = is_offline_mode(), _checked_token(token or get_token())
    if not (token or offline):
        raise ValueError("No token for the Hub was found. Run `hf auth login`, set HF_TOKEN, or pass token=….")
    report = inspect(model)
    if not isinstance(commit_message, str | None):
        raise ValueError(f"commit_message is {commit_message!r:.80}, but must be a non-empty string.")
    message = commit_message or f"Upload {report.model_class} ({report.encoding})"
    card = partial(model_card, model, evaluation=evaluation, figures=[image.name for image in images])
    keep_in = Path(save_directory or repo_id.rpartition("/")[2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # raised by safetensors if the disk is full
            raise OSError(f"The model can't be saved in {folder}: {error}") from error
        if tokenizer is not None:
            tokenizer = copied(tokenizer)
            tokenizer.model_max_length = report.model_max_length
            tokenizer.save_pretrained(folder)
        texts = {} if evaluation is None else {EVALUATION: json.dumps(evaluation, indent=2), **result_files(evaluation)}
        for path, text in texts.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        for image in images:
            shutil.copyfile(image, folder / image.name)
        if token:
            _refuse_token(token, folder, message)
        if offline or save_directory is not None:
            local = keep_in / "README.md"
            existing = local.read_text(encoding="utf-8") if local.exists() else ""
            _write_card(folder, existing, partial(card, repo_id), base_metadata(model))
            with atomic.replaced(keep_in) as staging:
                shutil.copytree(folder, staging, dirs_exist_ok=True)
        if offline:
            reports = report.submodels.values() or [report]
            modules = sorted({cls.__module__ for each in reports for cls in user_classes(each.encoding)})
            commands = _commands(modules, keep_in, repo_id, private, revision, create_pr)
            logger.warning(
                "Nothing was uploaded (offline). %s is ready in %s. To push it later:\n  %s\n  %s", repo_id, keep_in, *commands
            )
            return keep_in
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        head = api.model_info(repo_id, revision=revision)
        if private is not None and private != head.private:
            raise ValueError(
                f"{repo_id} exists and is {'private' if head.private else 'public'}. Omit private={private}, or change the "
                f"repository first: huggingface_hub.HfApi().update_repo_settings({repo_id!r}, private={private})."
            )

        def read(path: str) -> str:
            file = api.hf_hub_download(repo_id, path, revision=head.sha)
            return Path(file).read_text(encoding="utf-8", errors="replace")

        present = {file.rfilename for file in head.siblings or ()}
        existing = read("README.md") if "README.md" in present else ""
        _write_card(folder, existing, partial(card, repo_id), base_metadata(model, api))
        stale = left_over(present, read, _files(folder))
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(path) for path in stale),
                *(CommitOperationAdd(path, folder / path) for path in _files(folder)),
            ],
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=head.sha,
        )


def _refuse_unless_whole(model: Any) -> None:
    for wrapped in ("_orig_mod", "module"):
        if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel) and wrapped in model._modules:
            raise ValueError(f"The model is wrapped in {type(model).__name__}. Push the inner model, model.{wrapped}.")
    inside = not isinstance(model, PreTrainedModel) or _compat.has_adapter_layers(model)
    if isinstance(model, nn.Module) and getattr(model, "peft_config", None) and inside:
        raise ValueError("The model contains PEFT adapters. Push model.merge_and_unload(), or only the adapters with peft.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is {model!r:.80}. Pass a PreTrainedModel of Transformers.")


def _images(figures: Sequence[str | os.PathLike[str]]) -> list[Path]:
    images = [Path(figure) for figure in figures]
    for image in images:
        if image.suffix.lower() not in IMAGES or not re.fullmatch(r"[\w.-]+", image.name, re.ASCII) or not image.is_file():
            raise ValueError(
                f"figures: {str(image)!r} must be the path of an image ({', '.join(IMAGES)}) whose name has only letters, "
                "digits, and _.-"
            )
    if len({image.name for image in images}) < len(images):
        raise ValueError(f"figures: two of {', '.join(map(str, images))} have the same name. Rename one.")
    return images


def _checked_token(token: str | None) -> str | None:
    # The client's error message would contain the token.
    if token and not re.fullmatch("[!-~]+", token):
        raise ValueError("The token contains a space or a non-ASCII character. Copy it again from your account settings.")
    return token


def _refuse_token(token: str, folder: Path, message: str) -> None:
    """Raises ValueError if the commit message or a file, other than weights, contains the token of the push."""
    contents = {name: (folder / name).read_bytes() for name in _files(folder) if not name.endswith(".safetensors")}
    for name, content in {"commit_message": message.encode(), **contents}.items():
        if token.encode() in content:
            raise ValueError(f"{name} contains your Hub token, so nothing was uploaded. Remove the token, and revoke it.")


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _write_card(folder: Path, existing: str, card: Callable[..., str], base: dict[str, Any]) -> None:
    """Write README.md: the existing card with new metadata, or a new card if it has no text."""
    text = updated_card(existing, lambda kept: card(metadata=merged(base, kept)))
    (folder / "README.md").write_text(text, encoding="utf-8")


def _commands(
    modules: list[str], folder: Path, repo_id: str, private: bool | None, revision: str | None, create_pr: bool
) -> tuple[str, str]:
    """Two commands that push the directory later: with a new card generated by this package, and unchanged."""
    options = [f"--revision={revision}"] * (revision is not None) + ["--create-pr"] * create_pr
    ours = ["--private" if private else "--public"] * (private is not None) + options
    theirs = ["--private"] * bool(private) + options
    return (
        shlex.join(["hf-posenc", *(f"--import={name}" for name in modules), "push", str(folder), repo_id, *ours]),
        shlex.join(["hf", "upload", repo_id, str(folder), ".", *theirs]),
    )
