"""The functions that `test_adversity.py` runs in separate processes."""

import copy
import multiprocessing
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

IDS = torch.arange(20).view(2, 10) * 7 % 50 + 3


@torch.no_grad()
def answer(model, ids=IDS):
    torch.set_num_threads(1)
    return model(ids)[0]


def doubled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return answer(model)


def hold(queue):
    global _queue
    _queue = queue


def from_queue():
    return answer(_queue.get(timeout=60))


class Collate:
    """The collate function that the workers of a DataLoader call."""

    def __init__(self, model):
        self.model = model

    def __call__(self, rows):
        return answer(self.model, torch.stack(rows))


def sent(folder, method):
    """Check that models give the same outputs in other processes as in this one.

    The models are arguments, items of queues, in shared memory, or used by the workers of a DataLoader.
    """
    import transformers

    import hf_posenc  # noqa: F401

    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with ProcessPoolExecutor(1, context, hold, (queue,)) as pool:
        for path in sorted(Path(folder).iterdir()):
            model = transformers.AutoModel.from_pretrained(path)
            before = answer(model)
            assert torch.equal(pool.submit(answer, model).result(120), before), path
            queue.put(model)
            assert torch.equal(pool.submit(from_queue).result(120), before), path
            loader = torch.utils.data.DataLoader(
                IDS, 2, num_workers=1, collate_fn=Collate(model), multiprocessing_context=context, timeout=120
            )
            assert torch.equal(next(iter(loader)), before), path
            twin = copy.deepcopy(model)
            found = pool.submit(doubled, model.share_memory()).result(120)
            assert torch.equal(found, answer(model)) and torch.equal(found, doubled(twin)), path
            if method == "fork":
                forked_within(twin)
    print("equal")


def forked_within(model):
    """Check that a forked child is independent of a forward pass that another thread was running during the fork."""
    expected, inside, go, outer = answer(model), threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread() is thread:
            inside.set()
            go.wait(60)

    layer = next(each for name, each in model.named_modules() if name.endswith((".layer.1", "h.1")))
    handle = layer.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: outer.append(answer(model)))
    thread.start()
    inside.wait(60)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=lambda: found.put(answer(model).tolist()))
    child.start()
    assert torch.equal(torch.tensor(found.get()), expected)
    child.join()
    assert torch.equal(answer(model), expected)
    go.set()
    thread.join()
    handle.remove()
    assert torch.equal(outer[0], expected)


def generations(older, newer):
    """Check that two models that run their saved code can run inside each other.

    One has code of an older version, and the other has code of this version.
    """
    import bare

    bare.hide()
    from safetensors.torch import load_file
    from transformers import AutoModelForMaskedLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    models, given, expected = [], [], []
    for folder in (older, newer):
        recorded = load_file(Path(folder, "expected.safetensors"))
        models.append(AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True))
        given.append((recorded["input_ids"], recorded["attention_mask"]))
        expected.append(recorded["output"])

    def check(number, model=None):
        with torch.no_grad():
            output = (model or models[number])(*given[number])[0]
        torch.testing.assert_close(output, expected[number], rtol=1e-5, atol=1e-6)

    for implementation in ("eager", "sdpa"):
        for number, model in enumerate(models):
            model.set_attn_implementation(implementation)
            check(number)
    for number, model in enumerate(models):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check(number, copied)
        inner = []
        handle = model.bert.encoder.layer[1].register_forward_pre_hook(
            lambda *_, at=1 - number, inner=inner: inner.append(check(at))
        )
        check(number)
        handle.remove()
        assert inner
        model.save_pretrained(Path(folder).parent / f"again-{number}")
        again = AutoModelForMaskedLM.from_pretrained(Path(folder).parent / f"again-{number}", trust_remote_code=True)
        check(number, again)
    names = [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("hf_posenc_")]
    owners = [ALL_ATTENTION_FUNCTIONS[name].func.__module__.split(".") for name in names]
    assert {owner[0] for owner in owners} == {"transformers_modules"} and len({owner[2] for owner in owners}) == 2, owners
    print("equal")


def loaded(folder, without):
    """Check that the models in a directory give the recorded outputs.

    If `without` is true, they load with their saved code, without the package.
    """
    if without:
        import bare

        bare.hide()
    else:
        import hf_posenc  # noqa: F401
    import transformers

    for path in sorted(each for each in Path(folder).iterdir() if each.suffix != ".pt"):
        auto, inputs, expected = torch.load(f"{path}.pt")
        model = getattr(transformers, auto).from_pretrained(path, trust_remote_code=without or None)
        more = {"use_cache": False} if getattr(model.config, "is_decoder", False) else {}
        with torch.no_grad():
            output = model(**inputs, **more)[0]
        output = output * inputs["attention_mask"][..., None] if output.ndim == 3 else output
        assert type(model).__name__.startswith("PosEnc"), path
        torch.testing.assert_close(output, expected, rtol=0, atol=2e-5, msg=lambda text, path=path: f"{path}: {text}")
    print("equal")
