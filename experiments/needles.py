"""Needle in a haystack: a fact is inserted into a long document, and its question should retrieve that document."""

import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.retrieval import cut, offsets

BOUNDARY = 512
"""Maximum length of a BERT-style model, including special tokens. Facts beyond it are scored separately."""
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
    """A document that contains a fact, the question for the fact, and the number of tokens before the fact."""

    document: str
    question: str
    depth: int


def facts(count: int, choose: random.Random) -> list[tuple[str, str]]:
    """`count` facts and their questions. No two have the same name and object."""
    pairs = choose.sample([(name, thing) for name in NAMES for thing in OBJECTS], count)
    drawn = [(name, choose.choice(COLOURS), thing, choose.choice(PLACES)) for name, thing in pairs]
    return [
        (f"{name} keeps the {colour} {thing} in the {place}.", f"Where is the {colour} {thing} that belongs to {name}?")
        for name, colour, thing, place in drawn
    ]


def needles(
    tokenizer: Any, haystack: str, length: int, candidates: int, choose: random.Random, part: tuple[int, int] = (0, 1)
) -> list[Needle]:
    """Copies of a document with different facts at the same random depth, of up to `length` tokens each.

    The depth is in part i, counted from 0, of n equal parts, for `part` (i, n). The fact is between two sentences, or between
    two words if the part has no end of a sentence. It is entirely before or entirely after the end of the text that a model of
    BOUNDARY tokens sees. Raises SystemExit if the facts leave no room for the document.
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
    if depth < int(part[0] / part[1] * len(places)):  # no sentence ends in the part, for example in a long table
        depth, place = last_break(r"\s+")
    before, after = text[:place], text[place:]
    return [Needle(f"{before}{sentence} {after}", question, depth) for sentence, question in drawn]


def seen(tokenizer: Any) -> int:
    """The number of tokens of a text, without special tokens, that a model of BOUNDARY tokens sees."""
    return BOUNDARY - tokenizer.num_special_tokens_to_add()


def grid(
    tokenizer: Any, haystacks: list[str], length: int, depths: int, candidates: int, seed: int
) -> list[list[list[Needle]]]:
    """The needles for each of `depths` equal parts of a text of `length` tokens, and each haystack."""
    return [
        [
            needles(tokenizer, text, length, candidates, random.Random(f"{seed} {length} {part} {number}"), (part, depths))
            for number, text in enumerate(haystacks)
        ]
        for part in range(depths)
    ]


def chance(candidates: int) -> tuple[float, float]:
    """Expected R@1 and MRR of a random order of the candidates."""
    return 1 / candidates, sum(1 / k for k in range(1, candidates + 1)) / candidates
