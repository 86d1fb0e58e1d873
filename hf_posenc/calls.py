"""The arguments of a module's call, for hooks that read or change them."""

import inspect
from typing import Any

from torch import nn


def argument_names(module: nn.Module) -> list[str]:
    """The arguments of a module's forward, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


class Call:
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

    def of_type(self, kind: type) -> Any:
        """The first argument of a type, or None: hosts name their caches differently."""
        return next((value for value in (*self.args, *self.kwargs.values()) if isinstance(value, kind)), None)
