"""Models with custom attention code."""

import copy
import functools
import math

import pytest
import torch
from transformers import AutoModel, DynamicCache, StaticCache
from transformers.models.bloom import modeling_bloom
from transformers.models.gptj import modeling_gptj
from transformers.models.mpt import modeling_mpt

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import HOSTS, WRITTEN_OUT, as_itself, first, randomize_encoding, stock, tokens
from oracles import every_mask, gradients, ids_of, in_pieces, padding_of, sinusoids
from tools.hosts import tiny

GPTJ_TABLE = "rotary_emb.embed_positions" if hasattr(modeling_gptj, "GPTJRotaryEmbedding") else "h.{}.attn.embed_positions"
every_host = pytest.mark.parametrize("host", WRITTEN_OUT)


@every_host
@every_mask
@torch.no_grad()
def test_written_out_attention_is_the_hosts(host, mask):
    """Attentions and hidden states equal those of the original model, with and without padding."""
    arguments, real = padding_of(mask)
    arguments |= {"output_attentions": True, "output_hidden_states": True}
    model = stock(host)
    new = as_itself(model, host)
    theirs, ours = model(tokens(), position_ids=ids_of(host, mask), **arguments), new(tokens(), **arguments)
    for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert_close(one[real], other[real])
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert_close(one.transpose(1, 2)[real], other.transpose(1, 2)[real])


@every_host
def test_written_out_attention_drops_out_and_learns_as_the_hosts(host):
    """The same random numbers drop the same attention weights."""
    model = stock(host, attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.2).train()
    new = as_itself(model, host)
    own = {*HOSTS[host].tables, *HOSTS[host].biases}

    def outputs(each, seed=3):
        torch.manual_seed(seed)
        return first(each(tokens()))

    def shared_gradients(each):
        found = gradients(each, lambda each: outputs(each).square().mean())
        return {name: gradient for name, gradient in found.items() if "posenc" not in name and name not in own}

    assert_close(outputs(new), outputs(model))
    assert_apart(outputs(new, seed=4), outputs(new))
    assert_close(shared_gradients(new), shared_gradients(model), rtol=1e-3)
    assert torch.equal(first(new.eval()(tokens())), first(new(tokens())))


def test_mpnets_own_biases_are_gone_and_kept(tmp_path, encoding="alibi"):
    model = stock("mpnet")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.relative_attention_bias.weight.add_(torch.arange(32)[:, None] % 3)
    assert_apart(first(other(tokens())), first(model(tokens())))
    new = hf_posenc.patch(other, encoding)
    assert torch.equal(first(new(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))
    key = "posenc.original.encoder.relative_attention_bias.weight"
    assert torch.equal(new.state_dict()[key], other.encoder.relative_attention_bias.weight)
    assert key in dict(new.named_buffers()) and not any("relative_attention_bias" in name for name, _ in new.named_parameters())
    new.save_pretrained(tmp_path)
    again = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path))
    assert torch.equal(again.encoder.relative_attention_bias.weight, other.encoder.relative_attention_bias.weight)
    assert torch.equal(first(again(tokens())), first(other(tokens())))
    gone = hf_posenc.patch(model, encoding, keep_original=False)
    assert not any("relative_attention_bias" in name for name in gone.state_dict())
    assert torch.equal(first(gone(tokens())), first(hf_posenc.patch(model, encoding)(tokens())))


def zeroed(*paths):
    """Makes parameters and buffers zero."""

    def change(model, patch):
        for path in paths:
            owner, _, name = path.rpartition(".")
            getattr(model.get_submodule(owner), name).zero_()

    return change


def turned_by_nothing(path):
    """Sets the sines of a table to 0 and its cosines to 1, in each layer if the path contains {}."""

    def change(model, patch):
        for layer in range(2 if "{}" in path else 1):
            owner, _, name = path.format(layer).rpartition(".")
            sines, cosines = getattr(model.get_submodule(owner), name).chunk(2, dim=-1)
            sines.zero_()
            cosines.fill_(1.0)

    return change


def without_rotary(model, patch):
    patch.setattr(model.rotary_emb, "inv_freq", torch.zeros_like(model.rotary_emb.inv_freq))


def without_blooms(model, patch):
    patch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads))


def without_mpts(model, patch):
    patch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda heads, length, *_: torch.zeros(heads, 1, length))


def without_xlnets(model, patch):
    patch.setattr(
        model, "relative_positional_encoding", lambda queries, keys, bsz, device: torch.zeros(queries + keys, bsz, 32)
    )


def without_terms(model, patch):
    """Removes DeBERTa's terms. Otherwise, the bias of a projection would still be multiplied by the keys."""
    paths = [path for path, _ in model.named_parameters() if any(f".{name}" in path for name in ("rel_embeddings", "pos_"))]
    zeroed(*paths, *(path for path, _ in model.named_parameters() if path.startswith("encoder.LayerNorm")))(model, patch)


BERT_TABLE = zeroed("embeddings.position_embeddings.weight")
NONE = {
    "big_bird": BERT_TABLE,
    "bloom": without_blooms,
    "codegen": turned_by_nothing(GPTJ_TABLE),
    "ctrl": zeroed("pos_encoding"),
    "deberta": without_terms,
    "deberta-v2": without_terms,
    "falcon": without_rotary,
    "flaubert": zeroed("position_embeddings.weight"),
    "gpt_neo": zeroed("wpe.weight"),
    "gpt_neox_japanese": without_rotary,
    "gptj": turned_by_nothing(GPTJ_TABLE),
    "ibert": BERT_TABLE,
    "imagegpt": zeroed("wpe.weight"),
    "layoutlmv3": zeroed("embeddings.position_embeddings.weight", "encoder.rel_pos_bias.weight"),
    "lilt": zeroed("embeddings.position_embeddings.weight", "layout_embeddings.box_position_embeddings.weight"),
    "longformer": BERT_TABLE,
    "luke": BERT_TABLE,
    "megatron-bert": BERT_TABLE,
    "mpnet": zeroed("embeddings.position_embeddings.weight", "encoder.relative_attention_bias.weight"),
    "mpt": without_mpts,
    "openai-gpt": zeroed("positions_embed.weight"),
    "rembert": BERT_TABLE,
    "roformer": turned_by_nothing("encoder.embed_positions.weight"),
    "squeezebert": BERT_TABLE,
    "tapas": BERT_TABLE,
    "visual_bert": BERT_TABLE,
    "xlm": zeroed("position_embeddings.weight"),
    "xlnet": without_xlnets,
}
"""Model type -> a function that removes the positions of an original model."""
TERMS = {"deberta-v2": dict(share_att_key=False, position_buckets=-1)}
CAUSAL = ["bloom", "codegen", "ctrl", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "imagegpt", "mpt", "openai-gpt"]
CACHED = [kind for kind in CAUSAL if kind != "openai-gpt"]
WHOLE = [kind for kind in NONE if kind != "longformer"]
"""Models that return the attention weights of all pairs. For Longformer, see test_local_attention.py."""


@functools.cache
def built(kind, implementation="eager", **changes):
    config = tiny.config_of(kind)
    config = type(config).from_dict(config.to_dict() | TERMS.get(kind, {}) | changes)
    model = AutoModel.from_config(config, attn_implementation=implementation)
    tiny.randomized(model.eval())
    if kind == "roformer":  # a parameter that is never trained
        model.encoder.embed_positions.weight.data = model.encoder.embed_positions.create_weight()
    return model


@pytest.mark.parametrize("kind", NONE)
@torch.no_grad()
def test_without_positions_a_host_is_the_stock_one_with_its_positions_zeroed(kind, monkeypatch):
    model = built(kind)
    new = hf_posenc.patch(model, "none")
    ours = first(new(tokens()))
    assert_apart(ours, first(model(tokens())))
    other = copy.deepcopy(model)
    NONE[kind](other, monkeypatch)
    assert_close(ours, first(other(tokens())))
    assert_close(first(new(tokens())), ours)


ROPE = dict(type="rope", layout="interleaved")
LEARNED = dict(type="learned", init="host")
TABLES = ("big_bird", "flaubert", "gpt_neo", "ibert", "imagegpt", "longformer", "luke", "openai-gpt", "squeezebert", "tapas")
OWN = {
    **{kind: (LEARNED, {}) for kind in (*TABLES, "visual_bert", "xlm")},
    **dict.fromkeys(("bloom", "mpt"), ({"type": "alibi"}, {})),
    **dict.fromkeys(("codegen", "gptj"), (ROPE, dict(rotary_dim=8))),
    "ctrl": ({"type": "sinusoidal", "layout": "concatenated"}, {}),
    "falcon": (dict(type="rope", layout="half"), {}),
    "gpt_neox_japanese": (dict(type="rope", layout="half"), dict(rotary_pct=1.0)),
    "roformer": (ROPE, {}),
    "tapas": (LEARNED, dict(reset_position_index_per_cell=False)),
}
"""Model type -> the encoding that equals its own positions, and the config changes that make them equal."""


@pytest.mark.parametrize(("kind", "implementation"), [*((kind, "eager") for kind in OWN), ("falcon", "sdpa")])
@torch.no_grad()
def test_the_hosts_own_positions_as_an_encoding_of_ours(kind, implementation):
    encoding, changes = OWN[kind]
    model = built(kind, implementation, **changes)
    new = hf_posenc.patch(model, encoding)
    assert_close(first(new(tokens())), first(model(tokens())), rtol=1e-3)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 8:] = 0
    ours, theirs = (first(each(tokens(), attention_mask=mask)) for each in (new, model))
    assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-3)


class Spy(hf_posenc.PositionEncoding, type="spy"):
    """Adds nothing, and stores its arguments."""

    def score_bias(self, query, key, context):
        seen = context.cached("seen", list)
        seen.append((query, key, context.scaling))
        Spy.seen = seen
        return query.new_zeros(1, 1, 1, 1)


PROBABILITIES = [kind for kind in WHOLE if kind not in ("lilt", "squeezebert", "layoutlmv3")]
"""Models that return the softmax of their own scores only. LiLT adds the scores of boxes, LayoutLMv3 those of distances."""


@pytest.mark.parametrize("kind", PROBABILITIES)
@torch.no_grad()
def test_what_an_encoding_is_told_of_scores(kind):
    """An encoding gets the queries, keys, and scaling that the model uses for its attention probabilities."""
    model = built(kind)
    attentions = hf_posenc.patch(model, "spy")(tokens(), output_attentions=True).attentions
    assert len(attentions) == len(Spy.seen)
    for probabilities, (query, key, scaling) in zip(attentions, Spy.seen, strict=True):
        scores = torch.einsum("bhqe,bhke->bhqk", query, key.expand(-1, query.shape[1], -1, -1)) * scaling
        if kind in CAUSAL:
            scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -math.inf)
        assert_close(probabilities, scores.softmax(-1), rtol=1e-3)


def slopes(distance):
    """The biases of ALiBi with four heads."""
    return torch.stack([-distance.abs() * 2.0 ** (-2 * head) for head in (1, 2, 3, 4)])


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind != "squeezebert"])
@torch.no_grad()
def test_a_bias_is_added_to_scaled_scores(kind):
    """The first layer adds the bias to scaled scores. Its inputs are the same without the bias."""
    model = built(kind)
    before, after = (hf_posenc.patch(model, each)(tokens(), output_attentions=True).attentions[0] for each in ("none", "alibi"))
    distance = torch.arange(11.0) - torch.arange(11.0)[:, None]
    expected = (before.log() + slopes(distance)).log_softmax(-1).exp()
    assert_close(after, expected, rtol=1e-3)


@torch.no_grad()
def test_squeezeberts_scores():
    """SqueezeBERT returns scores, not probabilities."""
    model = built("squeezebert")
    before, after = (hf_posenc.patch(model, each)(tokens(), output_attentions=True).attentions[0] for each in ("none", "alibi"))
    assert_close(after - before, slopes(torch.arange(11.0) - torch.arange(11.0)[:, None]).expand(2, -1, -1, -1), rtol=1e-3)


@pytest.mark.parametrize("kind", CACHED)
@torch.no_grad()
def test_cached_keys(kind):
    model = randomize_encoding(hf_posenc.patch(built(kind), "sinusoidal+rope+alibi+shaw"))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    expected = first(model(tokens(), attention_mask=mask, use_cache=False))[mask.bool()]
    caches = [DynamicCache(config=model.config)]
    if kind in ("bloom", "gptj", "falcon"):
        caches.append(StaticCache(config=model.config, max_cache_len=14))
    for cache in caches:
        assert_close(in_pieces(model, tokens(), (4, 5, 9), mask, cache)[mask.bool()], expected)
    assert_close(first(model(tokens()[:1, 3:], use_cache=False))[0], expected[:8])


@pytest.mark.parametrize("encoding", ["rope", "alibi+shaw"])
@torch.no_grad()
def test_an_attention_in_one_call(encoding):
    """In its sdpa implementation, Falcon calls scaled_dot_product_attention. All its heads share one key-value head."""
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    outputs = []
    for implementation in ("eager", "sdpa"):
        model = randomize_encoding(hf_posenc.patch(built("falcon", implementation), encoding))
        for arguments in ({}, {"attention_mask": mask}):
            outputs.append(first(model(tokens(), **arguments))[mask.bool()])
        assert_close(in_pieces(model, tokens(), (4, 5, 9), mask)[mask.bool()], outputs[-1])
    assert_close(outputs[:2], outputs[2:])
    assert_apart(outputs[0], outputs[1])


@pytest.mark.parametrize("kind", ["mpt", "gptj", "xlnet"])
@torch.no_grad()
def test_vectors_where_the_host_has_no_table(kind):
    """The vectors are added to the input of the first layer, on whichever axis the tokens lie."""
    model, ids = built(kind), tokens(3, 7)
    vectors = sinusoids([range(7)], 32)
    new, bare = (hf_posenc.patch(model, each) for each in ("sinusoidal", "none"))
    assert_close(first(new(ids)), first(bare(inputs_embeds=model.get_input_embeddings()(ids) + vectors)))


@pytest.mark.parametrize(("kind", "argument"), [("xlnet", "input_mask"), ("xlm", "lengths")])
@torch.no_grad()
def test_padding_by_an_argument_of_the_hosts_own(kind, argument):
    """XLNet takes a mask that is 1 for padding on either side. XLM takes the lengths of texts."""
    new, ids, length = hf_posenc.patch(built(kind), "normalized+fire"), tokens(1, 7), 5
    randomize_encoding(new)
    alone = first(new(ids[:, :length]))
    for start in (0, 2) if kind == "xlnet" else (0,):
        padded = ids.new_full((1, 7), 3)
        padded[:, start : start + length] = ids[:, :length]
        padding = torch.ones(1, 7)
        padding[:, start : start + length] = 0
        given = padding if argument == "input_mask" else torch.tensor([length])
        assert_close(first(new(padded, **{argument: given}))[:, start : start + length], alone)


def given(kind):
    """Inputs besides the tokens, which some models take."""
    return {
        "luke": dict(entity_ids=torch.ones(2, 1, dtype=torch.long), entity_position_ids=torch.zeros(2, 1, 2, dtype=torch.long)),
        "visual_bert": dict(visual_embeds=torch.ones(2, 3, built("visual_bert").config.visual_embedding_dim)),
        "xlnet": dict(
            perm_mask=torch.zeros(2, 11, 11), target_mapping=torch.nn.functional.one_hot(torch.tensor([[3]] * 2), 11).float()
        ),
    }[kind]


@pytest.mark.parametrize("kind", ["luke", "visual_bert", "xlnet"])
@torch.no_grad()
def test_inputs_beside_the_tokens_have_no_positions(kind):
    model = built(kind)
    model(tokens(), **given(kind))
    with pytest.raises(ValueError, match=r"Inputs other than tokens"):
        hf_posenc.patch(model, "alibi")(tokens(), **given(kind))


UNSUPPORTED = {
    "autoformer": ({}, "shifted in time"),
    "big_bird": ({"attention_type": "block_sparse"}, "attention_type='original_full'"),
    "bigbird_pegasus": ({"attention_type": "block_sparse"}, "attention_type='original_full'"),
    "canine": ({}, "CanineSelfAttention"),
    "convbert": ({}, "ConvBertSelfAttention"),
    "cpmant": ({}, "CpmAntAttention"),
    "fsmt": ({}, "as Marian"),
    "fnet": ({}, "Fourier"),
    "ibert": ({"quant_mode": True}, "quant_mode=False"),
    "informer": ({"attention_type": "prob"}, "attention_type='full'"),
    "hiera": ({}, "order of mask units"),
    "longt5": ({"encoder_attention_type": "transient-global"}, "sums of neighboring tokens"),
    "mra": ({}, "SelfAttention.*BERT"),
    "nystromformer": ({}, "SelfAttention.*BERT"),
    "prophetnet": ({}, "as BART"),
    "pvt": ({}, "merged patches"),
    "yoso": ({}, "hashes of queries and keys"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_refused(kind):
    changes, message = UNSUPPORTED[kind]
    with pytest.raises(hf_posenc.UnsupportedModelError, match=message) as error:
        hf_posenc.patch(built(kind, **changes), "sinusoidal")
    assert error.value.reason


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
@pytest.mark.parametrize("share", [False, True])
@torch.no_grad()
def test_disentangled_terms_are_kept_beside(kind, share, tmp_path):
    """The patched model keeps these terms as buffers with the original number of rows, for any `max_length`."""
    changes = dict(share_att_key=share) if kind == "deberta-v2" else dict(max_relative_positions=-1 if share else 7)
    model = built(kind, **changes)
    new = hf_posenc.patch(model, "alibi", max_length=40)
    new(tokens(1, 40))
    kept = {name for name in new.state_dict() if name.startswith("posenc.original.")}
    assert "posenc.original.encoder.rel_embeddings.weight" in kept and (share or kind == "deberta") == (len(kept) < 11)
    assert not any("rel_embeddings" in name or ".pos_" in name for name, _ in new.named_parameters())
    new.save_pretrained(tmp_path)
    again = hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path))
    assert_equal(first(again(tokens())), first(model(tokens())))
    without = hf_posenc.patch(model, "alibi", keep_original=False)
    assert not any("host" in name for name in without.state_dict())
    assert_equal(first(without(tokens())), first(new(tokens())))


@pytest.mark.parametrize("kind", ["bloom", "gptj", "roformer"])
def test_a_longer_promise(kind, tmp_path):
    """`unpatch` restores a model's own tables with their original length. Until then, inputs can be longer."""
    model = built(kind)
    new = randomize_encoding(hf_posenc.patch(model, "alibi+shaw", max_length=60))
    with torch.no_grad():
        expected = first(new(tokens(1, 60)))
        new.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
        assert_equal(first(loaded(tokens(1, 60))), expected)
        assert_equal(first(hf_posenc.unpatch(loaded)(tokens())), first(model(tokens())))
