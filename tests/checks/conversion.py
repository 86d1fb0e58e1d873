"""What `patch` keeps of a model, what `unpatch` restores, and copies."""

import copy
import gc
import io
import pickle
import re
import threading
import weakref

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_posenc
from checks.registry import TEXT, WRITERS, check
from closeness import assert_apart, assert_close, assert_equal
from cover import quick, six
from models import randomize, tokens


@check(on=six)
def a_dropped_model_is_freed(it):
    """No reference to a model remains elsewhere, such as in a registry of Transformers."""
    gc.disable()  # so that the model is in the youngest generation, which is collected fast
    try:
        model = weakref.ref(it.fresh())
        gc.collect(0)
    finally:
        gc.enable()
    assert model() is None


@check()
def patch_keeps_the_host(it):
    model = it.fresh_stock().train()
    frozen = next(iter(model.base_model.parameters()))
    frozen.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    new = hf_posenc.patch(model, it.spec, max_length=it.max_length)
    if not any("posenc." in name for name, _ in new.named_parameters()):
        assert torch.equal(torch.get_rng_state(), random_state)

    theirs, ours = dict(model.named_parameters()), dict(new.named_parameters())
    assert all(theirs[name] is ours[name] for name in theirs.keys() & ours.keys())
    assert all("posenc." in name for name in ours.keys() - theirs.keys())
    gone = {name.removeprefix(f"{model.base_model_prefix}.") for name in theirs.keys() - ours.keys()}
    assert gone <= {*it.host.tables, *it.host.biases} or all(
        re.search("relative|distance|position|pos_|_pos|rel_embeddings|^encoder.encoder.LayerNorm", name) for name in gone
    )
    assert type(new).__name__ == "PosEnc" + type(model).__name__ and isinstance(new, type(model))
    if it.kind in TEXT:
        assert type(new.base_model).__name__ == "PosEnc" + type(model.base_model).__name__
    assert all(module.training for module in new.modules()) and not any(module.training for module in it.model.modules())
    assert not frozen.requires_grad and new.name_or_path == model.name_or_path
    assert_equal(dict(model.state_dict()), before)
    if it.kind in TEXT:
        tied = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (new, model)]
        assert tied[0] == tied[1]
    if it.kind in WRITERS:
        assert new.generation_config.to_dict() == model.generation_config.to_dict()
        assert new.generation_config is not model.generation_config
    with torch.no_grad():  # the original model still works as before, also with its hooks
        assert_equal(it.plain(model.eval(), output_hidden_states=True), it.plain(it.stock))


@check()
def unpatch_gives_the_host_back(it):
    model = copy.deepcopy(it.stock)
    with torch.no_grad():
        expected = it.plain(model, output_hidden_states=True)
        new = hf_posenc.patch(model, it.spec, max_length=it.max_length or (30 if it.kind in TEXT else None))
        changed = it.plain(new, output_hidden_states=True)
        if it.host.tables or it.encoding not in ("rope", "self_extend"):  # the rotation may be the model's original one
            assert_apart(changed, expected, by=1e-5)
        again = hf_posenc.unpatch(new)
        assert type(again) is type(model) and again.config.to_dict() == model.config.to_dict()
        assert not any("posenc" in name for module in again.modules() for name in vars(module))
        assert [*again.state_dict()] == [*model.state_dict()]
        assert_equal(it.plain(again, output_hidden_states=True), expected)
        assert_equal(it.plain(model), expected)


@check()
@torch.no_grad()
def copies_are_independent(it):
    expected, buffer, twins = it.plain(it.model), io.BytesIO(), [it.twin()]
    if not any(is_parametrized(module) for module in it.model.modules()):  # torch can't pickle parametrized modules
        torch.save(it.model, buffer)
        buffer.seek(0)
        twins += [pickle.loads(pickle.dumps(it.model)), torch.load(buffer, weights_only=False)]
    implementation = it.model.config._attn_implementation
    for twin in twins:
        assert_equal(it.plain(twin), expected)
        randomize(twin, seed=7)
        assert_apart(it.plain(twin), expected)
        twin.set_attn_implementation("eager")
    assert_equal(it.plain(it.model), expected)
    assert it.model.config._attn_implementation == implementation


@check()
def outputs_have_the_hosts_shapes(it):
    """Hidden states have the original shapes, and so have attention weights, whose rows sum to 1."""
    both = it.twin(), copy.deepcopy(it.stock)
    for model in both:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        ours, theirs = (model(**it.inputs(), output_hidden_states=True, output_attentions=True) for model in both)
    for name in theirs:
        if name.endswith(("hidden_states", "attentions")):
            shapes = [[None if each is None else each.shape for each in output[name]] for output in (ours, theirs)]
            assert shapes[0] == shapes[1], name
        if name.endswith("attentions") and ours[name] and ours[name][0] is not None and not it.host.own_rows:
            assert_close(ours[name][0].sum(-1), torch.ones_like(ours[name][0][..., 0]))


@check("encoder", "decoder", on=quick)
def two_threads_at_once(it):
    """Two forward passes with different inputs each wait in every layer until the other one arrives there."""
    model = it.twin()
    given = [it.inputs(tokens(1, 11, seed=1)), it.inputs(tokens(2, 7, seed=2), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]))]
    with torch.no_grad():
        expected = [model(**arguments)[0] for arguments in given]
    meeting, actual = threading.Barrier(2, timeout=30), [None, None]

    def wait(module, args):
        meeting.wait()

    for layer in layers(model):
        layer.register_forward_pre_hook(wait)

    def run(index):
        try:
            with torch.no_grad():
                actual[index] = model(**given[index])[0]
        except BaseException as error:
            actual[index] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(actual, expected)


def layers(model):
    """The layers of a model: those that support gradient checkpointing, or otherwise the longest module list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return found or list(max(lists, key=len))
