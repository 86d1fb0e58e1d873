"""The position itself as a feature, the first naive scheme: there to be compared with."""

import torch.nn.functional as F
from torch import Tensor

from hf_posenc.encodings.base import PositionEncoding


class Counter(PositionEncoding, type="counter"):
    """PE(p) = (p, 0, …, 0): the count of tokens before this one, in the first column.

    One column, because a constant on all of them is taken away again by the next layer norm. Every position is
    distinct and all steps are equal, at any length; what it lacks is a bound: at p = 1000 it drowns the token.
    """

    def embed(self, positions: Tensor) -> Tensor:
        return F.pad(positions.double()[..., None], (0, self.geometry.hidden_size - 1))
