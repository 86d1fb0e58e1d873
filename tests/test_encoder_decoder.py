"""Hosts of an encoder and a decoder, and the tables that count their tokens by themselves.

Shapes: B batch, L tokens, D hidden_size.
"""

import copy
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, StaticCache

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from hf_posenc.configuration import PositionSpec
from models import LENGTH, VOCABULARY, randomize, randomize_encoding, slow, tokens
from models import stock as stock_model
from oracles import gradients

BART: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=LENGTH,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)


T5: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
)


@dataclass(frozen=True)
class Pair:
    """A tiny model of an encoder and a decoder.

    prefix: of its class names. sizes: arguments of its config. head: suffix of the class with a language model's head.
    one_layer: changes of the config that leave one layer in the decoder. biases: its positions are biases by distance.
    """

    prefix: str
    sizes: dict[str, Any] = field(default_factory=lambda: BART)
    head: str = "ForConditionalGeneration"
    one_layer: dict[str, Any] = field(default_factory=lambda: {"decoder_layers": 1})
    biases: bool = False


PAIRS = {
    "bart": Pair("Bart"),
    "mbart": Pair("MBart"),
    "plbart": Pair("PLBart"),
    "blenderbot": Pair("Blenderbot"),
    "blenderbot-small": Pair("BlenderbotSmall"),
    "pegasus": Pair("Pegasus"),
    "marian": Pair("Marian", dict(BART, share_encoder_decoder_embeddings=True), head="MTModel"),
    "m2m-100": Pair("M2M100"),
    "nllb-moe": Pair("NllbMoe", dict(BART, num_experts=2, expert_capacity=64, encoder_sparse_step=0, decoder_sparse_step=0)),
    "t5": Pair("T5", T5, one_layer={"num_decoder_layers": 1}, biases=True),
    "mt5": Pair("MT5", T5, one_layer={"num_decoder_layers": 1}, biases=True),
    "umt5": Pair("UMT5", T5, one_layer={"num_decoder_layers": 1}, biases=True),
    "switch": Pair(
        "SwitchTransformers",
        dict(T5, num_sparse_encoder_layers=0, num_sparse_decoder_layers=0),
        one_layer={"num_decoder_layers": 1},
        biases=True,
    ),
}
ALIKE = ("mbart", "plbart", "blenderbot-small", "pegasus", "mt5", "switch")
"""Built as others of these are."""


def parameters(pairs):
    return [slow(pair) if pair in ALIKE else pair for pair in pairs]


TABLES, BIASES = ([name for name, pair in PAIRS.items() if pair.biases is biases] for biases in (False, True))
ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw")
"""One for each way to act."""
ALL_WAYS = "+".join(ENCODINGS)
every_pair = pytest.mark.parametrize("pair", parameters(PAIRS))
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
each_with_each = pytest.mark.parametrize(
    ("pair", "encoding"),
    [
        (slow if pair in ALIKE or (pair in ("bart", "t5")) is (encoding == ALL_WAYS) else pytest.param)(pair, encoding)
        for pair in PAIRS
        for encoding in (*ENCODINGS, ALL_WAYS)
    ],
)
"""`make test` runs every encoding on BART and T5, all of them in one composition on the others."""
kinds = pytest.mark.parametrize("pair", ["bart"])
"""Of the pairs one for each kind of layer."""


def stock(pair, head=False, **changes):
    """A tiny random model in eval mode."""
    pair = PAIRS[pair]
    config = getattr(transformers, f"{pair.prefix}Config")(**{**pair.sizes, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, pair.prefix + (pair.head if head else "Model"))(config)
    kept = {name: table.clone() for name, table in model.named_parameters() if not table.requires_grad}
    randomize(model)
    with torch.no_grad():
        for name, table in kept.items():  # sinusoids, which checkpoints don't change
            model.get_parameter(name).copy_(table)
    return model.eval()


def patched(pair, encoding, head=False, **options):
    return randomize_encoding(hf_posenc.patch(stock(pair, head), encoding, **options))


def outputs(model, source, target, **inputs):
    """`[B, L, D]`, of the decoder."""
    return model(input_ids=source, decoder_input_ids=target, **inputs)[0]


def padded(ids, by, side):
    """Ids and mask with so much padding on one side."""
    padding = torch.full((len(ids), by), 5)
    ids_and_mask = [(ids, torch.ones_like(ids)), (padding, torch.zeros_like(padding))]
    ids_and_mask = ids_and_mask[::-1] if side == "left" else ids_and_mask
    return tuple(torch.cat(parts, dim=1) for parts in zip(*ids_and_mask, strict=True))


SOURCE, TARGET = tokens(seed=1), tokens(length=9, seed=2)


def loss(model):
    return outputs(model, SOURCE, TARGET, use_cache=False).sum()


def assert_checkpointing_gives(expected, model):
    """Both kinds of gradient checkpointing, in training mode without dropout, give these gradients."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for reentrant in (True, False):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        assert_close(gradients(model, loss), expected)


@pytest.mark.parametrize("pair", TABLES)
@torch.no_grad()
def test_with_the_hosts_own_table_it_is_the_stock_model(pair):
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "learned", init="host")
    assert_equal(outputs(new, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    assert {name for name, module in new.named_modules() if "posenc" in module._modules} == {"model.encoder", "model.decoder"}


@pytest.mark.parametrize("pair", ["marian", "pegasus"])
@torch.no_grad()
def test_with_the_formula_of_its_sinusoids_it_is_the_stock_model(pair):
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "sinusoidal", layout="concatenated")
    assert_close(outputs(new, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    assert outputs(new, tokens(length=3 * LENGTH), tokens(length=2 * LENGTH)).isfinite().all()


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


@every_pair
@torch.no_grad()
def test_none_takes_order_away_and_each_encoding_brings_it_back(pair):
    order = torch.randperm(SOURCE.shape[1], generator=torch.Generator().manual_seed(0))
    earlier = [*range(TARGET.shape[1] - 2, -1, -1), TARGET.shape[1] - 1]
    for encoding in (None, "none", *ENCODINGS):
        # The last token of a decoder with one layer sees all others at once.
        model = stock(pair, **PAIRS[pair].one_layer)
        model = model if encoding is None else randomize_encoding(hf_posenc.patch(model, encoding))
        states = model.encoder(SOURCE)[0]
        compare = assert_close if encoding == "none" else assert_apart
        compare(model.encoder(SOURCE[:, order])[0], states[:, order])
        one, other = (model.decoder(ids, encoder_hidden_states=states)[0][:, -1] for ids in (TARGET, TARGET[:, earlier]))
        compare(one, other)
        # Neither stack's encoding acts between them.
        there = model.decoder(TARGET, encoder_hidden_states=states[:, order])[0]
        assert_close(there, model.decoder(TARGET, encoder_hidden_states=states)[0])


@every_pair
@torch.no_grad()
def test_unpatch_is_bit_equal_in_memory_and_after_a_reload(pair, tmp_path):
    model = stock(pair, head=True)
    expected = outputs(model, SOURCE, TARGET)
    new = hf_posenc.patch(model, "alibi", max_length=4 * LENGTH)
    back = hf_posenc.unpatch(new)
    assert type(back) is type(model) and back.config.to_dict() == model.config.to_dict()
    assert_equal(outputs(back, SOURCE, TARGET), expected)
    assert {name: p.requires_grad for name, p in back.named_parameters()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }
    new.save_pretrained(tmp_path)
    again = hf_posenc.unpatch(type(new).from_pretrained(tmp_path))
    assert_equal(outputs(again, SOURCE, TARGET), expected)
    assert_equal(outputs(model, SOURCE, TARGET), expected)


@each_with_each
@torch.no_grad()
def test_saves_and_loads(pair, encoding, tmp_path):
    model = patched(pair, encoding, head=True)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert_equal(outputs(loaded, SOURCE, TARGET), outputs(model, SOURCE, TARGET))
    base = transformers.AutoModel.from_pretrained(tmp_path)
    states = model.get_encoder()(SOURCE)[0]
    expected = model.get_decoder()(TARGET, encoder_hidden_states=states)[0]
    assert_equal(outputs(base, SOURCE, TARGET), expected)
    embeddings = loaded.get_input_embeddings().weight
    assert embeddings is loaded.get_decoder().embed_tokens.weight is loaded.lm_head.weight


@each_with_each
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_of_source_and_target_changes_nothing(pair, encoding, side):
    model = patched(pair, encoding)
    alone = outputs(model, SOURCE, TARGET)
    source, mask = padded(SOURCE, 3, side)
    target, target_mask = padded(TARGET, 2, side)
    answer = outputs(model, source, target, attention_mask=mask, decoder_attention_mask=target_mask)
    assert_close(answer[target_mask.bool()].view_as(alone), alone)
    assert_close(outputs(model, source, TARGET, attention_mask=mask), alone)


def caches(model, size):
    yield EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    own, cross = (StaticCache(config=model.config, max_cache_len=length) for length in (size, SOURCE.shape[1]))
    yield EncoderDecoderCache(own, cross)


@each_with_each
@torch.no_grad()
def test_cached_decoding_is_one_pass(pair, encoding):
    model = patched(pair, encoding)
    target, mask = padded(TARGET, 2, "left")
    encoded = model.encoder(SOURCE)
    expected = model(encoder_outputs=encoded, decoder_input_ids=target, decoder_attention_mask=mask)[0]
    for cache in caches(model, target.shape[1]):
        pieces = [
            model(
                encoder_outputs=encoded,
                decoder_input_ids=target[:, start:stop],
                decoder_attention_mask=mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
            )[0]
            for start, stop in itertools.pairwise((0, 5, 6, 7, target.shape[1]))
        ]
        assert_close(torch.cat(pieces, dim=1)[:, 2:], expected[:, 2:])


@each_with_each
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generates_as_without_a_cache(pair, encoding, beams):
    model = patched(pair, encoding, head=True)
    source, mask = padded(SOURCE, 3, "left")
    prompt, prompt_mask = padded(TARGET[:, :3], 2, "left")
    settings = dict(max_new_tokens=6, min_new_tokens=6, num_beams=beams, return_dict_in_generate=True, output_scores=True)
    with_cache, without = (
        model.generate(
            source,
            attention_mask=mask,
            decoder_input_ids=prompt,
            decoder_attention_mask=prompt_mask,
            use_cache=use_cache,
            **settings,
        )
        for use_cache in (True, False)
    )
    assert_equal(with_cache.sequences, without.sequences)
    assert_close(list(with_cache.scores), list(without.scores))


@pytest.mark.parametrize(("pair", "encoding"), [("t5", "sinusoidal"), ("bart", "learned")])
@torch.no_grad()
def test_a_static_cache_counts_no_padding(pair, encoding):
    """`generate` makes 4-D masks for such a cache, of which padding can't be told."""
    model, alone = patched(pair, encoding, head=True), TARGET[:, :3]
    prompt, mask = padded(alone, 2, "left")
    settings = dict(max_new_tokens=4, min_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    expected = model.generate(SOURCE, decoder_input_ids=alone, **settings)
    settings |= {"cache_implementation": "static", "disable_compile": True}
    actual = model.generate(SOURCE, decoder_input_ids=prompt, decoder_attention_mask=mask, **settings)
    assert_close(list(actual.logits), list(expected.logits))


def test_a_decoder_without_a_limit_of_its_own():
    """T5's has none, and `normalized` would divide by the length of the text so far."""
    with pytest.raises(ValueError, match="'normalized' needs max_length"):
        hf_posenc.patch(stock("t5"), "normalized")


@kinds
@every_encoding
def test_inputs_embeds_and_gradient_checkpointing(pair, encoding):
    model = patched(pair, encoding)
    expected = outputs(model, SOURCE, TARGET)
    embedded = {
        "inputs_embeds": model.encoder.embed_tokens(SOURCE),
        "decoder_inputs_embeds": model.decoder.embed_tokens(TARGET),
    }
    assert_close(model(**embedded, decoder_input_ids=None)[0], expected)
    assert_checkpointing_gives(gradients(model, lambda model: outputs(model, SOURCE, TARGET).sum()), model)


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
    assert longer(tokens(length=3 * LENGTH))[0].isfinite().all()
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
    """Its encoder has a table of sounds, its decoder another one, of other lengths, and its config neither's usual name."""
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
            new(encoder_outputs=states, decoder_input_ids=ids, past_key_values=cache, use_cache=True)[0]
            for ids in TARGET.split((4, 1, 4), dim=1)
        ]
        assert_close(torch.cat(pieces, dim=1), answer)
        target, mask = padded(TARGET, 2, "left")
        shifted = new(**{**sound, "decoder_input_ids": target}, decoder_attention_mask=mask)[0]
        assert_close(shifted[:, 2:], answer)
        ids = new.generate(sound["input_features"], max_new_tokens=4, min_new_tokens=4, num_beams=2)
        assert ids.shape[0] == 2 and ids.shape[1] >= 4
    # A decoder that isn't named counts as the stock one does, which counts padding in.
    shifted = {**sound, "decoder_input_ids": target, "decoder_attention_mask": mask}
    assert_equal(hf_posenc.patch(whisper, "none", where="cross")(**shifted)[0], whisper(**shifted)[0])


# where


some_pairs = pytest.mark.parametrize("pair", ["bart", "t5", "umt5"])


@torch.no_grad()
def test_whispers_own_prompts(whisper):
    """Transformers puts `decoder_start_token_id` before prompts that begin otherwise, unless config.model_type is "whisper"."""
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
    """A stock model whose cross-attentions add `bias`, `[B, H, Q, K]`, by the mask they are given."""

    def add(module, args, kwargs):
        name = "mask" if "mask" in kwargs else "attention_mask"
        return args, {**kwargs, name: bias}

    for name, module in model.named_modules():
        if name.endswith(("encoder_attn", "EncDecAttention")):
            module.register_forward_pre_hook(add, with_kwargs=True)
    return model


@some_pairs
@torch.no_grad()
def test_cross_attention_sees_the_distance_of_positions(pair, tmp_path):
    """ALiBi between the stacks is -slope · |encoder position - decoder position|. The stacks keep their own positions."""
    model = stock(pair, head=True)
    new = hf_posenc.patch(model, "alibi", where="cross")
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    distance = torch.arange(SOURCE.shape[1])[None, :] - torch.arange(TARGET.shape[1])[:, None]
    bias = -slopes[:, None, None] * distance.abs()
    expected = outputs(biased_by_hand(copy.deepcopy(model), bias[None]), SOURCE, TARGET)
    assert_close(outputs(new, SOURCE, TARGET), expected)
    source, mask = padded(SOURCE, 3, "left")
    if PAIRS[pair].biases:  # stock BART counts padding in
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
    """Keys of a cross-attention have the encoder's positions, also where there are as many of them as queries."""
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
    spec = PositionSpec.parse({"type": "alibi", "where": where})
    assert PositionSpec.parse(json.loads(json.dumps(spec.to_dict()))) == spec


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
        ([], "allowed is one or more of"),
        (3, "allowed is one or more of"),
        ({"decoder": 3}, r"where\['decoder'\]=3"),
        ({"decoder": {"theta": 3.0}}, "'alibi' has no option 'theta'"),
        ({"decoder": {"type": "rope", "max_length": 3}}, "'max_length'.*beside where"),
        ({"encoder": {}, "cross": "sinusoidal"}, "'sinusoidal' adds vectors.*between two stacks"),
    ],
)
def test_wrong_where(where, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.patch(stock("bart"), "alibi", where=where)


def test_where_needs_an_encoder_and_a_decoder():
    with pytest.raises(ValueError, match="BertModel is no encoder and decoder.*leave where out"):
        hf_posenc.patch(stock_model("bert"), "alibi", where="encoder")
    with pytest.raises(ValueError, match="T5EncoderModel is no encoder"):
        hf_posenc.patch(transformers.T5EncoderModel(transformers.T5Config(**T5)), "alibi", where="encoder")


@torch.no_grad()
def test_a_stack_that_is_not_named_may_be_one_that_is_refused():
    sizes = dict(T5, local_radius=3, encoder_attention_type="local")
    model = randomize(transformers.LongT5Model(transformers.LongT5Config(**sizes))).eval()
    with pytest.raises(hf_posenc.UnsupportedModelError):
        hf_posenc.patch(model, "alibi")
    new = hf_posenc.patch(model, "alibi", where="decoder")
    assert_equal(states_of(new), states_of(model))
    assert_equal(outputs(hf_posenc.unpatch(new), SOURCE, TARGET), outputs(model, SOURCE, TARGET))


@pytest.mark.parametrize("pair", ["bart", "t5"])
def test_token_embeddings_that_were_resized(pair):
    """Resizing puts one module in the place of several that share a weight, which is then found under one path alone."""
    model = stock(pair)
    model.resize_token_embeddings(VOCABULARY + 3)
    new = hf_posenc.patch(model, "alibi")
    new.resize_token_embeddings(VOCABULARY + 5)
    with pytest.warns(UserWarning, match="no longer those"):
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
