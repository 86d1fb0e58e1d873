"""Backends that compute the bias of an encoding. `select_backend` chooses one, and `biased_attention` runs it.

- dense: a bias `[1, H, Q, K]` with the attention mask merged into it. If possible, it is built once for all layers. It
  supports all encodings, implementations, and masks.
- toeplitz: for biases that depend only on distance. SDPA reads the bias from a view of one row `[H, Q + K - 1]`, with the
  keys in reverse order.
- flex: flex attention reads values by distance in its kernel. It runs if the model's implementation is "flex_attention".
- blockwise: for biases with gradients, or that depend on distance and content (`PositionEncoding.distance_vectors`).

Shapes: B batch, Q queries, K keys, H heads, E head_dim, N = Q + K - 1 distances.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc import _compat
from hf_posenc.attention.dispatch import AttentionCall, Function, with_weights
from hf_posenc.attention.distance_table import DistanceTable, VisibleSpans
from hf_posenc.encodings import PositionContext, PositionEncoding

BiasBackend = Literal["dense", "toeplitz", "blocks"]
MIN_KEYS_FOR_BACKEND: dict[BiasBackend, int] = {"toeplitz": 256, "blocks": 256}
"""The minimum number of keys for which a backend is faster than the dense one (`scripts/bench.py`)."""
MIN_KEYS_BY_ROW = 384
"""The same for "toeplitz" with gradients if the rows of a batch see different keys, because each row needs its own call."""
NOT_IN_BLOCKS = ("position_bias", "softcap", "output_attentions")
"""Arguments with which the SDPA function adds its own bias, or warns."""
FLEX_MIN_KEYS: int | None = None
"""The minimum number of keys for which flex attention replaces SDPA on a GPU. None: never, because no GPU has measured it."""
FLEX_GRAPHS = 64
"""The maximum number of compiled graphs, for data types, batches of 1, padding, and so on. Then torch compiles no more."""
FLEX_MIN_QUERIES = 128
"""The minimum number of queries for this, one block of the kernel."""
NEGLIGIBLE_WEIGHT = 2.0**-60
"""A weight that is negligible compared with 1, even summed over thousands of keys. float32 distinguishes 1 from 1 + 2^-23."""
CAUSAL_QUERIES = 256
"""The number of queries in a block of causal attention. A block omits the keys after it."""


def select_backend(call: AttentionCall) -> tuple[BiasBackend, VisibleSpans | None]:
    """The backend for the biases of a call under SDPA, and the keys that queries see, if the backend needs them."""
    biasing, query, keys, context, spans = call.biasing, call.query, call.key.shape[2], call.context, None
    backend: BiasBackend = "toeplitz"
    # With dropout, SDPA computes all scores. Gradient checkpointing first runs without gradients, then with the same dropout.
    if call.scoring or call.dropout or any(encoding.is_trained() for encoding in biasing):
        backend = "blocks"
    if (
        _reads_views(query)
        and keys >= MIN_KEYS_FOR_BACKEND[backend]
        and query.shape[-1] == call.value.shape[-1]  # Otherwise, SDPA computes all scores.
        and context.is_contiguous
        and not context.has_extra_tokens
        and isinstance(context.past, int)
        and len(call.scoring) <= 1
        and all(encoding.has_distance_vectors() for encoding in call.scoring)
    ):
        spans = _visible_spans(call)
    by_row = backend == "toeplitz" and spans is not None and len(spans.spans) > 1
    if by_row and torch.is_grad_enabled() and keys < MIN_KEYS_BY_ROW:
        spans = None
    return (backend, spans) if spans is not None else ("dense", None)


def _reads_views(query: Tensor) -> bool:
    """Whether SDPA runs the CPU kernel, which reads any view as a bias, for more than one query."""
    return _compat.is_readable(query) and query.shape[2] > 1


@functools.cache
def _blockwise() -> Any:
    """The `blockwise` module, or None in the code saved with a model whose biases have no gradients.

    There, dropout uses the dense backend.
    """
    try:
        from hf_posenc.attention import blockwise
    except ImportError:
        return None
    return blockwise


def biased_attention(function: Function, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Run the model's attention function with the bias of the encodings."""
    if not call.biasing:
        return call.run(function, call.mask)
    _check_mask(call.mask)
    scaling = call.context.scaling
    plain = all(call.options.get(name) is None or call.options[name] is False for name in NOT_IN_BLOCKS)
    # The bias on a single query is small.
    if function is sdpa_attention_forward and isinstance(scaling, float) and plain and call.query.shape[2] > 1:
        output = _without_all_pairs(function, call, scaling)
        if output is not None:
            return output, None
    return call.run(function, biased_mask(call))


def _without_all_pairs(function: Function, call: AttentionCall, scaling: float) -> Tensor | None:
    """The output `[B, Q, H, E]` by a backend that stores no bias on all pairs of tokens. None if none supports the call."""
    query, keys = call.query, call.key.shape[2]
    if (
        FLEX_MIN_KEYS is not None
        and keys >= FLEX_MIN_KEYS
        and query.shape[2] >= FLEX_MIN_QUERIES
        and _compat.has_flex_attention(query)
    ):
        output = flex(call, all_pairs=False)
        if output is not None:
            return output
    if torch.compiler.is_compiling():
        return _in_compiled_code(function, call)
    backend, spans = select_backend(call)
    if spans is None or (backend == "blocks" and _blockwise() is None):
        return None
    table = _distance_table(call, spans)
    if table is None:
        return None
    with _outside_autocast(call) as call:
        query, key, value = call.query, call.key, call.value
        table = _with_reach(table.to(query.dtype), query, key, scaling)
        if backend == "toeplitz" and not (torch.is_grad_enabled() and table.needs_gradients):
            return _toeplitz(function, call, table, spans)
        if key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        blockwise = _blockwise()
        assert blockwise is not None, "code saved with a model whose biases have no gradients"
        output = blockwise.attention(query, key, value, table, spans, scaling, call.dropout)
        return output.transpose(1, 2).contiguous()


@contextlib.contextmanager
def _outside_autocast(call: AttentionCall) -> Iterator[AttentionCall]:
    """The same call with states in the dtype of autocast, which is disabled, because it would copy the bias to cast it."""
    if not torch.is_autocast_enabled("cpu"):
        yield call
        return
    kind = torch.get_autocast_dtype("cpu")
    states = {"query": call.query, "key": call.key, "value": call.value}
    call = replace(call, **{name: each if each.dtype == torch.float64 else each.to(kind) for name, each in states.items()})
    with torch.autocast("cpu", enabled=False):
        yield call


def _in_compiled_code(function: Function, call: AttentionCall) -> Tensor | None:
    """The output `[B, Q, H, E]` of the model's function, called with a view of one row as the mask.

    None for a bias by content or with gradients, and for a mask, because reading its values would break the graph.
    """
    query, keys, context, biasing = call.query, call.key.shape[2], call.context, call.biasing
    if (
        _compat.is_exporting()
        or call.mask is not None
        or query.device.type != "cpu"
        or not (context.is_contiguous and isinstance(context.past, int))
        or context.has_extra_tokens
        or call.scoring
        or any(encoding.is_trained() for encoding in biasing)
    ):
        return None
    table = _distance_table(call, VisibleSpans(((0, len(query), 0, keys),), call.is_causal, context.past - context.first_key))
    if table is None:
        return None
    bias = table.window(0, query.shape[2], keys)
    return function(call.module, query, call.key.flip(2), call.value.flip(2), bias, **call.options)[0]


def padded_attention(function: Function, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Run the model's function with values padded to the width of keys. Otherwise, SDPA on a CPU would compute all scores.

    For a single query, the eager function is faster than padding all values.
    """
    width, more = call.value.shape[-1], call.query.shape[-1] - call.value.shape[-1]
    if function is sdpa_attention_forward and more > 0 and call.query.shape[2] == 1 and call.query.device.type == "cpu":
        return with_weights(call)[0], None
    if function is not sdpa_attention_forward or call.dropout or more < 1 or not _reads_views(call.query):
        return call.run(function, call.mask)
    output, weights = replace(call, value=F.pad(call.value, (0, more))).run(function, call.mask)
    return output[..., :width], weights


def _toeplitz(function: Function, call: AttentionCall, table: DistanceTable, spans: VisibleSpans) -> Tensor:
    """The output `[B, Q, H, E]` of the model's function, called with a view of one row as the mask."""
    # Split, because the gradient of a slice of some rows has the size of the whole batch.
    sizes = [last - first for first, last, _, _ in spans.spans]
    rows = zip(*(each.split(sizes) for each in (call.query, call.key.flip(2), call.value.flip(2))), strict=True)
    outputs = []
    for size, (query, key, value), (_, _, first, end) in zip(sizes, rows, spans.spans, strict=True):
        own = replace(call, query=query, key=key, value=value)
        outputs.append(_toeplitz_of_rows(function, own, table, replace(spans, spans=((0, size, first, end),))))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _toeplitz_of_rows(function: Function, call: AttentionCall, table: DistanceTable, spans: VisibleSpans) -> Tensor:
    """`_toeplitz` for rows of the batch that see the same keys, which are in reverse order."""
    query, key, value = call.query, call.key, call.value
    queries, keys = query.shape[2], key.shape[2]
    output = None
    size = CAUSAL_QUERIES if spans.is_causal else queries
    for _, block, within in spans.blocks(queries, keys, size, table.apart):
        bias = table.window(block.start + within.start, block.stop - block.start, within.stop - within.start)
        part, _ = function(call.module, query[:, :, block], key[:, :, within], value[:, :, within], bias, **call.options)
        if part.shape[1] == queries:
            return part
        output = part.new_zeros(len(query), queries, *part.shape[2:]) if output is None else output
        output[:, block] = part
    return query.transpose(1, 2) * 0 if output is None else output


def _distance_table(call: AttentionCall, spans: VisibleSpans) -> DistanceTable | None:
    """The terms that the encodings add to scores, by distance.

    They are computed once for all layers, unless they need gradients or differ between layers. None if an encoding returns no
    vectors, because then its `score_bias` must be called.
    """
    encodings, query, keys, context = call.biasing, call.query, call.key.shape[2], call.context

    def compute() -> DistanceTable | None:
        heads = query.shape[1]
        distance = torch.arange(keys - 1, -query.shape[2], -1, device=query.device) - spans.shift
        table = DistanceTable(_sum_of_values(encodings, distance, heads))
        for encoding in encodings:
            if encoding.has_distance_vectors():
                vectors = encoding("distance_vectors", distance)
                _check_vectors(encoding, vectors, heads, len(distance), query.shape[-1])
                if vectors == (None, None):
                    return None
                table.for_queries, table.for_keys = vectors
                table.head, table.tail = _clipped_ends(encoding.rows_of_vectors(distance))
                table.query_offsets = encoding("query_offsets")
        if table.values is not None or spans.is_causal:
            values = query.new_zeros(heads, len(distance)) if table.values is None else table.values
            values = values.to(torch.promote_types(query.dtype, torch.float32)).expand(heads, -1)
            if spans.is_causal:
                values = values.masked_fill(distance > 0, torch.finfo(values.dtype).min)
            table.values = values.contiguous()
        return table

    if torch.compiler.is_compiling() or not all(encoding._is_shared() for encoding in encodings):
        return compute()  # Compilers compute equal tables once, and traced sizes can't be keys.
    key = ("columns", *map(id, encodings), query.shape[1:3], keys, query.dtype, context.first_key, spans.is_causal)
    return context.cached(key, compute)


def _with_reach(table: DistanceTable, query: Tensor, key: Tensor, scaling: float) -> DistanceTable:
    """The same table, with `reach` if biases are so steep that some keys may have negligible weights.

    Scores differ by at most twice the largest product of norms. Half precision has no weights small enough to slow down a CPU.
    """
    values = table.values
    if values is None or query.element_size() < 4 or table.for_queries is not None or table.for_keys is not None:
        return table
    values = values.detach()
    falls = values < values.amax(-1, keepdim=True) + math.log(NEGLIGIBLE_WEIGHT)
    if not (falls & (values > torch.finfo(values.dtype).min)).any():
        return table
    with torch.no_grad():
        longest = [torch.linalg.vector_norm(states, dim=-1).amax((0, 2)) for states in (query, key)]
        products = longest[0] * longest[1].repeat_interleave(query.shape[1] // key.shape[1])
        return replace(table, reach=2 * abs(scaling) * products - math.log(NEGLIGIBLE_WEIGHT))


def _check_heads(encoding: PositionEncoding, bias: Tensor, heads: int) -> None:
    """Raises ValueError if a bias doesn't have shape `[1 or H, ...]`."""
    if bias.shape[0] in (1, heads):
        return
    if bias.shape[0] == encoding.geometry.num_attention_heads:
        raise ValueError(
            f"The {encoding.type!r} encoding has biases for {bias.shape[0]} heads, but this attention has {heads}, because a "
            "tensor-parallel plan has split them over processes. Use FSDP or DDP, or an encoding that rotates or adds vectors."
        )
    raise ValueError(f"The {encoding.type!r} encoding returned biases for {bias.shape[0]} heads. Return 1 or {heads}.")


def _check_vectors(encoding: PositionEncoding, vectors: Any, heads: int, distances: int, head_dim: int) -> None:
    """Raises ValueError if `distance_vectors` didn't return a pair of None or tensors of the required shapes."""
    shapes = ((1, distances, head_dim), (heads, distances, head_dim))
    pair = isinstance(vectors, tuple) and len(vectors) == 2
    if not pair or any(each is not None and tuple(each.shape) not in shapes for each in vectors):
        given = [tuple(each.shape) if isinstance(each, Tensor) else each for each in (vectors if pair else [vectors])]
        raise ValueError(
            f"distance_vectors of {encoding.type!r} returned {', '.join(map(str, given))} for {distances} distances. Return a "
            f"pair, (for queries, for keys), each None or of shape {shapes[0]} or, with vectors for each head, {shapes[1]}."
        )


def _clipped_ends(rows: Tensor | None) -> tuple[int, int]:
    """The numbers of distances at the two ends that share one parameter row."""
    if rows is None:
        return 1, 1
    return tuple(int((end == end[0]).long().cumprod(0).sum()) for end in (rows, rows.flip(0)))  # type: ignore[return-value]


def _visible_spans(call: AttentionCall) -> VisibleSpans | None:
    """The keys that the mask shows, if each row of the batch has one span, visible to all queries or causally.

    None for other masks.
    """
    mask, context, keys = call.mask, call.context, call.key.shape[2]
    batch, _, queries, _ = call.query.shape
    shift = int(context.past) - context.first_key
    if mask is None:
        return VisibleSpans(((0, batch, 0, keys),), call.is_causal, shift)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[-3:] != (1, queries, keys) or mask.ndim != 4:
        return None
    for other, found in (known := context.cached(("seen", shift), list)):
        if other is mask:
            return found
    shown = mask[:, 0, -1]
    first, count = shown.int().argmax(-1), shown.sum(-1)
    index = torch.arange(keys, device=mask.device)
    span = (index >= first[:, None]) & (index < (first + count)[:, None])
    causal = index <= torch.arange(queries, device=mask.device)[:, None] + shift
    found = None
    if torch.equal(span, shown):
        whole = span[:, None, None]
        ends = [(begin, begin + number) for begin, number in zip(first.tolist(), count.tolist(), strict=True)]
        rows = [(row, row + 1, *each) for row, each in enumerate(ends)]
        if len({*ends}) == 1:
            rows = [(0, batch, *ends[0])]
        if torch.equal(whole.expand_as(mask), mask):
            found = VisibleSpans(tuple(rows), False, shift)
        elif torch.equal(whole & causal, mask):
            found = VisibleSpans(tuple(rows), True, shift)
    known.append((mask, found))
    return found


def _check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"The attention mask is a {type(mask).__name__}, made for another implementation than the one that runs here. The "
            "name was set in only one of the model's configs. Set it with model.set_attn_implementation."
        )


def score_bias(encodings: Sequence[PositionEncoding], query: Tensor, key: Tensor, context: PositionContext) -> Tensor | None:
    """The sum of the biases of these encodings on the scaled scores, broadcastable to `[B, H, Q, K]`, or None.

    In grouped-query attention, keys may have fewer heads than queries. Extra tokens have a bias of 0.
    """
    total = None
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    whole, here = (query, key), context.on(query.device)
    query, key = context.strip_extra(query), context.strip_extra(key)  # type: ignore[assignment]
    for encoding in encodings:
        verbs = encoding.mechanisms()
        for term in (
            _distance_bias(encoding, query.shape[2], key.shape[2], context) if "distance_bias" in verbs else None,
            encoding("score_bias", *(whole if encoding.observes else (query, key)), here) if "score_bias" in verbs else None,
        ):
            if term is not None:
                if term.ndim != 4:
                    raise ValueError(
                        f"score_bias of {encoding.type!r} returned {tuple(term.shape)}. Return [B, H, Q, K], in which B and H "
                        "may be 1."
                    )
                _check_heads(encoding, term[0], query.shape[1])
                term = term.to(query.device)
                total = term if total is None else total + term
    if total is not None and context.has_extra_tokens:
        total = context.pad_extra(total.expand(*total.shape[:2], query.shape[2], key.shape[2]), dims=2)
    return total


@functools.cache
def compiled_flex_attention() -> Any:
    """Flex attention compiled for all lengths. Otherwise, torch would compile each length, and stop after a few of them."""
    return torch.compile(flex_attention, dynamic=True)


def run_flex_attention(function: Function, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Run flex attention with the encodings' bias and the model's own.

    On a CPU, SDPA runs instead, with a dense bias: flex attention has no gradients there, and torch may fail to compile it.
    The same holds for one query, because compiled code would depend on the number of cached keys.
    """
    query, sinks = call.query, call.options.get("s_aux") is not None
    if not sinks and (query.shape[2] == 1 or not _compat.has_flex_attention(query)):
        dense = replace(call, options={**call.options, "position_bias": None})
        return dense.run(sdpa_attention_forward, additive_mask(call))
    if function is flex_attention_forward and (output := flex(call)) is not None:
        return output, None
    bias = _with_own(score_bias(call.biasing, query, call.key, call.context), call)
    # Transformers' function reads position_bias[b, h, q, k] without broadcasting.
    call.options["position_bias"] = bias.to(query.dtype).expand(*query.shape[:3], call.key.shape[2])
    return call.run(function, call.mask)


def _with_own(bias: Tensor | None, call: AttentionCall) -> Any:
    own = call.own_bias
    return own if bias is None else bias if own is None else bias + own


def flex(call: AttentionCall, all_pairs: bool = True) -> Tensor | None:
    """The output `[B, Q, H, E]` of flex attention, whose kernel reads the bias of each score from values by distance.

    None for dropout, attention sinks, and a mask of numbers.

    all_pairs: whether a bias that can't be read by distance is stored for all pairs of tokens. Otherwise the result is None.
    """
    query, key, value, mask, context = call.query, call.key, call.value, call.mask, call.context.on(call.query.device)
    (batch, heads, queries, _), keys, device = query.shape, key.shape[2], query.device
    has_sinks, has_numbers = call.options.get("s_aux") is not None, isinstance(mask, Tensor) and mask.dtype != torch.bool
    if call.dropout or has_sinks or has_numbers or not isinstance(context.scaling, float):
        return None
    distance, before, here, there = _distances(queries, keys, context), queries - 1, None, None
    if context.counted and context.keys is not None:
        before = context.keys.shape[1]
        distance = torch.arange(-before, before, device=device)
        here, there = (each.expand(batch, -1) for each in (context.positions, context.key_positions(keys)))
    start = torch.full((), before, device=device)  # An int would be compiled in, and each length again.
    known = (context.is_contiguous or context.counted) and not context.has_extra_tokens
    by_distance = [encoding for encoding in call.biasing if known and encoding not in call.scoring]
    products = _products(call, distance) if known and len(call.scoring) == 1 else None
    rows, of_queries, of_keys = (None, None, None) if products is None else products
    by_distance += [] if products is None else call.scoring
    if (rest := [encoding for encoding in call.biasing if encoding not in by_distance]) and not all_pairs:
        return None
    lowest, exact = torch.finfo(torch.float32).min, torch.promote_types(query.dtype, torch.float32)
    values = _sum_of_values(by_distance, distance, heads)
    if values is not None:
        values = values.to(device, exact).clamp(min=lowest / 2).expand(heads, -1).contiguous()
    bias = _with_own(score_bias(rest, query, key, call.context), call)
    if bias is not None:
        bias = bias.to(exact).clamp(min=lowest / 2).expand(batch, heads, queries, keys)
    softcap = None if (limit := call.options.get("softcap")) is None else torch.full((), limit, device=device)

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        place = (k - q if here is None or there is None else there[b, k] - here[b, q]) + start
        if values is not None:
            score = score + values[h, place]
        if rows is not None and of_queries is not None:
            score = score + of_queries[b, h, q, rows[place]]
        if rows is not None and of_keys is not None:
            score = score + of_keys[b, h, k, rows[place]]
        if bias is not None:
            score = score + bias[b, h, q, k]
        return score

    groups = heads // key.shape[1]
    if groups & (groups - 1):  # The kernel supports powers of 2.
        key, value, groups = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), 1
    options: dict[str, Any] = {
        "score_mod": changed,
        "block_mask": _block_mask(call),
        "scale": context.scaling,
        "enable_gqa": groups > 1,
        "kernel_options": call.options.get("kernel_options"),
    }
    if torch.compiler.is_compiling():
        output = flex_attention(query, key, value, **options)
    else:
        with torch._dynamo.config.patch(recompile_limit=FLEX_GRAPHS):
            output = compiled_flex_attention()(query, key, value, **options)
    return output.transpose(1, 2).contiguous()


def _block_mask(call: AttentionCall) -> BlockMask | None:
    """The mask of a call for flex attention, made once for all layers with the same mask."""
    query, mask, context = call.query, call.mask, call.context.on(call.query.device)
    (batch, heads, queries, _), keys = query.shape, call.key.shape[2]
    if isinstance(mask, BlockMask) or (mask is None and not call.is_causal):
        return mask
    known = context.cached(("blocks", queries, keys, call.is_causal), list)
    for other, blocks in known:
        if other is mask:
            return blocks
    if mask is None:
        last = torch.full((), -context.first_key, device=query.device) + context.past
        shows = lambda b, h, q, k: k <= q + last  # noqa: E731
    else:
        shown = mask.expand(batch, heads, queries, keys)
        shows = lambda b, h, q, k: shown[b, h, q, k]  # noqa: E731
    of_heads = None if mask is None or mask.shape[1] == 1 else heads
    known.append((mask, create_block_mask(shows, batch, of_heads, queries, keys, query.device)))
    return known[-1][1]


def _products(call: AttentionCall, distance: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """The row of each distance, `[N]`, and scaled products of queries `[B, H, Q, R]` and keys `[B, H, K, R]` with all rows.

    They are for the encoding with vectors by distance, which may have none for queries or for keys. The result is None if a
    bias on all pairs is smaller, or if the number of rows would be compiled in.
    """
    (encoding,), query, key, context = call.scoring, call.query, call.key, call.context.on(call.query.device)
    rows = encoding.rows_of_vectors(distance) if encoding.has_distance_vectors() else None
    if rows is None or torch.compiler.is_compiling():
        return None

    def compute() -> tuple[Tensor, Tensor]:
        distinct, row = torch.unique(rows, return_inverse=True)
        return row, distance.new_zeros(len(distinct)).scatter_(0, row, distance)  # any distance of each row

    row, distances = context.cached(("rows", encoding.type, repr(encoding._options), len(distance), context.first_key), compute)
    if len(distances) >= key.shape[2] or encoding("query_offsets") is not None:
        return None
    vectors = encoding("distance_vectors", distances)
    _check_vectors(encoding, vectors, query.shape[1], len(distances), query.shape[-1])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    pairs = zip((query, key), vectors, strict=True)
    of_queries, of_keys = (None if table is None else states @ table.to(states).mT * context.scaling for states, table in pairs)
    return None if of_queries is None and of_keys is None else (row, of_queries, of_keys)


def _sum_of_values(encodings: Sequence[PositionEncoding], distance: Tensor, heads: int) -> Tensor | None:
    """The sum `[1 or H, N]` of the biases of these encodings that depend only on distance, or None."""
    total = None
    for encoding in encodings:
        values = _by_distance(encoding, distance) if "distance_bias" in encoding.mechanisms() else None
        if values is not None:
            _check_heads(encoding, values, heads)
            total = values if total is None else total + values.to(total.device)
    return total


def _by_distance(encoding: PositionEncoding, distance: Tensor) -> Tensor | None:
    """The bias `[1 or H, N]` of an encoding for distances `[N]`. Raises ValueError for another shape."""
    bias = encoding("distance_bias", distance)
    if bias is not None and bias.shape[1:] != distance.shape:
        raise ValueError(
            f"distance_bias of {encoding.type!r} returned {tuple(bias.shape)} for {len(distance)} distances. Return [H, N], or "
            "[1, N] for all heads."
        )
    return bias


def _distances(queries: int, keys: int, context: PositionContext) -> Tensor:
    """All distances `[N]` between consecutive queries and keys, with the smallest first."""
    return torch.arange(1 - queries, keys, device=context.positions.device) + context.first_key - context.past


def _distance_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    """The bias `[1, H, Q, K]`, or `[B, H, Q, K]` for non-consecutive positions."""
    if not context.is_contiguous:
        return _general_bias(encoding, queries, keys, context)
    # One value for each of the Q + K - 1 distances.
    distance = _distances(queries, keys, context)
    bias = _by_distance(encoding, distance)
    if bias is None:
        return None
    if torch.compiler.is_compiling():
        # unfold takes its length as a plain int, so a traced graph would support only this length.
        index = torch.arange(keys, device=bias.device) - torch.arange(queries, device=bias.device)[:, None]
        return bias[:, index + (queries - 1)][None]
    # SDPA copies a transposed bias in every layer, so the bias must be contiguous. It must also be detached: a bias that
    # requires gradients prevents the fast kernel, even if gradients are disabled.
    bias = bias if torch.is_grad_enabled() else bias.detach()
    return bias.contiguous().unfold(-1, keys, 1).flip(1)[None]


def _general_bias(encoding: PositionEncoding, queries: int, keys: int, context: PositionContext) -> Tensor | None:
    """The bias `[1 or B, H, Q, K]` for non-consecutive positions, as in packed sequences or with explicit `position_ids`."""
    distance = context.distances(keys)
    if context.counted and queries > 1:  # One value for each distance, read by index.
        longest = context.keys.shape[1]
        bias = _by_distance(encoding, torch.arange(-longest, longest, device=distance.device))
        bias = None if bias is None else bias[:, distance + longest]
    else:
        bias = _by_distance(encoding, distance.flatten())
        bias = None if bias is None else bias.unflatten(-1, distance.shape)
    return None if bias is None else bias.movedim(0, 1)


def biased_mask(call: AttentionCall) -> Tensor | None:
    """The additive mask `[1 or B, 1 or H, Q, K]` with the encodings' bias. Without a bias, the mask is returned unchanged.

    If the bias has no gradients and depends only on distances, it is built once for all layers that share it. With gradients,
    each layer builds its own within its own (re)computation. Gradient checkpointing and sharded training need this.
    """
    biasing, query, key, mask, context = call.biasing, call.query, call.key, call.mask, call.context
    if not biasing:
        return mask
    _check_mask(mask)
    causal = mask is None and query.shape[2] > 1 and call.is_causal
    here = context.on(query.device)

    def compute() -> Tensor | None:
        bias = score_bias(biasing, query, key, context)
        # A bias of -inf must hide keys less than a mask does. If it hides all keys that a mask shows, the mask still counts.
        least = torch.finfo(query.dtype).min / 2
        return mask if bias is None else _merged(bias.to(query.dtype).clamp(min=least), mask, causal, here)

    by_content = any(encoding.reads_content for encoding in call.scoring)
    if by_content or not all(encoding._is_shared() for encoding in biasing):
        return compute()
    wanted = (biasing, causal, query.dtype, query.shape[2], key.shape[2], context.first_key)
    # Masks are compared by identity, because models pass the same mask to all layers of a kind.
    known = here.cached("masks", list)
    for other, built_for, merged in known:
        if other is mask and built_for == wanted:
            return merged
    merged = compute()
    known.append((mask, wanted, merged))
    return merged


def additive_mask(call: AttentionCall) -> Tensor:
    """The mask `[1 or B, 1 or H, Q, K]` for an eager function, with the encodings' bias and the model's own.

    The mask of the call may be made for any implementation. It is None for an implementation that applies the causal mask
    itself.
    """
    query, context, own = call.query, call.context, call.own_bias
    queries, keys = query.shape[2], call.key.shape[2]
    if isinstance(mask := call.mask, BlockMask):  # the mask of flex attention
        mask_mod, (batch, heads, *_) = mask.mask_mod, mask.shape
        dense = context.cached(
            ("mask of blocks", mask, queries, keys),
            lambda: create_mask(mask_mod, batch, heads, queries, keys, device=query.device),
        )
        call = replace(call, mask=dense)
    merged = biased_mask(call)
    if own is None and merged is not None and merged.is_floating_point():
        return merged
    bias = query.new_zeros(1, 1, queries, keys) if own is None else own.to(query.dtype)
    return _merged(bias, merged, merged is None and queries > 1 and call.is_causal, context)


def _merged(bias: Tensor, mask: Tensor | None, causal: bool, context: PositionContext) -> Tensor:
    lowest = torch.finfo(bias.dtype).min
    if mask is None and not causal:
        return bias
    if mask is None:
        queries, keys = bias.shape[-2:]
        index = torch.arange(keys, device=bias.device) - torch.arange(queries, device=bias.device)[:, None]
        return bias.masked_fill(index + context.first_key > context.past, lowest)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, lowest)
    if not mask.is_floating_point():
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and type {mask.dtype}, and would be added to the scores unchanged. "
            "Pass a boolean mask (True: visible), a float mask (0: visible, -inf: hidden), or a 2-D mask of 0 and 1."
        )
    # A sum below the lowest number would be -inf, and the softmax of a row of -inf is NaN.
    return (bias + mask.to(bias.dtype)).clamp(min=lowest)
