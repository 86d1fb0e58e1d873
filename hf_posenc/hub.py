"""What goes to the Hub: weights, config, tokenizer and a card written from the model, in one commit."""

import copy
import hashlib
import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hf_posenc.diagnostics import Report, inspect
from hf_posenc.encodings import encoding_class

TASKS = {
    "AutoModel": ("MODEL_MAPPING", "feature-extraction"),
    "AutoModelForMaskedLM": ("MODEL_FOR_MASKED_LM_MAPPING", "fill-mask"),
    "AutoModelForCausalLM": ("MODEL_FOR_CAUSAL_LM_MAPPING", "text-generation"),
    "AutoModelForSequenceClassification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text-classification"),
    "AutoModelForTokenClassification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "token-classification"),
    "AutoModelForQuestionAnswering": ("MODEL_FOR_QUESTION_ANSWERING_MAPPING", "question-answering"),
}
"""Auto class -> the mapping of what it loads, and the Hub's name for its task where the input is text."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
SIGNATURE = "<!-- hf_posenc.push_to_hub {}: edit this card, and later pushes leave it as it is -->\n"


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Upload a model, patched or not, or a `PositionEmbedding`: weights, config, tokenizer and a card, in one commit.

    A README.md that was written or edited by hand stays as it is. Where nothing has changed, there is no new commit.

    Args:
        repo_id: "name" or "namespace/name"; made if it doesn't exist.
        tokenizer: uploaded with `model_max_length` set to the model's usable length; the object itself isn't changed.
        private: whether a new repo is private; None: the namespace's default.
        token: None: that of `hf auth login` or HF_TOKEN.

    Raises:
        ValueError: before anything is sent: no whole model, no tokenizer, a malformed repo_id, no token. Before any file
            is sent: the repo exists and isn't as `private` asks.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused, or another push came between; nothing was committed.
    """
    _refuse_unless_whole(model)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"a tokenizer of Transformers is needed, not {tokenizer!r}: AutoTokenizer.from_pretrained loads one")
    validate_repo_id("" if repo_id is None else repo_id)
    if not (token or get_token()):
        raise ValueError("there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token=…")
    report, api = inspect(model), HfApi(token=token)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.model_max_length = VERY_LARGE_INTEGER if report.max_length is None else report.max_length
            tokenizer.save_pretrained(folder)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        head = api.model_info(repo_id)
        if private is not None and private != head.private:
            raise ValueError(
                f"{repo_id} exists and is {'private' if head.private else 'public'}: leave private={private} out, or change "
                f"the repo first, huggingface_hub.HfApi().update_repo_settings({repo_id!r}, private={private})"
            )
        present = {file.rfilename for file in head.siblings or ()}
        there = api.hf_hub_download(repo_id, "README.md", revision=head.sha) if "README.md" in present else None
        if (kept := _replaceable(Path(there).read_text(encoding="utf-8") if there else "")) is None:
            logging.getLogger(__name__).warning("%s: its README.md was written by hand and stays as it is", repo_id)
        else:
            card = _card(model, report, repo_id, {**kept, "base_model": _base_model(model, api)})
            (folder / "README.md").write_text(card, encoding="utf-8")
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        # An older model.safetensors would be loaded instead of new shards.
        stale = sorted(file for file in present if WEIGHTS.fullmatch(file) and file not in files)
        # Not upload_folder, which may spread files over several commits.
        return api.create_commit(
            repo_id,
            [*map(CommitOperationDelete, stale), *(CommitOperationAdd(file, path) for file, path in files.items())],
            commit_message=commit_message or f"Upload {report.model_class} ({report.encoding})",
            parent_commit=head.sha,
        )


def _refuse_unless_whole(model: Any) -> None:
    for inside in ("_orig_mod", "module"):
        if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel) and inside in model._modules:
            raise ValueError(f"the model is wrapped in {type(model).__name__}: push what is inside, model.{inside}")
    if isinstance(model, nn.Module) and getattr(model, "peft_config", None):
        raise ValueError("the model has PEFT adapters in it: push model.merge_and_unload(), or the adapters alone with peft")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a PreTrainedModel of Transformers is needed, not {model!r:.80}")


def _base_model(model: PreTrainedModel, api: HfApi) -> str | None:
    """The host's id, if the Hub knows it: the name of a local folder may look like one."""
    host = (getattr(model.config, "position_encoding", None) or {}).get("host")
    try:
        return host["name_or_path"] if host and host["name_or_path"] and api.repo_exists(host["name_or_path"]) else None
    except HFValidationError:
        return None


def _replaceable(card: str) -> dict[str, Any] | None:
    """The metadata to keep of a card in which nobody's words are: no card, ours as it was made, a licence and the like
    alone. None for a card that was written by hand."""
    own = card == _signed(card.rpartition("<!--")[0])
    if not own and REGEX_YAML_BLOCK.sub("", card, count=1).strip():
        return None
    metadata = ModelCard(card).data.to_dict() if card else {}
    kept = {key: metadata[key] for key in metadata if key not in ("base_model", "library_name", "pipeline_tag", "tags")}
    return kept if own or kept == metadata else None


def _signed(card: str) -> str:
    return card + SIGNATURE.format(hashlib.sha256(card.encode()).hexdigest()[:16])


def _card(model: PreTrainedModel, report: Report, repo_id: str, metadata: dict[str, Any]) -> str:
    found = {auto: getattr(transformers, mapping).get(type(model.config), None) for auto, (mapping, _) in TASKS.items()}
    auto = next((auto for auto, kind in found.items() if kind is type(model)), None)
    task = TASKS[auto][1] if auto and model.main_input_name == "input_ids" else None
    encodings = {name: encoding_class(name) for name in report.encoding.split("+")}
    data = ModelCardData(**metadata, library_name="transformers", pipeline_tag=task, tags=["hf-posenc", *encodings])
    lines = [f"# {repo_id.rpartition('/')[2]}", "", f"`{report.model_class}` with", ""]
    for name, encoding in encodings.items():
        options = report.options if len(encodings) == 1 else report.options.get(name, {})
        papers = re.findall(r"https?://[^\s,]+", (sys.modules[encoding.__module__].__doc__ or "").partition("\n")[0])
        said = [f"`{key}={value!r}`" for key, value in options.items()] + [f"<{paper}>" for paper in papers]
        if not encoding.__module__.startswith("hf_posenc."):
            said.append(f"its class `{encoding.__name__}` is not part of hf-posenc: import or define it before loading")
        lines.append(f"- position encoding `{name}`" + (f": {', '.join(said)}" if said else ""))
    for verb, paths in report.enters.items():
        lines.append(f"- `{verb}` at `{paths[0]}`" + (f" and {len(paths) - 1} more" if paths[1:] else ""))
    lines.append(f"- longest input: {'no limit' if report.max_length is None else f'{report.max_length} tokens'}")
    lines += [f"- ignored: {note}" for note in report.ignored]
    if report.host_kept:
        lines.append("- `hf_posenc.unpatch(model)` brings the base model's own positions back")
    package = type(model).__module__.partition(".")[0]
    if package == "hf_posenc":
        lines += ["", "```bash", "pip install hf-posenc", "```"]
    imports = ["import hf_posenc  # Transformers then knows its models"] if package == "hf_posenc" and auto else []
    imports.append(f"from {'transformers' if auto else package} import {auto or report.model_class}")
    load = f'model = {auto or report.model_class}.from_pretrained("{repo_id}")'
    return _signed("\n".join(["---", data.to_yaml(), "---", "", *lines, "", "```python", *imports, "", load, "```", "", ""]))
