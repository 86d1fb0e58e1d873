"""What the command line shows before any model is loaded: encodings, methods, and figures.

Read from catalog.json, since the modules that define them import torch, which takes seconds. Write the file again after a
change of them: `python -m hf_posenc.cli.catalog`.
"""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalog.json")


@functools.cache
def catalog() -> dict[str, Any]:
    """encodings: name -> the fields of `encodings.catalog.Entry`, and its `facts`. inject, where, methods: what arguments
    take. extend_methods: the methods by kind of positions. figures: name -> the first paragraph of its docstring."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def encodings() -> dict[str, Any]:
    """Name -> the fields of `encodings.catalog.Entry`, and its `facts`. Custom encodings that are registered are included."""
    import sys

    if "hf_posenc.encodings" not in sys.modules:
        return catalog()["encodings"]
    return computed_encodings()


def computed_encodings() -> dict[str, Any]:
    from hf_posenc.encodings.catalog import entries

    return json.loads(json.dumps({name: {**asdict(row), "facts": row.facts()} for name, row in entries().items()}))


def computed() -> dict[str, Any]:
    """The same as `catalog`, from the modules that define it; without custom encodings."""
    import inspect

    from hf_posenc import plots  # noqa: F401  # registers the figures
    from hf_posenc.configuration import INJECT, WHERE
    from hf_posenc.conversion.extension import CHOICE, METHODS
    from hf_posenc.diagnostics.registry import FIGURES
    from hf_posenc.encodings.registry import list_encodings

    own = {name for name, encoding in list_encodings().items() if encoding.__module__.startswith("hf_posenc.")}
    return {
        "encodings": {name: row for name, row in computed_encodings().items() if name in own},
        "inject": [*INJECT],
        "where": [*WHERE],
        "methods": [*METHODS],
        "extend_methods": CHOICE,
        "figures": {name: inspect.getdoc(each.draw).partition("\n\n")[0] for name, each in sorted(FIGURES.items())},
    }


if __name__ == "__main__":
    from hf_posenc.serialization.atomic import write_text

    write_text(FILE, json.dumps(computed(), indent=1, ensure_ascii=False) + "\n")
