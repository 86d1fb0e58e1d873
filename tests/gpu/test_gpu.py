"""What differs on a GPU, in groups (`-k g4`). A rehearsal generates no code, and has float64 in place of the GPU's float32."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from accelerate import Accelerator, cpu_offload, hooks
from torch._dynamo.utils import counters
from torch.distributed import fsdp

import hf_posenc
from conftest import DEVICE
from tools.hosts import inputs, tiny

ON_GPU = DEVICE == "cuda"
LENGTH, MAIN, BACKEND = (300, 0, "nccl") if ON_GPU else (40, "cpu", "gloo")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
TYPES = """bert roberta mpnet deberta-v2 modernbert albert xlnet roformer xlm gpt2 bloom falcon opt gptj gpt_neo gpt_neox llama
    gemma3_text gpt_oss deepseek_v3 bart t5 whisper vit swin dinov3_vit eomt eomt_dinov3 sam_vision_model wav2vec2 hubert"""
OTHERS = {"cope": "gpt2", "fox": "gpt2", "xpos": "gpt2", "rope_2d": "vit", "sinusoidal_2d": "vit"}
OPTIONS = {
    **dict.fromkeys(("logn", "fope", "self_extend"), {"trained_length": 10}),
    "alibi, learned": {"encoding": "alibi", "slopes": "learned", "per_layer": True},
    "learned, int8": {"encoding": "learned", "storage": "int8", "init": "sinusoidal"},
    "rope, dynamic": {"encoding": "rope", "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8},
}
ENCODINGS = {name: OTHERS.get(name, "bert") for name in [*hf_posenc.list_encodings(), *OPTIONS, "alibi+rope", "learned+shaw"]}
MASKS = {"none": "bert", "padding": "bert", "causal": "gpt_neox", "grouped": "llama"}
BIASES = ["alibi", "t5", "relative", "kerple", "shaw", "alibi+rope"]
FLEX = [(name, mask) for mask in MASKS for name in (BIASES if mask == "padding" else BIASES[:2])]
TRAINED = ["alibi, learned", "shaw", "t5", "learned+shaw"]
CONVERSIONS = {
    "convert": lambda model: hf_posenc.convert(model, "relative", texts=[{**texts(16, 24).to(model.device)}], max_distance=4),
    "extend": lambda model: hf_posenc.extend(model, 48, "cubic"),
    "export": lambda model: hf_posenc.to_stock(patched(model, "t5")),
}


def larger(kind, length=LENGTH):
    """A model with heads of 64 features and weights as small as trained ones. In llama, two heads share their keys."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "n_embd": 128, "n_head": 2}
    sizes |= {"hidden_size": 256, "num_attention_heads": 4} if kind == "llama" else {"image_size": 8 * int(length**0.5)}
    model = tiny.build(kind, **sizes, max_position_embeddings=length, n_positions=length)
    for parameter in model.parameters():
        parameter.data.mul_(0.3 if parameter.ndim > 1 else 1.0)
    return model


def patched(model, name, std=0.5, **options):
    """The patched model with random parameters of the encoding."""
    new, draw = hf_posenc.patch(model, **{"encoding": name, **OPTIONS.get(name, {}), **options}), torch.Generator()
    for key, parameter in new.named_parameters():
        if "posenc." in key and parameter.is_floating_point():
            parameter.data.copy_(std * torch.randn(parameter.shape, generator=draw))
    return new


def texts(batch, length, padding="right"):
    """Random tokens, and a mask that hides a quarter of every other text on one side."""
    given = transformers.BatchFeature({"input_ids": torch.randint(3, 61, (batch, length), generator=torch.Generator())})
    if padding:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1::2, slice(length // 4) if padding == "left" else slice(-(length // 4), None)] = 0
    return given


def run(model, given, training=False):
    """The outputs of all tokens in a row, and in training the gradients of a weighted sum of them."""
    like = next(model.parameters())
    given = transformers.BatchFeature(given).to(DEVICE if like.is_meta else like.device, like.dtype)
    real = given.get("attention_mask", torch.ones(0)).bool()
    torch.manual_seed(0)  # for dropout
    with torch.set_grad_enabled(training):
        found = [each for each in model(**given).to_tuple() if torch.is_tensor(each) and each.is_floating_point()]
    found = [each[real] if each.shape[:2] == real.shape else each for each in found]
    output = torch.cat([each.double().where(each.isfinite(), 0.0).flatten() for each in found])
    model.zero_grad()
    if training:
        (output * torch.arange(len(output), device=output.device).cos()).sum().backward()
    found = {name.removeprefix("_orig_mod."): each.grad for name, each in model.named_parameters() if each.grad is not None}
    found = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return output.detach().cpu(), {name: each.double().cpu() for name, each in found.items()}


def distance(actual, expected, least=0.0):
    return float((actual - expected).norm() / expected.norm().clamp(min=least))


def compare(check, actual, expected, given, what="", training=False):
    """Check that two models have the same outputs and gradients. Some gradients are zero up to rounding."""
    (output, gradients), (other, others) = run(actual, given, training), run(expected, given, training)
    check(f"{what} output", distance(output, other), 1e-4)
    if training:
        least = max(each.norm() for each in others.values()) / 100
        check(f"{what} gradients", max(distance(gradients[key], each, least) for key, each in others.items()), 1e-3)


@pytest.mark.parametrize(("name", "kind"), [*ENCODINGS.items(), *(("sinusoidal+rope+t5", kind) for kind in TYPES.split())])
def test_g1_float32(name, kind, check):
    """A model patched on the GPU equals one patched on the CPU."""
    model = tiny.build(kind)
    there = patched(copy.deepcopy(model).to(DEVICE), name, max_length=300)
    assert {each.device.type for each in (*there.parameters(), *there.buffers())} == {DEVICE}
    new = patched(model, name, max_length=300)
    there.load_state_dict(new.state_dict())
    like_a_gpu = (
        there.float() if ON_GPU or kind in ("gpt_oss", "deepseek_v3") else there.double()
    )  # not all experts take float64
    compare(check, like_a_gpu, new, inputs.reading(kind, model)(1, 2), training=True)


@pytest.mark.parametrize(("name", "kind"), ENCODINGS.items())
def test_g2_half_precision(name, kind, check):
    """The error is at most twice that of the original model, and at most half of the encoding's effect."""
    for length in (LENGTH, 1025 if ON_GPU else 65):
        model = larger(kind, length)
        given = inputs.reading(kind, model)(1, 2) if kind == "vit" else texts(2, length)
        new = patched(model, name, std=4.0 if name == "relative" else 0.5, max_length=length)
        exact, without = (run(copy.deepcopy(each).to(DEVICE).double(), given)[0] for each in (new, patched(model, "none")))
        effect = torch.inf if name in ("logn", "none") else distance(without, exact)
        for how, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}.items():
            errors = []
            for each in (new, model):
                low = copy.deepcopy(each).to(DEVICE, dtype)
                with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
                    output, _ = run(low, given)
                errors.append(distance(output, run(low.double(), given)[0]))
            check(f"{how} {length}", errors[0], min(2 * errors[1], effect / 2))


@torch.no_grad()
def waits(model, given):
    """Where a forward pass, and a decoder's step with a cache, wait for the GPU."""
    cache = getattr(model(**{key: each[:, :-1] for key, each in given.items()}), "past_key_values", None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn") if ON_GPU else None
        model(**given)
        if cache is not None:
            model(given["input_ids"][:, -1:], cache, attention_mask=given.get("attention_mask"))
        torch.cuda.set_sync_debug_mode("default") if ON_GPU else None
    return [f"{each.filename}:{each.lineno}" for each in found if "called a synchronizing" in str(each.message)]


@pytest.mark.parametrize("name", [name for name, kind in ENCODINGS.items() if kind != "vit"])
def test_g3_synchronization(name, check):
    """It waits no more often than the original model, which reads masks."""
    for kind in {"gpt2", ENCODINGS[name]}:
        for padding in (None, "right"):
            model, given = larger(kind).to(DEVICE), texts(2, LENGTH, padding).to(DEVICE)
            ours, theirs = waits(patched(model, name, max_length=LENGTH), given), waits(model, given)
            check(f"{kind} {padding} {' '.join({*ours} - {*theirs})}", len(ours), len(theirs))


@pytest.mark.parametrize("name", [*TRAINED, "learned", "rope"])
def test_g7_devices(name, tmp_path, check):
    """Saved on the GPU and loaded on either device, offloaded, unpatched, and with layers on two devices."""
    model, given = tiny.build("bert"), texts(2, 11)
    new = patched(model, name, max_length=24)
    there, load = copy.deepcopy(new).to(DEVICE), transformers.AutoModel.from_pretrained
    there.save_pretrained(tmp_path)
    compare(check, load(tmp_path), new, given, "loaded on the CPU")
    halves = {key: "cpu" if key == "encoder" else MAIN for key, _ in new.named_children()}
    compare(check, load(tmp_path, device_map=halves), new, given, "device map")
    compare(check, cpu_offload(copy.deepcopy(new), torch.device(DEVICE), offload_buffers=True), new, given, "offloaded")
    compare(check, hf_posenc.unpatch(load(tmp_path, device_map=MAIN)), model, given, "loaded on the GPU, unpatched")
    hooks.add_hook_to_module(there.encoder.layer[0], hooks.AlignDevicesHook("cpu", io_same_device=True, place_submodules=True))
    compare(check, there, new, given, "two devices")


@pytest.mark.parametrize("how", CONVERSIONS)
def test_g7_conversion(how, check):
    there, here = (CONVERSIONS[how](tiny.build("bert").to(device)) for device in (DEVICE, "cpu"))
    assert {each.device.type for each in there.parameters()} == {DEVICE}
    compare(check, there, here, texts(2, 24))


@pytest.mark.parametrize("how", ["dynamic", "beams", "static", "compiled"])
@pytest.mark.parametrize("name", ["alibi", "rope", "t5", "shaw"])
def test_g6_generation(how, name, check):
    """The logits of new tokens after left-padded texts equal those on a CPU with a dynamic cache."""
    model, found = tiny.randomized(transformers.LlamaForCausalLM(tiny.config_of("llama")).eval()), []
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "output_logits": True, "num_beams": 3 if how == "beams" else 1}
    for device in ("cpu", DEVICE):
        new, given = patched(copy.deepcopy(model), name, max_length=64).to(device), texts(2, 11, "left").to(device)
        found.append(new.generate(**given, **options, return_dict_in_generate=True))
        options |= dict(cache_implementation="static", disable_compile=how == "static") if how in ("static", "compiled") else {}
    assert torch.equal(found[0].sequences, found[1].sequences.cpu())
    expected, actual = (torch.stack(each.logits).cpu() for each in found)
    check("logits", distance(actual, expected), 1e-4)


@pytest.mark.parametrize(("name", "mask"), FLEX)
@torch._dynamo.config.patch(disable=not ON_GPU)
def test_g4_flex_attention(name, mask, check):
    """It equals a dense bias, on a GPU with gradients. In bfloat16, its error isn't larger."""
    dense, given = patched(larger(MASKS[mask]), name).to(DEVICE), texts(2, LENGTH, mask != "none" and "right")
    flex = copy.deepcopy(dense)
    flex.set_attn_implementation("flex_attention")
    compare(check, flex, dense, given, training=ON_GPU)
    exact = run(copy.deepcopy(dense).bfloat16().double(), given)[0]
    by_flex, by_mask = (distance(run(each.bfloat16(), given)[0], exact) for each in (flex, dense))
    check("bf16", by_flex, 1.2 * by_mask)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_g4_memory(name, check):
    """A training step of 8,192 tokens with flex attention needs at most a quarter of the memory of a dense bias."""
    length, peaks = 8192 if ON_GPU else 64, [0]
    model, given = patched(larger("bert", length), name).to(DEVICE, torch.bfloat16), texts(1, length, None).to(DEVICE)
    for attention in ["flex_attention"] * 2 + ["sdpa"] if ON_GPU else []:  # The first run compiles.
        model.set_attn_implementation(attention)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(**given).last_hidden_state.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    check("flex", peaks[-2:][0], peaks[-1] / 4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["sinusoidal", "rope", "alibi", "t5", "shaw"])
def test_g5_compilation(name, training, check):
    """One graph, compiled at most once more for other lengths, equals eager code."""
    counters.clear()
    model = patched(larger({"rope": "llama", "alibi": "gpt2"}.get(name, "bert")), name, max_length=LENGTH).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for length in (LENGTH, LENGTH // 2, LENGTH // 3):
        compare(check, compiled, model, texts(2, length), str(length), training)
    check("recompilations", counters["stats"]["unique_graphs"] - 1, 1)


@pytest.mark.parametrize("how", ["checkpointed", "checkpointed, reentrant", "sharded"])
@pytest.mark.parametrize("name", TRAINED)
def test_g8_training(name, how, request, check):
    """Gradient checkpointing with dropout, and FSDP2 with one process."""
    model = patched(larger("bert"), name).to(DEVICE).train(how != "sharded")
    other = copy.deepcopy(model)
    if how == "sharded":
        torch.distributed.init_process_group(BACKEND, store=torch.distributed.HashStore(), rank=0, world_size=1)
        request.addfinalizer(torch.distributed.destroy_process_group)
        for each in (*other.encoder.layer, other):
            fsdp.fully_shard(each, mesh=torch.distributed.init_device_mesh(DEVICE, (1,)))
    else:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the first since Transformers 5.23
        next(getattr(other, each) for each in names if hasattr(other, each))({"use_reentrant": how.endswith("reentrant")})
        assert other.is_gradient_checkpointing and model.config.attention_probs_dropout_prob
    compare(check, other, model, texts(2, LENGTH), training=True)


def test_g8_launcher(tmp_path, check):
    """Training under `accelerate launch` in bf16 reduces the loss. A resumed run has the same losses."""
    flags = "--num_processes 1 --num_machines 1 --dynamo_backend no --mixed_precision bf16" + " --cpu" * (not ON_GPU)
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), __file__, str(tmp_path)]
    said = [subprocess.check_output([*command, *more]).splitlines()[-1].split() for more in ([], ["resume"])]
    first, second = (torch.tensor([*map(float, each)]) for each in said)
    check("loss", first[-1], 0.75 * first[0])
    check("resumed", (second - first[10:]).abs().max(), 0.01 * first[0])


def train(folder, resume=None):
    """Print the losses of 20 steps, or of the last ten if a run is resumed."""
    torch.manual_seed(0)
    accelerator, losses = Accelerator(), []
    model = tiny.randomized(transformers.BertForMaskedLM(tiny.config_of("bert")))
    model = patched(model, "sinusoidal+rope+t5").train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(10 if resume else 0, 20):
        if step == 10:
            (accelerator.load_state if resume else accelerator.save_state)(folder)
        ids = torch.randint(3, 61, (16, 24), generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        losses.append(model(input_ids=ids, labels=ids).loss)
        accelerator.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    print(*torch.stack(losses).tolist())


if __name__ == "__main__":
    train(*sys.argv[1:])
