"""Whisper, which writes what it hears with and without times, and wav2vec 2.0, padded, masked and trained.

An own encoding's bias or vectors are put into a stock model by hooks, which says what is right.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig, WhisperForConditionalGeneration

import hf_posenc
from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, no_grad
from attacks.seq2seq import ENCODINGS, alike
from attacks.subjects import ITSELF, drawn
from tools.hosts.tiny import randomized

FRAMES, TARGET, MEL, TIMES = 40, 40, 8, 41
"""Of Whisper: positions of sounds and of tokens, mel features, tokens of times (0.00 s, 0.02 s, …)."""
TEXT = 20
WHISPER: dict[str, Any] = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    vocab_size=TEXT + 1 + TIMES,
    num_mel_bins=MEL,
    max_source_positions=FRAMES,
    max_target_positions=TARGET,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
WAVE: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    vocab_size=12,
    layerdrop=0.0,
    pad_token_id=0,
    conv_dim=(16, 16),
    conv_kernel=(10, 3),
    conv_stride=(5, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4,
    feat_extract_norm="layer",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
)
KINDS = {"wav2vec2": {}, "wav2vec2, stable norm": {"do_stable_layer_norm": True}, "wav2vec2, adapter": {"add_adapter": True}}
SOUNDS = [600, 431, 87]
"""Samples of a batch's waves."""
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "times": {"return_timestamps": True},
    "times, beams": {"return_timestamps": True, "num_beams": 2},
    "prompt": {"prompt": True},
    "decoder prompt": {"start": True},
    "assisted": {"assistant": True},
    "long": {"return_timestamps": True, "long": 3},
    "long, on what was said": {"return_timestamps": True, "long": 3, "condition_on_prev_tokens": True},
    "long, prompt": {"return_timestamps": True, "long": 2, "prompt": True, "prompt_condition_type": "all-segments",
                     "condition_on_prev_tokens": True},
    "long, temperatures": {"return_timestamps": True, "long": 2, "temperature": (0.0, 0.4), "logprob_threshold": -0.1},
    "times of words": {"return_token_timestamps": True},
    "by segments": {"return_timestamps": False},
    "by segments, prompt": {"return_timestamps": False, "prompt": True},
}  # fmt: skip
"""Of Whisper's `generate`."""


def cases(settings: Settings) -> Iterator[Case]:
    for encoding in (encoding for encoding in settings.encodings if encoding in ENCODINGS):
        for mode in MODES:
            run = no_grad(written, encoding, mode)
            yield Case(f"whisper, {mode}", "whisper", encoding, run, functools.partial(right, mode))
        for attack in (padded_targets, long_sounds, saved):
            run = no_grad(attack, encoding) if attack is not saved else functools.partial(attack, encoding)
            yield Case(f"whisper, {attack.__name__.replace('_', ' ')}", "whisper", encoding, run)
        for kind in KINDS if encoding != ITSELF else ():  # its own positions are a convolution, which no encoding is
            for side in ("right", "left"):
                run = no_grad(batched, kind, encoding, side)
                yield Case(f"wav2vec 2.0, padded on the {side}", kind, encoding, run)
            for check in (by_hooks, masked, trained, back):
                run = functools.partial(check, kind, encoding)
                yield Case(f"wav2vec 2.0, {check.__name__.replace('_', ' ')}", kind, encoding, run)


# Whisper


def whisper() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).eval()
    table = model.model.encoder.embed_positions.weight.clone()
    randomized(model)
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.copy_(table)
    for name, value in dict(
        no_timestamps_token_id=TEXT, is_multilingual=False, max_initial_timestamp_index=20, return_timestamps=False,
        prev_sot_token_id=4, alignment_heads=[[0, 1], [1, 2]], median_filter_width=3, forced_decoder_ids=None,
    ).items():  # fmt: skip
        setattr(model.generation_config, name, value)
    return model


@functools.lru_cache(maxsize=2)
def made(encoding: str) -> tuple[Any, Any]:
    """A patched Whisper, and one that says what is right."""
    if encoding == ITSELF:
        return hf_posenc.patch(whisper(), "learned", init="host"), whisper()
    model, oracle = (drawn(hf_posenc.patch(whisper(), encoding)) for _ in range(2))
    oracle.set_attn_implementation("eager")
    return model, oracle


def sounds(batch: int = 2, pieces: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(batch, MEL, 2 * FRAMES * pieces, generator=torch.Generator().manual_seed(seed))


def answer(model: Any, mode: str, **more: Any) -> Any:
    settings, start = {**MODES[mode], **more}, torch.tensor([3, TEXT])
    prompt, begins, helped = (settings.pop(name, False) for name in ("prompt", "start", "assistant"))
    pieces = settings.pop("long", 1)
    features = sounds(1 if helped or settings.get("return_token_timestamps") else 2, pieces)
    if pieces > 1:
        mask = torch.ones(len(features), features.shape[-1], dtype=torch.long)
        mask[-1, features.shape[-1] - FRAMES :] = 0
        settings["attention_mask"] = mask
    if prompt:
        settings["prompt_ids"] = torch.tensor([4, 9, 11, 15])
    if begins:
        settings["decoder_input_ids"] = torch.cat([start, torch.tensor([7, 12])]).expand(len(features), -1)
    if helped:
        settings["assistant_model"] = helper()
    torch.manual_seed(4)
    given = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "return_segments": pieces > 1}
    if pieces == 1 and "return_timestamps" not in settings:
        given |= {"output_logits": True, "output_scores": True, "length_penalty": 0.0, "force_unique_generate_call": True}
    return model.generate(features, **{**given, **settings}), features


@functools.cache
def helper() -> Any:
    return drawn(hf_posenc.patch(whisper(), "alibi"), seed=3)


def written(encoding: str, mode: str) -> Iterator[Comparison]:
    yield from compared(*made(encoding), mode)


@functools.cache
@torch.no_grad()
def right(mode: str) -> bool:
    model = whisper()
    return all(alike(*each) for each in compared(model, model, mode))


def compared(model: Any, oracle: Any, mode: str) -> Iterator[Comparison]:
    out, features = answer(model, mode)
    if "return_timestamps" in MODES[mode]:  # the same tokens in the same segments, found without a cache
        expected, _ = answer(oracle, mode, use_cache=False)
        found, wanted = (each["segments"] if "segments" in each else each["sequences"] for each in (out, expected))
        if isinstance(found, Tensor):
            yield found.tolist(), wanted.tolist()
            return
        for ours, theirs in zip(found, wanted, strict=True):
            yield [each["tokens"].tolist() for each in ours], [each["tokens"].tolist() for each in theirs]
            yield [float(each["start"]) for each in ours], [float(each["start"]) for each in theirs]
        return
    if "return_token_timestamps" in MODES[mode]:
        expected, _ = answer(oracle, mode)
        yield out["token_timestamps"], expected["token_timestamps"]
    sequences = out["sequences"]
    for row, ids in enumerate(sequences):
        logits = oracle(input_features=features[row : row + 1], decoder_input_ids=ids[None], use_cache=False).logits[0]
        if "num_beams" in MODES[mode]:
            continue
        shown = torch.stack(out["logits"])[:, row]
        ended = (ids[-len(shown) :] == 2).int().cumsum(-1).roll(1)  # after its end a text is padded
        ended[0] = 0
        wanted = logits[len(ids) - len(shown) - 1 : -1]
        yield shown[ended == 0], wanted[ended == 0]
    if "num_beams" in MODES[mode]:
        yield sequences.tolist(), answer(oracle, mode, use_cache=False)[0]["sequences"].tolist()


def padded_targets(encoding: str) -> Iterator[Comparison]:
    """Targets of several lengths, padded on the left, with the ids that Whisper's own `generate` makes, and without."""
    model, oracle = made(encoding)
    features, ids = sounds(), torch.tensor([[3, 20, 7, 12, 9], [0, 0, 3, 20, 8]])
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for given in ({}, {"decoder_position_ids": places}) if encoding != ITSELF else ({"decoder_position_ids": places},):
        logits = model(features, decoder_input_ids=ids, decoder_attention_mask=mask, **given).logits
        for row, shown in enumerate(mask.bool()):
            yield logits[row, shown], oracle(features[row : row + 1], decoder_input_ids=ids[row][shown][None]).logits[0]


def long_sounds(encoding: str) -> Iterator[Comparison]:
    """A sound of another length than Whisper's is an error, of a patched model as of a stock one."""
    model, _ = made(encoding)
    for length in (2 * FRAMES - 2, 2 * FRAMES + 2):
        try:
            model(torch.randn(1, MEL, length), decoder_input_ids=torch.tensor([[3]]))
        except ValueError as error:
            yield "Whisper expects the mel input features to be of length" in str(error), True
        else:
            yield "no error", "an error"


def saved(encoding: str) -> Iterator[Comparison]:
    model, _ = made(encoding)
    folder = new_folder()
    model.save_pretrained(folder)
    with torch.no_grad():
        expected = model(sounds(), decoder_input_ids=torch.tensor([[3, 20, 7]] * 2)).logits
    yield elsewhere(heard_in, folder), expected


def heard_in(folder: str) -> Tensor:
    from transformers import AutoModelForSpeechSeq2Seq

    with torch.no_grad():
        model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
        return model(sounds(), decoder_input_ids=torch.tensor([[3, 20, 7]] * 2)).logits


# wav2vec 2.0


def wave_model(kind: str, head: bool = False, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = Wav2Vec2Config(**{**WAVE, **KINDS[kind], **changes})
    return randomized((Wav2Vec2ForCTC(config) if head else AutoModel.from_config(config)).eval())


def waves_model(kind: str, encoding: str, head: bool = False, **changes: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {"max_length": 100} if "learned" in encoding else {}
    model, oracle = (drawn(hf_posenc.patch(wave_model(kind, head, **changes), encoding, **options)) for _ in range(2))
    oracle.set_attn_implementation("eager")
    return model, oracle


def waves(lengths: list[int], side: str = "right") -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch, its mask, and what it is made of."""
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in lengths]
    batch, mask = torch.zeros(len(rows), max(lengths)), torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(batch.shape[1] - len(row), None) if side == "left" else slice(0, len(row))
        batch[index, place], mask[index, place] = row, 1
    return batch, mask, rows


def batched(kind: str, encoding: str, side: str) -> Iterator[Comparison]:
    """As each wave by itself; on the left padding makes other frames in the stock model, too."""
    model, oracle = waves_model(kind, encoding)
    batch, mask, rows = waves(SOUNDS, side)
    output = model(batch, attention_mask=mask)[0]
    oracle_output = oracle(batch, attention_mask=mask)[0]
    yield output, oracle_output  # sdpa and eager
    if side == "right" and "adapter" not in kind:  # whose convolutions see the padding, in the stock model, too
        for row, sound in enumerate(rows):
            alone = oracle(sound[None])[0][0]
            yield output[row, : len(alone)], alone


def by_hooks(kind: str, encoding: str) -> Iterator[Comparison]:
    """A stock model whose own convolution gives the vectors of the encoding, or zeros; a bias is added to its mask."""
    if encoding not in ("none", "sinusoidal", "learned", "alibi", "kerple", "t5", "sinusoidal+alibi"):
        return
    model, _ = waves_model(kind, encoding)
    stock, batch = wave_model(kind), waves([600, 600])[0]
    encodings = list(model.posenc.named_parts().values())

    class Vectors(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            places = torch.arange(hidden.shape[1])[None]
            terms = [each("embed", places) for each in encodings if "embed" in each.mechanisms()]
            return sum(terms).to(hidden.dtype).expand_as(hidden) if terms else torch.zeros_like(hidden)

    def biased(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        length = args[0].shape[1] if args else kwargs["hidden_states"].shape[1]
        distance = torch.arange(length) - torch.arange(length)[:, None]
        terms = [each("distance_bias", distance.flatten()) for each in encodings if "distance_bias" in each.mechanisms()]
        if terms:
            kwargs["attention_mask"] = sum(terms).view(1, -1, length, length).to(torch.float32)
        return args, kwargs

    stock.encoder.pos_conv_embed = Vectors()
    for layer in stock.encoder.layers:
        layer.attention.register_forward_pre_hook(biased, with_kwargs=True)
    with torch.no_grad():
        yield model(batch)[0], stock(batch)[0]


def masked(kind: str, encoding: str) -> Iterator[Comparison]:
    """SpecAugment, given and drawn: masked frames keep their positions."""
    model, oracle = waves_model(kind, encoding, mask_time_prob=0.3, mask_time_length=3, mask_feature_prob=0.2)
    batch, mask, _ = waves(SOUNDS[:2])
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(SOUNDS[0]), add_adapter=False))
    hidden = torch.rand(2, frames, generator=torch.Generator().manual_seed(1)) < 0.3
    with torch.no_grad():
        yield (
            model(batch, attention_mask=mask, mask_time_indices=hidden)[0],
            oracle(batch, attention_mask=mask, mask_time_indices=hidden)[0],
        )
        outputs = []
        for each in (model, oracle):
            import numpy

            numpy.random.seed(0)
            torch.manual_seed(0)
            outputs.append(each.train()(batch, attention_mask=mask)[0])
        yield tuple(outputs)


def trained(kind: str, encoding: str) -> Iterator[Comparison]:
    """A CTC loss and all gradients, with gradient checkpointing and without."""
    model, oracle = waves_model(kind, encoding, head=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, mask, _ = waves(SOUNDS[:2])
    labels = torch.tensor([[3, 4, 5], [6, 7, -100]])
    gradients = []
    for each in (model.train(), oracle.train()):
        each.wav2vec2.config.apply_spec_augment = False
        each.config.apply_spec_augment = False
        loss = each(batch, attention_mask=mask, labels=labels).loss
        loss.backward()
        gradients.append({name: value.grad for name, value in each.named_parameters() if value.grad is not None})
    yield sorted(gradients[0]), sorted(gradients[1])
    largest = max(float(each.abs().max()) for each in gradients[1].values())
    for name, gradient in gradients[1].items():
        if float(gradient.abs().max()) > 1e-3 * largest:
            yield gradients[0][name], gradient


def back(kind: str, encoding: str) -> Iterator[Comparison]:
    """Saved and loaded in another process; there the convolution comes back."""
    model, _ = waves_model(kind, encoding)
    folder = new_folder()
    model.save_pretrained(folder)
    with torch.no_grad():
        batch = waves([600])[0]
        ours, theirs = elsewhere(back_in, folder)
        yield ours, model(batch)[0]
        yield theirs, wave_model(kind)(batch)[0]


def back_in(folder: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        model, batch = AutoModel.from_pretrained(folder), waves([600])[0]
        return model(batch)[0], hf_posenc.unpatch(model)(batch)[0]
