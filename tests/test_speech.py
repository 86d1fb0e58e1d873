"""Speech encoders: convolutional positions, relative attentions of Conformers, and front ends and convolutions that stay."""

import pytest
import torch
from transformers import set_seed

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from models import AUDIO_HOSTS, WAVE, first, randomize_encoding, sensed, tiny, tokens
from oracles import sinusoids
from tools.hosts.tiny import build, randomized

CONFORMERS = {name: AUDIO_HOSTS[name] for name in ("wav2vec2-conformer", "wav2vec2-bert", "wav2vec2-bert-relative", "parakeet")}
CONVOLUTIONAL = {
    **{name: host for name, host in AUDIO_HOSTS.items() if name not in CONFORMERS},
    "wavlm": sensed("WavLM", "audio", **WAVE, num_buckets=16, max_bucket_distance=20),
}
POOLED = ("sew", "sew-d")
"""Each of their tokens consists of two frames."""
ADAPTER = dict(add_adapter=True, num_adapter_layers=1, adapter_kernel_size=3, adapter_stride=2)
HOSTS = {**CONVOLUTIONAL, **CONFORMERS}
HOSTS["wav2vec2-bert-adapter"] = sensed("Wav2Vec2Bert", "audio", **HOSTS["wav2vec2-bert"].sizes | ADAPTER)
every_convolutional = pytest.mark.parametrize("host", CONVOLUTIONAL)
every_conformer = pytest.mark.parametrize("host", CONFORMERS)
WAYS = ("sinusoidal", "rope", "alibi", "shaw")
OF_LENGTH = "normalized+fire"
"""An encoding that depends on the length of a text."""


def stock(host, head=None, **changes):
    return randomized(models.stock(HOSTS[host], head or HOSTS[host].head, **changes))


def patched(model, encoding, **options):
    return randomize_encoding(hf_posenc.patch(model, encoding, **options))


def sound(host, length=400, batch=2, seed=1):
    """Waves or mel features, under the name of the model's argument."""
    generator = torch.Generator().manual_seed(seed)
    if host in CONVOLUTIONAL or host == "wav2vec2-conformer":
        return {"input_values": torch.randn(batch, length, generator=generator)}
    return {"input_features": torch.randn(batch, length // 8, 16, generator=generator)}


def order_of(length):
    return torch.randperm(length, generator=torch.Generator().manual_seed(2))


def encoded(model, host, move):
    """The output of the last layer, optionally with the encoder's input tokens in another order."""
    size, path = (2, "feature_dropout") if host in POOLED else (1, "feature_projection")
    layers = model.encoder.encoder.layer if host == "sew-d" else model.encoder.layers
    answers = []

    def keep(module, args, output):
        answers.append(output[0] if isinstance(output, tuple) else output)

    def moved(module, args, output):
        frames, *others = output if isinstance(output, tuple) else (output,)
        order = order_of(frames.shape[1] // size)
        order = (size * order[:, None] + torch.arange(size)).flatten()
        frames = torch.cat([frames[:, order], frames[:, len(order) :]], dim=1) if move else frames
        return (frames, *others) if isinstance(output, tuple) else frames

    hooks = [
        model.get_submodule(path).register_forward_hook(moved),
        layers[-1].register_forward_hook(
            lambda module, args, output: answers.append(first(output) if host == "wavlm" else output)
        ),
    ]
    model(**sound(host))
    for hook in hooks:
        hook.remove()
    return answers[0]


def attended(model, host, move):
    """The output of the first attention in a forward pass, optionally with its input frames in another order."""
    attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    answers = []

    def before(module, args, kwargs):
        name = "hidden_states"
        given = args[0] if args else kwargs[name]
        moved = given[:, order_of(given.shape[1])] if move else given
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, name: moved})

    hooks = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        attention.register_forward_hook(lambda module, args, output: answers.append(output[0])),
    ]
    model(**sound(host))
    for hook in hooks:
        hook.remove()
    return answers[0]


def apart(function, model, host):
    """The change of the outputs when their inputs are permuted, relative to the largest output."""
    answer, moved = (function(model, host, move=move) for move in (False, True))
    return (answer[:, order_of(answer.shape[1])] - moved).abs().max() / answer.abs().max()


@every_convolutional
@torch.no_grad()
def test_the_order_of_frames_is_gone_and_comes_back(host):
    """The frames are permuted after the front end."""
    model, turn = stock(host), [*CONVOLUTIONAL].index(host) % 4
    assert apart(encoded, model, host) > 1e-2
    assert apart(encoded, hf_posenc.patch(model, "none"), host) < 1e-4
    for encoding in WAYS if host == "wav2vec2" else WAYS[turn : turn + 1]:
        assert apart(encoded, patched(model, encoding), host) > 1e-3, encoding


@every_conformer
@torch.no_grad()
def test_a_conformers_attention_knows_order_by_the_encoding_alone(host):
    """The convolutions in each layer still see order, so the test checks the attention."""
    model = stock(host)
    assert apart(attended, model, host) > 1e-2
    assert apart(attended, hf_posenc.patch(model, "none"), host) < 1e-4
    assert apart(attended, hf_posenc.patch(model, "sinusoidal"), host) < 1e-4  # acts before the layers
    for encoding in WAYS[1:]:
        assert apart(attended, patched(model, encoding), host) > 1e-3, encoding
    without, with_vectors = (first(hf_posenc.patch(model, encoding)(**sound(host))) for encoding in ("none", "sinusoidal"))
    assert_apart(with_vectors, without)


def test_what_a_convolution_has_learned_is_kept():
    model = stock("wav2vec2")
    new = hf_posenc.patch(model, "alibi")
    path = "encoder.pos_conv_embed.conv"
    for name in ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1"):
        kept = new.state_dict()[f"posenc.original.{path}.{name}"]
        assert_equal(kept, model.state_dict()[f"{path}.{name}"])
        assert not kept.requires_grad
    assert not any("pos_conv_embed" in name for name, _ in new.named_parameters())


def test_a_convolution_that_returns_a_sum_keeps_the_hidden_states():
    """OmniASR's convolution adds its inputs itself. Without positions, the model equals one whose convolution returns zeros."""
    model, sounds = build("omniasr_audio"), sound("wav2vec2", batch=1)
    sounds = {"input_values": sounds["input_values"][:, None].repeat(1, 1, 5)}
    with torch.no_grad():
        for parameter in model.encode_positions.conv.parameters():
            parameter.zero_()
        expected = model(**sounds).last_hidden_state
        assert_close(hf_posenc.patch(model, "none")(**sounds).last_hidden_state, expected)
        assert_apart(patched(model, "sinusoidal")(**sounds).last_hidden_state, expected)


@every_convolutional
@torch.no_grad()
def test_vectors_are_added_in_the_convolutions_place(host):
    """The output equals that of the original model with a sinusoidal table as output of its convolution."""
    model = stock(host, **({"relative_attention": False} if host == "sew-d" else {}))
    if host == "wavlm":
        model.encoder.layers[0].attention.rel_attn_embed.weight.zero_()
    found = []
    convolution = model.encoder.pos_conv_embed

    def table(module, args, output):
        rows, width = (output.shape[2], output.shape[1]) if host in POOLED else (output.shape[1], output.shape[2])
        sines = sinusoids([range(rows)], width)[0]
        found.append(rows)
        return (sines.T if host in POOLED else sines)[None].expand_as(output)

    hook = convolution.register_forward_hook(table)
    inputs = sound(host, length=403)
    expected = first(model(**inputs))
    hook.remove()
    assert_close(first(hf_posenc.patch(model, "sinusoidal")(**inputs)), expected)
    assert found


@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        *(("wav2vec2", encoding) for encoding in (*WAYS, OF_LENGTH)),
        *((host, "sinusoidal+rope+shaw") for host in ("wavlm", "sew-d", "wav2vec2-bert", "parakeet")),
        *(
            (host, OF_LENGTH) for host in ("wavlm", "sew-d", "wav2vec2-bert")
        ),  # Parakeet makes its mask of frames within its layer stack
    ],
)
@torch.no_grad()
def test_padding_and_backends(host, encoding):
    """Frames next to padding give the same output as they do alone, in every implementation."""
    new = patched(stock(host), encoding)
    (name, long), *_ = sound(host).items()
    short = long[:1, : long.shape[1] * 5 // 8]  # an even number of frames, for models that pool them
    mask = torch.ones(long.shape[:2], dtype=torch.long)
    mask[0, short.shape[1] :] = 0
    long[0, short.shape[1] :] = 0
    answers = []
    for implementation in ("eager", "sdpa") if new._supports_sdpa else ("eager",):
        new.set_attn_implementation(implementation)
        alone, beside = first(new(**{name: short})), first(new(**{name: long}, attention_mask=mask))
        length = alone.shape[1] - (host == "parakeet")  # its last frame sees into the padding
        assert_close(beside[0, :length], alone[0, :length], rtol=1e-3, atol=1e-4)
        answers.append(beside[1])
    assert_close(answers[0], answers[-1], rtol=1e-3, atol=1e-4)


def bare_wavlm(**changes):
    """WavLM without its own positions."""
    model = stock("wavlm", **changes)
    with torch.no_grad():
        model.encoder.layers[0].attention.rel_attn_embed.weight.zero_()
    model.encoder.pos_conv_embed.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    return model


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # from the original model
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_wavlms_attention_is_the_hosts(masked):
    """Its probabilities, which are the heads' mean, are equal also."""
    model, inputs = bare_wavlm(), sound("wavlm")
    if masked:
        inputs["attention_mask"] = (torch.arange(400) < torch.tensor([[400], [250]])).long()
    expected, answer = (each(**inputs, output_attentions=True) for each in (model, hf_posenc.patch(model, "none")))
    assert_close(first(answer)[0], first(expected)[0])
    assert len(answer.attentions) == 2
    for one, other in zip(answer.attentions, expected.attentions, strict=True):
        assert_close(one[0], other[0])


def test_wavlms_attention_drops_out_as_the_hosts():
    """The same random numbers drop the same probabilities."""
    model, answers = bare_wavlm(attention_dropout=0.4, mask_time_prob=0.0).train(), []
    for each in (model, hf_posenc.patch(model, "none")):
        torch.manual_seed(3)
        answers.append(first(each(**sound("wavlm"))))
    assert_close(*answers)


def test_recognition_learns():
    """Training also works while Wav2Vec2 masks frames."""
    model = patched(stock("wav2vec2", "ForCTC", ctc_loss_reduction="mean"), "sinusoidal+rope+shaw").train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        set_seed(3)  # includes numpy's seed, which chooses the frames
        loss = model(**sound("wav2vec2"), labels=torch.tensor([[3, 4, 5], [6, 7, 8]])).loss
        loss.backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "posenc" in name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_what_stays_is_said():
    model = stock("wav2vec2-conformer")
    for each in (model, hf_posenc.patch(model, "alibi")):
        stays = hf_posenc.inspect(each).order_sensitive
        assert stays.pop("Wav2Vec2ConformerConvolutionModule") == (
            "encoder.layers.0.conv_module",
            "encoder.layers.1.conv_module",
        )
        assert stays == {"Conv1d": ("feature_extractor.conv_layers.0.conv", "feature_extractor.conv_layers.1.conv")}
    assert hf_posenc.inspect(model).encoding == "transformer_xl"
    assert hf_posenc.inspect(stock("hubert")).encoding == "convolution"


def test_a_promised_length_counts_frames():
    """The limit applies even if nothing is added to the inputs."""
    new = hf_posenc.patch(stock("wav2vec2"), "alibi", max_length=20)
    first(new(**sound("wav2vec2", length=200)))
    with pytest.raises(ValueError, match="39 positions.* max_length=20"):
        new(**sound("wav2vec2"))


def test_an_adapters_layers_are_taken():
    """The adapter's convolutions make fewer tokens, whose positions are counted again."""
    model = stock("wav2vec2-bert-adapter")
    new = hf_posenc.patch(model, "alibi")
    names = [f"adapter.layers.0.{name}" for name in ("residual_conv", "self_attn_conv")]
    assert hf_posenc.inspect(new).order_sensitive["Conv1d"] == (*names,)
    assert hf_posenc.inspect(new).locations["distance_bias"][-1] == "adapter.layers.0.self_attn"
    assert_apart(
        first(new(**sound("wav2vec2-bert-adapter"))), first(hf_posenc.patch(model, "none")(**sound("wav2vec2-bert-adapter")))
    )


@torch.no_grad()
def test_unsupported():
    convolved = stock("wav2vec2")
    convolved.encoder.layers[0].attention.k_proj = torch.nn.Conv1d(32, 32, 3, padding=1)
    rotating = stock("wav2vec2-conformer", position_embeddings_type="rotary")  # rotates hidden states, before it projects them
    for model, reason in (
        (convolved, "order-sensitive convolutions"),
        (rotating, "unknown format of rotary positions"),
    ):
        with pytest.raises(hf_posenc.UnsupportedModelError) as error:
            hf_posenc.patch(model, "alibi")
        assert error.value.reason == reason


@torch.no_grad()
def test_patches_of_a_series():
    """TimesFM's layer stack requests the vectors of this many positions, and gets those of hf-posenc."""
    model = tiny("TimesFmModel", head_dim=8, patch_length=4, use_positional_embedding=True)
    values = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    inputs = {"past_values": values, "past_values_padding": torch.zeros(2, 32), "freq": torch.zeros(2, 1, dtype=torch.long)}
    expected = first(model(**inputs))
    for encoding, vectors in (("none", torch.zeros(1, 8, 32)), ("sinusoidal", sinusoids([range(8)], 32))):
        new = hf_posenc.patch(model, encoding)
        assert_equal(first(hf_posenc.unpatch(new)(**inputs)), expected)
        hook = model.position_emb.register_forward_hook(lambda module, args, output, vectors=vectors: vectors)
        assert_close(first(new(**inputs)), first(model(**inputs)))
        hook.remove()


@pytest.mark.parametrize("encoding", ["alibi", "learned", "rope"])
@torch.no_grad()
def test_max_length_of_a_model_that_hears_is_that_of_its_decoder(encoding, tmp_path):
    """Whisper's encoder always reads 30 seconds, here 24 frames after its convolutions."""
    new = hf_posenc.patch(tiny("WhisperModel"), encoding, max_length=9)
    assert hf_posenc.inspect(new).max_length == 9
    new.save_pretrained(tmp_path)
    features = torch.randn(2, new.config.num_mel_bins, 48, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": features, "decoder_input_ids": tokens(2, 9)}
    assert_equal(first(type(new).from_pretrained(tmp_path)(**inputs)), first(new(**inputs)))
    with pytest.raises(ValueError, match="max_length=9"):
        new(features, decoder_input_ids=tokens(2, 10))
    longer = hf_posenc.patch(tiny("WhisperModel"), encoding, max_length=40)
    assert first(longer(features, decoder_input_ids=tokens(2, 40))).shape[1] == 40


@torch.no_grad()
@pytest.mark.parametrize(("name", "encoding"), [("SeamlessM4T", "learned+transformer_xl"), ("SeamlessM4Tv2", "learned+shaw")])
def test_seamless_translates_speech(name, encoding):
    """The model has a Conformer, an adapter that pools, and a decoder with a cross-attention."""
    model = tiny(f"{name}ForSpeechToText", feature_projection_input_dim=16, num_adapter_layers=1, max_source_positions=64)
    inputs = {**sound("seamless", batch=1), "decoder_input_ids": torch.tensor([[3, 8, 5, 9]])}
    assert hf_posenc.inspect(model).encoding == encoding
    new = patched(model, "shaw")
    assert_apart(first(new(**inputs)), first(model(**inputs)))
    assert_equal(first(hf_posenc.unpatch(new)(**inputs)), first(model(**inputs)))
