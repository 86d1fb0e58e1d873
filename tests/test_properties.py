"""Properties of every registered encoding with any of its options. No test names an encoding.

Shapes: B batch, L tokens, Q queries, K keys, H heads, E head_dim, D hidden_size.
"""

import itertools
import json
import math
import re
from dataclasses import replace
from typing import get_origin

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import hf_posenc
from hf_posenc.attention import bias_backends
from hf_posenc.encodings import Geometry, PositionContext, build, canonical, catalog
from models import ENCODINGS

H, E, D = 2, 8, 16
LONGEST = 4096
every_encoding = pytest.mark.parametrize("name", ENCODINGS)
KINDS = hf_posenc.list_encodings()
RELATIVE = [name for name in ENCODINGS if KINDS[name].is_relative()]
ABSOLUTE = [name for name in ENCODINGS if name not in RELATIVE and {*KINDS[name].mechanisms()} - {"embed"}]
examples = settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def encodings(draw, name, dtype=torch.float64, **sizes):
    """An encoding with random options and parameters, for an encoder or a decoder."""
    kind = KINDS[name]
    choices = {option: catalog.named_values(annotation) for option, annotation in kind.option_types().items()}
    options = {option: draw(st.sampled_from(chosen)) for option, chosen in choices.items() if chosen and draw(st.booleans())}
    causal = kind.causal_only or draw(st.booleans())
    geometry = Geometry(D, H, E, LONGEST, causal, **{"trained_length": 8, **sizes})
    try:
        encoding = kind(geometry, **kind.with_explicit_defaults(geometry, kind.checked_options(options)))
        encoding.check_values()
    except ValueError:  # options that contradict each other, or that need a file
        assume(False)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return encoding.to(dtype)


def context_of(encoding, length, past=0, starts=(0,)):
    """The context of `length` new tokens after `past` cached ones. starts: the index of the first token that isn't padding."""
    start = torch.tensor(starts)[:, None]
    positions = (torch.arange(length) + past - start).clamp(min=0)
    return PositionContext(encoding, positions, past, start, scaling=E**-0.5)


def states(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scores(encoding, query, key, context):
    """`[B, H, Q, K]`: products of rotated queries and keys, plus the bias."""
    query, _ = encoding("rotate", query, None, context)
    _, key = encoding("rotate", None, key, context.for_keys(key.shape[2]))
    products = query @ key.transpose(2, 3) * context.scaling
    bias = bias_backends.score_bias([encoding], query, key, context)
    return products if bias is None else products + bias


def seen(values, encoding, past=0):
    """Values `[..., Q, K]` of visible keys, and 0 for other keys."""
    return values.tril(past) if encoding.geometry.is_causal else values


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every_encoding
@examples
@given(st.data())
def test_shapes_dtypes_and_finite_values(name, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    encoding = data.draw(encodings(name, dtype))
    length, queries = data.draw(st.sampled_from([1, 2, 9, 513, LONGEST])), data.draw(st.integers(1, 3))
    queries = min(length, queries)
    context = context_of(encoding, queries, past=length - queries)
    verbs = encoding.mechanisms()
    if "embed" in verbs:
        vectors = encoding("embed", torch.arange(length)[None])
        assert vectors.shape == (1, length, D) and vectors.is_floating_point() and vectors.isfinite().all()
    query, key = states(1, H, queries, E, dtype=dtype), states(1, H, length, E, seed=1, dtype=dtype)
    turned, _ = encoding("rotate", query, None, context)
    _, turned_key = encoding("rotate", None, key, context.for_keys(length))
    for each, before in ((turned, query), (turned_key, key)):
        assert each.dtype == dtype and each.shape[:3] == before.shape[:3] and each.isfinite().all()
    assert turned.shape[-1] == turned_key.shape[-1]
    if "distance_bias" in verbs:
        bias = encoding("distance_bias", torch.arange(1 - length, length))
        assert bias.shape[0] in (1, H) and bias.shape[1:] == (2 * length - 1,) and not bias.isnan().any()
    if "score_bias" in verbs:
        bias = encoding("score_bias", turned, turned_key, context)
        bias = torch.zeros(1) if bias is None else bias
        assert torch.broadcast_shapes(bias.shape, (1, H, queries, length)) == (1, H, queries, length)
        assert bias.isfinite().all()
    if "rotate" not in verbs:
        assert turned is query and turned_key is key


def moved(encoding, length, shift):
    """The visible scores of a text whose first position is `shift`."""
    context = context_of(encoding, length)
    context = replace(context, positions=context.positions + shift, start=context.start - shift)
    return seen(scores(encoding, states(1, H, length, E), states(1, H, length, E, seed=1), context), encoding)


@pytest.mark.parametrize("name", RELATIVE)
@examples
@given(st.data())
def test_only_distances_count(name, data):
    encoding, length = data.draw(encodings(name)), data.draw(st.integers(1, 20))
    close(moved(encoding, length, data.draw(st.sampled_from([1, 7, 300]))), moved(encoding, length, 0))


@pytest.mark.parametrize("name", ABSOLUTE)
@settings(examples, max_examples=3)
@given(st.data())
def test_positions_count_in_what_is_not_relative(name, data):
    encoding = data.draw(encodings(name))
    assert not torch.allclose(moved(encoding, 20, 300), moved(encoding, 20, 0))


@every_encoding
@examples
@given(st.data())
def test_a_cached_row_is_the_last_row_of_all(name, data):
    encoding = data.draw(encodings(name))
    length = data.draw(st.integers(2, 24))
    start = data.draw(st.integers(0, length - 1))
    query, key = states(1, H, length, E), states(1, H, length, E, seed=1)
    whole = scores(encoding, query, key, context_of(encoding, length, starts=[start]))
    last = scores(encoding, query[:, :, -1:], key, context_of(encoding, 1, past=length - 1, starts=[start]))
    close(last[..., start:], whole[:, :, -1:, start:])
    if "embed" in encoding.mechanisms() and encoding.geometry.is_causal:
        positions = torch.arange(length)[None]
        close(encoding("embed", positions[:, -1:]), encoding("embed", positions)[:, -1:])


@every_encoding
@examples
@given(st.data())
def test_a_batch_is_its_single_rows(name, data):
    """Left-padded rows give the same output as each row does alone, at its own length."""
    encoding = data.draw(encodings(name))
    length = data.draw(st.integers(1, 16))
    starts = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=3))
    query, key = states(len(starts), H, length, E), states(len(starts), H, length, E, seed=1)
    together = scores(encoding, query, key, context_of(encoding, length, starts=starts)).expand(len(starts), -1, -1, -1)
    for row, start in enumerate(starts):
        own = (slice(row, row + 1), slice(None), slice(start, None))
        alone = scores(encoding, query[own], key[own], context_of(encoding, length - start))
        close(seen(together[row : row + 1, :, start:, start:], encoding), seen(alone, encoding))
    if "embed" in encoding.mechanisms():
        positions = context_of(encoding, length, starts=starts).positions
        vectors = encoding("embed", positions)
        for row in range(len(starts)):
            close(vectors[row : row + 1], encoding("embed", positions[row : row + 1]))


@every_encoding
@examples
@given(st.data())
def test_gradients_reach_every_parameter(name, data):
    encoding = data.draw(encodings(name))
    length = 300  # beyond the distances that tables distinguish
    query, key, context = states(1, H, length, E), states(1, H, length, E, seed=1), context_of(encoding, length)
    weights = torch.softmax(seen(scores(encoding, query, key, context), encoding) * 0.05, dim=-1)
    total = (weights * states(1, H, length, length, seed=2)).sum()
    if "embed" in encoding.mechanisms():
        total = total + (encoding("embed", torch.arange(LONGEST)[None]) * states(1, LONGEST, D, seed=3)).sum()
    if encoding.needs_attention_weights():
        total = total + encoding("value_bias", weights, context).square().sum()
    parameters = dict(encoding.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if trained:
        found = torch.autograd.grad(total, list(trained.values()))
        for name, gradient in zip(trained, found, strict=True):
            assert gradient.isfinite().all() and gradient.any(), name


@every_encoding
@examples
@given(st.data())
def test_round_trips(name, data):
    """An encoding's options survive a JSON round trip. Its parameters survive a state_dict round trip."""
    encoding = data.draw(encodings(name, torch.float32))
    given_options = {option: getattr(encoding, option) for option in encoding.option_types()}
    written = json.loads(json.dumps({"type": name, **given_options}))
    again = canonical(written)
    assert again == canonical(again) and {**given_options, **again} == {**given_options, "type": name}
    other = build(again, encoding.geometry)
    other.load_state_dict(encoding.state_dict())
    query, key, context = states(1, H, 5, E), states(1, H, 5, E, seed=1), context_of(encoding, 5)
    query, key = query.float(), key.float()
    assert torch.equal(
        scores(other, query, key, replace(context, encoding=other, computed={})), scores(encoding, query, key, context)
    )
    if "embed" in encoding.mechanisms():
        assert torch.equal(other("embed", torch.arange(5)[None]), encoding("embed", torch.arange(5)[None]))


@every_encoding
def test_options_are_checked(name):
    kind = KINDS[name]
    with pytest.raises(ValueError, match="has no option 'nonsense'"):
        canonical({"type": name, "nonsense": 1})
    for option, annotation in kind.option_types().items():
        for wrong in (math.nan, "nonsense", [[]], object()):
            if wrong == "nonsense" and annotation is str or get_origin(annotation) is dict:
                continue
            try:
                accepted = canonical({"type": name, option: wrong})
            except ValueError as error:
                assert option in str(error)
            else:  # such as any text
                assert accepted[option] is None or isinstance(accepted[option], str | tuple), (option, wrong)


PAIRS = list(itertools.combinations(ENCODINGS, 2))


@pytest.mark.parametrize("first", ENCODINGS)
def test_any_two_act_together_or_are_refused(first):
    """Compatible pairs work in decoders: the last row of cached scores is that of all, and vectors are those of both parts."""
    refused = catalog.conflicts(ENCODINGS)
    for pair in (pair for pair in PAIRS if pair[0] == first):
        name = "+".join(pair)
        if pair in refused:
            with pytest.raises(ValueError, match=f"can't be.*one layer: {re.escape(refused[pair])}"):
                canonical(name)
            continue
        geometry = Geometry(D, H, E, LONGEST, is_causal=True, trained_length=8)
        whole = build(canonical(name), geometry).double()
        query, key = states(1, H, 9, E), states(1, H, 9, E, seed=1)
        every = scores(whole, query, key, context_of(whole, 9))
        close(scores(whole, query[:, :, -1:], key, context_of(whole, 1, past=8)), every[:, :, -1:])
        assert every.isfinite().all()
        parts = [part("embed", torch.arange(5)) for part in whole.named_parts().values()]
        added = [part for part in parts if part is not None]
        assert (whole("embed", torch.arange(5)) is None) == (not added)
        if added:
            close(whole("embed", torch.arange(5)).double(), sum(added).double())


def test_refused_pairs():
    """The number of pairs is fixed, so that a new one fails the test. docs/reference/encodings.md lists them."""
    refused = catalog.conflicts(ENCODINGS)
    assert {"fox", "pope", "xpos"} == {name for name in ENCODINGS if sum(name in pair for pair in refused) > 3}
    assert len(refused) == 19 and len(PAIRS) > 250
