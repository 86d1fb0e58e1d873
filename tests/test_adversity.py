"""Models in unusual conditions: other processes, code of two versions in one process, and other forms of v4 checkpoints. Also
models with memories, windows, and timestamps.

Properties of every model and encoding are tested in `checks/adversarial.py`.
"""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_posenc
from closeness import assert_close, assert_equal
from conftest import ROOT, run_python
from models import ALL_WAYS, patched, randomize_encoding, tiny, tokens
from v4_checkpoints import FAMILIES, KINDS

# Other processes.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for host, encoding in (("bert", ALL_WAYS), ("gpt2", "learned+shaw")):
        patched(host, encoding).save_pretrained(folder / f"{host}-{encoding}")
    return folder


@pytest.mark.parametrize("method", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spawn", "forkserver"))])
def test_models_are_sent_to_other_processes(folders, method):
    code = "import sys, adversity_worker; adversity_worker.sent(*sys.argv[1:])"
    assert run_python(code, folders, method).endswith("equal\n")


def test_code_of_two_versions_in_one_process(tmp_path):
    """Each model runs its own code: also within the forward pass of the other model, as a copy, and after another save."""
    given = {"input_ids": tokens(), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    for version, encoding in (("old", "sinusoidal+relative"), ("new", ALL_WAYS)):
        model = patched("bert", encoding, "ForMaskedLM")
        model.save_pretrained(tmp_path / version)
        with torch.no_grad():
            save_file({**given, "output": model(**given)[0].contiguous()}, tmp_path / version / "expected.safetensors")
    for path in (tmp_path / "old").glob("*.py"):
        path.write_text(path.read_text() + "\n# Another version.\n")
    code = "import sys, adversity_worker; adversity_worker.generations(*sys.argv[1:])"
    environment = {"PYTHONPATH": str(ROOT / "tests"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    assert run_python(code, tmp_path / "old", tmp_path / "new", fresh=True, **environment).endswith("equal\n")


# Checkpoints of Transformers v4. tests/v4 has the recorded outputs.

V4 = ROOT / "tests" / "v4"
CASES = [(family, kind) for family in FAMILIES for kind in KINDS if (family, kind) != ("esm", "relative_key_query")]


def old(place, family, kind, **changes):
    """A copy of a checkpoint, its class, the inputs, and the output in v4."""
    folder = place / f"{family}-{kind}"
    shutil.copytree(V4 / family, folder, ignore=shutil.ignore_patterns("expected*"))
    config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": kind, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(V4 / family / "expected.safetensors")
    inputs = {name.removeprefix("inputs."): each for name, each in tensors.items() if name.startswith("inputs.")}
    return folder, getattr(transformers, FAMILIES[family][0]), inputs, tensors[f"{kind}.output"]


def aged(folder, prefix):
    """Rewrites the weights with the names of older versions, buffers, and two files. Adds a pickle that nothing may open."""
    weights = load_file(folder / "model.safetensors")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {re.sub("|".join(names), lambda found: names[found[0]], name): each for name, each in weights.items()}
    weights[f"{prefix}embeddings.position_ids"] = torch.arange(10)[None]
    parts = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in {*parts.values()}:
        save_file({name: weights[name] for name in parts if parts[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")


@pytest.mark.slow
def test_old_checkpoints_are_saved_in_their_place(tmp_path):
    """Each family loads in the form of older versions, is saved over it, and loads with and without the package."""
    (tmp_path / "models").mkdir()
    for family, kind in CASES:
        folder, cls, inputs, output = old(tmp_path / "models", family, kind)
        prefix = f"{cls.base_model_prefix}." if any(name.startswith(cls.base_model_prefix) for name in FAMILIES) else ""
        aged(folder, prefix)
        hf_posenc.from_v4(folder, cls).save_pretrained(folder)
        heads = {"LMHeadModel": "AutoModelForCausalLM", "Decoder": "AutoModelForCausalLM", "MaskedLM": "AutoModelForMaskedLM"}
        auto = next((each for end, each in heads.items() if cls.__name__.endswith(end)), "AutoModel")
        torch.save((auto, inputs, output), f"{folder}.pt")
    code = "import sys, adversity_worker; adversity_worker.loaded(sys.argv[1], bool(sys.argv[2]))"
    for without in ("", "bare"):
        environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
        assert run_python(code, tmp_path / "models", without, fresh=True, **environment).endswith("equal\n")


# XLNet, which predicts in any order and keeps memories.


@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "shaw"])
@torch.no_grad()
def test_xlnet_reads_in_other_orders(encoding):
    one_way, two_ways = (
        randomize_encoding(hf_posenc.patch(tiny("XLNetModel", attn_type=kind), encoding)) for kind in ("uni", "bi")
    )
    ids = tokens()
    assert_close(two_ways(ids, perm_mask=torch.ones(11, 11).triu(1).expand(2, -1, -1))[0], one_way(ids)[0])
    for model in (one_way, two_ways):
        assert_equal(model(ids, use_mems=True)[0], model(ids, use_mems=False)[0])
        with pytest.raises(ValueError, match=r"11 keys.* of 4 new.*memories"):
            model(ids[:, 7:], use_mems=True, mems=model(ids[:, :7], use_mems=True).mems)


# Images.


@pytest.mark.parametrize("encoding", ["alibi", "rope"])
@torch.no_grad()
def test_windows_of_one_image_say_nothing_of_the_next(encoding):
    def made():
        sizes = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        return randomize_encoding(hf_posenc.patch(tiny("SwinModel", **sizes), encoding))

    model, sizes = made(), ((32, 32), (64, 32), (28, 36))
    for height, width in (*sizes, *sizes[::-1]):
        pixels = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(height))
        assert_equal(model(pixels)[0], made()(pixels)[0])


@pytest.mark.parametrize("encoding", ["alibi", "sinusoidal", "rope"])
@torch.no_grad()
def test_masked_patches_keep_their_positions(encoding):
    """Replacing patches by the mask token in the input gives the same output as masking them."""
    stock = tiny("ViTForMaskedImageModeling", image_size=32, patch_size=8)
    model = randomize_encoding(hf_posenc.patch(stock, encoding)).base_model
    chosen, pixels = torch.arange(16).expand(2, -1) % 3 == 0, torch.randn(2, 3, 32, 32)
    masked, token = model(pixels, bool_masked_pos=chosen)[0], model.embeddings.mask_token
    model.embeddings.patch_embeddings.register_forward_hook(
        lambda module, args, output: torch.where(chosen[:, :, None], token.expand(2, 16, -1), output)
    )
    assert_close(masked, model(pixels)[0])


# Whisper, which predicts timestamps.

FRAMES, TEXT = 40, 20
WHISPER_MODES = {
    "times": {"return_timestamps": True},
    "long": {"return_timestamps": True, "condition_on_prev_tokens": True},
    "words": {"return_token_timestamps": True},
}


def whisper():
    sizes = dict(vocab_size=TEXT + 42, num_mel_bins=8, max_source_positions=FRAMES, max_target_positions=40, pad_token_id=0)
    ids = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None)
    model = tiny("WhisperForConditionalGeneration", **sizes, **ids)
    settings = dict(no_timestamps_token_id=TEXT, is_multilingual=False, max_initial_timestamp_index=20, prev_sot_token_id=4)
    settings |= dict(return_timestamps=False, alignment_heads=[[0, 1], [1, 2]], median_filter_width=3, forced_decoder_ids=None)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", WHISPER_MODES)
@torch.no_grad()
def test_whisper_with_its_own_positions_writes_what_it_wrote(mode):
    """Timestamps, segments, and words are those of the original model."""
    stock = whisper()
    model = hf_posenc.patch(stock, "learned", init="host")
    features = torch.randn(1, 8, 2 * FRAMES * (3 if mode == "long" else 1), generator=torch.Generator().manual_seed(0))
    settings = dict(do_sample=False, max_new_tokens=6, return_dict_in_generate=True, **WHISPER_MODES[mode])
    if mode == "long":
        settings |= {"attention_mask": torch.ones(1, features.shape[-1], dtype=torch.long), "return_segments": True}
    found, expected = (each.generate(features, **settings) for each in (model, stock))
    if mode == "long":
        assert len(found["segments"][0]) == len(expected["segments"][0]) > 1
        for ours, theirs in zip(found["segments"][0], expected["segments"][0], strict=True):
            assert torch.equal(ours["tokens"], theirs["tokens"]) and float(ours["start"]) == float(theirs["start"])
        return
    assert_equal(found["sequences"], expected["sequences"])
    if mode == "words":
        assert_close(found["token_timestamps"], expected["token_timestamps"])
