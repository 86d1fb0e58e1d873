"""Attention implementations, data types, and compilation."""

import copy

import torch

from checks.registry import TEXT, check
from closeness import assert_close
from cover import quick
from models import backends, tokens
from oracles import padded

EAGER_ALONE = ("mpnet", "megatron-bert", "rembert", "gpt-oss", "gemma2", "nllb-moe", "switch", "sew-d")
"""Models that Transformers runs with eager attention alone."""


def given(it):
    """Arguments with left padding in the second row, if the model supports masks, and a selection of non-padding outputs."""
    if it.kind not in TEXT:
        return it.inputs(), slice(None)
    ids, mask = padded(tokens(2), (11, 7), "left")
    return it.inputs(ids[:, 3:], mask[:, 3:]), mask[:, 3:].bool()


@check(where=lambda it: it.name not in EAGER_ALONE)
@torch.no_grad()
def implementations_agree(it):
    model, (arguments, real) = it.twin(), given(it)
    outputs = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        outputs[implementation] = [model(**arguments)[0][real], it.plain(model)]
    assert_close(outputs["sdpa"], outputs["eager"])


@check(where=lambda it: it.encoding != "none")
@torch.no_grad()
def half_precision(it):
    """bfloat16 and autocast keep the encoding's effect: the difference to the output without positions."""
    without = it.plain(it.without)
    effect = it.plain(it.model) - without

    def check(half, half_without):
        """Rounding lowers the cosine of the effects, to zero if the effect is smaller. A missing effect has the cosine zero."""
        noise = ((half_without - without).norm() / effect.norm()).item()
        found = (half.float() - half_without.float()).flatten()
        assert torch.nn.functional.cosine_similarity(found, effect.flatten(), dim=0) > 1 / (1 + 2 * noise**2) - 0.1

    half, half_without = (copy.deepcopy(model).to(torch.bfloat16) for model in (it.model, it.without))
    for implementation in backends(half):
        for model in (half, half_without):
            model.set_attn_implementation(implementation)
        outputs = [model(**it.half_inputs())[0] for model in (half, half_without)]
        assert outputs[0].dtype == torch.bfloat16
        check(*outputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(it.plain(it.model), it.plain(it.without))


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
