"""Writes tests/saved: one tiny checkpoint of each kind, saved by this version of hf-posenc, and the output of its model.

    python tests/saved_checkpoints.py --output_dir tests/saved

Later versions must load them with bit-identical results (tests/test_saved.py). Therefore, the script never overwrites a
directory, and creates only missing kinds. It changes weights after initialization, so that no value is an initial one.

Each directory holds the checkpoint without its code, and `expected.safetensors`. This file has the inputs, the output, and the
buffers that aren't in the weights. `own/code.zip` has the code of the custom encoding, and the copy of the library that was
saved with it.
"""

import argparse
import inspect
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import hf_posenc
from hf_posenc.evaluation import terminals

transformers.utils.logging.disable_progress_bar()

ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 12}
LENGTH = 10
BERT = {**SIZES, "max_position_embeddings": LENGTH, "pad_token_id": 0}
LLAMA = {**BERT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 4}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 12, "n_positions": LENGTH, "bos_token_id": 1, "eos_token_id": 2}
BART = {
    "d_model": 8,
    **{f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{f"{stack}_ffn_dim": 8 for stack in ("encoder", "decoder")},
    "vocab_size": 12,
    "max_position_embeddings": LENGTH,
    **{f"{name}_token_id": index for index, name in enumerate(("pad", "bos", "eos", "decoder_start"))},
    "forced_eos_token_id": None,
}
CLIP = {
    "text_config": {**BERT, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 8},
    "projection_dim": 8,
}
VIT = {**SIZES, "image_size": 12, "patch_size": 4}
OWN = '''"""An encoding of a user's own, of which the code is saved with the model."""

import torch
from torch import nn

import hf_posenc


class Fading(hf_posenc.PositionEncoding, type="fading"):
    """Each head subtracts a learned rate times the square root of the distance."""

    rate: float = 0.5

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.rates = nn.Parameter(torch.full((geometry.num_attention_heads,), self.rate))

    def distance_bias(self, distance):
        return -self.rates[:, None] * distance.abs().sqrt()
'''


def stock(name: str, **sizes: Any) -> Any:
    """An original model of a class, created with the given sizes."""
    cls = getattr(transformers, name)
    return cls(cls.config_class(**sizes))


def patched(name: str, sizes: dict[str, Any], encoding: Any, **options: Any) -> Any:
    return hf_posenc.patch(stock(name, **sizes), encoding, **options)


def own() -> Any:
    from saved_own_encoding import Fading  # type: ignore[import-not-found]  # written by `main`

    return patched("BertForMaskedLM", BERT, Fading.type, rate=0.25)


KINDS: dict[str, Callable[[], Any]] = {
    "table": partial(patched, "BertForMaskedLM", BERT, "learned", max_length=16),
    "computed": partial(patched, "BertModel", BERT, "sinusoidal", inject="every_layer"),
    "eight-bit": partial(patched, "BertModel", BERT, "learned", max_length=16, storage="int8", init="host"),
    "rotary": partial(patched, "LlamaForCausalLM", LLAMA, "rope", theta=500.0),
    "rotary-in-bert": partial(patched, "RobertaModel", {**BERT, "max_position_embeddings": 12, "pad_token_id": 1}, "rope"),
    "bias": partial(patched, "GPT2LMHeadModel", GPT2, "alibi"),
    "bias-of-each-layer": partial(patched, "BertForSequenceClassification", BERT, "shaw", max_distance=4),
    "content": partial(patched, "BertModel", BERT, "deberta", max_distance=4),
    "composition": partial(patched, "BertModel", BERT, "sinusoidal+alibi", sinusoidal__base=100.0),
    "layers": partial(patched, "LlamaModel", LLAMA, "rope+alibi", rope__layers="0::2", alibi__layers="1::2"),
    "stacks": partial(
        patched, "BartModel", BART, {"type": "t5", "where": {"encoder": {}, "decoder": {"type": "alibi"}, "cross": {}}}
    ),
    "submodel": partial(patched, "CLIPModel", CLIP, "alibi", submodel="text_model"),
    "images": partial(patched, "ViTModel", VIT, "rope_2d"),
    "own": own,
    "v4": lambda: hf_posenc.from_v4(str(ROOT / "tests" / "v4" / "bert"), transformers.AutoModelForMaskedLM),
    "embedding": lambda: hf_posenc.PositionEmbedding("learned", 8, max_length=LENGTH),
    "embedding-computed": lambda: hf_posenc.PositionEmbedding("sinusoidal", 8, frequencies="learned"),
}


def inputs_of(model: Any) -> dict[str, Tensor]:
    """The inputs of a model, padded on the right if the model takes masks."""
    names = inspect.signature(type(model).forward).parameters
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10], [10, 9, 8, 7, 6, 0, 0, 0]])
    mask = (ids != 0).long()
    if "inputs_embeds" in names and "input_ids" not in names:
        return {"inputs_embeds": torch.randn(2, 8, model.config.hidden_size), "attention_mask": mask}
    found = {}
    if "pixel_values" in names:
        found["pixel_values"] = torch.randn(2, 3, *2 * [VIT["image_size"] if "input_ids" not in names else 8])
    if "input_ids" in names:
        found |= {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids.flip(0).clamp(min=1)
    return found


def output_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The first output of a model, or the output of a layer."""
    with torch.no_grad():
        output = model.eval()(**inputs)
    return output if isinstance(output, Tensor) else output.to_tuple()[0]


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def make(kind: str, folder: Path) -> None:
    torch.manual_seed(sum(kind.encode()))
    model = KINDS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    inputs = inputs_of(model)
    model.save_pretrained(folder)
    expected = {**inputs, "output": output_of(model, inputs), **unsaved_buffers(model)}
    save_file({name: tensor.contiguous().clone() for name, tensor in expected.items()}, folder / "expected.safetensors")
    code = sorted(folder.glob("*.py"))
    if kind == "own":
        with zipfile.ZipFile(folder / "code.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
            for path in code:
                file.write(path, path.name)
    for path in code:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    with TemporaryDirectory() as modules:
        (Path(modules) / "saved_own_encoding.py").write_text(OWN)
        sys.path.insert(0, modules)
        for kind in KINDS:
            if not (folder := args.output_dir / kind).exists():
                make(kind, folder)
                print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    terminals.set_up()
    main()
