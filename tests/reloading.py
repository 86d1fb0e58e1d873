"""Patched models that one process saves, and another process loads and compares."""

from pathlib import Path

import torch
from transformers import AutoModel

import hf_posenc
from conftest import run_python


@torch.no_grad()
def keep(folder, model, original, ids, short=None):
    """Save a model, with its outputs and those of the original model.

    short: the inputs of the original model, if `ids` are too long for it.
    """
    model.save_pretrained(folder)
    short = ids if short is None else short
    length = original.config.max_position_embeddings
    torch.save((ids, model(ids)[0], short, original(short)[0], str(hf_posenc.inspect(model)), length), Path(folder) / "kept.pt")


def reload(root):
    """Load all models that `keep` saved in subdirectories of `root`, in a separate process."""
    assert run_python("import sys, reloading; reloading.compare(sys.argv[1])", root) == "right\n" * len([*Path(root).iterdir()])


@torch.no_grad()
def compare(root):
    for folder in Path(root).iterdir():
        ids, ours, short, theirs, report, length = torch.load(folder / "kept.pt")
        model = AutoModel.from_pretrained(folder)
        assert torch.equal(model(ids)[0], ours) and str(hf_posenc.inspect(model)) == report, folder
        assert str(hf_posenc.inspect(folder)) == report, folder
        back = hf_posenc.unpatch(model)
        assert torch.equal(back(short)[0], theirs) and back.config.max_position_embeddings == length, folder
        print("right")
