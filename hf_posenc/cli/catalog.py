"""The encodings, methods, and figures that the command line shows before it loads a model.

They are read from catalog.json, because the modules that define them import torch, which takes seconds. After you change
these modules, regenerate the file: `python -m hf_posenc.cli.catalog`.
"""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalog.json")


@functools.cache
def catalog() -> dict[str, Any]:
    """The contents of catalog.json.

    encodings: name -> the fields of `encodings.catalog.Entry`, and its `facts`.
    inject, where, methods: the allowed values of these arguments.
    extend_methods: kind of positions -> its methods.
    figures: name -> the first paragraph of its docstring.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def encodings() -> dict[str, Any]:
    """Name -> the fields of `encodings.catalog.Entry`, and its `facts`, including registered custom encodings."""
    import sys

    if "hf_posenc.encodings" not in sys.modules:
        return catalog()["encodings"]
    return computed_encodings()


def computed_encodings() -> dict[str, Any]:
    from hf_posenc.encodings.catalog import entries

    return json.loads(json.dumps({name: {**asdict(row), "facts": row.facts()} for name, row in entries().items()}))


def computed() -> dict[str, Any]:
    """The contents of `catalog`, computed from the modules that define them, without custom encodings."""
    import inspect

    from hf_posenc import plots  # noqa: F401  # registers the figures
    from hf_posenc.configuration import INJECT, WHERE
    from hf_posenc.conversion.extension import METHODS, ROTARY, TABLES
    from hf_posenc.diagnostics.registry import FIGURES
    from hf_posenc.encodings.registry import list_encodings

    own = {name for name, encoding in list_encodings().items() if encoding.__module__.startswith("hf_posenc.")}
    return {
        "encodings": {name: row for name, row in computed_encodings().items() if name in own},
        "inject": [*INJECT],
        "where": [*WHERE],
        "methods": [*METHODS],
        "extend_methods": {"Learned positions": [*TABLES], "RoPE": [*ROTARY], "Encoders": ["windows"]},
        "figures": {name: inspect.getdoc(each.draw).partition("\n\n")[0] for name, each in sorted(FIGURES.items())},
    }


if __name__ == "__main__":
    from hf_posenc.serialization.atomic import write_text

    write_text(FILE, json.dumps(computed(), indent=1, ensure_ascii=False) + "\n")
