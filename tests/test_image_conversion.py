"""`convert` of image and audio encoders. The tests compute the target values from whole attention matrices, in plain loops."""

import copy

import pytest
import torch

import hf_posenc
import models
from closeness import assert_equal
from conftest import run_python
from models import tiny
from test_vision import images, states, stock

REACH, COUNT = 4, 6
"""max_distance of the encodings in this file, and the number of inputs."""
EXTRA = {"vit": (1, 0), "deit": (2, 0), "yolos": (1, 3), "clip": (1, 0), "beit-all": (1, 0), "siglip": (0, 0)}
"""Image models with the number of tokens before and after the patches."""
LOADED = """
import sys, torch, hf_posenc, transformers
pixels, expected, report = torch.load(sys.argv[1] + "/expected.pt")
model = transformers.AutoModel.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert torch.equal(model(pixels)[0], expected)
assert str(hf_posenc.inspect(model).calibration) == report
"""


def features(name):
    """A model, the name of its input, and a batch."""
    generator = torch.Generator().manual_seed(5)
    if name in EXTRA:
        return stock(name), "pixel_values", images(COUNT)
    if name in ("wav2vec2", "hubert"):
        return models.stock(name), "input_values", torch.randn(COUNT, 600, generator=generator)
    model = tiny(name)
    if name == "ASTModel":
        return (
            model,
            "input_values",
            torch.randn(COUNT, model.config.max_length, model.config.num_mel_bins, generator=generator),
        )
    shape = COUNT, model.config.num_mel_bins, 2 * model.config.max_source_positions
    return model, "input_features", torch.randn(shape, generator=generator)


def convert(name, encoding="relative", **options):
    model, argument, batch = features(name)
    where = {"where": "encoder"} if model.config.is_encoder_decoder else {}
    found = hf_posenc.convert(model, encoding, inputs=[{argument: batch}], **where, **options)
    return model, found, batch


@torch.no_grad()
def attentions(model, batch):
    """The attention of each layer, `[B, H, L, L]`."""
    model = copy.deepcopy(model).eval()
    model.set_attn_implementation("eager")
    return [each.double() for each in model(batch, output_attentions=True, return_dict=True).attentions]


def masses(probabilities, extra):
    """The attention for each head and clipped distance of two patches, and for other pairs: `[H, 2 reach + 2]`."""
    length = probabilities.shape[-1]
    total = torch.zeros(probabilities.shape[1], 2 * REACH + 2, dtype=torch.double)
    for query in range(length):
        for key in range(length):
            inside = all(extra[0] <= place < length - extra[1] for place in (query, key))
            row = max(-REACH, min(REACH, key - query)) + REACH if inside else 2 * REACH + 1
            total[:, row] += probabilities[:, :, query, key].sum(0)
    return total


@pytest.mark.parametrize("name", [*EXTRA, "wav2vec2", "hubert", "ASTModel"])
def test_every_distance_gets_its_mass(name):
    """Patches attend to each distance, and to the class token, as much as in the original model."""
    model, new, batch = convert(name, max_distance=REACH)
    extra = EXTRA.get(name, (2, 0) if name == "ASTModel" else (0, 0))
    for theirs, ours in zip(attentions(model, batch), attentions(new, batch), strict=True):
        expected, actual = masses(theirs, extra), masses(ours, extra)
        assert float((expected - actual).abs().sum() / expected.sum()) < 2e-3
    report = hf_posenc.inspect(new).calibration
    assert (report.texts, report.tokens, report.held_out) == (COUNT, COUNT * theirs.shape[-1], 0)
    assert all(after <= before + 1e-4 for before, after in zip(report.kl_before, report.kl_after, strict=True))
    assert_equal(states(hf_posenc.unpatch(new), batch), states(model, batch))


@torch.no_grad()
def outputs(model, path, batch):
    seen = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    model(batch)
    handle.remove()
    return seen[0].expand(len(batch), -1, -1).flatten(0, 1).double()


@pytest.mark.parametrize("name", ["vit", "clip", "wav2vec2"])
def test_inputs_and_blocks_contribute_what_they_did_by_the_median(name):
    model, new, batch = convert(name, max_distance=REACH)
    paths = [path for path, module in new.named_modules() if type(getattr(module, "posenc", None)).__name__ == "MeanOffset"]
    assert len(paths) == 2 * model.config.num_hidden_layers + 1
    assert ("encoder.pos_conv_embed" if name == "wav2vec2" else "embeddings") in paths
    for path in paths:
        gaps = (outputs(model, path, batch) - outputs(new, path, batch)).median(0).values
        assert gaps.abs().max() < 1e-5


def test_whispers_encoder():
    model, new, batch = convert("WhisperForConditionalGeneration", max_distance=REACH)
    assert hf_posenc.inspect(new).where == {"encoder": "relative"}
    assert hf_posenc.inspect(new).calibration.length == model.config.max_source_positions
    with torch.no_grad():
        assert_equal(hf_posenc.unpatch(new).model.encoder(batch)[0], model.model.encoder(batch)[0])


def test_inputs_of_several_batches():
    """The first inputs calibrate, and the others measure the agreement. A mask of ones is what a processor returns."""
    model, pixels = stock("vit"), images(9)
    given = ({"pixel_values": each[None], "pixel_mask": torch.ones(1, 32, 32)} for each in pixels)
    new = hf_posenc.convert(model, "relative", inputs=given, calibration_texts=COUNT, max_distance=REACH)
    report = hf_posenc.inspect(new).calibration
    assert (report.texts, report.held_out, report.length) == (COUNT, 3, 17)
    again = hf_posenc.convert(model, "relative", inputs=pixels, calibration_texts=COUNT, max_distance=REACH)
    assert_equal(states(again, pixels), states(new, pixels))


def test_a_part_of_a_model():
    model = tiny("CLIPModel")
    new = hf_posenc.convert(model, "relative", inputs=images(COUNT), submodel="vision_model", max_distance=REACH)
    report = hf_posenc.inspect(new).calibration
    assert report.texts == COUNT and sum(report.kl_after) < sum(report.kl_before)


def test_other_processes_load_it(tmp_path):
    _, new, batch = convert("vit", max_distance=REACH)
    new.save_pretrained(tmp_path)
    torch.save((batch, states(new, batch), str(hf_posenc.inspect(new).calibration)), tmp_path / "expected.pt")
    run_python(LOADED, tmp_path)


PIXELS = images(COUNT)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("vit", dict(), "inputs=None .*ViTModel.* batches of 'pixel_values'"),
        ("vit", dict(texts=["a text"]), "texts=.*ViTModel"),
        ("Bert", dict(texts=["a text"], inputs=PIXELS), "inputs=.*BertModel"),
        ("Bert", dict(), "texts=None .*BertModel"),
        ("vit", dict(inputs=[]), "inputs is empty"),
        ("vit", dict(inputs=3), "inputs=3 isn't a sequence"),
        ("vit", dict(inputs=[{"labels": PIXELS}]), "inputs contains .*'pixel_values': tensor"),
        ("vit", dict(inputs=[PIXELS, PIXELS[..., :24]]), r"shapes \[6, 3, 32, 32\] and \[6, 3, 32, 24\]"),
        ("vit", dict(inputs=[{"pixel_values": PIXELS, "pixel_mask": torch.zeros(6, 32, 32)}]), "inputs contains padding"),
        ("vit", dict(inputs=PIXELS, calibration_length=9), "calibration_length=9 applies to texts"),
        ("vit", dict(inputs=PIXELS, max_distance=15), "'relative'.* 16 tokens"),
        ("Swin", dict(inputs=PIXELS), "SwinEncoder.* only pixel_values"),
        ("ViTMAE", dict(inputs=PIXELS), "ViTMAEModel.* each call"),
        ("Whisper", dict(inputs=PIXELS), "WhisperDecoder.*where='encoder'"),
    ],
)  # fmt: skip
def test_unsupported(name, settings, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.convert(stock(name), "relative", **{"max_distance": REACH, **settings})
