"""Cached decoding against one forward pass, in every model type that generates text and is taken."""

import copy
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_posenc
from attacks.cases import SAME, Case, Comparison, Settings, no_grad
from attacks.subjects import drawn
from tools.hosts.tiny import LENGTH, VOCABULARY, build, randomized

ENCODINGS = ("sinusoidal", "learned", "rope", "alibi", "t5", "shaw")
"""Those of all that are asked for, one or two for each way to act."""


def cases(settings: Settings) -> Iterator[Case]:
    kinds = [kind for kind in sorted(CONFIG_MAPPING) if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING]
    for kind in (kind for kind in kinds if not kind.startswith("posenc-")):
        for encoding in (encoding for encoding in ENCODINGS if encoding in settings.encodings):
            yield Case("token by token", kind, encoding, no_grad(token_by_token, kind, encoding))


def token_by_token(kind: str, encoding: str) -> Iterator[Comparison]:
    stock = generator(kind)
    if stock is None:
        return
    try:
        model = drawn(hf_posenc.patch(stock, encoding))
    except hf_posenc.UnsupportedModelError:  # nothing to attack
        return
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    yield in_steps(model, ids), model(ids, use_cache=False).logits


@functools.lru_cache(maxsize=1)
def generator(kind: str) -> PreTrainedModel | None:
    """A tiny decoder with a language model's head whose cached decoding is exact; None where these sizes make none."""
    base = build(kind)
    if base is None:
        return None
    config = copy.deepcopy(base.config)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    try:
        torch.manual_seed(0)
        model = randomized(AutoModelForCausalLM.from_config(config).eval())
        return model if exact(model) else None
    except Exception:  # whatever a head makes of sizes that aren't its own
        return None


def exact(stock: PreTrainedModel) -> bool:
    """Whether the stock model's own cached decoding gives what it gives at once."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        cached, full = in_steps(stock, ids), stock(ids, use_cache=False).logits
    return bool((cached - full).abs().max() < SAME * full.abs().max())


def in_steps(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[B, L] -> [B, L, V]`, after the first five tokens one by one."""
    cache, pieces = DynamicCache(config=model.config), []
    for piece in ids.split((5, *[1] * (LENGTH - 5)), 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    return torch.cat(pieces, 1)
