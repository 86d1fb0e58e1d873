"""The measurements of bench.py: rounds, ratios, memory, records, and reports. The tests assert no measured figure."""

import functools
import json
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc
from benchmarks import (
    against,
    attention,
    bench,
    comparing,
    grid,
    measuring,
    report,
    results,
    scale,
    subjects,
    targets,
    timing,
)
from benchmarks.grid import Group, Settings
from benchmarks.memory import Peak
from benchmarks.ratios import ratio
from conftest import ROOT

PAGE, KEPT = ROOT / "docs" / "results" / "speed.md", ROOT / "scripts" / "results"
FEW = Settings(rounds=2, warmup=1, threads=1)
SMALL = {"layers": 1, "heads": 2}
KINDS = ("forward", "train", "decode", "attention", "attention-train")


def suited(host):
    """Encodings that an architecture supports, including those of other tests."""
    return sorted(
        name
        for name, kind in hf_posenc.list_encodings().items()
        if kind.axes <= (2 if host == "vit" else 1) and (host == "gpt2" or not kind.causal_only)
    )


def runs(calls, name):
    """A subject that takes one second in its first round, two in its second, and so on."""
    calls.append(f"ready: {name}")

    def run():
        calls.append(name)
        return float(calls.count(name))

    return run


def rounds_of(calls, size):
    measured = [call for call in calls if not call.startswith("ready")]
    return [measured[start : start + size] for start in range(0, len(measured), size)]


def test_each_round_runs_every_subject_once_in_another_order():
    calls = []
    timed = timing.interleaved("abcde", lambda name: runs(calls, name), rounds=20, warmup=3)
    assert calls[:5] == [f"ready: {name}" for name in "abcde"]
    orders = rounds_of(calls, 5)
    assert len(orders) == 23 and all(sorted(order) == [*"abcde"] for order in orders)
    assert len({tuple(order) for order in orders}) > 15
    firsts = [order[0] for order in orders]
    assert all(firsts.count(name) < 12 for name in "abcde")
    # The orders are drawn from the seed.
    again, other = [], []
    for found, seed in ((again, 0), (other, 1)):
        timing.interleaved("abcde", lambda name, calls=found: runs(calls, name), rounds=20, warmup=3, seed=seed)
    assert again == calls != other
    # Warm-up rounds are omitted.
    assert timed.seconds == {name: [float(number) for number in range(4, 24)] for name in "abcde"}


def test_a_subject_that_fails_is_left_out_and_the_others_go_on():
    calls = []

    def build(name):
        if name == "unbuilt":
            raise ValueError("no\n  positions")
        run = runs(calls, name)

        def broken():
            seconds = run()
            if name == "broken" and seconds == 3:
                raise RuntimeError("out of memory")
            return seconds

        return broken

    timed = timing.interleaved(["a", "unbuilt", "broken", "b"], build, rounds=4, warmup=1)
    assert timed.failures == {"unbuilt": "ValueError: no positions", "broken": "RuntimeError: out of memory"}
    assert {name: len(each) for name, each in timed.seconds.items()} == {"a": 4, "b": 4} and {*timed.runs} == {"a", "b"}
    assert comparing.figures(timed, "broken", ("a",)) == {"failed": "RuntimeError: out of memory"}


@pytest.mark.parametrize(("clock", "counted"), [("wall", True), ("process", False)])
def test_what_is_clocked(clock, counted):
    """The wall clock measures only the subject. The process clock measures only the time that the subject computes."""
    seconds = timing.clocked(lambda: time.sleep(0.05), clock=clock, after=lambda: time.sleep(0.3))()
    assert (0.05 <= seconds < 0.3) if counted else seconds < 0.05


def test_ratios_are_taken_within_rounds():
    """If a machine gets ten times slower, the times change, but not the ratio."""
    found = ratio([2.0, 4.0, 20.0, 10.0], [1.0, 2.0, 10.0, 5.0])
    assert (found.value, found.interval, found.rounds) == (2.0, (2.0, 2.0), 4)
    assert ratio([1.0, 10.0, 3.0], [1.0, 5.0, 6.0]).value == 1.0  # the ratio of the medians would be 0.6
    with pytest.raises(ValueError, match="3 and 2 rounds"):
        ratio([1.0, 1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("rounds", "probability"), [(5, 15 / 16), (6, 0.95), (12, 0.95), (20, 0.95)])
def test_the_interval_contains_the_median(rounds, probability):
    """Ratios of skewed times with the median 1, in 4,000 runs. The standard error is at most 0.004."""
    draw = random.Random(0)
    runs = [ratio([draw.lognormvariate(0, 0.2) for _ in range(rounds)], [1.0] * rounds).interval for _ in range(4000)]
    assert sum(low <= 1 <= high for low, high in runs) / len(runs) > probability - 0.01


def test_the_peak_of_a_known_allocation():
    before = torch.ones(300, 1000)

    def compute():
        first = torch.ones(1000, 1000)  # 4 MB
        second = torch.ones(500, 1000)  # 2 MB
        del first
        third = torch.ones(250, 1000)  # 1 MB, in place of the first
        return second.sum() + third.sum() + before.sum()

    with Peak() as peak:
        compute()
    assert peak.bytes == 6_000_000
    with Peak() as peak:
        kept = torch.ones(2000, 1000)
        peak.start()
        compute()
    assert peak.bytes == 6_000_000 and kept.nbytes == 8_000_000


def test_the_peak_sees_what_an_operation_allocates_itself():
    """SDPA copies a transposed mask."""
    states, mask = torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 128)
    peaks = []
    for given in (mask, mask.mT):
        with Peak() as peak:
            torch.nn.functional.scaled_dot_product_attention(states, states, states, given)
        peaks.append(peak.bytes)
    assert peaks[1] - peaks[0] >= mask.nbytes


def test_every_registered_encoding_is_measured(monkeypatch):
    monkeypatch.setattr(hf_posenc.PositionEncoding, "registered", {**hf_posenc.PositionEncoding.registered})

    class Later(hf_posenc.PositionEncoding, type="later-one"):
        def distance_bias(self, distance):
            return -distance.abs()[None].float()

    names = subjects.encodings(Group("forward", 12, **SMALL), FEW)
    assert names[0] == "none" and sorted(names) == suited("bert") and "later-one" in names
    assert sorted(subjects.encodings(Group("decode", 12, host="gpt2"), FEW)) == suited("gpt2")
    record = measuring.measure(Group("forward", 12, **SMALL), Settings(rounds=2, threads=1, encodings=("alibi", "later-one")))
    assert [*record["subjects"]] == ["stock", "alibi", "later-one"]
    assert record["subjects"]["later-one"]["mechanisms"] == ["distance_bias"]
    with pytest.raises(ValueError, match="no encoding alibo; registered: none, alibi"):
        subjects.encodings(Group("forward", 12), Settings(encodings=("alibo",)))


@pytest.mark.parametrize(
    ("kind", "host"), [*((kind, "gpt2" if kind == "decode" else "bert") for kind in KINDS), ("forward", "vit")]
)
@pytest.mark.slow
def test_a_record(kind, host):
    """A record has each subject's time, ratios to `stock` and `none`, and peak memory. It can be written as JSON and shown."""
    group = Group(kind, 9, **SMALL, host=host)
    record = measuring.measure(group, FEW)
    assert json.loads(json.dumps(record)) == record and record["rounds"] == 2 and record["length"] == 9
    names = {"stock", *suited(group.host)}
    assert {*record["subjects"]} == names
    for name, each in record["subjects"].items():
        assert each.get("milliseconds", 0) > 0 and each["peak_mb"] >= 0, each
        assert {*each["ratios"]} == {"stock", "none"} - {name}
        assert all(low <= value <= high for value, low, high in each["ratios"].values())
        if name in hf_posenc.list_encodings():
            assert each["mechanisms"] == [*hf_posenc.list_encodings()[name].mechanisms()]
    learned = {name for name, each in record["subjects"].items() if each.get("learned")}
    assert {"t5", "relative", "shaw", "learned"} <= learned and not {"alibi", "rope", "none"} & learned
    page = report.text(whole({group.name: record}))
    assert all(f"\n  {name} " in page for name in names)


def test_generation_with_every_encoding_of_a_decoder():
    record = measuring.measure(Group("generate", 3, host="llama", **SMALL), Settings(rounds=1, warmup=0, threads=1))
    assert {*record["subjects"]} == {"stock", *suited("gpt2")}
    assert not [each for each in record["subjects"].values() if "failed" in each], record


@pytest.mark.slow
def test_graphs_of_compiled_models_are_counted(monkeypatch):
    """The graph breaks and the recompilations for other lengths are those of the original model."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    group, chosen = Group("compile", 32, **SMALL), Settings(rounds=1, warmup=0, threads=1, encodings=("alibi",))
    record = measuring.measure(group, chosen)
    counts = {name: (each["graph_breaks"], each["recompilations"]) for name, each in record["subjects"].items()}
    assert counts == {"stock": (0, 1), "alibi": (0, 1)}
    assert "graph breaks" in report.text(whole({group.name: record}))
    found = [each.met for each in targets.verdicts({"compile-512-fp32": record}) if each.target.unit != "x"]
    assert found == [True, True]


def test_halves_and_padding():
    group = Group("forward", 12, batch=2, dtype="bfloat16", padded=True, **SMALL)
    assert group.name == "forward-12-bf16-padded"
    assert subjects.inputs(group, FEW)["attention_mask"].sum(1).tolist() == [9, 12]
    assert subjects.stock(group, FEW).dtype == torch.bfloat16
    record = measuring.measure(group, FEW)
    assert not [each for each in record["subjects"].values() if "failed" in each] and record["padded"] is True


def test_subjects_share_the_parameters_of_the_stock_model():
    group = Group("forward", 12, **SMALL)
    model = subjects.stock(group, FEW)
    new = subjects.patched(model, "relative", group, FEW)
    assert new.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert 0.03 < new.posenc.weight.std() < 0.07  # a bias of zeros may use another implementation


@pytest.mark.parametrize("kind", ["attention", "attention-train"])
def test_attention_alone_is_what_the_model_calls(kind):
    """The rest of the model isn't timed, and the attention functions are restored."""
    group = Group(kind, 12, **SMALL)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    model = subjects.patched(subjects.stock(group, FEW), "t5", group, FEW)
    calls = []
    model.posenc.register_forward_hook(lambda module, arguments, output: calls.append(arguments[0]))
    model.encoder.layer[0].intermediate.register_forward_hook(lambda *_: time.sleep(0.2))
    alone = attention.Alone(model, group, FEW)
    assert alone.name != "sdpa" and 0 < alone.run() < 0.2 and "distance_bias" in calls
    assert alone.peak_mb() >= 0
    assert all(parameter.grad is None for parameter in model.parameters())
    known = dict(ALL_ATTENTION_FUNCTIONS)
    assert {name: known[name] for name in before} == before and not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_attention_alone_computes_its_gradients():
    group = Group("attention-train", 12, **SMALL)
    model = subjects.patched(subjects.stock(group, FEW), "t5", group, FEW)
    gradients = []
    model.posenc.weight.register_hook(gradients.append)
    attention.Alone(model, group, FEW).run()
    assert len(gradients) == 1 and gradients[0].abs().max() > 0


@pytest.mark.parametrize("group", [Group("x-transformers", 12, **SMALL), Group("rotation", 12, **SMALL)], ids=lambda g: g.kind)
def test_other_libraries(group):
    pytest.importorskip("x_transformers")
    pytest.importorskip("rotary_embedding_torch")
    record = measuring.measure(group, FEW)
    assert not [each for each in record["subjects"].values() if "failed" in each], record
    pairs = {(name, other) for name, each in record["subjects"].items() for other in each["ratios"]}
    theirs = {"x-transformers": ("t5", "x-transformers: t5"), "rotation": ("rope", "rotary-embedding-torch")}
    assert theirs[group.kind] in pairs


def test_the_weights_that_patching_copies(monkeypatch):
    monkeypatch.setattr(scale, "stock", lambda group, settings: subjects.stock(Group("forward", 512, **SMALL), settings))
    group = next(group for group in grid.GROUPS if group.kind == "patch")
    few = Settings(rounds=2, threads=1, encodings=("alibi", "shaw"))
    record = measuring.measure(group, few)
    assert {name: each["copied_mb"] for name, each in record["subjects"].items()} == {"alibi": 0, "shaw": 0}
    patch = hf_posenc.patch

    def copying(model, name):
        new = patch(model, name)
        word = new.embeddings.word_embeddings
        word.weight = torch.nn.Parameter(word.weight.clone())
        return new

    monkeypatch.setattr(hf_posenc, "patch", copying)
    copied = measuring.measure(group, few)["subjects"]["alibi"]["copied_mb"]
    assert copied == pytest.approx(1000 * 128 * 4 / 1e6)


def whole(groups):
    about = {"cpu": "a CPU", "cores": 2, "threads": 1, "torch": "2", "transformers": "5", "python": "3"}
    return {"command": "python scripts/bench.py", "machine": about, "date": "2026-01-01", "groups": groups}


def made_up(ratios, peaks=(), **more):
    """A record whose subjects have these ratios to `stock` and `none`, and these peaks."""
    kinds = {"alibi": ["distance_bias"], "t5": ["distance_bias"], "rope": ["rotate"], "shaw": ["score_bias"], "none": []}
    found = {
        name: {
            "mechanisms": kinds.get(name, []),
            "learned": name in ("t5", "shaw"),
            "milliseconds": 1.0,
            "ratios": dict.fromkeys(("stock", "none"), [value, value - 0.01, value + 0.02]),
            "peak_mb": dict(peaks).get(name, 0.0),
        }
        for name, value in ratios.items()
    }
    return {"kind": "forward", "host": "bert", "length": 512, "batch": 1, "layers": 3, "heads": 12, "dtype": "float32",
            "subjects": found, **more}  # fmt: skip


def test_targets():
    groups = {
        "forward-512-fp32": made_up({"alibi": 0.98, "t5": 0.96, "rope": 0.97, "shaw": 0.87, "none": 0.5}),
        "attention-8192-fp32": made_up(
            {"alibi": 0.9, "t5": 0.1, "none": 1.0}, {"alibi": 150.0, "none": 60.0}, kind="attention", length=8192
        ),
    }
    found = {(each.target.unit, each.subject, each.group): each for each in targets.verdicts(groups)}
    met = {key: each.met for key, each in found.items()}
    assert met == {
        ("x", "alibi", "forward-512-fp32"): True,
        ("x", "t5", "forward-512-fp32"): False,
        ("x", "rope", "forward-512-fp32"): True,
        ("x", "shaw", "forward-512-fp32"): False,
        ("x time", "alibi", "attention-8192-fp32"): False,
        ("MB more", "alibi", "attention-8192-fp32"): True,
    }
    slower = found["x time", "alibi", "attention-8192-fp32"]
    assert slower.value == pytest.approx(1 / 0.9) and slower.interval == pytest.approx((1 / 0.92, 1 / 0.89))
    assert found["MB more", "alibi", "attention-8192-fp32"].value == 90
    page, tables = report.text(whole(groups)), report.tables(whole(groups))
    assert "targets: 3 of 6 met" in page and "MISSED" in page
    assert (
        "| ≥ 0.97x stock | 0.96 [0.95, 0.98] (t5, forward-512-fp32) | undecided |" in tables
        and "| time ≤ 1.08x none |" in tables
    )
    assert f"1 of 4 targets of this project are met by all subjects; {len(targets.TARGETS) - 4} were not measured." in tables
    assert "contains the bound: 1." in tables and f"(shaw, forward-512-fp32) | {targets.PRODUCTS} |" in tables
    assert "below 1 is slower" in page and all("1 thread, wall clock;" in shown for shown in (page, tables))


def test_targets_are_of_groups_that_there_are():
    names = [group.name for group in grid.GROUPS]
    assert len(names) == len({*names}) and {name for target in targets.TARGETS for name in target.groups} <= {*names}
    assert {*grid.QUICK} <= {*names}
    assert {group.kind for group in grid.groups()} <= {*measuring.KINDS} and grid.groups(quick=True)
    with pytest.raises(ValueError, match="there is no group forwards; there are forward, forward-128-fp32"):
        grid.groups(only=("forwards",))


def test_the_list_of_groups(capsys):
    """--list shows each group once, with its description and in the order of measurement. The error lists the same names."""
    bench.main(["--list"])
    heads = [line.strip().partition(": ") for line in capsys.readouterr().out.splitlines()]
    names, every = [name for name, _, _ in heads], grid.groups()
    assert len(names) == len({*names}) and all(what for _, _, what in heads)
    assert [name for name in names if name in {group.name for group in every}] == [group.name for group in every]
    with pytest.raises(ValueError) as stopped:
        grid.groups(only=("forwards",))
    assert str(stopped.value).partition("there are ")[2].partition(" (--list")[0].split(", ") == names


def test_what_fails_is_shown():
    group = made_up({"alibi": 1.0})
    group["subjects"]["broken"] = {"failed": "RuntimeError: out of memory"}
    results_ = whole({"forward-512-fp32": group})
    assert "  broken: RuntimeError: out of memory" in report.text(results_)
    assert "| `broken` | failed: RuntimeError: out of memory |" in report.tables(results_)


def test_results_of_groups_are_put_together(tmp_path):
    file, order = tmp_path / "bench.json", ["a", "b"]
    first = results.together({"b": {"x": 1}, "a": {"x": 1}}, FEW, "all", file, order)
    assert [*first["groups"]] == order and first["command"] == "all"
    bench.records.write(file, first)
    again = results.together({"b": {"x": 2}}, FEW, "one", file, order)
    assert again["groups"]["b"]["x"] == 2 and again["groups"]["a"]["x"] == 1 and again["command"] == "all"
    with pytest.raises(ValueError, match="another machine or setting"):
        results.together({"b": {"x": 2}}, Settings(threads=7), "one", file, order)
    assert results.together({"a": {"x": 3}, "b": {"x": 3}}, Settings(threads=7), "new", file, order)["command"] == "new"


def test_groups_of_other_code_are_measured_again(tmp_path, monkeypatch):
    group = Group("forward", 12)
    kept = results.Kept(tmp_path, FEW)
    kept.add(group, {"subjects": {"alibi": {"failed": "why"}, "rope": {"milliseconds": 1.0}}})
    assert "rope" in results.Kept(tmp_path, FEW).get(group)["subjects"]
    assert results.Kept(tmp_path, Settings(rounds=3)).get(group) is None
    monkeypatch.setattr(results, "state", lambda settings: "other")
    assert results.Kept(tmp_path, FEW).get(group) is None


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch, capsys):
    """The command writes JSON, text, a figure, and the page. Finished groups aren't measured again, and a failed group is
    shown.
    """
    small = Group("forward", 12, **SMALL)
    monkeypatch.setattr(grid, "GROUPS", (small, Group("rotation", 12, dtype="float7")))
    page = tmp_path / "speed.md"
    page.write_text(f"Before\n\n{report.MARKERS[0]}\nold\n{report.MARKERS[1]}\n\nAfter\n")
    given = ["--rounds", "2", "--warmup", "0", "--threads", "1", "--encodings", "none,alibi", "--docs_file", str(page)]
    given += ["--output_dir", str(tmp_path), "--parts_dir", str(tmp_path / "parts")]
    with pytest.raises(SystemExit, match="nothing could.*in rotation-12-fp7: "):
        bench.main(given)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [*found["groups"]] == ["forward-12-fp32", "rotation-12-fp7"] and found["machine"]["threads"] == 1
    assert [*found["groups"]["forward-12-fp32"]["subjects"]] == ["stock", "none", "alibi"]
    why = "module 'torch' has no attribute 'float7'" if find_spec("rotary_embedding_torch") else "No module named"
    (failed,) = found["groups"]["rotation-12-fp7"]["subjects"].items()
    assert failed[0] == "all" and why in failed[1]["failed"]
    assert (tmp_path / "bench.txt").read_text() == capsys.readouterr().out
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    said = page.read_text()
    assert said.startswith("Before\n") and said.endswith("After\n") and "old" not in said and "`alibi`" in said
    tried = []
    monkeypatch.setattr(bench, "measured", lambda group, settings: tried.append(group.name) or bench.failed(group, "again"))
    with pytest.raises(SystemExit, match="rotation-12-fp7"):
        bench.main(given)
    assert tried == ["rotation-12-fp7"]
    said = capsys.readouterr().err
    assert "forward-12-fp32: kept from 20" in said and "; --no-resume measures anew" in said and "fp7: kept" not in said
    found["groups"]["rotation-12-fp7"]["subjects"]["all"]["failed"] = "again"
    (tmp_path / "bench.txt").unlink()
    bench.main([*given, "--report_only"])
    assert json.loads((tmp_path / "bench.json").read_text()) == found and (tmp_path / "bench.txt").exists()


WINDOW = """
import torch, hf_posenc

class Window(hf_posenc.PositionEncoding, type="window-of-a-file"):
    def distance_bias(self, distance):
        return torch.where(distance.abs() > 4, -torch.inf, 0.0)[None]
"""


@pytest.mark.slow
def test_encodings_of_a_module(tmp_path):
    """The process that measures imports the module's encodings. Results belong to one version of the file."""
    (tmp_path / "my_windows.py").write_text(WINDOW)
    (tmp_path / "my_more.py").write_text("")
    small = "from benchmarks import bench, grid\ngrid.GROUPS = (grid.Group('forward', 12, layers=1, heads=2),)\n"
    small += "if __name__ == '__main__': bench.main()"
    (tmp_path / "small.py").write_text(small)
    given = ["--rounds=2", "--warmup=0", "--threads=1", "--parts_dir=parts", "--encodings=alibi,window-of-a-file"]

    def run(*more):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "small.py", *given, *more], capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    done = run("--import", "my_more,my_windows")
    assert done.returncode == 0 and "\n  window-of-a-file " in done.stdout, done.stderr
    first = json.loads((tmp_path / "parts" / "forward-12-fp32.json").read_text())
    (tmp_path / "my_windows.py").write_text(WINDOW.replace("> 4", "> 5"))
    assert run("--import", "my_more", "--import", "my_windows").returncode == 0
    assert json.loads((tmp_path / "parts" / "forward-12-fp32.json").read_text())["state"] != first["state"]
    without, missing = run(), run("--import", "my_windws")
    assert "there is no encoding window-of-a-file" in without.stderr and without.returncode
    assert "--import my_windws: No module named 'my_windws'. Modules are looked for in" in missing.stderr and missing.returncode


@pytest.mark.slow
def test_a_process_that_dies(monkeypatch):
    monkeypatch.setattr(bench, "_measure", _die)
    record = bench.measured(Group("forward", 12), FEW)
    assert record["subjects"] == {"all": {"failed": "its process died: too little memory?"}} and record["kind"] == "forward"


def _die(group, settings):
    import os

    os._exit(1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--groups", "forwards"], "there is no group forwards"),
        (["--report_only"], "require --output_dir"),
        (["--rounds", "0"], "must be at least 1"),
        (["--threads", "0"], "must be at least 1"),
        (["--against", "HEAD", "--rounds", "1"], "--against needs at least 6 rounds"),
        (["--encodings", "alibi,alibo"], "--encodings: there is no encoding alibo; registered: none, alibi"),
        (["--clock", "process"], "requires --threads 1"),
        (["--report_only", "--output_dir", "empty"], "no results in empty: there is no bench.json. Run `make bench`"),
    ],
)
def test_arguments_that_cannot_be(given, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        bench.main([*given, "--parts_dir", str(tmp_path)])
    assert stopped.value.code not in (None, 0)
    assert said in f"{stopped.value}{capsys.readouterr().err}"


def test_the_page_and_the_text_show_the_results():
    found = bench.records.read(KEPT / "bench.json")
    assert (KEPT / "bench.txt").read_text() == report.text(found)
    measured = {target for target in targets.TARGETS if {*target.groups} & {*found["groups"]}}
    assert {each.target for each in targets.verdicts(found["groups"])} == measured, "targets that apply to no record"
    shown = PAGE.read_text().partition(report.MARKERS[0])[2].partition(report.MARKERS[1])[0]
    assert shown.strip() == report.tables(found).strip()


def test_changes_since_another_commit():
    """A subject is slower or faster if the intervals don't overlap. Subjects of one commit only aren't compared."""

    def groups(**ratios):
        return {"forward": {"subjects": {name: {"ratios": {"stock": ratio}} for name, ratio in ratios.items()}}}

    before = groups(alibi=(1.0, 0.98, 1.02), rope=(0.9, 0.88, 0.92), t5=(0.9, 0.88, 0.92), shaw=(1.0, 1.0, 1.0))
    now = groups(alibi=(0.9, 0.88, 0.97), rope=(1.0, 0.93, 1.02), t5=(0.91, 0.9, 0.93), fire=(1.0, 1.0, 1.0))
    found = [*against.changes(before, now)]
    assert {each.subject: each.sign for each in found} == {"alibi": -1, "rope": 1, "t5": 0}
    lines = against.report("HEAD~1", found).splitlines()
    assert "1 slower" in lines and "1 faster" in lines and lines[-1] == "1 with overlapping intervals"
    with pytest.raises(ValueError, match="--against no-such-commit"):
        against.compare("no-such-commit", [])
