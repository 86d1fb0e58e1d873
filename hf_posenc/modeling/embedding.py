"""A position embedding layer for any torch model: hidden = inputs_embeds + PE(position).

Shapes: B batch, L tokens, D hidden_size.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.encodings import (
    Geometry,
    GreaterThan,
    build,
    canonical,
    checked_max_length,
    checked_value,
    encoding_class,
    length_of,
    position_ids_from_mask,
)
from hf_posenc.serialization.mixins import EncodingConfigMixin, EncodingModelMixin


class PositionEmbeddingConfig(EncodingConfigMixin, PreTrainedConfig):
    """Config of a `PositionEmbedding`, whose fields are the arguments of that class."""

    model_type = "posenc-embedding"
    position_encoding: Any = None
    hidden_size: int = 768
    max_length: int | None = None
    dropout: float | int = 0.0
    batch_first: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        checked_value("hidden_size", self.hidden_size, Annotated[int, GreaterThan(0)])
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout} isn't supported. Pass a number from 0 to 1.")
        checked_max_length(self.max_length)
        if self.position_encoding is not None:
            self.position_encoding = canonical(self.position_encoding)

    @classmethod
    def _from_code(cls, encoding: Any) -> dict[str, Any]:
        return canonical(encoding, in_code=True)

    def _auto_classes(self) -> dict[str, str]:
        return {"AutoConfig": "PositionEmbeddingConfig", "AutoModel": "PositionEmbedding"}


class PositionEmbedding(EncodingModelMixin, PreTrainedModel):
    """Adds the vectors of a position encoding to token embeddings and applies dropout (Vaswani et al., 2017, section 5.4).

    You can save and load it like any model, with `save_pretrained`, `from_pretrained`, and `AutoModel.from_pretrained`.

    Args:
        encoding: name or dict of an additive encoding (sinusoidal, learned, …). Others raise a ValueError.
        hidden_size: D.
        max_length: maximum length, which is the number of learned position embeddings. None: no limit.
        dropout: dropout probability, applied to the sum.
        batch_first: True for `[B, L, D]`, False for `[L, B, D]`, as in `torch.nn.Transformer`.
        device, dtype: device and dtype of the parameters.
        **options: options of the encoding.
    """

    config_class = PositionEmbeddingConfig
    base_model_prefix = ""
    main_input_name = "inputs_embeds"

    def __init__(
        self,
        encoding: str | dict[str, Any] | PositionEmbeddingConfig,
        hidden_size: int | None = None,
        *,
        max_length: int | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if isinstance(encoding, PositionEmbeddingConfig):
            config = encoding
            given = {"hidden_size": hidden_size, "max_length": max_length, **options}
            if beside := [name for name, value in given.items() if value is not None]:
                raise ValueError(f"With a config, {', '.join(beside)} would be ignored. Set the values in the config.")
        else:
            chosen = {"type": encoding} if isinstance(encoding, str) else encoding
            config = PositionEmbeddingConfig(  # type: ignore[call-arg]
                position_encoding=canonical({**chosen, **options} if isinstance(chosen, dict) else chosen, in_code=True),
                hidden_size=hidden_size,  # type: ignore[arg-type]
                max_length=max_length,
                dropout=dropout,
                batch_first=batch_first,
            )
        super().__init__(config)
        chosen = canonical(config.position_encoding)
        if encoding_class(chosen["type"]).mechanisms() != ("embed",):
            raise ValueError(
                f"{chosen['type']!r} isn't a purely additive encoding, so a PositionEmbedding doesn't support it. Apply it in "
                f"a model's attention with hf_posenc.patch(model, {chosen['type']!r})."
            )
        self.posenc = build(chosen, Geometry(hidden_size=config.hidden_size, max_length=config.max_length))
        self.dropout = nn.Dropout(config.dropout)
        # Transformers can't save a model without tensors or determine its dtype.
        self.register_buffer("zero", torch.zeros(()))
        self.post_init()
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)  # type: ignore[call-arg]

    zero: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.zero.dtype

    @property
    def device(self) -> torch.device:
        return self.zero.device

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.zeros_(self.zero)

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_length: int = 0,
    ) -> Tensor:
        """Add the vectors: `[B, L, D] -> [B, L, D]`, in the dtype of `inputs_embeds` (sequence-first: `[L, B, D]`).

        Args:
            position_ids: `[L]` or `[B, L]`. They take precedence over the other arguments.
            attention_mask: `[B, past_length + L]`, 1 for real tokens. Only these are counted.
            past_length: number of tokens in earlier calls.
        """
        if not self.config.batch_first:
            return self._add(inputs_embeds.transpose(0, 1), position_ids, attention_mask, past_length).transpose(0, 1)
        return self._add(inputs_embeds, position_ids, attention_mask, past_length)

    def _add(self, embeds: Tensor, position_ids: Tensor | None, mask: Tensor | None, past_length: int) -> Tensor:
        if embeds.ndim != 3 or embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(f"inputs_embeds has shape {tuple(embeds.shape)}. Pass [batch, length, {self.config.hidden_size}].")
        batch, length = embeds.shape[:2]
        total, limit = past_length + length, self.config.max_length
        if past_length < 0:
            raise ValueError(f"past_length={past_length} isn't supported. Pass an integer of 0 or more.")
        if limit is not None and (needed := length_of(total, position_ids, limit)) > limit:
            sized = self.posenc.needs_max_length(self.posenc.geometry)
            longer = f"hf_posenc.extend(layer, max_length=…{', method=…' if sized else ''})"
            raise ValueError(f"{needed} positions are more than max_length={limit}. Truncate the input, or call {longer}.")
        if position_ids is None:
            if mask is not None and mask.ndim != 4 and mask.shape not in ((1, total), (batch, total)):
                raise ValueError(f"attention_mask has shape {tuple(mask.shape)}. Pass [{batch}, {total}].")
            if mask is not None and mask.ndim == 2:
                position_ids = position_ids_from_mask(mask)[:, past_length:].clamp(min=0)
            else:
                position_ids = torch.arange(past_length, total, device=embeds.device)
        elif position_ids.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}. Pass [{batch}, {length}].")
        return self.dropout(embeds + self.posenc("embed", position_ids).to(embeds))


class TokenPositionEmbedding(nn.Module):
    """Maps token IDs to hidden states, `[B, L] -> [B, L, D]`, with a token embedding and a `PositionEmbedding`.

    It has the arguments of `PositionEmbedding`, and `vocab_size` and `padding_idx` of `torch.nn.Embedding`.
    """

    def __init__(
        self,
        vocab_size: int,
        encoding: str | dict[str, Any],
        hidden_size: int,
        *,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size, padding_idx=padding_idx, device=device, dtype=dtype)
        self.positions = PositionEmbedding(encoding, hidden_size, device=device, dtype=dtype, **options)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_length: int = 0,
    ) -> Tensor:
        return self.positions(self.tokens(input_ids), position_ids, attention_mask, past_length)
