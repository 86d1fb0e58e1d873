"""Synthetic queries: a sentence is removed from a document and should retrieve this document.

The position of the sentence is known, so a query can be about text that truncation removes.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

MIN_WORDS = 8
MIN_LETTERS = 0.75
"""Minimum share of letters and spaces in a sentence. Tables, formulas, and code have fewer."""


@dataclass(frozen=True)
class Question:
    """A sentence, the document without it, and the number of the document's tokens before the sentence."""

    query: str
    document: str
    depth: int


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The start and end of each sentence, in characters, in order.

    A sentence ends with ".", "!", or "?" before whitespace that no lowercase letter follows, or at a blank line.
    """
    breaks = [0]
    for found in re.finditer(r"(?<=[.!?])\s+(?![\sa-z])|\n\s*\n", text):
        breaks += found.span()
    breaks.append(len(text))
    spans = []
    for start, end in zip(breaks[::2], breaks[1::2], strict=True):
        piece = text[start:end]
        if piece.strip():
            spans.append((start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())))
    return spans


def plain(text: str) -> str:
    """The words of a text in lowercase, without punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_prose(sentence: str) -> bool:
    """Whether this is a complete sentence of at least MIN_WORDS words, not a heading, a table, or code."""
    letters = sum(sign.isalpha() or sign.isspace() for sign in sentence)
    return (
        sentence[-1:] in tuple(".!?")
        and not sentence[0].islower()
        and letters >= MIN_LETTERS * len(sentence)
        and len(re.findall(r"\w+", sentence)) >= MIN_WORDS
    )


def cloze_query(
    tokenizer: Any,
    document: str,
    choose: random.Random,
    behind: int = 0,
    within: int | None = None,
    excluded: Collection[str] = (),
) -> Question | None:
    """A sentence of a document as a query for the rest of it. None if no sentence fits.

    Sentences that occur more than once in the document are never chosen.

    Args:
        tokenizer: a fast tokenizer, which counts the tokens.
        choose: draws a random depth. The sentence closest to it is chosen.
        behind: minimum number of the document's tokens before the sentence.
        within: the sentence ends within this number of tokens, including special tokens. None for no limit.
        excluded: sentences, as returned by `plain`, that aren't chosen.
    """
    encoded = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = ([place[side] for place in encoded["offset_mapping"]] for side in (0, 1))
    last = len(starts) if within is None else within - tokenizer.num_special_tokens_to_add()
    words = _spaced(plain(document))
    found = []
    for start, end in sentence_spans(document):
        first = bisect_right(ends, start)  # the number of tokens before the sentence
        if first < behind or bisect_left(starts, end) > last:
            continue
        sentence = " ".join(document[start:end].split())
        key = plain(sentence)
        if is_prose(sentence) and key not in excluded and words.count(_spaced(key)) == 1:
            found.append((first, start, end, sentence))
    if not found:
        return None
    wanted = choose.uniform(behind, min(last, len(starts)))
    depth, start, end, sentence = min(found, key=lambda each: (abs(each[0] - wanted), each[0]))
    return Question(sentence, document[:start] + document[end:].lstrip(" "), depth)


def _spaced(words: str) -> str:
    """Words with two spaces between them and one at each end, so that adjacent occurrences are both counted."""
    return f" {words.replace(' ', '  ')} "
