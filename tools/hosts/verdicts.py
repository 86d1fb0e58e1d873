"""The verdict on a model type: whether it can be patched, and the results of the checks on a tiny model."""

import logging
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import hf_posenc
from tools.hosts import checks, tiny

TEXT = re.compile(r"text|language|decoder|lm\b|llm")
"""Matches the paths of submodels that read text, which are tested first."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a model type.

    kind: the model type.
    `folder`: its modeling directory.
    part: the submodel that was patched, if it is a composite model.
    source: the positions of the original model. Empty for an unsupported model.
    encodings: those of `checks.ENCODINGS` that it supports.
    checks: check -> result.
    reason, message, remedy: from the error for an unsupported model.
    crash: any other error.
    unbuilt: why no tiny model could be built.
    """

    kind: str
    folder: str
    part: str = ""
    source: str = ""
    encodings: tuple[str, ...] = ()
    checks: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    remedy: str = ""
    crash: str = ""
    unbuilt: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.part})" if self.part else self.kind

    @property
    def taken(self) -> bool:
        return bool(self.source)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(_is_passed(result) for result in self.checks.values())

    @property
    def acts_in_attention(self) -> bool:
        return bool({*self.encodings} - {"sinusoidal"})

    @property
    def verified(self) -> bool:
        return self.passed and self.acts_in_attention

    @property
    def embeds_only(self) -> bool:
        return self.passed and not self.acts_in_attention

    @property
    def stock_fails(self) -> dict[str, str]:
        """Check -> why the original model fails it."""
        prefix = f"{checks.STOCK_FAILS} ("
        return {name: result[len(prefix) : -1] for name, result in self.checks.items() if result.startswith(prefix)}

    @property
    def failed(self) -> bool:
        return any(result.startswith(checks.FAILED) for result in self.checks.values())

    @property
    def not_applicable(self) -> str:
        """The checks that don't apply or that the original model fails, and the unsupported encodings."""
        without = [encoding for encoding in checks.ENCODINGS if encoding not in self.encodings]
        return ", ".join([*(name for name, result in self.checks.items() if result != checks.PASSED), *without])

    @property
    def not_passed(self) -> str:
        """The first check that didn't pass."""
        return next(
            (f"{name}: {result}" for name, result in self.checks.items() if not _is_passed(result)),
            "no check was run",
        )

    @property
    def rank(self) -> int:
        """A higher rank is better. A directory has the verdict of its model type with the highest rank."""
        return 4 * self.verified + 3 * self.embeds_only + 2 * self.taken + bool(self.reason)


def _is_passed(result: str) -> bool:
    return result in (checks.PASSED, checks.NOT_APPLICABLE) or result.startswith(checks.STOCK_FAILS)


def judge(kind: str) -> Verdict:
    """Build and check a tiny model of a type."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    folder = tiny.folder_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.build(kind)
        if model is None:
            return Verdict(kind, folder, unbuilt=_why_unbuilt(kind))
        try:
            return _judged(kind, model)
        except hf_posenc.UnsupportedModelError as error:
            refusal = _refusal(kind, error)
            return _best_part(kind, model, getattr(error, "submodels", ()), refusal)
        except Exception as error:  # a bug, because unsupported models must raise UnsupportedModelError
            return Verdict(kind, folder, crash=f"{type(error).__name__}: {error}")


def _judged(kind: str, model: Any, part: str = "") -> Verdict:
    checks.patch(model, "none", part)  # raises UnsupportedModelError for an unsupported model
    host = checks.Host(kind, model, part)
    return Verdict(
        kind,
        tiny.folder_of(kind),
        part,
        original_encoding(model.get_submodule(host.path)),
        tuple(host.taken),
        checks.checked(host),
    )


def _best_part(kind: str, model: Any, parts: Iterable[str], refusal: Verdict) -> Verdict:
    """The verdict on the first submodel that is verified, or the best verdict. Submodels that read text come first."""
    best = refusal
    for part in sorted(parts, key=lambda path: not TEXT.search(path)):
        try:
            verdict = _judged(kind, model, part)
        except hf_posenc.UnsupportedModelError as error:
            verdict = _refusal(kind, error, part)
        except Exception as error:
            verdict = Verdict(kind, refusal.folder, part, crash=f"{type(error).__name__}: {error}")
        if verdict.rank > best.rank or (verdict.rank == best.rank and best is refusal):
            best = verdict
        if best.verified:
            break
    return best


def original_encoding(stock: Any) -> str:
    """The positions of an original model."""
    try:
        return hf_posenc.inspect(stock).encoding
    except Exception:
        return "its own"


def _refusal(kind: str, error: hf_posenc.UnsupportedModelError, part: str = "") -> Verdict:
    message, _, remedy = str(error).partition(". The model was not changed. ")
    return Verdict(kind, tiny.folder_of(kind), part, reason=error.reason or "no reason", message=message, remedy=remedy)


def _why_unbuilt(kind: str) -> str:
    if tiny.class_of(kind) is None:
        return "no class creates such a model"
    try:
        tiny.made(kind, tiny.config_of(kind, narrow=True))
    except ImportError as error:
        return "needs " + next(iter(re.findall(r"requires the (\w+)", str(error))), "another package")
    except Exception:
        return "no tiny configuration is known"
    return "no tiny model"
