"""`generate_batch`: continuous batching over a paged cache, in which requests lie behind one another."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from attacks.cases import Case, Comparison, Settings
from attacks.subjects import stock, subject, tokens

PROMPTS = [tokens(length, length).tolist() for length in (5, 9, 3)]
NEW = 5
IMPLEMENTATIONS = ("sdpa", "paged|eager", "eager")


def cases(settings: Settings) -> Iterator[Case]:
    for implementation in IMPLEMENTATIONS:
        for host in ("gpt2", "llama"):
            for encoding in settings.encodings:
                run = functools.partial(batched, host, encoding, implementation)

                def alone(host: str = host, implementation: str = implementation) -> bool:
                    return len(answers(stock(host, AutoModelForCausalLM), implementation)) == len(PROMPTS)

                yield Case(f"generate_batch, {implementation}", host, encoding, run, stock=alone, limit=40)


@torch.no_grad()
def batched(host: str, encoding: str, implementation: str) -> Iterator[Comparison]:
    """Each answer is the greedy one to its prompt."""
    it = subject(host, encoding, AutoModelForCausalLM)
    found = answers(it.model, implementation)
    for index, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(it.expected(torch.tensor(text))[-1].argmax()))
        yield found[index] if index < len(found) else None, text[len(prompt) :]
    it.model.set_attn_implementation("sdpa")
    yield it.model(torch.tensor([PROMPTS[1]]))[0][0], it.expected(torch.tensor(PROMPTS[1]))


def answers(model: Any, implementation: str) -> list[list[int]]:
    model.set_attn_implementation(implementation)
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    cache = ContinuousBatchingConfig(page_size=8, num_blocks=16, max_batch_tokens=32)  # else as large as the memory
    outputs = model.generate_batch(PROMPTS, generation_config=settings, continuous_batching_config=cache)
    found = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [found[tuple(prompt)] for prompt in PROMPTS if tuple(prompt) in found]
