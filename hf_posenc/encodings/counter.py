"""The position itself as a feature: a naive baseline."""

import torch.nn.functional as F
from torch import Tensor

from hf_posenc.encodings.base import PositionEncoding


class Counter(PositionEncoding, type="counter"):
    """PE(p) = (p, 0, …, 0): the number of preceding tokens, in the first column.

    It uses one column, because the next layer norm would subtract a constant added to all columns. At any length, positions
    are distinct and steps equal, but values are unbounded: at p = 1000 they dominate the token embedding.
    """

    title = "The position itself as a feature: a naive baseline"

    def embed(self, positions: Tensor) -> Tensor:
        return F.pad(positions.double()[..., None], (0, self.geometry.hidden_size - 1))
