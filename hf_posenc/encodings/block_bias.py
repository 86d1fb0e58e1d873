"""The bias of one block of queries and a few heads, for encodings whose bias on all pairs of tokens is slow to store.

Shapes: g heads of a block, r its queries, n the keys that at least one of these sees, E head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NEGLIGIBLE_WEIGHT = 2.0**-60
"""A weight that is negligible compared with 1, even summed over thousands of keys. float32 distinguishes 1 from 1 + 2^-23."""


@dataclass
class Block:
    """A part of an attention. Keys are in reverse order, so that sums over the keys after each key are cumulative sums.

    row, heads, queries, keys: indices in `[B, H, Q, ...]` and, in reverse order, in `[B, H, K, ...]`.
    query, key: the block's states, `[g, r, E]` and `[g, n, E]`.
    ceiling: `[r, m]`, the upper limit of the bias of the first m keys, float32 or float64: the lowest number for a key that the
        query doesn't see, infinity otherwise. All queries see the other keys.
    """

    row: int
    heads: slice
    queries: slice
    keys: slice
    query: Tensor
    key: Tensor
    ceiling: Tensor
    scaling: float

    def products(self, keys: slice) -> Tensor:
        """Scaled QKᵀ for some of the keys, `[g, r, keys]`, in at least float32."""
        found = self.query @ self.key[:, keys].mT
        return found.to(torch.promote_types(found.dtype, torch.float32)).mul_(self.scaling)

    def of(self, states: Tensor, axis: slice) -> Tensor:
        """The part `[g, r or n, ...]` of states `[1 or B, H, Q or K, ...]` for these `queries` or `keys`."""
        return states[self.row if len(states) > 1 else 0, self.heads, axis]


BlockBias = Callable[[Block], Tensor]
"""Returns `[g, 1 or r, n]`, in the dtype of queries or float32. It is a new tensor if the ceiling has elements.

Biases of hidden keys don't matter. If the last keys have negligible weights, n may be smaller.
"""


def reach(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """`[B, H]`. A key has a negligible weight if its bias is lower than that of another visible key by more than this.

    Scores differ by at most twice the largest product of norms.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(states, dim=-1, dtype=exact).amax(-1) for states in (query, key)]
    return 2 * abs(scaling) * norms[0] * norms[1] - math.log(NEGLIGIBLE_WEIGHT)
