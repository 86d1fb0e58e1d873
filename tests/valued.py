"""Custom encodings that create values in `__init__`, in the ways that are usual for torch modules."""

import numpy
import torch
from torch import nn

import hf_posenc


class Buffers(hf_posenc.PositionEncoding, type="test-buffers"):
    """Values in a saved buffer, an unsaved buffer, plain tensors, and a number read from a tensor."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.register_buffer("saved", torch.linspace(0.5, 2.0, geometry.num_attention_heads))
        self.register_buffer("computed", torch.arange(geometry.num_attention_heads) / 8, persistent=False)
        self.plain = torch.full((geometry.num_attention_heads,), 0.25)
        self.several = [torch.tensor(0.5), {"half": torch.tensor(0.5)}]
        self.scale = self.saved.sum().item()

    def distance_bias(self, distance):
        slope = (self.saved + self.computed + self.plain + self.several[0] * self.several[1]["half"]) / self.scale
        return -slope[:, None] * distance.abs()


class Parameters(hf_posenc.PositionEncoding, type="test-parameters"):
    """Values in a parameter, and random values."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.slope = nn.Parameter(torch.linspace(-1, 1, geometry.num_attention_heads))
        self.several = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(2))

    def distance_bias(self, distance):
        return (self.slope * self.several[0] + self.several[1])[:, None] * distance.abs()


class Modules(hf_posenc.PositionEncoding, type="test-modules"):
    """Modules of torch with their default initialization, in each layer."""

    per_layer = True

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.table = nn.Embedding(9, 6)
        self.out = nn.Sequential(nn.Linear(6, geometry.num_attention_heads), nn.BatchNorm1d(geometry.num_attention_heads))

    def distance_bias(self, distance):
        return self.out.eval()(self.table(distance.clamp(-4, 4) + 4)).T


class Overwritten(hf_posenc.PositionEncoding, type="test-overwritten"):
    """Values that are written after `reset_parameters`."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.slope = nn.Parameter(torch.empty(geometry.num_attention_heads))
        self.reset_parameters()
        with torch.no_grad():
            self.slope[0] = 7.0

    def reset_parameters(self):
        nn.init.ones_(self.slope)

    def distance_bias(self, distance):
        return self.slope[:, None] * distance.abs()


class Filled(hf_posenc.PositionEncoding, type="test-filled"):
    """Memory that `__init__` leaves uninitialized, and `reset_parameters` fills."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.slope = nn.Parameter(torch.empty(geometry.num_attention_heads))

    def reset_parameters(self):
        nn.init.ones_(self.slope)

    def distance_bias(self, distance):
        return self.slope[:, None] * distance.abs()


class Nested(hf_posenc.PositionEncoding, type="test-nested"):
    """Unsaved values in a submodule."""

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        self.inner = nn.Module()
        self.inner.register_buffer("slope", torch.linspace(0.5, 2.0, geometry.num_attention_heads), persistent=False)
        self.inner.plain = torch.full((geometry.num_attention_heads,), 0.25)

    def distance_bias(self, distance):
        return (self.inner.slope * self.inner.plain)[:, None] * distance.abs()


class Others(hf_posenc.PositionEncoding, type="test-others"):
    """Less common values.

    They are in a frozen parameter, a dict of parameters, half precision, a NumPy array, a filled embedding, and a list.
    """

    def __init__(self, geometry, **options):
        super().__init__(geometry, **options)
        heads = geometry.num_attention_heads
        self.new = nn.Buffer(torch.linspace(0.1, 0.4, heads))
        self.register_buffer("steps", torch.arange(1, heads + 1).half())
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.0, heads), requires_grad=False)
        self.named = nn.ParameterDict({"slopes": nn.Parameter(torch.linspace(1.0, 0.5, heads))})
        self.filled = nn.Embedding.from_pretrained(torch.linspace(0.2, 0.3, heads)[None])
        self.array, self.list = numpy.linspace(0.1, 0.2, heads), list(torch.linspace(0.3, 0.4, heads))

    def distance_bias(self, distance):
        slopes = self.new * self.steps.float() + self.frozen * self.named["slopes"] + self.filled.weight[0]
        return -(slopes + torch.from_numpy(self.array).float() + torch.stack(self.list))[:, None] * distance.abs()


KINDS = [cls.type for cls in (Buffers, Parameters, Modules, Overwritten, Filled, Nested, Others)]
