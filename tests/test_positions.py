"""Positions: order, padding, explicit position_ids, and the maximum length of a model."""

import pytest
import torch
import transformers

import hf_posenc
from closeness import assert_apart, assert_close, assert_equal
from models import (
    BIASED,
    HOSTS,
    LENGTH,
    OFFSET,
    TABLED,
    as_itself,
    first,
    pairs,
    patched,
    randomize,
    randomize_encoding,
    stock,
    tokens,
)
from oracles import every_mask, ids_of, padding_of, without_positions


@pytest.mark.parametrize("host", TABLED)
def test_learned_from_the_host_changes_nothing(host):
    model = stock(host)
    longer = as_itself(model, host, max_length=LENGTH + 8)
    expected = first(model(tokens()))
    for actual in (first(each(tokens())) for each in (as_itself(model, host), longer)):
        assert_close(actual, expected) if HOSTS[host].written_out else assert_equal(actual, expected)
    assert first(longer(tokens(1, LENGTH + 8))).shape[1] == LENGTH + 8


def test_ids_beyond_a_table():
    for model in (patched("bert", "learned"), patched("gpt2", "learned")):
        with pytest.raises(ValueError, match=f"position_ids up to {LENGTH} don't fit max_length={LENGTH}"):
            model(tokens(1, 2), position_ids=torch.tensor([[0, LENGTH]]))
        with pytest.raises(ValueError, match=r"position_ids has shape \(1, 2\).*3 tokens"):
            model(tokens(1, 3), position_ids=torch.tensor([[0, 1]]))


@pytest.mark.parametrize("host", OFFSET)
def test_usable_length(host):
    """Two rows of the table are not for tokens."""
    model = stock(host)
    assert hf_posenc.inspect(model).max_length == LENGTH and model.config.max_position_embeddings == LENGTH + 2
    learned = hf_posenc.patch(model, "learned")
    assert hf_posenc.inspect(learned).max_length == LENGTH == len(learned.posenc.weight)
    assert learned.config.max_position_embeddings == LENGTH + 2
    longer = hf_posenc.patch(model, "learned", max_length=30)
    assert hf_posenc.inspect(longer).max_length == 30 == len(longer.posenc.weight)
    assert longer.config.max_position_embeddings == 32
    again = hf_posenc.unpatch(longer)
    assert again.config.max_position_embeddings == LENGTH + 2 == again.embeddings.position_embeddings.num_embeddings
    assert hf_posenc.inspect(hf_posenc.patch(model, "alibi")).max_length is None


@pytest.mark.parametrize("host", OFFSET)
@pytest.mark.parametrize("encoding", ["learned", "alibi"])
def test_ids_in_the_count_of_the_host(host, encoding):
    model, ids = patched(host, encoding), tokens()
    expected = first(model(ids))
    assert torch.equal(first(model(ids, position_ids=ids_of(host)[:1])), expected)
    for start in (0, -5):
        message = rf"position_ids starts at {start}, but {type(model).__name__} counts its first token as 2 and padding as 1"
        with pytest.raises(ValueError, match=rf"{message}, patched or not. Add 2 to IDs that count from 0"):
            model(ids, position_ids=torch.arange(start, start + 11)[None])
    if encoding == "learned":
        with pytest.raises(ValueError, match=rf"position_ids up to {LENGTH + 2} don't fit max_length={LENGTH} of.*'learned'"):
            model(ids[:, :2], position_ids=torch.tensor([[2, LENGTH + 2]]))


@every_mask
@pytest.mark.parametrize("host", OFFSET)
@torch.no_grad()
def test_the_hosts_own_ids_and_table_change_nothing(host, mask):
    """The original model computes its ids from padding tokens, the patched one from the mask, which hides exactly these."""
    arguments, real = padding_of(mask)
    ids = torch.where(real, tokens(), 1)
    model = stock(host)
    new = as_itself(model, host)
    expected = first(model(ids, **arguments))[real]
    by_hand = torch.where(real, ids_of(host, mask), 1)  # in the model's own count: 1 for padding, 2 for the first token
    for more in ({}, {"position_ids": by_hand}):
        actual = first(new(ids, **arguments, **more))[real]
        assert_close(actual, expected) if HOSTS[host].written_out else assert_equal(actual, expected)


@pytest.mark.parametrize("host", [host for host in OFFSET if host not in BIASED])
@torch.no_grad()
def test_positions_come_from_the_mask_not_from_padding_tokens(host):
    """If a padding token is within a text and visible, the original model doesn't count it. The patched model does."""
    model, ids = stock(host), tokens()
    ids[:, 4] = 1
    new, mask = hf_posenc.patch(model, "learned", init="host"), torch.ones_like(ids)
    in_a_row = first(model(ids, attention_mask=mask, position_ids=ids_of(host)))
    assert torch.equal(first(new(ids, attention_mask=mask)), in_a_row)
    assert_apart(first(model(ids, attention_mask=mask)), in_a_row)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(first(new(inputs_embeds=embeds, attention_mask=mask)), in_a_row)


@torch.no_grad()
def test_boxes_of_layoutlm_still_count():
    model, ids = hf_posenc.patch(stock("layoutlm"), "none"), tokens()
    corners = torch.randint(0, 8, (2, 11, 2), generator=torch.Generator().manual_seed(1))
    boxes = torch.cat([corners, corners + torch.randint(0, 8, (2, 11, 2), generator=torch.Generator().manual_seed(2))], dim=-1)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    expected = first(model(ids, bbox=boxes))
    assert_close(first(model(ids[:, order], bbox=boxes[:, order])), expected[:, order])
    assert_apart(first(model(ids, bbox=boxes[:, order])), expected)
    assert_apart(first(model(ids)), expected)
    assert torch.equal(first(without_positions("layoutlm")(ids, bbox=boxes)), expected)


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("encoding", ["sinusoidal", "learned", "alibi", "rope", "shaw", "fire", "cope"])
@pytest.mark.parametrize("name", ["GPT2", "OpenAIGPT"])
@torch.no_grad()
def test_ids_with_choices(name, encoding, choices):
    """Inputs `[B, choices, L]`, which the model flattens, give the same output as `[B * choices, L]`."""
    torch.manual_seed(0)
    more = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**more)
    model = getattr(transformers, f"{name}DoubleHeadsModel")(config).eval()
    model = randomize_encoding(hf_posenc.patch(randomize(model), encoding))
    base = model.base_model
    flat = tokens(2 * choices, 9)
    ids, mask, jumps = flat.view(2, choices, 9), torch.ones_like(flat), torch.arange(9).mul(3).fmod(16).expand_as(flat)
    mask[0, 6:], mask[-1, :2] = 0, 0
    for given in ({}, {"attention_mask": mask}, {"position_ids": jumps}):
        shaped = {key: value.view(2, choices, 9) for key, value in given.items()}
        expected = first(base(flat, **given)).view(2, choices, 9, -1)
        assert torch.equal(first(base(ids, **shaped)), expected)
        assert torch.equal(first(base(ids, **given)), expected)
    places = torch.full((2, choices), 8)
    found = model(ids, mc_token_ids=places, attention_mask=mask.view(2, choices, 9))
    assert found.mc_logits.shape == (2, choices) and found.logits.shape[:3] == (2, choices, 9)
    with pytest.raises(ValueError, match=r"attention_mask has 5 rows for"):
        base(ids, attention_mask=mask[:1].expand(5, -1))
    with pytest.raises(ValueError, match=r"inputs_embeds has shape \(2, .*\[batch, length, hidden_size\]"):
        base(inputs_embeds=torch.zeros(2, choices, 9, 32))


@torch.no_grad()
def test_heads_that_flatten_choices_themselves():
    model = patched("bert", "alibi", "ForMultipleChoice")
    ids, mask = tokens(4), torch.ones(4, 11, dtype=torch.long)
    mask[1, 7:] = 0
    shaped = model(ids.view(2, 2, 11), attention_mask=mask.view(2, 2, 11)).logits
    pooled = model.bert(ids, attention_mask=mask).pooler_output
    assert torch.equal(shaped, model.classifier(pooled).view(2, 2))


PACKED = (9, 6, 8)
"""The lengths of packed texts. Their sum exceeds max_length=10."""


@pytest.mark.parametrize(("host", "encoding"), pairs(on=("llama", "gpt2")))
@torch.no_grad()
def test_packed_rows_longer_than_max_length(host, encoding):
    """The limit applies to positions. Each text is shorter, and gives the same output as it does alone."""
    if host not in ("llama", "gpt2"):
        pytest.skip("packed texts are found by position_ids in decoders only")
    model = patched(host, encoding, max_length=10)
    texts = [tokens(1, length, seed=length) for length in PACKED]
    ids = torch.cat([torch.arange(length) for length in PACKED])[None]
    output = first(model(torch.cat(texts, dim=1), position_ids=ids, use_cache=False))
    for text, part in zip(texts, output.split(PACKED, dim=1), strict=True):
        assert_close(part, first(model(text)))
    with pytest.raises(ValueError, match=r"position_ids up to 10 don't fit max_length=10 of this model's"):
        model(torch.cat(texts, dim=1), position_ids=ids + (ids == 5) * 5)
    with pytest.raises(ValueError, match=r"position_ids up to 12 don't fit max_length=10"):
        model(tokens(1, 3), position_ids=torch.tensor([[0, 7, 12]]))


@pytest.mark.parametrize(
    "encoding",
    ["normalized", "fire", {"type": "sinusoidal", "frequencies": "dynamic", "trained_length": 4}, "dynamic"],
    ids=str,
)
@torch.no_grad()
def test_packed_rows_of_an_encoder_whose_positions_depend_on_the_length(encoding):
    """The length is that of each text, not of the longest one in the row."""
    model = stock("bert")
    if encoding == "dynamic":
        model = hf_posenc.extend(stock("bert", max_position_embeddings=4), 10, encoding)
    else:
        model = randomize(hf_posenc.patch(model, encoding))
    texts = [tokens(1, length, seed=length) for length in PACKED]
    ids = torch.cat([torch.arange(length) for length in PACKED])[None]
    text = torch.cat([torch.full((length,), number) for number, length in enumerate(PACKED)])
    mask = (text[:, None] == text)[None, None]
    output = first(model(torch.cat(texts, dim=1), position_ids=ids, attention_mask=mask))
    for each, part in zip(texts, output.split(PACKED, dim=1), strict=True):
        assert_close(part, first(model(each)))


@pytest.mark.parametrize("host", OFFSET[:1])
def test_packed_rows_in_the_count_of_the_host(host):
    model = patched(host, "learned", max_length=10)
    ids = torch.cat([torch.arange(length) for length in PACKED])[None] + HOSTS[host].offset
    assert first(model(tokens(1, 23), position_ids=ids)).isfinite().all()
    with pytest.raises(ValueError, match=f"position_ids up to {10 + HOSTS[host].offset} don't fit max_length=10"):
        model(tokens(1, 23), position_ids=ids + (ids == ids.max()) * 2)


@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_packed_rows_in_a_layer_by_itself(encoding):
    layer = hf_posenc.PositionEmbedding(encoding, hidden_size=8, max_length=10)
    ids = torch.cat([torch.arange(length) for length in PACKED])[None]
    embeds = torch.zeros(1, 23, 8)
    parts = layer(embeds, position_ids=ids).split(PACKED, dim=1)
    assert all(torch.equal(part, layer(embeds[:, : part.shape[1]])) for part in parts)
    with pytest.raises(ValueError, match="11 positions are more than max_length=10"):
        layer(embeds[:, :1], position_ids=torch.tensor([[10]]))
