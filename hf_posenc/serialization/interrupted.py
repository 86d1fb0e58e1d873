"""The marker that an interrupted save leaves in place of config.json."""

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
MARKER = "interrupted_save"


def refuse_interrupted(config: dict[str, Any] | Path) -> None:
    """Raises ValueError if a config.json, given as its content or its path, is the marker of an interrupted save."""
    where: Any = "this directory"
    if isinstance(config, Path):
        where = config.parent
        config = json_of(config)
    if isinstance(config, dict) and MARKER in config:
        raise ValueError(
            f"The last save into {where} was interrupted, so its files belong to two models. Restore the earlier model with "
            f"`hf-posenc inspect {'DIRECTORY' if where == 'this directory' else where}`, save the model again, or load another "
            "checkpoint."
        )


def json_of(path: Path) -> Any:
    """The content of a JSON file. None if it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
