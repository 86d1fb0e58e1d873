"""What the page measures of models: a checkpoint of this machine or of the Hub, and another one, or the same with another
encoding, beside it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModel

from hf_posenc import diagnostics, plots
from hf_posenc.explorer.forms import Encoding
from hf_posenc.inspection import Report, inspect, without_weights
from hf_posenc.modeling import PosEncModelMixin
from hf_posenc.patching import patch, unpatch
from hf_posenc.plots.drawn import label
from hf_posenc.sources import HostRefused
from hf_posenc.structure import submodels_of
from hf_posenc.tokenizer_files import load_tokenizer

MAX_PARAMETERS = 500_000_000
"""The largest model that a page takes where nothing else is said: 2 GB in float32."""
LENGTH = 128
"""Texts are cut to so many tokens: attention takes memory by the square."""
REPEATED = 32
"""How often a word is repeated where position alone is probed."""


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    label: what figures call it.
    submodel: of a model made of several the path of the one that is meant, which reads texts if one does; else None.
    """

    label: str
    model: Any
    tokenizer: Any
    submodel: str | None

    @property
    def reader(self) -> Any:
        """What reads the texts: of an encoder and a decoder the encoder."""
        model = self.model if self.submodel is None else self.model.get_submodule(self.submodel)
        return model.get_encoder() if model.config.is_encoder_decoder else model

    def report(self) -> Report | str:
        """How it knows word order; of a model whose positions can't be changed, why."""
        try:
            return inspect(self.model)
        except HostRefused as refused:
            if self.submodel is None:
                return str(refused)
            return inspect(self.model, submodel=self.submodel)

    def repeated(self) -> int:
        """How often a word can be repeated, up to REPEATED."""
        report = self.report()
        return min(REPEATED, report.max_length or REPEATED) if isinstance(report, Report) else REPEATED


def load(name: str, max_parameters: int = MAX_PARAMETERS) -> Subject:
    """A model without its head, and its tokenizer, None where it has none. Code that comes with a model isn't run.

    name: a folder, or an id on the Hub. Raises ValueError for a model that is larger than `max_parameters`, before its weights
    are read, or whose weights don't load; OSError where there is none.
    """
    name = os.path.expanduser(name.strip().rstrip("/"))
    if not name:
        raise ValueError("no model is named: give a folder, or an id on the Hub, such as bert-base-uncased")
    if name[0] in "/." and not Path(name).is_dir():
        raise ValueError(f"there is no folder {name}: give one with a model in it, or an id on the Hub")
    count = sum(parameter.numel() for parameter in without_weights(name).parameters())
    if count > max_parameters:
        raise ValueError(
            f"{name} has {count:,} parameters, and this page takes models of up to {max_parameters:,}: take a smaller one, or "
            "start the page with another --max-parameters"
        )
    try:
        model = AutoModel.from_pretrained(name)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights of {name} don't load: {error}") from None
    submodel = next(iter(submodels_of(model)), None)
    return Subject(name.rpartition("/")[2], model.eval(), load_tokenizer(name), submodel)


def with_encoding(subject: Subject, encoding: Encoding) -> Subject:
    """A copy of the model with another encoding, as `patch` makes it: nothing is trained.

    Raises ValueError where it can't have it, as one that is patched and hasn't kept its own positions.
    """
    model = subject.model
    stock = unpatch(model) if isinstance(model, PosEncModelMixin) else model
    patched = patch(stock, encoding, submodel=subject.submodel)
    return replace(subject, label=label(encoding), model=patched.eval())


def told_apart(subjects: list[Subject]) -> list[Subject]:
    """With a number behind labels that are there already: two folders may have one name."""
    labels = [subject.label for subject in subjects]
    return [
        replace(subject, label=f"{subject.label} ({place + 1})") if subject.label in labels[:place] else subject
        for place, subject in enumerate(subjects)
    ]


def measured(subjects: list[Subject], texts: list[str], dark: bool = False) -> Iterator[tuple[str, Any]]:
    """Names and figures, one after the other as they are measured: "probing 0", "probing 1", … what attention does with
    identical words in each model; of all models, if there are texts, "attention" by distance and "receptive_field"; at last
    "numbers", a text.

    Raises ValueError for models that a measure can't be taken of, and for texts that can't be read.
    """
    subjects = told_apart(subjects)
    numbers = []
    for place, subject in enumerate(subjects):
        probing = diagnostics.probing(subject.reader, length=subject.repeated())
        numbers.append(f"{subject.label}\n{probing}")
        yield f"probing {place}", plots.probing(replace(probing, model=subject.label), dark=dark)
    if texts:
        for name, measure, draw in _ON_TEXTS:
            results = {each.label: measure(each.reader, texts, tokenizer=each.tokenizer, length=LENGTH) for each in subjects}
            yield name, draw(results, dark=dark)
        for each in subjects:
            order = diagnostics.order_sensitivity(each.reader, texts, tokenizer=each.tokenizer, length=LENGTH)
            numbers.append(f"{each.label}\n{order}")
    yield "numbers", "\n\n".join(numbers)


_ON_TEXTS: tuple[tuple[str, Any, Any], ...] = (
    ("attention", diagnostics.attention_by_distance, plots.attention),
    ("receptive_field", diagnostics.receptive_field, plots.receptive_field),
)
