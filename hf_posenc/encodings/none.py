"""No position encoding: https://arxiv.org/abs/2305.19466"""

from hf_posenc.encodings.base import PositionEncoding


class NoPE(PositionEncoding, type="none", aliases=("nope",)):
    """No position encoding: nothing is added, rotated, or biased (Kazemnejad et al., 2023).

    An encoder without positions is permutation-equivariant. A decoder can still count its keys.
    """

    title = "No position encoding"
    paper = ("https://arxiv.org/abs/2305.19466",)
