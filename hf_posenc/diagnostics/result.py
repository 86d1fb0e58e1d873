"""The base class of diagnostic results, with plain fields and conversion to JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

R = TypeVar("R", bound="Result")


@dataclass(frozen=True, eq=False)
class Result:
    """Base class of all results. Tensors are float64 on the CPU. NaN means undefined, such as later keys in a decoder, or a
    distance that no pair of tokens has.

    In JSON, undefined numbers are null, and infinite ones are "inf" or "-inf". Two results are equal if their JSON is.
    """

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values: numbers, strings, lists, and dicts."""
        values = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"diagnostic": type(self).__name__, **values}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def checked(cls: type[R], result: Any) -> R:
        """The result, if it is of this class. Raises ValueError for anything else."""
        if not isinstance(result, cls):
            raise ValueError(f"This figure needs a {cls.__name__} of hf_posenc.diagnostics, not a {type(result).__name__}.")
        return result

    @classmethod
    def named(cls: type[R], results: R | Mapping[str, R]) -> dict[str, R]:
        """The results that a figure compares, by name. A single result is named after its model. Raises ValueError if empty."""
        if not isinstance(results, Mapping):
            return {getattr(cls.checked(results), "model", ""): results}
        if not results:
            raise ValueError(f"There are no results. Pass one or more {cls.__name__} objects.")
        return {name: cls.checked(result) for name, result in results.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # equality compares values, some of which can't be hashed

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        raise NotImplementedError


def plain(value: Any) -> Any:
    """The value for JSON, with NaN as None, and infinite numbers as "inf" and "-inf"."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def ranged(values: Tensor) -> str:
    """The smallest and the largest number of a tensor, as text."""
    known = values[~values.isnan()]
    if not known.numel():
        return "undefined"
    least, most = f"{known.min():.3g}", f"{known.max():.3g}"
    return least if least == most else f"{least} to {most}"


def by_layer(values: Tensor) -> str:
    """The means over heads of `[layers, H]`, as text."""
    means = values.nanmean(-1).tolist()
    return ", ".join("undefined" if math.isnan(mean) else f"{mean:.3g}" for mean in means)


def heads(values: Tensor) -> str:
    """The number of heads of `[H, ...]`, as text."""
    return "all heads alike" if len(values) == 1 else f"{len(values)} heads"
