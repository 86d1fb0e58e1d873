"""Attention with a distance bias, in blocks of queries. Neither pass creates an `[H, Q, K]` tensor.

Keys are in reverse order, so the distance between query i and key n is always that of column i + n. The bias of a block of
queries is therefore a view of one row of columns. The part of each query begins one column after that of the previous query.

Shapes: B batch, Q queries, K keys, H heads, E head_dim, N = Q + K - 1 columns, from the largest distance to the smallest,
r queries of a block, n keys that it sees, w = r + n - 1 columns of these.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc import _compat
from hf_posenc.attention.distance_table import DistanceTable, VisibleSpans, toeplitz_view

FORWARD_QUERIES, FEWEST_QUERIES = 1024, 192
"""The maximum and minimum numbers of queries in a block of the forward pass. SDPA is slower below 768, and again below 192."""
FORWARD_ELEMENTS = 2**22
"""The approximate maximum number of elements in the bias of one head. Blocks have fewer queries to stay below it."""
THREAD_ELEMENTS = 2**20
"""The number of elements in the bias of a block for each thread, which processes as many heads as fit, but at least one."""
QUERIES_IN_TILE, CLIPPED_QUERIES_IN_TILE, KEYS_IN_TILE = 128, 512, 128
"""The numbers of queries and keys whose products with vectors are computed together. Products of other distances are wasted."""
BACKWARD_QUERIES, BACKWARD_FEWEST, BACKWARD_ELEMENTS = 512, 256, 2**18
"""The maximum and minimum numbers of queries in a block of the backward pass, which processes one head at a time.

Between them, a block has at most this many scores, which fit in a core's cache.
"""

DROPOUT_LEVELS = 2**16
"""The number of levels to which the dropout probability is quantized."""


@dataclass(frozen=True)
class Settings:
    """Settings of softmax(scaling * QKᵀ + bias) V, where each weight is dropped with a probability.

    head, tail, reach: see `DistanceTable`.
    dropped: this probability times DROPOUT_LEVELS.
    """

    seen: VisibleSpans
    scaling: float
    head: int
    tail: int
    reach: Tensor | None = None
    dropped: int = 0
    seed: int = 0

    def columns(self, values: Tensor | None, for_queries: Tensor | None, for_keys: Tensor | None) -> DistanceTable:
        return DistanceTable(values, for_queries, for_keys, self.head, self.tail, self.reach)

    @property
    def factor(self) -> float:
        """The factor by which dropout multiplies the weights that it keeps."""
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.dropped) if self.dropped < DROPOUT_LEVELS else 0.0


def attention(
    query: Tensor, key: Tensor, value: Tensor, columns: DistanceTable, seen: VisibleSpans, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Softmax attention of `[B, H, Q, E]` with a bias. Returns `[B, H, Q, E]`.

    Queries, keys, values, and columns receive gradients. Queries that see no key get zeros. The dropout mask is drawn from
    torch's generator, and again in the backward pass. Raises RuntimeError for second-order gradients.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    settings = Settings(seen, scaling, columns.head, columns.tail, columns.reach, round(dropout * DROPOUT_LEVELS), seed)
    positional = query
    if columns.query_offsets is not None:
        query, positional = (query + offset[:, None].to(query.dtype) for offset in columns.query_offsets)
    inputs = query, positional, key.flip(2), value.flip(2), *columns.tensors
    attend = _Attention.apply if _compat.records_operations(*inputs) else _Attention.forward
    return attend(*inputs, settings)


class Buffers:
    """Memory that all blocks of a pass share, because allocating a new one costs as much as filling it."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.known = like, dict[str, Tensor]()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor with undefined contents, valid until the next call with this name."""
        size = math.prod(shape)
        if name not in self.known or len(self.known[name]) < size:
            self.known[name] = self.like.new_empty(size)
        return self.known[name][:size].view(shape)


class _Attention(torch.autograd.Function):
    """The same attention, with keys and values already in reverse order.

    query: multiplied by keys. positional: the queries that are multiplied by vectors.
    """

    @staticmethod
    def forward(
        query: Tensor,
        positional: Tensor,
        key: Tensor,
        value: Tensor,
        values: Tensor | None,
        for_queries: Tensor | None,
        for_keys: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        batch, heads, queries, _ = query.shape
        keys, seen, scaling = key.shape[2], settings.seen, settings.scaling
        columns = settings.columns(values, for_queries, for_keys)
        # From this layout, models create [B, Q, H * E] without a copy.
        output = query.new_zeros(batch, queries, heads, value.shape[-1]).transpose(1, 2)
        if settings.dropped:
            for part in _parts(query, positional, key, columns, settings):
                its_value = value[part.row, part.head, part.within]
                output[part.row, part.head, part.block] = part.left.to(value.dtype) @ its_value
            return output.mul_(settings.factor)
        alone, buffers = for_queries is None and for_keys is None, Buffers(query)
        size = max(FEWEST_QUERIES, min(FORWARD_QUERIES, FORWARD_ELEMENTS // keys))
        for rows, block, within in seen.blocks(queries, keys, queries if alone and not seen.is_causal else size, columns.apart):
            r, n = block.stop - block.start, within.stop - within.start
            for those, these in _groups(rows, heads, 0 if alone else r * (min(r, QUERIES_IN_TILE) + n)):
                its_query, its_key = query[those, these, block], key[those, these, within]
                its_positional, start = positional[those, these, block], block.start + within.start
                bias = _bias(columns.of_heads(these), its_positional, its_key, start, scaling, buffers)
                output[those, these, block] = F.scaled_dot_product_attention(
                    its_query, its_key, value[those, these, within], attn_mask=bias, scale=scaling
                )
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "This attention doesn't support second-order gradients (create_graph=True). Call "
                "model.set_attn_implementation('eager')."
            )
        query, positional, key, value, values, for_queries, for_keys, output = ctx.saved_tensors
        columns = ctx.settings.columns(values, for_queries, for_keys)
        with torch.autocast(query.device.type, enabled=False):
            return (*_gradients(query, positional, key, value, columns, output, upstream, ctx.settings), None)


@dataclass(frozen=True)
class Part:
    """The recomputed attention of one row of the batch, one head, and one block of queries.

    weights: `[r, n]`, in at least float32.
    kept: `[r, n]`, a mask of the weights that are not dropped. None if all are kept.
    """

    row: int
    head: int
    block: slice
    within: slice
    columns: DistanceTable
    weights: Tensor
    kept: Tensor | None

    @property
    def left(self) -> Tensor:
        """The weights that are not dropped."""
        return self.weights if self.kept is None else self.weights * self.kept

    @property
    def start(self) -> int:
        """The column of the first query and last key."""
        return self.block.start + self.within.start


def _parts(query: Tensor, positional: Tensor, key: Tensor, columns: DistanceTable, settings: Settings) -> Iterator[Part]:
    """All parts, with keys in reverse order. Each iteration drops the same weights."""
    batch, heads, queries, _ = query.shape
    keys, exact = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    size = min(BACKWARD_QUERIES, max(BACKWARD_FEWEST, BACKWARD_ELEMENTS // keys))
    blocks = [*settings.seen.blocks(queries, keys, size, columns.apart)]
    buffers = Buffers(query)
    hides_all = query.element_size() < 4 or (columns.values is not None and bool(columns.values.isneginf().any()))
    for row, head in ((row, head) for row in range(batch) for head in range(heads)):
        own = columns.of_heads(slice(head, head + 1))
        for rows, block, within in blocks:
            if not rows.start <= row < rows.stop:
                continue
            its_query, its_key = query[row, head, block], key[row, head, within]
            its_positional, start = positional[row, head, block], block.start + within.start
            bias = _bias(own, its_positional[None, None], its_key[None, None], start, settings.scaling, buffers)[0, 0]
            scores = torch.addmm(bias.to(exact), its_query.to(exact), its_key.to(exact).mT, alpha=settings.scaling)
            weights = scores.softmax(-1)
            if hides_all:  # A bias of -inf, or a sum that is -inf in half precision, can hide all keys of padding queries.
                weights.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
            kept = _kept(weights.shape, settings.dropped, generator) if settings.dropped else None
            yield Part(row, head, block, within, own, weights, kept)


def _kept(shape: torch.Size, dropped: int, generator: torch.Generator) -> Tensor:
    """A mask of the weights that are not dropped.

    Bits are drawn for several weights at once, because torch's `bernoulli_` takes as long as ten softmaxes.
    """
    words = torch.empty(-(-shape.numel() // 4), dtype=torch.long, device="cpu").random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[: shape.numel()].view(shape) >= dropped - DROPOUT_LEVELS // 2


def _groups(rows: slice, heads: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Groups of batch rows and heads that are processed together, each with a bias of this many elements."""
    most = max(1, THREAD_ELEMENTS * torch.get_num_threads() // elements) if elements else heads * (rows.stop - rows.start)
    step = max(1, most // heads)
    for first in range(rows.start, rows.stop, step):
        for head in range(0, heads, most):
            yield slice(first, min(first + step, rows.stop)), slice(head, min(head + most, heads))


def _bias(columns: DistanceTable, query: Tensor, key: Tensor, start: int, scaling: float, buffers: Buffers) -> Tensor:
    """The bias `[1 or B, H, r, n]` of a block whose first query and last key have column `start`, as a view or in a buffer."""
    *outer, queries, _ = query.shape
    keys = key.shape[-2]
    if columns.values is not None and columns.for_queries is None and columns.for_keys is None:
        return columns.window(start, queries, keys)
    size = min(_queries_in_tile(columns, start, queries, keys), queries)
    width = size + keys - 1
    # A tile has one row of `width` columns for each query, of which each begins one column later than the previous row. With a
    # gap of `size` elements between tiles, all rows of the block have one stride.
    own = buffers.take("bias", (*outer, queries * (width + 1)))
    bias = own.as_strided((*outer, queries, keys), (*own.stride()[:-1], width + 1, 1))
    if columns.for_keys is not None:
        for tile, vectors in _tiles(columns.for_keys, start, queries, keys):
            its_key = key[..., tile, :]
            products = buffers.take("products", (*its_key.shape[:-1], vectors.shape[-2]))
            _multiply(its_key, vectors, scaling, out=products)
            bias[..., tile] = toeplitz_view(products, queries).mT  # Copied, because adding a transposed tensor is slow.
    for first in range(0, queries, size):
        count = min(size, queries - first)
        place = first * (width + 1)
        rows = own[..., place : place + count * width].unflatten(-1, (count, width))[..., : count + keys - 1]
        _add_by_query(columns, query[..., first : first + count, :], start + first, scaling, rows, buffers)
    return bias


def _queries_in_tile(columns: DistanceTable, start: int, queries: int, keys: int) -> int:
    """The number of queries in a tile. If most keys share a vector, few products are wasted, and large tiles are faster."""
    if columns.for_queries is None:
        return QUERIES_IN_TILE
    first, last = _ends(columns, start, queries + keys - 1)
    return QUERIES_IN_TILE if last - first > keys else CLIPPED_QUERIES_IN_TILE


def _add_by_query(columns: DistanceTable, query: Tensor, start: int, scaling: float, rows: Tensor, buffers: Buffers) -> None:
    """Add values and products of queries to a tile `[1 or B, H, r, w]`, which is empty if there are no vectors for keys."""
    width = rows.shape[-1]
    if columns.for_queries is not None:
        # The products with equal vectors at the ends are computed once.
        first, last = _ends(columns, start, width)
        first, last = max(first - 1, 0), min(last + 1, width)
        alone = columns.for_keys is None
        products = rows[..., first:last] if alone else buffers.take("products", (*rows.shape[:-1], last - first))
        _multiply(query, columns.for_queries[:, start + first : start + last], scaling, out=products)
        if alone:
            rows[..., :first], rows[..., last:] = products[..., :1], products[..., -1:]
        else:
            rows[..., first:last] += products
            rows[..., :first] += products[..., :1]
            rows[..., last:] += products[..., -1:]
    if columns.values is not None:
        rows += columns.values[:, None, start : start + width].to(rows.dtype)  # Adding float32 to half precision is slow.


def _ends(columns: DistanceTable, start: int, width: int) -> tuple[int, int]:
    """The range, within `width` columns from `start`, where the vectors for queries differ from those at the ends."""
    assert columns.for_queries is not None
    first = min(max(columns.head - start, 0), width)
    return first, min(max(columns.for_queries.shape[-2] - columns.tail - start, first), width)


def _multiply(states: Tensor, vectors: Tensor, scaling: float, out: Tensor) -> None:
    """Write the scaled products of states `[B, H, L, E]` and vectors `[1 or H, N, E]` to `out` `[B, H, L, N]`."""
    # One head at a time is faster than a batched product, whose results exceed a core's cache.
    for of_heads, parts in zip(states, out, strict=True):
        for rows, its_vectors, part in zip(of_heads, vectors.expand(len(of_heads), -1, -1), parts, strict=True):
            torch.addmm(part, rows, its_vectors.mT, beta=0, alpha=scaling, out=part)


def _tiles(vectors: Tensor, start: int, queries: int, keys: int) -> Iterator[tuple[slice, Tensor]]:
    """Tiles of a block's keys, and the vectors for each tile."""
    for first in range(0, keys, KEYS_IN_TILE):
        count = min(KEYS_IN_TILE, keys - first)
        yield slice(first, first + count), vectors[..., start + first : start + first + count + queries - 1, :]


def _gradients(
    query: Tensor,
    positional: Tensor,
    key: Tensor,
    value: Tensor,
    columns: DistanceTable,
    output: Tensor,
    upstream: Tensor,
    settings: Settings,
) -> tuple[Tensor | None, ...]:
    """The gradients of both kinds of queries, keys, values, and the three tensors of columns."""
    exact, scaling = torch.promote_types(query.dtype, torch.float32), settings.scaling
    means = (upstream * output).sum(-1, keepdim=True, dtype=exact)
    of_query, of_positional = torch.zeros_like(query), None if columns.for_queries is None else torch.zeros_like(query)
    of_key, of_value = (torch.zeros_like(states, dtype=exact) for states in (key, value))
    of_values, of_vectors, of_key_vectors = (
        None if tensor is None else torch.zeros_like(tensor, dtype=exact) for tensor in columns.tensors
    )
    skewed = query.new_empty(0, dtype=exact)
    for part in _parts(query, positional, key, columns, settings):
        row, head, block, within, weights = part.row, part.head, part.block, part.within, part.weights
        its_query, its_upstream = query[row, head, block], upstream[row, head, block]
        its_key, its_value = key[row, head, within], value[row, head, within]
        count, own = len(its_key), part.columns
        shape = (len(its_query), len(its_query) + count - 1)
        if skewed.shape != shape:
            skewed = query.new_zeros(shape, dtype=exact)  # Elements that belong to no query and key stay 0.
        of_scores = toeplitz_view(skewed, count)
        of_weights = (its_upstream @ its_value.mT).to(exact)
        if part.kept is not None:
            of_weights.mul_(part.kept).mul_(settings.factor)
        torch.mul(of_weights.sub_(means[row, head, block]), weights, out=of_scores)
        _add_product(of_value[row, head, within], part.left.mT, its_upstream)
        _add_product(of_key[row, head, within], of_scores.mT, its_query)
        of_query[row, head, block] = (of_scores.to(query.dtype) @ its_key).to(exact) * scaling
        if of_values is not None:
            of_values[head, part.start : part.start + shape[1]] += skewed.sum(0)
        if of_positional is not None:
            gradient = _query_gradients(own, skewed, positional[row, head, block], part.start, _of_head(of_vectors, head)[0])
            of_positional[row, head, block] = gradient * scaling
        if own.for_keys is not None:
            gradients = _tiles(_of_head(of_key_vectors, head)[0], part.start, *weights.shape)
            for (tile, vectors), (_, gradient) in zip(
                _tiles(own.for_keys[0], part.start, *weights.shape), gradients, strict=True
            ):
                transposed = query.new_zeros(tile.stop - tile.start, len(vectors), dtype=exact)
                toeplitz_view(transposed, len(its_query)).copy_(of_scores[:, tile].mT)
                _add_product(of_key[row, head, within][tile], transposed, vectors)
                _add_product(gradient, transposed.mT, its_key[tile])
    of_value *= settings.factor
    for found in (of_key, of_vectors, of_key_vectors):
        if found is not None:
            found *= scaling
    if of_key_vectors is not None:
        _gather_ends(of_key_vectors, columns)
    wanted = zip(columns.tensors, (of_values, of_vectors, of_key_vectors), strict=True)
    return (
        of_query,
        of_positional,
        of_key.to(key.dtype),
        of_value.to(value.dtype),
        *(None if gradient is None else gradient.to(tensor.dtype) for tensor, gradient in wanted),
    )


def _of_head(tensor: Any, head: int) -> Any:
    """A view `[1, ...]` of one head's tensor. All heads may share one."""
    if tensor is None:
        return None
    head = head if len(tensor) > 1 else 0
    return tensor[head : head + 1]


def _gather_ends(gradients: Tensor, columns: DistanceTable) -> None:
    """Sum the gradients of equal vectors at each end into one of them, because lower precision would lose small gradients."""
    for end, place in ((slice(0, columns.head), 0), (slice(gradients.shape[1] - columns.tail, None), -1)):
        total = gradients[:, end].sum(1)
        gradients[:, end] = 0
        gradients[:, place] += total


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, computed in the dtype of `right`, to a target whose precision may be higher."""
    if target.dtype == right.dtype:
        target.addmm_(left, right)
    else:
        target += left.to(right.dtype) @ right


def _query_gradients(columns: DistanceTable, skewed: Tensor, query: Tensor, start: int, of_vectors: Tensor) -> Tensor:
    """The gradients of a block's queries `[r, E]`, before scaling. Also adds those of the vectors to `of_vectors`.

    skewed: `[r, w]`, the gradients of the scores, by column.
    """
    assert columns.for_queries is not None
    vectors = columns.for_queries[0]
    first, last = _ends(columns, start, skewed.shape[1])
    ends = ((0, skewed[:, :first]), (-1, skewed[:, last:]))
    middle = skewed[:, first:last].to(query.dtype)
    found = (middle @ vectors[start + first : start + last]).to(skewed.dtype)
    _add_product(of_vectors[start + first : start + last], middle.mT, query)
    for place, part in ends:
        if part.shape[1]:
            total = part.sum(1, keepdim=True)
            found += total * vectors[place]
            of_vectors[place] += (total * query).sum(0)
    return found
