"""`extend` without a method: computed positions of original models continue exactly. Whisper's two halves have two lengths."""

import copy
import math

import pytest
import torch
import transformers

import hf_posenc
from closeness import assert_close, assert_equal
from conftest import run_python
from models import LENGTH, randomize, rebuilt, tiny, tokens

LONG = 2 * LENGTH + 13
SINES = ("MarianMTModel", "PegasusModel", "WhisperForConditionalGeneration")

LOADED = """
import sys, torch, transformers
inputs, expected = torch.load(sys.argv[1] + "/expected.pt")
model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1])
with torch.no_grad():
    assert torch.equal(model(**inputs)[0], expected)
assert "hf_posenc" not in sys.modules
"""


def made(name, **changes):
    """An original model whose computed tables have their values, and all others are random."""
    model = getattr(transformers, name)(tiny(name, **changes).config)
    kept = {path: each.clone() for path, each in model.named_parameters() if not each.requires_grad}
    randomize(model)
    with torch.no_grad():
        for path, each in kept.items():
            model.get_parameter(path).copy_(each)
    return model.eval()


def tables(model):
    return {path: each for path, each in model.named_parameters() if not each.requires_grad and "embed_positions" in path}


def extended(model):
    return hf_posenc.extend(model, LONG, where="encoder" if model.config.model_type == "whisper" else None)


@pytest.mark.parametrize("name", SINES)
def test_like_a_model_created_longer(name):
    model = made(name)
    longer, config = extended(model), copy.deepcopy(model.config)
    field = "max_source_positions" if model.config.model_type == "whisper" else "max_position_embeddings"
    assert getattr(longer.config, field) == LONG and getattr(model.config, field) == LENGTH
    setattr(config, field, LONG)
    created = getattr(transformers, name)(config)
    assert tables(longer).keys() == tables(created).keys() != set()
    for path, table in tables(longer).items():
        assert table.shape[0] == LONG and torch.equal(table, created.get_parameter(path))
        assert torch.equal(table[:LENGTH], model.get_parameter(path))
    assert all(longer.get_parameter(path) is each for path, each in model.named_parameters() if path not in tables(model))


def test_sinusoids_by_the_formula():
    """Marian's and Pegasus' formula, number by number: all sines, then all cosines."""
    model = extended(made("MarianMTModel"))
    table = model.model.encoder.embed_positions.weight
    half = table.shape[1] // 2
    for position in (0, 1, LENGTH, LONG - 1):
        angles = [position / 10000 ** (2 * i / table.shape[1]) for i in range(half)]
        assert_close(table[position], torch.tensor([*map(math.sin, angles), *map(math.cos, angles)]))


def test_short_texts_stay_the_same():
    model, ids = made("MarianMTModel"), tokens(length=LENGTH)
    longer = extended(model)
    with torch.no_grad():
        assert_equal(longer(input_ids=ids, decoder_input_ids=ids)[0], model(input_ids=ids, decoder_input_ids=ids)[0])


@pytest.mark.parametrize("name", SINES)
def test_other_processes_load_it(name, tmp_path):
    longer, ids = extended(made(name)), tokens(length=9)
    features = torch.randn(len(ids), longer.config.num_mel_bins, 2 * LONG) if "Whisper" in name else None
    inputs = {"input_ids": tokens(length=LONG)} if features is None else {"input_features": features}
    inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        expected = longer(**inputs)[0]
    longer.save_pretrained(tmp_path)
    torch.save((inputs, expected), tmp_path / "expected.pt")
    run_python(LOADED, tmp_path, name)


def test_whispers_decoder():
    """Without `where`, a method extends the decoder, which reads tokens. The encoder reads the same number of frames."""
    model = made("WhisperForConditionalGeneration")
    longer = hf_posenc.extend(model, LONG, "keep_first")
    assert longer.config.max_target_positions == LONG and longer.config.max_source_positions == LENGTH
    ids, features = tokens(length=9), torch.randn(2, model.config.num_mel_bins, 2 * LENGTH)
    with torch.no_grad():
        outputs = [each(input_features=features, decoder_input_ids=ids[:2])[0] for each in (model, longer)]
        assert_equal(*outputs)
        long = {"input_features": features, "decoder_input_ids": tokens(length=LONG)[:2]}
        assert_equal(longer(**long)[0], rebuilt(longer)(**long)[0])
    both = hf_posenc.extend(longer, LONG, where="encoder")
    assert both.config.max_target_positions == both.config.max_source_positions == LONG
    assert type(both) is type(model)


def test_rounded_tables_continue():
    model = made("WhisperForConditionalGeneration").half()
    table = extended(model).model.encoder.embed_positions.weight
    created = extended(made("WhisperForConditionalGeneration")).model.encoder.embed_positions.weight
    assert table.dtype == torch.float16
    assert_close(table.float(), created, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("BertModel", {}, "needs a method"),
        ("LlamaModel", {}, "needs a method"),
        ("WhisperForConditionalGeneration", {}, "needs a method"),
        ("WhisperForConditionalGeneration", dict(method="linear", where="encoder"), "omit the method"),
        ("MarianMTModel", dict(method="linear"), "omit the method"),
        ("MarianMTModel", dict(where="cross"), "where='cross' isn't valid. Choose one of 'encoder', 'decoder'"),
        ("BartModel", dict(method="linear", where="encoder"), "would have shape"),
    ],
)  # fmt: skip
def test_unsupported(name, settings, words):
    with pytest.raises(ValueError, match=words):
        hf_posenc.extend(made(name), LONG, **settings)


def test_a_trained_table_needs_a_method():
    """Values that differ from those of a new model were trained."""
    with pytest.raises(ValueError, match="needs a method"):
        hf_posenc.extend(tiny("MarianMTModel"), LONG)


def test_patched_models_have_no_halves():
    patched = hf_posenc.patch(made("MarianMTModel"), "alibi")
    with pytest.raises(ValueError, match="where='encoder'"):
        hf_posenc.extend(patched, LONG, where="encoder")
