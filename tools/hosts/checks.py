"""Checks that run a supported model. Each check passes, fails, is skipped, or doesn't apply.

Shapes: B batch, L tokens, N positions of any kind, D hidden_size.
"""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

import hf_posenc
from tools.hosts import tiny
from tools.hosts.inputs import CACHES, TOKENS, Entrance, Reading, Run, as_vectors, entrances, given_vectors, is_run, reading
from tools.hosts.tiny import LENGTH

ENCODINGS = ("sinusoidal", "rope", "alibi", "shaw")
"""One encoding for each mechanism: additive, rotation, distance bias, and bias by content."""
PASSED, FAILED, NOT_APPLICABLE, SKIPPED, NO_ORDER = "passed", "FAILED", "-", "skipped", "shows no order"
STOCK_FAILS = "stock fails"
"""The original model fails a check for a known reason, so the check doesn't apply to its patched models."""
SAME, OTHER = 2e-5, 1e-4
"""Maximum relative difference of equal outputs, and minimum relative difference of different outputs."""
CHUNKS = ((5, 1, 3, 2), (5, 1, 1, 1, 1, 1, 1))
"""Lengths of the chunks that a decoder reads. After the first chunk, state-space models read only single tokens."""
WINDOW = 4
"""Size of sliding windows. It is less than LENGTH, so that the cache drops keys."""


class Skipped(Exception):
    """Raised with a reason if a check can't run."""


class StockFails(Skipped):
    """Raised if the original model fails a check, because its patched models then can't be expected to pass."""


class ShowsNoOrder(Exception):
    """Raised if the original model has positions, but its outputs don't depend on token order. This proves nothing."""


def checked(host: "Host") -> dict[str, str]:
    """Check -> result, for an original model that `patch` supports, possibly with `submodel`."""
    try:
        host.look()
    except Skipped as why:
        return dict.fromkeys(CHECKS, f"{SKIPPED} ({why})")
    results: dict[str, str] = {}
    for name, check in CHECKS.items():
        results[name] = _outcome(check, host, tiny.RECIPES.get(host.kind, {}).get("stock_fails", {}).get(name, ""))
        if results[name] == NO_ORDER:
            break
    return {name: results.get(name, SKIPPED) for name in CHECKS}


def _outcome(check: Callable[["Host"], Iterator[bool]], host: "Host", known: str) -> str:
    """The result of a check. known: why the original model fails it, if that is known."""
    results: list[bool] = []
    try:
        with torch.no_grad():
            for result in check(host):
                results.append(result)
    except ShowsNoOrder:
        return NO_ORDER
    except Skipped as why:
        if not all(results):  # A patched model failed where the original model didn't.
            return FAILED
        return f"{STOCK_FAILS} ({known})" if known and isinstance(why, StockFails) else f"{SKIPPED} ({why})"
    except Exception as error:  # The table shows it as a failed check.
        return f"{FAILED} ({type(error).__name__})"
    return NOT_APPLICABLE if not results else PASSED if all(results) else FAILED


@dataclass(frozen=True)
class Probe:
    """Content that has an order, and the outputs that show whether the order matters.

    part: "encoder" or "decoder" of an encoder-decoder. Otherwise "".
    """

    part: str
    entrance: Entrance

    @property
    def mask(self) -> str:
        """The argument for the attention mask of its tokens."""
        name = self.entrance.name
        return name.replace("input_ids", "attention_mask") if name in TOKENS else "attention_mask"

    def read(self, run: Run) -> Tensor:
        """The outputs for this content, `[B, N, D]`."""
        vectors = run.encoded if self.part == "encoder" else run.vectors
        assert vectors is not None
        return vectors


class Host:
    """An original model, and the information that the checks need.

    part: the submodel that is patched, as passed to `patch`. "" for the model itself.
    path: path of that submodel within the model.
    alone: whether the checks run only that submodel, because no inputs are known with which the whole model runs it. `patch`,
        saving, and loading still apply to the whole model. The paths below are then relative to the submodel.
    answering: path of the module that returns one vector per position.
    read_at: path of the module that receives the content.
    probes: the probes of the model's content.
    causal: the probes whose outputs don't depend on later content.
    single: single-layer models, one for each type of layer, that test whether order matters to a decoder. In the whole decoder,
        layers after the first know order from the causal mask. If such models can't be built, the whole decoder is tested with
        a mask that shows every token to each.
    """

    def __init__(self, kind: str, stock: PreTrainedModel, part: str) -> None:
        self.kind, self.stock, self.part = kind, stock, part
        self.path = self.read_at = path_of(stock, part)
        self._patched: dict[tuple[str, int], tuple[PreTrainedModel, PreTrainedModel | None]] = {}
        self.recipe = tiny.RECIPES.get(kind, {})
        self.alone = False
        self.answering = self._within("vectors", self.path) or self.path

    def look(self) -> None:
        """Determine the inputs, the probes, and the single-layer models. Raises Skipped if that isn't possible."""
        read = reading(self.kind, self.stock, self.answering)
        if read is None and self.path:
            outer = reading(self.kind, self.stock)
            if outer is not None and "input_ids" in outer.specs and is_run(self.stock, self.path, outer):
                read, self.answering, self.read_at = outer, "", ""  # The model calls only modules of the submodel.
        if read is None and self.path:
            self.alone, self.read_at = True, ""
            submodel = self.called(self.stock)
            self.recipe = tiny.RECIPES.get(submodel.config.model_type, {})
            self.answering = self._within("vectors", "")
            read = reading(submodel.config.model_type, submodel, self.answering)
        if read is None:
            raise Skipped("its inputs are unknown")
        self.reading: Reading = read
        self.probes = list(self._probes())
        self.causal = {probe for probe in self.probes if self._is_causal(probe)}
        self.single = list(self._single_layers()) if self.causal else []
        # A type of layer that can't be patched separately has no attention.
        self.single = [model for model in self.single if self.patched("none", model) is not None]
        for probe in self.causal if not self.single else ():
            if self._is_causal(probe, **self._all_seen(probe)):
                raise Skipped("its layers can't be had singly, and it takes no mask that shows every token to each")

    def _within(self, name: str, path: str) -> str:
        """The module that the recipe names, within the one at `path`. "" if there is none."""
        wanted = self.recipe.get(name)
        inside = f"{path}." if path else ""
        for module, _ in self.called(self.stock).named_modules():
            if wanted and f".{module}".endswith(f".{wanted}") and f"{module}.".startswith(inside):
                return module
        return ""

    def _all_seen(self, probe: Probe) -> dict[str, Tensor]:
        """A mask that shows every token to each."""
        count = probe.entrance.count
        return {probe.mask: torch.zeros(1, 1, count, count)}

    def called(self, model: PreTrainedModel) -> PreTrainedModel:
        """The module that the checks call: the model, or its submodel."""
        return model.get_submodule(self.path) if self.alone else model  # type: ignore[return-value]

    @functools.cached_property
    def arguments(self) -> set[str]:
        return set(inspect.signature(type(self.called(self.stock)).forward).parameters)

    @functools.cached_property
    def has_positions(self) -> bool:
        """Whether the original model has positions. Hybrids of attention and recurrent layers can do without."""
        return hf_posenc.inspect(self.stock.get_submodule(self.path)).encoding != "none"

    @functools.cached_property
    def taken(self) -> list[str]:
        """The encodings that the model supports."""
        return [encoding for encoding in ENCODINGS if self.patched(encoding) is not None]

    def run(self, model: PreTrainedModel, inputs: Any) -> Run:
        return Run(self.called(model), self.answering, inputs)

    def _probes(self) -> Iterator[Probe]:
        stock = self.called(self.stock)
        if (at := self._within("entrance", self.read_at)) and (named := given_vectors(stock, at, self.reading)):
            yield Probe("", named)
            return
        parts = ("",) if self.run(self.stock, self.reading(0)).encoded is None else ("encoder", "decoder")
        for part in parts:
            if part == "decoder" and "decoder_input_ids" in self.reading.specs:
                found = [Entrance("argument", "decoder_input_ids", (1,))]
            else:
                found = [] if part == "decoder" else entrances(stock, self.read_at, self.reading)
            stack = part if self.alone else f"{self.path}.{part}".strip(".")
            if part and not found and stack in dict(stock.named_modules()):
                found = [each for each in [given_vectors(stock, stack, self.reading)] if each]
            if not found:
                raise Skipped(f"the place where its {part or 'own'} contents enter is unknown")
            yield from (Probe(part, each) for each in found)

    def _is_causal(self, probe: Probe, **more: Tensor) -> bool:
        """Whether no output depends on later content."""
        inputs, count = {**self.reading(1), **more}, probe.entrance.count
        index = torch.arange(count)
        index[-1] = 0
        before = probe.read(self.run(self.stock, inputs))
        if before.shape[1] != count:
            return False
        with probe.entrance.taking(self.called(self.stock), inputs, index) as other:
            after = probe.read(self.run(self.stock, other))
        return _apart(after[:, :-1], before[:, :-1]) < SAME

    def _single_layers(self) -> Iterator[PreTrainedModel]:
        for layer in range(8):
            model = tiny.build(self.kind, only=layer)
            if model is None or not _has_one_layer(model.get_submodule(self.path)):
                return
            yield model

    def patched(self, encoding: str, stock: PreTrainedModel | None = None) -> PreTrainedModel | None:
        """A cached patched model with random parameters of the encoding. None if the encoding is unsupported."""
        stock = stock or self.stock
        if (encoding, id(stock)) not in self._patched:
            # The original model is kept as well, so that no other object gets its id.
            self._patched[encoding, id(stock)] = stock, self._newly_patched(encoding, stock)
        return self._patched[encoding, id(stock)][1]

    def _newly_patched(self, encoding: str, stock: PreTrainedModel) -> PreTrainedModel | None:
        try:
            model = patch(stock, encoding, self.part)
        except hf_posenc.UnsupportedModelError:
            return None
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model

    def with_encodings(self) -> Iterator[PreTrainedModel]:
        """The patched models of all supported encodings."""
        for encoding in self.taken:
            patched = self.patched(encoding)
            assert patched is not None
            yield patched

    def judging(self, probe: Probe) -> list[PreTrainedModel]:
        """The original models that test whether the order of this content matters."""
        return self.single if probe in self.causal and self.single else [self.stock]

    def order(self, model: PreTrainedModel, probe: Probe) -> tuple[float, float]:
        """How much outputs change, relative to the largest output, when other content is shuffled.

        The first value is for the outputs of the content's own part. The second is for the decoder's outputs when the encoder's
        content is shuffled. Modules other than attention that depend on order are disabled.
        """
        inputs, count = self.reading(3), probe.entrance.count
        index = torch.randperm(count - 1, generator=torch.Generator().manual_seed(4))
        index = torch.cat([index, torch.tensor([count - 1])])
        sees_all = probe in self.causal and not self.single
        if sees_all:
            inputs |= self._all_seen(probe)
        called = self.called(model)
        with _silent(called, self.others(model), probe.entrance):
            first = self.run(model, inputs)
            with probe.entrance.taking(called, inputs, index) as other:
                second = self.run(model, other)
        before, after = probe.read(first), probe.read(second)
        beyond = 0.0 if probe.part != "encoder" else _apart(second.vectors, first.vectors)
        if before.shape[1] != count:
            return _apart_as_sets(after, before), beyond
        rows = slice(-1, None) if probe in self.causal and not sees_all else slice(None)
        return _apart(after[:, rows], before[:, index][:, rows]), beyond

    def others(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The paths of modules other than attention that depend on order, such as convolutions, as reported by `inspect`."""
        patched = model if _is_patched(model.get_submodule(self.path)) else self.patched("none", model)
        stays = {} if patched is None else hf_posenc.inspect(patched.get_submodule(self.path)).order_sensitive
        prefix = f"{self.path}." if self.path and not self.alone else ""
        return tuple(prefix + path for paths in stays.values() for path in paths)

    @functools.cached_property
    def tokens(self) -> list[Probe]:
        """The probes whose content is token IDs, which the checks of padding and caches use.

        If the recipe names a later entrance, because the embeddings already depend on order, the tokens enter before it.
        """
        found = [probe for probe in self.probes if probe.entrance.name in TOKENS]
        if not found and "input_ids" in self.reading.specs and self._within("entrance", self.read_at):
            found = [Probe("", Entrance("argument", "input_ids", (1,)))]
        return found


def _is_patched(model: Any) -> bool:
    return type(model).__name__.startswith("PosEnc")


@contextmanager
def _silent(model: PreTrainedModel, paths: tuple[str, ...], behind: Entrance) -> Iterator[None]:
    """Replace the outputs of modules after the content has entered the model.

    The replacement is the module's input, which keeps the path of what attention adds before it, or zeros if the shapes differ.
    """
    entered = behind.where == "argument"

    def leave(*_: Any) -> None:
        nonlocal entered
        entered = behind.where == "argument"

    def enter(*_: Any) -> None:
        nonlocal entered
        entered = True

    hooks = [model.register_forward_pre_hook(leave)]
    if behind.where == "output":
        hooks.append(model.get_submodule(behind.name).register_forward_hook(enter))
    elif behind.where == "input":
        hooks.append(model.get_submodule(behind.name).register_forward_pre_hook(enter))
    for path in paths:
        if path != behind.name:
            hook = lambda module, args, kwargs, answer: _without(answer, args, kwargs) if entered else None  # noqa: E731
            hooks.append(model.get_submodule(path).register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _without(answer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if isinstance(answer, Tensor):
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        same = given is not None and (given.shape, given.dtype) == (answer.shape, answer.dtype)
        return given if same else torch.zeros_like(answer) if answer.is_floating_point() else answer
    return type(answer)(_without(each, args, kwargs) for each in answer) if isinstance(answer, (tuple, list)) else answer


def path_of(model: PreTrainedModel, part: str) -> str:
    """The path of a submodel within the model. `patch` names it relative to the base model."""
    inside = "" if model.base_model is model or not part else f"{model.base_model_prefix}."
    models = [path for path, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    return inside + part if inside + part in models else part  # the base model itself can be a submodel, too


def patch(model: PreTrainedModel, encoding: str, part: str) -> PreTrainedModel:
    where: dict[str, Any] = {"submodel": part} if part else {}
    return hf_posenc.patch(model, encoding, **where)


def _has_one_layer(part: Any) -> bool:
    config = part.config.get_text_config()
    return next((count for name in tiny.LAYERS if isinstance(count := getattr(config, name, None), int)), 0) == 1


def _apart(a: Any, b: Any) -> float:
    return float((a - b).abs().max() / b.abs().max())


def _apart_as_sets(a: Tensor, b: Tensor) -> float:
    """The largest distance of a vector in a from the nearest vector in b, relative to the largest value in b."""
    return float((torch.cdist(a, b, p=torch.inf).amin(dim=-1)).max() / b.abs().max())


def order_is_gone(host: Host) -> Iterator[bool]:
    """With "none", no output depends on the order of the content. In the original model, outputs do.

    Attention without positions shows no order in the original model either. Its order comes from other modules, which are
    disabled here. For such a model, only "order back" proves that the outputs can show order.
    """
    for probe in host.probes:
        if host.has_positions and not any(host.order(stock, probe)[0] > OTHER for stock in host.judging(probe)):
            raise ShowsNoOrder
        singles = [host.patched("none", stock) for stock in host.judging(probe)]
        yield any(patched is not None for patched in singles)
        for patched in singles:
            if patched is not None:
                yield max(host.order(patched, probe)) < SAME


def order_is_back(host: Host) -> Iterator[bool]:
    """With each supported encoding, outputs depend on the order of the content."""
    for encoding in host.taken:
        for probe in host.probes:
            for stock in host.judging(probe):
                if (patched := host.patched(encoding, stock)) is not None:
                    yield host.order(patched, probe)[0] > OTHER


def unpatch_is_equal(host: Host) -> Iterator[bool]:
    """After `unpatch`, outputs are bit-identical to those of the original model. Patching doesn't change the original."""
    inputs = host.reading(5)
    expected = host.run(host.stock, inputs).tensors
    for encoding in ("none", *host.taken):
        if (patched := host.patched(encoding)) is not None:
            yield _equal(host.run(hf_posenc.unpatch(patched), inputs).tensors, expected)
    yield _equal(host.run(host.stock, inputs).tensors, expected)


def saves_and_loads(host: Host) -> Iterator[bool]:
    """After saving and loading a patched model, its outputs are bit-identical."""
    inputs = host.reading(6)
    expected = host.run(host.stock, inputs).tensors
    with suppress(RuntimeError):  # The original model can't be saved.
        try:
            same = _equal(host.run(_reloaded(host, host.stock), inputs).tensors, expected)
        except (TypeError, ValueError) as error:
            raise Skipped("the stock model can't be loaded after it was saved") from error
        if not same:
            raise Skipped("the stock model is another after it was saved and loaded")
    for patched in host.with_encodings():
        loaded = _reloaded(host, patched)
        yield type(loaded) is type(patched)
        yield _equal(host.run(loaded, inputs).tensors, host.run(patched, inputs).tensors)


def _reloaded(host: Host, model: PreTrainedModel) -> PreTrainedModel:
    """Save and load a model.

    Weights are copied to new memory. In a memory-mapped file they can be unaligned, and some CPUs then sum in another order.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = tiny.loader(host.kind, model).from_pretrained(folder).eval()
    for tensor in (*loaded.parameters(), *loaded.buffers()):
        tensor.data = tensor.data.clone()
    return loaded


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(*pair) for pair in zip(a, b, strict=True))


def eager_is_sdpa(host: Host) -> Iterator[bool]:
    """Eager attention and SDPA give the same outputs, also with padding, if the model supports both."""
    if not (host.stock._supports_sdpa and host.stock.get_submodule(host.path)._supports_sdpa):
        return
    inputs = host.reading(7)
    real: Tensor | None = None
    if len(host.tokens) == 1 and not host.tokens[0].part and host.tokens[0].mask == "attention_mask" in host.arguments:
        two = host.reading(7, 2)
        if all(tensor.shape[0] == 2 for tensor in two.values() if isinstance(tensor, Tensor)):
            mask = torch.ones(2, LENGTH, dtype=torch.long)
            mask[1, LENGTH - 3 :] = 0
            inputs, real = {**two, "attention_mask": mask}, mask.bool()

    def apart(model: PreTrainedModel) -> float:
        """The difference. If it isn't small, it is computed in double precision, where rounding can't be the cause."""
        if (result := apart_with(model, inputs)) < SAME:
            return result
        floats = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.is_floating_point()}
        return apart_with(copy.deepcopy(model).double(), {**inputs, **{name: each.double() for name, each in floats.items()}})

    def apart_with(model: PreTrainedModel, inputs: Any) -> float:
        part: Any = model.get_submodule(host.path)
        answers, before = [], {id(each): each.config._attn_implementation for each in _models(model)}
        try:
            for implementation in ("eager", "sdpa"):
                part.set_attn_implementation(implementation)
                vectors = host.run(model, inputs).vectors
                assert vectors is not None
                answers.append(vectors if real is None or vectors.shape[:2] != real.shape else vectors[real])
        finally:
            for each in _models(model):
                each.config._attn_implementation = before[id(each)]
        return _apart(*answers)

    if not _of_stock(lambda: apart(host.stock) < SAME):
        raise StockFails("eager attention and SDPA differ in the stock model")
    for patched in host.with_encodings():
        yield apart(patched) < SAME


def _models(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _of_stock(check: Callable[[], bool]) -> bool:
    """The result of a check on the original model. Raises StockFails if it can't run."""
    try:
        return check()
    except Exception as error:
        raise StockFails(f"the stock model: {type(error).__name__}") from error


def padding_is_ignored(host: Host) -> Iterator[bool]:
    """Padding on the right or left doesn't change the outputs of the other tokens.

    If the embeddings of tokens depend on order, only padding on the right applies, because the other changes their content.
    """
    for probe in host.tokens:
        mask = probe.mask
        if mask not in host.arguments:
            continue
        if not _of_stock(functools.partial(_ignores_padding, host, host.stock, probe, mask, False)):
            raise StockFails("padding shows in the stock model")
        for patched in host.with_encodings():
            yield _ignores_padding(host, patched, probe, mask, False)
        if probe not in host.probes:
            continue
        without = [patched for patched in [host.patched("none")] if patched is not None]
        # The original model can see this padding because of its positions. Without positions, it must not.
        if not any(_ignores_padding(host, model, probe, mask, True) for model in (host.stock, *without)):
            raise StockFails("padding on the left shows in the stock model")
        for patched in host.with_encodings():
            yield _ignores_padding(host, patched, probe, mask, True)


def _ignores_padding(host: Host, model: PreTrainedModel, probe: Probe, mask: str, left: bool) -> bool:
    inputs = host.reading(8)
    alone = host.run(model, inputs)
    padded = dict(inputs)
    for name, tensor in inputs.items():
        beside_it = not probe.part or (probe.part == "encoder" and not name.startswith("decoder"))
        if name == probe.entrance.name or (beside_it and _is_by_token(tensor)):
            padding = tensor[:, :4].clone() * 0 + 3 if name in TOKENS else tensor[:, :4]
            padded[name] = torch.cat([padding, tensor] if left else [tensor, padding], 1)
    shown = torch.cat([torch.zeros(1, 4), torch.ones(1, LENGTH)] if left else [torch.ones(1, LENGTH), torch.zeros(1, 4)], 1)
    padded[mask] = shown.long()
    beside = host.run(model, padded)
    vectors = probe.read(beside)
    shown = torch.cat([shown, torch.ones(1, max(0, vectors.shape[1] - shown.shape[1]))], 1)  # an image's tokens come last
    vectors = vectors[:, shown[0].bool()] if vectors.shape[1] == shown.shape[1] else vectors
    apart = _apart(vectors, probe.read(alone))
    return apart < SAME and (probe.part != "encoder" or _apart(beside.vectors, alone.vectors) < SAME)


def cache_is_exact(host: Host) -> Iterator[bool]:
    """Decoding in chunks gives the same outputs as one forward pass, for all caches that work in the original model.

    Some original models need a cache of their own class, or explicit `position_ids` because they count from 0 in each chunk.
    """
    probe = next((probe for probe in host.tokens if probe in host.causal or {*host.probes} == host.causal), None)
    if probe is None or not CACHES & {*host.arguments}:
        return
    models = [host.stock]
    sliding = tiny.build(host.kind, sliding_window=WINDOW, attention_chunk_size=WINDOW)
    with suppress(AttributeError):  # A cache of the original model can't be created from its config.
        if sliding is not None and any(_cache(host, sliding, "dynamic", probe, LENGTH).is_sliding):
            models.append(sliding)
    ran = False
    for stock in models:
        for kind in ("dynamic", "static", "own", "dynamic, explicit positions"):
            if ran and kind not in ("dynamic", "static"):
                break
            try:
                chunks = next(each for each in CHUNKS if _apart_by_chunks(host, stock, probe, kind, each) < SAME)
            except Exception:  # The original model doesn't support this cache, or differs by chunks.
                continue
            ran = True
            for encoding in host.taken:
                if (patched := host.patched(encoding, stock)) is not None:
                    yield _apart_by_chunks(host, patched, probe, kind, chunks) < SAME
    if not ran:
        raise StockFails("the stock model differs by chunks")


def _cache(host: Host, model: PreTrainedModel, kind: str, probe: Probe, source_length: int) -> Any:
    config = host.called(model).config.get_text_config(decoder=True)
    caches: list[Any]
    if kind == "own":
        return None  # The model creates it.
    if kind == "static":
        caches = [StaticCache(config=config, max_cache_len=length) for length in (LENGTH + 3, source_length)]
    else:
        caches = [DynamicCache(config=config) for _ in range(2)]
    return EncoderDecoderCache(*caches) if probe.entrance.name == "decoder_input_ids" else caches[0]


def _apart_by_chunks(host: Host, model: PreTrainedModel, probe: Probe, kind: str, lengths: tuple[int, ...]) -> float:
    inputs = host.reading(9)
    whole = host.run(model, inputs)
    encoded = as_vectors(getattr(whole.answer, "encoder_last_hidden_state", None))
    source = LENGTH if encoded is None else encoded.shape[1]
    cache, name, chunks = _cache(host, model, kind, probe, source), probe.entrance.name, []
    (argument,) = CACHES & {*host.arguments}
    by_token = [name] if probe.part else [each for each, tensor in inputs.items() if _is_by_token(tensor)]
    for chunk in zip(*(inputs[each].split(lengths, 1) for each in by_token), strict=True):
        more: dict[str, Any] = {"use_cache": True} if "use_cache" in host.arguments else {}
        if "explicit" in kind:
            past = int(cache.get_seq_length())
            more["position_ids"] = torch.arange(past, past + chunk[0].shape[1])[None]
        given = {**inputs, **dict(zip(by_token, chunk, strict=True))}
        run = host.run(model, {**given, argument: cache, **more})
        cache = getattr(run.answer, argument) if cache is None else cache
        chunks.append(probe.read(run))
    if int(cache.get_seq_length()) != LENGTH:
        return torch.inf
    return _apart(torch.cat(chunks, 1), probe.read(whole))


def _is_by_token(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[1] == LENGTH


CHECKS = {
    "order gone": order_is_gone,
    "order back": order_is_back,
    "unpatch": unpatch_is_equal,
    "save, load": saves_and_loads,
    "eager=sdpa": eager_is_sdpa,
    "padding": padding_is_ignored,
    "cache": cache_is_exact,
}
