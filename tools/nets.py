"""Keep what the code does, and compare other code with it.

    python -m tools.nets outputs --commit a9e84f8b --save outputs.jsonl
    python -m tools.nets outputs --against outputs.jsonl
    python -m tools.nets families --against families.jsonl --only "^(bert|llama)$"

`outputs`: outputs and gradients of the pairs of `tests/cover.py`, in float32. All parameters are random. Those of encodings
depend only on their keys, as `canonical_key` maps them. A tensor is kept as its norm and its projections on random vectors.

`families`: what `patch` finds in a tiny model of each of Transformers' model types, and in the submodels that it proposes: the
original positions and the position plan, or the reason why the model isn't supported.

--commit runs this file and today's tests/ with that commit's hf_posenc, whose public API they use, and its position plans.
A file that is there is continued, if it is of the same code. Without --save, the file is in build/nets.
"""

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import hf_posenc
from tools.hosts import tiny
from tools.hosts.checks import patch, path_of
from tools.hosts.verdicts import original_encoding

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests")]  # for cover, models, and checks
PROJECTIONS, PADDING, TEXTS, CUTS = 6, 4, (5, 7), (5, 8, 9, 10)
"""Random vectors for a tensor, padding of the second row, lengths of packed texts, and where passes with a cache begin."""
TOLERANCES, SMALL, GRADIENT = (3e-6, 2e-4), 1e-3, ", gradient of "
"""The largest relative errors (eager against sdpa: 8e-7, 1e-4). Small gradients are compared with the largest one * SMALL."""


def canonical_key(key: str, encoding: str) -> str:
    """The key of an encoding's parameter in terms of all versions: without the encoding's name, but in a composition."""
    names = "|".join(hf_posenc.list_encodings())
    return key if "+" in encoding else re.sub(rf"posenc\.({names})\.", "posenc.", key)


def canonical_stack(stack: dict[str, Any]) -> dict[str, Any]:
    """A stack of a position plan in terms of all versions: path -> whether its positions are a rotation, registered, or others.

    Actions are `[name, path, options]`. For a replaced argument, the path of a component ends with it.
    """
    found = {}
    for kind, path, *options in stack.get("disable", stack.get("components", ())):
        argument = next((each["argument"] for each in options if isinstance(each, dict) and "argument" in each), "")
        group = "registered" if re.search("[Rr]egistered|FixedParameter", kind) else "other"
        group = "rotation" if re.search("[Rr]ota|SharedSinusoids|SinusoidBuffer", kind) else group
        found[f"{path}.{argument}".rstrip(".")] = group
    attentions = {name: sorted(stack.get(name, ())) for name in ("attentions", "cross_attentions")}
    return {"positions": found, "role": stack.get("role", "encoder"), **attentions}


def digest(tensor: Tensor) -> list[float]:
    values = tensor.detach().double().flatten()
    vectors = torch.randn(PROJECTIONS, len(values), generator=torch.Generator().manual_seed(len(values)), dtype=torch.double)
    return [float(f"{value:.9g}") for value in (values.norm(), *(vectors @ values))]


def fill(model: torch.nn.Module, encoding: str) -> None:
    """Draw the parameters and buffers of an encoding from N(0, 1), by key."""
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "posenc." in key and "posenc.original." not in key and tensor.is_floating_point():
            seed = int.from_bytes(hashlib.sha256(canonical_key(key, encoding).encode()).digest()[:4], "big")
            tensor.data.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))


def passes(it: Any, model: Any) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Names and functions of forward passes of a test's subject, and which tokens are padding."""
    from models import tokens

    plain, nowhere = functools.partial(it.plain, model), torch.tensor(False)
    yield "plain", plain, nowhere
    if it.kind in ("vision", "audio"):
        return
    ids = tokens()
    for side, hidden in (("left", slice(PADDING)), ("right", slice(-PADDING, None))):
        mask = torch.ones_like(ids)
        mask[1, hidden] = 0
        row, gaps = ids.masked_fill(mask == 0, it.host.sizes.get("pad_token_id") or 0), (mask == 0)[..., None]
        yield side, functools.partial(plain, row, mask), gaps
        if it.kind != "encoder":
            yield f"cache, {side}", functools.partial(it.in_pieces, model, row, CUTS, mask=mask), gaps
    if it.kind != "encoder":
        yield "cache", functools.partial(it.in_pieces, model, ids, CUTS), nowhere
    if it.kind != "encoder-decoder":
        packed = torch.cat([torch.arange(length) for length in TEXTS])[None] + it.host.offset
        yield "packed", functools.partial(plain, tokens(1, sum(TEXTS)), position_ids=packed), nowhere
        jumps = (torch.arange(11) * 2).expand(2, -1) + it.host.offset
        yield "jumps", functools.partial(plain, ids, torch.ones_like(ids), position_ids=jumps), nowhere


def outputs(pair: str) -> dict[str, Any]:
    """Name of a pass, and of a tensor -> its digest, or the error. Also the position plan."""
    import models
    from checks.registry import Subject

    it = Subject(*pair.split(" ", 1))
    original = models.stock(it.name, it.host.head)
    matrices = [(key, each) for key, each in sorted(original.named_parameters()) if each.ndim == 2 and each.requires_grad]
    chosen = dict(matrices[:: max(1, len(matrices) // 8)])
    model = hf_posenc.patch(original, it.spec, max_length=it.max_length).eval()
    fill(model, it.encoding)
    chosen |= {canonical_key(key, it.encoding): each for key, each in model.named_parameters() if "posenc." in key}
    found: dict[str, Any] = {f"stack {each['path']}": each for each in model.config.to_dict()["position_plan"]}
    for implementation in models.backends(model):
        model.set_attn_implementation(implementation)
        for name, run, gaps in passes(it, model):
            name = f"{implementation} {name}"
            try:
                with torch.no_grad():
                    found[name] = digest(run().masked_fill(gaps, 0))
                if name.endswith((" plain", "sdpa left", "eager left")):
                    model.zero_grad()
                    output = run().masked_fill(gaps, 0)
                    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
                    found[f"{name}, with gradients"] = digest(output)
                    found |= {
                        f"{name}{GRADIENT}{key}": digest(each.grad) for key, each in chosen.items() if each.grad is not None
                    }
            except Exception as error:
                found[name] = type(error).__name__
    return found


def families(kind: str) -> dict[str, Any]:
    """Submodel -> original positions and plan, or the reason of the refusal."""
    if (model := tiny.build(kind)) is None:
        return {"": "no tiny model"}
    found, waiting = dict[str, Any](), [""]
    for part in waiting:
        try:
            patched = patch(model, "none", part)
            found[f"{part}: original"] = original_encoding(model.get_submodule(path_of(model, part)))
            found |= {f"{part}: stack {each['path']}": each for each in patched.config.to_dict()["position_plan"]}
        except hf_posenc.UnsupportedModelError as error:
            found[part] = error.reason
            waiting += [each for each in error.submodels if each not in waiting]
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """What differs between two rows, with the relative error of tensors."""
    largest = max((value[0] for name, value in old.items() if GRADIENT in name and isinstance(value, list)), default=0.0)
    for name in {**old, **new}:
        one, two = (row.get(name, "missing") for row in (old, new))
        if isinstance(one, list) and isinstance(two, list):
            tolerance, floor = TOLERANCES[GRADIENT in name], SMALL * largest if GRADIENT in name else 0.0
            error = math.dist(one[1:], two[1:]) / math.sqrt(PROJECTIONS) / max(one[0], floor, 1e-9)
            if not error <= tolerance and json.dumps(one) != json.dumps(two):  # NaN equals NaN
                yield error, f"{name}: relative error {error:.1e}"
        else:
            one, two = (canonical_stack(value) if isinstance(value, dict) else value for value in (one, two))
            if one != two:
                yield math.inf, f"{name}: {one} -> {two}"


def computed(net: str, key: str) -> tuple[str, Any]:
    """A row, or an error. Runs in a process of its own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    warnings.simplefilter("ignore")
    try:
        return key, {"outputs": outputs, "families": families}[net](key)
    except Exception as error:
        return key, {"": type(error).__name__}


def code() -> dict[str, str]:
    files = sorted(Path(hf_posenc.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return {"code": digest, "torch": torch.__version__, "transformers": transformers.__version__}


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head, {row["key"]: row["found"] for row in rows}


def collect(net: str, path: Path, keys: list[str], processes: int) -> dict[str, Any]:
    """Compute the rows that a file lacks, and return all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(code()) + "\n", encoding="utf-8")
    head, rows = read(path)
    if head != code():
        sys.exit(f"{path} is of other code ({head}): delete it, or give another --save")
    waiting = [key for key in keys if key not in rows]
    with multiprocessing.get_context("spawn").Pool(processes) as pool, path.open("a", encoding="utf-8") as file:
        results = [pool.apply_async(computed, (net, key)) for key in waiting]
        for done, result in enumerate(results, 1):
            key, rows[key] = result.get()
            file.write(json.dumps({"key": key, "found": rows[key]}) + "\n")
            file.flush()
            print(f"\r{done} of {len(waiting)}", end="" if done < len(waiting) else "\n", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    import cover

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("net", choices=("outputs", "families"))
    parser.add_argument("--save", type=lambda path: Path(path).resolve(), help="file to write or continue")
    parser.add_argument("--against", type=lambda path: Path(path).resolve(), help="file to compare with")
    parser.add_argument("--commit", help="use hf_posenc of this commit")
    parser.add_argument("--only", default="", help="regular expression for pairs (`bert alibi`) or model types")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.commit:
        files = [f"--{name}={path}" for name in ("save", "against") if (path := getattr(args, name))]
        command = [sys.executable, "-m", "tools.nets", args.net, *files, f"--only={args.only}", f"--processes={args.processes}"]
        with tempfile.TemporaryDirectory(prefix="nets-") as folder:
            archive = subprocess.run(["git", "archive", args.commit, "hf_posenc"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            subprocess.run(["cp", "-r", ROOT / "tests", ROOT / "tools", folder], check=True)
            sys.exit(subprocess.run(command, cwd=folder, check=False).returncode)
    every = tiny.model_types() if args.net == "families" else [" ".join(pair) for pair in cover.cover()]
    keys = [key for key in every if re.search(args.only, key)]
    rows = collect(args.net, args.save or ROOT / "build" / "nets" / f"{args.net}-{code()['code']}.jsonl", keys, args.processes)
    if not args.against:
        return
    head, before = read(args.against)
    differing = 0
    for key in dict.fromkeys([*(key for key in before if re.search(args.only, key)), *keys]):
        found = sorted(differences(before.get(key, {}), rows.get(key, {})), reverse=True)
        differing += bool(found)
        print("".join(f"{key} (one of {len(found)}): {text}\n" for _, text in found[:5]), end="")
    print(f"{differing} of {len(keys)} differ between {head} and {code()}")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
