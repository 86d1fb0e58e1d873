"""`convert`: calibration against the original model. The tests compute the target values from whole attention matrices."""

import copy
import functools
import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer

import hf_posenc
from closeness import assert_equal
from conftest import WORDS, run_python
from hf_posenc.serialization.tokenizer_files import check_known, load_tokenizer, required_tokenizer
from models import CACHE, VOCABULARY, first, slow, stock, tiny, tokens

LENGTH, TEXTS = 24, 6
REACH = 4
"""max_distance of the encodings in this file."""


def batch(length=LENGTH, count=TEXTS, seed=3):
    return {"input_ids": tokens(count, length, seed)}


def convert(host, encoding, head="Model", texts=None, **options):
    model = stock(host, head) if isinstance(host, str) else host
    texts = [batch()] if texts is None else texts
    return model, hf_posenc.convert(model, encoding, texts=texts, **options)


@torch.no_grad()
def attentions(model, inputs):
    """The attention of each layer, `[B, H, L, L]`."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    return [each.double() for each in model(**inputs, output_attentions=True, use_cache=False).attentions]


def masses(probabilities, reach=REACH):
    """The attention for each head and clipped distance, computed in plain loops: `[H, 2 reach + 1]`."""
    total = torch.zeros(probabilities.shape[1], 2 * reach + 1, dtype=torch.double)
    length = probabilities.shape[-1]
    for query in range(length):
        for key in range(length):
            total[:, max(-reach, min(reach, key - query)) + reach] += probabilities[:, :, query, key].sum(0)
    return total


def divergence(theirs, ours):
    return float((theirs * (theirs.clamp(min=1e-300).log() - ours.clamp(min=1e-300).log())).sum(-1).mean())


@pytest.mark.parametrize("host", ["bert", slow("roberta"), slow("distilbert"), "gpt2", "mpnet", slow("megatron-bert"), "llama"])
def test_every_distance_gets_its_mass(host):
    """At the minimum of the divergence, the total attention at each distance equals that of the original model."""
    model, new = convert(host, "relative", max_distance=REACH)
    for theirs, ours in zip(attentions(model, batch()), attentions(new, batch()), strict=True):
        expected, actual = masses(theirs), masses(ours)
        assert float((expected - actual).abs().sum() / expected.sum()) < 2e-3
    report = hf_posenc.inspect(new).calibration
    found = [divergence(*pair) for pair in zip(attentions(model, batch()), attentions(new, batch()), strict=True)]
    assert report.kl_after == pytest.approx(found, abs=2e-3)
    assert all(after <= before + 1e-4 for before, after in zip(report.kl_before, report.kl_after, strict=True))
    assert (report.texts, report.tokens, report.length, report.held_out) == (TEXTS, TEXTS * LENGTH, LENGTH, 0)


@torch.no_grad()
def outputs(model, path, inputs):
    seen = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    model(**inputs, use_cache=False)
    handle.remove()
    return seen[0].expand(TEXTS, -1, -1).flatten(0, 1).double()


PLACES = {
    "bert": ("embeddings.position_embeddings", "encoder.layer.1.attention.output.dense", "encoder.layer.1.output.dense"),
    "gpt2": ("wpe", "h.1.attn.c_proj", "h.1.mlp.c_proj"),
    "distilbert": ("embeddings.position_embeddings", "transformer.layer.1.attention.out_lin", "transformer.layer.1.ffn.lin2"),
    "llama": ("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"),
}


@pytest.mark.parametrize("host", PLACES)
def test_blocks_contribute_what_they_did_by_the_median(host):
    model, new = convert(host, "relative", max_distance=REACH)
    for path in PLACES[host]:
        gaps = (outputs(model, path, batch()) - outputs(new, path, batch())).median(0).values
        assert gaps.abs().max() < 1e-5
        assert new.get_submodule(path).posenc.weight.abs().sum() > 0


@pytest.mark.parametrize(("host", "table"), [("bert", "embeddings.position_embeddings"), ("gpt2", "wpe"), ("bart", "")])
def test_vectors_by_range(host, table):
    """Positions 0, 1, 2 to 3, 4 to 7, and so on get the median of the original position embeddings there."""
    if host == "bart":
        inner = stock(host).encoder
        model, new = convert(inner, "relative", max_distance=REACH)
        table, rows = "embed_positions", model.embed_positions.weight[2:]
    else:
        model, new = convert(host, "relative", max_distance=REACH)
        rows = model.get_submodule(table).weight
    found = new.get_submodule(table).posenc.weight
    ranges = [[0], [1], [2, 3], [*range(4, 8)], [*range(8, 16)], [*range(16, 24)]]
    assert hf_posenc.inspect(new).calibration.ranges == len(ranges) == len(found)
    for positions, vector in zip(ranges, found, strict=True):
        torch.testing.assert_close(vector, rows[positions].median(0).values)


def test_positions_count_from_the_first_token():
    """Padding on the left changes nothing, and a cache gives what a whole text gives."""
    _, new = convert("bert", "relative", max_distance=REACH)
    ids = tokens(1, 9)
    mask = torch.ones(1, 14, dtype=torch.long)
    mask[:, :5] = 0
    left = first(new(torch.nn.functional.pad(ids, (5, 0)), attention_mask=mask))[:, 5:]
    torch.testing.assert_close(left, first(new(ids)), rtol=1e-4, atol=1e-5)
    _, decoder = convert("gpt2", "relative", max_distance=REACH)
    start = decoder(ids[:, :5], use_cache=True)
    more = first(decoder(ids[:, 5:], **{CACHE: start.past_key_values}))
    torch.testing.assert_close(more, first(decoder(ids))[:, 5:], rtol=1e-4, atol=1e-5)


def test_amount_of_texts():
    """As many texts of as many tokens as asked, by default up to the original's length."""
    texts = [batch(length, 2, seed=length) for length in (10, 14, 24, 20)]
    for asked, expected in {
        (): (8, 136, 24),
        (("calibration_texts", 3),): (3, 24 + 24 + 20, 24),
        (("calibration_length", 12),): (8, 10 * 2 + 12 * 6, 12),
        (("calibration_texts", 3), ("calibration_length", 16)): (3, 48, 16),
    }.items():
        _, new = convert("bert", "relative", texts=texts, max_distance=REACH, **dict(asked))
        report = hf_posenc.inspect(new).calibration
        assert (report.texts, report.tokens, report.length) == expected
        assert f"{expected[0]} inputs of up to {expected[2]} tokens, {expected[1]} in total" in str(hf_posenc.inspect(new))


def test_padded_texts_are_fitted_as_they_are_alone():
    """Texts of several lengths in one batch: each distance gets its mass, which loops over the texts add up."""
    texts = [batch(length, 2, seed=length) for length in (9, 24, 15)]
    model, new = convert("bert", "relative", texts=texts, max_distance=REACH)
    for layer in range(2):
        expected, actual = (sum(masses(attentions(each, text)[layer]) for text in texts) for each in (model, new))
        assert float((expected - actual).abs().sum() / expected.sum()) < 2e-3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("calibration_texts", value, "must be an integer of at least 1") for value in (0, -3, 2.5, None, True, "9")),
        *(("calibration_length", value, "must be an integer of at least 1, or None") for value in (0, 2.5, False, "9")),
        ("calibration_length", 25, "exceeds the original model's maximum length, 24 tokens"),
    ],
)
def test_refuses_other_amounts(name, value, words):
    with pytest.raises(ValueError, match=f"{name}={value!r}.*{words}"):
        convert("bert", "relative", max_distance=REACH, **{name: value})
    if value == 25:
        with pytest.raises(ValueError, match="calibration_length=20 exceeds max_length, 16 tokens"):
            convert("bert", "relative", max_distance=REACH, max_length=16, calibration_length=20)


FITTED = {
    "relative": {"max_distance": REACH},
    "t5": {"num_buckets": 8, "max_distance": 12},
    "alibi": {"slopes": "learned"},
    "shaw": {"max_distance": REACH},
    "rope": {},
}
"""Encoding -> options."""


@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        (host, encoding) if host == "bert" or encoding == "relative" else slow(host, encoding)
        for host in ("bert", "albert", "gpt2", "mpnet", "modernbert", "llama")
        for encoding in (FITTED if host in ("bert", "llama") else ("relative", "rope"))
    ],
)
def test_nearer_to_the_original_and_back(host, encoding):
    model = stock(host)
    before, expected = copy.deepcopy(model.state_dict()), first(model(**batch()))
    _, new = convert(model, encoding, **FITTED[encoding])
    report = hf_posenc.inspect(new).calibration
    assert len(report.kl_before) == len(report.kl_after) == model.config.num_hidden_layers
    if encoding != "rope":
        assert sum(report.kl_after) < sum(report.kl_before)
    assert report.agreement >= report.agreement_before - 1e-3
    found = torch.nn.functional.cosine_similarity(first(new(**batch())), expected, dim=-1).mean()
    assert found.item() == pytest.approx(report.agreement, abs=1e-3)
    assert_equal(model.state_dict(), before)
    assert model.config._attn_implementation == stock(host).config._attn_implementation
    assert_equal(first(model(**batch())), expected)
    assert_equal(first(hf_posenc.unpatch(new)(**batch())), expected)


@pytest.mark.parametrize("host", ["bert", "albert"])
def test_parameters_that_layers_share(host):
    """`convert` fits one set of biases to all layers together."""
    _, own = convert(host, "relative", max_distance=REACH)
    _, shared = convert(host, "relative", max_distance=REACH, per_layer=False)
    assert shared.posenc.weight.shape == (4, 2 * REACH + 1)
    for new in (own, shared):
        report = hf_posenc.inspect(new).calibration
        assert sum(report.kl_after) < sum(report.kl_before) and report.agreement >= report.agreement_before - 1e-3
    kl = [sum(hf_posenc.inspect(new).calibration.kl_after) for new in (own, shared)]
    assert kl[0] <= kl[1] + 1e-3


def test_gradients_lead_where_masses_do(monkeypatch):
    monkeypatch.setattr("hf_posenc.conversion.calibration.BY_GRADIENTS", TEXTS)
    _, by_mass = convert("bert", "relative", max_distance=REACH)
    monkeypatch.setattr("hf_posenc.encodings.relative.Relative.add_to_bias_rows", lambda self, amounts: False)
    _, by_gradient = convert("bert", "relative", max_distance=REACH)
    reports = [hf_posenc.inspect(each).calibration for each in (by_mass, by_gradient)]
    assert reports[0].kl_after == pytest.approx(reports[1].kl_after, abs=2e-3)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_calibrated_on(side):
    """Texts of 24 and 18 tokens give the same result padded in one batch and in separate batches."""
    long, short = tokens(2, 24, 1), tokens(3, 18, 2)
    padded, mask = torch.zeros(5, 24, dtype=torch.long), torch.zeros(5, 24, dtype=torch.long)
    padded[:2], mask[:2] = long, 1
    place = slice(0, 18) if side == "right" else slice(6, 24)
    padded[2:, place], mask[2:, place] = short, 1
    _, expected = convert("bert", "relative", texts=[{"input_ids": long}, {"input_ids": short}], max_distance=REACH)
    _, actual = convert("bert", "relative", texts=[{"input_ids": padded, "attention_mask": mask}], max_distance=REACH)
    assert_equal(actual.state_dict(), expected.state_dict())
    assert hf_posenc.inspect(actual).calibration.tokens == 2 * 24 + 3 * 18
    # The content of masked padding changes nothing.
    padded[mask == 0] = 7
    _, actual = convert("bert", "relative", texts=[{"input_ids": padded, "attention_mask": mask}], max_distance=REACH)
    assert_equal(actual.state_dict(), expected.state_dict())


def test_rows_of_texts():
    """Rows without token types are of type 0. Texts without a token don't count, nor do duplicates."""
    model, one, two = stock("bert"), tokens(3, 24, 1), tokens(3, 20, 2)
    types = torch.arange(24).expand(3, -1) // 12
    whole = [{"input_ids": one, "token_type_ids": types}, {"input_ids": two, "token_type_ids": torch.zeros_like(two)}]
    _, expected = convert(model, "relative", texts=whole, max_distance=REACH)
    empty = {"input_ids": one, "attention_mask": torch.zeros(3, 24)}
    for order in ([0, 1], [1, 0]):
        some = [whole[0], {"input_ids": two}]
        _, actual = convert(model, "relative", texts=[empty, *(some[i] for i in order)], max_distance=REACH)
        assert_equal(actual.state_dict(), expected.state_dict())
        assert hf_posenc.inspect(actual).calibration.texts == 6
    for texts, held_out in ((tokens(1, 24).expand(40, -1), 0), (tokens(27, 24), 3)):
        for given in ([{"input_ids": texts}], {"input_ids": texts}, texts)[:: 2 if held_out else 1]:
            _, new = convert(model, "relative", texts=given, max_distance=REACH)
            assert hf_posenc.inspect(new).calibration.held_out == held_out


@pytest.mark.parametrize("encoding", ["relative", "shaw"])
def test_under_what_the_caller_has_set(encoding):
    """`convert` works in inference mode, with another default device and data type, and with tuples as outputs."""
    model, texts = stock("bert"), [batch()]
    _, expected = convert(model, encoding, texts=texts, max_distance=REACH)
    model.config.return_dict = False
    with torch.inference_mode(), torch.device("meta"):
        _, new = convert(model, encoding, texts=texts, max_distance=REACH)
    assert not any(parameter.is_inference() for parameter in new.parameters())
    assert_equal(new.state_dict(), expected.state_dict())
    assert new.config.return_dict is False


def test_refuses_what_is_not_finite():
    model = stock("bert")
    model.encoder.layer[1].output.dense.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        convert(model, "relative", max_distance=REACH)


def test_saved_and_reloaded(tmp_path):
    """The converted model is the same after reloading with or without the package, after copying, and after `extend`."""
    model, new = convert("bert", "relative", max_distance=REACH, max_length=LENGTH)
    expected = first(new.eval()(**batch()))
    for twin in (hf_posenc.extend(new, max_length=2 * LENGTH), copy.deepcopy(new)):
        assert_equal(first(twin(**batch())), expected)
    new.save_pretrained(tmp_path)
    torch.save((batch(), expected), tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "from transformers import AutoModel\n"
        "inputs, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert torch.equal(model(**inputs)[0], expected) and 'hf_posenc' not in sys.modules\n"
        "import hf_posenc\n"
        "model = AutoModel.from_pretrained(sys.argv[1])\n"
        "assert torch.equal(model(**inputs)[0], expected)\n"
        "assert hf_posenc.inspect(model).calibration.texts == 6\n"
        "print(hf_posenc.inspect(sys.argv[1]))\n"
    )
    assert "6 inputs of up to 24 tokens" in run_python(code, tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert_equal(first(hf_posenc.unpatch(again)(**batch())), first(model(**batch())))


@pytest.mark.parametrize("host", ["bart", "t5", slow("marian"), slow("mbart")])
@pytest.mark.parametrize("where", [None, "encoder", "decoder"])
@torch.no_grad()
def test_encoder_decoders(host, where, tmp_path):
    """The decoder reads the texts after its start token. It is calibrated with the hidden states of the calibrated encoder."""
    model = stock(host, decoder_start_token_id=2)
    for name, parameter in model.named_parameters():  # positions matter
        if "embed_positions" in name or "relative_attention_bias" in name:
            parameter.mul_(20)
    before, source = copy.deepcopy(model.state_dict()), batch()["input_ids"]
    target = torch.cat([torch.full((TEXTS, 1), 2), source[:, :-1]], dim=1)
    original = model(input_ids=source, decoder_input_ids=target)
    _, new = convert(model, "relative", max_distance=REACH, where=where)
    report = hf_posenc.inspect(new).calibration
    assert len(report.kl_after) == (4 if where is None else 2)
    assert sum(report.kl_after) < sum(report.kl_before) and report.agreement >= report.agreement_before - 1e-3
    found = new(input_ids=source, decoder_input_ids=target)
    name = "encoder_last_hidden_state" if where == "encoder" else "last_hidden_state"
    cosine = torch.nn.functional.cosine_similarity(found[name], original[name], dim=-1).mean()
    assert cosine.item() == pytest.approx(report.agreement, abs=1e-4)
    if where == "decoder":
        assert_equal(found.encoder_last_hidden_state, original.encoder_last_hidden_state)
    new.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert_equal(first(again(input_ids=source, decoder_input_ids=target)), first(found))
    assert hf_posenc.inspect(again).calibration == report
    assert_equal(model.state_dict(), before)
    assert_equal(first(hf_posenc.unpatch(new)(input_ids=source, decoder_input_ids=target)), first(original))


def test_experts_in_the_feed_forward_block(tmp_path):
    """The last projection belongs to a shared expert with output `[tokens, D]`. It isn't fitted, but it is saved."""
    _, new = convert(tiny("Qwen2MoeModel"), "relative", max_distance=REACH)
    assert not new.layers[0].mlp.shared_expert.down_proj.posenc.weight.any()
    assert new.layers[0].self_attn.o_proj.posenc.weight.any()
    new.eval().save_pretrained(tmp_path)
    for other in (AutoModel.from_pretrained(tmp_path), hf_posenc.extend(new, None), copy.deepcopy(new)):
        assert_equal(first(other(**batch())), first(new(**batch())))


def test_a_model_with_a_head():
    model, new = convert("bert", "relative", head="ForMaskedLM", max_distance=REACH)
    assert type(new).__name__ == "PosEncBertForMaskedLM" and new.lm_head is model.lm_head if hasattr(model, "lm_head") else True
    assert hf_posenc.inspect(new).calibration.agreement > 0
    assert new.bert.get_input_embeddings().weight is model.bert.get_input_embeddings().weight


@pytest.mark.parametrize("encoding", ["relative+alibi", "rope+relative", "relative+t5"])
def test_compositions(encoding):
    options = {"relative__max_distance": REACH}
    if "t5" in encoding:
        options |= {"t5__num_buckets": 8, "t5__max_distance": 12}
    _, new = convert("bert", encoding, **options)
    report = hf_posenc.inspect(new).calibration
    assert sum(report.kl_after) < sum(report.kl_before) and report.agreement > report.agreement_before
    assert new.config.position_encoding["relative"]["per_layer"]


def test_modes_and_types_carry_over():
    model = stock("bert").train().bfloat16()
    model.embeddings.dropout.p = 0.3
    _, new = convert(model, "relative", max_distance=REACH)
    assert all(module.training for module in new.modules()) and new.embeddings.dropout.p == 0.3
    assert {parameter.dtype for parameter in new.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad for name, parameter in new.named_parameters() if "posenc" in name)
    _, again = convert(model, "relative", max_distance=REACH)
    assert_equal(again.state_dict(), new.state_dict())


def test_probabilities_that_float16_rounds_to_zero():
    """These probabilities are small, not masked. The divergence counts them as in float32."""
    model = stock("bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight *= 100
    _, expected = convert(copy.deepcopy(model), "relative", max_distance=REACH)
    _, new = convert(model.half(), "relative", max_distance=REACH)
    reports = [hf_posenc.inspect(each).calibration for each in (new, expected)]
    assert reports[1].kl_after[0] > 5 and reports[0].kl_before == pytest.approx(reports[1].kl_before, rel=0.02)
    assert reports[0].kl_after == pytest.approx(reports[1].kl_after, rel=0.02)


def test_parameters_are_trained_from_there():
    _, new = convert("bert", "relative", max_distance=REACH)
    first(new.train()(**batch())).sum().backward()
    offsets = [parameter for name, parameter in new.named_parameters() if name.endswith("posenc.weight")]
    assert len(offsets) == 1 + 2 * 2 + 2 and all(each.grad is not None for each in offsets)


def test_patching_another_model_with_its_dict_copies_no_report():
    _, new = convert("bert", "relative", max_distance=REACH)
    other = hf_posenc.patch(stock("bert", seed=5), new.config.position_encoding)
    assert hf_posenc.inspect(other).calibration is None and "calibration" not in other.config.position_encoding
    assert not [name for name in other.state_dict() if name.endswith("dense.posenc.weight")]


def test_texts_are_cut_to_the_promised_length(minilm):
    """Strings of 40 tokens are truncated to max_length=16."""
    tokenizer, texts = AutoTokenizer.from_pretrained(minilm), [f"{i} " + "one two three " * 13 for i in range(8)]
    model = stock("bert", vocab_size=len(tokenizer))
    new = hf_posenc.convert(model, "relative", texts=texts, tokenizer=tokenizer, max_length=16, max_distance=4)
    assert hf_posenc.inspect(new).calibration.length == 16


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("host", ["bert", "gpt2", slow("roberta"), slow("mpnet"), slow("albert")])
def test_folders_without_a_vocabulary(host, saved, tmp_path):
    """Transformers builds a tokenizer for most of these directories, which maps every token to unknown."""
    stock(host).save_pretrained(tmp_path)
    if saved:
        try:
            AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        except Exception:
            pytest.skip("Transformers makes none")
    with pytest.raises(ValueError, match="without a vocabulary" if saved else "has no tokenizer. Save the original") as raised:
        required_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    model, texts = AutoModel.from_pretrained(tmp_path), ["some words"] * 32
    with pytest.raises(ValueError, match="no tokenizer.*was found"):
        hf_posenc.convert(model, "alibi", texts=texts)
    with pytest.raises(ValueError, match="Save"):
        hf_posenc.convert(model, "alibi", texts=texts, tokenizer=str(tmp_path))


@pytest.mark.parametrize("kind", ["deberta-v2", "mt5", "mbart", "whisper", slow("splinter"), slow("xglm")])
def test_tokenizers_that_transformers_makes(kind, tmp_path):
    """Such a tokenizer has special tokens, and sometimes a space or a period."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without a vocabulary"):
        load_tokenizer(str(tmp_path))


def test_texts_that_the_tokenizer_does_not_know(tokenizer):
    for given in (tokenizer, tokenizer.__call__):
        with pytest.raises(ValueError, match=r"tokenizer doesn't know the texts: 64 of their 64 tokens are '\[UNK\]'"):
            hf_posenc.convert(stock("bert"), "alibi", texts=["unheard phrases"] * 32, tokenizer=given)
    check_known(tokenizer, [tokenizer(f"{WORDS[0]} unheard phrases").input_ids])
    check_known(tokenizer, [])
    check_known(len, [[1, 1]])


def test_vocabularies_of_two_tokens_count(tmp_path):
    """Vocabularies of two tokens are valid, such as those for parity or brackets."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "(", ")"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    assert len(required_tokenizer(str(tmp_path))) == 7


def test_a_tokenizer_that_does_not_load(tokenizer, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="has a.*be loaded"):
        required_tokenizer(str(tmp_path))


ODD = r"(?s)texts contains .* integer tensors of one shape \[N, L\]"


@pytest.mark.parametrize(
    ("texts", "words", "more"),
    [
        ([], "texts is empty", {}),
        ("a text", "texts='a text'", {}),
        (3, "texts=3 ", {}),
        (["a text"], "no tokenizer with a vocabulary was found", {}),
        ([3], "texts contains 3", {}),
        ([batch()], r"relative", {"max_distance": 30}),
        ([{**batch(), "attention_mask": torch.zeros(TEXTS, LENGTH)}], "texts is empty", {}),
        ([{"input_ids": 100 + tokens(9, 9)}], r"input_ids from 1\d\d to 1\d\d, but .* ids 0 to 60. Use the tokenizer", {}),
        ([batch()], "sinusoidal", {"encoding": "sinusoidal"}),
        ([batch()], "no option 'width'", {"width": 3}),
        ([[1, 2]], ODD, {}),
        ([{**batch(), "attention_mask": torch.ones(TEXTS, 1, LENGTH, LENGTH)}], ODD, {}),
        ([{**batch(), "attention_mask": torch.ones(TEXTS, LENGTH - 1)}], ODD, {}),
        ([{**batch(), "token_type_ids": torch.zeros(TEXTS, 1, dtype=torch.long)}], ODD, {}),
        ([{"input_ids": batch()["input_ids"].float()}], ODD, {}),
        ([{"input_ids": batch()["input_ids"].tolist()}], ODD, {}),
    ],
    ids=range(16),
)
def test_refuses(texts, words, more):
    model = stock("bert")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        hf_posenc.convert(
            model, **{"encoding": "relative", **({} if "encoding" in more else {"max_distance": REACH}), **more}, texts=texts
        )
    assert_equal(model.state_dict(), before)


def test_refuses_cross_attention_and_other_inputs():
    with pytest.raises(hf_posenc.UnsupportedModelError, match="cross-attention"):
        convert("bart", "relative", max_distance=REACH, where=["encoder", "cross"])
    with pytest.raises(hf_posenc.UnsupportedModelError, match="WhisperDecoder.*where='encoder'"):
        convert(tiny("WhisperModel"), "relative", max_distance=REACH, where="decoder")


def test_refuses_what_is_no_original():
    _, new = convert("bert", "relative", max_distance=REACH)
    with pytest.raises(ValueError, match=r"relative"):
        hf_posenc.convert(new, "t5", texts=[batch()])
    with pytest.raises(hf_posenc.UnsupportedModelError, match="attn_logit_softcapping"):
        hf_posenc.convert(tiny("Gemma2Model"), "relative", max_distance=REACH, texts=[batch()])
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"self_attn attends several times"):
        hf_posenc.convert(tiny("DiffLlamaModel"), "relative", max_distance=REACH, texts=[batch()])


def test_strings_and_the_tokenizers_length(minilm):
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    texts = [f"Number {i} of many words, of which {i * i} are enough to tell where each of them stands." for i in range(6)]
    options = functools.partial(hf_posenc.convert, model, "t5", texts=texts, num_buckets=8, max_distance=16)
    tokenizer.model_max_length = 512
    new = options(tokenizer=tokenizer)
    assert tokenizer.model_max_length == 512
    assert_equal(options().state_dict(), new.state_dict())  # by the name of its directory
    report = hf_posenc.inspect(new).calibration
    assert report.agreement > report.agreement_before and report.texts == 6


@pytest.mark.parametrize("name", ["UdopModel", "BrosModel"])
def test_a_model_that_needs_other_inputs(name):
    with pytest.raises(hf_posenc.UnsupportedModelError, match=rf"only token IDs.*{name}.*[Bb]box") as refused:
        hf_posenc.convert(tiny(name), "relative", max_distance=4, texts=[{"input_ids": tokens(8, 24)}])
    assert refused.value.reason == "inputs other than tokens"


@pytest.mark.parametrize("start", [70, -2])
def test_a_start_token_outside_of_the_vocabulary(start):
    texts = [{"input_ids": tokens(8, 24)}]
    with pytest.raises(ValueError, match=rf"decoder_start_token_id={start}.*0 to {VOCABULARY - 1}"):
        hf_posenc.convert(tiny("MarianModel", decoder_start_token_id=start), "relative", max_distance=4, texts=texts)
    model = hf_posenc.convert(tiny("MarianModel", decoder_start_token_id=5), "relative", max_distance=4, texts=texts)
    assert model.config.position_spec.calibration is not None
