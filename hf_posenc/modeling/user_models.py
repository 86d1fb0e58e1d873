"""Derived classes and eager attention functions of custom classes. No checkpoint contains this module."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.architectures.components.component import is_transformers
from hf_posenc.attention import dispatch
from hf_posenc.modeling import derived

OWN: dict[type, Any] = {}
"""Custom class -> its derived class. Different modules may contain classes with the same name."""


def named(name: str) -> dict[str, Any]:
    """Module -> class, for each imported custom config or model class with this name."""
    bases = (PreTrainedConfig, PreTrainedModel)
    return {cls.__module__: cls for base in bases for cls in _users(base) if cls.__name__ == name}


def _users(base: Any) -> Iterator[Any]:
    """All subclasses of a Transformers class that neither Transformers nor hf-posenc defines."""
    for cls in base.__subclasses__():
        yield from _users(cls)
        if not is_transformers(cls) and not hasattr(cls, "original_class"):
            yield cls


def derived_once(host: Any, make: Callable[[Any], Any]) -> Any:
    """The derived class of a custom class, created on first access."""
    if host not in OWN:
        OWN[host] = cls = make(host)
        # Otherwise, saving would copy this module.
        cls._auto_class, cls.__reduce_ex__ = None, _reduced
        if issubclass(host, PreTrainedModel):
            cls.__init__ = with_one_post_init(host)
    return OWN[host]


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """The reduced form of an object whose class is derived from a custom class.

    Copies and pickles refer to the custom class, so that its module is imported.
    """
    _, (_, *arguments), *state = super(type(self), self).__reduce_ex__(protocol)
    return _empty, (type(self).original_class, *arguments), *state


def _empty(host: type, *arguments: Any) -> Any:
    cls = derived.derive(host)
    return cls.__new__(cls, *arguments)


def with_one_post_init(host: type[PreTrainedModel]) -> Callable[..., None]:
    """The `__init__` of a class derived from a custom class, which runs post_init only at its end.

    If a model's `__init__` calls post_init, that of a subclass may replace modules afterwards and call it again.
    """

    @functools.wraps(host.__init__)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        vars(self)[derived.DEFERRED_POST_INIT] = []
        derived.PosEncModelMixin.__init__(self, config, *args, **kwargs)
        if not vars(self).pop(derived.DEFERRED_POST_INIT):
            raise ValueError(
                f"{host.__name__}.__init__ doesn't end with self.post_init(), which installs the encoding. Call it there, as "
                "every PreTrainedModel must."
            )
        self.post_init()

    return __init__


def own_eager_function(module: nn.Module) -> dispatch.Function | None:
    """The eager function that the forward of an attention outside Transformers refers to.

    It may have any name. A subclass may be in another module than the forward that it inherits.
    """
    forward = inspect.unwrap(type(module).forward)
    scope = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    functions = {name: value for name, value in scope.items() if inspect.isfunction(value)}
    taking = [value for value in functions.values() if list(inspect.signature(value).parameters)[:1] == ["module"]]
    return functions.get("eager_attention_forward") or (taking[0] if len(taking) == 1 else None)
