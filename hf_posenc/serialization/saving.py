"""The files saved with a config: the code that its model needs."""

import warnings
from typing import Any

from hf_posenc._versions import INSTALL
from hf_posenc.configuration import PositionSpec
from hf_posenc.encodings import portable
from hf_posenc.serialization import remote_code
from hf_posenc.serialization.copies import ENTRY
from hf_posenc.serialization.user_code import is_ours


def config_files(config: Any) -> dict[str, str]:
    """Name -> source of the code saved with a config. Sets the config's `auto_map`. Warns if the code can't be saved."""
    files = {}
    if config.position_encoding is not None and (why := config._not_saved()):
        files, config.auto_map = remote_code.without_code(why), {"AutoConfig": f"{ENTRY}.{type(config).__name__}"}
    elif config.position_encoding is not None:
        config.complete()
        spec, auto_classes = PositionSpec.parse(config.position_encoding), config._auto_classes()
        parts = [
            (part, each.encoding.by_part(portable(dict(each.options)))[name])
            for each in spec.all_encodings
            for name, part in each.parts.items()
        ]
        try:
            files = remote_code.files(type(config).__module__, parts, config)
        except ValueError as reason:
            users = [part for part, _ in parts if not is_ours(part.__module__)]
            names = " and ".join(f"{user.__module__}.{user.__qualname__}" for user in users)
            remedy = f"It loads where hf-posenc is installed and {names} is imported."
            warnings.warn(f"{str(reason).removesuffix('.')}. The model is saved without its code. {remedy}", stacklevel=3)
            files = remote_code.without_code(
                f"The class of this model's position encoding {spec.type!r} isn't saved with it. Run {INSTALL}. {remedy}"
            )
            auto_classes = {"AutoConfig": auto_classes["AutoConfig"]}
        config.auto_map = {auto: f"{ENTRY}.{name}" for auto, name in auto_classes.items()}
    return files
