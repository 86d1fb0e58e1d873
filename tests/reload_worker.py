"""A new process that loads saved models and lists the problems with each."""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

import hf_posenc
from memory import poison_empty


def loaded(auto, path, **more):
    """A model in memory of its own. In a file, tensors begin at other alignments, which changes the last bits of outputs."""
    return copy.deepcopy(auto.from_pretrained(path, **more))


@torch.no_grad()
def problems(path):
    """The names of all checks of the models in a directory, and whether they pass."""
    expected = torch.load(path / "expected.pt")
    WithHead, inputs = getattr(transformers, expected["auto"]), expected["inputs"]
    model = loaded(WithHead, path / "head")
    yield "with head", torch.equal(model(**inputs)[0], expected["head"])
    yield "experts", getattr(model.config, "_experts_implementation", None) == expected["experts"]
    if expected["half"] is not None:
        half = loaded(WithHead, path / "head", dtype=torch.bfloat16)
        yield "half precision", half.dtype == torch.bfloat16 and torch.equal(half(**_half(inputs))[0], expected["half"])
    if expected["bare"] is not None:
        bare = loaded(transformers.AutoModel, path / "bare")
        yield "bare", torch.equal(bare(**inputs)[0], expected["bare"])
        yield (
            "head loaded as bare",
            torch.equal(loaded(transformers.AutoModel, path / "head")(**inputs)[0], expected["bare"]),
        )
    if expected["other"]:
        other = loaded(getattr(transformers, expected["other"]), path / "bare")
        yield "bare with another head", torch.equal(other.base_model(**inputs)[0], expected["bare"])
        yield (
            "the other head",
            type(other).__name__.startswith("PosEnc") and all(p.isfinite().all() for p in other.parameters()),
        )
    for name, parameter in model.named_parameters():
        if "posenc." in name:
            parameter.add_(1.0 + torch.arange(parameter.numel()).reshape(parameter.shape) % 3)
            yield f"outputs depend on {name}", not torch.equal(model(**inputs)[0], expected["head"])
    again = hf_posenc.unpatch(model)
    yield "class of unpatch", not type(again).__name__.startswith("PosEnc")
    yield "unpatch", torch.equal(again(**inputs)[0], expected["stock"])


def _half(inputs):
    return {
        name: value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def main(folder):
    warnings.simplefilter("error")
    poison_empty()
    found = {path.name: [what for what, right in problems(path) if not right] for path in Path(folder).iterdir()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
