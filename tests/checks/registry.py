"""The checks by name, and their subject: a patched model and the functions that run it.

Shapes: B batch, L tokens, V vocabulary or hidden_size.
"""

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

import models
from cover import cover
from models import ALL_HOSTS, CACHE, LENGTH, Host, tokens

TEXT = ("encoder", "decoder", "encoder-decoder")
WRITERS = ("decoder", "encoder-decoder")
EVERY = (*TEXT, "vision", "audio")
"""Kinds of models."""
LIMITED = ("learned", "tupe", "normalized")
"""Encodings that need a maximum length, which some models don't have."""


@dataclass(frozen=True)
class Check:
    """A property of patched models.

    run: raises an error if the property doesn't hold.
    kinds: kinds of models.
    on: returns the pairs of a model and an encoding that it runs on. `make test` omits those that aren't in `cover.quick()`.
    slow: whether `make test` skips it.
    where: selects the subjects that should have the property. None for all of these kinds.
    """

    run: Callable[["Subject"], None]
    kinds: tuple[str, ...]
    on: Callable[[], list[tuple[str, str]]]
    slow: bool
    where: Callable[["Subject"], bool] | None

    def applies_to(self, it: "Subject") -> bool:
        return it.kind in self.kinds and (self.where is None or self.where(it))


CHECKS: dict[str, Check] = {}


def check(*kinds, on=cover, slow=False, where=None):
    """Register a function of a Subject as a check under its name."""

    def add(run):
        assert run.__name__ not in CHECKS, run.__name__
        CHECKS[run.__name__] = Check(run, kinds or EVERY, on, slow, where)
        return run

    return add


def named(encoding, names):
    """Whether the encoding or one of its parts is among `names`, with or without options."""
    return any(part.partition(",")[0] in names for part in encoding.split("+"))


def without_windows(it):
    """Whether the model has no attention windows, which count columns including padding, also in the original models."""
    return not it.host.windowed


@dataclass(frozen=True)
class Subject:
    """A model with an encoding. Its instances are shared and must not be changed."""

    name: str
    encoding: str

    @property
    def host(self) -> Host:
        return ALL_HOSTS[self.name]

    @property
    def kind(self) -> str:
        return self.host.kind

    @property
    def max_length(self) -> int | None:
        needs = self.kind in ("encoder-decoder", "vision", "audio") and any(each in self.encoding for each in LIMITED)
        return (LENGTH if self.kind == "encoder-decoder" else 300) if needs else None

    @property
    def spec(self) -> str | dict[str, Any]:
        """The encoding as an argument of `patch`."""
        return models.spec_of(self.encoding)

    @property
    def model(self) -> Any:
        """The patched model with its language modeling head, in eval mode."""
        return models.shared(self.name, self.encoding, self.host.head, max_length=self.max_length)

    @property
    def stock(self) -> Any:
        return models.shared(self.name, None, self.host.head)

    @property
    def without(self) -> Any:
        """The model patched without positions."""
        return models.shared(self.name, "none", self.host.head)

    def twin(self) -> Any:
        """A copy of the patched model, which can be changed."""
        return copy.deepcopy(self.model)

    def fresh(self, max_length=None, **changes) -> Any:
        """A new patched model with changes to its config."""
        return models.patched(self.name, self.encoding, self.host.head, max_length=max_length or self.max_length, **changes)

    def fresh_stock(self, **changes) -> Any:
        return models.stock(self.name, self.host.head, **changes)

    def inputs(self, ids=None, mask=None) -> dict[str, Any]:
        """The arguments of a forward pass. In an encoder-decoder, `ids` and `mask` are the decoder's."""
        ids = tokens() if ids is None else ids
        if self.kind == "vision":
            return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))}
        if self.kind == "audio":
            draw = torch.Generator().manual_seed(5)
            if "conv_kernel" in self.host.sizes:
                return {"input_values": torch.randn(2, 320, generator=draw)}
            return {"input_features": torch.randn(2, 40, 16, generator=draw)}
        prefix = "decoder_" if self.kind == "encoder-decoder" else ""
        given = {f"{prefix}input_ids": ids} | ({} if mask is None else {f"{prefix}attention_mask": mask})
        if self.kind == "encoder-decoder":
            given["input_ids"] = source(len(ids))
        return given | ({} if self.kind == "encoder" else {"use_cache": False})

    def half_inputs(self) -> dict[str, Any]:
        """The same arguments in half precision, including images and audio."""
        inputs = self.inputs().items()
        return {name: value.bfloat16() if name.endswith(("values", "features")) else value for name, value in inputs}

    def plain(self, model, ids=None, mask=None, **more) -> torch.Tensor:
        """`[B, L, V]`: the first output of one forward pass without a cache."""
        return model(**{**self.inputs(ids, mask), **more})[0]

    def cache(self, model, kind=DynamicCache, **more) -> Any:
        own = kind(config=model.config.get_text_config(decoder=True), **more)
        return EncoderDecoderCache(own, DynamicCache()) if self.kind == "encoder-decoder" else own

    def step(self, model, ids, cache, mask=None, **more) -> torch.Tensor:
        """The logits of the tokens after those in a cache."""
        use_cache = None if self.name == "switch" else True  # its encoder raises an error for True
        return self.plain(model, ids, mask, **{CACHE: cache}, use_cache=use_cache, **more)

    def in_pieces(self, model, ids, cuts, cache=None, mask=None) -> torch.Tensor:
        """`[B, L, V]`: cached decoding, with one forward pass for the tokens between two cuts."""
        cache = self.cache(model) if cache is None else cache
        places = list(zip((0, *cuts), (*cuts, ids.shape[1]), strict=True))
        masks = [None if mask is None else mask[:, :stop] for _, stop in places]
        return torch.cat(
            [self.step(model, ids[:, a:b], cache, seen) for (a, b), seen in zip(places, masks, strict=True)], dim=1
        )


def source(rows: int) -> torch.Tensor:
    """`[B, 7]`: the encoder input of encoder-decoders."""
    return tokens(1, 7, seed=5).expand(rows, -1)


@functools.cache
def load() -> dict[str, Check]:
    """All checks, by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("__init__", "registry"):
            importlib.import_module(f"checks.{path.stem}")
    return CHECKS
