"""What the processes of `generations` run: one generation makes checkpoints, another process uses those of several at once.

python generations_worker.py make FOLDER ENCODING …     # with the hf_posenc on the path
python generations_worker.py use FOLDER STEP …          # steps: generations to load, or "package", to import hf_posenc
"""

import copy
import io
import itertools
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

AUTO: dict[str, Any] = {"bert": AutoModel, "gpt2": AutoModelForCausalLM}
IDS = torch.arange(24).view(2, 12) * 7 % 50 + 3
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0) | torch.tensor([[1], [0]])
"""The second row is padded on the left."""
Pairs = Iterator[tuple[Any, Any]]


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK)[0][MASK.bool()]


def decoded(model: Any, cache: Any = None) -> Tensor:
    """The logits of a left-padded batch, of which a part is in the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        for part in (slice(0, 7), slice(7, 9), slice(9, 12)):
            logits = model(IDS[:, part], attention_mask=MASK[:, : part.stop], past_key_values=cache)[0]
    return logits


def gradients(model: Any) -> Tensor:
    for module in model.modules():
        module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
    model.train()(IDS)[0].square().mean().backward()
    found = torch.cat([value.grad.flatten() for _, value in sorted(model.named_parameters()) if value.grad is not None])
    model.zero_grad()
    model.eval()
    return found


def checkpointed(model: Any, reentrant: bool) -> Tensor:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    try:
        return gradients(model)
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def recorded(model: Any) -> dict[str, Tensor]:
    """All that a model computes."""
    found = {"output": output(model), "gradients": gradients(copy.deepcopy(model))}
    return found | ({"decoded": decoded(model)} if hasattr(model, "lm_head") else {})


def make(folder: Path, *encodings: str) -> None:
    from attacks.subjects import patched, stock

    if "attack-window" in encodings:
        sys.path.insert(0, str(folder))
        __import__("own_window")
    for host, encoding in itertools.product(AUTO, encodings):
        model: Any = patched(stock(host, AUTO[host]), encoding)
        model.config._attn_implementation = "sdpa"
        model.save_pretrained(folder / host / encoding)
        torch.save(recorded(model), folder / host / encoding / "recorded.pt")


def load(path: Path) -> Any:
    return AUTO[path.parent.name].from_pretrained(path, trust_remote_code=True)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".pt"}


class Two:
    """A model of one generation, and one of another with the same encoding, with what each gave where it was made."""

    def __init__(self, paths: list[Path], models: dict[Path, Any]) -> None:
        self.paths, self.models = paths, [models[path] for path in paths]
        self.expected: list[dict[str, Any]] = [torch.load(path / "recorded.pt") for path in paths]

    def each(self, change: Callable[[Any], Any]) -> Pairs:
        for model, expected in zip(self.models, self.expected, strict=True):
            yield output(change(model)), expected["output"]

    def outputs(self) -> Pairs:
        yield from [*self.each(lambda model: model), *self.each(lambda model: model)]

    def copies(self) -> Pairs:
        yield from self.each(copy.deepcopy)
        yield from self.each(lambda model: pickle.loads(pickle.dumps(model)))
        yield from self.each(through_torch)

    def implementations(self) -> Pairs:
        for name in ("eager", "sdpa"):
            for model in self.models:
                model.set_attn_implementation(name)
            yield from self.outputs()

    def nested(self) -> Pairs:
        """Each is called within the other's forward pass."""
        for model, inner in (self.models, self.models[::-1]):
            index, seen = self.models.index(inner), list[Tensor]()
            layer = next(module for name, module in model.named_modules() if name.endswith((".layer.1", ".h.1")))
            handle = layer.register_forward_pre_hook(lambda *_, inner=inner, seen=seen: seen.append(output(inner)))
            yield output(model), self.expected[1 - index]["output"]
            handle.remove()
            yield seen[0], self.expected[index]["output"]

    def threads(self) -> Pairs:
        gate = threading.Barrier(4)

        def run(index: int) -> Tensor:
            gate.wait(10)
            return output(self.models[index % 2])

        with ThreadPoolExecutor(4) as pool:
            for index, found in enumerate(pool.map(run, range(12))):
                yield found, self.expected[index % 2]["output"]

    def checkpointing(self) -> Pairs:
        for reentrant in (True, False):
            for model, expected in zip(self.models, self.expected, strict=True):
                yield checkpointed(copy.deepcopy(model), reentrant), expected["gradients"]

    def decoding(self) -> Pairs:
        """Also with the cache of the other, copied and emptied."""
        for model, expected in zip(self.models, self.expected, strict=True):
            if "decoded" in expected:
                yield decoded(model), expected["decoded"]
                for other in self.models:
                    decoded(other, cache := DynamicCache(config=other.config))
                    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
                    cache.crop(-12)
                    yield decoded(model, cache), expected["decoded"]

    def saved_again(self) -> Pairs:
        """Into new directories, and into one after the other's."""
        with tempfile.TemporaryDirectory() as folder:
            for model, path, expected in [*zip(self.models, self.paths, self.expected, strict=True)] * 2:
                for place in (Path(folder, path.parts[-3], path.parent.name, "model"), Path(folder, path.parent.name, "model")):
                    model.save_pretrained(place)
                    kept = files(place)
                    if path.parts[-3] == "commit":  # whose code leaves that of the model before it
                        kept = {name: content for name, content in kept.items() if name in files(path)}
                    yield kept, files(path)
                    yield output(loaded := load(place)), expected["output"]
                    yield type(loaded).__module__.rpartition(".")[2], type(model).__module__.rpartition(".")[2]

    def configs(self) -> Pairs:
        for model, path, expected in zip(self.models, self.paths, self.expected, strict=True):
            config = AutoConfig.from_pretrained(path, trust_remote_code=True)
            yield str(type(config)), str(type(model.config))
            made = AUTO[path.parent.name].from_config(config, trust_remote_code=True).eval()
            yield str(type(made)), str(type(model))
            made.load_state_dict(model.state_dict())
            yield output(made), expected["output"]

    def functions(self) -> Pairs:
        """The names of attention functions, and the code behind them, are each generation's own."""
        for model in self.models:
            owner = next(cls.__module__ for cls in type(model).__mro__ if "original_class" in vars(cls)).rpartition(".")[0]
            views = [
                module.config for module in model.modules() if type(getattr(module, "config", None)).__name__.endswith("View")
            ]
            for name in {view._attn_implementation for view in views}:
                yield ALL_ATTENTION_FUNCTIONS[str(name)].func.__module__.rpartition(".")[0], owner
            yield bool(views), True

    def package(self) -> Pairs:
        """Beside hf_posenc, which loads the same checkpoints and refuses models that run their own code."""
        import hf_posenc

        calls: dict[str, Any] = {
            "patch": lambda model: hf_posenc.patch(model, "alibi"),
            "unpatch": hf_posenc.unpatch,
            "extend": lambda model: hf_posenc.extend(model, max_length=99),
            "convert": lambda model: hf_posenc.convert(model, "alibi", texts=[{"input_ids": IDS[:1]}] * 30),
        }
        for model, path in zip(self.models, self.paths, strict=True):
            for name, call in calls.items():
                try:
                    call(model)
                    yield name, "an error"
                except ValueError as error:
                    yield ("load it again" in str(error) or f"{name}: {error}"), True
            yield str(hf_posenc.inspect(model)), str(hf_posenc.inspect(found := load(path)))
            yield type(found).__module__, "hf_posenc.modeling"
            if path.parts[-3] == "new":
                yield output(found), torch.load(path / "recorded.pt")["output"]
        yield from self.outputs()


def through_torch(model: Any) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def use(folder: Path, *steps: str) -> None:
    encodings = sorted(path.name for path in (folder / "new" / "bert").iterdir())
    models: dict[Path, Any] = {}
    paths: list[Path] = []
    for step in steps:
        if step == "package":
            sys.path.insert(0, str(folder / "new"))
            __import__("hf_posenc")
            __import__("own_window")
        else:
            paths += [folder / step / host / encoding for host, encoding in itertools.product(AUTO, encodings)]
            models |= {path: load(path) for path in paths[-len(AUTO) * len(encodings) :]}
    attacks = [name for name in vars(Two) if name[0] != "_" and name != "each"]
    alone = {"package"} if "package" not in steps else {"saved_again", "configs"}
    results: dict[tuple[str, str, str], Any] = {}
    for attack, host, encoding in itertools.product(attacks, AUTO, encodings):
        if attack not in alone:
            two = Two([path for path in paths if path.parts[-2:] == (host, encoding)], models)
            try:
                results[attack, host, encoding] = list(getattr(two, attack)())
            except Exception as error:
                results[attack, host, encoding] = f"{type(error).__name__}: {error}"
    torch.save(results, folder / ("-".join(steps) + ".pt"))


if __name__ == "__main__":
    {"make": make, "use": use}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
