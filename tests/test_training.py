"""The training scripts: killed, resumed, distributed, and invalid runs of tiny models, each in separate processes."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

import hf_posenc
import vocabularies
from conftest import ROOT, WORDS
from hf_posenc.training import checkpoints, data, flags, loop, train_clm, train_mlm
from hf_posenc.training import models as training_models
from models import HOSTS, LENGTH, randomize, slow, stock

CLOSE = dict(rel=1e-4, abs=1e-5)
"""The tolerance for losses after the same steps, computed in another order."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with a tiny BERT with dropout, one without, a GPT-2 without a pad token, their tokenizers, and texts."""
    path = tmp_path_factory.mktemp("tiny")
    models = {
        "bert": stock("bert", "ForMaskedLM"),
        "still": stock("bert", "ForMaskedLM", **HOSTS["bert"].no_dropout),
        "gpt2": stock("gpt2", "LMHeadModel", pad_token_id=None, **HOSTS["gpt2"].no_dropout),
    }
    for name, model in models.items():
        randomize(model, std=0.1).save_pretrained(path / name)
        tokenizer = vocabularies.of_words(eos_token="[CLS]") if name == "gpt2" else vocabularies.of_bert(path)
        tokenizer.save_pretrained(path / name)
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS[i % 7 :: 7]) for _ in range(3 + i % 9)) for i in range(43)]
    (path / "train.txt").write_text("\n\n".join(texts))
    (path / "validation.txt").write_text("\n".join(texts[::4]))
    return path


def line(tiny, output, *more, model="bert", train="train.txt", validation="validation.txt"):
    """The flags of a short run. Flags in `more` take precedence."""
    given = ["--model_name_or_path", tiny / model, "--train_file", tiny / train, "--output_dir", output]
    given += ["--validation_file", tiny / validation] if validation else []
    return [*given, "--max_train_steps", 8, "--learning_rate", "0.01", "--per_device_train_batch_size", 4, *more]


def good(result):
    codes, said = result
    assert not any(codes), said[-3000:]
    return said


def record(folder, name="all_results"):
    return json.loads((folder / f"{name}.json").read_text())


def assert_same(one, other, name="all_results"):
    """Losses, evaluations, and weights are bit-identical."""
    for key in ("losses", "evaluations", "best_step"):
        assert record(one, name)[key] == record(other, name)[key], key
    expected, actual = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)


def write_labels(tiny, folder):
    """The flags for texts with one label each."""
    rows = [{"text": text, "label": text.split()[0][-1]} for text in (tiny / "train.txt").read_text().split("\n\n")]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--train_file", folder / "train.jsonl", "--validation_file", folder / "train.jsonl"]


# A run that is killed.

KEEPING = ("--position_encoding", "t5", "--checkpointing_steps", 3, "--eval_steps", 2, "--load_best_model_at_end")
KEEPING = (*KEEPING, "--gradient_accumulation_steps", 2)
SHORT = ("--no-calibrate", "--min_text_length", 4, "--text_length", 9)
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory, launch):
    """An uninterrupted run with dropout, masking, accumulation, evaluations, and a best model."""
    output = tmp_path_factory.mktemp("whole") / "out"
    said = good(launch("train_mlm", *line(tiny, output, *KEEPING, *LATEST)))
    assert f"{output} has no complete checkpoint" in said
    bests = {record(output)["best_step"]} | {checkpoints.manifest(output / name)["best_step"] for name in ("step_3", "step_6")}
    folders = {"step_3", "step_6", *(f"best_{step}" for step in bests)}
    assert {path.name for path in output.iterdir() if path.is_dir()} == folders
    return output


@pytest.mark.parametrize(
    ("kill", "left"),
    [
        (("hf_posenc.training.checkpoints.replace", 1), "step_6"),
        # The files of step_3 (the optimizer, random states, progress, scheduler), and then those of step_6.
        *(slow(("torch.save", number), "step_3" if number > 4 else None) for number in (1, 4, 5, 8)),
        slow(("hf_posenc.training.loop.Run._step", 2), None),
        slow(("hf_posenc.training.loop.Run._evaluate", 2), "step_3"),
        slow(("os.rename", 1), None),
        slow(("hf_posenc.training.checkpoints.prune", 2), "step_3"),
    ],
)
def test_killed_anywhere_and_resumed_a_run_is_the_same(tiny, tmp_path, launch, whole, kill, left):
    output = tmp_path / "out"
    arguments = line(tiny, output, *KEEPING, *LATEST, "--keep_last", 2, "--dataloader_num_workers", 2)
    codes, _ = launch("train_mlm", *arguments, kill=kill)
    assert codes == [-signal.SIGKILL] and not (output / "all_results.json").exists()
    assert (checkpoints.newest(output) or SimpleNamespace(name=None)).name == left
    said = good(launch("train_mlm", *arguments))
    assert (f"esumed from {output / left}" if left else "has no complete checkpoint") in said
    assert_same(whole, output)
    assert not list(output.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more", "model"),
    [
        ("finetune", ["labelled"], "bert"),
        ("train_clm", ["--position_encoding", "learned+alibi"], "gpt2"),
        ("distill", ["--position_encoding", "relative", *SHORT], "still"),
        ("train_mlm", ["--streaming", "--shuffle_buffer", 7, "--packing", "--text_length", 12], "bert"),
        ("train_mlm", ["--early_stopping_patience", 2, "--eval_steps", 1, "--learning_rate", 0.3], "bert"),
        ("train_mlm", ["--checkpointing_steps", "epoch", "--per_device_train_batch_size", 15], "bert"),
    ],
)
def test_each_script_resumes_exactly(tiny, tmp_path, launch, script, more, model):
    more = write_labels(tiny, tmp_path) if more == ["labelled"] else more
    written = "distillation" if script == "distill" else "all_results"
    folders = [tmp_path / "whole", tmp_path / "killed"]
    lines = [line(tiny, folder, "--checkpointing_steps", 3, *more, *LATEST, model=model) for folder in folders]
    good(launch(script, *lines[0]))
    # The files that a killed run would leave: its first checkpoint, and the best model until then.
    *_, (oldest, about) = checkpoints.found(folders[0])
    for left in (oldest.name, f"best_{about['best_step']}"):
        if (folders[0] / left).exists():
            shutil.copytree(folders[0] / left, folders[1] / left)
    said = good(launch(script, *lines[1], "--dataloader_num_workers", 2))
    assert f"esumed from {folders[1] / oldest.name}" in said
    assert_same(*folders, name=written)
    steps = record(folders[0], written)["steps"]
    assert steps < 8 if "--early_stopping_patience" in more else steps == 8


def torchrun(*arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "--max_restarts", 1]
    return subprocess.Popen(
        [*map(str, command), str(ROOT / "scripts" / "train_mlm.py"), *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_worker_is_killed_and_torchrun_starts_all_again(tiny, tmp_path, launch):
    """The test uses the real launcher, with kill -9 from outside."""
    more = ("--checkpointing_steps", 2, *LATEST, "--position_encoding", "t5", "--max_train_steps", 40)
    # Poisoned memory would give other initial weights for the encoding.
    good(launch("train_mlm", *line(tiny, tmp_path / "whole", *more), processes=2, poison=False))
    killed, deadline = None, time.monotonic() + 120
    with torchrun(*line(tiny, tmp_path / "out", *more), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as run:
        while not killed and time.monotonic() < deadline and run.poll() is None:
            if (tmp_path / "out" / "step_4").exists():
                children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
                killed = int(children[-1])
                os.kill(killed, signal.SIGKILL)
            time.sleep(0.005)
        _, said = run.communicate(timeout=120)
    assert killed and run.returncode == 0 and "exitcode: -9" in said, said[-3000:]
    assert_same(tmp_path / "whole", tmp_path / "out")


def test_what_launchers_get_wrong(tiny, tmp_path, launch):
    restarts = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for settings, words in (
        (restarts, "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({"ACCELERATE_USE_FSDP": "true"}, "doesn't support FSDP on cpu"),
    ):
        codes, said = launch("train_mlm", *line(tiny, tmp_path / "out"), **settings)
        assert codes == [1] and words in said and "Traceback" not in said and not (tmp_path / "out").exists()


# Checkpoints.


def copy(whole, tmp_path, *names):
    for name in names:
        shutil.copytree(whole / name, tmp_path / "out" / name)
    return tmp_path / "out"


def test_a_torn_checkpoint_is_skipped(tmp_path, whole):
    harms = {
        "missing": lambda step: (step / "optimizer.bin").unlink(),
        "short": lambda step: os.truncate(step / "model.safetensors", 1000),
        "no manifest": lambda step: (step / "checkpoint.json").unlink(),
        "half a manifest": lambda step: os.truncate(step / "checkpoint.json", 40),
    }
    for name, harm in harms.items():
        output = copy(whole, tmp_path / name, "step_3", "step_6")
        harm(output / "step_6")
        with pytest.warns(UserWarning, match=re.escape(f"{output / 'step_6'} is incomplete")):
            assert checkpoints.newest(output) == output / "step_3"


def test_what_a_resumed_run_may_not_change(tiny, tmp_path, launch, whole):
    output = copy(whole, tmp_path, "step_3")
    before = sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))

    def refused(*more, code=1, **how):
        codes, said = launch("train_mlm", *line(tiny, output, *KEEPING, *more), **how)
        assert code in codes and "Traceback" not in said
        return said

    for flag, value in (("learning_rate", 0.02), ("position_encoding", "alibi")):
        said = refused(*LATEST, f"--{flag}", value)
        assert f"was written with {flag} " in said and f"this run has {flag} {value}" in said
    assert "was written with global_batch 8, and this run has global_batch 16" in refused(*LATEST, processes=2)
    assert f"{output / 'step_3'} exists from an earlier run" in refused(code=2)
    for path in (output / "step_4", whole / f"best_{record(whole)['best_step']}"):
        said = refused("--resume_from_checkpoint", path, code=2)
        assert f"--resume_from_checkpoint {path} isn't a complete checkpoint" in said
    assert before == sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))


def test_a_full_disk(tiny, tmp_path, launch, whole):
    """The optimizer's file is larger than the limit, and the weights are smaller."""
    output = copy(whole, tmp_path, "step_3")
    arguments = line(tiny, output, *KEEPING, *LATEST, "--eval_steps", 20)
    manifest = output / "step_3" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"eval_steps": 2', '"eval_steps": 20'))
    limit = (whole / "step_3" / "optimizer.bin").stat().st_size * 3 // 4
    assert (whole / "step_3" / "model.safetensors").stat().st_size < limit
    codes, said = launch("train_mlm", *arguments, largest_file=limit)
    assert codes == [1] and "Traceback" not in said
    assert f"{output / 'step_6'} can't be written" in said and f"complete checkpoint is {output / 'step_3'}" in said
    assert [path.name for path in output.iterdir()] == ["step_3"] and checkpoints.manifest(output / "step_3")
    codes, said = launch("train_mlm", *line(tiny, tmp_path / "other", "--max_train_steps", 1), largest_file=limit // 4)
    assert codes == [1] and f"The model can't be written to {tmp_path / 'other'}" in said and "Traceback" not in said
    assert not (tmp_path / "other").exists()


def test_what_is_kept_and_what_is_cleared_away(tmp_path):
    for step, best in ((2, 1), (4, 1), (6, 5)):
        (tmp_path / f"step_{step}").mkdir()
        manifest = {"step": step, "best_step": best, "arguments": {}, "files": {}}
        (tmp_path / f"step_{step}" / "checkpoint.json").write_text(json.dumps(manifest))
    for name in ("best_1", "best_3", "best_5", ".step_8", ".mine", "step_x", "other_2"):
        (tmp_path / name).mkdir()
    kept = {".mine", "best_5", "other_2", "step_6", "step_x"}
    checkpoints.prune(tmp_path, 2, 7)
    assert {path.name for path in tmp_path.iterdir()} == kept | {"best_1", "step_4"}
    checkpoints.prune(tmp_path, 1, 5)
    assert {path.name for path in tmp_path.iterdir()} == kept


# Several processes.


def assert_close_runs(found, expected):
    """The losses, gradients, and evaluations equal those of other processes with the same global batch. AdamW and clipping
    would hide a constant factor of the gradients.
    """
    for name in ("losses", "gradient_norms"):
        assert found[name] == pytest.approx(expected[name], **CLOSE), name
    for after, before in zip(found["evaluations"], expected["evaluations"], strict=True):
        assert after == pytest.approx(before, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "model", "more"),
    [
        ("train_mlm", "still", ["--position_encoding", "learned+shaw", "--checkpointing_steps", 4]),
        ("finetune", "still", ["labelled"]),
        ("distill", "still", ["--position_encoding", "shaw", *SHORT]),
        ("train_clm", "gpt2", ["--streaming", "--packing", "--text_length", 12]),
    ],
)
def test_two_processes_do_what_one_does_in_each_script(tiny, tmp_path, launch, script, model, more):
    more, found = write_labels(tiny, tmp_path) if more == ["labelled"] else more, []
    for processes in (1, 2):
        cut = ("--per_device_train_batch_size", 6 // processes, "--eval_steps", 8, "--dataloader_num_workers", processes - 1)
        good(launch(script, *line(tiny, tmp_path / str(processes), *more, *cut, model=model), processes=processes))
        found.append(record(tmp_path / str(processes), "distillation" if script == "distill" else "all_results"))
    assert_close_runs(found[1], found[0])
    if "--checkpointing_steps" in more:  # one process continues the run of two
        shutil.copytree(tmp_path / "2" / "step_4", tmp_path / "on" / "step_4")
        more = (*more, *LATEST, "--per_device_train_batch_size", 6, "--eval_steps", 8)
        good(launch(script, *line(tiny, tmp_path / "on", *more, model=model)))
        assert_close_runs(record(tmp_path / "on"), found[0])


@pytest.mark.slow
def test_sharded_over_two_processes(tiny, tmp_path, launch):
    """FSDP2 in the scripts trains as one process does, resumes after a kill, and saves a complete model."""
    more = ("--position_encoding", "learned+shaw", "--eval_steps", 4, "--checkpointing_steps", 3, *LATEST)
    good(launch("train_mlm", *line(tiny, tmp_path / "one", *more, "--per_device_train_batch_size", 8, model="still")))
    arguments = line(tiny, tmp_path / "two", *more, model="still")
    codes, said = launch("sharded", *arguments, processes=2, kill=("hf_posenc.training.loop.Run._step", 5))
    assert -signal.SIGKILL in codes, said
    assert "esumed from" in good(launch("sharded", *arguments, processes=2))
    assert (tmp_path / "two" / "step_3" / "pytorch_model_fsdp_0" / "__1_0.distcp").exists()
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    assert two["processes"] == 2
    assert_close_runs({**two, "evaluations": []}, {**one, "evaluations": []})
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "PosEncBertForMaskedLM"
    expected = AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    with torch.no_grad():
        logits = (each(torch.arange(5, 15)[None]).logits for each in (model, expected))
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "encoding"), [("albert", "kerple"), ("mpnet", "learned"), ("llama", "shaw")])
def test_models_of_all_kinds_train_in_two_processes(tiny, tmp_path, launch, host, encoding):
    """This includes models with parameters that the loss doesn't use. The saved weights are the trained ones."""
    model = stock(host, HOSTS[host].head)
    model.save_pretrained(tmp_path / "model")
    vocabulary, pad = [*vocabularies.VOCABULARY], model.config.pad_token_id
    vocabulary[0], vocabulary[pad] = vocabulary[pad], vocabulary[0]
    named = {"pad_token": "[PAD]", "mask_token": "[MASK]", "eos_token": "[SEP]"}
    vocabularies.of_words(vocabulary, **named).save_pretrained(tmp_path / "model")
    script, kind = ("train_clm", AutoModelForCausalLM) if HOSTS[host].causal else ("train_mlm", AutoModelForMaskedLM)
    more = ("--model_name_or_path", tmp_path / "model", "--position_encoding", encoding, "--max_train_steps", 2)
    good(launch(script, *line(tiny, tmp_path / "out", *more), processes=2))
    trained = kind.from_pretrained(tmp_path / "out")
    assert type(trained).__name__ == f"PosEnc{HOSTS[host].prefix}{HOSTS[host].head}"
    assert all(math.isfinite(loss) for loss in record(tmp_path / "out")["losses"])
    weights = trained.state_dict()
    kept = [name for name, weight in model.named_parameters() if name in weights and torch.equal(weight, weights[name])]
    assert all(weight.isfinite().all() for weight in weights.values()) and len(kept) < len(weights) / 4, kept


# Errors.


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_row_that_ruins_the_loss(tiny, tmp_path, launch, processes):
    """Step 5 is the first with the token whose embedding overflows. The state after step 4 stays the last one."""
    order = data.endless(Dataset.from_dict({"number": list(range(43))}), 0, 0, 1)
    ruined = next(row["number"] for number, row in order if number == 18)
    arguments = line_with_a_ruined_token(tiny, tmp_path, 3e38, ruined)
    codes, said = launch("train_mlm", *arguments, "--per_device_train_batch_size", 4 // processes, processes=processes)
    assert 1 in codes and "Traceback" not in said
    assert "at step 5" in said and "--learning_rate" in said
    assert f"The last good checkpoint is {tmp_path / 'out' / 'step_4'}" in said
    kept = load_file(tmp_path / "out" / "step_4" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values()) and checkpoints.newest(tmp_path / "out").name == "step_4"


def line_with_a_ruined_token(tiny, tmp_path, value, row):
    """The flags for a model with `value` as the embedding of w55, which is in only one row."""
    model = BertForMaskedLM.from_pretrained(tiny / "still", tie_word_embeddings=False)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[5 + 55] = value
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny / "still").save_pretrained(tmp_path / "model")
    texts = ["w55 w55 w55" if i == row else "w1 w2 w3 w4 w5 w6 w7 w8 w9" for i in range(43)]
    (tmp_path / "train.txt").write_text("\n".join(texts))
    arguments = line(tiny, tmp_path / "out", "--train_file", tmp_path / "train.txt", "--train_positions_only", validation=None)
    arguments += ["--model_name_or_path", tmp_path / "model", "--position_encoding", "t5", "--checkpointing_steps", 2]
    return [*arguments, "--mlm_probability", 0.5]


def test_weights_that_are_not_finite_are_not_written(tiny, tmp_path, launch):
    codes, said = launch("train_mlm", *line_with_a_ruined_token(tiny, tmp_path, torch.inf, None))
    assert codes == [1] and "fter step 2" in said and "finite" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metrics", [{"eval_f1": 0.5, "eval_loss": math.nan}, {"eval_f1": math.inf, "eval_loss": 0.5}])
def test_metrics_are_all_finite(metrics, tmp_path):
    """Classes are predicted from NaN outputs also, so F1, which selects the best model, may be finite."""
    task = SimpleNamespace(evaluate=lambda *_: metrics, best_by="eval_f1", greater_is_better=True)
    run = object.__new__(loop.Run)
    run.accelerator, run.task = SimpleNamespace(is_main_process=False), task
    run.progress, run.output_dir = loop.Progress(step=3), tmp_path
    run.model = torch.nn.Linear(1, 1)
    name = next(name for name, value in metrics.items() if not math.isfinite(value))
    with pytest.raises(SystemExit, match=f"{name} is {metrics[name]} at step 3.*--learning_rate.*Nothing was saved"):
        run._evaluate([])
    assert not run.progress.evaluations


def test_flags_refused(tmp_path, capsys):
    out = str(tmp_path / "out")
    wrong = {
        "--streaming": "--streaming needs --max_train_steps",
        "--validation_split_percentage 5 --validation_file v.txt": "--validation_split_percentage and --validation_file",
        "--validation_split_percentage 100": "'100' must be an integer from 1 to 99",
        "--keep_last 2": "--keep_last needs --checkpointing_steps",
        "--checkpointing_steps often": "'often' must be an integer of at least 1",
        "--streaming --max_train_steps 5 --checkpointing_steps epoch": "doesn't support --streaming",
        "--streaming --max_train_steps 5 --validation_split_percentage 5": "Set --validation_file",
        "--learning_rate 3e38": "'3e38' must be a number above 0 and at most 3.4e+37",
        "--weight_decay -1": "'-1' must be a number of at least 0",
        "--seed 1.5": "'1.5' must be an integer from 0 to 2^32 - 1",
        f"--seed {10**400}": "must be an integer from 0 to 2^32 - 1",
        "--max_grad_norm 0": "'0' must be a number above 0",
        "--with_tracking --report_to wandbb": "--report_to wandbb isn't installed",
        "--resume_from_checkpoint nowhere": "--resume_from_checkpoint nowhere isn't a complete checkpoint",
        "--lr_scheduler_type square": "invalid choice: 'square'",
    }
    for given, words in wrong.items():
        with pytest.raises(SystemExit) as stopped:
            flags.parse(flags.argument_parser(""), ["--model_name_or_path", "m", "--output_dir", out, *given.split()])
        assert stopped.value.code == 2 and words in capsys.readouterr().err, given


def test_a_folder_without_a_tokenizer(tmp_path):
    """Transformers builds a tokenizer of special tokens for it, which maps every word to unknown."""
    stock("bert").save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="bare has no tokenizer. Save the.*tokenizer there: AutoTokenizer"):
        training_models.load_tokenizer(str(tmp_path / "bare"))
    AutoTokenizer.from_pretrained(tmp_path / "bare").save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="bare has.*a vocabulary"):
        training_models.load_tokenizer(str(tmp_path / "bare"))


def test_a_checkpoint_that_has_lost_its_positions(tmp_path):
    given = ["--model_name_or_path", str(ROOT / "tests" / "v4" / "bert"), "--output_dir", str(tmp_path)]
    arguments = flags.argument_parser("").parse_args(given)
    tokenizer = SimpleNamespace(pad_token_id=0)
    with pytest.raises(SystemExit, match=r"position_embedding_type=.*relative_key"):
        training_models.load_model(arguments, AutoModelForMaskedLM, tokenizer)


def test_encodings_of_ones_own(tmp_path, monkeypatch, own_registry, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("import hf_posenc\n\nclass Mine(hf_posenc.PositionEncoding, type='mine'):\n    pass\n")
    given = ["--model_name_or_path", "x", "--train_file", "y.txt", "--output_dir", "z", "--position_encoding", "mine"]
    with pytest.raises(SystemExit):
        flags.parse(flags.argument_parser(""), given)
    assert "pass --import MODULE" in capsys.readouterr().err
    assert flags.parse(flags.argument_parser(""), [*given, "--import", "mine"]).position_encoding == "mine"
    del sys.modules["mine"]
    with pytest.raises(SystemExit, match="--import nothing_here: No module named 'nothing_here'"):
        flags.parse(flags.argument_parser(""), [*given, "--import", "nothing_here"])


@pytest.mark.parametrize(
    ("script", "model", "more", "words"),
    [
        ("train_mlm", "gpt2", (), "no mask_token"),
        ("train_clm", "bert", ("--text_column", "said"), "no column `said`, only ['text']. See --text_column"),
        ("train_mlm", "bert", ("--train_file", "empty.txt"), "empty.txt"),
        ("train_mlm", "bert", ("--train_file", "blank.txt"), "train data have no rows"),
        ("train_mlm", "bert", ("--train_file", "blank.txt", "--streaming"), "train data have no rows"),
        ("train_mlm", "bert", ("--train_file", "numbers.jsonl"), "column `text`"),
        ("train_mlm", "bert", ("--train_file", "."), "'.jsonl', '.txt'"),
        ("train_mlm", "bert", ("--train_file", "nowhere.txt"), "nowhere.txt"),
        ("train_mlm", "bert", ("--train_positions_only",), "--train_positions_only doesn't apply to 'learned'"),
        ("train_mlm", "bert", ("--packing", "--position_encoding", "nope", "--text_length", 900), "block of 900 tokens"),
        ("train_mlm", "bert", ("--model_name_or_path", "nowhere"), "nowhere"),
        ("train_mlm", "bert", ("--mlm_probability", 1.5), "'1.5' must be a number between 0 and 1"),
        ("distill", "still", SHORT, "--position_encoding is missing"),
    ],
)  # fmt: skip
def test_refused_before_anything_expensive(tiny, tmp_path, launch, script, model, more, words):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text("\n  \n\n")
    (tmp_path / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}')
    more = [tmp_path / each if str(each).endswith((".txt", ".jsonl", ".docx")) or each == "." else each for each in more]
    codes, said = launch(script, *line(tiny, tmp_path / "out", *more, model=model))
    assert codes[0] in (1, 2) and words in said and "Traceback" not in said, said[-2000:]
    assert not (tmp_path / "out").exists() and "step/s" not in said


# Effects of the flags.


def test_positions_alone_are_trained(tiny, tmp_path, launch):
    """New parts of a classifier are trained also: its head, and BERT's pooler."""
    more = ("--position_encoding", "t5", "--train_positions_only", "--max_train_steps", 2, "--checkpointing_steps", 1)
    good(launch("finetune", *line(tiny, tmp_path / "out", *more, *write_labels(tiny, tmp_path), model="still")))
    before = BertForMaskedLM.from_pretrained(tiny / "still").state_dict()
    first, after = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("step_1", ""))
    for name, weight in after.items():
        if "posenc" not in name and name in before:
            assert torch.equal(weight, before[name]), name
    moved = {name.removesuffix(".weight").removesuffix(".bias") for name in after if not torch.equal(after[name], first[name])}
    assert moved == {"bert.posenc", "bert.pooler.dense", "classifier"}


@pytest.fixture(scope="module")
def causal(tiny, tmp_path_factory, launch):
    """A run of train_clm with tracking, two evaluations, and two accumulated batches per step."""
    output = tmp_path_factory.mktemp("causal") / "out"
    more = ("--position_encoding", "alibi", "--gradient_accumulation_steps", 2, "--eval_steps", 4)
    good(launch("train_clm", *line(tiny, output, *more, "--with_tracking", "--report_to", "tensorboard", model="gpt2")))
    return output


def test_losses_are_those_of_the_model(tiny, causal):
    """The first step's loss, over all labels in two accumulated batches, equals one computed without the scripts."""
    model = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(tiny / "gpt2"), "alibi").double()
    tokenizer, texts = AutoTokenizer.from_pretrained(tiny / "gpt2"), (tiny / "train.txt").read_text().split("\n\n")
    order = torch.randperm(43, generator=torch.Generator().manual_seed(0))[:8]
    losses = []
    for text in (texts[i] for i in order):
        ids = tokenizer(text, return_tensors="pt").input_ids
        losses += [-row[label] for row, label in zip(model(ids).logits.log_softmax(-1)[0], ids[0, 1:], strict=False)]
    assert record(causal)["losses"][0] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_tracked(causal):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(causal / "hf-posenc"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert shown == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(record(causal)["losses"])]
    assert [event.step for event in events.Scalars("eval_loss")] == [4, 8]


def test_another_process_changes_no_result(tiny, tmp_path, launch, causal):
    more = ("--position_encoding", "alibi", "--gradient_accumulation_steps", 2, "--eval_steps", 4)
    cut = ("--per_device_train_batch_size", 2)
    said = good(launch("train_clm", *line(tiny, tmp_path / "out", *more, *cut, model="gpt2"), processes=2))
    assert said.count("2 processes on cpu, precision no: 8 steps of 8 ") == 1
    assert record(tmp_path / "out")["processes"] == 2
    assert_close_runs(record(tmp_path / "out"), record(causal))


def test_the_division_of_a_batch_changes_no_result(tiny, tmp_path, launch):
    """Steps with long texts have fewer of them. Some batches of one text are empty."""
    more = ("--position_encoding", "alibi", "--no-calibrate", "--min_text_length", 4, "--text_length", 6, "--long_steps", 80)
    found = []
    for size, accumulated in ((16, 1), (8, 2), (1, 16)):
        output = tmp_path / str(size)
        cut = ("--per_device_train_batch_size", size, "--gradient_accumulation_steps", accumulated, "--long_text_length", 20)
        good(launch("distill", *line(tiny, output, *more, *cut, "--max_train_steps", 4, model="still", validation=None)))
        found.append(record(output, "distillation"))
    for other in found[1:]:
        for name in ("losses", "gradient_norms"):
            assert other[name] == pytest.approx(found[0][name], rel=1e-3), name


def test_the_validation_split_depends_on_no_seed(tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(WORDS))
    given = ["--model_name_or_path", "m", "--output_dir", "o", "--train_file", str(tmp_path / "train.txt")]
    arguments = flags.argument_parser("").parse_args([*given, "--validation_split_percentage", "20"])
    accelerator = SimpleNamespace(main_process_first=contextlib.nullcontext)
    parts = []
    for arguments.seed in (0, 1):
        splits = data.load_splits(accelerator, arguments)
        parts.append([list(splits[name]["text"]) for name in ("train", "validation")])
    assert parts[0] == parts[1]


def test_a_mac_trains_on_its_gpu(tmp_path, monkeypatch):
    """Several processes use its CPU, because MPS has no process groups."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for each in ("accelerator.is_available", "backends.mps.is_available", "backends.mps.is_built"):
        monkeypatch.setattr(f"torch.{each}", lambda: True)
    given = ["--model_name_or_path", "m", "--train_file", "t.txt", "--output_dir", str(tmp_path)]
    arguments = flags.parse(flags.argument_parser(""), given)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert flags.start(arguments).device.type == "mps"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = []
    stand_in = SimpleNamespace(is_main_process=True, num_processes=2)
    monkeypatch.setattr(flags, "Accelerator", lambda **given: asked.append(given) or stand_in)
    flags.start(arguments)
    assert asked[0]["cpu"]


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="torch 2.6 has no FSDP2 on CPUs")
def test_what_the_machine_is_told_changes_no_result(tiny, tmp_path, launch):
    told = {"plain": (), "checkpointed": ("--gradient_checkpointing",), "half": ("--mixed_precision", "bf16")}
    for folder, flags_given in told.items():
        arguments = ("--position_encoding", "learned+t5", "--max_train_steps", 2, *flags_given)
        good(launch("train_mlm", *line(tiny, tmp_path / folder, *arguments, model="still", validation=None)))
    sharded = ("--position_encoding", "learned+t5", "--max_train_steps", 2, "--per_device_train_batch_size", 2)
    good(launch("sharded", *line(tiny, tmp_path / "sharded", *sharded, model="still", validation=None), processes=2))
    losses = {folder: record(tmp_path / folder)["losses"] for folder in (*told, "sharded")}
    assert losses["sharded"] == pytest.approx(losses["plain"], **CLOSE)
    assert losses["checkpointed"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["half"] == pytest.approx(losses["plain"], rel=1e-2) and losses["half"] != losses["plain"]
    plain, checkpointed, half = (load_file(tmp_path / folder / "model.safetensors") for folder in told)
    torch.testing.assert_close(checkpointed, plain, atol=1e-3, rtol=1e-3)
    assert {name: weight.dtype for name, weight in half.items()} == {name: weight.dtype for name, weight in plain.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [("--torch_compile", "--torch_compile_backend", "aot_eager"), ("--mixed_precision", "bf16")],
    ids=lambda told: told[0],
)
def test_told_so_a_run_resumes(tiny, tmp_path, launch, told):
    arguments = ("--position_encoding", "t5", "--max_train_steps", 2, "--checkpointing_steps", 1, *told)
    for folder, more in {"whole": (), "on": ("--resume_from_checkpoint", tmp_path / "whole" / "step_1")}.items():
        good(launch("train_mlm", *line(tiny, tmp_path / folder, *arguments, *more, model="still", validation=None)))
    assert_same(tmp_path / "whole", tmp_path / "on")
    good(launch("train_mlm", *line(tiny, tmp_path / "plain", *arguments[:4], model="still", validation=None)))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == plain.keys()
    assert record(tmp_path / "whole")["losses"] == pytest.approx(record(tmp_path / "plain")["losses"], rel=1e-2)


def test_the_token_that_ends_a_text_is_learned_where_it_pads_as_well(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "gpt2")
    tokenizer.pad_token, end = tokenizer.eos_token, tokenizer.eos_token_id
    rows = [(0, {"input_ids": [5, 6, end]}), (1, {"input_ids": [7]})]
    batch = train_clm.CausalLanguageModeling(tokenizer).collate(rows)
    assert batch["labels"].tolist() == [[5, 6, end], [7, -100, -100]] and batch["input_ids"].tolist()[1] == [7, end, end]


def test_what_is_evaluated_is_what_is_saved(tiny, tmp_path, launch):
    good(launch("train_clm", *line(tiny, tmp_path / "out", "--position_encoding", "sinusoidal", model="gpt2")))
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    losses, right = [], []
    for text in (tiny / "validation.txt").read_text().split("\n"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        logits = model(ids).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        right += (logits.argmax(-1) == ids[0, 1:]).tolist()
    shown = record(tmp_path / "out")
    assert shown["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert shown["eval_loss"] == pytest.approx(math.log(shown["eval_perplexity"]), rel=1e-12)
    assert shown["eval_accuracy"] == sum(right) / len(right)


def test_scripts_learn(tiny, tmp_path, launch):
    """w8 follows w7, and a causal model learns this."""
    (tmp_path / "train.txt").write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(40)))
    files = ("--train_file", tmp_path / "train.txt", "--validation_split_percentage", 20, "--max_train_steps", 80)
    more = ("--position_encoding", "rope", "--from_scratch", "--lr_scheduler_type", "constant", "--num_train_epochs", 1)
    good(launch("train_clm", *line(tiny, tmp_path / "out", *files, *more, model="gpt2", validation=None)))
    shown = record(tmp_path / "out")
    assert shown["eval_accuracy"] > 0.9 and shown["losses"][0] > 3.5


# Rows.


def test_all_kinds_of_files_hold_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = Dataset.from_dict({"text": [f"w{i} w{i + 1}" for i in range(43)]})
    (tmp_path / "folder" / "more").mkdir(parents=True)
    rows.select(range(20)).to_json(tmp_path / "folder" / "a.jsonl")
    rows.select(range(20, 43)).to_json(tmp_path / "folder" / "more" / "b.json")
    (tmp_path / "train.txt").write_text("\n".join(rows["text"]))
    for kind, write in {"csv": rows.to_csv, "json": rows.to_json, "jsonl": rows.to_json, "parquet": rows.to_parquet}.items():
        write(tmp_path / f"train.{kind}")
    for name in ("folder", *(path.name for path in tmp_path.glob("train.*"))):
        assert list(data.read(tmp_path / name)["text"]) == list(rows["text"]), name


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_are_an_endless_stream_of_permutations(streamed):
    rows = Dataset.from_dict({"number": list(range(11))})
    source = rows.to_iterable_dataset() if streamed else rows
    taken = [(number, row["number"]) for number, row in itertools.islice(data.endless(source, 3, 0, 5), 33)]
    assert [number for number, _ in taken] == list(range(33))
    epochs = [[row for _, row in taken[i : i + 11]] for i in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    for start in (0, 1, 10, 11, 12, 25):
        later = itertools.islice(data.endless(source, 3, start, 5), 33 - start)
        assert [(number, row["number"]) for number, row in later] == taken[start:]
    assert taken != [(number, row["number"]) for number, row in itertools.islice(data.endless(source, 4, 0, 5), 33)]


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_texts_are_cut_as_the_tokenizer_cuts_them(tiny, model):
    tokenizer = AutoTokenizer.from_pretrained(tiny / model)
    cut = data.Cut(tokenizer)
    for text, length in itertools.product(("w1", "w1 w2 w3", "w1 w2 w3 nonsense w5 w6 w7"), range(3, 10)):
        expected = tokenizer(text, truncation=True, max_length=length).input_ids
        assert cut(tokenizer(text).input_ids, length) == expected


def test_packed_blocks():
    cut = SimpleNamespace(head=1, tail=1, prefix=[2], suffix=[3])
    texts = [[10, 11, 12, 3], [13, 3], [14, 15, 16, 17, 18, 3]]
    blocks = data.packed({"input_ids": texts}, cut, 6)["input_ids"]
    assert blocks == [[2, 10, 11, 12, 3, 3], [2, 13, 3, 14, 15, 3], [2, 16, 17, 18, 3, 3]]
    cut = SimpleNamespace(head=0, tail=0, prefix=[], suffix=[])
    assert data.packed({"input_ids": texts}, cut, 5)["input_ids"] == [[10, 11, 12, 3, 13], [3, 14, 15, 16, 17]]


def test_warned_where_texts_are_cut_or_fill_the_model(capsys):
    """A single long text doesn't cause the warning about most texts. Models without a maximum length have room."""
    lengths = [10] * 19 + [13] * 19 + [11] * 5
    arguments, model = SimpleNamespace(position_encoding="alibi", model_name_or_path="it"), stock("bert")
    of_24 = "Warning: 1 of 100 training texts are truncated to 24 tokens. The 95th percentile of their lengths is 10 tokens.\n"
    for given, longest, length, words in (
        (lengths, 24, 12, "Warning: 19 of 43 training texts are truncated to 12 tokens."),
        (lengths, 15, 15, "Warning: the model's maximum length is 15 tokens, less than 1.2 times"),
        (lengths, 16, 16, ""),
        (lengths, None, 512, ""),
        ([10] * 99 + [5000], 24, 24, of_24),
    ):
        made = hf_posenc.patch(model, "alibi", max_length=longest)
        training_models.warn_of_length(
            SimpleNamespace(print=print), arguments, made, Dataset.from_dict({"length": given}), length
        )
        said = capsys.readouterr().out
        assert said.startswith(words) and said.count("Warning: ") == bool(words), (longest, length)


@pytest.mark.parametrize(
    ("host", "encoding", "flags"),
    [
        ("bert", None, " --method dynamic"),
        ("gpt2", None, " --method keep_first"),
        ("bert", "alibi", ""),
        ("bert", "learned", " --method dynamic"),
    ],
)
def test_advice_for_longer_texts_keeps_what_was_learned(host, encoding, flags):
    """The recommended command works. Random numbers are the same as without it."""
    model = stock(host) if encoding is None else hf_posenc.patch(stock(host), encoding, max_length=LENGTH)
    arguments = SimpleNamespace(position_encoding=None, model_name_or_path="a/it")
    state = torch.get_rng_state()
    said = training_models.longer(arguments, model, 99)
    command = f"hf-posenc extend a/it --max-length 99{flags} --output-dir it-99"
    assert said == f"`{command}` keeps what it has learned. Then set --model_name_or_path it-99."
    assert torch.equal(torch.get_rng_state(), state)
    said = training_models.longer(SimpleNamespace(position_encoding="alibi"), model, 99)
    assert said == "set --model_max_length 99."


def test_masks_belong_to_rows(tiny):
    """A row's masks don't depend on its batch, and change in each epoch. Their number is close to the requested one, with the
    usual three kinds.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny / "bert")
    task = train_mlm.MaskedLanguageModeling(tokenizer, 0.15, seed=5)
    ids = tokenizer(" ".join(WORDS[:40])).input_ids
    alone, again, other = (task.collate([(number, {"input_ids": ids})]) for number in (7, 7, 8))
    short = tokenizer("w1 w2").input_ids
    together = task.collate([(1, {"input_ids": short}), (7, {"input_ids": ids})])
    assert torch.equal(alone["input_ids"], again["input_ids"]) and not torch.equal(alone["labels"], other["labels"])
    assert all(torch.equal(together[name][1], alone[name][0]) for name in ("input_ids", "labels"))
    assert together["labels"][0, 4:].eq(-100).all() and together["attention_mask"][0].tolist() == [1] * 4 + [0] * 38
    many = task.collate([(number, {"input_ids": ids}) for number in range(400)])
    asked = many["labels"] != -100
    assert asked[:, [0, -1]].sum() == 0 and 0.13 < asked[:, 1:-1].float().mean() < 0.17
    assert torch.equal(many["labels"][asked], torch.tensor([ids] * 400)[asked])
    ways = Counter(
        "mask" if new == tokenizer.mask_token_id else "same" if new == old else "random"
        for new, old in zip(many["input_ids"][asked].tolist(), many["labels"][asked].tolist(), strict=True)
    )
    assert [round(ways[way] / asked.sum().item(), 1) for way in ("mask", "random", "same")] == [0.8, 0.1, 0.1]


def test_help_reads_well(launch):
    for script in ("finetune", "train_mlm", "train_clm", "distill"):
        codes, said = launch(script, "--help")
        assert codes == [0] and "--resume_from_checkpoint latest|PATH" in said and f"hf_posenc.training.{script}" in said
