"""Writes tests/v4: tiny checkpoints with relative positions, saved by Transformers 4.57, and their outputs in that version.

    python tests/v4_checkpoints.py --output_dir tests/v4

The script runs itself in a second environment with that version of Transformers, which it creates if it is missing. For each
model family, it writes one checkpoint, whose weights serve relative_key and relative_key_query, and `expected.safetensors`.
This file has the inputs. For each kind, it also has the outputs and the gradients of all parameters. The gradients are
concatenated in the order that its metadata gives.

Shapes: B batch, L tokens, D hidden_size, V vocabulary, E head_dim.
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
PACKAGES = ("transformers==4.57.*", "huggingface_hub<1", "tokenizers>=0.22,<0.23")
KINDS = ("relative_key", "relative_key_query")
LENGTH, WIDTH, VOCABULARY = 10, 8, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGER = {"max_position_embeddings": LENGTH + 1}
"""The changes for families that count positions from pad_token_id + 1."""
DECODER = {"is_decoder": True, "add_cross_attention": True}
SMALL = {"pronunciation_vocab_size": 2, "shape_vocab_size": 2, "pronunciation_embed_dim": 2, "shape_embed_dim": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", {"embedding_size": WIDTH}),
    "bert": ("BertForMaskedLM", {}),
    "bert-decoder": ("BertLMHeadModel", DECODER),
    "bert-generation": ("BertGenerationDecoder", {"is_decoder": True}),
    "bros": ("BrosModel", {"hidden_size": 64, "num_hidden_layers": 1}),  # smaller sizes have no sinusoids of boxes
    "camembert": ("CamembertForMaskedLM", LONGER),
    "data2vec-text": ("Data2VecTextForMaskedLM", LONGER),
    "dpr": ("DPRQuestionEncoder", {}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": WIDTH}),
    "ernie": ("ErnieForMaskedLM", {}),
    "esm": ("EsmForMaskedLM", {**LONGER, "mask_token_id": 3, "token_dropout": False}),
    "megatron-bert": ("MegatronBertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", LONGER),
    "roberta-prelayernorm": ("RobertaPreLayerNormForMaskedLM", LONGER),
    "roc_bert": ("RoCBertForMaskedLM", {"enable_pronunciation": False, "enable_shape": False, **SMALL}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", LONGER),
    "xlm-roberta-xl": ("XLMRobertaXLForMaskedLM", LONGER),
    "xmod": ("XmodForMaskedLM", {**LONGER, "languages": ["en_XX"], "default_language": "en_XX"}),
}
"""Directory -> the class of its model, and the config values that are added to SIZES."""


def environment(folder: Path) -> Path:
    """The interpreter of the second environment, which is created if it doesn't exist."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)
        (site,) = folder.glob("[Ll]ib/**/site-packages")
        (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done.write_text(" ".join(PACKAGES))
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=ROOT / "tests" / "v4", help="replaced, folder by folder")
    parser.add_argument(
        "--v4_env", type=Path, default=ROOT / "build" / "v4", help="environment with Transformers 4.57, made if missing"
    )
    given = parser.parse_args()
    if not transformers.__version__.startswith("4."):
        sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

        command = [environment(given.v4_env.resolve()), __file__, "--output_dir", given.output_dir]
        subprocess.run([str(part) for part in command], check=True)
        compare(given.output_dir)
        return
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"Transformers {transformers.__version__}, torch {torch.__version__}")
    print("how much relative positions change the output, the gradients; of a decoder its cached steps, its cached prefill:")
    for name, (cls, changes) in FAMILIES.items():
        write(given.output_dir / name, cls, changes)
    size = sum(file.stat().st_size for file in given.output_dir.rglob("*") if file.is_file())
    print(f"{len(FAMILIES)} checkpoints, {size / 1000:.0f} kB")


def compare(output_dir: Path) -> None:
    """Print the differences from v4's outputs if Transformers 5 loads the checkpoints, and if hf_posenc loads them."""
    import hf_posenc  # needs Transformers 5

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(
        f"Transformers {transformers.__version__}: greatest difference of outputs, by from_pretrained and by hf_posenc.from_v4:"
    )
    for name, (cls, _) in FAMILIES.items():
        host = getattr(transformers, cls)
        tensors = load_file(output_dir / name / "expected.safetensors")
        inputs = {key.removeprefix("inputs."): value for key, value in tensors.items() if key.startswith("inputs.")}
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as copy:
                folder = shutil.copytree(output_dir / name, copy, dirs_exist_ok=True)
                config = json.loads((Path(folder) / "config.json").read_text())
                (Path(folder) / "config.json").write_text(json.dumps({**config, "position_embedding_type": kind}))
                found = [f"{differing(host.from_pretrained(folder), inputs, tensors[f'{kind}.output']):.1e}"]
                try:
                    found.append(f"{differing(hf_posenc.from_v4(folder, host), inputs, tensors[f'{kind}.output']):.1e}")
                except hf_posenc.UnsupportedModelError:
                    found.append("refused")
            print(f"  {name:22}{kind:20}{', '.join(found)}")


@torch.no_grad()
def differing(model: Any, inputs: dict[str, Tensor], expected: Tensor) -> float:
    return float((run(model.eval(), inputs) - expected).abs().max())


def write(folder: Path, cls: str, changes: dict[str, Any]) -> None:
    """Write a checkpoint with its outputs and gradients, and print a line for each kind."""
    shutil.rmtree(folder, ignore_errors=True)
    state, expected, names = None, {}, ""
    for kind in KINDS:
        model = build(cls, changes, kind)
        if state is None:
            state = model.state_dict()
            model.save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
        else:
            model.load_state_dict(state)
        inputs = reading(model)
        output = run(model, inputs)
        (output * cotangent(output)).sum().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        names = json.dumps([*gradients])
        expected.update({f"inputs.{name}": value for name, value in inputs.items()})
        expected[f"{kind}.output"] = output.detach().contiguous()
        expected[f"{kind}.gradients"] = torch.cat([gradient.flatten() for gradient in gradients.values()])
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        figures = [f"{without_tables(model, inputs, output.detach()):.2g}", f"{largest:.2g}"]
        if model.config.is_decoder and model.config.add_cross_attention:
            expected[f"{kind}.steps"], prefill = cached(model, inputs)
            figures += [
                f"{float((found - output[:1].detach()).abs().max()):.2g}" for found in (expected[f"{kind}.steps"], prefill)
            ]
        print(f"  {folder.name:22}{kind:20}{', '.join(figures)}")
    save_file(expected, folder / "expected.safetensors", metadata={"gradients": names})


def build(cls: str, changes: dict[str, Any], kind: str) -> Any:
    """A model in which the value of every parameter affects the output."""
    host: Any = getattr(transformers, cls)
    config = host.config_class(**{**SIZES, **changes}, position_embedding_type=kind)
    config._attn_implementation = "eager"  # the others ignore relative positions or fall back to eager
    model = host(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            norm = name.lower().endswith("norm.weight")
            scale = 0.2 if norm else 1.0 if "distance_embedding" in name else 4 * parameter.shape[-1] ** -0.5 / 3
            parameter.copy_(norm + scale * torch.randn(parameter.shape, generator=generator))
    return model


def reading(model: Any) -> dict[str, Tensor]:
    """Three examples of L tokens: one of maximum length, one padded on the right, and one padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    if model.config.model_type not in (
        "bert-generation",
        "dpr",
    ):  # absolute positions count padding, or the first token is the output
        mask[2, :4] = 0
    ids = ids * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type == "bros":
        inputs["bbox"] = torch.rand(3, LENGTH, 4, generator=generator).sort(dim=-1).values
    if getattr(model.config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.randn(3, 4, WIDTH, generator=generator)
    return inputs


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The first output, with zeros at padding: `[B, L, V]`, `[B, L, D]`, or a pooled `[B, D]`."""
    more = {"use_cache": False} if getattr(model.config, "is_decoder", False) else {}
    output = model(**inputs, **more)[0]
    return output * inputs["attention_mask"][..., None] if output.ndim == 3 else output


def cotangent(output: Tensor) -> Tensor:
    """The weights of an output in the sum whose gradients are computed."""
    return torch.arange(output.numel()).mul(0.7).cos().view_as(output)


@torch.no_grad()
def cached(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The outputs of the first example with a cache, token by token, and in a single forward pass with an empty cache.

    The latter is wrong in 4.57, which treats every query of a forward pass with a cache as the last one.
    """
    row = {name: value[:1] for name, value in inputs.items() if name != "attention_mask"}
    ids, past, steps = row.pop("input_ids"), None, []
    for step in range(LENGTH):
        output = model(ids[:, step : step + 1], **row, past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, dim=1), model(ids, **row, use_cache=True).logits


@torch.no_grad()
def without_tables(model: Any, inputs: dict[str, Tensor], output: Tensor) -> float:
    """The change of the output if the distance embeddings are zero. Transformers 5 ignores these embeddings."""
    tables = [each for name, each in model.named_parameters() if "distance_embedding" in name]
    kept = [table.clone() for table in tables]
    for table in tables:
        table.zero_()
    difference = float((run(model, inputs) - output).abs().max())
    for table, values in zip(tables, kept, strict=True):
        table.copy_(values)
    return difference


if __name__ == "__main__":
    main()
