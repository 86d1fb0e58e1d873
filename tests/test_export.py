"""Patched models as one graph for all batch sizes and lengths: torch.export, ONNX, and torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from transformers import StaticCache

from closeness import LOOSE, assert_close
from hf_posenc.encodings import PositionContext
from models import CACHE, HOSTS, LENGTH, VARIANTS, backends, first, pairs, patched, stock, suits, tokens

OPEN = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
FEW = {"bert": "learned+rope+relative+shaw", "gpt2": "normalized+alibi"}
SOME = [pair.values for pair in pairs() if not pair.marks]
ONNX = [("bert" if suits("bert", encoding) else "gpt2", encoding) for encoding in VARIANTS] + [
    ("roberta", "alibi"),
    ("mpnet", "shaw"),
    ("gpt2", "t5"),
]


def padded(batch, length):
    """Inputs with padding before the first text and after each other text."""
    ids = tokens(batch, length, seed=length)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1:, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def with_ids(host, batch, length):
    """Inputs whose first row packs two texts, each with positions from 0."""
    ids = torch.arange(length).repeat(batch, 1)
    ids[0, length // 2 :] -= length // 2
    return {"input_ids": tokens(batch, length, seed=length), "position_ids": ids + HOSTS[host].offset}


def ready(host, encoding, attention="sdpa", max_length=None, **changes):
    model = patched(host, encoding, HOSTS[host].head, max_length=max_length, **changes)
    model.set_attn_implementation(attention if attention in backends(model) else "eager")
    model.config.use_cache = False
    return model


def exported(model, inputs, length=OPEN[1]):
    with torch.no_grad():
        return torch.export.export(model, (), inputs, dynamic_shapes={name: {**OPEN, 1: length} for name in inputs})


def assert_same(outputs, model, inputs, **tolerance):
    with torch.no_grad():
        expected = first(model(**inputs))
    shown = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 1
    assert_close(outputs[shown], expected[shown], **tolerance)


def check_export(host, encoding, attention):
    model = ready(host, encoding, attention)
    program = exported(model, padded(2, 7)).module()
    for batch, length in ((1, 5), (3, 16), (2, LENGTH)):
        assert_same(first(program(**padded(batch, length))), model, padded(batch, length))


@pytest.mark.parametrize("host", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_exported_programs_run_at_any_length(host):
    check_export(host, FEW[host], "sdpa")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not support setting its attention implementation")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("host", "encoding"), SOME)
def test_every_encoding_and_host_exports(host, encoding, attention):
    if attention not in backends(stock(host)):
        pytest.skip("this host has its own attention only")
    check_export(host, encoding, attention)


def test_counting_keys_exports_for_two_keys():
    """`cope` and `fox` count the keys between two tokens by differences. Two keys have one difference."""

    class Counting(torch.nn.Module):
        def forward(self, positions):
            context = PositionContext(None, positions=positions, past=0, start=positions[:, :1], keys=positions)
            return context.counted_keys(positions.shape[1], positions.shape[1], "cope")[1]

    program = torch.export.export(Counting(), (torch.arange(5)[None],), dynamic_shapes=[{1: OPEN[1]}]).module()
    for positions in ([0, 1], [0, 1, 1, 2, 0, 1]):
        assert program(torch.tensor([positions])).tolist() == Counting()(torch.tensor([positions])).tolist()


def test_exported_programs_take_position_ids():
    model = ready("roberta", "alibi", num_hidden_layers=1)
    program = exported(model, with_ids("roberta", 2, 8)).module()
    for batch, length in ((1, 6), (3, 13)):
        assert_same(first(program(**with_ids("roberta", batch, length))), model, with_ids("roberta", batch, length))


def test_a_promised_length_bounds_the_exported_program():
    model = ready("bert", "alibi", max_length=9, num_hidden_layers=1)
    program = exported(model, padded(2, 7)).module()
    assert_same(first(program(**padded(2, 9))), model, padded(2, 9))
    with pytest.raises(AssertionError, match="<= 9"):
        program(**padded(2, 10))
    with pytest.raises(torch._dynamo.exc.UserError, match="max=9"):
        exported(model, padded(2, 7), torch.export.Dim("length", max=10))


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [None, 9])
def test_one_compiled_graph_serves_all_lengths(max_length):
    torch._dynamo.reset()
    model, graphs = ready("bert", "rope+alibi", max_length=max_length), CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for length in (5, 6, 7):
        with torch.no_grad():
            assert_same(first(compiled(**padded(2, length))), model, padded(2, length))
    assert graphs.frame_count == 2, "one for the first length, one for all others"


@torch.no_grad()
def test_compiled_decoders_evaluate_each_distance_once():
    """With a mask, too, for which a graph can't know whether tokens are consecutive. T5's buckets need logarithms."""

    torch._dynamo.reset()
    model, inputs, sizes = ready("llama", "t5"), padded(2, 11), []

    def backend(graph, _):
        sizes.extend(node.meta["example_value"].numel() for node in graph.graph.nodes if node.target is torch.log)
        return graph

    assert_same(first(torch.compile(model, backend=backend, fullgraph=True)(**inputs)), model, inputs)
    assert sizes and max(sizes) <= 2 * 11


@pytest.mark.parametrize("trained", [False, True])
def test_compiled_models_store_no_bias_on_all_pairs(trained):
    """Without a mask, they read distance biases from a view of one row, in one graph for all lengths."""
    torch._dynamo.reset()
    model, strides = ready("bert", "rope+alibi", num_hidden_layers=1), []

    def backend(graph, inputs):
        masks = [node.kwargs["attn_mask"] for node in graph.graph.nodes if node.target is scaled_dot_product_attention]
        strides.append({mask.meta["example_value"].stride()[-2:] for mask in masks})
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (5, 6, 7):
        inputs = {"input_ids": tokens(2, length, seed=length)}
        with torch.set_grad_enabled(trained):
            assert_same(first(compiled(**inputs)), model, inputs)
    assert strides == [{(1, 1)}, {(1, 1)}], "one graph for the first length, one for all others"


# An export to ONNX is slow. docs/guides/integrations.md contains one that always runs.
OF_TORCH = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
"""torch's exporter calls functions that torch has deprecated."""


def check_onnx(host, encoding, path):
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    onnxruntime = pytest.importorskip("onnxruntime")
    model, inputs = ready(host, encoding), padded(2, 7)
    with torch.no_grad():
        program = torch.onnx.export(
            model, kwargs=inputs, dynamo=True, dynamic_shapes=dict.fromkeys(inputs, OPEN), verbose=False
        )
    program.save(path / "model.onnx")
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])

    def run(inputs):
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])

    for batch, length in ((1, 5), (3, 16), (2, LENGTH)):
        assert_same(run(padded(batch, length)), model, padded(batch, length), **LOOSE)
    return run


@OF_TORCH
@pytest.mark.slow
@pytest.mark.parametrize(("host", "encoding"), ONNX)
def test_every_encoding_runs_in_onnx(host, encoding, tmp_path):
    check_onnx(host, encoding, tmp_path)


@OF_TORCH
@pytest.mark.slow
def test_onnx_fails_beyond_a_table(tmp_path):
    run = check_onnx("bert", "learned+rope+t5+shaw", tmp_path)
    with pytest.raises(Exception, match="out of data bounds"):
        run(padded(2, LENGTH + 2))


@pytest.mark.parametrize("encoding", ["fire", "tupe"])
@torch.no_grad()
def test_compiled_layers_with_different_numbers_of_keys(encoding):
    """In a static cache, layers with a sliding window have fewer keys than others, and need a bias of their own."""
    model = patched("gemma3", encoding, "ForCausalLM", max_length=LENGTH)
    compiled = torch.compile(model.forward, backend="eager")
    for length in (11, 9):  # The second one makes the sizes dynamic.
        cache, other = (StaticCache(model.config, max_cache_len=20) for _ in range(2))
        ids = tokens(1, length)
        assert_close(compiled(ids, **{CACHE: cache}).logits, model(ids, **{CACHE: other}).logits)
