"""The data of the bias backends: distance biases, and the keys that queries see.

Shapes: B batch, Q queries, K keys, H heads, E head_dim, N = Q + K - 1 columns, from the largest distance to the smallest. Keys
are in reverse order, so the bias of query i and key n is column i + n.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

APART_QUERIES = 128
"""The number of queries in a block whose own keys are hidden, if biases are steep (`DistanceTable.reach`)."""


@dataclass(frozen=True)
class VisibleSpans:
    """The keys that queries see.

    spans: start and end of a range of batch rows, and start and end of the keys that these rows see.
    shift: the index of the last key that query 0 sees, if is_causal. Each query then sees one key more than the previous one.
    """

    spans: tuple[tuple[int, int, int, int], ...]
    is_causal: bool = False
    shift: int = 0

    def blocks(self, queries: int, keys: int, size: int, apart: int | None = None) -> Iterator[tuple[slice, slice, slice]]:
        """The blocks: batch rows, at most `size` queries, and the keys that these see, in reverse order.

        Queries that see no keys are omitted.

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
    """The terms added to scores, by distance.

    values: `[H, N]`, biases on scaled scores.
    for_queries, for_keys: vectors `[1 or H, N, E]`. Their products with queries or keys are added to QKᵀ, before scaling.
    head, tail: numbers of columns at the start and the end that share one vector for queries.
    query_offsets: see `PositionEncoding.query_offsets`.
    reach: `[H]`. A key has a negligible weight if its bias is lower than that of another visible key by more than this. None:
        no keys are omitted for this reason.
    """

    values: Tensor | None
    for_queries: Tensor | None = None
    for_keys: Tensor | None = None
    head: int = 0
    tail: int = 0
    reach: Tensor | None = None
    query_offsets: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.values, self.for_queries, self.for_keys

    def to(self, dtype: torch.dtype) -> "DistanceTable":
        """The same table, with vectors of another dtype."""
        queries, keys = (None if tensor is None else tensor.to(dtype) for tensor in (self.for_queries, self.for_keys))
        return replace(self, for_queries=queries, for_keys=keys)

    def of_heads(self, heads: slice) -> "DistanceTable":
        """The terms of some heads, as views. All heads may share one."""
        values, queries, keys, reach = (
            each if each is None or len(each) == 1 else each[heads] for each in (*self.tensors, self.reach)
        )
        return DistanceTable(values, queries, keys, self.head, self.tail, reach)

    @property
    def needs_gradients(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)

    @property
    def apart(self) -> int | None:
        """The argument of `VisibleSpans.blocks`. Queries that see their own keys share the column of distance 0."""
        return None if self.reach is None else APART_QUERIES

    def window(self, start: int, queries: int, keys: int) -> Tensor:
        """The bias `[1, H, r, n]` of a block, as a view of `values`. Query i and key j have column start + i + j.

        Keys with negligible weights (`reach`) are hidden, because steep biases create many subnormal weights. Multiplying these
        on a CPU is a hundred times slower.
        """
        assert self.values is not None
        # Views of tensors that require gradients prevent the fast kernel of SDPA, even if gradients are disabled.
        row = self.values.detach()[:, start : start + queries + keys - 1]
        common = row[:, queries - 1 : keys]  # All of these queries see a key in each of these columns.
        if self.reach is not None and common.shape[1]:
            floor = common.amax(-1, keepdim=True) - self.reach[:, None]
            row = row.masked_fill(row < floor, torch.finfo(row.dtype).min)
        return row.as_strided((1, len(row), queries, keys), (0, row.stride(0), 1, 1))


def toeplitz_view(columns: Tensor, keys: int) -> Tensor:
    """The biases `[..., r, n]`, as a view of contiguous columns `[..., r, w]`, one row for each query."""
    *outer, queries, width = columns.shape
    return columns.as_strided((*outer, queries, keys), (*columns.stride()[:-2], width + 1, 1))
