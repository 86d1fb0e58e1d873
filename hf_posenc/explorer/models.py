"""The page's measurements of models: one checkpoint, or a comparison with another checkpoint or encoding."""

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, model_info
from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoModel

from hf_posenc import plots  # noqa: F401  # registers the figures
from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.architectures.detection import submodels_of
from hf_posenc.conversion.patching import patch, unpatch
from hf_posenc.diagnostics.encoding_input import label
from hf_posenc.diagnostics.registry import DIAGNOSTICS, FIGURES, Diagnostic
from hf_posenc.explorer.budget import MAX_LAYERS, Budget, Limits, Refused, checked_field, checked_texts
from hf_posenc.explorer.encodings import picture
from hf_posenc.explorer.option_fields import Encoding
from hf_posenc.inspection import Report, inspect, without_weights
from hf_posenc.modeling.derived import PosEncModelMixin
from hf_posenc.serialization.saved_files import explained, read_config
from hf_posenc.serialization.tokenizer_files import load_tokenizer

LENGTH = 128
"""Maximum length of a text in tokens. The memory of attention grows quadratically with it."""
REPEATED = 32
"""Length of the inputs of diagnostics without texts."""
WEIGHTS = (r"model\.safetensors", r"model-\d+-of-\d+\.safetensors", r"pytorch_model\.bin", r"pytorch_model-\d+-of-\d+\.bin")
"""Patterns of weight files on the Hub, in the order of preference."""
OTHER_FILES = r"(?!adapter_)[^/]+\.(json|txt|model)"
"""Pattern of the other files of a model and its tokenizer. An adapter's config refers to another model, so it is excluded."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model to measure.

    label: its name in figures.
    submodel: the path of the submodel of a composite model that is measured, if possible one that reads texts. None for other
        models.
    """

    label: str
    model: Any
    tokenizer: Any
    submodel: str | None

    @property
    def reader(self) -> Any:
        """The model that reads the texts. For an encoder-decoder, its encoder."""
        model = self.model if self.submodel is None else self.model.get_submodule(self.submodel)
        return model.get_encoder() if model.config.is_encoder_decoder else model

    def report(self) -> Report | str:
        """The report of `inspect`, or why the model isn't supported."""
        try:
            return inspect(self.model)
        except UnsupportedModelError as refused:
            if self.submodel is None:
                return str(refused)
            return inspect(self.model, submodel=self.submodel)

    def measure(self, diagnostic: Diagnostic, texts: list[str]) -> Any:
        if diagnostic.needs == "texts":
            return diagnostic.measure(self.reader, texts, tokenizer=self.tokenizer, length=LENGTH)
        report = self.report()
        limit = report.max_length if isinstance(report, Report) else None
        return diagnostic.measure(self.reader, length=min(REPEATED, limit or REPEATED))


def shown(names: list[str], encoding: Encoding | None, written: str, dark: bool, limits: Limits) -> Iterator[tuple[str, Any]]:
    """Yield the page's content for models: "reports", the figures of `measured` as data URLs, and "numbers".

    names: one or two models.
    encoding: if given, the first model is also measured with this encoding.
    written: the texts, one per line.

    Raises ValueError before a model is built if the request exceeds a limit or a model doesn't exist.
    """
    texts = checked_texts(written)
    names = [checked_field("The model", name) for name in names]
    places = {name: _fetched(name, limits.model) if limits.hub_only else _local(name) for name in names}
    try:
        check_size(list(places.values()), limits)
        subjects = [replace(load(places[name]), label=name.rstrip("/").rpartition("/")[2]) for name in names]
        if encoding is not None:
            subjects.append(with_encoding(subjects[0], encoding))
        subjects = told_apart(subjects)
        yield "reports", "\n\n".join(f"{each.label}\n{each.report()}" for each in subjects)
        for what, found in measured(subjects, texts, dark):
            yield what, found if what == "numbers" else picture(found)
    except (ValueError, OSError, ImportError) as error:
        words = str(error)
        for name, place in places.items():
            words = words.replace(place, name)
        raise Refused(words) from error


def _local(name: str) -> str:
    """The path or Hub ID of a model. Raises ValueError for a missing directory."""
    name = os.path.expanduser(name.rstrip("/"))
    if not name:
        raise ValueError("No model is named. Enter a local path or a Hub ID, such as bert-base-uncased.")
    if name[0] in "/." and not Path(name).is_dir():
        raise ValueError(f"The directory {name} doesn't exist. Enter the path of a model, or a Hub ID.")
    return name


def _fetched(name: str, budget: Budget) -> str:
    """Download a public model from the Hub to a temporary directory, without this machine's account.

    The total size is checked first. Afterwards the process is offline, so that no file can refer to other repositories.

    Raises ValueError for anything except the ID of a public model.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        name = ""
    if not name or name[0] in "._-":
        raise ValueError("This page accepts Hub IDs only. Enter the ID of a public model, such as bert-base-uncased.")
    try:
        info = model_info(name, files_metadata=True, token=False)
    except RepositoryNotFoundError:
        raise ValueError(f"The Hub has no public model {name!r}. Check the ID on https://huggingface.co/models.") from None
    except (HTTPError, OSError) as error:
        raise ValueError(f"The Hub doesn't provide {name!r} ({type(error).__name__}). Try again, or choose another.") from None
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    weights = next(filter(None, ([each for each in sizes if re.fullmatch(kind, each)] for kind in WEIGHTS)), [])
    files = weights + [each for each in sizes if re.fullmatch(OTHER_FILES, each)]
    budget.check(f"The files of {name}", sum(sizes[each] for each in files), "Choose a smaller model.")
    folder = tempfile.mkdtemp()
    try:
        for each in files:
            hf_hub_download(name, each, revision=info.sha, local_dir=folder, token=False)
    except (HTTPError, OSError) as error:
        raise ValueError(f"The download of {name!r} failed ({type(error).__name__}). Try again.") from None
    constants.HF_HUB_OFFLINE = True
    return folder


def check_size(names: list[str], limits: Limits) -> None:
    """Raises ValueError for models with more parameters, layers, or bytes than the limits allow. It reads only configs."""
    needed = 0
    for name in names:
        _check_layers(name, read_config(name))
        model = without_weights(name)
        count = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if count > limits.max_parameters:
            raise Refused(
                f"{name} has {count:,} parameters and buffer values. This page accepts models of up to "
                f"{limits.max_parameters:,}. Choose a smaller model, or start the page with a larger --max-parameters."
            )
        needed += 2 * 4 * count + _activations(model)  # While loading, the model and the file are in memory, in float32.
        limits.model.check(f"Measuring {' and '.join(names)}", needed, "Choose a smaller model.")


def _check_layers(name: str, config: Any) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _check_layers(name, value)
        elif "layer" in key and type(value) is int and value > MAX_LAYERS:
            raise Refused(f"{name} has {key}={value:,}. This page accepts up to {MAX_LAYERS}. Choose a smaller model.")


def _activations(model: Any) -> int:
    """An upper estimate of the bytes for one forward and backward pass over LENGTH tokens in float32, and for float64 copies of
    the attention weights. See Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198."""
    config = model.config.get_text_config()
    layers, width, heads = (
        getattr(config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    return layers * (68 * LENGTH * width + (10 + 3 * 8) * heads * LENGTH**2)


def load(name: str) -> MeasuredModel:
    """Load a model without its head, and its tokenizer if it has one. Custom code in the repository isn't executed.

    name: a local path, or a Hub ID.

    Raises ValueError if the weights can't be loaded, and OSError if the model doesn't exist.
    """
    with explained(f"the weights of {name}"):
        model = AutoModel.from_pretrained(name, trust_remote_code=False)
    submodel = next(iter(submodels_of(model)), None)
    return MeasuredModel(name.rpartition("/")[2], model.eval(), load_tokenizer(name), submodel)


def with_encoding(subject: MeasuredModel, encoding: Encoding) -> MeasuredModel:
    """A copy of the model with another encoding, patched only, without training.

    Raises ValueError for a model that doesn't support it, such as a patched model without its original positions.
    """
    model = subject.model
    stock = unpatch(model) if isinstance(model, PosEncModelMixin) else model
    patched = patch(stock, encoding, submodel=subject.submodel)
    return replace(subject, label=label(encoding), model=patched.eval())


def told_apart(subjects: list[MeasuredModel]) -> list[MeasuredModel]:
    """The models with a number appended to repeated labels, because two directories may have the same name."""
    labels = [subject.label for subject in subjects]
    return [
        replace(subject, label=f"{subject.label} ({place + 1})") if subject.label in labels[:place] else subject
        for place, subject in enumerate(subjects)
    ]


def measured(subjects: list[MeasuredModel], texts: list[str], dark: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and a figure as they are measured, and finally "numbers" with a text.

    A figure of a single model has the name "name 0", "name 1", ….

    Raises ValueError for models and texts that can't be measured.
    """
    subjects = told_apart(subjects)
    needed = ("model", "texts") if texts else ("model",)
    numbers: list[str] = []
    for diagnostic in sorted((each for each in DIAGNOSTICS.values() if each.on_page), key=lambda each: each.needs):
        if diagnostic.needs not in needed:
            continue
        results = {each.label: replace(each.measure(diagnostic, texts), model=each.label) for each in subjects}
        numbers += map(str, results.values())
        for name, figure in FIGURES.items():
            if figure.measure is not diagnostic.measure or not figure.caption:
                continue
            if figure.several:
                yield name, figure.draw(results, dark=dark)
            else:
                yield from ((f"{name} {place}", figure.draw(each, dark=dark)) for place, each in enumerate(results.values()))
    yield "numbers", "\n\n".join(numbers)
