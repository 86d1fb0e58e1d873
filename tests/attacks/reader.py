"""A process that answers requests, one JSON object a line, with models that it has not made: `python reader.py [bare]`.

bare: `hf_posenc` can't be imported, so the code in a checkpoint is what runs (trust_remote_code=True).
"""

import json
import sys
import traceback
import warnings
from typing import Any

if "bare" in sys.argv:
    sys.modules["hf_posenc"] = None  # type: ignore[assignment]

import torch
import transformers


@torch.no_grad()
def answer(source: str, auto: str, inputs: str, result: str, call: str = "", push: str = "", **loading: Any) -> str:
    """Load a model, write its output to a file, push the model, and name its class.

    call: a function of hf_posenc that loads it.
    """
    if "bare" not in sys.argv:
        import hf_posenc
    cls = getattr(transformers, auto)
    if "dtype" in loading:
        loading["dtype"] = getattr(torch, loading["dtype"])
    model = getattr(hf_posenc, call)(source, cls, **loading) if call else cls.from_pretrained(source, **loading)
    given = torch.load(inputs)
    torch.save(model(**given, **({"use_cache": False} if getattr(model.config, "is_decoder", False) else {}))[0], result)
    if push:
        hf_posenc.push_to_hub(model, push)
    return type(model).__name__


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    said, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            reply = {"class": answer(**json.loads(line))}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=said, flush=True)


if __name__ == "__main__":
    main()
