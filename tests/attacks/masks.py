"""Attention masks in every form that Transformers takes. A text behind padding gives what it gives alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import padded, stock, subject, tokens

TEXTS = [tokens(9, 1), tokens(6, 2)]
CAUSAL = ("gpt2", "llama")
LOWEST = torch.finfo(torch.float32).min


def square(shown: Tensor, causal: bool) -> Tensor:
    """`[B, K] -> [B, 1, K, K]`: what each token sees, itself always."""
    length = shown.shape[1]
    seen = shown.bool()[:, None, None, :].expand(-1, 1, length, length)
    return (seen.tril() if causal else seen) | torch.eye(length, dtype=torch.bool)


def added(shown: Tensor, causal: bool, lowest: float = LOWEST) -> Tensor:
    """0 for what each token sees, the lowest value for the rest."""
    seen = square(shown, causal)
    return torch.zeros(seen.shape).masked_fill(~seen, lowest)


FORMS: dict[str, Callable[[Tensor, bool], Any]] = {
    "2-D int": lambda shown, causal: shown,
    "2-D bool": lambda shown, causal: shown.bool(),
    "2-D float": lambda shown, causal: shown.float(),
    "2-D bytes": lambda shown, causal: shown.to(torch.uint8),
    "3-D int": lambda shown, causal: square(shown, causal)[:, 0].long(),
    "3-D bool": lambda shown, causal: square(shown, causal)[:, 0],
    "4-D bool": square,
    "4-D int": lambda shown, causal: square(shown, causal).long(),
    "4-D float of 0 and 1": lambda shown, causal: square(shown, causal).float(),
    "4-D added": added,
    "4-D added, -inf": lambda shown, causal: added(shown, causal, -torch.inf),
    "4-D added, by head": lambda shown, causal: added(shown, causal).expand(-1, 4, -1, -1),
    "dict of 4-D": lambda shown, causal: {"full_attention": added(shown, causal)},
    "dict of 2-D": lambda shown, causal: {"full_attention": shown},
}


def cases(settings: Settings) -> Iterator[Case]:
    for form in FORMS:
        for host in ("bert", "gpt2", "llama", "mpnet", "distilbert"):
            for implementation in ("sdpa", "eager") if host != "mpnet" else ("eager",):
                for encoding in settings.encodings:
                    if encoding in ("logn", "normalized") and not form.startswith("2-D"):
                        continue  # they depend on a text's length, which other masks don't tell
                    run = no_grad(masked, host, encoding, form, implementation)

                    def alone(host: str = host, form: str = form, implementation: str = implementation) -> bool:
                        return right(stock(host), host, form, implementation)

                    yield Case(f"{form}, {implementation}", host, encoding, run, stock=alone)


def masked(host: str, encoding: str, form: str, implementation: str) -> Iterator[Comparison]:
    it = subject(host, encoding)
    it.model.set_attn_implementation(implementation)
    ids, mask = padded(TEXTS, "right")
    output = it.model(ids, attention_mask=FORMS[form](mask, host in CAUSAL))[0]
    for row, text in zip(output, TEXTS, strict=True):
        yield row[: len(text)], it.expected(text)


@torch.no_grad()
def right(model: Any, host: str, form: str, implementation: str) -> bool:
    """Whether a stock model takes a mask in this form as it takes a 2-D one."""
    model.set_attn_implementation(implementation)
    ids, mask = padded(TEXTS, "right")
    real = mask.bool()
    expected, actual = (model(ids, attention_mask=each)[0][real] for each in (mask, FORMS[form](mask, host in CAUSAL)))
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)
