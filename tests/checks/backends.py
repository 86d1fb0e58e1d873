"""Attention implementations, data types, compilation, and devices."""

import pytest
import torch

import hf_posenc
from checks.registry import TEXT, check
from closeness import LOOSE, assert_close
from conftest import GPU
from cover import quick
from models import backends, tokens
from oracles import padded


def given(it):
    """Arguments with left padding in the second row, if the model supports masks, and a selection of non-padding outputs."""
    if it.kind not in TEXT:
        return it.inputs(), slice(None)
    ids, mask = padded(tokens(2), (11, 7), "left")
    return it.inputs(ids[:, 3:], mask[:, 3:]), mask[:, 3:].bool()


@check()
@torch.no_grad()
def implementations_agree(it):
    model, (arguments, real) = it.twin(), given(it)
    outputs = {}
    for implementation in backends(model):
        model.set_attn_implementation(implementation)
        outputs[implementation] = [model(**arguments)[0][real], it.plain(model)]
    for found in outputs.values():
        assert_close(found, outputs["eager"])


@check()
@torch.no_grad()
def half_precision(it):
    expected = it.plain(it.model)
    half = it.twin().to(torch.bfloat16)
    for implementation in backends(half):
        half.set_attn_implementation(implementation)
        output = half(**it.half_inputs())[0]
        assert output.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(output.float().flatten(), expected.flatten(), dim=0) > 0.99
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert it.plain(it.model).isfinite().all()


@check(on=quick, slow=True)
@torch.no_grad()
def compiles_as_one_graph(it):
    torch._dynamo.reset()
    compiled, (arguments, real) = torch.compile(it.twin(), fullgraph=True, backend="eager"), given(it)
    assert_close(it.plain(compiled), it.plain(it.model))
    assert_close(compiled(**arguments)[0][real], it.model(**arguments)[0][real])


@check(on=quick, slow=True)
@torch.no_grad()
def exports(it):
    arguments, real = given(it)
    program = torch.export.export(it.twin(), (), arguments, strict=False).module()
    assert_close(program(**arguments)[0][real], it.model(**arguments)[0][real])


@check()
@pytest.mark.gpu
@torch.no_grad()
def a_gpu_gives_the_same(it):
    """A model patched on a GPU gives the same output as on a CPU."""
    arguments, real = given(it)
    model = it.twin()
    new = hf_posenc.patch(hf_posenc.unpatch(model).to(GPU), it.spec, max_length=it.max_length)
    new.load_state_dict(model.state_dict())
    assert {each.device.type for each in (*new.parameters(), *new.buffers())} == {GPU}
    there = {name: value.to(GPU) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    assert_close(new(**there)[0].cpu()[real], it.model(**arguments)[0][real], **LOOSE)
