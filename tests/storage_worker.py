"""The functions that tests of stored position embeddings run in separate processes."""

import json
import os
import time
from pathlib import Path

import torch

ROWS, WIDTH = 1_000_000, 1024
"""The size of large position embeddings."""


def seen(folder):
    """Check that models from another process give bit-identical outputs.

    Loading in another dtype doesn't change their position embeddings.
    """
    from transformers import AutoModel, AutoModelForMaskedLM

    import hf_posenc  # noqa: F401
    from memory import poison_empty
    from models import first, tokens

    poison_empty()
    for name, expected in torch.load(Path(folder, "expected.pt")).items():
        kind = AutoModelForMaskedLM if expected["head"] else AutoModel
        for options in ({}, {"device_map": "cpu"}):
            model = kind.from_pretrained(Path(folder, name), **options)
            assert torch.equal(first(model(tokens())), expected["output"]), name
        half = kind.from_pretrained(Path(folder, name), dtype=torch.bfloat16)
        held = [key for key in half.state_dict() if "posenc." in key and ".original." not in key]
        for key in held:
            value, own = half.state_dict()[key], expected["held"][key.rpartition(".")[2]]
            assert value.dtype == own.dtype and torch.equal(value, own), (name, key)
        assert held and first(half(tokens())).dtype == torch.bfloat16


def forked(file):
    """Check that a forked process can read memory-mapped position embeddings."""
    from safetensors.torch import load_file

    import hf_posenc

    (rows,) = load_file(file).values()
    model = hf_posenc.PositionEmbedding("learned", 32, max_length=2000, storage="memory-mapped", file=file)
    at = torch.arange(500, 900)
    model.posenc("embed", at)
    if (child := os.fork()) == 0:
        os._exit(0 if torch.equal(model.posenc("embed", at), rows[at]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def sparse(path, name, written, beside=()):
    """Write a file whose rows are zeros that take no disk space, except for those in `written`."""
    size = ROWS * WIDTH * 4
    header = {name: {"dtype": "F32", "shape": [ROWS, WIDTH], "data_offsets": [0, size]}}
    header |= {other: {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]} for other in beside}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size + 4 * len(beside))
        for row, value in written.items():
            file.seek(8 + len(text) + row * WIDTH * 4)
            file.write(torch.full((WIDTH,), float(value)).numpy().tobytes())


def held(what):
    """The memory of this process in MiB, as Linux reports it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(what + ":")[2].split()[0]) / 1024


def highest(anew=False):
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return held("VmHWM")


def large(folder):
    """Print the MiB and the seconds that position embeddings of 4 GB take when new, loaded, saved, or rejected."""
    import safetensors.torch
    import transformers
    from transformers import AutoModel

    import hf_posenc

    folder = Path(folder)
    written = {0: 1, 3: 2.5, 500_000: -7, 999_999: 9}
    positions = torch.tensor([*written, *range(700_000, 700_500)])
    expected = torch.tensor([*written.values(), *[0] * 500])[:, None].expand(-1, WIDTH)
    new = {"storage": "memory-mapped", "max_length": ROWS}
    hf_posenc.PositionEmbedding("learned", WIDTH, max_length=4, storage="int8").save_pretrained(folder / "small")
    start, peaks, seconds = highest(anew=True), {}, {}

    def look(what, make):
        begin = time.perf_counter()
        model = make()
        seconds[what] = time.perf_counter() - begin
        rows = model(torch.zeros(1, len(positions), WIDTH), position_ids=positions)[0]
        assert torch.equal(rows, expected), what
        model(torch.zeros(1, 2048, WIDTH), position_ids=torch.randint(0, ROWS, (2048,)))
        peaks[what] = highest() - start

    sparse(folder / "table.safetensors", "any", written)
    look("new", lambda: hf_posenc.PositionEmbedding("learned", WIDTH, file=str(folder / "table.safetensors"), **new))
    config = json.loads((folder / "small" / "config.json").read_text())
    config |= {"max_length": ROWS, "position_encoding": {"type": "learned", "storage": "memory-mapped"}}
    (folder / "small" / "config.json").write_text(json.dumps(config))
    sparse(folder / "small" / "model.safetensors", "posenc.weight", written, ["zero"])
    look("loaded", lambda: AutoModel.from_pretrained(folder / "small"))
    look("half", lambda: AutoModel.from_pretrained(folder / "small", dtype=torch.bfloat16))

    safetensors.torch.save_file({"rows": torch.ones(2**15, WIDTH)}, folder / "written.safetensors")  # 128 MiB
    file, held_at = str(folder / "written.safetensors"), []
    model = hf_posenc.PositionEmbedding("learned", WIDTH, max_length=2**15, storage="memory-mapped", file=file)

    def save_file(*args, **options):
        safetensors.torch.save_file(*args, **options)
        held_at.append(held("RssAnon"))  # without the pages of the file, which the system drops when it needs memory

    transformers.modeling_utils.safe_save_file = save_file
    start = held("RssAnon")
    model.save_pretrained(folder / "saved")
    peaks["saved"] = max(*held_at, held("RssAnon")) - start
    assert AutoModel.from_pretrained(folder / "saved")(torch.zeros(1, 9, WIDTH)).eq(1).all()

    config |= {"max_length": 2**24, "hidden_size": 2**24}
    (folder / "small" / "config.json").write_text(json.dumps(config))
    start = highest(anew=True)
    try:
        AutoModel.from_pretrained(folder / "small")
    except ValueError as error:
        assert "are [1000000, 1024], but must be [16777216, 16777216]" in str(error), error
    peaks["refused"] = highest() - start
    print(json.dumps({"peaks": peaks, "seconds": seconds}))
