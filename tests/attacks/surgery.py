"""What is done to models between loading and calling: resized, cast, copied, tied, restored, checkpointed."""

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from attacks.cases import SAME, Case, Comparison, Settings, new_folder
from attacks.subjects import LENGTH, Subject, stock, subject, tokens

IDS = tokens(20).view(2, 10)
AUTO = {"bert": AutoModelForMaskedLM, "mpnet": AutoModelForMaskedLM, "distilbert": AutoModelForMaskedLM}
HOSTS = ("bert", "gpt2", "llama", "mpnet", "distilbert")


def cases(settings: Settings) -> Iterator[Case]:
    attacks: dict[str, Callable[[Any], Any]] = {
        "resize_position_embeddings, longer": lambda model: resized(model, LENGTH * 2),
        "resize_position_embeddings, shorter": lambda model: resized(model, LENGTH // 2),
        "resize_token_embeddings": lambda model: then(model, model.resize_token_embeddings(80, mean_resizing=False)),
        "tie_weights": lambda model: then(model, model.tie_weights()),
        "set_input_embeddings": lambda model: then(model, model.set_input_embeddings(twin(model.get_input_embeddings()))),
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "torch.save": through_torch,
        "load_state_dict": restored,
        "double and back": lambda model: model.double().float(),
        "to the meta device and filled": to_empty,
        "compile": lambda model: torch.compile(model, backend="eager"),
        "half, save, load": lambda model: loaded(copy.deepcopy(model).half(), dtype=torch.float32),
        "bf16": lambda model: model.bfloat16(),
    }
    for host in HOSTS:
        for encoding in settings.encodings:
            for attack, change in attacks.items():
                same = 0.1 if attack == "bf16" else 1e-2 if attack.startswith("half") else SAME
                run = functools.partial(changed, host, encoding, change)
                yield Case(attack, host, encoding, run, stock=functools.partial(unchanged, host, change), same=same)
            for way in ("reentrant", "not reentrant"):
                run = functools.partial(checkpointed, host, encoding, way == "reentrant")
                yield Case(f"gradient checkpointing, {way}", host, encoding, run, stock=functools.partial(enabled, host))


def auto(host: str) -> Any:
    return AUTO.get(host, AutoModelForCausalLM)


def made(host: str, encoding: str) -> Subject:
    return subject(host, encoding, auto(host))


@torch.no_grad()
def changed(host: str, encoding: str, change: Callable[[Any], Any]) -> Iterator[Comparison]:
    """The outputs stay what they were."""
    it = made(host, encoding)
    model = change(it.model)
    vocabulary = it.oracle.config.vocab_size
    for row in IDS:
        yield model(row[None])[0][0, :, :vocabulary], it.expected(row)


@torch.no_grad()
def unchanged(host: str, change: Callable[[Any], Any]) -> bool:
    """Whether those of a stock model do."""
    before, after = stock(host, auto(host)), change(stock(host, auto(host)))
    return torch.allclose(before(IDS)[0], after(IDS)[0][..., : before.config.vocab_size].float(), atol=0.3)


def then(model: Any, _: Any) -> Any:
    return model


def resized(model: Any, length: int) -> Any:
    model.resize_position_embeddings(length)
    return model


def twin(embeddings: nn.Embedding) -> nn.Embedding:
    return nn.Embedding.from_pretrained(embeddings.weight.clone(), freeze=False)


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def restored(model: Any) -> Any:
    """The weights in a model made from the same config, by way of a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(torch.load(file))
    return other


def to_empty(model: Any) -> Any:
    with torch.device("meta"):
        other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict(), assign=True)
    buffers = dict(model.named_buffers())
    for name, buffer in [*other.named_buffers()]:
        if buffer.device.type == "meta":
            owner, _, last = name.rpartition(".")
            other.get_submodule(owner)._buffers[last] = buffers[name]
    other.tie_weights()
    return other


def loaded(model: Any, **more: Any) -> Any:
    folder = new_folder()
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **more)


def checkpointed(host: str, encoding: str, reentrant: bool) -> Iterator[Comparison]:
    """The same gradients."""
    it = made(host, encoding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        it.model.enable_input_require_grads()
        expected = gradients(it.oracle)
        for name, gradient in gradients(it.model).items():
            if name in expected:  # the stock model's table has another name
                yield gradient, expected[name]


def enabled(host: str) -> None:
    stock(host, auto(host)).gradient_checkpointing_enable()


def gradients(model: Any) -> dict[str, Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = model.config.attn_pdrop = 0.0
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    largest = max(gradient.abs().max() for gradient in found.values())
    # A gradient that is zero but for rounding is compared with the largest one.
    return {name: torch.cat([gradient.flatten(), largest[None]]) for name, gradient in found.items()}
