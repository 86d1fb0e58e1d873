"""The position as a fraction of the length: a naive baseline."""

import torch.nn.functional as F
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import last_of_text


class Normalized(PositionEncoding, type="normalized"):
    """PE(p) = (p / (length - 1), 0, …, 0): a number from 0 to 1 in the first column.

    The length is that of the text without padding: its last position + 1. Values are bounded, but the step, 1/(length - 1),
    differs between texts. In a decoder, the length is `max_length`, because vectors must not depend on later tokens.
    """

    title = "The position as a fraction of the length: a naive baseline"

    @classmethod
    def needs_max_length(cls, geometry: Geometry) -> bool:
        return geometry.is_causal

    def embed(self, positions: Tensor) -> Tensor:
        if self.geometry.is_causal:
            assert self.geometry.max_length is not None
            last = positions.new_tensor(self.geometry.max_length - 1)
        else:
            last = last_of_text(positions)
        fraction = positions.double() / last.clamp(min=1)
        return F.pad(fraction[..., None], (0, self.geometry.hidden_size - 1))
