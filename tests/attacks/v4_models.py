"""Checkpoints of Transformers v4 with relative positions, and the models that say what is right for them.

A stock model's attention computes the scores of relative_key and relative_key_query itself, in float64, by distances `[Q, K]`.

Shapes: B batch, H heads, Q queries, K keys, L tokens, M max_position_embeddings, E head_dim.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)
from transformers.masking_utils import eager_mask

import hf_posenc
from attacks.cases import Refused, new_folder
from hub_server import TOKEN, Hub, serve
from v4_checkpoints import FAMILIES, ROOT

DATA, TABLE, LONG = ROOT / "tests" / "v4", "distance_embedding.weight", 24
REFERENCE = "v4-reference"
UNSERVED = "run it with Transformers 4.57"
"""What the refusal of ESM's relative_key_query ends with."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor]:
    """softmax(scores + mask) @ value, in float64; `v4` of a module is its table `[2M - 1, E]` and the kind."""
    q, k, scaling = query.double(), key.double(), more.get("scaling") or query.shape[-1] ** -0.5
    scores, table = torch.einsum("bhqe,bhke->bhqk", q, k), vars(module).get("v4")
    if table is not None:
        rows = [[i - j for j in range(k.shape[2])] for i in range(q.shape[2])]
        farthest = len(table[0]) // 2
        far = table[0].double()[torch.tensor(rows).clamp(-farthest, farthest) + farthest]
        added = torch.einsum("bhqe,qke->bhqk", q, far)
        if table[1] == "relative_key_query":
            added = added + torch.einsum("bhke,qke->bhqk", k, far)
        scores = scores + (added / scaling if "Albert" in type(module).__name__ else added)
    scores = scores * scaling + (0 if mask is None else mask.double())
    weights = scores.softmax(-1)
    return (weights @ value.double()).transpose(1, 2).to(query.dtype).contiguous(), weights.to(query.dtype)


AttentionInterface.register(REFERENCE, attention)
AttentionMaskInterface.register(REFERENCE, eager_mask)


def whole(module: Any, states: Tensor, bbox_pos_emb: Tensor | None = None, attention_mask: Any = None, **_: Any) -> Any:
    """A self-attention of BROS or MegatronBERT; `bbox_pos_emb` `[Q, K, B, E]` has places of boxes."""
    shape = (*states.shape[:2], module.num_attention_heads, module.attention_head_size)
    query, key, value = (layer(states).view(shape).transpose(1, 2) for layer in (module.query, module.key, module.value))
    if bbox_pos_emb is not None:
        boxes = torch.einsum("bhqe,qkbe->bhqk", query, bbox_pos_emb) * shape[-1] ** -0.5
        attention_mask = boxes if attention_mask is None else boxes + attention_mask
    output, weights = attention(module, query, key, value, attention_mask)
    return output.flatten(2), weights


def reference(cls: Any, folder: Path, weights: dict[str, Tensor]) -> Any:
    """A stock model with weights by v4's names, for inputs of up to 64 tokens."""
    config, kind = AutoConfig.from_pretrained(folder), read(folder)["position_embedding_type"]
    config.max_position_embeddings = 64
    if config.model_type == "esm":
        config.position_embedding_type = "absolute"
    model = cls(config).eval()
    model.set_attn_implementation(REFERENCE)
    own, prefix = model.state_dict(), f"{cls.base_model_prefix}."
    weights = {renamed(name, own, prefix): each for name, each in weights.items()}
    with torch.no_grad():
        for name, each in own.items():
            if name.endswith("position_embeddings.weight"):
                each.zero_()
                if config.model_type == "bert-generation":
                    each[: len(weights[name])] = weights[name]
            elif name in weights and not name.endswith("_ids"):
                each.copy_(weights[name])
    for name, each in weights.items():
        if name.endswith(TABLE):
            module: Any = model.get_submodule(name.removesuffix(f".{TABLE}"))
            module.v4 = (each.detach(), kind)
            if config.model_type in ("bros", "megatron-bert"):  # beside the attention interface
                module.forward = functools.partial(whole, module)
    return model


def renamed(name: str, own: dict[str, Any], prefix: str) -> str:
    bare = name.removeprefix(prefix)
    inside = f"{prefix}{bare}"
    return (
        inside if any(each.startswith(inside.rpartition(".")[0].removesuffix(".distance_embedding")) for each in own) else bare
    )


def as_v4(model: Any) -> dict[str, Tensor]:
    """The weights of a model of ours by v4's names."""
    found, albert = {}, "Albert" in type(model).__name__
    for name, each in model.state_dict().items():
        if name.endswith(("posenc.weight", "posenc.shaw.weight")):
            path = name.partition("posenc.")[0]
            found[path + TABLE] = each.flip(0) / (each.shape[-1] ** 0.5 if albert else 1)
        else:
            found[name.replace("posenc.learned", "embeddings.position_embeddings")] = each
    return found


# Checkpoints and inputs.


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**read(folder), **changes}))
    return folder


def old(family: str, kind: str, **changes: Any) -> Path:
    """A copy of a checkpoint of v4."""
    folder = Path(new_folder()) / "old"
    shutil.copytree(DATA / family, folder, ignore=shutil.ignore_patterns("expected*"))
    return change(folder, position_embedding_type=kind, **changes)


def stock_class(family: str) -> Any:
    return getattr(transformers, FAMILIES[family][0])


def auto(family: str) -> Any:
    name = FAMILIES[family][0]
    causal = name.endswith(("LMHeadModel", "Decoder"))
    return AutoModelForCausalLM if causal else AutoModelForMaskedLM if name.endswith("MaskedLM") else AutoModel


def recorded(family: str, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    tensors = load_file(DATA / family / "expected.safetensors")
    inputs = {name.removeprefix("inputs."): each for name, each in tensors.items() if name.startswith("inputs.")}
    return inputs, tensors[f"{kind}.output"]


def made(family: str, kind: str, **more: Any) -> Any:
    return hf_posenc.from_v4(old(family, kind), stock_class(family), **more)


def like(model: Any, folder: Path, trained: bool = False) -> Any:
    """The reference with the present weights of a model. Unless it was trained, its vectors are those of the checkpoint."""
    vectors = {name: each for name, each in load_file(folder / "model.safetensors").items() if TABLE in name and not trained}
    return reference(type(model).original_class, folder, {**as_v4(model), **vectors})


def longer(inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """The same without padding, repeated up to a length."""
    least = {"attention_mask": 1, "input_ids": 4}
    return {
        name: each if "encoder" in name else torch.cat([each.clamp(min=least.get(name, 0))] * 3, 1)[:, :length]
        for name, each in inputs.items()
    }


# Other processes, and a Hub.


@functools.cache
def hub() -> Hub:
    manager = serve()
    hub.manager = manager  # type: ignore[attr-defined]
    return manager.__enter__()


@functools.cache
def process(*arguments: str) -> Any:
    home = new_folder()
    given = {"HF_ENDPOINT": hub().endpoint, "HF_TOKEN": TOKEN, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
    path = {} if arguments else {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("reader.py")), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=home,
        env={**os.environ, **given, **path, "HF_HUB_DISABLE_XET": "1"},
    )  # fmt: skip


def there(source: Any, inputs: dict[str, Tensor], loads: Any, *arguments: str, **more: Any) -> Tensor:
    """The output of a model that another process loads."""
    folder = Path(new_folder())
    torch.save(inputs, folder / "inputs.pt")
    given = {
        "source": str(source),
        "auto": loads.__name__,
        "inputs": str(folder / "inputs.pt"),
        "result": str(folder / "out.pt"),
    }
    worker = process(*arguments)
    worker.stdin.write(json.dumps({**given, **more, **({"trust_remote_code": True} if arguments else {})}) + "\n")
    worker.stdin.flush()
    reply = json.loads(worker.stdout.readline())
    if UNSERVED in reply.get("error", ""):
        raise Refused(reply["error"].strip().splitlines()[-1])
    if "error" in reply:
        raise RuntimeError(reply["error"].strip().splitlines()[-1] + " | " + reply["error"])
    if not reply["class"].startswith("PosEnc"):
        raise RuntimeError(f"it loaded a {reply['class']}")
    output = torch.load(folder / "out.pt")
    return output * inputs["attention_mask"][..., None] if output.ndim == 3 else output


def saved(model: Any, **more: Any) -> Path:
    folder = Path(new_folder()) / "new"
    model.save_pretrained(folder, **more)
    return folder
