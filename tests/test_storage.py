"""Frozen tables of 'learned': rows of int8, and rows that stay in a safetensors file."""

import copy
import json
import math
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM

import hf_posenc
from conftest import run_python
from hf_posenc.encodings import Geometry, build, canonical
from models import BERT, LENGTH, VOCABULARY, first, stock, tokens

D, ROWS = 32, 40
INT8, MAPPED = {"type": "learned", "storage": "int8"}, {"type": "learned", "storage": "memory-mapped"}


def table(rows=ROWS, size=D, seed=0):
    """Rows of very different sizes, one of zeros."""
    rows = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-4, 3, rows)[:, None]
    rows[3] = 0
    return rows


def filed(folder, rows, name="anything"):
    save_file({name: rows}, folder / "table.safetensors")
    return str(folder / "table.safetensors")


def layer(storage="memory-mapped", rows=ROWS, **options):
    return hf_posenc.PositionEmbedding("learned", D, max_length=rows, storage=storage, **options)


def vectors(model, positions=None):
    """What a layer adds, `[L, D]`."""
    positions = torch.arange(ROWS) if positions is None else positions
    return model(torch.zeros(1, len(positions), D), position_ids=positions)[0]


def by_hand(rows):
    """Rows rounded to int8 and back, and the steps, in float64 loops."""
    result, steps = [], []
    for row in rows.tolist():
        step = max(abs(value) for value in row) / 127
        steps.append(step)
        result.append([step * math.floor(value / step + 0.5) if step else 0.0 for value in row])
    return torch.tensor(result, dtype=torch.float64), torch.tensor(steps, dtype=torch.float64)[:, None]


# int8.


def test_int8_is_within_half_a_step(tmp_path):
    rows = table()
    trained = layer("float32")
    with torch.no_grad():
        trained.posenc.weight.copy_(rows)
    trained.save_pretrained(tmp_path)
    frozen = AutoModel.from_pretrained(tmp_path, position_encoding=INT8)
    expected, steps = by_hand(rows)
    given = vectors(frozen).double()
    assert ((given - rows.double()).abs() <= steps * (0.5 + 1e-5)).all()
    off = (given - expected).abs() > steps * 1e-5  # float32 may round what lies halfway to the other side
    assert off.sum() < 3 and torch.equal(vectors(frozen)[3], torch.zeros(D))
    held = {name: tensor.dtype for name, tensor in frozen.posenc.named_buffers()}
    assert held == {"values": torch.int8, "steps": torch.float32} and not [*frozen.parameters()]
    assert sum(tensor.nbytes for tensor in frozen.posenc.buffers()) == ROWS * (D + 4)


@pytest.mark.parametrize("init", ["normal", "sinusoidal"])
def test_int8_starts_as_float32_does(init):
    kinds = [layer(storage, 300, init=init, std=0.5) for storage in ("float32", "int8")]
    plain, frozen = (vectors(kind, torch.arange(300)).detach() for kind in kinds)
    if init == "sinusoidal":
        assert (plain - frozen).abs().max() <= 0.5 / 127 + 1e-6
    assert frozen.std() == pytest.approx(plain.std().item(), rel=0.05) and len({*frozen[:, 0].tolist()}) > 50


@pytest.mark.parametrize("encoding", [INT8, {"type": "learned+alibi", "learned": INT8}])
def test_int8_from_the_hosts_table(encoding):
    encoding = copy.deepcopy(encoding)
    encoding.get("learned", encoding)["init"] = "host"
    encoding.pop("type") if "learned" not in encoding else None
    host = stock("bert")
    kind = "learned+alibi" if "learned" in encoding else "learned"
    given = {"type": kind, **encoding}
    given.get("learned", {}).pop("type", None)
    model = hf_posenc.patch(host, given)
    own = getattr(model.posenc, "learned", model.posenc)
    rows = host.embeddings.position_embeddings.weight.detach()
    assert ((own("embed", torch.arange(LENGTH)) - rows).abs() <= rows.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
    assert not any("posenc" in name for name, _ in model.named_parameters() if "alibi" not in name)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_casts_leave_int8_as_it_is(cast):
    model = hf_posenc.patch(stock("bert"), {**INT8, "init": "host"})
    before = {name: tensor.clone() for name, tensor in model.posenc.named_buffers()}
    cast(model)
    for name, tensor in model.posenc.named_buffers():
        if name.startswith("original."):
            continue
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
    assert first(model(tokens())).isfinite().all()


def test_a_meta_build_and_moves_keep_the_dtypes():
    with torch.device("meta"):
        encoding = build(canonical(INT8), Geometry(hidden_size=D, max_length=ROWS))
    encoding = encoding.to(torch.bfloat16).to_empty(device="cpu")
    assert [tensor.dtype for tensor in encoding.buffers()] == [torch.int8, torch.float32]


# Memory-mapped.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mapped_table_is_the_files(dtype, tmp_path):
    rows = table().to(dtype)
    model = layer(file=filed(tmp_path, rows))
    assert torch.equal(vectors(model), rows.float())
    at = torch.tensor([[39, 0, 3], [7, 7, 38]])
    assert torch.equal(model.posenc("embed", at), F.embedding(at, rows))
    assert not [*model.parameters()] and "posenc.weight" not in dict(model.named_buffers())
    model.half().to(torch.bfloat16)
    assert model.posenc("embed", at).dtype == dtype and model.state_dict()["posenc.weight"].dtype == dtype
    assert torch.equal(torch.compile(model.posenc.embed, backend="eager", fullgraph=True)(at), F.embedding(at, rows))


def test_rows_in_many_blocks(tmp_path):
    rows = table(1000)
    model = layer(rows=1000, file=filed(tmp_path, rows))
    positions = torch.randint(0, 1000, (700,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(vectors(model, positions), rows[positions])
    assert model.posenc("embed", positions[:0]).shape == (0, D)


def test_ids_beyond_a_mapped_table_are_refused(tmp_path):
    model = layer(file=filed(tmp_path, table()))
    with pytest.raises(ValueError, match="position_ids from 0 to 40 don't fit a learned table of 40 rows"):
        model.posenc("embed", torch.tensor([0, 40]))


SEEN = """
import sys, torch, hf_posenc
from pathlib import Path
from transformers import AutoModel, AutoModelForMaskedLM
from models import first, tokens
from memory import poison_empty

poison_empty()
folder = Path(sys.argv[1])
for name, expected in torch.load(folder / "expected.pt").items():
    kind = AutoModelForMaskedLM if expected["head"] else AutoModel
    for options in ({}, {"device_map": "cpu"}):
        model = kind.from_pretrained(folder / name, **options)
        assert torch.equal(first(model(tokens())), expected["output"]), name
    half = kind.from_pretrained(folder / name, dtype=torch.bfloat16)
    held = [key for key in half.state_dict() if "posenc." in key and ".original." not in key]
    for key in held:
        value, own = half.state_dict()[key], expected["held"][key.rpartition(".")[2]]
        assert value.dtype == own.dtype and torch.equal(value, own), (name, key)
    assert held and first(half(tokens())).dtype == torch.bfloat16
print("equal")
"""


def test_models_come_back_in_a_new_process(tmp_path):
    """Whole and without their head; in one file and in several; by name, from a folder that has been moved."""
    rows, expected = table(LENGTH), {}
    file = filed(tmp_path, rows)
    for name, given, arguments in (
        ("int8", {**INT8, "init": "host"}, {}),
        ("layers", {**MAPPED, "file": file, "inject": "every_layer"}, {}),
        ("two", {"type": "learned+alibi", "learned": {"storage": "memory-mapped", "file": file}}, {}),
        ("shards", {**MAPPED, "file": file}, {"max_shard_size": "20KB"}),
    ):
        model = hf_posenc.patch(stock("bert", "ForMaskedLM"), given)
        own = getattr(model.base_model.posenc, "learned", model.base_model.posenc)
        bodies = ((model.base_model, f"{name}-body"),) if name == "shards" else ()
        for part, path in ((model, name), *bodies):
            part.save_pretrained(tmp_path / "first" / path, **arguments)
            output, held = first(part(tokens())).detach(), own.state_dict()
            held = {key: value.clone() for key, value in held.items() if not key.startswith("original.")}
            expected[path] = {"head": part is model, "output": output, "held": held}
    assert len([*(tmp_path / "first" / "shards").glob("*.safetensors")]) > 2
    weights = json.loads((tmp_path / "first" / "shards" / "model.safetensors.index.json").read_text())
    stored = [load_file(path) for path in (tmp_path / "first" / "shards").glob("*.safetensors")]
    assert weights["weight_map"].keys() == {name for tensors in stored for name in tensors}
    assert weights["metadata"]["total_size"] == sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    for path in (tmp_path / "first").rglob("*.*"):
        assert str(tmp_path).encode() not in path.read_bytes(), path
    (tmp_path / "first").rename(tmp_path / "second")
    os.remove(file)
    torch.save(expected, tmp_path / "second" / "expected.pt")
    assert run_python(SEEN, tmp_path / "second").endswith("equal\n")
    # The body of a model with a head, and a head around a body.
    body = AutoModel.from_pretrained(tmp_path / "second" / "shards")
    assert torch.equal(first(body(tokens())), expected["shards-body"]["output"])
    AutoModelForMaskedLM.from_pretrained(tmp_path / "second" / "shards-body")


def test_two_stacks_have_a_table_each(tmp_path):
    files = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        files.append(filed(tmp_path / str(seed), table(LENGTH, seed=seed)))
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = transformers.BartConfig(d_model=D, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    where = {"encoder": {}, "decoder": {"file": files[1]}}
    model = hf_posenc.patch(transformers.BartModel(config).eval(), {**MAPPED, "file": files[0]}, where=where)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModel.from_pretrained(tmp_path / "saved")
    for seed, stack in ((1, again.encoder), (2, again.decoder)):
        assert torch.equal(stack.posenc("embed", torch.arange(LENGTH)), table(LENGTH, seed=seed))
    assert torch.equal(first(again(tokens())), first(model(tokens())))
    assert str(tmp_path) not in (tmp_path / "saved" / "config.json").read_text()


def test_a_table_changes_its_storage_when_it_is_loaded(tmp_path):
    trained = layer("float32")
    with torch.no_grad():
        trained.posenc.weight.copy_(table())
    trained.save_pretrained(tmp_path / "trained")
    mapped = AutoModel.from_pretrained(tmp_path / "trained", position_encoding=MAPPED)
    assert torch.equal(vectors(mapped), table()) and not [*mapped.parameters()]
    mapped.save_pretrained(tmp_path / "mapped")
    again = AutoModel.from_pretrained(tmp_path / "mapped", position_encoding={"type": "learned", "storage": "float32"})
    assert again.posenc.weight.requires_grad and torch.equal(vectors(again), table())
    frozen = AutoModel.from_pretrained(tmp_path / "mapped", position_encoding=INT8)
    frozen.save_pretrained(tmp_path / "frozen")
    assert torch.equal(vectors(AutoModel.from_pretrained(tmp_path / "frozen", dtype=torch.bfloat16)), vectors(frozen))
    with pytest.raises(ValueError, match=r"learned.storage='memory-mapped': this checkpoint has no 'posenc.weight'"):
        AutoModel.from_pretrained(tmp_path / "frozen", position_encoding=MAPPED)
    with pytest.raises(ValueError, match=r"this checkpoint has its table in its own weights. Leave the file out"):
        AutoModel.from_pretrained(tmp_path / "mapped", position_encoding={**MAPPED, "file": filed(tmp_path, table())})


def test_saving_over_the_folder_that_it_is_read_from(tmp_path):
    layer(file=filed(tmp_path, table())).save_pretrained(tmp_path / "saved")
    model = AutoModel.from_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    given = {name: tensor for name, tensor in model.state_dict().items() if name != "posenc.weight"}
    with pytest.raises(ValueError, match="state_dict lacks 'posenc.weight'.*Nothing was saved"):
        model.save_pretrained(tmp_path / "lacking", state_dict=given)
    assert not (tmp_path / "lacking").exists()
    model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict())
    for each in (model, AutoModel.from_pretrained(tmp_path / "saved"), pickle.loads(pickle.dumps(model))):
        assert torch.equal(vectors(each), table())


def test_copies_share_the_table_and_pickles_name_its_file(tmp_path):
    model = layer(rows=1000, file=filed(tmp_path, table(1000)))
    assert copy.deepcopy(model).posenc.table is model.posenc.table
    pickled = pickle.dumps(model)
    assert len(pickled) < 10_000
    assert torch.equal(vectors(pickle.loads(pickled)), table(1000)[:ROWS])
    (tmp_path / "table.safetensors").rename(tmp_path / "elsewhere")
    assert torch.equal(vectors(model), table(1000)[:ROWS])  # it is open
    with pytest.raises(ValueError, match=r"table.safetensors: No such file or directory; put the right file there again"):
        pickle.loads(pickled)
    filed(tmp_path, table(999))
    with pytest.raises(ValueError, match=r"'anything' is \[999, 32\], and was \[1000, 32\] when this model was made"):
        pickle.loads(pickled)


def test_threads_and_forked_processes_read_it(tmp_path):
    rows = table(2000)
    model = layer(rows=2000, file=filed(tmp_path, rows))
    wrong = []

    def read(seed):
        for each in range(20):
            positions = torch.randint(0, 2000, (600,), generator=torch.Generator().manual_seed(20 * seed + each))
            if not torch.equal(model.posenc("embed", positions), rows[positions]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert run_python(FORKED, filed(tmp_path, rows)).endswith("0\n")


FORKED = """
import os, sys, torch, hf_posenc
from safetensors.torch import load_file
(rows,) = load_file(sys.argv[1]).values()
model = hf_posenc.PositionEmbedding("learned", 32, max_length=2000, storage="memory-mapped", file=sys.argv[1])
at = torch.arange(500, 900)
model.posenc("embed", at)
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(model.posenc("embed", at), rows[at]) else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_state_dict_has_the_table_and_another_one_is_refused(tmp_path):
    model = layer(file=filed(tmp_path, table()))
    state = model.state_dict()
    assert torch.equal(state["posenc.weight"], table())
    model.load_state_dict(state)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    model.load_state_dict({"zero": state["zero"]}, strict=False)
    with pytest.raises(RuntimeError, match="posenc.weight is another table than the memory-mapped one, which is frozen"):
        model.load_state_dict({**state, "posenc.weight": table() + 1})
    layer("float32").load_state_dict(state)


def test_training_goes_on_around_frozen_tables(tmp_path):
    for given in ({**INT8, "init": "host"}, {**MAPPED, "file": filed(tmp_path, table(LENGTH))}):
        model = hf_posenc.patch(stock("bert", "ForMaskedLM"), given).train()
        before = model.base_model.posenc("embed", torch.arange(LENGTH)).clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(tokens(), labels=tokens()).loss.backward()
        assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "attention" in name)
        optimizer.step()
        assert torch.equal(model.base_model.posenc("embed", torch.arange(LENGTH)), before)


# Bad input.


def test_rows_that_are_frozen_are_not_random():
    with pytest.raises(
        ValueError, match="learned.storage='int8' freezes its rows, and init='normal' draws them at random: give"
    ):
        hf_posenc.patch(stock("bert"), INT8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "memory-mapped"}, r"learned.storage='memory-mapped' needs the file of its table: give file="),
        ({"file": "F"}, r"learned.file='F' with storage='float32': a file is mapped, storage='memory-mapped'; leave file out"),
        ({"file": "F", "storage": "int8"}, r"learned.file='F' with storage='int8'"),
        (
            {**MAPPED, "file": "F", "init": "host"},
            r"learned.init='host' with file='F': the values are the file's; leave init out",
        ),
        ({**MAPPED, "file": "F", "std": 1}, r"learned.std=1.0 with file='F'"),
        ({**MAPPED, "file": "F"}, r"can't be read from F: No such file or directory; put the right file there again"),
        ({**MAPPED, "file": 3}, r"learned.file=3: allowed is a path or None"),
        ({"storage": "float16"}, r"learned.storage='float16': allowed is 'float32' or 'int8' or 'memory-mapped'"),
    ],
)
def test_contradicting_options(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    host = stock("bert")
    options = {name: value for name, value in options.items() if name != "type"}
    for make in (lambda: layer(**{"storage": "float32", **options}), lambda: hf_posenc.patch(host, "learned", **options)):
        with pytest.raises(ValueError, match=message):
            make()
    config = hf_posenc.PosEncBertConfig(**BERT, position_encoding=dict(MAPPED))
    with pytest.raises(ValueError, match="needs the file of its table"):
        AutoModel.from_config(config)


def test_files_that_fit_not(tmp_path):
    file = filed(tmp_path, table())
    with pytest.raises(
        ValueError, match=r"is \[40, 32\], and \[41, 32\] is needed, max_length and hidden_size: give max_length=40"
    ):
        layer(rows=41, file=file)
    save_file({"a": table(), "b": table()}, file)
    with pytest.raises(ValueError, match=r"has 2 tensors: give a file with one, the table"):
        layer(file=file)
    for wrong, said in ((table().int(), "I32 [40, 32]"), (table()[0], "F32 [32]"), (table()[:0], "F32 [0, 32]")):
        save_file({"a": wrong}, file)
        with pytest.raises(ValueError, match=rf"'a' is {said}, and a table is a matrix of F32, F16, BF16".replace("[", r"\[")):
            layer(file=file)


def header(entry, length=None, metadata=None):
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), "weight": entry}).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


WHOLE = {"dtype": "F32", "shape": [ROWS, D], "data_offsets": [0, ROWS * D * 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 100,
        header(WHOLE, length=2**40),
        header([]) + b"\0" * 5120,
        header({**WHOLE, "shape": None}) + b"\0" * 5120,
        header({**WHOLE, "shape": [1.5, "x"]}) + b"\0" * 5120,
        header({**WHOLE, "data_offsets": [0]}) + b"\0" * 5120,
        header({**WHOLE, "data_offsets": [-64, 5056]}) + b"\0" * 5120,
        header({**WHOLE, "data_offsets": [0, 2**62]}) + b"\0" * 5120,
        header(WHOLE) + b"\0" * 5119,
        (3).to_bytes(8, "little") + b"nul" + b"\0" * 9999,
        (4).to_bytes(8, "little") + b"null" + b"\0" * 9999,
        (9000).to_bytes(8, "little") + b"[" * 9000,
    ],
    ids=range(14),
)
def test_damaged_files_are_errors(content, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"the table of positions can't be read from .*bad.safetensors: "):
        layer(file=str(tmp_path / "bad.safetensors"))


def test_a_file_that_is_cut_is_an_error(tmp_path):
    file = filed(tmp_path, table(5000))
    model = layer(rows=5000, file=file)
    os.truncate(file, 100_000)
    with pytest.raises(ValueError, match=r"it has 100000 bytes, and 'anything' ends at 640\d+; put the right file there"):
        vectors(model)
    with pytest.raises(ValueError, match="it has 100000 bytes"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_config_that_names_a_file_opens_none(tmp_path, monkeypatch):
    file = filed(tmp_path, table())
    layer(file=file).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["position_encoding"]["file"] is None
    config["position_encoding"]["file"] = file
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("hf_posenc.encodings.tables.StoredTensor", None)
    with pytest.raises(ValueError, match="names a file, and nothing was opened"):
        AutoModel.from_pretrained(tmp_path / "saved")


def test_what_is_told_of_a_model_names_no_file(tmp_path):
    model = hf_posenc.patch(stock("bert"), {**MAPPED, "file": filed(tmp_path, table(LENGTH))})
    report = hf_posenc.inspect(model)
    assert str(tmp_path) not in str(report) and report.options["storage"] == "memory-mapped"
    model.save_pretrained(tmp_path / "saved")
    assert hf_posenc.inspect(str(tmp_path / "saved")).options == report.options
    single = layer(file=filed(tmp_path, table()))
    assert hf_posenc.inspect(single).options["file"] is None
    stock_again = hf_posenc.unpatch(model)
    assert torch.equal(first(stock_again(tokens())), first(stock("bert")(tokens())))


# Large tables.

LARGE = """
import json, sys, time, safetensors, torch, transformers, hf_posenc
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModel

folder, ROWS, D = Path(sys.argv[1]), 1_000_000, 1024

def sparse(path, name, written, beside=()):
    "A file whose rows are zeros that take no disk, but for those written."
    size = ROWS * D * 4
    header = {name: {"dtype": "F32", "shape": [ROWS, D], "data_offsets": [0, size]}}
    header |= {other: {"dtype": "F32", "shape": [], "data_offsets": [size, size + 4]} for other in beside}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size + 4 * len(beside))
        for row, value in written.items():
            file.seek(8 + len(text) + row * D * 4)
            file.write(torch.full((D,), float(value)).numpy().tobytes())

def highest(anew=False):
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return held("VmHWM")

def held(what):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(what + ":")[2].split()[0]) / 1024

written = {0: 1, 3: 2.5, 500_000: -7, 999_999: 9}
positions = torch.tensor([*written, *range(700_000, 700_500)])
expected = torch.tensor([*written.values(), *[0] * 500])[:, None].expand(-1, D)
new = {"storage": "memory-mapped", "max_length": ROWS}
hf_posenc.PositionEmbedding("learned", D, max_length=4, storage="int8").save_pretrained(folder / "small")
start, peaks, seconds = highest(anew=True), {}, {}

def look(what, make):
    begin = time.perf_counter()
    model = make()
    seconds[what] = time.perf_counter() - begin
    rows = model(torch.zeros(1, len(positions), D), position_ids=positions)[0]
    assert torch.equal(rows, expected), what
    model(torch.zeros(1, 2048, D), position_ids=torch.randint(0, ROWS, (2048,)))
    peaks[what] = highest() - start

sparse(folder / "table.safetensors", "any", written)
look("new", lambda: hf_posenc.PositionEmbedding("learned", D, file=str(folder / "table.safetensors"), **new))
config = json.loads((folder / "small" / "config.json").read_text())
config |= {"max_length": ROWS, "position_encoding": {"type": "learned", "storage": "memory-mapped"}}
(folder / "small" / "config.json").write_text(json.dumps(config))
sparse(folder / "small" / "model.safetensors", "posenc.weight", written, ["zero"])
look("loaded", lambda: AutoModel.from_pretrained(folder / "small"))
look("half", lambda: AutoModel.from_pretrained(folder / "small", dtype=torch.bfloat16))

save_file({"rows": torch.ones(2**15, D)}, folder / "written.safetensors")  # 128 MiB
file = str(folder / "written.safetensors")
model = hf_posenc.PositionEmbedding("learned", D, max_length=2**15, storage="memory-mapped", file=file)
held_at = []

def save_file(*args, save_file=safetensors.torch.save_file, **options):
    save_file(*args, **options)
    held_at.append(held("RssAnon"))  # without the file's own pages, which the system drops when it needs memory

transformers.modeling_utils.safe_save_file = save_file
start = held("RssAnon")
model.save_pretrained(folder / "saved")
peaks["saved"] = max(*held_at, held("RssAnon")) - start
assert AutoModel.from_pretrained(folder / "saved")(torch.zeros(1, 9, D)).eq(1).all()

config |= {"max_length": 2**24, "hidden_size": 2**24}
(folder / "small" / "config.json").write_text(json.dumps(config))
start = highest(anew=True)
try:
    AutoModel.from_pretrained(folder / "small")
except ValueError as error:
    assert "is [1000000, 1024], and [16777216, 16777216] is needed" in str(error), error
peaks["refused"] = highest() - start
print(json.dumps({"peaks": peaks, "seconds": seconds}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux tells it")
@pytest.mark.slow
def test_memory_stays_at_the_rows_that_are_read(tmp_path):
    seen = json.loads(run_python(LARGE, tmp_path).splitlines()[-1])
    assert seen["peaks"].keys() == {"new", "loaded", "half", "saved", "refused"}
    assert max(seen["peaks"].values()) < 100, seen
