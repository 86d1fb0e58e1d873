"""The inputs of a tiny model, and the place where token content enters it.

Shapes: B batch, L tokens, D hidden_size, N positions of any kind.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tools.hosts.tiny import LENGTH, RECIPES, VOCABULARY

ATTENTION = re.compile(r"Attention|Attn")
TOKENS = ("input_ids", "context_input_ids", "classes_input_ids", "protein_input_ids", "decoder_input_ids")
CACHES = {"cache", "past_key_values"}
"""Names of the cache argument, which Transformers 5.24 renamed."""
CONTENTS = ("inputs_embeds", "hidden_states", "input_features", "inputs", "patch_input")
"""Keyword arguments of an encoder or decoder that contain token content."""
MARGIN = 8
"""Maximum number of additional positions, such as class tokens, registers, and queries."""


@dataclass(frozen=True)
class Spec:
    """One input: random floats, random integers below `below`, or `value`.

    shape: "B" is the batch size, and "L" the number of tokens.
    boxes: values are sorted along the last dimension, and floats are between 0 and 1.
    """

    shape: tuple[int | str, ...] = ()
    below: int = 0
    value: Any = None
    boxes: bool = False

    def tensor(self, generator: torch.Generator, rows: int) -> Any:
        if self.value is not None:
            return torch.tensor(self.value) if isinstance(self.value, list) else self.value
        shape = [{"B": rows, "L": LENGTH}[size] if isinstance(size, str) else size for size in self.shape]
        if self.below:
            numbers = torch.randint(min(3, self.below - 1), self.below, shape, generator=generator)
        else:
            numbers = (torch.rand if self.boxes else torch.randn)(shape, generator=generator)
        return numbers.sort(dim=-1).values if self.boxes else numbers


IDS = Spec(("B", "L"), VOCABULARY)


@dataclass(frozen=True)
class Reading:
    """Inputs with which a model runs, as name -> Spec. Calling it returns random inputs for a seed."""

    specs: Mapping[str, Spec]

    def __call__(self, seed: int, rows: int = 1) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {name: spec.tensor(generator, rows) for name, spec in self.specs.items()}


def reading(kind: str, model: PreTrainedModel, path: str = "") -> Reading | None:
    """The first set of inputs with which a model and its submodule at `path` run and give finite outputs. None if none does."""
    for specs in _sets(kind, model):
        result = Reading(specs)
        try:
            run = Run(model, path, result(0))
        except Exception:  # The model needs other inputs.
            continue
        if run.vectors is not None and all(tensor.isfinite().all() for tensor in run.tensors):
            return result
    return None


def is_run(model: PreTrainedModel, path: str, read: Reading) -> bool:
    """Whether the model calls any module in the submodule at `path`."""
    called: list[nn.Module] = []
    hooks = [
        each.register_forward_hook(lambda module, *_: called.append(module)) for each in model.get_submodule(path).modules()
    ]
    try:
        Run(model, "", read(0))
    finally:
        for hook in hooks:
            hook.remove()
    return bool(called)


def runs(kind: str, model: PreTrainedModel) -> bool:
    return reading(kind, model) is not None


def _sets(kind: str, model: PreTrainedModel) -> Iterator[dict[str, Spec]]:
    """Candidate sets of inputs: that of the recipe, the main input with and without `decoder_input_ids`, and others."""
    names = inspect.signature(type(model).forward).parameters
    recipe = RECIPES.get(kind, {}).get("inputs")
    if recipe:
        yield {name: _spec(given) for name, given in recipe.items()}
    required = [name for name, each in names.items() if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [name for name in required if name != "self"]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
    known = {name: list(_specs(name, model.config)) for name in names}
    first = [name for name in ("input_ids", *main) if name in names]
    tried: list[set[str]] = []
    for chosen in (
        *([name, "decoder_input_ids"] for name in dict.fromkeys(first)),
        *([name] for name in dict.fromkeys(first)),
        *(["input_ids", each] for each in known if each not in TOKENS and known[each]),
        [],
    ):
        wanted = {*chosen, *required}
        if wanted in tried or any(not known.get(name) for name in wanted):
            continue
        tried.append(wanted)
        floats = [name for name in wanted if len(known[name]) > 1]
        for index in range(max((len(known[name]) for name in floats), default=1)):
            yield {name: known[name][min(index, len(known[name]) - 1)] for name in sorted(wanted)}


def _spec(given: Any) -> Spec:
    if "value" in given:
        return Spec(value=given["value"])
    return Spec(tuple(given["shape"]), given.get("below", 0), boxes=given.get("boxes", False))


def _specs(name: str, config: PreTrainedConfig) -> Iterator[Spec]:
    """Candidates for an argument of this name, by priority."""
    if name in TOKENS:
        yield IDS
    elif name == "bbox":
        yield Spec(("B", "L", 4), 20, boxes=True)
    elif name == "noise":
        yield Spec(("B", 16))
    elif name in ("pixel_values", "pixel_values_videos", "images"):
        height, width = _image(config)
        channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
        image = (channels, height, width)
        frames = _first(config, "num_frames", "frames_per_clip", "tubelet_size") or 2
        frames = frames if isinstance(frames, int) else 2
        yield Spec(("B", *image))
        yield Spec(("B", frames, *image))
        yield Spec(("B", 1, *image))
        yield Spec(("B", channels, frames, height, width))
        patch = _first(config, "patch_size")
        if isinstance(patch, int):
            yield Spec(("B", (height // patch) * (width // patch), channels * patch**2))
    elif name in ("input_features", "input_values", "audio_values"):
        bins = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", "mel_bins") or 80
        most = _first(config, "max_source_positions")
        length = _first(config, "max_length")
        if isinstance(most, int):
            yield Spec(("B", bins, 2 * most))
        yield Spec(("B", 4000))
        yield Spec(("B", 64, bins))
        yield Spec(("B", bins, 64))
        yield Spec(("B", 1, 4000))
        if isinstance(length, int):
            yield Spec(("B", length, bins))
    elif name in ("hidden_states", "pixel_values_patches"):
        patch, channels = _first(config, "patch_size"), _first(config, "num_channels", "in_channels", "in_chans") or 3
        frames = _first(config, "temporal_patch_size") or 1
        if isinstance(patch, int):
            yield Spec((16, channels * frames * patch**2))
    elif name in ("grid_thw", "image_grid_thw"):
        yield Spec(value=[[1, 4, 4]])


def _image(config: PreTrainedConfig) -> tuple[int, int]:
    size = _first(config, "image_size", "input_size", "img_size")
    if isinstance(size, (list, tuple)) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    if isinstance(size, (list, tuple)) and size:
        return int(size[0]), int(size[0])
    return (size, size) if isinstance(size, int) else (32, 32)


def _first(config: Any, *names: str) -> Any:
    """The first value among these names in a config, or in its subconfigs."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:
            value = None
        if value is not None:
            return value
    for part in getattr(config, "sub_configs", ()):
        inner = getattr(config, part, None)
        if isinstance(inner, PreTrainedConfig) and (value := _first(inner, *names)) is not None:
            return value
    return None


class Run:
    """One forward pass.

    answer: the model's output.
    tensors: all floating-point tensors of the output but the cache.
    vectors: the first output of the submodule at `path`, `[B, N, D]`. None if it wasn't called.
    encoded: hidden states of the encoder, if the submodule is an encoder-decoder.
    """

    def __init__(self, model: PreTrainedModel, path: str, inputs: Mapping[str, Any]) -> None:
        found: list[Any] = []
        if "use_cache" in inspect.signature(type(model).forward).parameters or getattr(model.config, "use_cache", False):
            inputs = {"use_cache": False, **inputs}
        hook = model.get_submodule(path).register_forward_hook(lambda module, args, answer: found.append(answer))
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                self.answer = model(**inputs)
        finally:
            hook.remove()
        self.tensors = list(_floats(self.answer))
        inner = found[0] if found else None
        self.vectors = as_vectors(inner)
        self.encoded = as_vectors(getattr(inner, "encoder_last_hidden_state", None))


def _floats(answer: Any) -> Iterator[Tensor]:
    if isinstance(answer, Tensor):
        if answer.is_floating_point():
            yield answer
    elif isinstance(answer, Mapping):
        for name, value in answer.items():
            if name not in CACHES:
                yield from _floats(value)
    elif isinstance(answer, (tuple, list)):
        for value in answer:
            yield from _floats(value)


def as_vectors(answer: Any) -> Tensor | None:
    first = getattr(answer, "last_hidden_state", None)
    if not isinstance(first, Tensor):
        first = next(_floats(answer), None)
    if first is None or first.ndim < 2:
        return None
    if first.ndim == 2:  # one vector per example, or one per patch of all images
        return first[:, None] if len(first) <= 2 else first[None]
    if first.ndim >= 4 and first.shape[1] <= first.shape[-1] and first.shape[-2] == first.shape[-3]:
        return first.flatten(1, -2)  # [B, H, W, D]
    return first.flatten(2).transpose(1, 2) if first.ndim >= 4 else first


@dataclass(frozen=True)
class Entrance:
    """Where the content of N positions enters: an argument of the model, or the input or output of a module.

    where: "argument", "input", or "output".
    name: the argument, or the path of the module.
    dims: the dimensions of the positions, which are flattened.
    count: N.
    """

    where: str
    name: str
    dims: tuple[int, ...]
    count: int = field(compare=False, default=LENGTH)

    @contextmanager
    def taking(self, model: PreTrainedModel, inputs: Mapping[str, Any], index: Tensor) -> Iterator[dict[str, Any]]:
        """The inputs for a forward pass in which position i has the content of position `index[i]`."""
        if self.where == "argument":
            yield {**inputs, self.name: self.taken(inputs[self.name], index)}
            return
        module = model.get_submodule(self.name)
        if self.where == "output":
            hook = module.register_forward_hook(lambda module, args, answer: self.taken(answer, index))
        else:
            hook = module.register_forward_pre_hook(self._before(index), with_kwargs=True, prepend=True)
        try:
            yield dict(inputs)
        finally:
            hook.remove()

    def taken(self, tensor: Tensor, index: Tensor) -> Tensor:
        first, last = self.dims[0], self.dims[-1]
        shape = tensor.shape
        return tensor.flatten(first, last).index_select(first, index).reshape(shape)

    def _before(self, index: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            if args:
                return (self.taken(args[0], index), *args[1:]), kwargs
            name = next(name for name, value in kwargs.items() if name in CONTENTS and isinstance(value, Tensor))
            return args, {**kwargs, name: self.taken(kwargs[name], index)}

        return hook


def entrances(model: PreTrainedModel, path: str, read: Reading) -> list[Entrance]:
    """Where the content enters whose order matters to the submodule at `path`.

    A video model with separate attention over places and over frames has an entrance for each. Otherwise, there is one. By
    priority, this is the argument with its token IDs, the output of its front end, or its first input. The front end is the
    last convolution before any attention that embeds patches, divides its input into patches, or shortens it. Empty if
    the attention doesn't see this content.
    """
    if argument := _tokens_of(model, path, read):
        return [Entrance("argument", argument, (1,))]
    return _behind_the_front_end(model, path, read)


def given_vectors(model: PreTrainedModel, path: str, read: Reading) -> Entrance | None:
    """The input of the submodule at `path` if it has vectors `[N, D]`, `[B, N, D]`, or `[B, channels, N, D]`."""
    given: list[Tensor] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        values = args[:1] or [value for name, value in kwargs.items() if name in CONTENTS]
        given.extend(value for value in values if isinstance(value, Tensor))

    handle = model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        Run(model, path, read(0))
    finally:
        handle.remove()
    vectors = next((tensor for tensor in given if tensor.ndim in (2, 3, 4) and tensor.is_floating_point()), None)
    return None if vectors is None else Entrance("input", path, (vectors.ndim - 2,), vectors.shape[-2])


def _tokens_of(model: PreTrainedModel, path: str, read: Reading) -> str | None:
    """The argument whose token IDs, or their embeddings, the submodule at `path` receives."""
    inputs = read(0)
    arguments = [name for name in TOKENS if name in inputs]
    if not path or not arguments:
        return "input_ids" if "input_ids" in inputs else None
    given: list[Tensor] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim >= 2)

    handle = model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        Run(model, path, inputs)
    finally:
        handle.remove()
    for name in arguments:
        if any(torch.equal(tensor, inputs[name]) for tensor in given):
            return name
    return arguments[0] if any(tensor.shape[1] == LENGTH and tensor.ndim == 3 for tensor in given) else None


@dataclass
class _Trace:
    """The convolutions that were called before the first attention, and the inputs of the submodule and of that attention."""

    convolutions: list[tuple[str, Tensor, Tensor, Any]] = field(default_factory=list)
    given: Tensor | None = None
    first: Tensor | None = None


def _behind_the_front_end(model: PreTrainedModel, path: str, read: Reading) -> list[Entrance]:
    part, trace, hooks = model.get_submodule(path), _Trace(), []

    def floats(args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
        return (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if name == path and trace.given is None:
                trace.given = next(floats(args, kwargs), None)
            elif trace.first is None and ATTENTION.search(type(module).__name__):
                trace.first = next(floats(args, kwargs), None)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, answer: Any) -> None:
            if trace.first is None and isinstance(answer, Tensor):
                trace.convolutions.append((name, args[0], answer, module))

        return hook

    for name, module in part.named_modules(prefix=path):
        hooks.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        if isinstance(module, nn.modules.conv._ConvNd):
            hooks.append(module.register_forward_hook(after(name)))
    try:
        Run(model, path, read(0))
    finally:
        for hook in hooks:
            hook.remove()
    if trace.first is None:
        return []
    front = [index for index, each in enumerate(trace.convolutions) if _is_front_end(*each)]
    if front:
        name, _, answer, _ = trace.convolutions[front[-1]]
        places = math.prod(answer.shape[2:])
        behind = trace.convolutions[front[-1] + 1 :]
        # If parallel branches are summed, a pointwise convolution after them receives the sum.
        same = [each for each in behind if max(each[3].kernel_size) == 1 and each[2].shape[2:] == answer.shape[2:]]
        name = same[-1][0] if same else name
        if places == 1:
            return [Entrance("output", name, (0,), answer.shape[0])]
        seen, sizes = trace.first.shape[-2], list(answer.shape[2:])
        if len(sizes) == 3 and sizes[0] > 1 and seen == sizes[1] * sizes[2]:  # the places of one frame
            return [Entrance("output", name, (2,), sizes[0]), Entrance("output", name, (3, 4), seen)]
        if not 0 <= seen - places <= MARGIN and seen in sizes:  # [B, C, time, frequencies]
            return [Entrance("output", name, (2 + sizes.index(seen),), seen)]
        return [Entrance("output", name, tuple(range(2, answer.ndim)), places)]
    if trace.given is None or trace.given.ndim not in (2, 3) or trace.given.ndim != trace.first.ndim:
        return []
    dim = trace.given.ndim - 2
    count, seen = trace.given.shape[dim], trace.first.shape[-2]
    if not 0 <= seen - count <= MARGIN:
        return []
    return [Entrance("input", path, (dim,), count)] if path else _as_argument(read, trace.given, dim)


def _is_front_end(name: str, given: Tensor, answer: Tensor, module: Any) -> bool:
    """Whether a convolution divides its input into patches or shortens it. Transposed ones lengthen it, for the output.

    A patch can also be a single pixel.
    """
    if module.transposed:
        return False
    if "patch_embed" in name and max(module.kernel_size) == 1:
        return True
    return max(module.stride) > 1 or math.prod(given.shape[2:]) > math.prod(answer.shape[2:])


def _as_argument(read: Reading, given: Tensor, dim: int) -> list[Entrance]:
    name = next((name for name, tensor in read(0).items() if tensor.shape == given.shape), None)
    return [] if name is None else [Entrance("argument", name, (dim,), given.shape[dim])]
