"""Diagnostics of models, compared with models whose attention, gradients, and states are known."""

import copy
import json
import math
import statistics
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_posenc
import models
from closeness import assert_close
from hf_posenc import diagnostics
from hf_posenc.diagnostics.registry import DIAGNOSTICS
from models import LENGTH, VOCABULARY, patched, shared, stock, tiny, tokens
from tools.hosts.tiny import build

SIZE = 12


class KnownConfig(PreTrainedConfig):
    model_type = "known"


class Known(PreTrainedModel):
    """One layer with one head. Its weights are a_ij = 2^-|i - j| / Σ. Its states are the weighted means of embeddings, or
    depend on `kind`.
    """

    config_class = KnownConfig
    _supports_sdpa = True

    def __init__(self, config, kind="weights"):
        super().__init__(config)
        self.kind, self.words = kind, nn.Embedding(20, 6)
        self.post_init()

    def forward(self, input_ids, use_cache=None, return_dict=None, output_attentions=None):
        weights = known_weights(input_ids.shape[1])
        states = self.words(input_ids)
        if self.kind == "weights":
            states = weights @ states
        elif self.kind == "positions":  # only positions, all orthogonal
            states = torch.eye(SIZE).expand(len(states), -1, -1)
        heads = weights.expand(len(states), 1, -1, -1)
        return BaseModelOutput(last_hidden_state=states, attentions=(heads,) if output_attentions else None)

    def get_input_embeddings(self):
        return self.words


def known_weights(size):
    distance = torch.arange(size) - torch.arange(size)[:, None]
    weights = 2.0 ** -distance.abs()
    return weights / weights.sum(-1, keepdim=True)


def known(kind="weights"):
    return Known(KnownConfig(), kind)


@pytest.fixture(scope="module")
def silent():
    """A BERT with zero queries and ALiBi: the attention in each layer is softmax(-m |i - j|)."""
    model = stock("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".query." in name:
                parameter.zero_()
    return hf_posenc.patch(model, "alibi")


def silent_attention(size, head):
    slope = 2.0 ** (-2 * (head + 1))  # of 4 heads
    rows = [[math.exp(-slope * abs(i - j)) for j in range(size)] for i in range(size)]
    return [[value / sum(row) for value in row] for row in rows]


# Identical words.


def test_probing(silent):
    size = 9
    found = diagnostics.probing(silent, 2, size)
    assert found.attention.shape == (2, 4, size, size)
    for head in range(4):
        expected = torch.tensor(silent_attention(size, head), dtype=torch.float64)
        assert_close(found.attention[:, head], expected.expand(2, -1, -1))
        slope = 2.0 ** (-2 * (head + 1))
        odds = [-slope * abs(i - j) for i in range(size) for j in range(size)]
        assert found.strength[0, head] == pytest.approx(statistics.pstdev(odds), rel=1e-4)
    for name in ("translation_invariance", "monotonicity", "local_monotonicity", "symmetry"):
        assert_close(getattr(found, name), torch.ones(2, 4, dtype=torch.float64))
    assert_close(found.earlier, torch.full((2, 4), 0.5, dtype=torch.float64))


def test_probing_of_decoders_and_of_nothing():
    causal = diagnostics.probing(shared("gpt2", "alibi"), 2, 8)
    assert causal.earlier.eq(1).all() and causal.symmetry.isnan().all() and causal.translation_invariance.min() > 0.999
    still = diagnostics.probing(shared("bert", "none"), 2, 8)
    assert still.strength.max() < 1e-4 and still.monotonicity.isnan().all() and "undefined" in str(still)
    learned = diagnostics.probing(shared("bert"), 2, 8)
    assert learned.translation_invariance.mean() < 0.9 and learned.strength.min() > 0.01


def test_words(tokenizer):
    """The test word is never a special token: RoBERTa's positions skip padding, so a padding word would give
    uniform attention.
    """
    by_name = diagnostics.probing(shared("bert"), ["w3", "w7"], 8, tokenizer=tokenizer)
    assert by_name == diagnostics.probing(shared("bert"), tokenizer.convert_tokens_to_ids(["w3", "w7"]), 8)
    with pytest.raises(ValueError, match=r"w3\ w7"):
        diagnostics.probing(shared("bert"), ["w3 w7"], 8, tokenizer=tokenizer)
    model = stock("roberta", vocab_size=4, bos_token_id=0, eos_token_id=2)  # 1 is padding
    assert diagnostics.probing(model, 4, 8) == diagnostics.probing(model, [3], 8)


@pytest.mark.slow
def test_weights_that_are_rounded_to_0_are_told(silent):
    """The first of four heads has the slope 1/4, so float32 underflows at a distance of about 415."""
    assert "weight 0" not in str(diagnostics.probing(silent, 1, 8)) + str(diagnostics.probing(patched("gpt2", "alibi"), 1, 8))
    found = diagnostics.probing(silent, 1, 600)
    lost = (found.attention == 0).double().mean().item()
    assert 0 < lost < 0.1 and f"{lost:.0%} of the pairs have the weight 0" in str(found)


# Attention by distance.


def test_attention_by_distance():
    found = diagnostics.attention_by_distance(known(), torch.zeros(1, 5, dtype=torch.long), max_distance=2)
    rows = known_weights(5).tolist()
    assert found.distances == (-2, -1, 0, 1, 2) and found.pairs == (3, 4, 5, 4, 3)
    for place, distance in enumerate(found.distances):
        expected = statistics.mean(rows[i][i + distance] for i in range(5) if 0 <= i + distance < 5)
        assert found.weights[0, 0, place] == pytest.approx(expected)
    mean = statistics.mean(sum(abs(i - j) * rows[i][j] for j in range(5)) for i in range(5))
    assert found.mean_distance.item() == pytest.approx(mean)
    beyond = diagnostics.attention_by_distance(shared("gpt2", "alibi"), tokens(2, 3), max_distance=4)
    assert beyond.distances == (-4, -3, -2, -1, 0) and beyond.weights[..., :2].isnan().all()
    assert json.loads(beyond.to_json())["weights"][0][0][0] is None


@pytest.mark.parametrize("host", ["bert", "gpt2", "llama"])
def test_padding_counts_for_nothing(host):
    model = shared(host, "alibi")
    ids = tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    together = diagnostics.attention_by_distance(model, {"input_ids": ids, "attention_mask": mask}, max_distance=3)
    first, second = (diagnostics.attention_by_distance(model, row, max_distance=3) for row in (ids[:1, :7], ids[1:]))
    counts = torch.tensor(first.pairs), torch.tensor(second.pairs)
    expected = (first.weights * counts[0] + second.weights * counts[1]) / sum(counts)
    assert_close(together.weights, expected)
    assert together.tokens == 18 and together.texts == 2


# Entropy.


def test_attention_entropy(silent):
    """The entropy of known weights equals that of loops over floats."""
    found = diagnostics.attention_entropy(silent, torch.ones(2, 9, dtype=torch.long))
    for head in range(4):
        rows = silent_attention(9, head)
        entropy = statistics.mean(-sum(value * math.log(value) for value in row) for row in rows)
        assert found.entropy[:, head].tolist() == pytest.approx([entropy] * 2, rel=1e-5)
    assert found.even == pytest.approx(math.log(9)) and (found.texts, found.tokens) == (2, 18)
    decoder = diagnostics.attention_entropy(shared("gpt2", "none"), tokens(1, 5))
    assert decoder.even == pytest.approx(statistics.mean(math.log(seen) for seen in range(1, 6)))
    assert json.loads(found.to_json()) == found.to_dict()


# Gradients.


@pytest.mark.parametrize(("query", "place"), [(None, 4), ("last", 7)])
def test_receptive_field(query, place):
    """∂state_i/∂embedding_j is a_ij times the identity, whose projections by ±1 have the length √6."""
    found = diagnostics.receptive_field(known(), torch.zeros(1, 8, dtype=torch.long), query=query, shares=(0.5, 0.9))
    row = known_weights(8)[place].double()
    assert found.query == ("middle" if query is None else "last")
    assert found.distances == tuple(range(-place, 8 - place))
    assert_close(found.share, row)
    cumulative = [sum(row[j] for j in range(8) if abs(j - place) <= radius) for radius in range(place + 1)]
    assert_close(found.cumulative, torch.stack(cumulative))
    assert found.radius == tuple(next(r for r, held in enumerate(cumulative) if held >= share) for share in (0.5, 0.9))


def test_receptive_field_of_a_decoder():
    """It also works in inference mode, and for embeddings that are scaled in place, as in CTRL."""
    for model in (shared("llama", "rope"), tiny("CTRLModel")):
        found = diagnostics.receptive_field(model, tokens(3, 9))
        assert found.query == "last" and found.distances == tuple(range(-8, 1))
        assert found.cumulative[-1].item() == pytest.approx(1)
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.inference_mode():
            assert diagnostics.receptive_field(model, tokens(3, 9)) == found


# Order.


@pytest.mark.parametrize(("kind", "tokens_change"), [("words", 0.0), ("positions", 1.0)])
def test_order_sensitivity(kind, tokens_change):
    """States that depend only on words move with them. States that depend only on positions stay, and are orthogonal to each
    other.
    """
    ids = torch.arange(SIZE)[None]
    found = diagnostics.order_sensitivity(known(kind), ids)
    by_name = dict(zip(found.changes, found.tokens, strict=True))
    assert by_name["neighbours"] == pytest.approx(tokens_change, abs=1e-6)
    assert by_name["halves"] == pytest.approx(tokens_change, abs=1e-6)
    assert found.text == pytest.approx((0, 0, 0), abs=1e-6)
    assert found == diagnostics.order_sensitivity(known(kind), ids) or kind == "words"


def test_order_of_models(tokenizer):
    texts = ["w1 w2 w3 w4 w5 w6 w7", "w9 w8 w3 w1 w1 w2"]
    without, learned = (
        diagnostics.order_sensitivity(model, texts, tokenizer=tokenizer) for model in (shared("bert", "none"), shared("bert"))
    )
    assert max(*without.tokens, *without.text) < 1e-9 and min(*learned.tokens, *learned.text) > 1e-6


# Length.


@pytest.mark.parametrize("host", ["gpt2", "llama"])
def test_length_curve_of_a_language_model(host):
    model, ids = patched(host, "alibi", "ForCausalLM" if host == "llama" else "LMHeadModel"), tokens(2, 16)
    found = diagnostics.length_curve(model, ids, targets=3, lengths=[5, 12])
    assert found.measure == "loss" and found.by_text.shape == (2, 2)
    for text in range(2):
        for place, length in enumerate((5, 12)):
            with torch.no_grad():
                logits = model(ids[text : text + 1, -length:]).logits[0].double().log_softmax(-1)
            loss = -statistics.mean(logits[length - 4 + i, ids[text, -3 + i]].item() for i in range(3))
            assert found.by_text[text, place].item() == pytest.approx(loss, rel=1e-4)
    assert found.mean == pytest.approx(found.by_text.mean(0).tolist())
    assert found.error[1] == pytest.approx(statistics.stdev(found.by_text[:, 1].tolist()) / math.sqrt(2))


def test_length_curve_of_a_masked_model(tokenizer):
    model = patched("bert", "alibi", "ForMaskedLM")
    words = [f"w{i}" for i in range(12)]
    found = diagnostics.length_curve(model, [" ".join(words)], tokenizer=tokenizer, targets=5, lengths=[8, 14])
    ids = tokenizer(" ".join(words[-6:]), return_tensors="pt").input_ids  # [CLS] … [SEP]: 8 tokens
    masked = ids.clone()
    masked[0, [2, 6]] = tokenizer.mask_token_id  # the first and the fifth of the last five words
    with torch.no_grad():
        logits = model(masked).logits[0, [2, 6]]
    assert found.measure == "masked loss" and found.error == (None, None)
    assert found.mean[0] == pytest.approx(F.cross_entropy(logits, ids[0, [2, 6]]).item(), rel=1e-4)


def test_length_curve_of_states():
    model, ids = known(), torch.arange(16)[None]
    found = diagnostics.length_curve(model, ids, targets=4)
    short, long = (known_weights(size) @ model.words(ids[0, -size:]) for size in (8, 16))
    assert found.lengths == (8, 16) and found.measure == "cosine" and found.mean[0] == pytest.approx(1)
    assert found.mean[1] == pytest.approx(F.cosine_similarity(short[-4:], long[-4:]).mean().item(), rel=1e-4)


# Side effects and errors.

SETTINGS = {"probing": {"words": 1, "length": 6}, "length_curve": {"targets": 2}}
EVERY = {
    name: partial(each.measure, **({"texts": tokens()} if each.needs == "texts" else {}), **SETTINGS.get(name, {}))
    for name, each in DIAGNOSTICS.items()
    if each.needs in ("model", "texts")
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("host", [("bert", None), ("bert", "shaw"), ("llama", "alibi")], ids=str)
def test_nothing_is_left_behind(name, host):
    model = shared(*host)
    before = [id(value) for value in model.state_dict(keep_vars=True).values()]
    generator = torch.get_rng_state()
    result = EVERY[name](model)
    assert json.loads(result.to_json()) == result.to_dict() and str(result)
    models.assert_unchanged()
    training = copy.deepcopy(model).train()
    assert result == EVERY[name](training) and training.training
    assert torch.equal(generator, torch.get_rng_state())
    assert [id(value) for value in model.state_dict(keep_vars=True).values()] == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == training.config._attn_implementation == "sdpa"


def test_threads():
    found = []
    measure = lambda: found.append(EVERY["attention_by_distance"](shared("bert")))  # noqa: E731
    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and found[0] == found[1] == found[2]


def test_converted_attention_is_that_of_the_model():
    model = patched("bert", "t5")
    found = diagnostics.attention_by_distance(model, tokens(1), max_distance=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        given = torch.stack(model(tokens(1), output_attentions=True).attentions)[:, 0].double()
    assert_close(found.weights[..., 1], given.diagonal(dim1=-2, dim2=-1).mean(-1))


def test_length_curve_takes_the_types_of_a_batch():
    model, ids, types = shared("bert"), tokens(1, 16), (torch.arange(16) > 9).long()[None]
    found = diagnostics.length_curve(model, {"input_ids": ids, "token_type_ids": types}, lengths=[6, 12], targets=4)
    with torch.no_grad():
        short, long = (
            model(input_ids=ids[:, -size:], token_type_ids=types[:, -size:]).last_hidden_state[0, -4:] for size in (6, 12)
        )
    assert found.mean[1] == pytest.approx(F.cosine_similarity(short, long).mean().item(), rel=1e-5)
    assert found != diagnostics.length_curve(model, ids, lengths=[6, 12], targets=4)


def test_a_model_that_sees_what_it_predicts(tokenizer):
    """XLM has one model class for both tasks. By default, it is a masked language model."""
    for model, measure in (
        (tiny("XLMWithLMHeadModel", vocab_size=VOCABULARY), "masked loss"),
        (tiny("XLMWithLMHeadModel", vocab_size=VOCABULARY, causal=True), "loss"),
        (stock("bert", "LMHeadModel", is_decoder=True), "loss"),
    ):
        found = diagnostics.length_curve(model, tokens(1, 16), tokenizer=tokenizer, lengths=[6, 12], targets=4)
        assert found.measure == measure
    with pytest.raises(ValueError, match="BertLMHeadModel.*is_decoder=True"):
        diagnostics.length_curve(stock("bert", "LMHeadModel"), tokens(1, 16), lengths=[6, 12], targets=4)


def short(length=3):
    return torch.zeros(1, length, dtype=torch.long)


def on_bert(name, *given, **settings):
    return lambda: getattr(diagnostics, name)(shared("bert"), *given, **settings)


def on_batch(**batch):
    return on_bert("attention_by_distance", {"input_ids": short(), **batch})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diagnostics.probing(nn.Linear(2, 2)), "Linear.*Transformers"),
        (on_bert("probing", 1, LENGTH + 1), f"length={LENGTH + 1} .* of BertModel, {LENGTH}"),
        (on_bert("probing", ["word"], 4), "need a tokenizer"),
        (on_bert("probing", [VOCABULARY], 4), f"input_ids from {VOCABULARY} to {VOCABULARY}"),
        (on_bert("probing", 2.5, 4), r"words=2\.5"),
        (on_bert("probing", [2.5], 4), r"2\.5"),
        (on_bert("attention_by_distance", ["a text"]), "need a tokenizer"),
        (on_bert("attention_by_distance", "a text"), "must be a list of strings"),
        (on_bert("attention_by_distance", []), "texts is empty"),
        (on_bert("attention_by_distance", {"ids": 1}), "a batch without input_ids"),
        (on_bert("attention_by_distance", short(), length=-1), r"length=\-1"),
        (on_bert("attention_by_distance", short() > 0), "a batch without input_ids"),
        (on_batch(position_ids=short()), "position_ids.*input_ids.*token_type_ids"),
        (on_batch(token_type_ids=short(2)), r"input_ids"),
        (on_batch(attention_mask=[[1, 1, 1]]), "attention_mask"),
        (on_bert("receptive_field", short(1)), "Text 0 has 1 tokens, but 2 are needed"),
        (on_bert("receptive_field", short(), query="first"), "query='first'.*middle"),
        (on_bert("receptive_field", short(), shares=(2,)), r"2\.0"),
        (on_bert("order_sensitivity", short()), "only 3 tokens .* 4"),
        (on_bert("length_curve", short(9)), "shortest text has 9 tokens.* 24"),
        (on_bert("length_curve", short(99), lengths=[33, 48]), "BertModel"),
        (on_bert("length_curve", short(99), lengths=[8]), "the targets and a token before them"),
        (lambda: diagnostics.length_curve(known(), short(9), lengths=[8, 6], targets=2), "in ascending order"),
        (lambda: diagnostics.length_curve(stock("bert", "ForMaskedLM"), short(16), targets=4), "that has a mask token"),
        (lambda: diagnostics.probing(tiny("T5Model"), 1, 4), "has an encoder and a decoder"),
        (lambda: EVERY["attention_by_distance"](tiny("MambaModel")), "MambaModel doesn't return the attention weights"),
        (lambda: EVERY["attention_by_distance"](build("squeezebert")), "normalized attention weights .values from -"),
        (lambda: EVERY["probing"](build("squeezebert")), "normalized attention weights .values from -"),
        (lambda: EVERY["receptive_field"](build("ibert")), "IBertModel doesn't embed each token as one vector"),
        (lambda: EVERY["receptive_field"](build("longformer")), "LongformerModel doesn't embed each token as one vector"),
        (lambda: EVERY["order_sensitivity"](build("canine")), "CanineModel"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
