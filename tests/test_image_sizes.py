"""`extend` to another image size: original models, patched models, and spectrograms.

The tests compare with `interpolate_pos_encoding=True` of Transformers, which interpolates in each call, and with a float64 loop
of cubic convolution.
"""

import inspect
import math

import pytest
import torch
import transformers

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from conftest import run_python
from models import randomize_encoding, tiny
from test_vision import PATCHES, images, states, stock

BIGGER, MORE = 48, 36
"""An image size, and its number of patches of 8 x 8 pixels."""
TABLED = ("vit", "siglip", "beit", "beit-all", "data2vec", "deit", "registers", "yolos", "clip")
INTERPOLATING = ("Dinov2", "DPT", "ViTMSN", "FlavaImage", "BlipVision", "Tipsv2Vision", "IJepa")
"""Other models with position embeddings of patches, some with a different interpolation."""


def at_any_size(model, pixels):
    """The original model's output for images of another size."""
    known = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    return states(model, pixels, **({"interpolate_pos_encoding": True} if known else {}))


@pytest.mark.parametrize("size", [BIGGER, 24])
@pytest.mark.parametrize("name", [*TABLED, *INTERPOLATING])
def test_like_interpolation_in_each_call(name, size):
    model, pixels = stock(name), images(height=size, width=size)
    resized = hf_posenc.extend(model, image_size=size)
    assert type(resized) is type(model) and not resized.training
    assert resized.config.image_size in (size, [size, size]) and model.config.image_size in (32, [32, 32])
    assert_equal(states(resized, pixels), at_any_size(model, pixels))
    changed = {path for path, old in model.named_parameters() if resized.get_parameter(path) is not old}
    assert changed and all("position" in path for path in changed)


def test_the_new_size_is_the_only_one():
    resized = hf_posenc.extend(stock("vit"), image_size=BIGGER)
    with pytest.raises(ValueError, match=r"doesn't match model \(48\*48\)"):
        states(resized, images())
    assert_equal(
        states(hf_posenc.extend(resized, image_size=BIGGER), images(height=48, width=48)),
        states(resized, images(height=48, width=48)),
    )


@pytest.mark.parametrize("name", ["vit", "deit", "yolos"])
def test_oblong_images(name):
    model, pixels = stock(name), images(height=48, width=24)
    resized = hf_posenc.extend(model, image_size=(48, 24))
    assert_equal(states(resized, pixels), at_any_size(model, pixels))
    again = hf_posenc.extend(resized, image_size=(24, 48))
    assert states(again, images(height=24, width=48)).shape == states(resized, pixels).shape


def cubic(table, before, after):
    """Vectors `[rows · columns, D]` on another grid, number by number in float64, by cubic convolution with a = -3/4."""

    def weight(distance):
        distance, a = abs(distance), -0.75
        if distance <= 1:
            return (a + 2) * distance**3 - (a + 3) * distance**2 + 1
        return a * (distance**3 - 5 * distance**2 + 8 * distance - 4)

    def matrix(old, new):
        weights = torch.zeros(new, old, dtype=torch.float64)
        for place in range(new):
            center = (place + 0.5) * old / new - 0.5
            for offset in (-1, 0, 1, 2):
                below = math.floor(center)
                weights[place, min(max(below + offset, 0), old - 1)] += weight(center - below - offset)
        return weights

    rows, columns = (matrix(*sizes) for sizes in zip(before, after, strict=True))
    return torch.einsum("ij,kl,jld->ikd", rows, columns, table.double().unflatten(0, before)).flatten(0, 1)


def test_spectrograms_by_the_formula():
    """AST can't interpolate. Its table has one row for each patch of mel bins and frames, which overlap."""
    model = tiny("ASTForAudioClassification")
    bins, frames = model.config.num_mel_bins, model.config.max_length
    resized = hf_posenc.extend(model, image_size=(bins, 2 * frames))
    assert (resized.config.num_mel_bins, resized.config.max_length) == (bins, 2 * frames)
    steps = model.config.frequency_stride, model.config.time_stride
    grids = [
        tuple((n - model.config.patch_size) // step + 1 for n, step in zip((bins, count), steps, strict=True))
        for count in (frames, 2 * frames)
    ]
    name = "audio_spectrogram_transformer.embeddings.position_embeddings"
    old, new = (each.get_parameter(name)[0] for each in (model, resized))
    assert torch.equal(new[:2], old[:2])
    assert_close(new[2:].double(), cubic(old[2:], *grids))
    with torch.no_grad():
        assert resized(torch.randn(1, 2 * frames, bins)).logits.isfinite().all()


def test_learned_vectors_by_the_formula():
    model = stock("vit")
    patched = randomize_encoding(hf_posenc.patch(model, "learned", max_length=PATCHES))
    resized = hf_posenc.extend(patched, image_size=(48, 24))
    assert hf_posenc.inspect(resized).max_length == resized.posenc.weight.shape[0] == 18
    assert_close(resized.posenc.weight.double(), cubic(patched.posenc.weight, (4, 4), (6, 3)))
    assert resized.posenc.weight.requires_grad and not resized.training


@pytest.mark.parametrize("name", ["vit", "beit-all", "clip", "registers", "dinov3"])
@pytest.mark.parametrize("encoding", ["sinusoidal_2d", "rope_2d", "relative"])
def test_encodings_for_any_size(name, encoding):
    """The encoding stays the same. `unpatch` gives the original model at the new size."""
    model, pixels = stock(name), images(height=BIGGER, width=BIGGER)
    patched = randomize_encoding(hf_posenc.patch(model, encoding))
    resized = hf_posenc.extend(patched, image_size=BIGGER)
    assert type(resized) is type(patched) and resized.config.image_size == BIGGER
    assert_equal(states(resized, pixels), at_any_size(patched, pixels))
    assert_apart(states(resized, pixels), at_any_size(model, pixels))
    assert_equal(states(hf_posenc.unpatch(resized), pixels), at_any_size(model, pixels))


def test_the_original_table_as_an_encoding():
    """`learned` that starts from the original position embeddings gives the original model at the new size, too."""
    model, pixels = stock("vit"), images(height=BIGGER, width=BIGGER)
    patched = hf_posenc.patch(model, "learned", max_length=PATCHES, init="host")
    resized = hf_posenc.extend(patched, image_size=BIGGER)
    class_token = model.embeddings.position_embeddings[:, 0]
    with torch.no_grad():  # `learned` gives the class token no position
        model.embeddings.position_embeddings[:, 0] = 0
    assert class_token.shape == (1, 32)
    assert_close(states(resized, pixels), at_any_size(model, pixels))


def test_a_part_of_a_model(tmp_path):
    model, pixels = tiny("CLIPModel"), images(height=BIGGER, width=BIGGER)
    resized = hf_posenc.extend(model, image_size=BIGGER, submodel="vision_model")
    assert resized.config.vision_config.image_size == BIGGER and model.config.vision_config.image_size == 32
    resized.save_pretrained(tmp_path)
    again = transformers.CLIPModel.from_pretrained(tmp_path)
    assert_equal(states(again.vision_model, pixels), at_any_size(model.vision_model, pixels))


def test_half_precision_and_frozen_tables():
    model = stock("vit").to(torch.bfloat16)
    model.embeddings.position_embeddings.requires_grad_(False)
    table = hf_posenc.extend(model, image_size=BIGGER).embeddings.position_embeddings
    assert table.dtype == torch.bfloat16 and not table.requires_grad
    precise = cubic(model.embeddings.position_embeddings[0, 1:], (4, 4), (6, 6))
    assert_close(table[0, 1:].double(), precise, rtol=1e-2, atol=1e-2)


def test_other_processes_load_it(tmp_path):
    cases = []
    for name in (*TABLED, "Dinov2"):
        model, pixels = stock(name), images(height=BIGGER, width=BIGGER)
        resized = hf_posenc.extend(model, image_size=BIGGER)
        resized.save_pretrained(tmp_path / name)
        cases.append((name, type(model).__name__, {"pixel_values": pixels}, at_any_size(model, pixels)))
    for encoding, options in (("sinusoidal_2d", {}), ("learned", {"max_length": PATCHES})):
        patched = randomize_encoding(hf_posenc.patch(stock("beit"), encoding, **options))
        resized, name = hf_posenc.extend(patched, image_size=BIGGER), f"patched-{encoding}"
        resized.save_pretrained(tmp_path / name)
        cases.append((name, type(patched).__name__, {"pixel_values": pixels}, states(resized, pixels)))
    torch.save(cases, tmp_path / "expected.pt")
    run_python("import image_sizes_worker", tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("vit", dict(image_size=0), "image_size=0 must be an integer above 0, or two"),
        ("vit", dict(image_size=[48]), r"image_size=\[48\] must be"),
        ("vit", dict(image_size=4), r"smaller than a patch, \[8, 8\]"),
        ("vit", dict(image_size=48, max_length=9), "image_size=48 excludes max_length"),
        ("vit", dict(image_size=48, method="cubic"), "max_length=None|excludes"),
        ("vit", dict(image_size=48, keep=4), "keep=4 is a setting of a method"),
        ("clip", dict(image_size=(48, 24)), "Choose a square size"),
        ("Dinov2", dict(image_size=(48, 24)), "Choose a square size"),
        ("beit", dict(image_size=(48, 24)), "relative_position_bias_table of BeitModel"),
        ("dinov3", dict(image_size=48), "Pass images of this size to the model directly"),
        ("Swin", dict(image_size=48), "pass them to the model directly"),
        ("SegGpt", dict(image_size=48), "rel_pos_h of SegGptModel"),
        ("VideoMAE", dict(image_size=48), "doesn't read images as a grid"),
        ("Bert", dict(image_size=48), "For longer texts, pass max_length"),
        ("CLIP", dict(image_size=48), "submodel='vision_model'"),
    ],
)  # fmt: skip
def test_unsupported(name, settings, words):
    model = stock(name)
    before = {path: value.clone() for path, value in model.state_dict().items()}, model.config.to_dict()
    with pytest.raises(ValueError, match=words):
        hf_posenc.extend(model, **settings)
    assert model.config.to_dict() == before[1]
    assert all(torch.equal(value, before[0][path]) for path, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "clip", "siglip", "registers"])
def test_images_of_another_size_than_the_table(name):
    """Its first rows would belong to other places."""
    patched = hf_posenc.patch(stock(name), "learned")
    for size in (16, 24, BIGGER):
        with pytest.raises(ValueError, match="image_size"):
            at_any_size(patched, images(height=size, width=size))


def test_a_table_of_another_length():
    patched = hf_posenc.patch(stock("vit"), "learned", max_length=PATCHES + 4)
    with pytest.raises(ValueError, match="20 positions.* 16 patches"):
        hf_posenc.extend(patched, image_size=BIGGER)
    for method in ("linear", "dynamic"):
        with pytest.raises(ValueError, match="image_size"):
            hf_posenc.extend(patched, 36, method)
    with pytest.raises(ValueError, match="one stack, and no submodel"):
        hf_posenc.extend(patched, image_size=BIGGER, submodel="vit")
    clip = hf_posenc.patch(tiny("CLIPModel"), "alibi", submodel="vision_model")
    assert hf_posenc.extend(clip, image_size=BIGGER).config.vision_config.image_size == BIGGER
