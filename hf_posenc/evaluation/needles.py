"""Needles: a sentence with a fact in a long document, and the question that should retrieve the document with this fact."""

import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.retrieval import cut, offsets

BOUNDARY = 512
"""Tokens that a BERT-style model sees, special ones included; facts behind them are scored separately."""
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
    """Copies of a document, each with another fact, at one random depth, within `length` tokens.

    `part` (i, n) draws the depth from the i-th of n equal parts; the fact goes between two sentences there, or else two words.
    It lies entirely before or entirely behind the end of the text that a model of BOUNDARY tokens sees. Raises SystemExit where
    the facts leave no room for the document.
    """
    drawn = facts(candidates, choose)
    room = max(len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence, _ in drawn)
    if length - room <= tokenizer.num_special_tokens_to_add():
        raise SystemExit(f"--lengths {length} is too short, because a fact takes up to {room} tokens. Choose a larger length.")
    text = cut(tokenizer, haystack, length - room)
    places = offsets(tokenizer, text)
    wanted = places[int((part[0] + choose.random()) / part[1] * len(places))][0]
    ends, last = [end for _, end in places], seen(tokenizer)

    def last_break(pattern: str) -> tuple[int, int]:
        breaks = [0, *(found.end() for found in re.finditer(pattern, text) if found.end() <= wanted)]
        return max((d, p) for p in breaks if not (d := bisect_right(ends, p)) < last < d + room)

    depth, place = last_break(r"(?<=[.!?:])\s+|\n\s*\n")
    if depth < int(part[0] / part[1] * len(places)):  # a table, say, as long as the part
        depth, place = last_break(r"\s+")
    before, after = text[:place], text[place:]
    return [Needle(f"{before}{sentence} {after}", question, depth) for sentence, question in drawn]


def seen(tokenizer: Any) -> int:
    """The number of a text's own tokens that a model of BOUNDARY tokens sees."""
    return BOUNDARY - tokenizer.num_special_tokens_to_add()


def grid(
    tokenizer: Any, haystacks: list[str], length: int, depths: int, candidates: int, seed: int
) -> list[list[list[Needle]]]:
    """For each of `depths` equal parts of a text of `length` tokens, and each haystack: copies with their facts there."""
    return [
        [
            needles(tokenizer, text, length, candidates, random.Random(f"{seed} {length} {part} {number}"), (part, depths))
            for number, text in enumerate(haystacks)
        ]
        for part in range(depths)
    ]


def chance(candidates: int) -> tuple[float, float]:
    """R@1 and MRR of a random order of so many candidates."""
    return 1 / candidates, sum(1 / k for k in range(1, candidates + 1)) / candidates
