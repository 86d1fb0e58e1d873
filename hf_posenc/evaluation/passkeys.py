"""Passkeys: a number hidden in filler text, which a language model should repeat (https://arxiv.org/abs/2305.16300).

A key counts as found if each of its tokens is the most probable one after the true previous tokens. The result equals that of
greedy decoding, but needs only one forward pass.

Shapes: N prompts, L tokens in a prompt with its key, A tokens of the key, V vocabulary.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.evaluation import metrics
from hf_posenc.evaluation.metrics import Difference, Interval
from hf_posenc.inspection import supported_length
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.tokenizer_files import check_ids, check_known
from hf_posenc.signatures import argument_names

TASK = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it."
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
FACT = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
DIGITS = 5
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the filler before the key's sentence, at which `evaluate` asks for keys."""
BATCH_TOKENS = 2048
"""Maximum number of tokens in a batch of prompts. A longer prompt is a separate batch."""


@dataclass(frozen=True)
class Passkey:
    """The tokens of a prompt and of its key. `depth` is the number of tokens before the key's sentence."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    depth: int
    key: str

    @property
    def row(self) -> list[int]:
        """The tokens that a model reads to predict the key: the prompt and the key without its last token."""
        return [*self.prompt, *self.answer[:-1]]


def passkeys(tokenizer: Any, length: int, part: float, count: int, seed: int) -> list[Passkey]:
    """`count` passkeys with different keys, each of exactly `length` tokens including the key.

    part: the share of the filler before the key's sentence, 0 to 1.

    Raises ValueError for another `part`, or if the length leaves no room for filler.
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part={part} must be a number from 0 (key at the start) to 1 (key at the end).")
    choose, keys = random.Random(f"{seed} {length} {part}"), dict[str, None]()
    while len(keys) < count:
        keys[drawn(choose)] = None
    return [passkey(tokenizer, length, part, key) for key in keys]


def drawn(choose: random.Random) -> str:
    return str(choose.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def passkey(tokenizer: Any, length: int, part: float, key: str) -> Passkey:
    task, fact, question, answer = _parts(tokenizer, key)
    filler, room = _ids(tokenizer, FILLER), length - len(task) - len(fact) - len(question) - len(answer)
    if room < 1:
        raise ValueError(
            f"length={length} is too short, because the task, key, and question take {length - room} tokens. Choose a larger "
            "length."
        )
    filling = filler * (room // len(filler) + 1)
    before, after = round(part * room), room - round(part * room)
    # Filler is cut at its beginning, so that it ends with a complete sentence.
    prompt = task + filling[len(filling) - before :] + fact + filling[len(filling) - after :] + question
    return Passkey(tuple(prompt), tuple(answer), len(task) + before, key)


def least_length(tokenizer: Any) -> int:
    """The length of a prompt with its key and one token of filler."""
    return sum(map(len, _parts(tokenizer, "1" * DIGITS))) + 1


def _parts(tokenizer: Any, key: str) -> tuple[list[int], list[int], list[int], list[int]]:
    """The tokens of task, fact, question, and answer, tokenized separately. All but the first begin with a space."""
    task, fact, question, answer = (_ids(tokenizer, text) for text in (TASK, FACT.format(key=key), QUESTION, f" {key}"))
    space = _ids(tokenizer, " ")
    if space and answer[: len(space)] == space:  # The space is a separate token, so the answer is only the digits.
        question, answer = question + space, answer[len(space) :]
    return [*tokenizer("")["input_ids"], *task], fact, question, answer


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def right(model: PreTrainedModel, prompts: Sequence[Passkey]) -> Tensor:
    """Whether each token of the key is predicted from the true previous tokens, `[N, A]`.

    All prompts have the same length, and all keys the same number of tokens.
    """
    found, count = [], len(prompts[0].answer)
    last = {"logits_to_keep": count} if "logits_to_keep" in argument_names(model) else {}
    size = max(1, BATCH_TOKENS // (len(prompts[0].prompt) + len(prompts[0].answer)))
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        answers = torch.tensor([each.answer for each in batch])
        rows = torch.tensor([each.row for each in batch]).to(model.device)
        logits = model(input_ids=rows, **last).logits[:, -count:]  # [N, A, V]
        found.append(logits.argmax(-1).cpu() == answers)
    return torch.cat(found)


def found(model: PreTrainedModel, prompts: Sequence[Passkey]) -> np.ndarray:
    """1 for each key whose tokens are all right, otherwise 0, `[N]`. All prompts have the same length with their keys."""
    values = np.zeros(len(prompts))
    for tokens in {len(each.answer) for each in prompts}:
        chosen = [i for i, each in enumerate(prompts) if len(each.answer) == tokens]
        values[chosen] = right(model, [prompts[i] for i in chosen]).all(1).numpy()
    return values


@dataclass(frozen=True)
class PasskeyAccuracy:
    """The share of keys that a model finds at one length, with its 95% interval, in which a depth is one observation.

    by_depth: depth as a share of the filler -> share of keys.
    difference: from the first model on the same keys. None for the first model, or if it doesn't support the length.
    """

    accuracy: float
    interval: Interval
    by_depth: dict[float, float]
    difference: Difference | None
    keys: int


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]], lengths: Sequence[int], keys: int, seed: int = 0
) -> dict[int, dict[str, PasskeyAccuracy]]:
    """Length -> model -> accuracy on `keys` passkeys at each of DEPTHS, for the models that support the length."""
    limits = {name: supported_length(model) for name, (model, _) in models.items()}
    runs = [(length, name) for length in lengths for name in models if length <= (limits[name] or length)]
    values = dict[tuple[int, str], list[np.ndarray]]()
    with ProgressBar(total=len(runs) * len(DEPTHS) * keys, desc="passkeys", unit="key") as bar:
        for length, name in runs:
            model, tokenizer = models[name]
            model.eval()
            for part in DEPTHS:
                prompts = passkeys(tokenizer, length, part, keys, seed)
                check_known(tokenizer, [prompts[0].prompt])
                check_ids(torch.tensor(prompts[0].prompt), model.get_input_embeddings(), name)
                values.setdefault((length, name), []).append(found(model, prompts))
                bar.update(keys)
    first, results = next(iter(models)), dict[int, dict[str, PasskeyAccuracy]]()
    for length, name in runs:
        own, base = np.concatenate(values[length, name]), values.get((length, first))
        groups = np.repeat(np.arange(len(DEPTHS)), keys)  # prompts at one depth differ only in their keys
        gap = None if base is None or name == first else metrics.difference(own, np.concatenate(base), groups)
        results.setdefault(length, {})[name] = PasskeyAccuracy(
            *metrics.share(own, groups),
            {part: float(each.mean()) for part, each in zip(DEPTHS, values[length, name], strict=True)},
            gap and Difference(*gap, len(own)),
            len(own),
        )
    return results
