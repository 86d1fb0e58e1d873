"""Saving and loading models with encodings: with the code they need, from safetensors files alone, whole or not at all."""

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import remote_code
from hf_posenc.encodings import PositionEncoding, refill
from hf_posenc.spec import PositionSpec, merged
from hf_posenc.user_code import is_ours


class EncodingConfigMixin(PreTrainedConfig if TYPE_CHECKING else object):  # type: ignore[misc]
    """A config with `position_encoding`. Loading refuses another type than was saved; saving adds the code it needs."""

    if TYPE_CHECKING:
        position_encoding: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if self.position_encoding is not None and not os.path.isfile(save_directory):
            spec, auto_classes = PositionSpec.parse(self.position_encoding), self._auto_classes()
            cls, options = spec.encoding, spec.encoding.by_part(dict(spec.options))
            try:
                files = remote_code.files(
                    type(self).__module__.rpartition(".")[2].removeprefix("posenc_"),
                    [(part, options[name]) for name, part in spec.parts.items()],
                    self,
                )
            except ValueError as reason:
                users = [part for part in spec.parts.values() if not is_ours(part.__module__)]
                names = " and ".join(f"{user.__module__}.{user.__qualname__}" for user in users)
                remedy = f"it loads where hf-posenc is installed and {names} is imported"
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
    """A model that initialises the parameters of its encodings. Loading raises if a checkpoint lacks some of them."""

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Transformers passes over a module all of whose own tensors are loaded; those within an encoding may not be.
        if isinstance(module, PositionEncoding):
            self._init_weights(module)
        else:
            super()._initialize_weights(module, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionEncoding):
            refill([module])
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
        # Every file that weights are read from is an argument here, also those named by a shard index, a config, an adapter.
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
    """The weight files in a folder, each with values that change when it is written."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in Path(folder).glob("*.safetensors")}


def _label(path: Path, encoding: str) -> None:
    """Write the encoding into the metadata of a weight file.

    Transformers accepts no metadata, and safetensors writes several entries in a random order, so that equal models would
    give different files. The format: https://huggingface.co/docs/safetensors.
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
