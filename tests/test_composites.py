"""Composite models: one submodel gets an encoding, and the parent saves, loads, generates, and trains with it."""

import copy
import itertools
import json
import pickle
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.evolla import modeling_evolla
from typer.testing import CliRunner

import hf_posenc
import models
from closeness import assert_apart, assert_close, assert_equal
from conftest import run_python
from hf_posenc.cli import app
from models import (
    BERT,
    CACHE,
    LLAMA,
    VOCABULARY,
    first,
    patched,
    randomize,
    randomize_encoding,
    slow,
    stock,
    tiny_config,
    tokens,
)
from oracles import gradients
from test_remote_code import AUTO, assert_equal_everywhere, padded, seen_without_the_package

SIZES = {name: value for name, value in BERT.items() if name not in ("max_position_embeddings", "pad_token_id")}
SEEING = dict(SIZES, image_size=16, patch_size=8)
READING = dict(LLAMA, vocab_size=VOCABULARY)
IMAGE = VOCABULARY - 1
"""The placeholder token that a vision-language model replaces by image features."""
WAYS = ("sinusoidal", "rope", "alibi", "shaw")
"""One encoding for each mechanism."""
OPTIONS: dict[str, dict[str, Any]] = {"rope": {"theta": 100.0}}
"""Options that make an encoding differ from the original one."""


def config(prefix, *args, **kwargs):
    return getattr(transformers, f"{prefix}Config")(*args, **kwargs)


def image(seed=0):
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def text():
    """Token ids with an image, with left padding in the second row."""
    ids = tokens(length=12, seed=3).clamp(max=IMAGE - 4)
    ids[:, 5:9] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def clip():
    texts = config("CLIPText", **dict(READING, projection_dim=16)).to_dict()
    return config("CLIP", text_config=texts, vision_config=dict(SEEING, projection_dim=16), projection_dim=16)


def llava():
    vision, language = config("CLIPVision", **SEEING), config("Llama", **READING)
    return config("Llava", vision_config=vision, text_config=language, image_token_index=IMAGE, image_token_id=IMAGE)


def gemma3():
    vision, language = config("SiglipVision", **SEEING), config("Gemma3Text", **dict(READING, head_dim=8))
    return config(
        "Gemma3",
        vision_config=vision,
        text_config=language,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
    )


def paligemma():
    vision = config("SiglipVision", **dict(SEEING, projection_dim=32))
    sizes = dict(image_token_index=IMAGE, image_token_id=IMAGE, projection_dim=32, hidden_size=32)
    return config("PaliGemma", vision_config=vision, text_config=config("Gemma", **dict(READING, head_dim=8)), **sizes)


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = dict(depth=2, embed_dim=32, num_heads=4, hidden_size=32, patch_size=4)
    ids = dict(image_token_id=IMAGE, video_token_id=IMAGE - 1, vision_start_token_id=IMAGE - 2, vision_end_token_id=IMAGE - 3)
    return config("Qwen2VL", vision_config=vision, text_config=dict(READING, rope_parameters=rope), **ids)


def qwen2_vl_inputs():
    inputs = text()
    inputs["input_ids"][:, 4] = IMAGE - 2
    patches = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    kinds = (inputs["input_ids"] == IMAGE).long()
    return {**inputs, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": kinds}


def encoder_decoder():
    halves = (tiny_config("BertModel"), tiny_config("BertModel"))
    make = transformers.EncoderDecoderConfig.from_encoder_decoder_configs
    return make(*halves, decoder_start_token_id=1, pad_token_id=0)


def vision_encoder_decoder():
    make = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs
    return make(config("ViT", **SEEING), tiny_config("GPT2Model"), decoder_start_token_id=1, pad_token_id=0)


@dataclass(frozen=True)
class Parent:
    """A composite model.

    config, inputs: functions that make them. head: the name of a class with a head. auto: the Auto class that loads it.
    submodels: those that can be patched.
    """

    config: Any
    inputs: Any
    submodels: tuple[str, ...]
    base: str
    head: str | None = None
    auto: Any = AutoModel


def seeing(name, make, submodels=("language_model",), inputs=None, **more):
    """A model that reads text with an image."""
    inputs = inputs or (lambda: {**text(), "pixel_values": image(), **{key: value() for key, value in more.items()}})
    return Parent(make, inputs, submodels, f"{name}Model", f"{name}ForConditionalGeneration", AutoModelForImageTextToText)


PARENTS = {
    "clip": Parent(clip, lambda: {**padded(), "pixel_values": image()}, ("text_model", "vision_model"), "CLIPModel"),
    "llava": seeing("Llava", llava, ("language_model", "vision_tower")),
    "gemma3": seeing("Gemma3", gemma3, token_type_ids=lambda: (text()["input_ids"] == IMAGE).long()),
    "paligemma": seeing("PaliGemma", paligemma, token_type_ids=lambda: torch.zeros(2, 12, dtype=torch.long)),
    "qwen2_vl": seeing("Qwen2VL", qwen2_vl, inputs=qwen2_vl_inputs),
    "encoder-decoder": Parent(
        encoder_decoder,
        lambda: {**padded(), "decoder_input_ids": tokens(seed=1, length=7)},
        ("encoder", "decoder"),
        "EncoderDecoderModel",
        auto=AutoModelForSeq2SeqLM,
    ),
    "vision-encoder-decoder": Parent(
        vision_encoder_decoder,
        lambda: {"pixel_values": image(), "decoder_input_ids": tokens(seed=1, length=7)},
        ("decoder", "encoder"),
        "VisionEncoderDecoderModel",
        auto=AutoModelForImageTextToText,
    ),
}
GENERATING = ("llava", "gemma3", "paligemma", "qwen2_vl")
"""Parents of one decoder that reads text with an image."""
PATCHABLE = [(name, submodel) for name, parent in PARENTS.items() for submodel in parent.submodels]


def parent(name, head=True, seed=0):
    """A tiny random original model. Its norm weights are around one, so that both submodels affect the output."""
    made = PARENTS[name]
    torch.manual_seed(seed)
    cls = getattr(transformers, made.head if head and made.head else made.base)
    return with_random_values(cls(made.config()), seed)


def with_random_values(model, seed=0):
    model = randomize(model, seed=seed).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1 and key.endswith("weight"):
                value.add_(1)
    return model


def with_encoding(name, encoding, submodel=None, head=True, **options):
    chosen, options = submodel or PARENTS[name].submodels[0], {**OPTIONS.get(encoding, {}), **options}
    return randomize_encoding(hf_posenc.patch(parent(name, head), encoding, submodel=chosen, **options))


def run(model, inputs):
    """The main tensor of a model's output."""
    with torch.no_grad():
        return first(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


@pytest.mark.parametrize(
    ("name", "submodel", "encoding"), [(*each, way) for each, way in zip(PATCHABLE, itertools.cycle(WAYS), strict=False)]
)
def test_patch_and_unpatch(name, submodel, encoding):
    model, inputs = parent(name), PARENTS[name].inputs()
    expected, saved = run(model, inputs), model.config.to_dict()
    new = randomize_encoding(hf_posenc.patch(model, encoding, submodel=submodel, **OPTIONS.get(encoding, {})))
    assert type(new).__name__ == f"PosEnc{type(model).__name__}"
    assert type(new.base_model).__name__ == f"PosEnc{type(model.base_model).__name__}"
    places = [path for paths in hf_posenc.inspect(new).locations.values() for path in paths]
    assert len(new.config.position_plan) == 1 and places and all(submodel in path.split(".") for path in places)
    assert_apart(run(new, inputs), expected)
    again = hf_posenc.unpatch(new)
    assert type(again) is type(model) and again.config.to_dict() == saved == model.config.to_dict()
    assert_equal(run(again, inputs), expected)
    assert_equal(run(model, inputs), expected)
    encodings = {key for key, _ in new.named_parameters() if "posenc" in key}
    place = f"{new.base_model_prefix}.{submodel}" if new.base_model is not new else submodel
    assert all(key.startswith(f"{place}.") for key in encodings) and (encodings or encoding != "shaw")
    for path, module in new.named_modules():
        inside = path == place or path.startswith(f"{place}.")
        ours = type(module).__module__.startswith("hf_posenc")
        assert inside or not ours or isinstance(module, (type(new), type(new.base_model)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved patched parents and their outputs: directory -> Auto class, inputs, output."""
    root, cases = tmp_path_factory.mktemp("parents"), {}
    for (name, submodel), encoding in zip(PATCHABLE, itertools.cycle(WAYS), strict=False):
        model, inputs = with_encoding(name, encoding, submodel), PARENTS[name].inputs()
        folder = root / f"{name}-{submodel}"
        model.save_pretrained(folder)
        cases[folder] = PARENTS[name].auto.__name__, inputs, run(model, inputs)
    torch.save({str(folder): case for folder, case in cases.items()}, root / "cases.pt")
    return root, cases


def test_reloads_elsewhere(folders):
    root, cases = folders
    code = (
        "import sys, torch, transformers, hf_posenc\n"
        "for folder, (auto, inputs, expected) in torch.load(sys.argv[1]).items():\n"
        "    model = getattr(transformers, auto).from_pretrained(folder)\n"
        "    assert type(model).__name__.startswith('PosEnc'), type(model)\n"
        "    with torch.no_grad():\n"
        "        print(torch.equal(model(**inputs)[0], expected))\n"
    )
    assert run_python(code, root / "cases.pt").split() == ["True"] * len(cases)


def test_the_configs_within_are_stock(folders):
    _, cases = folders
    for folder in cases:
        saved = json.loads((folder / "config.json").read_text())
        kinds = [part["model_type"] for part in saved.values() if isinstance(part, dict) and "model_type" in part]
        assert saved["model_type"].startswith("posenc-") and saved["position_encoding"]["submodel"] in folder.name
        assert kinds and not any(kind.startswith("posenc-") for kind in kinds)
        assert (folder / "config.json").read_text().count("position_encoding") == 1


def test_a_config_that_does_not_declare_its_parts(tmp_path):
    """RAG's `sub_configs` is empty."""
    asking, answering = config("DPR", **SIZES, vocab_size=VOCABULARY), tiny_config("BartModel")
    made = transformers.RagConfig.from_question_encoder_generator_configs(asking, answering, n_docs=1)
    model, ids = randomize(transformers.RagModel(made)).eval(), tokens()
    inputs = {"context_input_ids": ids, "context_attention_mask": torch.ones_like(ids), "doc_scores": torch.ones(2, 1)}
    inputs["decoder_input_ids"] = tokens(seed=1, length=7)
    saved = model.config.to_dict()
    new = randomize_encoding(hf_posenc.patch(model, "alibi", submodel="generator"))
    assert_apart(run(new, inputs), run(model, inputs))
    assert hf_posenc.unpatch(new).config.to_dict() == saved
    new.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text().count("position_encoding") == 1
    again = type(new).from_pretrained(tmp_path)
    assert_equal(run(again, inputs), run(new, inputs))
    for patched_model in (new, again):
        back = hf_posenc.unpatch(patched_model)
        assert type(back.generator) is type(model.generator)
        assert_equal(run(back, inputs), run(model, inputs))


@pytest.mark.parametrize("name", ["clip", "llava", "encoder-decoder"])
def test_saved_again_is_the_same(name, folders, tmp_path):
    """Saving a loaded model again gives the same output, also if it is loaded without its head or with a new one."""
    root, cases = folders
    folder = next(folder for folder in cases if folder.name.startswith(name))
    auto, inputs, expected = cases[folder]
    loads = getattr(transformers, auto).from_pretrained
    model = loads(folder)
    model.save_pretrained(tmp_path / "second")
    again = loads(tmp_path / "second")
    assert_equal(run(again, inputs), expected)
    again.save_pretrained(tmp_path / "third")
    second, third = ((tmp_path / each / "config.json").read_text() for each in ("second", "third"))
    assert third == second and "posenc-" not in second.replace(f'"posenc-{name}', "")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loads(folder, device_map="cpu")):
        assert_equal(run(twin, inputs), expected)
    loads(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    assert {parameter.dtype for parameter in loads(tmp_path / "bfloat16").parameters()} == {torch.bfloat16}
    if PARENTS[name].head:
        base = AutoModel.from_pretrained(folder)
        assert type(base) is type(model.base_model)
        base.save_pretrained(tmp_path / "base")
        head = loads(tmp_path / "base")
        assert type(head) is type(model)
        assert_equal([run(each, inputs) for each in (base, head.base_model)], [run(model.base_model, inputs)] * 2)


def test_loads_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(AUTO, "EncoderDecoderModel", "AutoModelForSeq2SeqLM")
    monkeypatch.setitem(AUTO, "ForConditionalGeneration", "AutoModelForImageTextToText")
    monkeypatch.delitem(AUTO, "Model")
    monkeypatch.setitem(AUTO, "Model", "AutoModel")  # tried last
    chosen = {"clip": "learned+shaw", "llava": "sinusoidal+alibi", "encoder-decoder": "rope"}
    models = {name: (with_encoding(name, encoding), PARENTS[name].inputs()) for name, encoding in chosen.items()}
    seen = seen_without_the_package(tmp_path, models)
    assert_equal_everywhere(seen)
    assert seen["llava"]["class"] == "PosEncLlavaForConditionalGeneration"


def test_a_head_that_has_one_of_them(tmp_path):
    model = randomize(transformers.CLIPForImageClassification(clip())).eval()
    with pytest.raises(ValueError, match=r"CLIPForImageClassification"):
        hf_posenc.patch(model, "alibi", submodel="text_model")
    new = randomize_encoding(hf_posenc.patch(model, "shaw", submodel="vision_model"))
    new.save_pretrained(tmp_path)
    again, inputs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path), {"pixel_values": image()}
    assert type(again).__name__ == "PosEncCLIPForImageClassification"
    assert_equal(run(again, inputs), run(new, inputs))


@pytest.mark.parametrize("name", ["clip", slow("llava"), "encoder-decoder"])
def test_from_a_stock_checkpoint(name, tmp_path):
    model, inputs = parent(name), PARENTS[name].inputs()
    model.save_pretrained(tmp_path)
    (submodel, *_) = PARENTS[name].submodels
    encoding = {"type": "alibi", "submodel": submodel, "max_length": 99}
    cls = getattr(hf_posenc, f"PosEnc{type(model).__name__}")
    loaded = cls.from_pretrained(tmp_path, position_encoding=encoding)
    assert type(loaded) is cls and loaded.config.position_spec.submodel == submodel
    assert_close(run(loaded, inputs), run(hf_posenc.patch(model, "alibi", submodel=submodel, max_length=99), inputs))
    with pytest.raises(hf_posenc.UnsupportedModelError, match=f"submodel='{submodel}'"):
        cls.from_pretrained(tmp_path, position_encoding="alibi")


@pytest.mark.parametrize("name", ["clip", slow("llava")])
def test_from_scratch(name, tmp_path):
    submodel = PARENTS[name].submodels[0]
    stock_config = PARENTS[name].config()
    derived = getattr(hf_posenc, f"PosEnc{type(stock_config).__name__}")
    arguments = {
        key: value for key, value in stock_config.to_dict().items() if key not in ("model_type", "transformers_version")
    }
    chosen = derived(**arguments, position_encoding={"type": "rope", "submodel": submodel})
    before = chosen.to_dict()
    model = AutoModel.from_config(chosen).eval()
    direct = type(model)(chosen).eval()
    assert chosen.to_dict() == before and not hasattr(chosen.text_config, "position_spec")
    for each in (model, direct):
        assert type(each).__name__ == f"PosEnc{PARENTS[name].base}"
        assert each.config.to_dict() == before
    model.save_pretrained(tmp_path)
    again, inputs = AutoModel.from_pretrained(tmp_path), PARENTS[name].inputs()
    assert_equal(run(again, inputs), run(model, inputs))
    # A config whose submodels have an encoding in another model can request another encoding.
    reused = copy.deepcopy(model.config)
    reused.position_encoding = {"type": "alibi", "submodel": submodel}
    other = AutoModel.from_config(reused)
    assert type(other.get_submodule(submodel).posenc).type == "alibi"
    assert type(model.get_submodule(submodel).posenc).type == "rope" and model.config.position_spec.type == "rope"
    assert_equal(run(model, inputs), run(again, inputs))


@pytest.mark.parametrize("name", GENERATING)
def test_images_and_padding(name):
    """A token's position is its index among the tokens that the mask shows, including image tokens."""
    model, inputs = with_encoding(name, "sinusoidal"), PARENTS[name].inputs()
    together = run(model, inputs)[1, 3:]
    rows = {key: value.chunk(2)[1] for key, value in inputs.items()}
    short = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    alone = {key: value[:, 3:] if key in short else value for key, value in rows.items()}
    assert_close(together, run(model, alone)[0])
    ids = torch.arange(9)[None]
    start = name == "paligemma"  # which counts from 1
    assert_close(together, run(model, {**alone, "position_ids": ids + start})[0])
    assert_apart(run(model, {**alone, "position_ids": ids + start + 1})[0], together)


@pytest.mark.parametrize("name", GENERATING)
def test_generate(name):
    """Generation gives the same logits with and without a cache, and in one forward pass over prompt and answer."""
    model, inputs = with_encoding(name, "+".join(WAYS)), PARENTS[name].inputs()
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    options["suppress_tokens"] = list(range(IMAGE - 4, VOCABULARY))
    cached, not_cached = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert_close(torch.stack(cached.logits), torch.stack(not_cached.logits))
    whole = {key: value for key, value in inputs.items() if "token_type_ids" not in key}
    whole["input_ids"], grown = cached.sequences, cached.sequences.shape[1] - 12
    whole["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(2, grown, dtype=torch.long)], 1)
    for key in inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
        whole[key] = torch.cat([inputs[key], torch.zeros(2, grown, dtype=torch.long)], 1)
    if name == "paligemma":
        return  # a prompt token sees the whole prompt, and an answer token only earlier tokens
    assert_close(torch.stack(cached.logits, 1), run(model, whole)[:, 11:-1])


def test_a_cache_by_hand():
    """M-RoPE's ids of a step after an image differ from those of a text."""
    model, inputs = with_encoding("qwen2_vl", "sinusoidal"), PARENTS["qwen2_vl"].inputs()
    more = tokens(length=4, seed=9).clamp(max=IMAGE - 4)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(more)], 1)
    kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], 1)
    whole = {
        **inputs,
        "input_ids": torch.cat([inputs["input_ids"], more], 1),
        "attention_mask": mask,
        "mm_token_type_ids": kinds,
    }
    expected, cache = run(model, whole)[:, 12:], DynamicCache(config=model.config.get_text_config())
    run(model, {**inputs, CACHE: cache})
    step = {"input_ids": more, "attention_mask": mask, CACHE: cache}
    assert_close(run(model, step), expected)


@pytest.mark.parametrize("name", ["encoder-decoder", "vision-encoder-decoder"])
def test_generate_from_an_encoder(name):
    inputs = {key: value for key, value in PARENTS[name].inputs().items() if not key.startswith("decoder")}
    for submodel in PARENTS[name].submodels:
        model = with_encoding(name, "+".join(WAYS), submodel)
        options = dict(max_new_tokens=5, min_new_tokens=5, output_logits=True, return_dict_in_generate=True)
        cached, not_cached = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
        assert_close(torch.stack(cached.logits), torch.stack(not_cached.logits))
        forced = run(model, {**inputs, "decoder_input_ids": cached.sequences})
        assert_close(torch.stack(cached.logits, 1), forced[:, :-1])
        beams = [model.generate(**inputs, max_new_tokens=5, num_beams=3, use_cache=use) for use in (True, False)]
        assert_equal(*beams)


def test_which_model():
    model = parent("clip")
    both = "submodel='text_model' or submodel='vision_model'"
    with pytest.raises(hf_posenc.UnsupportedModelError, match=f"CLIPModel.*{both}") as refused:
        hf_posenc.patch(model, "alibi")
    assert refused.value.submodels == ("text_model", "vision_model")
    for wrong in ("text", "text_model.encoder", "text_model.", "", 3):
        with pytest.raises(ValueError, match="CLIPModel has no submodel|submodel="):
            hf_posenc.patch(model, "alibi", submodel=wrong)
    those = "Supported submodels: 'text_model', 'vision_model'"
    with pytest.raises(ValueError, match=f"CLIPModel has no submodel 'text'.*{those}"):
        hf_posenc.patch(model, "alibi", submodel="text")
    with pytest.raises(ValueError, match="BertModel has no submodel 'encoder'"):
        hf_posenc.patch(stock("bert"), "alibi", submodel="encoder")
    with pytest.raises(ValueError, match="submodel='text_model' or submodel='vision_model'"):
        hf_posenc.inspect(model)
    with pytest.raises(ValueError, match="submodel='language_model'"):
        hf_posenc.inspect(parent("llava"))
    both = parent("encoder-decoder")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="submodel='encoder' or submodel='decoder'") as refused:
        hf_posenc.patch(both, "alibi")
    assert refused.value.submodels == ("encoder", "decoder")


@pytest.mark.parametrize("name", ["llava", "vision-encoder-decoder"])
def test_generate_with_images_read_otherwise(name):
    """The text keeps the original positions that `generate` makes."""
    inputs = {key: value for key, value in PARENTS[name].inputs().items() if not key.startswith("decoder")}
    model = with_encoding(name, "sinusoidal+shaw", PARENTS[name].submodels[1])
    options = dict(max_new_tokens=5, min_new_tokens=5, output_logits=True, return_dict_in_generate=True)
    cached, not_cached = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert_close(torch.stack(cached.logits), torch.stack(not_cached.logits))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "posenc." in key:
                value.zero_()
    assert_apart(torch.stack(model.generate(**inputs, **options).logits), torch.stack(cached.logits))


def test_one_encoding_for_a_parent():
    model = with_encoding("encoder-decoder", "alibi", "encoder")
    with pytest.raises(ValueError, match="alibi"):
        hf_posenc.patch(model, "rope", submodel="encoder")


def test_children_that_were_patched_by_themselves(tmp_path):
    """Patched submodels reload within an original parent, which builds them by AutoModel. Patching the parent then raises an
    error.
    """
    encoder = patched("bert", "alibi")
    decoder = stock("gpt2", "LMHeadModel", add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    inputs = PARENTS["encoder-decoder"].inputs()
    model.save_pretrained(tmp_path)
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert_equal(run(loaded, inputs), run(model, inputs))
    for submodel in ("encoder", "decoder"):
        with pytest.raises(ValueError, match=r"EncoderDecoderModel.*alibi"):
            hf_posenc.patch(model, "rope", submodel=submodel)
    with pytest.raises(ValueError, match="EncoderDecoderModel"):
        hf_posenc.unpatch(model)
    model.encoder = hf_posenc.unpatch(model.encoder)
    new = randomize_encoding(hf_posenc.patch(model, "rope", submodel="decoder"))
    new.save_pretrained(tmp_path / "decoder")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "decoder")
    assert type(again.encoder) is transformers.BertModel
    assert_equal(run(again, inputs), run(new, inputs))


def test_a_child_taken_out_of_its_parent(tmp_path):
    model = with_encoding("llava", "shaw")
    child = model.base_model.language_model
    child.save_pretrained(tmp_path)
    assert_equal(run(AutoModel.from_pretrained(tmp_path), padded()), run(child, padded()))
    again = hf_posenc.unpatch(child)
    assert type(again) is transformers.LlamaModel
    assert_equal(run(again, padded()), run(parent("llava").base_model.language_model, padded()))
    with pytest.raises(ValueError, match="shaw"):
        hf_posenc.patch(child, "alibi")


def test_the_parents_folder_for_a_childs_class(tmp_path):
    with_encoding("clip", "alibi").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'posenc-clip', which PosEncCLIPTextModel .*AutoModel"):
        hf_posenc.PosEncCLIPTextModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="composite model"):
        hf_posenc.PosEncCLIPTextModel.from_pretrained(tmp_path, position_encoding="alibi")


def test_attention_implementations(monkeypatch):
    """Parents set the implementations of their submodels."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "test_kernel", sdpa_mask)
    model, inputs = with_encoding("clip", "alibi"), PARENTS["clip"].inputs()
    expected = run(model, inputs)
    for given in ("eager", {"text_config": "sdpa"}, {"text_config": "eager", "vision_config": "sdpa"}, "sdpa"):
        model.set_attn_implementation(given)
        wanted = given["text_config"] if isinstance(given, dict) else given
        assert model.text_model.config._attn_implementation == wanted
        assert_close(run(model, inputs), expected)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    with pytest.raises(ValueError, match="score bias"):
        model.set_attn_implementation({"text_config": "test_kernel", "vision_config": "eager"})
    assert [each.config._attn_implementation for each in (model.text_model, model.vision_model)] == ["eager", "sdpa"]


def test_attentions_and_hidden_states():
    """Shapes match in a new process where no class has built a derived model before."""
    code = (
        "import torch; from test_composites import PARENTS, parent, with_encoding\n"
        "inputs, given = PARENTS['clip'].inputs(), dict(output_attentions=True, output_hidden_states=True)\n"
        "for model in parent('clip'), with_encoding('clip', 'alibi'):\n"
        "    model.set_attn_implementation('eager')\n"
        "    output = model(**inputs, **given)\n"
        "    output = output.get('text_model_output', output)\n"
        "    print(*(tuple(each.shape) for each in (*output.attentions, *output.hidden_states)), sep=';')\n"
    )
    stock_shapes, shapes = run_python(code).splitlines()
    assert shapes == stock_shapes and shapes.count("(2, 4, 1") == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_checkpointing_and_lora(tmp_path):
    model, inputs = with_encoding("llava", "sinusoidal+shaw"), PARENTS["llava"].inputs()
    model.save_pretrained(tmp_path / "base")

    def loss(model):
        return model(**inputs, labels=inputs["input_ids"]).loss

    expected = gradients(model.train(), loss)
    assert any("posenc" in name for name in expected)
    models.checkpointing(model, use_reentrant=False)
    assert_close(gradients(model, loss), expected)
    models.checkpointing(model.eval(), enable=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = run(adapted, inputs)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    assert_apart(run(base, inputs), expected)
    assert_equal(run(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), inputs), expected)


def test_tied_weights_and_embeddings():
    model = hf_posenc.patch(parent("paligemma"), "alibi", submodel="language_model")
    assert model.lm_head.weight is model.base_model.language_model.embed_tokens.weight
    model.resize_token_embeddings(VOCABULARY + 3)
    assert model.lm_head.weight is model.base_model.language_model.embed_tokens.weight
    assert len(model.lm_head.weight) == VOCABULARY + 3 == model.config.text_config.vocab_size
    stock_model = parent("paligemma")
    assert model._no_split_modules == stock_model._no_split_modules


def test_extend(tmp_path):
    model, inputs = with_encoding("clip", "alibi", max_length=12), PARENTS["clip"].inputs()
    long = {"input_ids": tokens(length=20), "pixel_values": image()}
    with pytest.raises(ValueError, match=r"longer than max_length=12.*hf_posenc.extend"):
        run(model, long)
    longer = hf_posenc.extend(model, 40)
    assert_equal(run(longer, inputs), run(model, inputs))
    assert hf_posenc.inspect(longer).max_length == 40 and longer.config.position_spec.submodel == "text_model"
    longer.save_pretrained(tmp_path)
    assert_equal(run(AutoModel.from_pretrained(tmp_path), long), run(longer, long))
    assert_equal(run(hf_posenc.unpatch(longer), inputs), run(parent("clip"), inputs))


def test_convert(tmp_path):
    model, inputs = parent("clip"), PARENTS["clip"].inputs()
    batches = [{"input_ids": tokens(batch=30, length=24, seed=seed)} for seed in range(3)]
    new = hf_posenc.convert(model, "relative", submodel="text_model", max_distance=4, texts=batches)
    report = hf_posenc.inspect(new).calibration
    assert report is not None and sum(report.kl_after) < sum(report.kl_before) and report.agreement > report.agreement_before
    new.save_pretrained(tmp_path)
    assert_equal(run(AutoModel.from_pretrained(tmp_path), inputs), run(new, inputs))
    assert_equal(run(hf_posenc.unpatch(new), inputs), run(model, inputs))
    with pytest.raises(ValueError, match="doesn't fit CLIPModel, which is calibrated on inputs"):
        hf_posenc.convert(model, "relative", submodel="vision_model", texts=batches)


def test_inspect(tmp_path):
    model = with_encoding("clip", "sinusoidal+alibi", max_length=40)
    model.save_pretrained(tmp_path)
    report = hf_posenc.inspect(model)
    assert hf_posenc.inspect(tmp_path) == report == hf_posenc.inspect(model.config)
    assert report.model_class == "PosEncCLIPModel" and report.encoding == "sinusoidal+alibi" and report.max_length == 40
    assert report.locations["embed"] == ("text_model.embeddings.position_embedding",) and report.can_unpatch
    assert all(path.startswith("text_model.") for paths in report.locations.values() for path in paths)


def test_the_commands(tmp_path):
    parent("clip").save_pretrained(tmp_path / "stock")

    def command(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)

    refused = command("patch", tmp_path / "stock", "alibi", "--output-dir", tmp_path / "new")
    assert refused.exit_code == 1 and "submodel='text_model'" in refused.output
    chosen = ("--submodel", "text_model", "--max-length", 12)
    done = command("patch", tmp_path / "stock", "alibi", *chosen, "--output-dir", tmp_path / "new")
    assert done.exit_code == 0 and "PosEncCLIPModel\n" in done.output and "distil" not in done.output
    assert command("extend", tmp_path / "new", "--max-length", 30, "--output-dir", tmp_path / "long").exit_code == 0
    assert AutoModel.from_pretrained(tmp_path / "long").text_model.config.position_spec.max_length == 30
    assert command("unpatch", tmp_path / "long", "--output-dir", tmp_path / "again").exit_code == 0
    inputs = PARENTS["clip"].inputs()
    assert_equal(run(AutoModel.from_pretrained(tmp_path / "again"), inputs), run(parent("clip"), inputs))
    card = command("model-card", tmp_path / "new")
    assert card.exit_code == 0 and "`distance_bias` in `text_model." in card.output


@pytest.mark.parametrize("name", ["encoder-decoder", "llava"])
def test_several_children_that_were_patched_by_themselves(name, tmp_path):
    """A parent that builds its submodels by AutoModel reloads with a different encoding in each of them."""
    model, inputs = parent(name), PARENTS[name].inputs()
    fields = {"encoder": "encoder", "decoder": "decoder", "language_model": "text_config", "vision_tower": "vision_config"}
    for submodel, encoding in zip(PARENTS[name].submodels, ("alibi", "shaw"), strict=True):
        child = randomize_encoding(hf_posenc.patch(getattr(model.base_model, submodel), encoding))
        setattr(model.base_model, submodel, child)
        setattr(model.config, fields[submodel], child.config)
    assert_apart(run(model, inputs), run(parent(name), inputs))
    model.save_pretrained(tmp_path)
    assert_equal(run(PARENTS[name].auto.from_pretrained(tmp_path), inputs), run(model, inputs))


BACKBONE = dict(embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
DETECTING = dict(use_timm_backbone=False, backbone_kwargs=None, num_queries=5, encoder_layers=2, decoder_layers=1)
DETECTING |= dict(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4)


def detector(prefix):
    if prefix == "RTDetr":
        backbone = config("RTDetrResNet", **BACKBONE, layer_type="basic", out_features=["stage2", "stage3", "stage4"])
        more = dict(encoder_hidden_dim=32, encoder_in_channels=[8, 8, 16], decoder_in_channels=[32] * 3, num_denoising=0)
    else:
        backbone, more = config("ResNet", **BACKBONE, out_features=["stage4"]), dict(hidden_size=32)
    more = {key: value for key, value in {**DETECTING, **more}.items() if prefix != "RTDetr" or "timm" not in key}
    torch.manual_seed(0)
    return with_random_values(getattr(transformers, f"{prefix}Model")(config(prefix, backbone_config=backbone, **more)))


@pytest.mark.parametrize("prefix", ["Detr", "ConditionalDetr", "DabDetr", "TableTransformer"])
def test_encoder_of_a_detection_model(prefix, tmp_path):
    """The encoder has the config of the whole model, and receives its positions as an argument of each layer."""
    model = detector(prefix)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="submodel='encoder'") as refused:
        hf_posenc.patch(model, "alibi")
    assert refused.value.submodels == ("encoder",)
    none, alibi = (hf_posenc.patch(model, name, submodel="encoder") for name in ("none", "alibi"))
    generator = torch.Generator().manual_seed(0)
    patches, vectors = (torch.randn(2, 9, 32, generator=generator) for _ in range(2))
    mask = torch.ones(2, 9, dtype=torch.long)
    order = torch.randperm(9, generator=generator)
    assert_close(run(none.encoder, (patches, mask, vectors)), run(model.encoder, (patches, mask, torch.zeros_like(vectors))))
    assert_close(run(none.encoder, (patches[:, order], mask, vectors)), run(none.encoder, (patches, mask, vectors))[:, order])
    assert_apart(run(alibi.encoder, (patches[:, order], mask, vectors)), run(alibi.encoder, (patches, mask, vectors))[:, order])
    if prefix != "TableTransformer":  # its attention takes no mask by head
        bias = -(0.25 ** torch.arange(1, 5))[:, None, None] * (torch.arange(9) - torch.arange(9)[:, None]).abs()
        biased = run(model.encoder, (patches, bias.expand(2, -1, -1, -1), torch.zeros_like(vectors)))
        assert_close(run(alibi.encoder, (patches, mask, vectors)), biased)
    mask[:, 6:] = 0
    shorter = (patches[:, :6], mask[:, :6], vectors[:, :6])
    assert_close(run(alibi.encoder, (patches, mask, vectors))[:, :6], run(alibi.encoder, shorter))
    inputs = {"pixel_values": torch.randn(1, 3, 96, 96, generator=generator)}
    assert_apart(run(alibi, inputs), run(none, inputs))
    alibi.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again).__name__ == f"PosEnc{prefix}Model" and again.config.position_spec.submodel == "encoder"
    assert_equal(run(again, inputs), run(alibi, inputs))
    assert_equal(run(hf_posenc.unpatch(again), inputs), run(model, inputs))


@pytest.mark.parametrize("encoding", ["alibi", "rope", "sinusoidal"])
def test_a_padded_image_has_the_positions_of_the_image_alone(encoding):
    """In a batch, each row of a smaller image ends with padding, which has no position."""
    encoder = hf_posenc.patch(detector("Detr"), encoding, submodel="encoder").encoder
    patches = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, 4, dtype=torch.long)
    mask[0, :, 3] = mask[0, 2] = 0
    mask = mask.flatten(1)
    shown = mask[0].bool()
    alone = run(encoder, (patches[:1, shown], mask[:1, shown], torch.zeros(1, 6, 32)))
    assert_close(run(encoder, (patches, mask, torch.zeros_like(patches)))[:1, shown], alone)


def test_encoder_with_convolutions_after_its_attention(tmp_path):
    """RT-DETR's encoder reads a list of feature maps, computes its positions itself, and combines the maps by convolutions."""
    model, inputs = detector("RTDetr"), {"pixel_values": torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))}
    alibi, none = (hf_posenc.patch(model, name, submodel="encoder") for name in ("alibi", "none"))
    assert any(
        path.startswith("encoder.fpn_blocks") for paths in hf_posenc.inspect(none).order_sensitive.values() for path in paths
    )
    alibi.save_pretrained(tmp_path)
    assert_equal(run(AutoModel.from_pretrained(tmp_path), inputs), run(alibi, inputs))
    expected = run(model, inputs)
    assert_equal(run(hf_posenc.unpatch(alibi), inputs), expected)
    assert_apart(run(none, inputs), expected)
    model.encoder.aifi[0].position_embedding.register_forward_hook(lambda module, args, vectors: torch.zeros_like(vectors))
    assert_close(run(none, inputs), run(model, inputs))


def test_submodel_without_attention(tmp_path):
    """Chameleon's image tokenizer consists of convolutions, so Chameleon is patched as a whole."""
    tokenizer = dict(
        embed_dim=8, num_embeddings=8, base_channels=32, channel_multiplier=[1], num_res_blocks=1, latent_channels=8
    )
    given = dict(READING, vocabulary_map={"<image>": IMAGE}, vq_config=dict(tokenizer, resolution=16))
    model = with_random_values(transformers.ChameleonModel(config("Chameleon", **given)))
    new = hf_posenc.patch(model, "alibi")
    new.save_pretrained(tmp_path)
    assert_apart(run(new, padded()), run(model, padded()))
    assert_equal(run(AutoModel.from_pretrained(tmp_path), padded()), run(new, padded()))
    assert_equal(run(hf_posenc.unpatch(new), padded()), run(model, padded()))


def test_base_model_with_another_config(tmp_path):
    """The base model of a depth estimator is its backbone, which is the submodel of that name."""
    backbone = config("Tipsv2Vision", **SEEING, out_indices=[1, 2], apply_layernorm=True, reshape_hidden_states=False)
    sizes = dict(neck_hidden_sizes=[8, 16], reassemble_factors=[1, 0.5], fusion_hidden_size=8, num_depth_bins=4)
    torch.manual_seed(0)
    model = with_random_values(transformers.Tipsv2DptForDepthEstimation(config("Tipsv2Dpt", backbone_config=backbone, **sizes)))
    inputs = {"pixel_values": image()}
    with pytest.raises(hf_posenc.UnsupportedModelError, match="submodel='backbone'"):
        hf_posenc.patch(model, "alibi")
    new = hf_posenc.patch(model, "alibi", submodel="backbone")
    new.save_pretrained(tmp_path)
    assert_equal(run(transformers.AutoModelForDepthEstimation.from_pretrained(tmp_path), inputs), run(new, inputs))
    assert_apart(run(new, inputs), run(model, inputs))


def test_reason_of_a_model_without_supported_submodels():
    model = transformers.UVDocModel(config("UVDoc"))
    for made, words in (
        (model, "neither positional components nor attention"),
        (detector("DeformableDetr"), "position_embedding"),
    ):
        with pytest.raises(hf_posenc.UnsupportedModelError, match=words) as refused:
            hf_posenc.patch(made, "alibi")
        assert refused.value.submodels == () and refused.value.reason != "composite model"


def test_submodels_of_speech_models():
    """Bark's own attention, and a decoder that keeps the position embeddings of the frames of its encoder."""
    sizes = dict(hidden_size=32, num_layers=2, num_heads=4, block_size=24, input_vocab_size=VOCABULARY, output_vocab_size=7)
    model = with_random_values(transformers.BarkSemanticModel(config("BarkSemantic", **sizes)))
    alibi, ids = hf_posenc.patch(model, "alibi"), tokens(length=9)
    with torch.no_grad():
        model.position_embeds_layer.weight.zero_()
    bias = -(0.25 ** torch.arange(1, 5))[:, None, None] * (torch.arange(9) - torch.arange(9)[:, None]).abs()
    assert_close(run(alibi, {"input_ids": ids}), run(model, {"input_ids": ids, "attention_mask": bias.expand(2, -1, -1, -1)}))
    sizes = dict(READING, head_dim=8, encoder_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    model = transformers.MoonshineStreamingModel(config("MoonshineStreaming", **sizes))
    new = hf_posenc.patch(model, "alibi", submodel="decoder")
    assert new.decoder.pos_emb.weight is model.decoder.pos_emb.weight
    assert all(path.startswith("decoder.") for paths in hf_posenc.inspect(new).locations.values() for path in paths)
    with pytest.raises(ValueError, match="no submodel 'encoder'|no known positional component"):
        hf_posenc.patch(model, "alibi", submodel="encoder")


def test_rotation_that_ignores_its_layer_type():
    made = modeling_evolla.SaProtConfig(**{**SIZES, "vocab_size": VOCABULARY})
    model = with_random_values(modeling_evolla.EvollaSaProtProteinEncoder(made))
    none, ids, order = hf_posenc.patch(model, "none"), tokens(length=9), torch.randperm(9)
    assert_close(run(none, {"input_ids": ids[:, order]}), run(none, {"input_ids": ids})[:, order])
    assert_apart(run(none, {"input_ids": ids}), run(model, {"input_ids": ids}))


def test_parent_that_builds_another_model_from_its_own_config(tmp_path):
    """ShieldGemma 2 builds a Gemma 3 with a head from its whole config, by an Auto class."""
    given = gemma3().to_dict()
    made = config("ShieldGemma2", **{key: given[key] for key in ("text_config", "vision_config", "mm_tokens_per_image")})
    made.yes_token_index, made.no_token_index = 5, 6
    model, inputs = with_random_values(transformers.ShieldGemma2ForImageClassification(made)), {"input_ids": tokens(length=9)}
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    new = hf_posenc.patch(model, "alibi", submodel="model.language_model")
    new.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again).__name__ == "PosEncShieldGemma2ForImageClassification"
    assert_equal(run(again, inputs), run(new, inputs))
    assert_apart(run(new, inputs), run(model, inputs))
    assert_equal(run(hf_posenc.unpatch(again), inputs), run(model, inputs))


def test_inspect_a_part_with_the_config_of_the_whole_model():
    """The encoder of DETR has the whole model's config, in which it is the submodel."""
    model = hf_posenc.patch(detector("Detr"), "alibi", submodel="encoder")
    whole, part = hf_posenc.inspect(model), hf_posenc.inspect(model.encoder)
    assert part.encoding == whole.encoding == "alibi" and part.locations.keys() == whole.locations.keys()
