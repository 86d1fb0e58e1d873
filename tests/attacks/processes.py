"""Models in other processes: sent, loaded, shared, forked in the middle of a forward pass, trained by several ranks.

Each gives there what it gives here, and what an oracle gives that shares nothing with it.
"""

import copy
import functools
import io
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from transformers import AutoModel

from attacks.cases import Case, Comparison, Settings, elsewhere, new_folder, quiet
from attacks.own_kinds import Reference
from attacks.subjects import Subject, subject, tokens

ENCODINGS = ("alibi", "rope", "sinusoidal", "shaw", "t5", "learned", "learned+shaw", Reference.type)
HOSTS = ("bert", "gpt2")
METHODS = ("fork", "spawn", "forkserver")
SLOW = ("learned+shaw", Reference.type)
"""Those sent to processes which start anew, and import everything."""
SCRIPTS = Path(__file__).parent.parent
TEXTS = [tokens(length, length) for length in (9, 17, 5, 23)]
MAIN = """
import multiprocessing, sys, torch
from concurrent.futures import ProcessPoolExecutor
import hf_posenc
from attacks.subjects import stock, tokens

class Mine(hf_posenc.PositionEncoding, type="attack-main"):
    def distance_bias(self, distance):
        return -distance.abs()[None].float()

def answer(model, ids):
    with torch.no_grad():
        return model(ids[None])[0][0]

if __name__ == "__main__":
    pairs = []
    for host in ("bert", "gpt2"):
        model = hf_posenc.patch(stock(host), "attack-main")
        with ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[1])) as pool:
            pairs.append((pool.submit(answer, model, tokens(9)).result(), answer(model, tokens(9))))
    torch.save(pairs, sys.argv[2])
"""
"""An encoding that is defined in the script itself."""
REMOTE = """
import multiprocessing, sys, torch
from concurrent.futures import ProcessPoolExecutor
sys.modules["hf_posenc"] = None
from transformers import AutoModel

def answer(model, ids):
    with torch.no_grad():
        return type(model).__module__, model(ids[None])[0][0]

if __name__ == "__main__":
    ids, results = torch.load(sys.argv[2]), {}
    with ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[1])) as pool:
        for folder in sys.argv[3:]:
            try:
                model = AutoModel.from_pretrained(folder, trust_remote_code=True)
                module, results[folder] = pool.submit(answer, model, ids).result()
                assert module.startswith("transformers_modules"), module
            except Exception as error:
                results[folder] = f"{type(error).__name__}: {error}"
    torch.save(results, sys.argv[2])
"""
"""Models that run the code which came with them, sent to a process that can't import hf-posenc either."""


def cases(settings: Settings) -> Iterator[Case]:
    encodings = tuple(name for name in ENCODINGS if name in settings.encodings or name == Reference.type)
    attacks: dict[str, Any] = {
        **{f"an argument, {method}": functools.partial(argument, method) for method in METHODS},
        **{f"a queue, {method}": functools.partial(through_queue, method) for method in METHODS},
        **{f"shared memory, {method}": functools.partial(shared, method) for method in METHODS},
        **{f"from a directory, {method}": functools.partial(directory, method) for method in METHODS},
        **{f"DataLoader's workers, {method}": functools.partial(collated, method) for method in METHODS},
        "datasets.map": mapped,
        "joblib": in_joblib,
        "fork within a forward pass": forked_within,
        "torch.save": saved,
        "deepcopy and pickle": lambda it: compared(it, lambda texts: elsewhere(answers, copy.deepcopy(it.model), texts)),
    }
    for host in HOSTS:
        for encoding in encodings:
            for attack, run in attacks.items():
                if ("spawn" in attack or attack == "joblib") and (host != "bert" or encoding not in SLOW):
                    continue
                yield Case(attack, host, encoding, functools.partial(on, run, host, encoding), limit=120)
            yield Case("two ranks", host, encoding, functools.partial(by_ranks, encodings, host, encoding), limit=300)
    for method in METHODS:
        for encoding in encodings:
            yield Case(
                f"code of its own, {method}",
                "bert",
                encoding,
                functools.partial(remote, encodings, method, encoding),
                limit=300,
            )
        yield Case(f"a class of __main__, {method}", "bert, gpt2", "own", functools.partial(in_main, method), limit=120)


def on(run: Callable[[Subject], Iterator[Comparison]], host: str, encoding: str) -> Iterator[Comparison]:
    return run(subject(host, encoding))


@torch.no_grad()
def answers(model: Any, texts: list[Tensor]) -> list[Tensor]:
    torch.set_num_threads(1)
    return [model(text[None])[0][0] for text in texts]


def compared(it: Subject, call: Callable[[list[Tensor]], list[Tensor]]) -> Iterator[Comparison]:
    """What a call gives for the texts is what the model gave before, what it gives afterwards, and what the oracle gives."""
    before, found = answers(it.model, TEXTS), call(TEXTS)
    for there, here, again, text in zip(found, before, answers(it.model, TEXTS), TEXTS, strict=True):
        yield there, here
        yield there, it.expected(text)
        yield torch.equal(again, here), True


def reply(connection: Any, function: Callable[..., Any], *given: Any) -> None:
    quiet()
    try:
        connection.send(("result", [each.numpy() for each in function(*given)]))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))


def context_of(method: str) -> Any:
    """How processes are started. A server of forks imports this module once, for all of them."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        os.environ["PYTHONPATH"] = os.pathsep.join({str(SCRIPTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)} - {""})
        context.set_forkserver_preload(["attacks.processes"])
    return context


def in_child(method: str, function: Callable[..., list[Tensor]], *given: Any) -> list[Tensor]:
    """The result of a module's function in a child of this process."""
    context = context_of(method)
    here, there = context.Pipe()
    child = context.Process(target=reply, args=(there, function, *given), daemon=True)
    child.start()
    there.close()
    try:
        kind, result = here.recv()
    finally:
        child.kill()
        child.join()
    if kind == "error":
        raise RuntimeError(result)
    return [torch.from_numpy(each) for each in result]


def argument(method: str, it: Subject) -> Iterator[Comparison]:
    yield from compared(it, functools.partial(in_child, method, answers, it.model))


def from_queue(queue: Any, texts: list[Tensor]) -> list[Tensor]:
    return answers(queue.get(), texts)


def through_queue(method: str, it: Subject) -> Iterator[Comparison]:
    queue = context_of(method).Queue()
    queue.put(it.model)
    yield from compared(it, functools.partial(in_child, method, from_queue, queue))


def doubled(model: Any, texts: list[Tensor]) -> list[Tensor]:
    before = answers(model, texts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return [*before, *answers(model, texts)]


def shared(method: str, it: Subject) -> Iterator[Comparison]:
    """Parameters in shared memory are one: what a child makes of them is here, too."""
    expected = doubled(copy.deepcopy(it.model), TEXTS)
    for there, here in zip(in_child(method, doubled, it.model.share_memory(), TEXTS), expected, strict=True):
        yield there, here
    for after, here in zip(answers(it.model, TEXTS), expected[len(TEXTS) :], strict=True):
        yield after, here


def loaded(folder: str, texts: list[Tensor]) -> list[Tensor]:
    return answers(AutoModel.from_pretrained(folder), texts)


def directory(method: str, it: Subject) -> Iterator[Comparison]:
    it.model.save_pretrained(folder := new_folder())
    yield from compared(it, functools.partial(in_child, method, loaded, folder))


class Collate:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, texts: list[Tensor]) -> Tensor:
        return answers(self.model, texts)[0]


def collated(method: str, it: Subject) -> Iterator[Comparison]:
    texts: Any = TEXTS
    loader = DataLoader(
        texts, num_workers=2, collate_fn=Collate(it.model), multiprocessing_context=context_of(method), timeout=60
    )
    yield from compared(it, lambda _: list(loader))


def mapped(it: Subject) -> Iterator[Comparison]:
    datasets.disable_progress_bars()
    data: Any = datasets.Dataset.from_dict({"ids": [text.tolist() for text in TEXTS]})

    def add(row: dict[str, Any]) -> dict[str, Any]:
        return {"output": answers(it.model, [torch.tensor(row["ids"])])[0].tolist()}

    yield from compared(it, lambda _: [torch.tensor(row["output"]) for row in data.map(add, num_proc=2)])


def in_joblib(it: Subject) -> Iterator[Comparison]:
    calls = (joblib.delayed(answers)(it.model, [text]) for text in TEXTS)
    try:
        yield from compared(it, lambda _: [found for (found,) in joblib.Parallel(2)(calls)])
    finally:
        get_reusable_executor().shutdown(kill_workers=True)  # which this process would wait for at its end


def forked_within(it: Subject) -> Iterator[Comparison]:
    """The child has no part in the forward pass in which another thread was when it was forked."""
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            go.wait(60)

    layer = next(module for name, module in it.model.named_modules() if name.endswith((".layer.1", ".h.1", "h.1")))
    handle, outer = layer.register_forward_pre_hook(wait), []
    thread = threading.Thread(target=lambda: outer.extend(answers(it.model, TEXTS[:1])))
    thread.start()
    inside.wait(60)
    yield from list(compared(it, functools.partial(in_child, "fork", answers, it.model)))
    go.set()
    thread.join()
    handle.remove()
    yield outer[0], it.expected(TEXTS[0])


def restored(content: bytes, texts: list[Tensor]) -> list[Tensor]:
    return answers(torch.load(io.BytesIO(content), weights_only=False), texts)


def saved(it: Subject) -> Iterator[Comparison]:
    """The whole model by pickle; its weights without; and without, the whole model is refused."""
    torch.save(it.model, whole := io.BytesIO())
    yield from compared(it, functools.partial(elsewhere, restored, whole.getvalue()))
    torch.save(it.model.state_dict(), weights := io.BytesIO())
    twin = AutoModel.from_config(copy.deepcopy(it.model.config)).eval()
    weights.seek(0)
    twin.load_state_dict(torch.load(weights, weights_only=True))
    yield from compared(it, functools.partial(answers, twin))
    whole.seek(0)
    try:
        torch.load(whole, weights_only=True)
        yield "loaded", "refused"
    except Exception as error:
        yield "weights_only" in str(error), True


def gradients(model: Any, texts: list[Tensor]) -> Tensor:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    (sum(model(text[None])[0].square().mean() for text in texts) / len(texts)).backward()
    inner = getattr(model, "module", model)
    return torch.cat([value.grad.flatten() for _, value in sorted(inner.named_parameters()) if value.grad is not None])


def rank_of_two(rank: int, folder: str, models: dict[tuple[str, str], Any]) -> None:
    quiet()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found: dict[tuple[str, str], Any] = {}
    for name, model in models.items():
        try:
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
            found[name] = gradients(wrapped, [TEXTS[rank]])
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    distributed.barrier()
    os._exit(0)  # gloo's own end can wait forever


@functools.cache
def ranks(encodings: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    models = {(host, encoding): subject(host, encoding).model for host in HOSTS for encoding in encodings}
    torch.multiprocessing.spawn(rank_of_two, (folder := new_folder(), models), nprocs=2)
    return torch.load(Path(folder, "found.pt"))


def by_ranks(encodings: tuple[str, ...], host: str, encoding: str) -> Iterator[Comparison]:
    """Gradients of two ranks with a text each, and of one with both, in a model that shares nothing with theirs."""
    found = ranks(encodings)[host, encoding]
    if isinstance(found, str):
        raise RuntimeError(found)
    yield found, gradients(subject(host, encoding).model, TEXTS[:2])


def started(script: str, *arguments: object, path: str) -> None:
    file = Path(new_folder(), "script.py")
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": path, "HF_MODULES_CACHE": new_folder()}
    command = [sys.executable, str(file), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2])


@functools.cache
def remotes(encodings: tuple[str, ...], method: str) -> dict[str, Any]:
    file, folders = Path(new_folder(), "ids.pt"), {}
    for encoding in encodings:
        subject("bert", encoding).model.save_pretrained(folder := new_folder())
        folders[folder] = encoding
    torch.save(TEXTS[0], file)
    started(REMOTE, method, file, *folders, path="")
    return {folders[folder]: result for folder, result in torch.load(file).items()}


def remote(encodings: tuple[str, ...], method: str, encoding: str) -> Iterator[Comparison]:
    found = remotes(encodings, method)[encoding]
    if isinstance(found, str):
        raise RuntimeError(found)
    yield found, subject("bert", encoding).expected(TEXTS[0])


def in_main(method: str) -> Iterator[Comparison]:
    started(MAIN, method, file := Path(new_folder(), "pairs.pt"), path=f"{SCRIPTS.parent}{os.pathsep}{SCRIPTS}")
    yield from torch.load(file)
