"""Gaps between cached keys and new tokens: padding, prefixes, and ids that jump.

A token's position is the number of real tokens before it, or its id if ids are given; its distance to a cached key is the
difference of their positions, wherever in the cache the key lies.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import Subject, padded, subject, tokens

TEXTS = [tokens(14, 1), tokens(11, 2), tokens(9, 3)]
PREFIX = 4
"""Tokens of a prefix in prefix tuning."""
COUNTING = ("cope", "fox")
"""Encodings that count the tokens which lie between two, so that ids without tokens between them say nothing to them."""
JUMPS = torch.tensor([0, 1, 2, 3, 9, 10, 14, 15, 16, 20])


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Any] = {
        "right-padded prompt, then token by token": lambda s: in_steps(s, "right"),
        "the same with ids": lambda s: in_steps(s, "right", ids_given=True),
        "the same, static cache": lambda s: in_steps(s, "right", static=True),
        "left-padded prompt, then token by token": lambda s: in_steps(s, "left"),
        "padding in two turns": two_turns,
        "generate, right-padded batch": lambda s: generated(s, "right"),
        "generate, left-padded batch": lambda s: generated(s, "left"),
        "hole in the mask, at once": hole,
        "ids that jump": lambda s: jumps(s, None),
        "ids that jump, cached, with ids": lambda s: jumps(s, True),
        "ids that jump, cached, without ids": lambda s: jumps(s, False),
        "prefix tuning, left padding": lambda s: prefix_tuned(s, "left"),
        "prefix tuning, right padding": lambda s: prefix_tuned(s, "right"),
        "prefix tuning, generate": lambda s: prefix_tuned(s, "left", generate=True),
    }
    for attack, run in attacks.items():
        for host in ("gpt2", "llama"):
            for encoding in settings.encodings:
                if encoding in COUNTING and ("jump" in attack or attack == "generate, right-padded batch"):
                    continue
                yield Case(attack, host, encoding, no_grad(on, run, host, encoding))


def on(attack: Any, host: str, encoding: str) -> Iterator[Comparison]:
    return attack(made(host, encoding))


def made(host: str, encoding: str) -> Subject:
    return subject(host, encoding, AutoModelForCausalLM)


def in_steps(it: Subject, side: str, ids_given: bool = False, static: bool = False, seen: int = 6) -> Iterator[Comparison]:
    """Prompts of several lengths in one batch, then their other tokens, one by one."""
    prompts = [text[: seen - row] for row, text in enumerate(TEXTS)]
    ids, mask = padded(prompts, side)
    count = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    cache = StaticCache(config=it.model.config, max_cache_len=12) if static else DynamicCache(config=it.model.config)

    def given(positions: Tensor) -> dict[str, Tensor]:
        return {"position_ids": positions} if ids_given else {}

    logits = it.model(ids, attention_mask=mask, past_key_values=cache, **given((mask.cumsum(-1) - 1).clamp(min=0))).logits
    expected = [it.expected(text[: len(prompt) + 5]) for text, prompt in zip(TEXTS, prompts, strict=True)]
    for row, prompt in enumerate(prompts):
        yield logits[row][mask[row].bool()], expected[row][: len(prompt)]
    for step in range(5):
        new = torch.stack([text[len(prompt) + step] for text, prompt in zip(TEXTS, prompts, strict=True)])[:, None]
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        logits = it.model(new, attention_mask=mask, past_key_values=cache, **given(count + step)).logits
        yield logits[:, 0], torch.stack([expected[row][len(prompt) + step] for row, prompt in enumerate(prompts)])


def two_turns(it: Subject) -> Iterator[Comparison]:
    """A batch whose second turn is padded, too, so that rows have padding between real tokens."""
    cache, mask, at = DynamicCache(config=it.model.config), torch.zeros(3, 0, dtype=torch.long), [0, 0, 0]
    for widths, side in (((4, 2, 3), "right"), ((3, 4, 1), "left"), ((1, 2, 3), "right")):
        turn = [text[start : start + width] for text, start, width in zip(TEXTS, at, widths, strict=True)]
        ids, shown = padded(turn, side)
        mask = torch.cat([mask, shown], 1)
        logits = it.model(ids, attention_mask=mask, past_key_values=cache).logits
        for row, text in enumerate(TEXTS):
            end = at[row] + widths[row]
            yield logits[row][shown[row].bool()], it.expected(text[:end])[at[row] :]
            at[row] = end


def generated(it: Subject, side: str, new: int = 6) -> Iterator[Comparison]:
    """The logits from which each new token was taken are those of the row's text alone.

    `generate` takes the first one from the last column, which is padding on the right: the following ones count there. It
    also goes on from the id of that column, which is 0 for padding: the new tokens of such a row are at 1, 2, …
    """
    start = 1 if side == "right" else 0
    prompts = [text[: 8 - 2 * row] for row, text in enumerate(TEXTS)]
    ids, mask = padded(prompts, side, padding=it.model.config.pad_token_id or 0)
    out = it.model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True,
        output_logits=True, pad_token_id=0,
    )  # fmt: skip
    for row, prompt in enumerate(prompts):
        text = torch.cat([prompt, out.sequences[row, ids.shape[1] :]])
        following = torch.arange(new) + (1 if side == "right" and not mask[row, -1] else len(prompt))
        positions = torch.cat([torch.arange(len(prompt)), following])[None]
        # With a mask, else ids that start again would mean two texts.
        alone = it.expected(text, position_ids=positions, attention_mask=torch.ones(1, len(text), dtype=torch.long))
        yield torch.stack(out.logits)[start:, row], alone[len(prompt) - 1 + start : -1]


def hole(it: Subject) -> Iterator[Comparison]:
    """Tokens that the mask hides between real ones."""
    text = TEXTS[0]
    mask = torch.ones(1, len(text), dtype=torch.long)
    mask[0, 4:7] = 0
    real = mask[0].bool()
    yield it.model(text[None], attention_mask=mask).logits[0][real], it.expected(text[real])


def jumps(it: Subject, cached: bool | None) -> Iterator[Comparison]:
    """Ids with gaps: as if there were other tokens in them, which a mask hides.

    cached: the last tokens are read one by one with their ids; without (False), they may go on from the last id, or be counted.
    """
    text, split = tokens(len(JUMPS), 4), 7
    mask = torch.ones(1, len(JUMPS), dtype=torch.long)
    if cached is None:
        yield it.model(text[None], position_ids=JUMPS[None], attention_mask=mask).logits[0], filled(it, text, JUMPS)
        return
    cache = DynamicCache(config=it.model.config)
    head = it.model(text[None, :split], position_ids=JUMPS[None, :split], attention_mask=mask[:, :split], past_key_values=cache)
    yield head.logits[0], filled(it, text[:split], JUMPS[:split])
    onwards, counted = (torch.cat([JUMPS[:split], torch.arange(3) + start]) for start in (int(JUMPS[split - 1]) + 1, split))
    allowed = [filled(it, text, JUMPS)] if cached else [it.expected(text, position_ids=counted[None], attention_mask=mask)]
    allowed += [] if cached else [filled(it, text, onwards)]
    for step in range(split, len(JUMPS)):
        ids = {"position_ids": JUMPS[None, step : step + 1]} if cached else {}
        out = it.model(text[None, step : step + 1], attention_mask=mask[:, : step + 1], past_key_values=cache, **ids)
        yield out.logits[0, 0], *(each[step] for each in allowed)


def filled(it: Subject, text: Tensor, ids: Tensor) -> Tensor:
    """`[L, D]`: the outputs of tokens at these positions in a longer text, of which they see nothing else."""
    length = int(ids.max()) + 1
    longer = torch.full((length,), 3).index_copy(0, ids, text)
    shown = torch.zeros(length, dtype=torch.bool).index_fill(0, ids, True)
    mask = torch.ones(length, length, dtype=torch.bool).tril() & shown[None, :] | torch.eye(length, dtype=torch.bool)
    hidden = torch.zeros(length, length).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    return it.expected(longer, attention_mask=hidden)[ids]


def prefix_tuned(it: Subject, side: str, generate: bool = False) -> Iterator[Comparison]:
    """Behind a learned prefix a padded row gives what it gives alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PrefixTuningConfig, get_peft_model

        torch.manual_seed(0)
        model, oracle = (
            get_peft_model(each, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PREFIX)).eval()
            for each in (it.model, it.oracle)
        )
        oracle.load_state_dict(model.state_dict(), strict=False)
        prompts = [text[: 8 - 2 * row] for row, text in enumerate(TEXTS)]
        ids, mask = padded(prompts, side)
        if not generate:
            logits = model(input_ids=ids, attention_mask=mask).logits
            for row, prompt in enumerate(prompts):
                yield logits[row][mask[row].bool()], oracle(input_ids=prompt[None]).logits[0]
            return
        settings = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        out = model.generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
        for row, prompt in enumerate(prompts):
            text = torch.cat([prompt, out.sequences[row, ids.shape[1] :]])
            yield torch.stack(out.logits)[:, row], oracle(input_ids=text[None]).logits[0, len(prompt) - 1 : -1]
