"""Mixins that save and load models with encodings.

Models are saved atomically, with the code they need, and loaded only from safetensors files.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import _compat
from hf_posenc._versions import INSTALL
from hf_posenc.configuration import PositionSpec, merged
from hf_posenc.encodings import PositionEncoding, initialize_missing, is_marked, mark, portable
from hf_posenc.serialization.copies import ENTRY, IS_COPY, copy_code

if TYPE_CHECKING:
    from hf_posenc.encodings.mapped_tables import StoredTensor


class EncodingConfigMixin(PreTrainedConfig if TYPE_CHECKING else object):  # type: ignore[misc]
    """A config with `position_encoding`.

    Saving adds the code it needs. Loading raises a ValueError if the type differs from the saved one.
    """

    if TYPE_CHECKING:
        position_encoding: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if not IS_COPY:
            from hf_posenc.serialization.saving import config_files

            files = config_files(self)
            os.makedirs(save_directory, exist_ok=True)
            for name, text in files.items():
                Path(save_directory, name).write_text(text, encoding="utf-8")
        elif self.position_encoding is not None:
            spec = PositionSpec.parse(self.position_encoding)
            for cls in (part for each in spec.all_encodings for part in each.parts.values()):
                if cls.__module__.rpartition(".")[0] != __name__.rpartition(".")[0]:
                    raise ValueError(
                        f"{cls.__qualname__} can't be added to a model's own code. Run {INSTALL}, and patch with it."
                    )
            copy_code(save_directory)
            self.auto_map = {auto: f"{ENTRY}.{name}" for auto, name in self._auto_classes().items()}
        return super().save_pretrained(save_directory, *args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        written = super().to_dict()
        if self.position_encoding is not None:
            written["position_encoding"] = portable(written["position_encoding"])
        return written

    def complete(self) -> None:
        """Add the entries that a model needs and that depend only on this config. It is called before saving."""

    def _auto_classes(self) -> dict[str, str]:
        """Auto class -> name of the class that it loads."""
        raise NotImplementedError

    def _not_saved(self) -> str:
        """How to load a model whose code can't be saved, or "" if it can."""
        return ""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing, because `save_pretrained` writes the code and names all Auto classes."""

    @classmethod
    def _from_code(cls, encoding: Any) -> dict[str, Any]:
        """The canonical form of a `position_encoding` given in code, where strings may name files."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if "position_encoding" in kwargs:
            encoding = merged(config_dict.get("position_encoding"), kwargs.pop("position_encoding"))
            config_dict = {**config_dict, "position_encoding": None if encoding is None else cls._from_code(encoding)}
        return super().from_dict(config_dict, **kwargs)


class EncodingModelMixin(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """A model that initializes its encodings' parameters. Loading raises ValueError if a checkpoint lacks some of them."""

    initialized_whole: ClassVar[tuple[type[nn.Module], ...]] = (PositionEncoding,)
    """Modules that also initialize their submodules. Transformers skips modules that have no direct tensors."""

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, self.initialized_whole) and not is_marked(module):
            self._init_weights(module)
            mark(module)
        else:
            super()._initialize_weights(module, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionEncoding):
            initialize_missing([module])
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        for kind, remedy in (
            (
                "missing_keys",
                "The file is incomplete or was never patched. Load it with its own class, then call hf_posenc.patch.",
            ),
            (
                "unexpected_keys",
                "The config names another encoding than the weights were saved with, or a module that needs them was replaced, "
                "such as by quantization. Restore the config, or load the model without quantization.",
            ),
            ("mismatched_keys", "The config has other sizes than the weights were saved with. Restore the config."),
        ):
            names = (key if isinstance(key, str) else key[0] for key in info[kind])
            keys = sorted(name for name in names if "posenc." in name)
            if keys:
                raise ValueError(f"{pretrained_model_name_or_path} has {kind} {', '.join(keys[:4])}. {remedy}")
        return (model, info) if wanted else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The arguments include every file with weights, also those named by a shard index, a config, or an adapter.
        shards = ((load_config.sharded_metadata or {}).get("weight_map") or {}).values()
        for file in (*(checkpoint_files or ()), *shards):
            if not str(file).endswith(".safetensors"):
                raise ValueError(
                    f"{file} is not a safetensors file and was not opened. Other weights are pickles, which can run any code. "
                    "Load them with the program that they are from, and save them with save_pretrained."
                )
        for name in shards:
            if re.search(r"[/\\:]", name):
                raise ValueError(
                    f"The index of this checkpoint names {name!r}, which isn't a file in its directory. Restore it."
                )
        encodings = (module for module in model.modules() if isinstance(module, PositionEncoding))
        for table in (table for encoding in encodings for table in encoding.stored().values()):
            raise ValueError(
                f"{table.path} was given, but this checkpoint has its table in its own weights. Omit the file, or patch the "
                "original model with it."
            )
        info, *others = PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, *args, **kwargs
        )
        _restore(model, checkpoint_files or (), info)
        return info, *others

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        if not self.should_save_on_this_rank(is_main_process) or kwargs.get("distributed_checkpoint"):
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # saves nothing, or this rank's part
        else:
            given: Any = args[0] if args else kwargs.get("state_dict")
            tables = [] if given is None or _compat.has_adapters(self) else _stored_names(self)
            if missing := [name for name in tables if name not in given]:
                raise ValueError(
                    f"state_dict lacks {missing[0]!r}, a table in a separate file, without which the model can't be loaded. "
                    "Add the tensor of model.state_dict(), or omit state_dict. Nothing was saved."
                )
            with contextlib.nullcontext(Path(save_directory)) if IS_COPY else _replaced(save_directory) as folder:
                super().save_pretrained(folder, is_main_process, *args, **_named(kwargs, save_directory))
        self.barrier_after_gathered_checkpoint_save(getattr(self.config, "distributed_config", None))


def _replaced(directory: Any) -> contextlib.AbstractContextManager[Path]:
    from hf_posenc.serialization.atomic import replaced

    return replaced(directory)


def _restore(model: Any, files: Iterable[str], info: Any) -> None:
    """Let encodings read their own tensors from a checkpoint's files, and correct the lists of missing and unexpected keys."""
    places: dict[str, str] = {}
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    for path, module in model.named_modules():
        if not isinstance(module, PositionEncoding):
            continue

        def find(name: str, path: str = path) -> "StoredTensor | None":
            from hf_posenc.encodings.mapped_tables import StoredTensor, tensor_names

            if not places:
                places.update({key: file for file in files for key in tensor_names(file)})
            key = _key(f"{path}.{name}", places)
            if key is None:
                return None
            info.unexpected_keys.difference_update((key, f"{path}.{name}"))
            return StoredTensor(places[key], key)

        for name, tensor in module.restore(find).items():
            placed = tensor.to(device)
            mark(placed)
            setattr(module, name, placed)
            info.missing_keys.discard(f"{path}.{name}")


def _key(name: str, keys: Iterable[str]) -> str | None:
    """The key of a tensor in files whose model may be a submodel of this model, or contain it.

    None if no key or several keys match.
    """
    tail = name[name.index("posenc") :]
    alike = [key for key in keys if f".{key}".endswith(f".{tail}")]
    near = [key for key in alike if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")]
    return next(iter(near or alike), None) if len(near or alike) == 1 else None


def _named(kwargs: dict[str, Any], save_directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of `save_pretrained` for a temporary directory. The repository is named after the given directory."""
    return {"repo_id": Path(save_directory).absolute().name, **kwargs}


def _stored_names(model: Any) -> list[str]:
    """The state_dict names of a model's tensors that are stored in separate files."""
    encodings = [(path, module) for path, module in model.named_modules() if isinstance(module, PositionEncoding)]
    return [f"{path}.{name}" for path, module in encodings for name in module.stored()]
