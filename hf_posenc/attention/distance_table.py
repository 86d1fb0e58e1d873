"""Biases by distance, and the keys that queries see: what the backends of biases compute with.

Shapes: B batch, Q queries, K keys, H heads, E head_dim, N = Q + K - 1 columns, from the largest distance to the smallest; keys
are taken in reverse, so that the bias of query i and key n is column i + n.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

APART_QUERIES = 128
"""Of a block of queries whose own keys are hidden, where biases are steep (`DistanceTable.reach`)."""


@dataclass(frozen=True)
class VisibleSpans:
    """Which keys queries see.

    spans: begin and end of rows of the batch, and of the keys that those see.
    shift: the index of the last key that query 0 sees, if is_causal; each query sees one more than the one before.
    """

    spans: tuple[tuple[int, int, int, int], ...]
    is_causal: bool = False
    shift: int = 0

    def blocks(self, queries: int, keys: int, size: int, apart: int | None = None) -> Iterator[tuple[slice, slice, slice]]:
        """Rows of the batch, at most `size` queries (all, where none sees other keys than the rest), and the keys, counted in
        reverse, that they see. Queries that see none are left out.

        apart: the size of blocks of queries whose own keys are hidden. None: other blocks include these queries.
        """
        for first_row, last_row, first, end in self.spans:
            runs = [(range(0, queries, size), queries)]
            if apart is not None:
                begin, finish = (min(max(place - self.shift, 0), queries) for place in (first, end))
                runs = [(range(0, begin, apart), begin), (range(begin, finish, size), finish)]
                runs.append((range(finish, queries, apart), queries))
            for start, stop in ((start, min(start + run.step, limit)) for run, limit in runs for start in run):
                last = min(end, stop + self.shift) if self.is_causal else end
                if first < last:
                    yield slice(first_row, last_row), slice(start, stop), slice(keys - last, keys - first)


@dataclass
class DistanceTable:
    """What is added to scores, by distance.

    values: `[H, N]`, biases on scaled scores.
    for_queries, for_keys: `[1 or H, N, E]`, vectors: their products with queries, or keys, are added to QKᵀ, before scaling.
    head, tail: number of columns at both ends that have the same vectors for queries.
    reach: `[H]`. A key has no weight that counts if its bias is lower by more than this than that of another key which the
        query sees. None: no key is to be left out for that reason.
    """

    values: Tensor | None
    for_queries: Tensor | None = None
    for_keys: Tensor | None = None
    head: int = 0
    tail: int = 0
    reach: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.values, self.for_queries, self.for_keys

    def to(self, dtype: torch.dtype) -> "DistanceTable":
        """The same, with vectors of another type."""
        queries, keys = (None if tensor is None else tensor.to(dtype) for tensor in (self.for_queries, self.for_keys))
        return replace(self, for_queries=queries, for_keys=keys)

    @property
    def needs_gradients(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)

    @property
    def apart(self) -> int | None:
        """The argument of `VisibleSpans.blocks`. Queries that see their own keys have the column of distance 0 in common."""
        return None if self.reach is None else APART_QUERIES

    def window(self, start: int, queries: int, keys: int) -> Tensor:
        """The bias `[1, H, r, n]` of a block from values, a view: query i and key j have column start + i + j.

        Keys without a weight that counts (`reach`) are hidden. Steep biases make many subnormal weights, with which a CPU
        multiplies a hundred times slower.
        """
        assert self.values is not None
        # Views of what needs gradients keep SDPA from its fast kernel even where none are wanted.
        row = self.values.detach()[:, start : start + queries + keys - 1]
        common = row[:, queries - 1 : keys]  # All of these queries see a key in each of these columns.
        if self.reach is not None and common.shape[1]:
            floor = common.amax(-1, keepdim=True) - self.reach[:, None]
            row = row.masked_fill(row < floor, torch.finfo(row.dtype).min)
        return row.as_strided((1, len(row), queries, keys), (0, row.stride(0), 1, 1), row.storage_offset())


def toeplitz_view(columns: Tensor, keys: int) -> Tensor:
    """The biases `[..., r, n]` in columns `[..., r, w]` that are each query's own, a view of contiguous memory."""
    *outer, queries, width = columns.shape
    return columns.as_strided((*outer, queries, keys), (*columns.stride()[:-2], width + 1, 1))
