"""Where positions enter a host, found by its structure; a table row only for attentions that are written out.

A *stack* is the part of a model which makes positions for a row of attentions (BertModel, GPT2Model). Its ports are the
tables it adds to its inputs, its self-attentions, and relative biases of its own.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.encodings import Geometry

TABLE_NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
CROSS_ATTENTION = re.compile(r"(^|\.)(crossattention|encoder_attn|cross_attn|EncDecAttention)(\.|$)")
OTHER_SOURCES = re.compile(r"rotary|rope|relative|rel_pos|alibi|pos_conv|pos_embed|position", re.IGNORECASE)
PLACE_ON_A_PAGE = re.compile(r"[xyhw]_position_embeddings$")
"""LayoutLM's tables of box coordinates, which are an input of their own and know nothing of word order."""
LENGTH_FIELD = "max_position_embeddings"
"""The config field that holds the longest length; hosts with another name for it map it (GPT-2's n_positions)."""


@dataclass(frozen=True)
class WrittenOut:
    """An attention which multiplies queries and keys itself, beside Transformers' attention interface.

    query, key, value, out: the names of its projections; no `out` where that is another module's work.
    """

    query: str
    key: str
    value: str
    out: str | None = None


WRITTEN_OUT = {
    "MPNetSelfAttention": WrittenOut("q", "k", "v", "o"),
    "MegatronBertSelfAttention": WrittenOut("query", "key", "value"),
    "RemBertSelfAttention": WrittenOut("query", "key", "value"),
}
"""By class name; each computes softmax(QKᵀ/√E + mask) V and takes further keyword arguments."""
BIAS_MAKERS = {"MPNetEncoder": ("relative_attention_bias", "compute_position_bias")}
"""Modules with a relative bias of their own: class name -> the table, and the method that makes the bias from it."""


@dataclass
class Ports:
    """What was found in one stack, dotted path -> module: position tables, self-attentions, tables of relative biases.

    offset: the id of the first token. RoBERTa's ids begin behind its padding_idx, so 514 rows serve 512 tokens.
    """

    tables: dict[str, nn.Embedding]
    attentions: dict[str, nn.Module]
    biases: dict[str, nn.Embedding]
    offset: int = 0

    def __bool__(self) -> bool:
        return bool(self.tables or self.attentions)


def find(stack: nn.Module) -> Ports:
    """The ports of a stack that is not patched yet; stacks within it that are patched already are passed over.

    Raises ValueError where only some of the sources of position could be taken over.
    """
    patched = tuple(f"{name}." for name, module in stack.named_modules() if name and is_patched(module))
    modules = {name: module for name, module in stack.named_modules() if not f"{name}.".startswith(patched)}
    attentions = {name: module for name, module in modules.items() if _is_self_attention(name, module)}
    tables = {name: module for name, module in modules.items() if name.rpartition(".")[2] in TABLE_NAMES}
    biases = {
        f"{name}.{table}".lstrip("."): getattr(module, table)
        for name, module in modules.items()
        for table, _ in [BIAS_MAKERS.get(_class_name(module), (None, None))]
        if table
    }
    if not attentions and not tables:
        return Ports({}, {}, {})
    known = {*tables, *biases, *(name for name in modules if PLACE_ON_A_PAGE.search(name))}
    others = {
        name
        for name, module in modules.items()
        if name not in known and OTHER_SOURCES.search(f"{name.rpartition('.')[2]} {type(module).__name__}")
    }
    others |= {
        name
        for name, _ in stack.named_parameters()
        if OTHER_SOURCES.search(name) and name.rpartition(".")[0] not in known and not name.startswith(patched)
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
        if type(table) is not nn.Embedding or table.num_embeddings != rows:
            raise ValueError(
                f"{type(stack).__name__}.{name} counts its positions in a way of its own (a {type(table).__name__} of "
                f"{getattr(table, 'num_embeddings', '?')} rows for {LENGTH_FIELD}={rows}). It was left as it is"
            )
    offsets = {0 if table.padding_idx is None else table.padding_idx + 1 for table in tables.values()}
    if len(offsets) > 1:
        raise ValueError(f"the tables of {type(stack).__name__} begin at different ids: {offsets}. It was left as it is")
    written_out = [name for name, module in attentions.items() if written_out_as(module)]
    if written_out and getattr(stack.config, "is_decoder", False):
        raise ValueError(
            f"{type(stack).__name__}.{written_out[0]} computes its attention by itself, beside Transformers' interface, and "
            "is served as an encoder only: load it with is_decoder=False. It was left as it is"
        )
    arguments = inspect.signature(type(stack).forward).parameters
    if "position_ids" not in arguments or all(a.kind is not a.VAR_KEYWORD for a in arguments.values()):
        raise ValueError(
            f"{type(stack).__name__}.forward doesn't take position_ids and further keyword arguments, by which positions "
            "would reach its layers. It was left as it is"
        )
    return Ports(tables, attentions, biases, offsets.pop())


def is_patched(module: nn.Module) -> bool:
    """Whether a module is a stack with an encoding lent to it."""
    return isinstance(module, PreTrainedModel) and "posenc" in module._modules


def written_out_as(module: nn.Module) -> WrittenOut | None:
    """The row of an attention beside the interface."""
    return WRITTEN_OUT.get(_class_name(module))


def _class_name(module: nn.Module) -> str:
    """Of Transformers' own classes: a class of the same name elsewhere is another one."""
    return type(module).__name__ if type(module).__module__.startswith("transformers.models.") else ""


def none_found(host: type[PreTrainedModel]) -> ValueError:
    """The refusal of a host without ports."""
    return ValueError(
        f"{host.__name__} has no ports for a position encoding: neither a position table nor an attention of "
        "Transformers' interface was found in it"
    )


def _is_self_attention(name: str, module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    on_interface = "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())
    if not on_interface and not written_out_as(module):
        return False
    return not CROSS_ATTENTION.search(name) and not getattr(module, "is_cross_attention", False)


def layers(attentions: Any) -> dict[str, str]:
    """The layer that each attention path lies in -> the path of that layer's attention block.

    Raises ValueError for an attention outside a numbered layer.
    """
    found = {}
    for name in attentions:
        match = re.match(r"((?:.*\.)?\d+)\.[^.]+", name)
        if match is None:
            raise ValueError(f"{name} lies in no numbered layer, so nothing can be injected there: use inject='input'")
        found[match[1]] = match[0]
    return found


def geometry(stack: Any, ports: Ports, max_length: int | None, inject: str = "input") -> Geometry:
    """The sizes that an encoding for this stack is built with. Tables can be narrower than layers (ALBERT, ELECTRA)."""
    config = stack.config
    first = next(iter(ports.attentions.values()))
    head_dim = getattr(first, "head_dim", None) or getattr(first, "attention_head_size", None)
    return Geometry(
        hidden_size=next(iter(ports.tables.values())).embedding_dim if inject == "input" else config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        max_length=max_length,
        is_causal=bool(getattr(first, "is_causal", False)),
    )
