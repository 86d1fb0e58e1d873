"""The embedding layer by itself, for any torch model: hidden = inputs_embeds + PE(position).

Shapes: B batch, L tokens, D hidden_size.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import remote_code
from hf_posenc.encodings import (
    Above,
    Geometry,
    PositionEncoding,
    build,
    canonical,
    checked_max_length,
    checked_value,
    encoding_class,
    merged,
    positions_of,
)


class EncodingConfigMixin(PreTrainedConfig if TYPE_CHECKING else object):  # type: ignore[misc]
    """A config whose `position_encoding` can't be exchanged on loading, and which is saved with the code it needs."""

    if TYPE_CHECKING:
        position_encoding: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if self.position_encoding is not None and not os.path.isfile(save_directory):
            cls, auto_classes = encoding_class(self.position_encoding["type"]), self._auto_classes()
            try:
                files = remote_code.files(
                    type(self).__module__.rpartition(".")[2].removeprefix("posenc_"), cls.part_classes().values()
                )
            except ValueError as reason:
                remedy = f"it loads where hf-posenc is installed and {cls.__module__}.{cls.__qualname__} is imported"
                warnings.warn(f"{reason}. The model is saved without its code: {remedy}", stacklevel=3)
                files = remote_code.without_code(cls.type, remedy)
                auto_classes = {"AutoConfig": auto_classes["AutoConfig"]}
            self.auto_map = {auto: f"{remote_code.ENTRY}.{name}" for auto, name in auto_classes.items()}
            os.makedirs(save_directory, exist_ok=True)
            for name, text in files.items():
                Path(save_directory, name).write_text(text, encoding="utf-8")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def _auto_classes(self) -> dict[str, str]:
        """Auto class -> the class it loads."""
        raise NotImplementedError

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: `save_pretrained` writes the code and names all Auto classes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if "position_encoding" in kwargs:
            encoding = merged(config_dict.get("position_encoding"), kwargs.pop("position_encoding"))
            config_dict = {**config_dict, "position_encoding": encoding}
        return super().from_dict(config_dict, **kwargs)


class EncodingModelMixin(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """A model which fills its encodings' parameters, and whose checkpoints don't lose them without a word."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionEncoding):
            with torch.no_grad():
                module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        for kind, remedy in (
            ("missing_keys", "the file is incomplete or was never patched: load it as what it is, then hf_posenc.patch"),
            ("unexpected_keys", "its config asks for another encoding than its weights were saved with: restore the config"),
            ("mismatched_keys", "its config asks for other sizes than its weights were saved with: restore the config"),
        ):
            names = (key if isinstance(key, str) else key[0] for key in info[kind])
            keys = sorted(name for name in names if "posenc." in name)
            if keys:
                raise ValueError(f"{pretrained_model_name_or_path}: {kind} {', '.join(keys[:4])}; {remedy}")
        return (model, info) if wanted else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # All files that weights are read from pass here, whoever named them: the user, a shard index, a config, an adapter.
        shards = ((load_config.sharded_metadata or {}).get("weight_map") or {}).values()
        for file in (*(checkpoint_files or ()), *shards):
            if not str(file).endswith(".safetensors"):
                raise ValueError(
                    f"{file} is not a safetensors file and was not opened: other weights are pickles, which can run any code. "
                    "Load them with the program that they are from, and save with save_pretrained"
                )
        for name in shards:
            if re.search(r"[/\\:]", name):
                raise ValueError(f"the index of this checkpoint names {name!r}, which is no file of its own folder")
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        for module in self.modules():
            if isinstance(module, PositionEncoding) and module.blend != 1.0:
                raise ValueError(
                    f"the {module.type!r} encoding is at blend {module.blend}, which is not saved: set posenc.blend = 1.0 first"
                )
        before = _weight_files(save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if self.should_save_on_this_rank(is_main_process):
            encoding = json.dumps(self.config.position_encoding, sort_keys=True)
            for path, stamp in _weight_files(save_directory).items():
                if before.get(path) != stamp:
                    _label(path, encoding)


def _weight_files(folder: str | os.PathLike[str]) -> dict[Path, Any]:
    """The weight files in a folder, and what changes when one is written."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path(folder).glob("*.safetensors")}


def _label(path: Path, encoding: str) -> None:
    """Write the encoding into the header of a weight file, so that the file by itself tells what is in it.

    Transformers takes no metadata, and safetensors writes several entries in an order that changes, so that equal models
    would be different files. The format: https://huggingface.co/docs/safetensors.
    """
    labelled = path.with_suffix(".labelled")
    try:
        with path.open("rb") as file, labelled.open("wb") as copy:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.setdefault("__metadata__", {})["position_encoding"] = encoding
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-(8 + len(text)) % 64)
            copy.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, copy, length=2**24)
        shutil.copymode(path, labelled)
        os.replace(labelled, path)
    finally:
        labelled.unlink(missing_ok=True)


class PositionEmbeddingConfig(EncodingConfigMixin, PreTrainedConfig):
    """Config of a `PositionEmbedding`: its arguments of the same names."""

    model_type = "posenc-embedding"
    position_encoding: Any = None
    hidden_size: int = 768
    max_length: int | None = None
    dropout: float | int = 0.0
    batch_first: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        checked_value("hidden_size", self.hidden_size, Annotated[int, Above(0)])
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout}: allowed is a number from 0 to 1")
        checked_max_length(self.max_length)
        if self.position_encoding is not None:
            self.position_encoding = canonical(self.position_encoding)

    def _auto_classes(self) -> dict[str, str]:
        return {"AutoConfig": "PositionEmbeddingConfig", "AutoModel": "PositionEmbedding"}


class PositionEmbedding(EncodingModelMixin, PreTrainedModel):
    """Adds the vectors of a position encoding to token embeddings, then drops out (Vaswani et al., 2017, section 5.4).

    It saves and loads like any model, `save_pretrained`, `from_pretrained`, `AutoModel.from_pretrained`.

    Args:
        encoding: name or dict of an encoding which embeds (sinusoidal, learned, …). Others raise a ValueError.
        hidden_size: D.
        max_length: the longest input; a learned table's number of rows. None: no limit.
        dropout: probability, applied to the sum.
        batch_first: `[B, L, D]`, or `[L, B, D]` when False, as `torch.nn.Transformer` has it.
        device, dtype: of the parameters.
        **options: of the encoding.
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
                raise ValueError(f"a config says all; {', '.join(beside)} beside it would be ignored: set it in the config")
        else:
            chosen = {"type": encoding} if isinstance(encoding, str) else encoding
            config = PositionEmbeddingConfig(  # type: ignore[call-arg]
                position_encoding=canonical({**chosen, **options} if isinstance(chosen, dict) else chosen),
                hidden_size=hidden_size,  # type: ignore[arg-type]
                max_length=max_length,
                dropout=dropout,
                batch_first=batch_first,
            )
        super().__init__(config)
        chosen = canonical(config.position_encoding)
        self.posenc = build(chosen, Geometry(hidden_size=config.hidden_size, max_length=config.max_length))
        if self.posenc.acts_by() != ("embed",):
            raise ValueError(
                f"{chosen['type']!r} doesn't act by vectors alone that could be added to embeddings; it belongs into a model's "
                f"attention: hf_posenc.patch(model, {chosen['type']!r})"
            )
        self.dropout = nn.Dropout(config.dropout)
        # Transformers neither saves a model without any tensor nor knows its dtype.
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
        """`[B, L, D] -> [B, L, D]`, in the dtype of `inputs_embeds` (sequence-first: `[L, B, D]`).

        Args:
            position_ids: `[L]` or `[B, L]`; they win over all else.
            attention_mask: `[B, past_length + L]`, 1 for real tokens: positions count from the first of them.
            past_length: how many tokens came before these, in earlier calls.
        """
        if not self.config.batch_first:
            return self._add(inputs_embeds.transpose(0, 1), position_ids, attention_mask, past_length).transpose(0, 1)
        return self._add(inputs_embeds, position_ids, attention_mask, past_length)

    def _add(self, embeds: Tensor, position_ids: Tensor | None, mask: Tensor | None, past_length: int) -> Tensor:
        if embeds.ndim != 3 or embeds.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {tuple(embeds.shape)}: expected [batch, length, {self.config.hidden_size}]"
            )
        batch, length = embeds.shape[:2]
        total, limit = past_length + length, self.config.max_length
        if past_length < 0:
            raise ValueError(f"past_length={past_length}: allowed is an integer from 0")
        if limit is not None and total > limit:
            raise ValueError(f"{total} positions are more than max_length={limit}: crop the input, or make a longer layer")
        if position_ids is None:
            if mask is not None and mask.ndim != 4 and mask.shape not in ((1, total), (batch, total)):
                raise ValueError(f"attention_mask has shape {tuple(mask.shape)}: expected [{batch}, {total}]")
            position_ids, _ = positions_of(length, past_length, mask, embeds.device)
        elif position_ids.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"position_ids have shape {tuple(position_ids.shape)}: expected [{batch}, {length}]")
        return self.dropout(embeds + self.posenc.embed(position_ids).to(embeds.dtype))


class TokenPositionEmbedding(nn.Module):
    """Token ids to hidden states: a token embedding and a `PositionEmbedding`, `[B, L] -> [B, L, D]`.

    Args: as of `PositionEmbedding`, and `vocab_size`, `padding_idx` as of `torch.nn.Embedding`.
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
