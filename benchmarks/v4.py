"""Compares with relative_key and relative_key_query of Transformers 4.57, which Transformers 5 removed.

They are timed in a second environment, which is created once. It has Transformers 4.57, and uses torch and other packages of
this environment. Their ratios are relative to the original model in 4.57, and ours to that in the current version.

Shapes: B batch, H heads, Q queries, K keys, L tokens, E head_dim.
"""

import json
import subprocess
import sys
import sysconfig
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from benchmarks import whole
from benchmarks.comparing import STOCK, Record, compared, figures, peak
from benchmarks.grid import Group, Settings
from benchmarks.subjects import patched, stock
from benchmarks.timing import Run, Timed

PACKAGES = ("transformers==4.57.*", "huggingface_hub<1", "tokenizers>=0.22,<0.23")
"""Installed without dependencies, which this environment has."""
NAMES = ("relative_key", "relative_key_query")
OLD = "4.57: "
LIMIT = 1800


class RelativeKey(nn.Module):
    """The scores of relative_key in 4.57, which gathers the vector of the distance for each of Q x K pairs."""

    def __init__(self, length: int, head_dim: int) -> None:
        super().__init__()
        self.distance_embedding = nn.Embedding(2 * length - 1, head_dim)

    @classmethod
    def of(cls, model: PreTrainedModel, length: int) -> PreTrainedModel:
        """Modify a BERT in place so that its attention computes scores as in 4.57."""
        name = "relative_key_of_v4"
        AttentionInterface.register(name, _attend)
        for layer in model.encoder.layer:
            attention = layer.attention.self
            embedding = cls(length, attention.attention_head_size)
            attention.relative_key = embedding.to(model.device, model.dtype)
        model.config._attn_implementation = name
        return model

    def forward(self, query: Tensor) -> Tensor:
        """`[B, H, L, E] -> [B, H, L, L]`"""
        index = torch.arange(query.shape[2], device=query.device)
        distance = index[:, None] - index + (self.distance_embedding.num_embeddings - 1) // 2
        return torch.einsum("bhld,lrd->bhlr", query, self.distance_embedding(distance).to(query.dtype))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    scores = (query @ key.mT + module.relative_key(query)) / query.shape[-1] ** 0.5
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


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


def compare(group: Group, settings: Settings) -> dict[str, Record]:
    """Measure the models of 4.57 and ours, each relative to the original model of the same version, in separate processes."""
    python = environment(Path(settings.environment).resolve())
    given = json.dumps({**asdict(group), "trained": group.kind == "v4-train", "settings": asdict(settings)})
    command = [str(python), "-m", "benchmarks.v4_worker", given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed: {done.stderr[-500:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    timed = Timed(said["seconds"], said["failures"])
    records = {OLD + name: figures(timed, name, (STOCK,)) for name in (STOCK, *NAMES)}
    for name, megabytes in said["peak_mb"].items():
        records[OLD + name]["peak_mb"] = megabytes
    host, step = stock(group, settings), whole.train if group.kind == "v4-train" else whole.forward

    def build(name: str) -> Run:
        return step(host if name == STOCK else patched(host, name, group, settings), group, settings)

    ours, timed = compared((STOCK, *NAMES), build, group, settings, (STOCK,))
    for name, run in timed.runs.items():
        ours[name]["peak_mb"] = peak(run, settings)
    return {**records, **ours}
