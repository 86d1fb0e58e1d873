"""Arguments of a module's call, for hooks that read or change them, and names that the code of modules uses."""

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from torch import nn

TOKEN_INPUTS = frozenset(["input_ids", "inputs_embeds"])
"""Arguments of stacks that read tokens."""
TOKENS_AS = {"SpeechT5DecoderWithTextPrenet": "input_values", "SpeechT5EncoderWithTextPrenet": "input_values"}
"""Class of a stack -> its argument for token IDs, if the name isn't input_ids."""
IS_CAUSAL = "is_causal"
"""The config flag and forward argument with which Transformers makes a decoder bidirectional."""

FLATTENED = re.compile(r"input_ids\.(view|reshape)\(\s*-1,\s*input_(shape\[-1\]|ids\.(shape\[-1\]|size\(-1\)))\s*\)")
"""Matches the code with which Transformers models flatten IDs."""


def argument_names(module: nn.Module) -> list[str]:
    """The arguments of a module's forward method, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def required_arguments(module: nn.Module) -> list[str]:
    """The arguments of a module's forward method that have no default."""
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [each.name for each in arguments if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]


@functools.lru_cache(maxsize=1024)
def names_used(function: Any) -> tuple[str, ...]:
    """The names that the code of a function uses, beneath its decorators. Empty for a function without code."""
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def token_argument(module: nn.Module) -> str:
    """The name of a module's argument for token IDs."""
    return next((TOKENS_AS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in TOKENS_AS), "input_ids")


def reads_tokens(module: nn.Module) -> bool:
    """Whether a module reads token IDs."""
    return token_argument(module) in argument_names(module)


def flattens_ids(module: nn.Module) -> bool:
    """Whether a module flattens IDs with more dimensions than `[B, L]` to one text per row (multiple choice with GPT-2)."""
    if {"view", "reshape"}.isdisjoint(names_used(type(module).forward)):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # A class defined in the interactive interpreter has no source.
        return False
    return bool(FLATTENED.search(source))


def attributes_read(modules: Iterable[nn.Module]) -> set[str]:
    """The names of all attributes that the methods of these modules read, except the methods that create or initialize them."""
    made = ("__init__", "_init_weights")
    kinds = {
        kind for module in modules for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module
    }
    functions = (value for kind in kinds for name, value in vars(kind).items() if name not in made)
    codes = (getattr(inspect.unwrap(function), "__code__", None) for function in functions if callable(function))
    return {name for code in codes if code is not None for each in codes_within(code) for name in each.co_names}


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_within(constant)


class BoundCall:
    """The arguments of one call of a module by name, whether they were passed by position or by keyword."""

    def __init__(self, names: list[str], args: tuple, kwargs: dict[str, Any]) -> None:
        self.names, self.args, self.kwargs = names, args, kwargs

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        index = self.names.index(name) if name in self.names else len(self.args)
        return self.args[index] if index < len(self.args) else None

    def changed(self, **values: Any) -> tuple[tuple, dict[str, Any]]:
        """The arguments with some replaced. Positional arguments stay positional."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            if name in self.names and self.names.index(name) < len(args):
                args[self.names.index(name)] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    def of_type(self, kind: type) -> Any:
        """The first argument of a type, or None. It finds caches, whose argument names differ between models."""
        return next((value for value in (*self.args, *self.kwargs.values()) if isinstance(value, kind)), None)
