"""The matrix hosts × encodings: what patch keeps, what it changes, and what every patched model does as the stock one."""

import copy
import functools
import io
import json
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_posenc
from conftest import HOSTS, LENGTH, VARIANTS, backends, first, pairs, patched, randomize, run_python, stock, tokens

every_pair = pytest.mark.parametrize(("host", "encoding"), pairs())


def padded(ids, lengths, side):
    """Ids and mask with the real tokens of row i being its first lengths[i], moved to one side."""
    width = ids.shape[1] + 3
    out, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        out[row, place], mask[row, place] = ids[row, :length], 1
    return out, mask


@every_pair
def test_patch_keeps_the_host(host, encoding):
    model = stock(host, HOSTS[host].head).train()
    frozen = next(iter(model.base_model.parameters()))
    frozen.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    new = hf_posenc.patch(model, encoding)
    if not any("posenc." in name for name, _ in new.named_parameters()):
        assert torch.equal(torch.get_rng_state(), random_state)

    theirs, ours = dict(model.named_parameters()), dict(new.named_parameters())
    shared = set(theirs) & set(ours)
    assert all(theirs[name] is ours[name] for name in shared)
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    assert set(theirs) - shared <= {prefix + name for name in (*HOSTS[host].tables, *HOSTS[host].biases)}
    assert all("posenc." in name for name in set(ours) - shared)
    assert type(new).__name__ == "PosEnc" + type(model).__name__ and isinstance(new, type(model))
    assert type(new.base_model).__name__ == "PosEnc" + type(model.base_model).__name__
    assert new.training and not frozen.requires_grad and new.name_or_path == model.name_or_path
    assert new.get_output_embeddings().weight is new.get_input_embeddings().weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if HOSTS[host].causal:
        assert new.generation_config.to_dict() == model.generation_config.to_dict()
        assert new.generation_config is not model.generation_config
    # The stock model still works as it did.
    twin = stock(host, HOSTS[host].head)
    assert torch.equal(first(model.eval()(tokens())), first(twin(tokens())))


@every_pair
def test_unpatch_is_bit_equal(host, encoding):
    model = stock(host, HOSTS[host].head)
    new = hf_posenc.patch(model, encoding)
    assert not torch.equal(first(new(tokens())), first(model(tokens())))
    again = hf_posenc.unpatch(new)
    assert type(again) is type(model) and again.config.to_dict() == model.config.to_dict()
    assert torch.equal(first(again(tokens())), first(model(tokens())))


@every_pair
def test_encoding_makes_order_visible(host, encoding):
    """`none` leaves an encoder permutation-equivariant; every other encoding doesn't.

    A decoder of one layer without positions gives its last token the same, in whatever order the others came.
    """
    model = patched(host, encoding, **HOSTS[host].one_layer)
    ids = tokens(1)
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(3))
    if HOSTS[host].causal:
        order = torch.cat([order[order != 10], torch.tensor([10])])
        difference = (first(model(ids))[:, -1] - first(model(ids[:, order]))[:, -1]).abs().max()
    else:
        difference = (first(model(ids))[:, order] - first(model(ids[:, order]))).abs().max()
    assert difference <= 1e-5 if encoding == "none" else difference > 1e-3


@every_pair
def test_length_promise(host, encoding):
    model = patched(host, encoding)
    long, offset = tokens(1, LENGTH + 9), HOSTS[host].offset
    if encoding.startswith("learned") or (encoding == "normalized" and HOSTS[host].causal):
        assert model.config.max_position_embeddings == LENGTH + offset
        with pytest.raises(ValueError, match=rf"{LENGTH + 9} tokens.*max_length={LENGTH}.*truncat"):
            model(long)
    else:
        assert first(model(long)).isfinite().all()
    promised = patched(host, encoding, max_length=LENGTH + 9)
    assert promised.config.max_position_embeddings == LENGTH + 9 + offset
    assert first(promised(long)).isfinite().all()
    with pytest.raises(ValueError, match=rf"{LENGTH + 10} tokens.*max_length={LENGTH + 9}"):
        promised(tokens(1, LENGTH + 10))


@every_pair
@torch.no_grad()
def test_padding_changes_nothing(host, encoding):
    model = patched(host, encoding)
    ids, lengths = tokens(3), [11, 7, 4]
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        alone = [first(model(ids[row : row + 1, :length]))[0] for row, length in enumerate(lengths)]
        for side in ("right", "left"):
            batch, mask = padded(ids, lengths, side)
            outputs = first(model(batch, attention_mask=mask))
            for row, expected in enumerate(alone):
                torch.testing.assert_close(outputs[row][mask[row].bool()], expected, atol=2e-5, rtol=1e-4)


@every_pair
@torch.no_grad()
def test_backends_agree(host, encoding):
    model = patched(host, encoding)
    if len(backends(model)) < 2:
        pytest.skip(f"{host} has one implementation of attention")
    ids, mask = tokens(2), torch.ones(2, 11, dtype=torch.long)
    mask[1, 6:] = 0
    for attention_mask in (None, mask):
        results = {}
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            results[implementation] = first(model(ids, attention_mask=attention_mask))[0]
        torch.testing.assert_close(results["eager"], results["sdpa"], atol=2e-5, rtol=1e-4)


@every_pair
@torch.no_grad()
def test_positions_given_by_hand(host, encoding):
    """Consecutive ids are what is computed without ids; ids that jump follow the same formula."""
    model = patched(host, encoding)
    ids, offset = tokens(2), HOSTS[host].offset
    arange = torch.arange(11)[None] + offset
    assert torch.equal(first(model(ids, position_ids=arange)), first(model(ids)))
    # A batch of jumping ids equals its rows, and their order along the row doesn't matter to an encoder.
    jumps = torch.stack([torch.arange(11) * 2, torch.arange(11).flip(0)]) + offset
    whole = first(model(ids, position_ids=jumps, attention_mask=torch.ones_like(ids)))
    for row in range(2):
        alone = first(model(ids[row : row + 1], position_ids=jumps[row : row + 1], attention_mask=torch.ones(1, 11)))
        torch.testing.assert_close(whole[row : row + 1], alone, atol=1e-5, rtol=1e-4)
    if not HOSTS[host].causal:
        order = torch.randperm(11, generator=torch.Generator().manual_seed(5))
        moved = first(model(ids[:, order], position_ids=arange[:, order].expand(2, -1)))
        torch.testing.assert_close(moved, first(model(ids))[:, order], atol=2e-5, rtol=1e-4)


@every_pair
def test_copies(host, encoding):
    model = patched(host, encoding, HOSTS[host].head)
    expected = first(model(tokens()))
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (twin, thawed, torch.load(buffer, weights_only=False)):
        assert torch.equal(first(other(tokens())), expected)
        randomize(other, seed=7)
        assert not torch.equal(first(other(tokens())), expected)
    assert torch.equal(first(model(tokens())), expected)
    before = model.config._attn_implementation
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == before


@every_pair
def test_outputs_and_gradients(host, encoding):
    model = patched(host, encoding, HOSTS[host].head)
    ids, reference = tokens(), stock(host, HOSTS[host].head)
    for implementation in backends(model):
        for each in (model, reference):
            each.set_attn_implementation(implementation)
        ours, theirs = (
            m(ids, output_hidden_states=True, output_attentions=implementation == "eager") for m in (model, reference)
        )
        assert [h.shape for h in ours.hidden_states] == [h.shape for h in theirs.hidden_states]
        if implementation == "eager":
            assert [a.shape for a in ours.attentions] == [a.shape for a in theirs.attentions]
            torch.testing.assert_close(ours.attentions[0].sum(-1), torch.ones(2, 4, 11))
    model.train()
    model(ids, labels=ids).loss.backward()
    silent = {name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()}
    reference.train()(ids, labels=ids).loss.backward()
    theirs = {name for name, p in reference.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent <= theirs


@every_pair
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(host, encoding, reentrant):
    model = patched(host, encoding, HOSTS[host].head, **HOSTS[host].no_dropout).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{host} has no gradient checkpointing")
    if not HOSTS[host].recomputes:
        pytest.skip("its layers lose the positions in their second run, which is an error: see below")
    ids = tokens()

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, **({"use_cache": False} if HOSTS[host].causal else {})).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    actual = gradients()
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


def test_a_layer_that_would_lose_its_positions():
    """Megatron-BERT's layers get no keyword arguments, so a second run of one can't know the positions: no wrong gradients."""
    model = patched("megatron-bert", "alibi", "ForMaskedLM").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match="gradient checkpointing"):
        model(tokens(), labels=tokens()).loss.backward()


@every_pair
def test_half_precision(host, encoding):
    model = patched(host, encoding)
    expected = first(model(tokens()))
    half = model.to(torch.bfloat16)
    outputs = half(tokens())
    assert first(outputs).dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(first(outputs).float().flatten(), expected.flatten(), dim=0) > 0.99
    half.set_attn_implementation(backends(half)[0])
    assert first(half(tokens())).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert first(patched(host, encoding)(tokens())).isfinite().all()


@every_pair
def test_compiles_as_one_graph(host, encoding):
    model = patched(host, encoding)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        for arguments in ({}, {"attention_mask": mask}):
            torch.testing.assert_close(
                first(compiled(tokens(), **arguments)), first(model(tokens(), **arguments)), atol=1e-5, rtol=1e-4
            )


@pytest.fixture(scope="session")
def reloaded(tmp_path_factory):
    """Host -> encoding -> what a new process found wrong after reloading; one process for each host."""
    return functools.cache(lambda host: save_and_reload(host, tmp_path_factory.mktemp(host)))


def save_and_reload(host, folder):
    for encoding in VARIANTS:
        model = patched(host, encoding, HOSTS[host].head)
        path = folder / encoding
        model.save_pretrained(path / "head")
        model.base_model.save_pretrained(path / "bare")
        expected = {
            "ids": tokens(),
            "head": first(model(tokens())),
            "bare": first(model.base_model(tokens())),
            "half": first(copy.deepcopy(model).to(torch.bfloat16)(tokens())),
            "stock": first(stock(host, HOSTS[host].head)(tokens())),
        }
        torch.save(expected, path / "expected.pt")
    return json.loads(run_python(RELOAD, folder, "CausalLM" if HOSTS[host].causal else "MaskedLM").splitlines()[-1])


RELOAD = """
import json, sys, warnings
warnings.simplefilter("error")
import torch, hf_posenc
import transformers
from transformers import AutoModel, AutoModelForTokenClassification
from pathlib import Path
from memory import poison_empty

poison_empty()

def check(path):
    expected = torch.load(path / "expected.pt")
    ids = expected["ids"]
    WithHead = getattr(transformers, "AutoModelFor" + sys.argv[2])
    model = WithHead.from_pretrained(path / "head")
    other = AutoModelForTokenClassification.from_pretrained(path / "bare")
    half = WithHead.from_pretrained(path / "head", dtype=torch.bfloat16)
    yield "with head", torch.equal(model(ids)[0], expected["head"])
    yield "bare", torch.equal(AutoModel.from_pretrained(path / "bare")(ids)[0], expected["bare"])
    yield "head loaded as bare", torch.equal(AutoModel.from_pretrained(path / "head")(ids)[0], expected["bare"])
    yield "bare with another head", torch.equal(other.base_model(ids)[0], expected["bare"])
    yield "the other head", type(other).__name__.startswith("PosEnc") and all(p.isfinite().all() for p in other.parameters())
    yield "bf16", half.dtype == torch.bfloat16 and torch.equal(half(ids)[0], expected["half"])
    for name, parameter in model.named_parameters():
        if "posenc." in name:
            with torch.no_grad():
                parameter.add_(1.0 + torch.arange(parameter.numel()).reshape(parameter.shape) % 3)
            yield f"outputs depend on {name}", not torch.equal(model(ids)[0], expected["head"])
    again = hf_posenc.unpatch(model)
    yield "unpatch: class", not type(again).__name__.startswith("PosEnc")
    yield "unpatch: outputs", torch.equal(again(ids)[0], expected["stock"])

print(json.dumps({path.name: [what for what, right in check(path) if not right] for path in Path(sys.argv[1]).iterdir()}))
"""


@every_pair
def test_save_and_reload(host, encoding, reloaded):
    """Bare, with head, head as bare, bare with another head, in bf16, unpatched; in a new process."""
    assert reloaded(host)[encoding] == []


@pytest.mark.parametrize("encoding", VARIANTS)
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_gpt2_decoding(encoding, side, static):
    """Cached decoding, in chunks and token by token, equals the full forward on logits."""
    model = patched("gpt2", encoding, "LMHeadModel")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    full = model(ids, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    pieces = []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12)):
        part = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        pieces.append(part.logits)
    actual = torch.cat(pieces, dim=1)
    real = mask.bool()
    torch.testing.assert_close(actual[real], full[real], atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@every_pair
def test_on_a_gpu(host, encoding):
    """Patched on the GPU, with padding and with ids by hand, as on the CPU."""
    model = patched(host, encoding)
    ids, lengths = tokens(3), [11, 7, 4]
    batch, mask = padded(ids, lengths, "left")
    by_hand = {
        "position_ids": torch.arange(11).flip(0)[None] + HOSTS[host].offset,
        "attention_mask": torch.ones(3, 11, dtype=torch.long),
    }
    expected = first(model(batch, attention_mask=mask)), first(model(ids, **by_hand))
    new = hf_posenc.patch(hf_posenc.unpatch(model).cuda(), model.config.position_encoding["type"])
    new.load_state_dict(model.state_dict())
    assert {p.device.type for p in (*new.parameters(), *new.buffers())} == {"cuda"}
    actual = first(new(batch.cuda(), attention_mask=mask.cuda()))
    torch.testing.assert_close(actual.cpu()[mask.bool()], expected[0][mask.bool()], atol=1e-4, rtol=1e-3)
    actual = first(new(ids.cuda(), **{name: value.cuda() for name, value in by_hand.items()}))
    torch.testing.assert_close(actual.cpu(), expected[1], atol=1e-4, rtol=1e-3)
