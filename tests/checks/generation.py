"""Other generation modes of Transformers: the logits of each token equal those of forward passes."""

import copy
import inspect

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    GenerationConfig,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    cache_utils,
    pipeline,
)

import hf_posenc
from checks.decoding import NEW, generate
from checks.placement import EightBit
from checks.registry import WRITERS, check, without_windows
from closeness import assert_close
from cover import quick, six
from models import VOCABULARY, patched, tokens

TEXTS = (5, 7)
"""Lengths of texts packed in one row."""


def check_choices(it, ids, logits):
    """Check that the logits of the last NEW tokens per row equal those of a forward pass over the text before them."""
    assert_close(it.plain(it.model, ids[:, :-1])[:, -NEW:], logits)


PAGED = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
"""Whether continuous batching has the arguments of Transformers 5.18."""


@check(*WRITERS, on=six)
@torch.no_grad()
def sampling_and_lookup_choose_from_forward_passes(it):
    """Several answers to a prompt, prompt lookup decoding, and assisted decoding with another model."""
    torch.manual_seed(4)
    model, rows = it.twin(), tokens(1, 6).repeat(2, 1)
    new, logits = generate(it, model, rows, torch.ones_like(rows), do_sample=True, top_k=20)
    check_choices(it, torch.cat([rows, new], dim=1), logits)
    settings = [{"prompt_lookup_num_tokens": 3}]
    if it.kind == "decoder" and not it.host.windowed:
        settings += [{"assistant_model": patched(it.name, it.encoding, it.host.head, seed=3)}]
    for more in settings:
        new, logits = generate(it, model, rows[:1], torch.ones_like(rows[:1]), **more)
        check_choices(it, torch.cat([rows[:1], new], dim=1), logits)


@check("decoder", on=six)
@torch.no_grad()
def a_prompt_is_read_in_chunks(it):
    prompt, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    expected = generate(it, it.twin(), prompt, mask)
    assert_close(generate(it, it.twin(), prompt, mask, prefill_chunk_size=4)[1], expected[1])


@check(*WRITERS, on=six, where=lambda it: hasattr(cache_utils, "Fp8QuantizedLayer") and without_windows(it))
@torch.no_grad()
def a_quantized_cache_only_rounds(it):
    """With a cache of Transformers 5.21, a quantized cache differs only by rounding."""
    ids = tokens(2, 12)
    with pytest.MonkeyPatch.context() as patch:  # FP8 rounding would hide faults
        patch.setattr(cache_utils.Fp8QuantizedLayer, "fp8_dtype", torch.float16)
        patch.setattr(cache_utils.Fp8QuantizedLayer, "fp8_max", 1.0)
        cache = it.cache(it.model, lambda config: QuantizedCache("fp8", config=config))
        assert_close(it.in_pieces(it.model, ids, (7, 8, 10), cache), it.plain(it.model, ids), rtol=5e-3, atol=5e-3)


@check("decoder", on=quick)
@torch.no_grad()
def packed_texts_of_a_collator(it):
    """Inputs of DataCollatorWithFlattening. Sequence boundaries without `position_ids` raise an error."""
    ids = tokens(1, sum(TEXTS))
    rows = DataCollatorWithFlattening(return_flash_attn_kwargs=True, separator_id=-100)(
        [{"input_ids": text[0].tolist()} for text in ids.split(TEXTS, dim=1)]
    )
    rows.pop("labels")
    if it.name != "gpt-oss":  # packed texts also attend to one another in the original model
        expected = torch.cat([it.plain(it.model, text) for text in ids.split(TEXTS, dim=1)], dim=1)
        assert_close(it.model(**rows, use_cache=False).logits, expected)
    rows.pop("position_ids")
    with pytest.raises(ValueError, match="cu_seq_lens_q.*position_ids"):
        it.model(**rows, use_cache=False)


@check("decoder", on=six, where=lambda it: it.name in ("llama", "qwen3", "gpt2") and PAGED)
@torch.no_grad()
def continuous_batching_gives_what_generate_does(it):
    """Encodings that bias scores or widen keys raise an error."""
    prompts, model = tokens(3, 6), it.twin()
    more = dict(
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32),
    )
    try:
        outputs = model.generate_batch(prompts.tolist(), **more)
    except ValueError as error:
        assert "generate_batch" in str(error) and "model.generate" in str(error)
        assert not {*it.encoding.split("+")} <= {"rope", "sinusoidal", "learned", "none"}
        return
    expected = generate(it, it.twin(), prompts, torch.ones_like(prompts))[0]
    assert [output.error for output in outputs.values()] == [None] * 3
    assert [output.generated_tokens for output in outputs.values()] == expected.tolist()


@check("decoder", on=six)
@torch.no_grad()
def a_pipeline_gives_what_generate_does(it):
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}))
    words.pre_tokenizer = WhitespaceSplit()
    write = pipeline("text-generation", model=it.twin(), tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))
    prompts = tokens(3, 6)
    texts = [" ".join(f"w{number}" for number in row) for row in prompts.tolist()]
    answers = write(texts, return_tensors=True, max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    made = torch.tensor([answer["generated_token_ids"] for (answer,) in answers])[:, 6:]
    assert made.tolist() == generate(it, it.twin(), prompts, torch.ones_like(prompts))[0].tolist()


@check(*WRITERS, on=quick, slow=True)
@torch.no_grad()
def a_step_with_a_static_cache_compiles(it):
    torch._dynamo.reset()
    ids, cache = tokens(2, 12), it.cache(it.model, StaticCache, max_cache_len=16)
    step = torch.compile(it.twin(), fullgraph=True, backend="eager")
    pieces = zip((it.model, step, step), ids.split((10, 1, 1), dim=1), strict=True)
    found = torch.cat([it.step(model, piece, cache) for model, piece in pieces], dim=1)
    assert_close(found, it.plain(it.model, ids))


@check(on=six)
@torch.no_grad()
def linear_layers_quantised_before_patch_are_refused(it):
    stock = copy.deepcopy(it.stock)
    path = next(path for path, module in stock.named_modules() if type(module) is torch.nn.Linear)
    stock.set_submodule(path, EightBit(stock.get_submodule(path)))
    with pytest.raises(ValueError, match="replaced parts"):
        hf_posenc.patch(stock, it.spec, max_length=it.max_length)
