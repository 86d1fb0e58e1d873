"""Saves patched models with their outputs, or loads them in a new process, with or without the package.

    python tests/crossing.py save | with | without DIRECTORY

`tools/compat.py` runs it in environments with other versions of Transformers and torch.
"""

import json
import re
import sys
import warnings
from pathlib import Path

import torch

AUTO = {"encoder": "AutoModelForMaskedLM", "decoder": "AutoModelForCausalLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}
OTHERS = ("modernbert", "gemma3", "mistral", "mpnet", "bart", "t5", "vit", "wav2vec2")
"""Architectures for a composition of all mechanisms. Each single encoding is in one of BERT, GPT-2, and Llama."""
TOLERANCE = 1e-5


@torch.no_grad()
def save(folder):
    from checks.registry import Subject
    from models import ALL_WAYS, VARIANTS, suits

    pairs = [(host, ALL_WAYS) for host in OTHERS]
    for turn, encoding in enumerate(VARIANTS):
        hosts = [host for host in ("bert", "gpt2", "llama") if suits(host, encoding)]
        pairs.append((hosts[turn % len(hosts)], encoding))
    for host, encoding in pairs:
        it, path = Subject(host, encoding), folder / re.sub(r"\W", "_", f"{host} {encoding}")
        it.model.save_pretrained(path)
        expected = {"auto": AUTO.get(it.kind, "AutoModel"), "inputs": it.inputs(), "output": it.plain(it.model)}
        torch.save(expected, path / "expected.pt")


@torch.no_grad()
def problem(path, trust):
    """The problem with a saved model. Empty if there is none."""
    import transformers

    expected = torch.load(path / "expected.pt")
    try:
        model = getattr(transformers, expected["auto"]).from_pretrained(path, trust_remote_code=trust)
        ours = type(model).__module__.partition(".")[0] == "hf_posenc"
        if ours is (trust is True):
            return f"its class is in {type(model).__module__}"
        output = model(**expected["inputs"])[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    difference = (output - expected["output"]).abs().max() / expected["output"].abs().max()
    return "" if difference <= TOLERANCE else f"its output differs by {difference:.1e}"


def main(how, folder):
    warnings.simplefilter("ignore")
    if how == "save":
        save(Path(folder))
        return
    if how == "without":
        sys.modules["hf_posenc"] = None  # as if it weren't installed
    else:
        import hf_posenc  # noqa: F401
    trust = True if how == "without" else None
    print(json.dumps({path.name: problem(path, trust) for path in sorted(Path(folder).glob("*_*"))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
