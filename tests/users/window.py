"""An encoding that a user wrote."""

import torch

import hf_posenc


class Window(hf_posenc.PositionEncoding, type="window"):
    """Nothing further than `width` tokens away is seen."""

    width: int = 128

    def distance_bias(self, distance):
        return torch.where(distance.abs() <= self.width, 0.0, -torch.inf)[None]
