"""Encoder-decoder models, and tables that count their tokens themselves.

Shapes: B batch, L tokens, D hidden_size.
"""

import copy
import json

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from models import BART, CACHE, LENGTH, PAIR_HOSTS, T5, VOCABULARY, randomize, randomize_encoding, slow, tiny, tokens
from oracles import gradients

TABLES = [name for name, pair in PAIR_HOSTS.items() if pair.tables]
BIASES = [name for name, pair in PAIR_HOSTS.items() if not pair.tables]
ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw")
"""One encoding for each mechanism."""


def stock(pair, head=False, **changes):
    """A tiny random model in eval mode."""
    return models.stock(pair, PAIR_HOSTS[pair].head if head else "Model", **changes)


def patched(pair, encoding, head=False, **options):
    return randomize_encoding(hf_posenc.patch(stock(pair, head), encoding, **options))


def outputs(model, source, target, **inputs):
    """The decoder's output `[B, L, D]`."""
    return model(input_ids=source, decoder_input_ids=target, **inputs)[0]


def padded(ids, by, side):
    """Ids and mask with this much padding on one side."""
    padding = torch.full((len(ids), by), 5)
    ids_and_mask = [(ids, torch.ones_like(ids)), (padding, torch.zeros_like(padding))]
    ids_and_mask = ids_and_mask[::-1] if side == "left" else ids_and_mask
    return tuple(torch.cat(parts, dim=1) for parts in zip(*ids_and_mask, strict=True))


SOURCE, TARGET = tokens(seed=1), tokens(length=9, seed=2)


def loss(model):
    return outputs(model, SOURCE, TARGET, use_cache=False).sum()


def assert_checkpointing_gives(expected, model):
    """Both kinds of gradient checkpointing give these gradients in training mode without dropout."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for reentrant in (True, False):
        models.checkpointing(model, use_reentrant=reentrant)
        assert_close(gradients(model, loss), expected)


@pytest.mark.parametrize("pair", TABLES)
@torch.no_grad()
def test_with_the_hosts_own_table_it_is_the_stock_model(pair):
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "learned", init="host")
    assert_equal(outputs(new, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    assert {name for name, module in new.named_modules() if hasattr(module, "posenc")} == {"model.encoder", "model.decoder"}


@pytest.mark.parametrize("pair", ["marian", "pegasus"])
@torch.no_grad()
def test_with_the_formula_of_its_sinusoids_it_is_the_stock_model(pair):
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "sinusoidal", layout="concatenated")
    assert_close(outputs(new, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    longer = stock(pair, head=True, max_position_embeddings=3 * LENGTH)
    weights = {name: each for name, each in model.state_dict().items() if "embed_positions" not in name}
    longer.load_state_dict(weights, strict=False)
    texts = tokens(length=3 * LENGTH), tokens(length=2 * LENGTH)
    assert_close(outputs(new, *texts), outputs(longer, *texts))


@pytest.mark.parametrize("pair", BIASES)
@torch.no_grad()
def test_with_the_hosts_own_biases_it_is_the_stock_model(pair):
    model = stock(pair, head=True)
    buckets = {"num_buckets": 8, "max_distance": 12}
    for stack in (model.encoder, model.decoder):
        per_layer = sum("relative_attention_bias" in name for name, _ in stack.named_parameters()) > 1
    new = hf_posenc.patch(model, "t5", per_layer=per_layer, **buckets)
    for name, parameter in new.named_parameters():
        if "posenc" in name:
            owner = name.partition(".posenc")[0] + ("" if per_layer else ".block.0.layer.0.SelfAttention")
            parameter.copy_(model.get_parameter(f"{owner}.relative_attention_bias.weight"))
    for ids in (SOURCE, tokens(length=5)):
        assert_close(outputs(new, ids, TARGET), outputs(model, ids, TARGET))


@pytest.mark.parametrize(("pair", "encoding"), [("t5", "sinusoidal"), ("bart", "learned")])
@torch.no_grad()
def test_a_static_cache_counts_no_padding(pair, encoding):
    """`generate` makes 4-D masks for a static cache, which don't show the padding."""
    model, alone = patched(pair, encoding, head=True), TARGET[:, :3]
    prompt, mask = padded(alone, 2, "left")
    settings = dict(max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(SOURCE, decoder_input_ids=alone, **settings)
    settings |= {"cache_implementation": "static", "disable_compile": True}
    actual = model.generate(SOURCE, decoder_input_ids=prompt, decoder_attention_mask=mask, **settings)
    assert_close(list(actual.logits), list(expected.logits))


def test_a_decoder_without_a_limit_of_its_own():
    """T5's decoder has no length limit, and `normalized` would divide by the current length of the text."""
    with pytest.raises(ValueError, match="'normalized' needs max_length"):
        hf_posenc.patch(stock("t5"), "normalized")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_inputs_embeds(encoding):
    model = patched("bart", encoding)
    expected = outputs(model, SOURCE, TARGET)
    embedded = {
        "inputs_embeds": model.encoder.embed_tokens(SOURCE),
        "decoder_inputs_embeds": model.decoder.embed_tokens(TARGET),
    }
    assert_close(model(**embedded, decoder_input_ids=None)[0], expected)


@pytest.mark.parametrize("prefix", ["OPT", "BioGpt"])
@torch.no_grad()
def test_decoders_with_such_a_table(prefix):
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH
    )
    more = dict(ffn_dim=48, word_embed_proj_dim=16) if prefix == "OPT" else dict(intermediate_size=48)
    torch.manual_seed(0)
    model = randomize(getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**sizes, **more)))
    model.eval()
    new = hf_posenc.patch(model, "learned", init="host")
    ids = torch.arange(4, 15)[None]
    assert_equal(new(SOURCE)[0], model(SOURCE)[0])
    assert_equal(new(SOURCE, position_ids=ids)[0], model(SOURCE, position_ids=ids)[0])
    assert hf_posenc.inspect(model).max_length == hf_posenc.inspect(new).max_length == LENGTH
    longer = hf_posenc.patch(model, "alibi", max_length=4 * LENGTH)
    assert longer.config.max_position_embeddings == 4 * LENGTH
    text = tokens(length=3 * LENGTH)
    assert_equal(longer(text)[0], hf_posenc.patch(model, "alibi")(text)[0])
    assert_equal(hf_posenc.unpatch(copy.deepcopy(longer))(SOURCE)[0], model(SOURCE)[0])


@pytest.fixture
def whisper():
    sizes = {**BART, "max_source_positions": 14, "max_target_positions": LENGTH, "num_mel_bins": 5}
    sizes.pop("max_position_embeddings")
    config = transformers.WhisperConfig(**sizes, suppress_tokens=None, begin_suppress_tokens=None)
    torch.manual_seed(0)
    return randomize(transformers.WhisperForConditionalGeneration(config)).eval()


@torch.no_grad()
def test_whisper(whisper, tmp_path):
    """Whisper's encoder and decoder have tables of different lengths, and its config uses unusual names for them."""
    sound = {"input_features": torch.randn(2, 5, 28, generator=torch.Generator().manual_seed(3)), "decoder_input_ids": TARGET}
    expected = whisper(**sound)[0]
    own = hf_posenc.patch(whisper, "learned", init="host")
    assert_equal(own(**sound)[0], expected)
    assert [len(stack.posenc.weight) for stack in (own.get_encoder(), own.get_decoder())] == [14, LENGTH]
    for encoding in ENCODINGS:
        new = randomize_encoding(hf_posenc.patch(whisper, encoding))
        answer = new(**sound)[0]
        assert_apart(answer, expected)
        new.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path)
        assert_equal(loaded(**sound)[0], answer)
        assert_equal(hf_posenc.unpatch(loaded)(**sound)[0], expected)
        states = new.get_encoder()(sound["input_features"])
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        pieces = [
            new(encoder_outputs=states, decoder_input_ids=ids, **{CACHE: cache}, use_cache=True)[0]
            for ids in TARGET.split((4, 1, 4), dim=1)
        ]
        assert_close(torch.cat(pieces, dim=1), answer)
        target, mask = padded(TARGET, 2, "left")
        shifted = new(**{**sound, "decoder_input_ids": target}, decoder_attention_mask=mask)[0]
        assert_close(shifted[:, 2:], answer)
        ids = new.generate(sound["input_features"], max_new_tokens=4, min_new_tokens=4, num_beams=2)
        assert ids.shape[0] == 2 and ids.shape[1] >= 4
    # An unpatched decoder counts as the original one does, which includes padding.
    shifted = {**sound, "decoder_input_ids": target, "decoder_attention_mask": mask}
    assert_equal(hf_posenc.patch(whisper, "none", where="cross")(**shifted)[0], whisper(**shifted)[0])


# The `where` argument


some_pairs = pytest.mark.parametrize("pair", ["bart", "t5", "umt5"])


@torch.no_grad()
def test_whispers_own_prompts(whisper):
    """Transformers inserts `decoder_start_token_id` before prompts that start otherwise, unless
    config.model_type is "whisper".
    """
    features = torch.randn(1, 5, 28, generator=torch.Generator().manual_seed(3))
    given = dict(decoder_input_ids=torch.tensor([[4, 9, 11]]), max_new_tokens=4, min_new_tokens=4)
    model = hf_posenc.patch(whisper, "learned", init="host")
    assert_equal(GenerationMixin.generate(model, features, **given), GenerationMixin.generate(whisper, features, **given))
    assert model.config.model_type == "posenc-whisper"


def states_of(model):
    return model.get_encoder()(SOURCE)[0]


@pytest.mark.parametrize(
    ("pair", "encoding"),
    [
        (pytest.param if encoding in chosen else slow)(pair, encoding)
        for pair, chosen in (("bart", ("sinusoidal", "rope")), ("t5", ("alibi", "learned")), ("umt5", ("shaw",)))
        for encoding in (*ENCODINGS, "learned")
    ],
)
@torch.no_grad()
def test_a_stack_that_is_not_named_keeps_its_own_positions(pair, encoding, tmp_path):
    options = {"max_length": LENGTH} if encoding == "learned" else {}
    model = stock(pair, head=True)
    for where, kept in (("encoder", "decoder"), (["decoder"], "encoder")):
        new = randomize_encoding(hf_posenc.patch(model, encoding, where=where, **options))
        states = states_of(model)

        def run(each, kept=kept, states=states):
            return (
                each.get_encoder()(SOURCE)[0]
                if kept == "encoder"
                else each.get_decoder()(TARGET, encoder_hidden_states=states)[0]
            )

        assert_equal(run(new), run(model))
        assert_apart(outputs(new, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
        new.save_pretrained(tmp_path)
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert again.config.position_encoding["where"] == ([where] if where == "encoder" else where)
        assert_equal(outputs(again, SOURCE, TARGET), outputs(new, SOURCE, TARGET))
        for patched_one in (new, again):
            back = hf_posenc.unpatch(patched_one)
            assert type(back) is type(model)
            assert_equal(outputs(back, SOURCE, TARGET), outputs(model, SOURCE, TARGET))


@some_pairs
@torch.no_grad()
def test_an_encoding_for_each(pair):
    model = stock(pair)
    both = hf_posenc.patch(model, "alibi", where={"encoder": "rope", "decoder": {}})
    rope, alibi = hf_posenc.patch(model, "rope"), hf_posenc.patch(model, "alibi")
    states = states_of(rope)
    assert_equal(states_of(both), states)
    assert_equal(both.decoder(TARGET, encoder_hidden_states=states)[0], alibi.decoder(TARGET, encoder_hidden_states=states)[0])
    assert hf_posenc.inspect(both).where == {"encoder": "rope", "decoder": "alibi"}
    other = hf_posenc.patch(model, "rope", where={"encoder": {"theta": 7.0}, "decoder": {}})
    assert_equal(states_of(other), states_of(hf_posenc.patch(model, "rope", theta=7.0)))
    assert other.config.position_encoding["where"]["encoder"]["theta"] == 7.0


def biased_by_hand(model, bias):
    """An original model whose cross-attentions add `bias`, `[B, H, Q, K]`, through their mask argument."""

    def add(module, args, kwargs):
        name = "mask" if "mask" in kwargs else "attention_mask"
        return args, {**kwargs, name: bias}

    for name, module in model.named_modules():
        if name.endswith(("encoder_attn", "EncDecAttention")):
            module.register_forward_pre_hook(add, with_kwargs=True)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_bias_that_hides_all_shown_keys_leaves_padding_hidden(own_registry, implementation):
    """If a query is far from all tokens of the source, its cross-attention doesn't use padding instead."""

    class Window(hf_posenc.PositionEncoding, type="window-in-test"):
        def distance_bias(self, distance):
            return torch.where(distance.abs() > 2, -torch.inf, 0.0)[None]

    model = hf_posenc.patch(stock("bart"), "window-in-test", where="cross")
    model.set_attn_implementation(implementation)
    source, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[:, 3:] = 0
    expected = outputs(model, source, tokens(2, 12), attention_mask=mask)
    assert_equal(outputs(model, source.where(mask == 1, 7), tokens(2, 12), attention_mask=mask), expected)


@some_pairs
@torch.no_grad()
def test_cross_attention_sees_the_distance_of_positions(pair, tmp_path):
    """ALiBi in the cross-attention is -slope · |encoder position - decoder position|. Encoder and decoder keep their own
    positions.
    """
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "alibi", where="cross")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    distance = torch.arange(SOURCE.shape[1])[None, :] - torch.arange(TARGET.shape[1])[:, None]
    bias = -slopes[:, None, None] * distance.abs()
    expected = outputs(biased_by_hand(copy.deepcopy(model), bias[None]), SOURCE, TARGET)
    assert_close(outputs(new, SOURCE, TARGET), expected)
    source, mask = padded(SOURCE, 3, "left")
    if pair in BIASES:  # the original BART counts padding
        assert_close(outputs(new, source, TARGET, attention_mask=mask), expected)
    new.save_pretrained(tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert_equal(outputs(again, SOURCE, TARGET), outputs(new, SOURCE, TARGET))
    assert_equal(outputs(hf_posenc.unpatch(again), SOURCE, TARGET), outputs(model, SOURCE, TARGET))


@some_pairs
@pytest.mark.parametrize("encoding", ["rope", "alibi", "shaw", "t5"])
@torch.no_grad()
def test_everywhere_padding_caches_and_beams(pair, encoding):
    model = patched(pair, encoding, head=True, where=["cross", "encoder", "decoder"])
    assert model.config.position_encoding["where"] == ["encoder", "decoder", "cross"]
    alone = outputs(model, SOURCE, TARGET)
    assert_apart(alone, outputs(hf_posenc.patch(stock(pair, True), encoding), SOURCE, TARGET), by=1e-5)
    for side in ("left", "right"):
        source, mask = padded(SOURCE, 3, side)
        assert_close(outputs(model, source, TARGET, attention_mask=mask), alone)
    source, mask = padded(SOURCE, 3, "left")
    for beams in (1, 3):
        settings = dict(max_new_tokens=5, min_new_tokens=5, num_beams=beams, return_dict_in_generate=True, output_scores=True)
        with_cache, without = (
            model.generate(source, attention_mask=mask, use_cache=use_cache, **settings) for use_cache in (True, False)
        )
        assert_equal(with_cache.sequences, without.sequences)
        assert_close(list(with_cache.scores), list(without.scores))


@torch.no_grad()
def test_a_target_as_long_as_its_source_is_rotated_by_its_own_positions():
    """Keys of a cross-attention have the encoder's positions, even if there are as many keys as queries."""
    model = hf_posenc.patch(stock("bart"), "rope", where=["cross"])
    source, mask = padded(SOURCE[:, :7], 2, "left")
    assert source.shape == TARGET.shape
    states = model.encoder(source, attention_mask=mask)[0]
    expected = model.decoder(TARGET, encoder_hidden_states=states[:, 2:])[0]
    assert_close(model.decoder(TARGET, encoder_hidden_states=states, encoder_attention_mask=mask)[0], expected)


@pytest.mark.parametrize(
    "where", ["cross", ["cross", "encoder"], {"decoder": {}, "encoder": "rope+shaw"}, {"cross": {"slopes": "learned"}}]
)
def test_where_is_written_as_it_is_read(where):
    config = hf_posenc.PosEncBartConfig(position_encoding={"type": "alibi", "where": where})
    written = json.loads(config.to_json_string())["position_encoding"]
    again = hf_posenc.PosEncBartConfig(position_encoding=written)
    assert json.loads(again.to_json_string())["position_encoding"] == written


@some_pairs
def test_gradients_reach_all_that_acts(pair):
    model = patched(pair, "t5", where=["encoder", "decoder", "cross"])
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        expected = gradients(model, loss)
        trained = [name for name in expected if "posenc." in name]
        assert trained == ["encoder.posenc.weight", "decoder.posenc.weight", "decoder.posenc.cross.weight"]
        assert all(expected[name].any() for name in trained)
    assert_checkpointing_gives(expected, model)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("encodr", "'encodr'.*did you mean 'encoder'.*'decoder', 'cross'"),
        ([], "must be one or more of"),
        (3, "must be one or more of"),
        ({"decoder": 3}, r"where\['decoder'\]=3"),
        ({"decoder": {"theta": 3.0}}, "'alibi' has no option 'theta'"),
        ({"decoder": {"type": "rope", "max_length": 3}}, "'max_length'.* outside of where"),
        ({"encoder": {}, "cross": "sinusoidal"}, "where='cross' .*'sinusoidal'.* adds vectors"),
    ],
)
def test_wrong_where(where, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.patch(stock("bart"), "alibi", where=where)


def test_cross_attention_that_is_written_out():
    model = tiny("MvpModel")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="encoder_attn.*cross"):
        hf_posenc.patch(model, "alibi", where="cross")
    hf_posenc.patch(model, "alibi")


def test_where_needs_an_encoder_and_a_decoder():
    with pytest.raises(ValueError, match="BertModel"):
        hf_posenc.patch(models.stock("bert"), "alibi", where="encoder")
    with pytest.raises(ValueError, match="T5EncoderModel"):
        hf_posenc.patch(tiny("T5EncoderModel"), "alibi", where="encoder")


@torch.no_grad()
def test_a_stack_that_is_not_named_may_be_one_that_is_refused():
    sizes = dict(T5, encoder_attention_type="transient-global")
    model = randomize(transformers.LongT5Model(transformers.LongT5Config(**sizes))).eval()
    with pytest.raises(hf_posenc.UnsupportedModelError):
        hf_posenc.patch(model, "alibi")
    new = hf_posenc.patch(model, "alibi", where="decoder")
    assert_equal(states_of(new), states_of(model))
    assert_equal(outputs(hf_posenc.unpatch(new), SOURCE, TARGET), outputs(model, SOURCE, TARGET))


@pytest.mark.parametrize("pair", ["bart", "t5"])
def test_token_embeddings_that_were_resized(pair):
    """Resizing replaces several modules that share a weight by one module, which is then found under only one path."""
    model = stock(pair)
    model.resize_token_embeddings(VOCABULARY + 3)
    new = hf_posenc.patch(model, "alibi")
    new.resize_token_embeddings(VOCABULARY + 5)
    again = hf_posenc.unpatch(new)
    with torch.no_grad():
        assert_equal(outputs(again, SOURCE, TARGET), outputs(model, SOURCE, TARGET))


@pytest.mark.parametrize("pair", ["bart", "m2m-100", "marian", "t5"])
@torch.no_grad()
def test_unpatch_of_half_precision(pair):
    model = stock(pair).bfloat16()
    again = hf_posenc.unpatch(hf_posenc.patch(model, "rope"))
    assert_equal(outputs(again, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    assert {name: value.dtype for name, value in again.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}
    assert again.config.to_dict() == model.config.to_dict() and torch.get_default_dtype() == torch.float32
