"""Position embeddings of time series with several channels: PatchTST.

Shapes: B batch, C channels, L patches, D hidden_size.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_posenc.architectures.components.component import PositionComponent, UnsupportedModelError, is_one_of
from hf_posenc.architectures.components.position_parameters import PositionParameter
from hf_posenc.architectures.components.vision import count_extra_tokens

TABLES = {"PatchTSTPositionalEncoding": "position_enc"}
"""The parameter `[L, D]` of each module class. Its first row belongs to the class token, if there is one."""


class SeriesTable(PositionParameter):
    """Position embeddings that a module adds to each channel of `[B, C, L, D]`.

    The module also adds the class token and applies dropout. Attentions process each channel separately, so all channels have
    the same positions.
    """

    layer_token_axis = -2

    def __init__(self, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> None:
        if stack.config.channel_attention:
            raise UnsupportedModelError(
                f"{type(stack).__name__} has channel_attention=True, so its attention alternates between patches and channels, "
                "and channels have no positions",
                reason="attention to channels",
                remedy="Load it with channel_attention=False and train it.",
            )
        owner = path.rpartition(".")[0]
        super().__init__(path, modules[owner], count_extra_tokens(modules), (owner, modules[owner]))
        self.is_computed = stack.config.positional_encoding_type == "sincos"

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[PositionComponent]:
        for path, module in modules.items():
            if is_one_of(TABLES, module):
                yield cls(f"{path}.{TABLES[type(module).__name__]}", stack, modules)

    @classmethod
    def at(cls, path: str, stack: Any, modules: Mapping[str, nn.Module]) -> PositionComponent:
        return cls(path, stack, modules)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "sinusoidal" if self.is_computed else "learned"

    @property
    def claimed(self) -> tuple[str, ...]:
        return (self.near_path,)
