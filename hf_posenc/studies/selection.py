"""Parse the models of a study: entries of `models.MODELS` with config options, config files, or checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import AutoConfig

from hf_posenc.encodings import did_you_mean
from hf_posenc.studies import models, tasks
from hf_posenc.studies.models import CHECKPOINT, CONFIG, MODELS, Encoding, Sizes
from hf_posenc.studies.runs import Setup, test_lengths, training_of
from hf_posenc.studies.study import Study, planned

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
OF_TASKS = ("vocab_size", "num_labels", "max_position_embeddings", "n_positions", *TOKENS)
"""Config options that depend on the task."""
CHECKPOINT_LEARNING_RATE = 5e-5
"""The default of a study."""


@dataclass(frozen=True)
class Chosen:
    """A model of a study.

    label: its name in tables and directories.
    setup: the setup of its runs, with its default learning rate.
    """

    label: str
    setup: Setup
    heads: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which settings can refer to the model."""
        return self.label, self.setup.model.partition(":")[0]


def chosen(given: str | dict[str, Any], sizes: Sizes, common: Setup) -> Chosen:
    """A model by its name, "checkpoint:MODEL", "config:FILE", or {"type": name, config option: value}.

    Raises ValueError for an unknown model or config option.
    """
    said = {"type": given} if isinstance(given, str) else dict(given)
    name = said.pop("type", None)
    if isinstance(name, str) and (path := models.directory_of(name) or models.config_of(name)):
        if said:
            raise ValueError(f"{', '.join(said)} can't be given: {path} has its own config. Change it there.")
        heads = models.heads_of(name)
        rate = CHECKPOINT_LEARNING_RATE if models.directory_of(name) else models.CONFIG_LEARNING_RATE
        files = models.files_digest(path)
        if models.config_of(name):
            models.stock(name, None, 4, 8, 0, heads[0])
        return Chosen(name, replace(common, model=name, sizes=None, files=files, learning_rate=rate), heads)
    if name not in MODELS:
        hint = did_you_mean(name, MODELS)
        allowed = f"{', '.join(MODELS)}, {CONFIG}FILE, or {CHECKPOINT}MODEL"
        raise ValueError(f"There is no model {name!r}{hint}. Use {allowed}.")
    kind = MODELS[name]
    own: dict[str, Any] = {each.name: said[each.name] for each in fields(Sizes) if each.name in said}
    options = {option: value for option, value in said.items() if option not in own}
    known = AutoConfig.for_model(kind.model_type)
    for option in options:
        if option in OF_TASKS or models.is_dropout(option):
            raise ValueError(f"{option!r} can't be given: the study sets it (dropout is 0). Omit it.")
        if option not in {*vars(known), *known.attribute_map}:
            hint = did_you_mean(option, [*vars(known), *vars(sizes)])
            raise ValueError(f"The config of {name} has no option {option!r}{hint}.")
    setup = replace(
        common, model=name, sizes=replace(sizes, **own), model_options=options or None, learning_rate=kind.learning_rate
    )
    label = " ".join([name, *(f"{option}={json.dumps(value)}" for option, value in said.items())])
    try:
        models.stock(name, setup.sizes, 4, 8, 0, kind.heads[0], options)
    except Exception as error:  # any error that its config's checks raise
        raise ValueError(f"{label} can't be created with {setup.sizes}: {error}") from None
    return Chosen(label, setup, kind.heads)


def at_rate(model: Chosen, rates: Mapping[str, float]) -> Chosen:
    """The model with the learning rate specified for it, if any. Its label takes precedence over its type."""
    given = next((rates[name] for name in model.names if name in rates), None)
    return model if given is None else replace(model, setup=replace(model.setup, learning_rate=given))


def study_of(
    model: Chosen,
    names: list[str],
    given: dict[str, dict[str, int]],
    encodings: list[Encoding],
    seeds: list[int],
    save: bool = False,
) -> Study | None:
    """The study of a model on the tasks that it has a head for. None if there are none.

    given: flag -> task -> number. save: whether the trained models are saved.

    Raises ValueError for lengths that a task doesn't support, and for invalid rows.
    """
    trainings = {}
    for name in (name for name in names if tasks.get_task(name).head in model.heads):
        own = model.setup.task(name)
        length, steps, batch_size = (given[flag].get(name) for flag in ("length", "steps", "batch_size"))
        training = training_of(own, length, steps, batch_size)
        lengths = test_lengths(training, model.setup.multiples)
        if min(training.length, *lengths) < own.shortest:
            raise ValueError(
                f"The task {name} has no length {min(training.length, *lengths)}. Use a --length of at least {own.shortest}."
            )
        if own.longest and max(lengths) > own.longest:
            raise ValueError(
                f"The task {name} would be tested at {max(lengths):,} {own.unit}, and its text for tests has {own.longest:,}. "
                "Decrease --length or --multiples."
            )
        tasks.check(name, own, sorted({own.shortest, training.length, *lengths}))
        trainings[name] = training
    return planned(model.setup, trainings, encodings, seeds, model.label, save) if trainings else None
