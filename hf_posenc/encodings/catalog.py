"""The contents of the tables of encodings in `hf-posenc list` and docs/reference/encodings.md."""

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.construction import with_values
from hf_posenc.encodings.frequency_rules import ALL
from hf_posenc.encodings.options import described
from hf_posenc.encodings.registry import encoding_class, list_encodings

BERT_BASE = Geometry(768, 12, 64, max_length=512, trained_length=512)
"""The sizes with which parameters are counted."""
ARXIV = "https://arxiv.org/abs/"
RULES = frozenset(option for options in ALL.values() for option in options)
"""Options that belong to a value of `rope_type`."""


@dataclass(frozen=True)
class Entry:
    """Facts about one encoding.

    options: default, if any, and allowed values of each option.
    learned: whether it has trained parameters: "yes", "no", or the options that add some, such as `slopes='learned'`.
    relative: whether it depends only on distances between tokens.
    any_length: whether it is defined at all positions: "yes", "no" (up to `max_length`), or "in encoders".
    stacks: "all", "decoders" if it requires causal attention, or "images" if it requires rows and columns of patches.
    parameters: number of parameters with default options and BERT-base's sizes (512 positions). per_layer: in each layer.
    """

    title: str
    aliases: dict[str, dict[str, Any]]
    mechanisms: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    learned: str
    relative: bool
    any_length: str
    stacks: str
    parameters: int
    per_layer: bool
    papers: tuple[str, ...]

    def facts(self) -> dict[str, str]:
        """The cells of a table, by column heading."""
        count = f"{self.parameters:,}"
        return {
            "mechanism": ", ".join(self.mechanisms) or "–",
            "learned": self.learned,
            "relative": "yes" if self.relative else "no",
            "any length": self.any_length,
            "models": self.stacks,
            "parameters": f"{count} a layer" if self.parameters and self.per_layer else count,
        }


def entry(kind: type[PositionEncoding]) -> Entry:
    geometry = _fitting(kind)
    default = _parameters(kind, geometry, {})
    bounded = [kind.needs_max_length(replace(geometry, is_causal=causal)) for causal in (False, True)]
    return Entry(
        title=kind.title,
        aliases=kind.aliases,
        mechanisms=kind.mechanisms(),
        options={
            option: ({"default": getattr(kind, option)} if hasattr(kind, option) else {}) | {"allowed": described(annotation)}
            for option, annotation in kind.option_types().items()
        },
        learned="yes" if default else " or ".join(_ways_to_learn(kind, geometry)) or "no",
        relative=kind.is_relative(),
        any_length="no" if all(bounded) else "in encoders" if any(bounded) else "yes",
        stacks="decoders" if kind.causal_only else "images" if kind.axes > 1 else "all",
        parameters=default or 0,
        per_layer=kind.per_layer,
        papers=kind.paper,
    )


def entries() -> dict[str, Entry]:
    """All registered encodings, by name."""
    return {name: entry(kind) for name, kind in list_encodings().items()}


def conflicts(names: Collection[str]) -> dict[tuple[str, str], str]:
    """The pairs of these encodings that can't be combined in one layer, with the reason."""
    found = {}
    for one, other in itertools.combinations(names, 2):
        kinds = encoding_class(one), encoding_class(other)
        if why := kinds[0].conflict(kinds[1]) or kinds[1].conflict(kinds[0]):
            found[one, other] = why
    return found


def as_markdown() -> str:
    """The tables of docs/reference/encodings.md, with the encodings of this package."""
    own = {name: entry(kind) for name, kind in list_encodings().items() if kind.__module__.startswith("hf_posenc.")}
    headings = ["name", *next(iter(own.values())).facts(), "options", "paper"]
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for name, row in own.items():
        names = ", ".join(f"`{each}`" for each in (name, *row.aliases))
        options = "; ".join(f"`{_written(option, said)}`" for option, said in row.options.items() if option not in RULES)
        options += "; and those of `rope_type`" if RULES & row.options.keys() else ""
        papers = ", ".join(
            f"[{paper.removeprefix('https://').removeprefix('arxiv.org/abs/')}]({paper})" for paper in row.papers
        )
        facts = [f"`{fact}`" if "=" in fact else fact for fact in row.facts().values()]
        lines.append(f"| {' | '.join([f'{names}: {row.title}', *facts, options or '–', papers or '–'])} |")
    found, pairs = conflicts(own), math.comb(len(own), 2)
    lines += ["", f"You can combine any two encodings in one layer, except {len(found)} of {pairs} pairs:", ""]
    lines += ["| encoding | can't be combined with |", "|---|---|"]
    while found:  # the encoding with the most conflicts first, so that each pair appears once
        name = max(own, key=lambda each: sum(each in pair for pair in found))
        others = [other for pair in found for other in pair if name in pair and other != name]
        lines.append(f"| `{name}` | {', '.join(f'`{other}`' for other in others)} |")
        found = {pair: why for pair, why in found.items() if name not in pair}
    return "\n".join(lines) + "\n"


def _written(option: str, said: dict[str, Any]) -> str:
    return option if said.get("default") is None else f"{option}={said['default']!r}"


def _ways_to_learn(kind: type[PositionEncoding], geometry: Geometry) -> list[str]:
    """The single options that add parameters to an encoding without any."""
    return [
        f"{option}={value!r}"
        for option, annotation in kind.option_types().items()
        for value in named_values(annotation)
        if _parameters(kind, geometry, {option: value})
    ]


def _fitting(kind: type[PositionEncoding]) -> Geometry:
    return replace(BERT_BASE, is_causal=kind.causal_only, axes=kind.axes)


def named_values(annotation: Any) -> list[Any]:
    """The values that an annotation lists."""
    if get_origin(annotation) is Annotated:
        return named_values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [False, True]
    return [value for inner in get_args(annotation) for value in named_values(inner)]


def _parameters(kind: type[PositionEncoding], geometry: Geometry, options: dict[str, Any]) -> int | None:
    """Number of trained parameters with these options. None if they need further options."""

    def built() -> list[PositionEncoding | None]:
        return [kind(geometry, **kind.checked_options(options))]

    try:
        try:
            with torch.device("meta"):
                (made,) = built()
        except (RuntimeError, NotImplementedError):  # the class reads values of tensors
            (made,) = with_values(built)
    except ValueError:
        return None
    assert made is not None
    return sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
