"""`generate` in all its modes, and caches that are cut, repeated and put in another order.

Each token must have been chosen from the logits that one forward pass over the row's text gives.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import ITSELF, Subject, drawn, padded, subject, tokens

PROMPTS = [tokens(9, 1), tokens(6, 2)]
HOSTS = ("gpt2", "llama", "mistral", "roberta")
NEW = 6
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "sampling": {"do_sample": True, "top_k": 20},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant": True},
    "beams": {"num_beams": 3},
}


def cases(settings: Settings) -> Iterator[Case]:
    others: dict[str, Any] = {"crop": cropped, "reorder": reordered, "repeat": repeated, "static, in chunks": in_chunks}
    for host in HOSTS:
        for encoding in settings.encodings:
            if (host, encoding) == ("roberta", ITSELF):
                continue  # generate counts a stock RoBERTa's ids from 0, where its table begins at 2: no oracle
            for mode in MODES:
                for padding in (False, True):
                    run = no_grad(generated, host, encoding, mode, padding)
                    attack = f"{mode}, left-padded" if padding else mode
                    yield Case(attack, host, encoding, run, stock=functools.partial(plain, host, mode, padding))
            for attack, function in others.items():
                run = no_grad(on, function, host, encoding)
                yield Case(f"cache: {attack}", host, encoding, run, stock=functools.partial(works, function, host))


def on(attack: Any, host: str, encoding: str) -> Iterator[Comparison]:
    return attack(made(host, encoding))


def made(host: str, encoding: str) -> Subject:
    return subject(host, encoding, AutoModelForCausalLM, **({"is_decoder": True} if host == "roberta" else {}))


def plain(host: str, mode: str, padding: bool) -> Any:
    """The same call of a stock model."""
    return answer(made(host, ITSELF).oracle, host, mode, padding)


@torch.no_grad()
def works(function: Any, host: str) -> None:
    oracle = made(host, ITSELF).oracle
    list(function(Subject(oracle, oracle)))


def answer(model: Any, host: str, mode: str, padding: bool) -> tuple[Any, list[Tensor], int]:
    """What `generate` returns, the prompts of its rows, and the length that they have in it."""
    settings, prompts = dict(MODES[mode]), PROMPTS
    if settings.pop("assistant", False):
        prompts, settings["assistant_model"] = PROMPTS[:1], drawn(made(host, "none").model, seed=3)
    if "prompt_lookup_num_tokens" in settings or not padding:
        prompts = PROMPTS[:1]
    if padding and len(prompts) == 1:  # one row is padded, too, where a mode takes no batches
        ids, mask = padded([torch.cat([prompts[0], prompts[0][:3]]), prompts[0]], "left")
        ids, mask = ids[1:], mask[1:]
    else:
        ids, mask = padded(prompts, "left")
    torch.manual_seed(4)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, output_scores=True, length_penalty=0.0, **{"do_sample": False, **settings},
    )  # fmt: skip
    return out, [prompt for prompt in prompts for _ in range(settings.get("num_return_sequences", 1))], ids.shape[1]


def generated(host: str, encoding: str, mode: str, padding: bool) -> Iterator[Comparison]:
    it = made(host, encoding)
    out, prompts, width = answer(it.model, host, mode, padding)
    for row, prompt in enumerate(prompts):
        new = out.sequences[row, width:]
        logits = it.expected(torch.cat([prompt, new]))[len(prompt) - 1 : -1]
        if "num_beams" in MODES[mode]:
            yield out.sequences_scores[row], logits.log_softmax(-1).gather(1, new[:, None]).sum()
        else:
            yield torch.stack(out.logits)[:, row], logits


def cropped(it: Subject) -> Iterator[Comparison]:
    """Tokens are taken back, and others follow."""
    first, second = tokens(14, 5), tokens(14, 6)
    cache = DynamicCache(config=it.model.config)
    it.model(first[None, :10], past_key_values=cache)
    cache.crop(-5)
    text = torch.cat([first[:5], second[:6]])
    expected = it.expected(text)
    for start, end in ((5, 8), (8, 9), (9, 11)):
        yield it.model(text[None, start:end], past_key_values=cache).logits[0], expected[start:end]


def reordered(it: Subject) -> Iterator[Comparison]:
    """Rows of a left-padded batch change places, as beams do."""
    ids, mask = padded(PROMPTS, "left")
    cache, order = DynamicCache(config=it.model.config), torch.tensor([1, 1])
    it.model(ids, attention_mask=mask, past_key_values=cache, **counted(it, mask))
    cache.reorder_cache(order)  # type: ignore[arg-type]
    mask, new = mask[order], tokens(4, 7).view(2, 2)
    for step in range(2):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        logits = it.model(new[:, step : step + 1], attention_mask=mask, past_key_values=cache, **counted(it, mask, 1)).logits
        for row in range(2):
            yield logits[row, 0], it.expected(torch.cat([PROMPTS[1], new[row, : step + 1]]))[-1]


def repeated(it: Subject) -> Iterator[Comparison]:
    """A prompt is read once, and continued in several ways, of which some are given up."""
    cache, new = DynamicCache(config=it.model.config), tokens(6, 8).view(3, 2)
    it.model(PROMPTS[0][None], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    for row, logits in enumerate(it.model(new[:, :1], past_key_values=cache).logits):
        yield logits[0], it.expected(torch.cat([PROMPTS[0], new[row, :1]]))[-1]
    cache.batch_select_indices(torch.tensor([2, 0]))
    for row, logits in zip((2, 0), it.model(new[[2, 0], 1:], past_key_values=cache).logits, strict=True):
        yield logits[0], it.expected(torch.cat([PROMPTS[0], new[row]]))[-1]


def in_chunks(it: Subject) -> Iterator[Comparison]:
    """Chunks of several lengths into a static cache, twice: it is emptied in between."""
    cache = StaticCache(config=it.model.config, max_cache_len=20)
    for seed in (9, 10):
        text = tokens(15, seed)
        pieces = [it.model(piece, past_key_values=cache).logits[0] for piece in text[None].split((4, 1, 5, 3, 2), 1)]
        yield torch.cat(pieces), it.expected(text)
        cache.reset()


def counted(it: Subject, mask: Tensor, last: int = 0) -> dict[str, Tensor]:
    """Ids of the real tokens, for a stock model, which doesn't count them itself."""
    if type(it.model).__name__.startswith("PosEnc"):
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -last:]}
