"""Compares encodings with the copies of their code: the same calls here, and in a new process that has the copies alone.

Run as a script, this file is that process. It therefore imports nothing of the package.
"""

import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers

LENGTH, FAR = 24, 2**16
"""Tokens in a probe, and the distance that they reach where nothing limits it."""
LARGE = 2**26
"""Elements of an encoding from which on it is probed with a shorter max_length."""
TIMEOUT = 180
"""Seconds for the other process, which takes about four."""
ENVIRONMENT = re.compile(
    r"(PATH|HOME|USERPROFILE|SYSTEMROOT|TE?MP|TMPDIR|LANG|LC_\w+)|(LD|DYLD|OMP|MKL|KMP|OPENBLAS|ONEDNN|DNNL|TORCH|ATEN|CUDA)_\w+"
)
"""The variables that the other process gets: those that torch needs, none that a user's code could depend on."""
START = "import json, runpy, sys; sys.path += json.loads(sys.argv[3]); runpy.run_path(sys.argv[1], run_name='__main__')"
"""The other process has the installed packages on its path, and nothing else: neither .pth files nor the user's folders."""


def difference(
    files: dict[str, str], encodings: Iterable[dict[str, Any]], base: ModuleType, blocked: Iterable[str]
) -> str | None:
    """Why the code in `files` doesn't give the same encodings as this process, in words; None if it does.

    encodings: of each, its type, options and geometry. base: the module of PositionEncoding.
    blocked: top-level modules which the code must do without.
    """
    job = json.dumps({"encodings": [*encodings], "blocked": sorted(blocked), "threads": torch.get_num_threads()})
    jobs = json.loads(job)["encodings"]
    here = [[observe(base, cls, each, seed=1) for cls in _definitions(base, each["type"])] for each in jobs]
    for each, (seen, *_) in zip(jobs, here, strict=True):
        for verb in ("__init__", *seen["acts by"].split()):
            said = [answer for call, answer in seen.items() if call.startswith(verb)]
            if all(answer.startswith("raises ") for answer in said):
                return f"{verb} of {each['type']!r} {', '.join({*said}) or 'is not reached'} when it is tried"
    there = _elsewhere(tuple(files.items()), job)
    if isinstance(there, str):
        return there
    apart = []
    for each, definitions, theirs in zip(jobs, here, there, strict=True):
        calls = [call for ours in definitions for call in {**ours, **theirs} if ours.get(call) != theirs.get(call)]
        apart += [f"{each['type']!r} ({_shown(calls[0], theirs)})"] if calls else []
    if apart:
        return (
            f"the saved code differs from what runs here in {', '.join(apart)}: the file was edited after it was imported, or "
            "it depends on something else, such as values set from outside, the environment, the time or random numbers"
        )
    return None


def _definitions(base: ModuleType, name: str) -> list[Any]:
    """The class of an encoding, and those it has replaced (by importlib.reload) while there are models of them."""
    registered = base.PositionEncoding.registered[name]

    def all_subclasses(cls: Any) -> Iterator[Any]:
        for each in cls.__subclasses__():
            yield each
            yield from all_subclasses(each)

    def replaced() -> list[Any]:
        named = (registered.__module__, registered.__qualname__)
        alike = (each for each in all_subclasses(base.PositionEncoding) if (each.__module__, each.__qualname__) == named)
        return [each for each in alike if each.type == name and each is not registered]

    if replaced():
        gc.collect()
    return [registered, *replaced()]


def _shown(call: str, seen: dict[str, str]) -> str:
    said = seen.get(call, "isn't there")
    return f"{call}: it {said}" if "raises " in said or call not in seen else call


@functools.lru_cache(maxsize=32)
def _elsewhere(files: tuple[tuple[str, str], ...], job: str) -> list[dict[str, str]] | str:
    """What `observe` returns for each encoding in a process that has these files alone, or why it can't."""
    try:
        with tempfile.TemporaryDirectory(prefix="posenc-") as name:
            folder = Path(name)
            (folder / "code").mkdir()
            for file, text in files:
                (folder / "code" / file).write_text(text, encoding="utf-8")
            (folder / "job.json").write_text(job)
            status, said = _run(folder)
            if not (folder / "seen.json").exists():
                return f"the code ends the process that loads it, with status {status} ({said})"
            seen: list[dict[str, str]] | str = json.loads((folder / "seen.json").read_text())
    except (OSError, subprocess.TimeoutExpired) as error:  # not cached: another time it may work
        raise ValueError(f"the code can't be tried in a process of its own ({error})") from error
    if isinstance(seen, str):
        # Transformers advises to install what is missing, though it may be the user's own.
        said = re.sub(r"\.? Run `pip install .*", "", seen.replace(name, ""), flags=re.DOTALL)
        return (
            f"the code doesn't load by itself: {said}. It may open no files, and import installed packages, "
            "hf_posenc.PositionEncoding, hf_posenc.encodings, and files beside it (from .helpers import …)"
        )
    return seen


def _run(folder: Path) -> tuple[int, str]:
    """The exit status of the other process, and the last line that it printed."""
    path = [entry for entry in sys.path if {"site-packages", "dist-packages"} & {*Path(entry).parts}]
    path += [str(Path(package.__file__ or "").parents[1]) for package in (torch, transformers)]
    command = [sys.executable, "-I", "-S", "-c", START, __file__, str(folder), json.dumps(path)]
    environment = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name.upper())}
    environment |= {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    with (folder / "said").open("wb") as said:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        status = subprocess.run(command, cwd=folder, env=environment, timeout=TIMEOUT, **pipes).returncode
    return status, (folder / "said").read_text(errors="replace").strip().rpartition("\n")[2]


def observe(base: ModuleType, cls: Any, job: dict[str, Any], seed: int) -> dict[str, str]:
    """What an encoding does: name of a call -> a digest of the result.

    base: the module of PositionEncoding, here or a copy. seed: of what must not matter, the start values of weights that a
    checkpoint replaces.
    """
    seen = {"class": cls.__qualname__, "acts by": " ".join(cls.mechanisms()), "per_layer": str(cls.per_layer)}
    for is_causal in (False, True):
        geometry = base.Geometry(**{**job["geometry"], "is_causal": is_causal})
        where = "causal" if is_causal else "symmetric"
        with _alone():
            try:
                if _size(cls, geometry, job["options"]) > LARGE and geometry.max_length:
                    geometry = dataclasses.replace(geometry, max_length=min(geometry.max_length, FAR))
                _seed(0)
                module = _made(base, cls, geometry, job["options"])
                seen |= {f"__init__, {name}, {where}": digest(value) for name, value in _state(module).items()}
                module.reset_parameters()
                seen |= {f"reset_parameters, {name}, {where}": digest(value) for name, value in _state(module).items()}
                _seed(seed)
                module = _made(base, cls, geometry, job["options"])
                _draw(module)
                seen[f"__init__, {where}"] = f"needs_max_length {cls.needs_max_length(geometry)}"
            except Exception as error:
                seen[f"__init__, {where}"] = _raised(error)
                continue
            for training in (False, True):
                module.train(training)
                for name, call in _calls(base, module, geometry):
                    _seed(0)
                    try:
                        said = digest(call())
                    except Exception as error:
                        said = _raised(error)
                    seen[f"{name}, {where}{', in training' if training else ''}"] = said
    return seen


def _made(base: ModuleType, cls: Any, geometry: Any, options: dict[str, Any]) -> Any:
    """An encoding as a model gets it, by the module beside `base` which builds them."""
    building = sys.modules[re.sub("base$", "construction", base.__name__)]
    return building.with_values(lambda: [cls(geometry, **options)])[0]


def _calls(base: ModuleType, module: Any, geometry: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The verbs that a module overrides, on fixed inputs: new tokens at once, far apart, one by one behind a cache."""
    limit, verbs = min(geometry.max_length or FAR, FAR), module.mechanisms()
    length = min(LENGTH, limit)
    near, far = torch.arange(length), torch.arange(length) * ((limit - 1) // max(length - 1, 1))
    if "distance_bias" in verbs:
        yield "distance_bias", partial(module.distance_bias, torch.arange(1 - limit, limit))
    if module.has_distance_vectors():
        yield "distance_vectors", partial(module.distance_vectors, torch.arange(1 - limit, limit))
    generator = torch.Generator().manual_seed(3)
    heads, groups, width = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim
    for name, positions, past in (
        ("of new tokens", near[None], 0),
        ("far apart", torch.stack([far, far.flip(0)]), 0),
        ("behind a cache", near[None, -1:], length - 1),
    ):
        keys_at = positions if name == "far apart" else None
        context = base.PositionContext(module, positions, past, torch.zeros(1, 1, dtype=torch.long), keys_at)
        new, keys = positions.shape[1], positions.shape[1] + past
        query = torch.randn(2, heads, new, width, generator=generator)
        if module.axes > 1:
            context.cells = torch.stack([positions // 7**power % 7 for power in reversed(range(module.axes))], dim=-1)
        if "embed" in verbs:
            yield f"embed {name}", partial(module.embed, context.coordinates(module.axes))
        if "rotate" in verbs:
            key = torch.randn(2, groups or heads, new, width, generator=generator)
            yield f"rotate {name}", partial(module.rotate, query, key, context)
        if "score_bias" in verbs:
            key = torch.randn(2, heads, keys, width, generator=generator)
            yield f"score_bias {name}", partial(module.score_bias, query, key, context)
        if "value_bias" in verbs:
            weights = torch.randn(2, heads, new, keys, generator=generator).softmax(-1)
            yield f"value_bias {name}", partial(module.value_bias, weights, context)


def _raised(error: Exception) -> str:
    return f"raises {type(error).__name__}: {error}"[:200]


def digest(value: Any) -> str:
    """Dtype, shape and bits of a tensor or of several; all NaN are one."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(digest, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)[:100]
    value = value.detach()
    if value.is_floating_point():
        value = value.masked_fill(value != value, torch.nan)
    bits = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(itertools.chain(module.named_parameters(), module.named_buffers()))


def _draw(module: torch.nn.Module) -> None:
    """Numbers from -0.5 to 1.5 in place of all that a checkpoint holds."""
    generator = torch.Generator().manual_seed(2)
    for value in module.state_dict().values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 0.5)


def _size(cls: Any, geometry: Any, options: dict[str, Any]) -> int:
    try:
        with torch.device("meta"):
            return sum(value.numel() for value in _state(cls(geometry, **options)).values())
    except (RuntimeError, NotImplementedError):  # of a class that reads values of tensors
        return 0


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds GPUs, too


@contextmanager
def _alone() -> Iterator[None]:
    """Torch's defaults, and the state of all random numbers as it was."""
    drawn, dtype = (random.getstate(), np.random.get_state()), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(random.setstate, drawn[0])
        stack.callback(np.random.set_state, drawn[1])
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for each in (torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False)):
            stack.enter_context(each)
        yield


class _Blocked(MetaPathFinder):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    sys.meta_path.insert(0, _Blocked(job["blocked"]))
    seen: list[dict[str, str]] | str
    try:
        from transformers.dynamic_module_utils import check_imports, get_class_from_dynamic_module

        for file in (folder / "code").glob("*.py"):
            check_imports(file)  # Transformers checks them all when it loads from the Hub
        entry = get_class_from_dynamic_module("modeling_posenc.check", folder / "code").__module__
        base = sys.modules[f"{entry.rpartition('.')[0]}.posenc_encodings_base"]
        known = base.PositionEncoding.registered
        for each in job["encodings"]:
            if each["type"] not in known:
                raise ValueError(f"it defines no encoding {each['type']!r}")
        seen = [observe(base, known[each["type"]], each, seed=2) for each in job["encodings"]]
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    _main(Path(sys.argv[2]))
