"""Checks of a host that can be patched, by running it: each passes, fails, or doesn't apply.

Shapes: B batch, L tokens, D hidden_size.
"""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache, PreTrainedModel

import hf_posenc
from hosts.tiny import LENGTH, build, tokens

ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw")
"""One for each way to act: vectors, a rotation, a bias by distance, a bias by content."""
PASSED, FAILED, NOT_APPLICABLE = "passed", "FAILED", "-"
SAME, OTHER = 2e-5, 1e-4
"""Part of the largest output up to which two outputs are the same, and above which they are not."""


def checked(kind: str, stock: PreTrainedModel) -> dict[str, str]:
    """Check -> how it went, for a stock model that `patch` takes."""
    host = Host(kind, stock)
    return {name: _outcome(check, host) for name, check in CHECKS.items()}


def _outcome(check: Callable[["Host"], Iterator[bool]], host: "Host") -> str:
    try:
        with torch.no_grad():
            results = list(check(host))
    except Exception as error:  # shown in the table, as a check that failed
        return f"{FAILED} ({type(error).__name__})"
    return NOT_APPLICABLE if not results else PASSED if all(results) else FAILED


class Host:
    """A stock model, and what the checks need to know of it.

    single: the models by which order is judged. An encoder is judged itself. A decoder's layers above the first know order
        from which tokens each one sees, so it is judged by one model of each of its kinds of layer; or, where its layers
        can't be had singly, by itself with a mask that shows every token to each.
    """

    def __init__(self, kind: str, stock: PreTrainedModel) -> None:
        self.stock = stock
        self.arguments = set(inspect.signature(type(stock).forward).parameters)
        ids = tokens(1)
        other = ids.clone()
        other[:, -1] = 3 + (ids[:, -1] - 2) % 58
        with torch.no_grad():
            self.is_decoder = _apart(outputs(stock, other)[:, :-1], outputs(stock, ids)[:, :-1]) < SAME
        self.single = list(_single_layers(kind)) if self.is_decoder else [stock]
        self.sees_all = not self.single
        self.single = self.single or [stock]

    def patched(self, encoding: str, stock: PreTrainedModel | None = None) -> PreTrainedModel | None:
        """A patched model with random parameters of the encoding, or None where this encoding is refused."""
        try:
            model = hf_posenc.patch(stock or self.stock, encoding)
        except hf_posenc.HostRefused:
            return None
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model

    def order(self, model: PreTrainedModel) -> float:
        """By what part of the largest output an output changes when the other tokens change places."""
        ids, order = tokens(3), torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(4))
        order = torch.cat([order, torch.tensor([LENGTH - 1])])
        inputs = {"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH)} if self.sees_all else {}
        before, after = outputs(model, ids, **inputs)[:, order], outputs(model, ids[:, order], **inputs)
        rows = slice(-1, None) if self.is_decoder and not self.sees_all else slice(None)
        return _apart(after[:, rows], before[:, rows])


def _single_layers(kind: str) -> Iterator[PreTrainedModel]:
    layer = 0
    while (model := build(kind, only=layer)) is not None and getattr(model.config, "num_hidden_layers", 0) == 1:
        yield model
        layer += 1


def outputs(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """`[B, L] -> [B, L, D]`."""
    return model(input_ids=ids, **inputs)[0]


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def order_is_gone(host: Host) -> Iterator[bool]:
    """Without positions a token's output doesn't depend on the order of the others. The stock model's must."""
    for stock in host.single:
        patched = host.patched("none", stock)
        yield patched is not None and host.order(patched) < SAME
    yield any(host.order(stock) > OTHER for stock in host.single)


def order_is_back(host: Host) -> Iterator[bool]:
    """An encoding of each kind makes order visible."""
    for encoding in ENCODINGS:
        for stock in host.single:
            if (patched := host.patched(encoding, stock)) is not None:
                yield host.order(patched) > OTHER


def unpatch_is_equal(host: Host) -> Iterator[bool]:
    """`unpatch` gives the stock model's outputs, to the last bit."""
    ids = tokens(5)
    expected = outputs(host.stock, ids)
    for encoding in ("none", *ENCODINGS):
        if (patched := host.patched(encoding)) is not None:
            yield torch.equal(outputs(hf_posenc.unpatch(patched), ids), expected)
    yield torch.equal(outputs(host.stock, ids), expected)


def saves_and_loads(host: Host) -> Iterator[bool]:
    """A patched model that was saved and loaded gives the same outputs, to the last bit."""
    ids = tokens(6)
    for encoding in ENCODINGS:
        if (patched := host.patched(encoding)) is not None:
            with tempfile.TemporaryDirectory() as folder:
                patched.save_pretrained(folder)
                loaded = AutoModel.from_pretrained(folder, attn_implementation=patched.config._attn_implementation)
                yield type(loaded) is type(patched) and torch.equal(outputs(loaded, ids), outputs(patched, ids))


def eager_is_sdpa(host: Host) -> Iterator[bool]:
    """Both attention implementations give the same, with padding, in hosts that have both."""
    if not host.stock._supports_sdpa:
        return
    ids, inputs = _padded(tokens(7, rows=2), left=False, by=(0, 3))
    real = inputs["attention_mask"].bool()
    inputs = inputs if "attention_mask" in host.arguments else {}
    for encoding in ENCODINGS:
        if (patched := host.patched(encoding)) is not None:
            answers = []
            for implementation in ("eager", "sdpa"):
                patched.set_attn_implementation(implementation)
                answers.append(outputs(patched, ids, **inputs)[real])
            yield _apart(*answers) < SAME


def padding_is_ignored(host: Host) -> Iterator[bool]:
    """Tokens beside padding, right or left, give what they give alone."""
    if "attention_mask" not in host.arguments:
        return
    ids = tokens(8)
    for encoding in ENCODINGS:
        if (patched := host.patched(encoding)) is not None:
            alone = outputs(patched, ids)
            for left in (False, True):
                padded, inputs = _padded(ids, left, by=(4,))
                yield _apart(outputs(patched, padded, **inputs)[inputs["attention_mask"].bool()], alone[0]) < SAME


def _padded(ids: Tensor, left: bool, by: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows padded by so many tokens each; the padding takes the place of the row's own tokens if it is one of several."""
    if len(by) == 1:
        padding = torch.full((1, by[0]), 3)
        mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)] if left else [torch.ones_like(ids), padding * 0], 1)
        return torch.cat([padding, ids] if left else [ids, padding], 1), {"attention_mask": mask}
    mask = torch.ones_like(ids)
    for row, width in enumerate(by):
        mask[row, LENGTH - width :] = 0
    return ids, {"attention_mask": mask}


def cache_is_exact(host: Host) -> Iterator[bool]:
    """A decoder that reads its input in chunks gives what it gives at once."""
    if not host.is_decoder or "past_key_values" not in host.arguments:
        return
    ids = tokens(9)
    for encoding in ENCODINGS:
        if (patched := host.patched(encoding)) is not None:
            expected = outputs(patched, ids, use_cache=False)
            cache = DynamicCache(config=patched.config)
            chunks = [outputs(patched, chunk, past_key_values=cache, use_cache=True) for chunk in ids.split((5, 1, 3, 2), 1)]
            yield cache.get_seq_length() == LENGTH and _apart(torch.cat(chunks, 1), expected) < SAME


CHECKS = {
    "order gone": order_is_gone,
    "order back": order_is_back,
    "unpatch": unpatch_is_equal,
    "save, load": saves_and_loads,
    "eager=sdpa": eager_is_sdpa,
    "padding": padding_is_ignored,
    "cache": cache_is_exact,
}
