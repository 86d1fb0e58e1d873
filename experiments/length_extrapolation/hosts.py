"""Parse the models of compare.py: entries of `models.HOSTS` with config options, or checkpoints."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import AutoConfig

from experiments.length_extrapolation import models
from experiments.length_extrapolation.models import CHECKPOINT, HOSTS, Encoding, Sizes
from experiments.length_extrapolation.runs import Setup, task_of, test_lengths, training_of
from experiments.length_extrapolation.study import Study, planned
from experiments.length_extrapolation.tasks import ALL

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
        return self.label, self.setup.host.partition(":")[0]


def chosen(given: str | dict[str, Any], sizes: Sizes, common: Setup) -> Chosen:
    """A model by its name, "checkpoint:DIRECTORY", or {"type": name, config option: value}.

    Raises ValueError for an unknown model or config option.
    """
    said = {"type": given} if isinstance(given, str) else dict(given)
    name = said.pop("type", None)
    if isinstance(name, str) and (folder := models.folder_of(name)) is not None:
        if said:
            raise ValueError(f"{', '.join(said)}: a checkpoint has a config of its own; change that in its folder")
        heads = models.heads_of(name)
        weights = models.weights_digest(folder)
        return Chosen(
            name, replace(common, host=name, sizes=None, weights=weights, learning_rate=CHECKPOINT_LEARNING_RATE), heads
        )
    if name not in HOSTS:
        near = difflib.get_close_matches(str(name), HOSTS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{name!r} is no host: {hint}allowed are {', '.join(HOSTS)}, and {CHECKPOINT}FOLDER")
    row = HOSTS[name]
    own: dict[str, Any] = {each.name: said[each.name] for each in fields(Sizes) if each.name in said}
    options = {option: value for option, value in said.items() if option not in own}
    known = AutoConfig.for_model(row.model_type)
    for option in options:
        if option in OF_TASKS or models.is_dropout(option):
            raise ValueError(f"{option!r} can't be given: a study sets it (dropout is 0); leave it out")
        if option not in {*vars(known), *known.attribute_map}:
            near = difflib.get_close_matches(option, [*vars(known), *vars(sizes)], 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"the config of {name} has no {option!r}{hint}")
    setup = replace(
        common, host=name, sizes=replace(sizes, **own), host_options=options or None, learning_rate=row.learning_rate
    )
    label = " ".join([name, *(f"{option}={json.dumps(value)}" for option, value in said.items())])
    try:
        models.stock(name, setup.sizes, 4, 8, 0, row.heads[0], options)
    except Exception as error:  # any error that its config's checks raise
        raise ValueError(f"{label} can't be made with {setup.sizes}: {error}") from None
    return Chosen(label, setup, row.heads)


def at_rate(host: Chosen, rates: Mapping[str, float]) -> Chosen:
    """The model with the learning rate specified for it, if any. Its label takes precedence over its type."""
    given = next((rates[name] for name in host.names if name in rates), None)
    return host if given is None else replace(host, setup=replace(host.setup, learning_rate=given))


def study_of(
    host: Chosen, tasks: list[str], given: dict[str, dict[str, int]], encodings: list[Encoding], seeds: list[int]
) -> Study | None:
    """The study of a model on the tasks that it has a head for. None if there are none.

    given: flag -> task -> number. Raises ValueError for lengths that a task doesn't support.
    """
    trainings = {}
    for task in (task for task in tasks if ALL[task].head in host.heads):
        own = task_of(host.setup.host, task)
        length, steps, batch_size = (given[name].get(task) for name in ("length", "steps", "batch_size"))
        training = training_of(task, length, steps, batch_size, host.setup.host)
        lengths = test_lengths(training, host.setup.multiples)
        if min(training.length, *lengths) < own.shortest:
            raise ValueError(f"{task} has no length {min(training.length, *lengths)}: give a --length from {own.shortest} on")
        if own.longest and max(lengths) > own.longest:
            raise ValueError(
                f"{task} would be tested at {max(lengths)} {own.unit}, and its text for tests has {own.longest}: give a lower "
                "--length, or lower --multiples"
            )
        trainings[task] = training
    return planned(host.setup, trainings, encodings, seeds, host.label) if trainings else None
