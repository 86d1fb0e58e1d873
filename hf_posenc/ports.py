"""Where positions enter and leave a host, found by its structure.

A *stack* is the part of a model which makes positions for a row of attentions (BertModel, GPT2Model). Its ports are the
tables it adds to its inputs and its self-attentions.
"""

import inspect
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import attention
from hf_posenc.encodings import Geometry, PositionContext, PositionEncoding, positions_of

TABLE_NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
CROSS_ATTENTION = re.compile(r"(^|\.)(crossattention|encoder_attn|cross_attn|EncDecAttention)(\.|$)")
OTHER_SOURCES = re.compile(r"rotary|rope|relative|rel_pos|alibi|pos_conv|pos_embed|position", re.IGNORECASE)
LENGTH_FIELD = "max_position_embeddings"
"""The config field that holds the longest length; hosts with another name for it map it (GPT-2's n_positions)."""


class PositionPort(nn.Module):
    """Stands where the host had a position table; answers position ids with what the encoding adds to the inputs.

    While `encoding.strength` is below 1 the rest comes from the host's own table, if that is kept.
    """

    def __init__(self, stack: Any, key: str, rows: int) -> None:
        super().__init__()
        # In a tuple, so that the stack is not registered as a child of its own part.
        self._stack = (stack,)
        self.key, self.rows = key, rows

    def forward(self, position_ids: Tensor) -> Tensor:
        (stack,) = self._stack
        encoding = stack.posenc
        dtype = stack.get_input_embeddings().weight.dtype
        vectors = encoding.embed(position_ids)
        if vectors is None:
            size = encoding.geometry.hidden_size
            vectors = torch.zeros((), dtype=dtype, device=position_ids.device).expand(*position_ids.shape, size)
        if encoding.strength != 1.0 and self.kept is not None:
            vectors = encoding.strength * vectors + (1.0 - encoding.strength) * self.kept[position_ids]
        return vectors.to(dtype)

    @property
    def kept(self) -> Tensor | None:
        """The host's own table, `[rows, D]`, or None."""
        (stack,) = self._stack
        try:
            return stack.get_buffer(f"posenc.host.{self.key}")
        except AttributeError:
            return None

    @property
    def weight(self) -> Tensor:
        """For the host's own initialisation, which may fill its table: the kept one, or a scratch one."""
        (stack,) = self._stack
        if self.kept is not None:
            return self.kept
        return torch.zeros(self.rows, stack.posenc.geometry.hidden_size)

    def extra_repr(self) -> str:
        return f"in place of {self.key}"


@dataclass
class Ports:
    """What was found in one stack: `tables` and `attentions`, dotted path -> module."""

    tables: dict[str, nn.Embedding]
    attentions: dict[str, nn.Module]

    def __bool__(self) -> bool:
        return bool(self.tables or self.attentions)


def find(stack: nn.Module) -> Ports:
    """The ports of a stack that is not patched yet; stacks within it that are patched already are passed over.

    Raises ValueError where only some of the sources of position could be taken over.
    """
    patched = tuple(f"{name}." for name, module in stack.named_modules() if name and hasattr(module, "posenc"))
    modules = {name: module for name, module in stack.named_modules() if not f"{name}.".startswith(patched)}
    attentions = {name: module for name, module in modules.items() if _is_self_attention(name, module)}
    tables = {name: module for name, module in modules.items() if name.rpartition(".")[2] in TABLE_NAMES}
    if not attentions and not tables:
        return Ports({}, {})
    others = {
        name
        for name, module in modules.items()
        if name not in tables and OTHER_SOURCES.search(f"{name.rpartition('.')[2]} {type(module).__name__}")
    }
    others |= {
        name
        for name, _ in stack.named_parameters()
        if OTHER_SOURCES.search(name) and name.rpartition(".")[0] not in tables and not name.startswith(patched)
    }
    if others:
        raise ValueError(
            f"{type(stack).__name__} has sources of position which can't be taken over: {', '.join(sorted(others)[:4])}. "
            "It was left as it is"
        )
    if not tables:
        raise ValueError(f"{type(stack).__name__} has no position table that could be taken over. It was left as it is")
    if not attentions:
        raise ValueError(
            f"no attention of {type(stack).__name__} goes through Transformers' attention interface, so nothing can be "
            "rotated or biased there. It was left as it is"
        )
    for name, table in tables.items():
        rows = getattr(stack.config, LENGTH_FIELD, None)
        if type(table) is not nn.Embedding or table.padding_idx is not None or table.num_embeddings != rows:
            raise ValueError(
                f"{type(stack).__name__}.{name} counts its positions in a way of its own (a {type(table).__name__} of "
                f"{getattr(table, 'num_embeddings', '?')} rows for {LENGTH_FIELD}={rows}). It was left as it is"
            )
    arguments = inspect.signature(type(stack).forward).parameters
    if "position_ids" not in arguments or all(a.kind is not a.VAR_KEYWORD for a in arguments.values()):
        raise ValueError(
            f"{type(stack).__name__}.forward doesn't take position_ids and further keyword arguments, by which positions "
            "would reach its layers. It was left as it is"
        )
    return Ports(tables, attentions)


def none_found(host: type[PreTrainedModel]) -> ValueError:
    """The refusal of a host without ports."""
    return ValueError(
        f"{host.__name__} has no ports for a position encoding: neither a position table nor an attention of "
        "Transformers' interface was found in it"
    )


def _is_self_attention(name: str, module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    if "ALL_ATTENTION_FUNCTIONS" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return False
    return not CROSS_ATTENTION.search(name) and not getattr(module, "is_cross_attention", False)


def geometry(stack: Any, ports: Ports, max_length: int | None) -> Geometry:
    """The sizes that an encoding for this stack is built with."""
    config = stack.config
    first = next(iter(ports.attentions.values()))
    head_dim = getattr(first, "head_dim", None) or getattr(first, "attention_head_size", None)
    return Geometry(
        hidden_size=next(iter(ports.tables.values())).embedding_dim,
        num_attention_heads=config.num_attention_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        max_length=max_length,
        is_causal=bool(getattr(first, "is_causal", False)),
    )


def lend(stack: Any, ports: Ports, encoding: PositionEncoding) -> None:
    """Put the encoding into the stack: as `posenc`, behind its tables and in front of its attentions."""
    stack.posenc = encoding
    for name, table in ports.tables.items():
        owner, _, attribute = name.rpartition(".")
        setattr(stack.get_submodule(owner), attribute, PositionPort(stack, f"{name}.weight", table.num_embeddings))
    rotates = "rotate" in encoding.acts_by()
    for module in ports.attentions.values():
        module.config = attention.AttentionConfigView(module.config)  # type: ignore[assignment]
        names = _argument_names(module)
        if rotates and "past_key_values" in names:
            module.register_forward_pre_hook(partial(rotate_into_cache, names), with_kwargs=True)
    # BERT cuts missing token types from a buffer as long as its old table, so they are given from shapes instead.
    stack._posenc_needs_token_types = any(name.endswith("token_type_ids") for name, _ in stack.named_buffers())
    stack.register_forward_pre_hook(partial(begin_forward, _argument_names(stack)), with_kwargs=True)


# Hooks are partials of plain functions, so that a patched model can be copied and pickled.


def rotate_into_cache(names: list[str], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of an attention: new keys are rotated as they are stored, not all keys at every step."""
    call = _Call(names, args, kwargs)
    cache, context = call["past_key_values"], kwargs.get(attention.CONTEXT)
    if cache is None or context is None:
        return None
    return call.changed(past_key_values=attention.rotating(cache, context), keys_are_rotated=True)


def begin_forward(names: list[str], stack: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pre-hook of a stack: makes the positions of this forward pass and hands them down.

    Explicit `position_ids` win; else they come from the attention mask (`positions_of`).
    """
    call = _Call(names, args, kwargs)
    cache, mask, ids = call["past_key_values"], call["attention_mask"], call["position_ids"]
    embeds = call["inputs_embeds"]
    if embeds is None and call["input_ids"] is None:
        return None  # the host says what is missing
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
        ids = ids.reshape(-1, length).long()
        start, consecutive = past - ids[:, :1], _rises_by_one(ids)
    context = PositionContext(stack.posenc, positions=ids, past=past, start=start, consecutive=consecutive)
    changes: dict[str, Any] = {"position_ids": ids, attention.CONTEXT: context}
    if call["token_type_ids"] is None and stack._posenc_needs_token_types:
        changes["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
    return call.changed(**changes)


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
        raise ValueError(
            f"{what} {total} tokens is longer than max_length={limit} of this model's {stack.posenc.type!r} encoding: "
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
