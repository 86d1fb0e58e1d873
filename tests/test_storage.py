"""Frozen tables of 'learned': int8 rows, and rows that stay in a safetensors file."""

import copy
import json
import math
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM

import hf_posenc
from conftest import run_python
from models import BERT, LENGTH, first, stock, tiny, tokens
from oracles import make

D, ROWS = 32, 40


INT8, MAPPED = {"type": "learned", "storage": "int8"}, {"type": "learned", "storage": "memory-mapped"}


def table(rows=ROWS, size=D, seed=0):
    """Rows of very different sizes, one of them zero."""
    rows = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-4, 3, rows)[:, None]
    rows[3] = 0
    return rows


def filed(folder, rows, name="anything"):
    save_file({name: rows}, folder / "table.safetensors")
    return str(folder / "table.safetensors")


def layer(storage="memory-mapped", rows=ROWS, **options):
    return hf_posenc.PositionEmbedding("learned", D, max_length=rows, storage=storage, **options)


def vectors(model, positions=None):
    """The vectors that a layer adds, `[L, D]`."""
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


def in_process(function, path):
    return run_python(f"import sys, storage_worker; storage_worker.{function}(sys.argv[1])", path)


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
    off = (given - expected).abs() > steps * 1e-5  # float32 may round values halfway between two steps to the other side
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


@pytest.mark.parametrize("kind", ["learned", "learned+alibi"])
def test_int8_from_the_hosts_table(kind):
    options = {"storage": "int8", "init": "host"}
    model = hf_posenc.patch(stock("bert"), {"type": kind, **(options if kind == "learned" else {"learned": options})})
    own = getattr(model.posenc, "learned", model.posenc)
    rows = stock("bert").embeddings.position_embeddings.weight.detach()
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
        encoding = make("learned", D, max_length=ROWS, storage="int8")
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


def test_rows_in_many_blocks_and_beyond(tmp_path):
    rows = table(1000)
    model = layer(rows=1000, file=filed(tmp_path, rows))
    positions = torch.randint(0, 1000, (700,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(vectors(model, positions), rows[positions])
    assert model.posenc("embed", positions[:0]).shape == (0, D)
    with pytest.raises(ValueError, match="position_ids from 0 to 1000 don't fit 1000"):
        model.posenc("embed", torch.tensor([0, 1000]))


def test_models_come_back_in_a_new_process(tmp_path):
    """They load with and without their head, from one file and from several, by name, and from a directory that was moved."""
    expected, old, new = {}, tmp_path / "first", tmp_path / "second"
    file = filed(tmp_path, table(LENGTH))
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
            part.save_pretrained(old / path, **arguments)
            held = {key: value.clone() for key, value in own.state_dict().items() if not key.startswith("original.")}
            expected[path] = {"head": part is model, "output": first(part(tokens())).detach(), "held": held}
    stored = [load_file(path) for path in (old / "shards").glob("*.safetensors")]
    weights = json.loads((old / "shards" / "model.safetensors.index.json").read_text())
    assert len(stored) > 2 and weights["weight_map"].keys() == {name for tensors in stored for name in tensors}
    assert weights["metadata"]["total_size"] == sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    for path in old.rglob("*.*"):
        assert str(tmp_path).encode() not in path.read_bytes(), path
    old.rename(new)
    os.remove(file)
    torch.save(expected, new / "expected.pt")
    in_process("seen", new)
    # The body of a model with a head, and a head for a saved body.
    body = AutoModel.from_pretrained(new / "shards")
    assert torch.equal(first(body(tokens())), expected["shards-body"]["output"])
    AutoModelForMaskedLM.from_pretrained(new / "shards-body")


def test_two_stacks_have_a_table_each(tmp_path):
    files = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        files.append(filed(tmp_path / str(seed), table(LENGTH, seed=seed)))
    where = {"encoder": {}, "decoder": {"file": files[1]}}
    model = hf_posenc.patch(tiny("BartModel"), {**MAPPED, "file": files[0]}, where=where)
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
    with pytest.raises(ValueError, match=r"learned.storage='memory-mapped' .*no 'posenc.weight'"):
        AutoModel.from_pretrained(tmp_path / "frozen", position_encoding=MAPPED)
    with pytest.raises(ValueError, match=r"this checkpoint.*own weights"):
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
    assert torch.equal(vectors(model), table(1000)[:ROWS])  # the file is open
    with pytest.raises(ValueError, match=r"table.safetensors: No such file or directory. Restore"):
        pickle.loads(pickled)
    filed(tmp_path, table(999))
    with pytest.raises(ValueError, match=r"'anything' is \[999, 32\], .*was \[1000, 32\]"):
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
    in_process("forked", tmp_path / "table.safetensors")


def test_a_state_dict_has_the_table_and_another_one_is_refused(tmp_path):
    model = layer(file=filed(tmp_path, table()))
    state = model.state_dict()
    assert torch.equal(state["posenc.weight"], table())
    model.load_state_dict(state)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    model.load_state_dict({"zero": state["zero"]}, strict=False)
    with pytest.raises(RuntimeError, match="posenc.weight differs .*memory-mapped table"):
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


# Invalid input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "memory-mapped"}, r"learned.storage='memory-mapped' needs a file .* Set file="),
        ({"file": "F"}, r"learned.file='F' .*storage='float32'. Omit file"),
        ({"file": "F", "storage": "int8"}, r"learned.file='F' .*storage='int8'"),
        ({**MAPPED, "file": "F", "init": "host"}, r"learned.init='host' .*file='F' .*Omit init"),
        ({**MAPPED, "file": "F", "std": 1}, r"learned.std=1.0 .*file='F'"),
        ({**MAPPED, "file": "F"}, r"can't be read from F: No such file or directory. Restore"),
        ({**MAPPED, "file": 3}, r"learned.file=3 .*a path or None"),
        ({"storage": "float16"}, r"learned.storage='float16' .*'float32' or 'int8' or 'memory-mapped'"),
    ],
)
def test_contradicting_options(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {name: value for name, value in options.items() if name != "type"}
    for build in (
        lambda: layer(**{"storage": "float32", **options}),
        lambda: hf_posenc.patch(stock("bert"), "learned", **options),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_contradictions_with_a_host():
    with pytest.raises(ValueError, match="needs a.*position embeddings"):
        AutoModel.from_config(hf_posenc.PosEncBertConfig(**BERT, position_encoding=dict(MAPPED)))
    with pytest.raises(ValueError, match="learned.storage='int8' .*init='normal' .*init='host'"):
        hf_posenc.patch(stock("bert"), INT8)


def test_files_that_fit_not(tmp_path):
    file = filed(tmp_path, table())
    with pytest.raises(ValueError, match=r"are \[40, 32\], .*\[41, 32\] .*max_length=40"):
        layer(rows=41, file=file)
    save_file({"a": table(), "b": table()}, file)
    with pytest.raises(ValueError, match=r"has 2 tensors"):
        layer(file=file)
    for wrong, said in ((table().int(), "I32 [40, 32]"), (table()[0], "F32 [32]"), (table()[:0], "F32 [0, 32]")):
        save_file({"a": wrong}, file)
        with pytest.raises(ValueError, match=rf"'a' is {said}, .*a matrix of F32, F16, BF16".replace("[", r"\[")):
            layer(file=file)


def header(entry, length=None, metadata=None):
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), "weight": entry}).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


WHOLE = {"dtype": "F32", "shape": [ROWS, D], "data_offsets": [0, ROWS * D * 4]}


def test_damaged_files_are_errors(tmp_path):
    file, zeros = tmp_path / "bad.safetensors", b"\0" * 5120
    changed = ({"shape": None}, {"shape": [1.5, "x"]}, {"data_offsets": [0]}, {"data_offsets": [-64, 5056]})
    for content in (
        *(b"", b"{}", b"\xff" * 100, header(WHOLE, length=2**40), header([]) + zeros, header(WHOLE) + zeros[1:]),
        *(header({**WHOLE, **change}) + zeros for change in (*changed, {"data_offsets": [0, 2**62]})),
        *((3).to_bytes(8, "little") + b"nul" + b"\0" * 9999, (4).to_bytes(8, "little") + b"null" + b"\0" * 9999),
        (9000).to_bytes(8, "little") + b"[" * 9000,
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"The position.*read from .*bad.safetensors: "):
            layer(file=str(file))


def test_a_file_that_is_cut_is_an_error(tmp_path):
    file = filed(tmp_path, table(5000))
    model = layer(rows=5000, file=file)
    os.truncate(file, 100_000)
    with pytest.raises(ValueError, match=r"it has 100000 bytes, but 'anything' ends at 640\d+. Restore"):
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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux tells it")
@pytest.mark.slow
def test_memory_stays_at_the_rows_that_are_read(tmp_path):
    seen = json.loads(in_process("large", tmp_path).splitlines()[-1])
    assert seen["peaks"].keys() == {"new", "loaded", "half", "saved", "refused"}
    assert max(seen["peaks"].values()) < 100, seen
