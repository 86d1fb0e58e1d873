"""`generate` with T5 and mT5 in all its modes, on padded sources and with prompts for the decoder.

Each token must have been chosen from the logits that one forward pass over the unpadded source and the row's target gives.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

import hf_posenc
from attacks.cases import Case, Comparison, Settings, no_grad
from attacks.subjects import ITSELF, VOCABULARY, padded, patched, tokens
from tools.hosts.tiny import randomized

BUCKETS: dict[str, Any] = dict(num_buckets=8, max_distance=12)
SIZES: dict[str, Any] = dict(
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    vocab_size=VOCABULARY,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
    **{f"relative_attention_{name}": size for name, size in BUCKETS.items()},
)
HOSTS = ("t5", "mt5")
ENCODINGS = (
    ITSELF,
    "none",
    "sinusoidal",
    "learned",
    "rope",
    "alibi",
    "kerple",
    "t5",
    "shaw",
    "deberta",
    "fire",
    "normalized",
    "relative_key_query",
    "sinusoidal+alibi",
    "sinusoidal+rope+relative+shaw",
)
"""Those of all that are asked for, two or more for each way to act."""
ONE_WAY = ("cope", "fox", "xpos")
"""Those for causal attention, which act in the decoder only."""
SOURCES, PROMPTS = [tokens(9, 1), tokens(6, 2)], [tokens(4, 3), tokens(2, 4)]
NEW, LENGTH = 6, 40
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 20},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams that sample": {"num_beams": 3, "do_sample": True},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
    "encoder_outputs": {"outputs": True},
    "beams, encoder_outputs": {"outputs": True, "num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "alone": True},
    "assisted": {"assistant": True, "alone": True},
    "inputs_embeds": {"embeds": True},
    "offloaded cache": {"cache_implementation": "offloaded"},
}
"""Mode -> arguments of `generate`. alone: it takes one row. outputs, embeds: the source is given in this form."""
SIDES = ("", "right", "left")
STARTS: dict[str, Any] = {"": None, "decoder prompt": False, "decoder prompts, left-padded": True}
"""What the decoder begins with: nothing, prompts of one length, or of several."""


def cases(settings: Settings) -> Iterator[Case]:
    for host in HOSTS:
        for encoding in asked(settings):
            for mode in MODES:
                for side in SIDES if host == "t5" else ("left",):
                    for start in STARTS if side != "right" else ("",):
                        attack = ", ".join(filter(None, (mode, side and f"source padded on the {side}", start)))
                        run = no_grad(generated, host, encoding, mode, side, start)
                        yield Case(attack, host, encoding, run, functools.partial(right, host, mode, side, start))
            for name, cache in CACHES.items():
                run, stock = no_grad(in_steps, host, encoding, cache), functools.partial(cached_right, host, cache)
                yield Case(f"in steps, {name}", host, encoding, run, stock)


def asked(settings: Settings) -> list[str]:
    return [encoding for encoding in settings.encodings if encoding in (*ENCODINGS, *ONE_WAY)]


def stock(host: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[host](**SIZES)
    return randomized(AutoModelForSeq2SeqLM.from_config(config).eval())


@functools.lru_cache(maxsize=2)
def made(host: str, encoding: str) -> tuple[Any, Any]:
    """A patched model, and one that says what is right."""
    if encoding == ITSELF:
        return with_its_biases(stock(host)), stock(host)
    sized = any(name in encoding for name in ("learned", "normalized"))
    options: dict[str, Any] = {"max_length": LENGTH} if sized else {}
    options |= {"where": "decoder"} if encoding in ONE_WAY else {}
    model, oracle = (patched(stock(host), encoding, **options) for _ in range(2))
    oracle.set_attn_implementation("eager")
    return model, oracle


def with_its_biases(model: Any) -> Any:
    """A T5 patched with `t5`, which has the stock model's biases."""
    new = hf_posenc.patch(model, "t5", **BUCKETS)
    with torch.no_grad():
        for name in ("encoder", "decoder"):
            own = getattr(model, name).block[0].layer[0].SelfAttention.relative_attention_bias
            getattr(new, name).posenc.weight.copy_(own.weight)
    return new


def answer(model: Any, host: str, mode: str, side: str, start: str) -> tuple[Any, list[tuple[Tensor, Tensor]], int]:
    """What `generate` returns; the source and the decoder's prompt of each row; the width of the prompts."""
    settings = dict(MODES[mode])
    alone, outputs, embeds = (settings.pop(name, False) for name in ("alone", "outputs", "embeds"))
    sources, ids, mask = SOURCES, *padded(SOURCES, side or "right")
    prompts = [torch.cat([torch.tensor([0]), prompt]) for prompt in PROMPTS]
    if not side:
        sources, ids = [SOURCES[0], SOURCES[0].flip(0)], torch.stack([SOURCES[0], SOURCES[0].flip(0)])
        mask = torch.ones_like(ids)
    given: dict[str, Any] = {"attention_mask": mask}
    if STARTS[start]:  # padded with the start token, else `generate` would put it before them
        given["decoder_input_ids"], given["decoder_attention_mask"] = padded(prompts, "left", padding=0)
    elif start:
        prompts = [prompt[:3] for prompt in prompts]
        given["decoder_input_ids"] = torch.stack(prompts)
    else:
        prompts = [torch.tensor([0])] * 2
    if alone:  # the second row, which is padded where one is
        sources, prompts, ids = sources[1:], prompts[1:], ids[1:]
        given = {name: value[1:] for name, value in given.items()}
    if outputs:
        given["encoder_outputs"] = model.get_encoder()(input_ids=ids, attention_mask=mask[-len(ids) :], return_dict=True)
    elif embeds:
        given["inputs_embeds"] = model.get_input_embeddings()(ids)
    else:
        given["input_ids"] = ids
    if settings.pop("assistant", False):
        settings["assistant_model"] = helper(host)
    torch.manual_seed(4)
    out = model.generate(
        **given, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        output_scores=True, length_penalty=0.0, **{"do_sample": False, **settings},
    )  # fmt: skip
    rows = [pair for pair in zip(sources, prompts, strict=True) for _ in range(settings.get("num_return_sequences", 1))]
    width = given["decoder_input_ids"].shape[1] if start else 1
    return out, rows, width


@functools.cache
def helper(host: str) -> Any:
    return patched(stock(host), "alibi")


def generated(host: str, encoding: str, mode: str, side: str, start: str) -> Iterator[Comparison]:
    model, oracle = made(host, encoding)
    yield from compared(model, oracle, host, mode, side, start)


def compared(model: Any, oracle: Any, host: str, mode: str, side: str, start: str) -> Iterator[Comparison]:
    out, rows, width = answer(model, host, mode, side, start)
    for row, (source, prompt) in enumerate(rows):
        new = out.sequences[row, width:]
        logits = once(oracle, source, torch.cat([prompt, new]))[len(prompt) - 1 : -1]
        if mode == "beams that sample":  # whose scores are those of what was drawn
            yield new.shape, (NEW,)
        elif "num_beams" in MODES[mode]:
            yield out.sequences_scores[row], logits.log_softmax(-1).gather(1, new[:, None]).sum()
        else:
            yield torch.stack(out.logits)[:, row], logits


def once(oracle: Any, source: Tensor, target: Tensor) -> Tensor:
    """`[L, V]`, by one forward pass without a cache."""
    return oracle(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]


@functools.cache
@torch.no_grad()
def right(host: str, mode: str, side: str, start: str) -> bool:
    """Whether a stock model does as its own forward pass."""
    model = stock(host)
    return all(alike(*each) for each in compared(model, model, host, mode, side, start))


def alike(actual: Any, expected: Any) -> bool:
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-3) if isinstance(actual, Tensor) else actual == expected


def dynamic(model: Any) -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))


def static(model: Any) -> EncoderDecoderCache:
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(StaticCache(config=config, max_cache_len=20), StaticCache(config=config, max_cache_len=9))


CACHES: dict[str, Callable[[Any], EncoderDecoderCache]] = {"dynamic": dynamic, "static": static}


def in_steps(host: str, encoding: str, cache: Callable[[Any], EncoderDecoderCache]) -> Iterator[Comparison]:
    yield from steps(*made(host, encoding), cache)


@functools.cache
@torch.no_grad()
def cached_right(host: str, cache: Callable[[Any], EncoderDecoderCache]) -> bool:
    model = stock(host)
    return all(alike(*each) for each in steps(model, model, cache))


def steps(model: Any, oracle: Any, make: Callable[[Any], EncoderDecoderCache]) -> Iterator[Comparison]:
    """The target in pieces of several lengths, each with the whole source's states."""
    source, target, cache = tokens(9, 11), tokens(13, 12), make(model)
    states = model.get_encoder()(input_ids=source[None])
    pieces = [
        model(encoder_outputs=states, decoder_input_ids=piece, past_key_values=cache, use_cache=True).logits[0]
        for piece in target[None].split((4, 1, 3, 1, 1, 3), 1)
    ]
    yield torch.cat(pieces), once(oracle, source, target)
