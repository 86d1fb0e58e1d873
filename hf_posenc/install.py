"""What is put into a host's ports, and how the positions of a forward pass reach it.

The stack's forward makes one `PositionContext`; it goes down to the attentions as a keyword argument, handed on where a
host's modules don't do it themselves.
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc import attention
from hf_posenc.encodings import Geometry, PositionContext, build_within_limits, encoding_class, options_of, positions_of
from hf_posenc.ports import BIAS_MAKERS, Ports, WrittenOut, layers, written_out_as

INJECT = ("input", "every_layer", "after_attention")
"""Where vectors are added: to the token embeddings, to what enters each layer, to what leaves each attention block."""


class Port(nn.Module):
    """Stands where the host had a table of its own, of the shape `rows × size`."""

    def __init__(self, stack: Any, name: str, table: nn.Embedding) -> None:
        super().__init__()
        # In a tuple, so that the stack is not registered as a child of its own part.
        self._stack = (stack,)
        self.key, self.shape = f"{name}.weight", tuple(table.weight.shape)

    @property
    def kept(self) -> Tensor | None:
        """The host's own table, or None."""
        (stack,) = self._stack
        try:
            return stack.get_buffer(f"posenc.host.{self.key}")
        except AttributeError:
            return None

    @property
    def weight(self) -> Tensor:
        """For the host's own initialisation, which may fill its table: the kept one, or a scratch one."""
        return torch.zeros(self.shape) if self.kept is None else self.kept

    def extra_repr(self) -> str:
        return f"in place of {self.key}"


class PositionPort(Port):
    """Answers the host's position ids with what the encoding adds to the inputs.

    While `encoding.blend` is below 1 the rest comes from the host's own table, if that is kept.
    """

    def __init__(self, stack: Any, name: str, table: nn.Embedding, offset: int, embeds: bool) -> None:
        super().__init__(stack, name, table)
        self.offset, self.embeds = offset, embeds

    def forward(self, position_ids: Tensor) -> Tensor:
        (stack,) = self._stack
        encoding = stack.posenc
        dtype = stack.get_input_embeddings().weight.dtype
        vectors = encoding.embed(position_ids - self.offset) if self.embeds else None
        if vectors is None:
            vectors = torch.zeros((), dtype=dtype, device=position_ids.device).expand(*position_ids.shape, self.shape[1])
        if encoding.blend != 1.0 and self.kept is not None:
            vectors = encoding.blend * vectors + (1.0 - encoding.blend) * self.kept[position_ids]
        return vectors.to(dtype)


class BiasPort(Port):
    """Stands where the host had a table of relative biases: silent, except while the encoding's `blend` is below 1."""

    def forward(self, buckets: Tensor) -> Tensor:
        (stack,) = self._stack
        return (1.0 - stack.posenc.blend) * F.embedding(buckets, self.weight)

    def make(self, module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Tensor | None:
        """What the host's own method makes of this port; without the work where that would be nothing."""
        (stack,) = self._stack
        if stack.posenc.blend == 1.0 or self.kept is None:
            return None
        return getattr(type(module), method)(module, *args, **kwargs)


def install(stack: Any, ports: Ports, encoding: dict[str, Any], geometry: Geometry, inject: str) -> None:
    """Build a canonical encoding into a stack: as `posenc` of the stack and of its attentions, behind the ports."""
    cls, options = encoding_class(encoding["type"]), options_of(encoding)
    stack.posenc, *owned = build_within_limits(
        cls.type,
        lambda: [cls.for_stack(geometry, **options), *(cls.for_attention(geometry, **options) for _ in ports.attentions)],
    )
    for name, table in ports.tables.items():
        port: Port = PositionPort(stack, name, table, ports.offset, embeds=inject == "input")
        _replace(stack, name, port)
    for name, table in ports.biases.items():
        port, owner = BiasPort(stack, name, table), stack.get_submodule(name.rpartition(".")[0])
        _replace(stack, name, port)
        _, method = BIAS_MAKERS[type(owner).__name__]
        setattr(owner, method, partial(port.make, owner, method))
    for module, own in zip(ports.attentions.values(), owned, strict=True):
        if own is not None:
            module.posenc = own
        if row := written_out_as(module):
            module.forward = partial(attend_written_out, row, module)  # type: ignore[method-assign]
        else:
            module.config = attention.AttentionConfigView(module.config)  # type: ignore[assignment]
            names = _argument_names(module)
            if "rotate" in cls.acts_by() and "past_key_values" in names:
                module.register_forward_pre_hook(partial(rotate_into_cache, names), with_kwargs=True)
    hops = _hops(stack, [name for name, module in ports.attentions.items() if written_out_as(module)])
    for module, following in hops.items():
        if module is not stack:
            module.register_forward_pre_hook(partial(hand_on, following), with_kwargs=True)
    embeds_at = tuple(ports.tables)
    if inject != "input":
        blocks = layers(ports.attentions)
        embeds_at = tuple(blocks) if inject == "every_layer" else tuple(blocks.values())
        for module in map(stack.get_submodule, embeds_at):
            if inject == "every_layer":
                module.register_forward_pre_hook(partial(add_to_input, _argument_names(module)), with_kwargs=True)
            else:
                module.register_forward_hook(add_to_output, with_kwargs=True)
    stack._posenc_entrances = {verb: embeds_at if verb == "embed" else tuple(ports.attentions) for verb in cls.acts_by()}
    # BERT cuts missing token types from a buffer as long as its old table, so they are given from shapes instead.
    needs_token_types = any(name.endswith("token_type_ids") for name, _ in stack.named_buffers())
    stack._posenc_begin = partial(begin_forward, _argument_names(stack), ports.offset, needs_token_types, hops.get(stack, ()))


def _replace(stack: Any, name: str, port: Port) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(stack.get_submodule(owner), attribute, port)


def _hops(stack: nn.Module, attentions: list[str]) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """Each module on the way from the stack to these attentions -> the next ones, containers left out."""
    hops: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for name in attentions:
        parts = name.split(".")
        way = [stack, *(stack.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))]
        way = [module for module in way if not isinstance(module, nn.ModuleList)]
        for module, following in zip(way, [*way[1:], None], strict=True):
            known = hops.setdefault(module, ())
            if following is not None and following not in known:
                hops[module] = (*known, following)
    return hops


# Hooks are partials of plain functions, so that a patched model can be copied and pickled.


def rotate_into_cache(names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention: new keys are rotated as they are stored, not all keys at every step."""
    call = _Call(names, args, kwargs)
    cache, context = call["past_key_values"], kwargs.get(attention.CONTEXT)
    if cache is None or context is None:
        return None
    return call.changed(past_key_values=attention.rotating(cache, module, context), keys_are_rotated=True)


def hand_on(following: tuple[nn.Module, ...], module: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a module whose caller dropped the positions: takes what was left for it, and leaves it for the next."""
    context = kwargs.get(attention.CONTEXT) or vars(module).get("_posenc_context")
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} was called without positions: call the model itself, not a part of it, and without "
            "gradient checkpointing, whose second run of a layer loses them in this host"
        )
    module._posenc_context = None
    for child in following:
        child._posenc_context = context
    return args, {**kwargs, attention.CONTEXT: context}


def attend_written_out(
    row: WrittenOut,
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    *,
    position_context: PositionContext | None = None,
    encoder_hidden_states: None = None,
    past_key_values: None = None,
) -> tuple[Tensor, ...]:
    """The forward of an encoder's attention that a host wrote out, by way of the interface: `[B, L, D] -> [B, L, D]`."""
    heads = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    query, key, value = (
        getattr(module, name)(hidden_states).view(heads).transpose(1, 2) for name in (row.query, row.key, row.value)
    )
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else position_bias + attention_mask
    output, probabilities = attention.attend(
        "eager",
        module,
        query,
        key,
        value,
        attention_mask,
        position_context=position_context,
        scaling=module.attention_head_size**-0.5,
        dropout=module.dropout.p if module.training else 0.0,
    )
    output = output.flatten(-2)
    if row.out is not None:
        output = getattr(module, row.out)(output)
    return (output, probabilities) if output_attentions and probabilities is not None else (output,)


def add_to_input(names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a layer: the encoding's vectors are added to the hidden state, its first argument."""
    call = _Call(names, args, kwargs)
    hidden = call[names[0]]
    return call.changed(**{names[0]: hidden + _vectors(module, kwargs, hidden)})


def add_to_output(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook of an attention block: the encoding's vectors are added to what it gives out."""
    hidden, *others = output if isinstance(output, tuple) else (output,)
    hidden = hidden + _vectors(module, kwargs, hidden)
    return (hidden, *others) if isinstance(output, tuple) else hidden


def _vectors(module: nn.Module, kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    """`[1 or B, L, D]`, once in a forward pass unless they are trained."""
    context: PositionContext | None = kwargs.get(attention.CONTEXT)
    if context is None:
        raise RuntimeError(f"{type(module).__name__} was called without positions: call the model itself, not a part of it")
    encoding = context.encoding

    def compute() -> Any:
        vectors: Any = encoding.embed(context.positions)
        return (vectors * encoding.blend).to(hidden.dtype)

    trained = torch.is_grad_enabled() and any(p.requires_grad for p in encoding.parameters())
    return compute() if trained else context.cached(("vectors", hidden.dtype), compute)


def begin_forward(
    names: list[str],
    offset: int,
    needs_token_types: bool,
    following: tuple[nn.Module, ...],
    stack: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """The arguments for a stack's forward, with the positions of this forward pass in them.

    Explicit `position_ids`, counted as the host counts them, win; else they come from the attention mask (`positions_of`).
    """
    call = _Call(names, args, kwargs)
    cache, mask, ids = call["past_key_values"], call["attention_mask"], call["position_ids"]
    embeds = call["inputs_embeds"]
    if embeds is None and call["input_ids"] is None:
        return args, kwargs  # the host says what is missing
    shape, device = (
        (embeds.shape[:-1], embeds.device) if embeds is not None else (call["input_ids"].shape, call["input_ids"].device)
    )
    length = shape[-1]
    past = 0 if cache is None else cache.get_seq_length()
    # A static cache counts in place: its first layer would move the number under our feet.
    past = past.clone() if isinstance(past, Tensor) else past
    _check_length(stack, length, past, cache)
    if ids is None:
        ids, start = positions_of(length, past, mask, device)
        consecutive = True
    else:
        if ids.shape[-1] != length:
            raise ValueError(f"position_ids have shape {tuple(ids.shape)}, but the input has {length} tokens: give each one")
        ids = _from_zero(stack, ids.reshape(-1, length).long(), offset)
        start, consecutive = past - ids[:, :1], _rises_by_one(ids)
    context = PositionContext(stack.posenc, positions=ids, past=past, start=start, consecutive=consecutive)
    changes: dict[str, Any] = {"position_ids": ids + offset, attention.CONTEXT: context}
    if call["token_type_ids"] is None and needs_token_types:
        changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
    for module in following:
        module._posenc_context = context  # type: ignore[assignment]
    return call.changed(**changes)


def _from_zero(stack: Any, ids: Tensor, offset: int) -> Tensor:
    """Ids in the host's own count, whose first token has the id `offset`, and padding the one before -> positions."""
    if offset == 0:
        return ids
    # Worth reading values even on a GPU: ids from 0 would be silently wrong, and ids given by hand are rare here.
    if not torch.compiler.is_compiling() and ids.numel() and ids.min() < offset - 1:
        raise ValueError(
            f"position_ids begin at {int(ids.min())}, but {type(stack).__name__} counts its first token as {offset} and "
            f"padding as {offset - 1}, patched or not: add {offset} to ids that count from 0"
        )
    return (ids - offset).clamp(min=0)


def _rises_by_one(ids: Tensor) -> bool:
    """Whether all rows are consecutive. Where reading values would stall or break a trace: not assumed."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.equal(ids, ids[:, :1] + torch.arange(ids.shape[1]))


def _check_length(stack: Any, length: int, past: Any, cache: Any) -> None:
    limit = stack.posenc.geometry.max_length
    if limit is None:
        return
    if cache is not None and cache.is_compileable:
        # A static cache counts on its device; its size is known without asking.
        total, what = cache.get_max_length(), "a static cache of"
    else:
        total, what = past + length, "an input of" if cache is None else "cached and new tokens,"
    if total > limit:
        kind = stack.config.position_encoding["type"]
        raise ValueError(
            f"{what} {total} tokens is longer than max_length={limit} of this model's {kind!r} encoding: "
            "truncate the input (tokenizer: truncation=True, max_length=…), or unpatch and patch again with a larger max_length"
        )


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


class _Call:
    """The arguments of one call of a module, by name, however they were passed."""

    def __init__(self, names: list[str], args: tuple, kwargs: dict[str, Any]) -> None:
        self.names, self.args, self.kwargs = names, args, kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        index = self.names.index(name) if name in self.names else len(self.args)
        return self.args[index] if index < len(self.args) else None

    def changed(self, **values: Any) -> tuple[tuple, dict[str, Any]]:
        """The arguments with some replaced, each where it was passed."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            if name in self.names and self.names.index(name) < len(args):
                args[self.names.index(name)] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs
