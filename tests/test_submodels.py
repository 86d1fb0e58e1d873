"""Composite models with an encoding in each of two submodels, most of whose parents name the classes of their submodels."""

import json

import pytest
import torch
import transformers
from transformers import AutoModel

import hf_posenc
from closeness import assert_apart, assert_equal
from conftest import run_python
from models import VOCABULARY, randomize_encoding, tokens
from test_composites import PARENTS, READING, SEEING, SIZES, clip, config, image, parent, with_random_values
from test_remote_code import assert_equal_everywhere, padded, seen_without_the_package


def siglip():
    texts = dict(SIZES, vocab_size=VOCABULARY, max_position_embeddings=24, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    return config("Siglip", text_config=texts, vision_config=SEEING)


def blip():
    texts = dict(READING, encoder_hidden_size=32, projection_dim=16, bos_token_id=2, sep_token_id=3, eos_token_id=3)
    return config("Blip", text_config=texts, vision_config=dict(SEEING, projection_dim=16), projection_dim=16)


def clap():
    texts = dict(SIZES, vocab_size=VOCABULARY, max_position_embeddings=26, pad_token_id=1, projection_dim=16)
    sound = dict(spec_size=32, num_mel_bins=8, patch_size=4, patch_stride=[4, 4], window_size=4, depths=[1, 1])
    sound |= dict(num_attention_heads=[2, 2], hidden_size=32, patch_embeds_hidden_size=16, projection_dim=16)
    sound |= dict(num_hidden_layers=2, enable_fusion=False, fusion_type=None)
    return config("Clap", text_config=texts, audio_config=sound, projection_dim=16)


TWO = {
    "CLIP": (clip, {"text_model": "rope", "vision_model": "rope_2d"}),
    "Siglip": (siglip, {"text_model": "shaw", "vision_model": "sinusoidal_2d"}),
    "Blip": (blip, {"text_model": "relative", "vision_model": "learned"}),
    "Clap": (clap, {"text_model": "sinusoidal+alibi", "audio_model": "alibi"}),
}
"""Model -> its config, and one encoding for each of two submodels."""
OPTIONS = {"learned": {"max_length": 5}}


def original(name):
    torch.manual_seed(0)
    return with_random_values(getattr(transformers, f"{name}Model")(TWO[name][0]()))


def inputs_of(name):
    inputs = {**padded(), "input_ids": tokens().clamp(min=4)}
    if name == "Clap":
        return {**inputs, "input_features": torch.randn(2, 1, 32, 8, generator=torch.Generator().manual_seed(0))}
    return {**inputs, "pixel_values": image()}


def apply(model, name, *submodels):
    for submodel in submodels:
        encoding = TWO[name][1][submodel]
        model = hf_posenc.patch(model, encoding, submodel=submodel, **OPTIONS.get(encoding, {}))
    return model


def embeddings(model, name):
    """The embeddings of the texts, and those of the images or sounds."""
    with torch.no_grad():
        output = model(**inputs_of(name))
    return output.text_embeds, output["audio_embeds" if name == "Clap" else "image_embeds"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models with both encodings: name -> directory, with their embeddings in cases.pt."""
    root = tmp_path_factory.mktemp("two")
    models = {name: randomize_encoding(apply(original(name), name, *TWO[name][1])) for name in TWO}
    for name, model in models.items():
        model.save_pretrained(root / name)
    torch.save({name: (inputs_of(name), embeddings(model, name)) for name, model in models.items()}, root / "cases.pt")
    return root


@pytest.mark.parametrize("name", TWO)
def test_each_submodel_is_that_of_a_model_with_only_its_encoding(name):
    model, (text, other) = original(name), TWO[name][1]
    before, ids = embeddings(model, name), {id(each) for each in model.parameters()}
    of_text = randomize_encoding(apply(model, name, text))
    of_other = randomize_encoding(apply(model, name, other), seed=1)
    for new, whose, index in (
        (apply(of_text, name, other), of_text, 0),
        (apply(of_other, name, text), of_other, 1),
        (apply(model, name, text, other), apply(model, name, text), 0),
        (apply(model, name, text, other), apply(model, name, other), 1),
    ):
        found = embeddings(new, name)
        assert_equal(found[index], embeddings(whose, name)[index])
        assert_apart(found[index], before[index])
        assert type(new) is type(whose) and type(new.config.text_config) is not type(model.config.text_config)
        assert_equal(embeddings(hf_posenc.unpatch(new), name), before)
    both = apply(of_text, name, other)
    learned = {key: each for key, each in of_text.named_parameters() if "posenc" in key}
    assert all(both.get_parameter(key) is each for key, each in learned.items()) and (learned or name in ("CLIP", "Clap"))
    one, two = apply(model, name, text, other).config, apply(model, name, other, text).config
    assert one.to_dict() == two.to_dict() and {*one.position_spec.by_submodel} == {text, other}
    assert embeddings(model, name)[0].equal(before[0]) and {id(each) for each in model.parameters()} == ids


@pytest.mark.parametrize("name", TWO)
def test_unpatch_one_of_them(name):
    model, (text, other) = original(name), TWO[name][1]
    both = randomize_encoding(apply(model, name, text, other))
    for index, (gone, left) in enumerate(((text, other), (other, text))):
        new = hf_posenc.unpatch(both, submodel=gone)
        assert type(new) is type(both) and new.config.to_dict() == apply(model, name, left).config.to_dict()
        found = embeddings(new, name)
        assert_equal(found[index], embeddings(model, name)[index])
        assert_equal(found[1 - index], embeddings(both, name)[1 - index])
        again = hf_posenc.unpatch(new)
        assert type(again) is type(model) and again.config.to_dict() == model.config.to_dict()
        replaced = hf_posenc.patch(new, "none", submodel=gone)
        assert replaced.config.position_spec.by_submodel[gone].type == "none"
        assert_equal(embeddings(replaced, name)[1 - index], embeddings(both, name)[1 - index])


def test_reloads_elsewhere(folders):
    code = (
        "import sys, torch, transformers, hf_posenc\n"
        "for name, (inputs, expected) in torch.load(sys.argv[1] + '/cases.pt').items():\n"
        "    model = transformers.AutoModel.from_pretrained(f'{sys.argv[1]}/{name}')\n"
        "    with torch.no_grad():\n"
        "        output = model(**inputs)\n"
        "    found = output.text_embeds, output['audio_embeds' if name == 'Clap' else 'image_embeds']\n"
        "    print(type(model).__name__, *map(torch.equal, found, expected))\n"
    )
    assert run_python(code, folders).splitlines() == [f"PosEnc{name}Model True True" for name in TWO]


@pytest.mark.parametrize("name", TWO)
def test_what_is_saved(name, folders, tmp_path):
    saved = json.loads((folders / name / "config.json").read_text())
    first, second = sorted(TWO[name][1])
    assert saved["position_encoding"]["submodel"] == first and [*saved["position_encoding"]["submodels"]] == [second]
    assert {plan["submodel"] for plan in saved["position_plan"]} == {first, second}
    model = AutoModel.from_pretrained(folders / name)
    assert_equal(embeddings(model, name), torch.load(folders / "cases.pt")[name][1])
    model.save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert all(again[key] == saved[key] for key in ("position_encoding", "position_plan"))
    assert_equal(embeddings(hf_posenc.unpatch(AutoModel.from_pretrained(tmp_path)), name), embeddings(original(name), name))
    report = hf_posenc.inspect(model)
    assert report == hf_posenc.inspect(folders / name) and [*report.submodels] == [*TWO[name][1]]
    for path, encoding in TWO[name][1].items():
        assert report.submodels[path].encoding == encoding == hf_posenc.inspect(model, submodel=path).encoding
        assert all(each.startswith(path) for paths in report.submodels[path].locations.values() for each in paths)
        assert f"{path} " in f"{report} ".replace("\n", " ") and encoding in str(report)
        card = hf_posenc.model_card(model, "me/model")
        assert f"- submodel `{path}` (`{encoding}`)" in card and f"` in `{path}." in card
        assert all(f"position encoding `{part}`" in card and f"- {part}\n" in card for part in encoding.split("+"))


def test_from_a_config(folders):
    """A model created from scratch, or loaded from an original checkpoint with `position_encoding`, has both encodings."""
    for name in ("CLIP", "Clap"):
        loaded = AutoModel.from_pretrained(folders / name)
        made = AutoModel.from_config(loaded.config)
        assert {key: each.shape for key, each in made.state_dict().items()} == {
            key: each.shape for key, each in loaded.state_dict().items()
        }
        given = {**loaded.config.position_encoding, "original": None}
        given["submodels"] = {path: {**each, "original": None} for path, each in given["submodels"].items()}
        new = type(loaded.config)(**{**original(name).config.to_dict(), "position_encoding": given})
        scratch = AutoModel.from_config(new)
        assert {*scratch.state_dict()} == {key for key in made.state_dict() if "posenc.original" not in key}
        with pytest.raises(ValueError, match="has no original positions"):
            hf_posenc.unpatch(scratch)


def test_loading_an_original_checkpoint(tmp_path):
    original("CLIP").save_pretrained(tmp_path)
    given = {"type": "rope", "submodel": "text_model", "submodels": {"vision_model": {"type": "rope_2d"}}}
    new = hf_posenc.PosEncCLIPModel.from_pretrained(tmp_path, position_encoding=given)
    both = apply(original("CLIP"), "CLIP", "text_model", "vision_model")
    assert_equal(embeddings(new, "CLIP"), embeddings(both, "CLIP"))
    assert new.config.position_encoding == both.config.position_encoding


def test_loads_without_the_package(tmp_path):
    chosen = ("CLIP", "Siglip", "Clap")
    models = {name: (randomize_encoding(apply(original(name), name, *TWO[name][1])), inputs_of(name)) for name in chosen}
    # The code that these need in addition is that of the second submodel in the alphabet.
    model = hf_posenc.patch(original("Clap"), "alibi", submodel="audio_model")
    texts = [{"input_ids": tokens(batch=8, length=24).clamp(min=4)}]
    converted = hf_posenc.convert(model, "relative", submodel="text_model", max_distance=4, texts=texts)
    longer = hf_posenc.patch(model, "alibi", submodel="text_model", max_length=24)
    longer = hf_posenc.extend(longer, 60, "windows", submodel="text_model")
    models |= {"ClapConverted": (converted, inputs_of("Clap")), "ClapWindows": (longer, inputs_of("Clap"))}
    assert_equal_everywhere(seen_without_the_package(tmp_path, models))


def test_a_head_without_a_text_model(folders, tmp_path):
    """CLIP's image classifier loads a checkpoint of both submodels."""
    loads = transformers.AutoModelForImageClassification.from_pretrained
    both, new = AutoModel.from_pretrained(folders / "CLIP"), loads(folders / "CLIP")
    pixels = {"pixel_values": image()}
    with torch.no_grad():
        assert_equal(new.vision_model(**pixels)[0], both.vision_model(**pixels)[0])
        new.save_pretrained(tmp_path)
        assert_equal(loads(tmp_path)(**pixels).logits, new(**pixels).logits)
        stock = hf_posenc.unpatch(new)
        assert_equal(stock.vision_model(**pixels)[0], original("CLIP").vision_model(**pixels)[0])
    assert type(stock).__name__ == "CLIPForImageClassification"


@pytest.mark.parametrize("name", ["llava", "encoder-decoder"])
def test_a_parent_that_builds_by_auto_classes(name, tmp_path):
    """In the order of the model, the vision model comes before the decoder whose positions `generate` needs."""
    model, inputs = parent(name), PARENTS[name].inputs()
    one, two = PARENTS[name].submodels
    alone = hf_posenc.patch(model, "rope", submodel=one, theta=100.0), hf_posenc.patch(model, "alibi", submodel=two)
    both = hf_posenc.patch(alone[0], "alibi", submodel=two)
    for submodel, patched in zip((one, two), alone, strict=True):
        for path, module in patched.base_model.get_submodule(submodel).state_dict().items():
            assert module.equal(both.base_model.get_submodule(submodel).state_dict()[path])
    both.save_pretrained(tmp_path)
    again = PARENTS[name].auto.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = both(**inputs).logits
        assert_equal(again(**inputs).logits, expected)
        for each in (model, *alone):
            assert_apart(expected, each(**inputs).logits)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=[])
    prompt = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    cached, recomputed = (again.generate(**prompt, **options, use_cache=cache) for cache in (True, False))
    assert cached.equal(recomputed)
    assert_equal(hf_posenc.unpatch(again)(**inputs).logits, model(**inputs).logits)


def test_extend_one_of_them():
    """Extending the text model and patching the vision model gives the same model in either order."""
    model, longer = original("CLIP"), {**inputs_of("CLIP"), "input_ids": tokens(length=40).clamp(min=4), "attention_mask": None}
    plain = hf_posenc.extend(model, 248, "keep_first", submodel="text_model")
    static = apply(plain, "CLIP", "vision_model")
    assert hf_posenc.inspect(static, submodel="text_model").max_length == 248
    with torch.no_grad():
        assert_equal(static.vision_model(image())[0], apply(model, "CLIP", "vision_model").vision_model(image())[0])
        assert_equal(static(**longer).text_embeds, plain(**longer).text_embeds)
    both = hf_posenc.patch(apply(model, "CLIP", "vision_model"), "alibi", submodel="text_model", max_length=24)
    with pytest.raises(ValueError, match="text_model.*vision_model"):
        hf_posenc.extend(both, 248)
    with pytest.raises(ValueError, match="longer than max_length=24"):
        both(**longer)
    new = hf_posenc.extend(both, 248, submodel="text_model")
    assert_equal(embeddings(new, "CLIP"), embeddings(both, "CLIP"))
    other = hf_posenc.patch(
        hf_posenc.patch(model, "alibi", submodel="text_model", max_length=248), "rope_2d", submodel="vision_model"
    )
    assert new.config.to_dict() == other.config.to_dict()
    assert_equal(new(**longer).text_embeds, other(**longer).text_embeds)
    learned = hf_posenc.patch(apply(model, "CLIP", "vision_model"), "learned", submodel="text_model", init="host")
    with pytest.raises(ValueError, match="'learned' encoding is limited"):
        hf_posenc.extend(learned, 248, submodel="text_model")
    with torch.no_grad():
        plain = hf_posenc.extend(model, 248, "cubic", submodel="text_model")
        cubic = hf_posenc.extend(learned, 248, "cubic", submodel="text_model")
        assert_equal(cubic(**longer).text_embeds, plain(**longer).text_embeds)
    one = hf_posenc.patch(model, "alibi", submodel="text_model", max_length=24)
    assert hf_posenc.extend(one, 30, submodel="text_model").config.to_dict() == hf_posenc.extend(one, 30).config.to_dict()


def test_convert_one_of_them(tmp_path):
    model = original("CLIP")
    texts = [{"input_ids": tokens(batch=30, length=24, seed=seed)} for seed in range(3)]

    def converted(given):
        return hf_posenc.convert(given, "relative", submodel="text_model", max_distance=4, texts=texts)

    first, last = apply(converted(model), "CLIP", "vision_model"), converted(apply(model, "CLIP", "vision_model"))
    alone, seen = converted(model), apply(model, "CLIP", "vision_model")
    for new in (first, last):
        found = embeddings(new, "CLIP")
        assert_equal(found[0], embeddings(alone, "CLIP")[0])
        assert_equal(found[1], embeddings(seen, "CLIP")[1])
        new.save_pretrained(tmp_path)
        assert_equal(embeddings(AutoModel.from_pretrained(tmp_path), "CLIP"), found)
        assert new.config.position_spec.by_submodel["text_model"].calibration is not None
        assert new.config.position_spec.by_submodel["vision_model"].calibration is None
        assert hf_posenc.inspect(new).calibration == hf_posenc.inspect(alone).calibration
        assert_equal(embeddings(hf_posenc.unpatch(new), "CLIP"), embeddings(model, "CLIP"))


def test_one_without_its_original_positions():
    both = hf_posenc.patch(apply(original("CLIP"), "CLIP", "vision_model"), "alibi", submodel="text_model", keep_original=False)
    report = hf_posenc.inspect(both)
    assert not report.can_unpatch and [each.can_unpatch for each in report.submodels.values()] == [False, True]
    with pytest.raises(ValueError, match="not kept"):
        hf_posenc.unpatch(both)
    left = hf_posenc.unpatch(both, submodel="vision_model")
    assert [*left.config.position_spec.by_submodel] == ["text_model"]


def test_train_and_push(tmp_path):
    model = apply(original("CLIP"), "CLIP", "text_model", "vision_model")
    model = hf_posenc.patch(hf_posenc.unpatch(model, submodel="text_model"), "relative", submodel="text_model")
    model.train()
    model(**inputs_of("CLIP"), return_loss=True).loss.backward()
    assert all(each.grad is not None for key, each in model.named_parameters() if "posenc" in key)
    folder = hf_posenc.push_to_hub(model.eval(), "me/two", save_directory=tmp_path / "two")
    assert_equal(embeddings(AutoModel.from_pretrained(folder), "CLIP"), embeddings(model, "CLIP"))
    assert "`vision_model` (`rope_2d`)" in (folder / "README.md").read_text()


def test_refused():
    both = apply(original("CLIP"), "CLIP", "text_model", "vision_model")
    for call, words in (
        (lambda: hf_posenc.patch(both, "alibi", submodel="text_model"), r"'rope'.*unpatch\(model, submodel='text_model'\)"),
        (lambda: hf_posenc.patch(both, "alibi"), "already has the 'rope' encoding in its text_model"),
        (lambda: hf_posenc.patch(both, "alibi", submodel="vision_model.encoder"), "'rope_2d' encoding in its vision_model"),
        (lambda: hf_posenc.patch(both, "alibi", submodel="audio_model"), "no submodel 'audio_model'"),
        (lambda: hf_posenc.unpatch(both, submodel="audio_model"), "'text_model', 'vision_model'"),
        (lambda: hf_posenc.unpatch(apply(original("CLIP"), "CLIP", "text_model"), submodel="vision_model"), "'text_model'"),
        (lambda: hf_posenc.convert(both, "relative", submodel="text_model", texts=["a"]), "already has the 'rope'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    vision = {"type": "alibi"}
    for given in (
        {"submodels": {"vision_model": vision}},
        {"submodel": "text_model", "submodels": ["vision_model"]},
        {"submodel": "text_model", "submodels": {"vision_model": "alibi"}},
        {"submodel": "text_model", "submodels": {"text_model": vision}},
        {"submodel": "text_model", "submodels": {"text_model.encoder": vision}},
        {"submodel": "text_model", "submodels": {"a b": vision}},
        {"submodel": "text_model", "submodels": {"vision_model": {**vision, "submodels": {"other": vision}}}},
    ):
        with pytest.raises(ValueError, match="submodel"):
            hf_posenc.PosEncCLIPConfig(position_encoding={"type": "alibi", **given})
