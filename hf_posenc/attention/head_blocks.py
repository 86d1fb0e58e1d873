"""Attention without gradients, one block of queries and a few heads at a time, whose bias stays in the caches of the cores.

It is for biases that encodings compute by block (`PositionEncoding.block_bias`).

Shapes: B batch, Q queries, K keys, H heads, E head_dim, g heads of a block, r its queries, n the keys that these see.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.attention.distance_table import VisibleSpans
from hf_posenc.encodings.block_bias import Block, BlockBias

QUERIES, CAUSAL_QUERIES = 1024, 256
"""The maximum numbers of queries in a block. SDPA is slower below 768, and again below 192. A causal block omits later keys."""


def attention(query: Tensor, key: Tensor, value: Tensor, spans: VisibleSpans, scaling: float, bias: BlockBias) -> Tensor:
    """softmax(scaling * QKᵀ + bias) V as `[B, Q, H, E]`, from `[B, H, Q or K, E]`. Queries that see no key get zeros."""
    batch, heads, queries, _ = query.shape
    keys, key, value = key.shape[2], key.flip(2), value.flip(2)
    output = query.new_zeros(batch, queries, heads, value.shape[-1])
    together = min(torch.get_num_threads(), heads)
    for rows, block, within in spans.blocks(queries, keys, CAUSAL_QUERIES if spans.is_causal else QUERIES):
        ceiling = _ceiling(query, block, within, keys, spans)
        for row, first in ((row, first) for row in range(rows.start, rows.stop) for first in range(0, heads, together)):
            some = slice(first, min(first + together, heads))
            its_query, its_key = query[row, some, block], key[row, some, within]
            added = bias(Block(row, some, block, within, its_query, its_key, ceiling, scaling))
            count = added.shape[-1]
            added = added if added.shape[1] == its_query.shape[1] else added.repeat(1, its_query.shape[1], 1)
            if ceiling.numel():
                near = added[..., : ceiling.shape[1]]
                torch.minimum(near, ceiling[:, :count].to(near.dtype), out=near)  # 20 times as fast as masked_fill_
            states = its_query[None], its_key[None, :, :count], value[row, some, within][None, :, :count]
            its_output = F.scaled_dot_product_attention(*states, added[None], scale=scaling)[0]
            output[row, block, some] = its_output.transpose(0, 1)
    return output


def _ceiling(query: Tensor, block: slice, within: slice, keys: int, spans: VisibleSpans) -> Tensor:
    """The `ceiling` of a `Block`."""
    exact, lowest = torch.promote_types(query.dtype, torch.float32), torch.finfo(query.dtype).min
    if not spans.is_causal:
        return query.new_zeros(block.stop - block.start, 0, dtype=exact)
    last = keys - 1 - within.start - spans.shift  # The last of these keys is the own key of the query with this index.
    count = min(max(last - block.start, 0), within.stop - within.start)
    hidden = torch.arange(count) < last - torch.arange(block.start, block.stop)[:, None]
    return query.new_full(hidden.shape, torch.inf, dtype=exact).masked_fill_(hidden, lowest)
