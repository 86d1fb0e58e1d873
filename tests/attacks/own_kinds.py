# mypy: ignore-errors
# torch types each attribute of a module as Tensor | Module.
"""Encodings as users write them: the same bias, its slopes made in `__init__` in every way that torch has.

The bias on a score is the distance times a slope for each head. `Reference` computes the slopes when they are needed; those in
`DRAWN` draw them at random.
"""

from typing import Any

import torch
from torch import Tensor, nn

import hf_posenc


def slopes(heads: int) -> Tensor:
    return torch.linspace(0.1, 0.1 * heads, heads)


class Own(hf_posenc.PositionEncoding):
    def __init__(self, geometry: Any, **options: Any) -> None:
        super().__init__(geometry, **options)
        self.heads = geometry.num_attention_heads
        self.make()

    def make(self) -> None:
        """Make what the slopes are computed from."""

    def slopes(self) -> Tensor:
        return self.values

    def distance_bias(self, distance: Tensor) -> Tensor:
        return -self.slopes().to(distance.device, torch.float32)[:, None] * distance.abs()


class Reference(Own, type="attack-reference"):
    def slopes(self) -> Tensor:
        return slopes(self.heads)


class Buffer(Own, type="attack-buffer"):
    def make(self) -> None:
        self.register_buffer("values", slopes(self.heads))


class NotSaved(Own, type="attack-buffer-not-saved"):
    def make(self) -> None:
        self.register_buffer("values", slopes(self.heads), persistent=False)


class Arange(Own, type="attack-arange"):
    def make(self) -> None:
        self.register_buffer("values", torch.arange(1, self.heads + 1), persistent=False)

    def slopes(self) -> Tensor:
        return self.values * 0.1


class Half(Own, type="attack-half-buffer"):
    def make(self) -> None:
        self.register_buffer("values", torch.arange(1, self.heads + 1).half())

    def slopes(self) -> Tensor:
        return self.values.float() * 0.1


class NewBuffer(Own, type="attack-nn-buffer"):
    def make(self) -> None:
        self.values = nn.Buffer(slopes(self.heads))


class Value(Own, type="attack-parameter"):
    def make(self) -> None:
        self.values = nn.Parameter(slopes(self.heads))


class Frozen(Own, type="attack-frozen-parameter"):
    def make(self) -> None:
        self.values = nn.Parameter(slopes(self.heads), requires_grad=False)


class ChangedInPlace(Own, type="attack-changed-in-place"):
    def make(self) -> None:
        self.values = nn.Parameter(torch.zeros(self.heads))
        with torch.no_grad():
            self.values += slopes(self.heads)


class Plain(Own, type="attack-attribute"):
    def make(self) -> None:
        self.values = slopes(self.heads)


class InAList(Own, type="attack-list-of-tensors"):
    def make(self) -> None:
        self.values = list(slopes(self.heads))

    def slopes(self) -> Tensor:
        return torch.stack([*self.values])


class Array(Own, type="attack-numpy"):
    def make(self) -> None:
        import numpy

        self.values = numpy.linspace(0.1, 0.1 * self.heads, self.heads)

    def slopes(self) -> Tensor:
        return torch.from_numpy(self.values)


class Parameters(Own, type="attack-parameter-list"):
    def make(self) -> None:
        self.values = nn.ParameterList([nn.Parameter(value) for value in slopes(self.heads)])

    def slopes(self) -> Tensor:
        return torch.stack([*self.values])


class Named(Own, type="attack-parameter-dict"):
    def make(self) -> None:
        self.values = nn.ParameterDict({"slopes": nn.Parameter(slopes(self.heads))})

    def slopes(self) -> Tensor:
        return self.values["slopes"]


class Holder(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("values", slopes(heads), persistent=False)
        self.scale = nn.Parameter(torch.ones(()))


class Nested(Own, type="attack-nested"):
    def make(self) -> None:
        self.inner = nn.ModuleDict({"holder": Holder(self.heads)})

    def slopes(self) -> Tensor:
        return self.inner["holder"].values * self.inner["holder"].scale


class FilledLinear(Own, type="attack-filled-linear"):
    def make(self) -> None:
        self.linear = nn.Linear(1, self.heads, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(slopes(self.heads)[:, None])

    def slopes(self) -> Tensor:
        return self.linear.weight[:, 0]


class FilledEmbedding(Own, type="attack-filled-embedding"):
    def make(self) -> None:
        self.table = nn.Embedding.from_pretrained(slopes(self.heads)[None])

    def slopes(self) -> Tensor:
        return self.table.weight[0]


class Lazy(Own, type="attack-made-in-forward"):
    def make(self) -> None:
        self.values = None

    def slopes(self) -> Tensor:
        if self.values is None:
            self.values = slopes(self.heads)
        return self.values


class DrawnLinear(Own, type="attack-linear"):
    def make(self) -> None:
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, self.heads))

    def slopes(self) -> Tensor:
        return self.layers(torch.ones(3, dtype=self.layers[0].weight.dtype))


class DrawnEmbedding(Own, type="attack-embedding"):
    def make(self) -> None:
        self.table = nn.Embedding(1, self.heads)

    def slopes(self) -> Tensor:
        return self.table.weight[0]


class DrawnParameter(Own, type="attack-drawn-parameter"):
    def make(self) -> None:
        self.values = nn.Parameter(torch.randn(self.heads))


class DrawnBuffer(Own, type="attack-drawn-buffer"):
    def make(self) -> None:
        self.register_buffer("values", torch.randn(self.heads))


DRAWN: tuple[type[Own], ...] = (DrawnLinear, DrawnEmbedding, DrawnParameter, DrawnBuffer)
FIXED = tuple(kind for kind in Own.__subclasses__() if kind not in (Reference, *DRAWN))
