"""Needles: a sentence with a fact in a long document, and the question that should retrieve the document with this fact.

Shapes: N queries and documents, in the same order.
"""

import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from evaluation.retrieval import Score, bootstrapped
from evaluation.windows import cut, offsets

BOUNDARY = 512
"""Tokens that a BERT-style model sees, special ones included; facts behind them are scored separately."""
TIE = 1e-5
"""Similarities that differ by no more than this are equal."""
NAMES = [
    "Alba", "Bruno", "Carla", "Dario", "Elena", "Fabio", "Greta", "Hugo", "Irene", "Jonas", "Katia", "Luca", "Marta", "Nadia",
    "Oscar", "Paola", "Quirin", "Rosa", "Silvio", "Tessa",
]  # fmt: skip
OBJECTS = [
    "accordion", "barometer", "candelabra", "dulcimer", "easel", "flute", "globe", "harpoon", "kettle", "lantern", "mandolin",
    "oboe", "parasol", "quilt", "saddle",
]  # fmt: skip
COLOURS = ["amber", "crimson", "ivory", "lilac", "olive", "scarlet", "turquoise", "white"]
PLACES = [
    "attic", "bakery", "cellar", "chapel", "garage", "greenhouse", "hayloft", "kitchen", "library", "museum", "orchard",
    "pantry", "shed", "stable", "tower",
]  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """A document that contains a fact, the question for the fact, and where the fact begins, in tokens."""

    document: str
    question: str
    depth: int


def facts(count: int, choose: random.Random) -> list[tuple[str, str]]:
    """`count` facts and their questions; no two share a name and an object."""
    pairs = choose.sample([(name, thing) for name in NAMES for thing in OBJECTS], count)
    drawn = [(name, choose.choice(COLOURS), thing, choose.choice(PLACES)) for name, thing in pairs]
    return [
        (f"{name} keeps the {colour} {thing} in the {place}.", f"Where is the {colour} {thing} that belongs to {name}?")
        for name, colour, thing, place in drawn
    ]


def needles(
    tokenizer: Any, haystack: str, length: int, candidates: int, choose: random.Random, part: tuple[int, int] = (0, 1)
) -> list[Needle]:
    """Copies of a document, each with another fact, at one random depth (between sentences), within `length` tokens.

    `part` (i, n) draws the depth from the i-th of n equal parts. A fact lies entirely before or entirely behind the end of
    the text that a model of BOUNDARY tokens sees. Raises SystemExit where the facts leave no room for the document.
    """
    drawn = facts(candidates, choose)
    room = max(len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence, _ in drawn)
    if length - room <= tokenizer.num_special_tokens_to_add():
        raise SystemExit(f"--lengths {length}: a fact takes up to {room} tokens here, which leaves none for a document")
    text = cut(tokenizer, haystack, length - room)
    places = offsets(tokenizer, text)
    wanted = places[int((part[0] + choose.random()) / part[1] * len(places))][0]
    ends, last = [end for _, end in places], seen(tokenizer)
    breaks = [0, *(m.end() for m in re.finditer(r"(?<=[.!?:])\s+|\n\s*\n", text) if m.end() <= wanted)]
    depth, place = max((d, p) for p in breaks if not (d := bisect_right(ends, p)) < last < d + room)
    before, after = text[:place], text[place:]
    return [Needle(f"{before}{sentence} {after}", question, depth) for sentence, question in drawn]


def seen(tokenizer: Any) -> int:
    """The number of a text's own tokens that a model of BOUNDARY tokens sees."""
    return BOUNDARY - tokenizer.num_special_tokens_to_add()


def score_needles(groups: list[Tensor], seed: int = 0, samples: int = 10_000) -> Score:
    """The score of similarities `[N, N]` within each group of copies; the right document is on the diagonal.

    Equal similarities count as a draw by lot, so that a model which doesn't see the fact is at the level of chance. The
    95 % intervals are bootstrapped over groups, whose members are not independent.
    """
    hits, reciprocals = [], []
    for similarity in groups:
        right = similarity.diagonal()[:, None]
        above = (similarity > right + TIE).sum(1)
        level = ((similarity - right).abs() <= TIE).sum(1)
        hits.append([float(a == 0) / int(n) for a, n in zip(above, level, strict=True)])
        reciprocals.append(
            [sum(1 / (int(a) + k) for k in range(1, int(n) + 1)) / int(n) for a, n in zip(above, level, strict=True)]
        )
    return bootstrapped(np.asarray(hits), np.asarray(reciprocals), seed, samples)


def chance(candidates: int) -> tuple[float, float]:
    """R@1 and MRR of a random order of so many candidates."""
    return 1 / candidates, sum(1 / k for k in range(1, candidates + 1)) / candidates
