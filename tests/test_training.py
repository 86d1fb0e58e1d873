"""The training scripts: runs that are killed, resumed, cut over processes, refused; tiny models, processes of their own."""

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
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import hf_posenc
from conftest import ROOT, WORDS
from hf_posenc.training import checkpoints, data, flags, loop, train_clm
from hf_posenc.training import models as training_models
from models import BERT, HOSTS, LENGTH, VARIANTS, VOCABULARY, randomize, slow, stock, suits

CLOSE = dict(rel=1e-4, abs=1e-5)
"""Of losses after the same steps, computed in another order."""


PARAMETRISED = ("learned+shaw", *map(slow, ("learned", "relative", "relative_key_query", "t5")))
"""Encodings with parameters."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT with dropout, one without, a GPT-2 without pad token, their tokenizers, and texts."""
    path = tmp_path_factory.mktemp("tiny")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    for name, dropout in {"bert": 0.1, "still": 0.0}.items():
        torch.manual_seed(0)
        config = BertConfig(**BERT, vocab_size=VOCABULARY, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        randomize(BertForMaskedLM(config), std=0.1).save_pretrained(path / name)
        BertTokenizer(str(path / "vocab.txt")).save_pretrained(path / name)
    still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    gpt2 = GPT2Config(vocab_size=VOCABULARY, **HOSTS["gpt2"].sizes | {"pad_token_id": None} | still)
    randomize(GPT2LMHeadModel(gpt2), std=0.1).save_pretrained(path / "gpt2")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[CLS]").save_pretrained(path / "gpt2")
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS[i % 7 :: 7]) for _ in range(3 + i % 9)) for i in range(43)]
    (path / "train.txt").write_text("\n\n".join(texts))
    (path / "validation.txt").write_text("\n".join(texts[::4]))
    return path


def line(tiny, output, *more, model="bert", train="train.txt", validation="validation.txt"):
    """The flags of a short run; flags in `more` win."""
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
    """Losses, evaluations and weights, bit for bit."""
    for key in ("losses", "evaluations", "best_step"):
        assert record(one, name)[key] == record(other, name)[key], key
    expected, actual = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], actual[key]) for key in expected)


def write_labels(tiny, folder):
    """The flags for texts with a label each."""
    rows = [{"text": text, "label": text.split()[0][-1]} for text in (tiny / "train.txt").read_text().split("\n\n")]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--train_file", folder / "train.jsonl", "--validation_file", folder / "train.jsonl"]


# A run that is killed.

KEEPING = ("--checkpointing_steps", 3, "--eval_steps", 2, "--load_best_model_at_end", "--gradient_accumulation_steps", 2)
SHORT = ("--no-calibrate", "--min_text_length", 4, "--text_length", 9)
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory, launch):
    """A run with dropout, masking, accumulation, evaluations and a best model, that nobody disturbs."""
    output = tmp_path_factory.mktemp("whole") / "out"
    good(launch("train_mlm", *line(tiny, output, "--position_encoding", "t5", *KEEPING)))
    bests = {record(output)["best_step"]} | {checkpoints.manifest(output / name)["best_step"] for name in ("step_3", "step_6")}
    assert {path.name for path in output.iterdir() if path.is_dir()} == {
        "step_3",
        "step_6",
        *(f"best_{step}" for step in bests),
    }
    return output


@pytest.mark.parametrize(
    ("kill", "left"),
    [
        slow(("hf_posenc.training.loop.Run._step", 2), None),
        (("hf_posenc.training.loop.Run._step", 6), "step_3"),
        (("hf_posenc.training.loop.Run._evaluate", 2), "step_3"),
        # The files of step_3: the optimizer, random states, progress, scheduler; then those of step_6.
        *(slow(("torch.save", number), "step_3" if number > 4 else None) for number in range(1, 8)),
        (("torch.save", 8), "step_3"),
        slow(("hf_posenc.serialization.atomic._synchronize", 3), None),
        slow(("hf_posenc.serialization.atomic._synchronize", 85), "step_3"),
        (("os.rename", 1), None),
        (("hf_posenc.training.checkpoints.prune", 2), "step_3"),
        (("hf_posenc.serialization.atomic._move", 7), "step_6"),  # after two for each of three best models
    ],
)
def test_killed_anywhere_and_resumed_a_run_is_the_same(tiny, tmp_path, launch, whole, kill, left):
    output = tmp_path / "out"
    arguments = line(tiny, output, "--position_encoding", "t5", *KEEPING, *LATEST)
    codes, _ = launch("train_mlm", *arguments, kill=kill)
    assert codes == [-signal.SIGKILL] and not (output / "all_results.json").exists()
    assert (checkpoints.newest(output) or SimpleNamespace(name=None)).name == left
    assert ("_move" in kill[0]) == bool([*output.glob(".posenc-*/**/journal.json")]), "not killed in the last save"
    said = good(launch("train_mlm", *arguments))
    assert (f"resumed from {output / left}" if left else "has no complete checkpoint: from the start") in said
    assert_same(whole, output)
    assert not list(output.glob(".*"))


def test_killed_again_and_again(tiny, tmp_path, launch, whole):
    arguments = line(tiny, tmp_path / "out", "--position_encoding", "t5", *KEEPING, *LATEST)
    arguments += ["--checkpointing_steps", 1, "--keep_last", 2]
    for _ in range(3):
        codes, said = launch("train_mlm", *arguments, kill=("hf_posenc.training.loop.Run._step", 3))
        assert codes == [-signal.SIGKILL], said
    good(launch("train_mlm", *arguments))
    assert_same(whole, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == ["step_7", "step_8"]


@pytest.mark.parametrize(
    "script", ["finetune", "train_clm", slow("distill"), slow("stream"), "packed stream", slow("early"), "epochs"]
)
def test_each_script_resumes_exactly(tiny, tmp_path, launch, script):
    labelled = write_labels(tiny, tmp_path)
    name, more, model = {
        "finetune": ("finetune", labelled, "bert"),
        "train_clm": ("train_clm", ["--position_encoding", "learned+alibi"], "gpt2"),
        "distill": ("distill", ["--position_encoding", "relative", *SHORT], "still"),
        "stream": ("train_mlm", ["--streaming", "--shuffle_buffer", 7], "bert"),
        "packed stream": ("train_mlm", ["--streaming", "--shuffle_buffer", 7, "--packing", "--text_length", 12], "bert"),
        "early": ("train_mlm", ["--early_stopping_patience", 2, "--eval_steps", 1, "--learning_rate", 0.3], "bert"),
        "epochs": ("train_mlm", ["--checkpointing_steps", "epoch", "--per_device_train_batch_size", 15], "bert"),
    }[script]  # fmt: skip
    written = "distillation" if script == "distill" else "all_results"
    folders = [tmp_path / "whole", tmp_path / "killed"]
    lines = [line(tiny, folder, "--checkpointing_steps", 3, *more, *LATEST, model=model) for folder in folders]
    good(launch(name, *lines[0]))
    # What a killed run leaves: its first checkpoint, and the best model until then.
    *_, (oldest, about) = checkpoints.found(folders[0])
    for left in (oldest.name, f"best_{about['best_step']}"):
        if (folders[0] / left).exists():
            shutil.copytree(folders[0] / left, folders[1] / left)
    assert "resumed from" in good(launch(name, *lines[1]))
    assert_same(*folders, name=written)
    steps = record(folders[0], written)["steps"]
    assert steps < 8 if script == "early" else steps == 8


@pytest.mark.slow
def test_two_processes_killed_and_resumed(tiny, tmp_path, launch):
    folders = [tmp_path / "whole", tmp_path / "killed"]
    lines = [line(tiny, folder, *KEEPING, *LATEST, "--position_encoding", "relative") for folder in folders]
    good(launch("train_mlm", *lines[0], processes=2))
    codes, _ = launch("train_mlm", *lines[1], processes=2, kill=("hf_posenc.training.loop.Run._step", 5))
    assert -signal.SIGKILL in codes
    assert "resumed from" in good(launch("train_mlm", *lines[1], processes=2))
    assert_same(*folders)


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
    """The real launcher, with kill -9 from outside."""
    more = ("--checkpointing_steps", 2, *LATEST, "--position_encoding", "t5", "--max_train_steps", 40)
    # Poisoned memory would draw other weights for the encoding.
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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "Accelerate offers no FSDP on cpu"),
    ],
)
def test_what_launchers_get_wrong(tiny, tmp_path, launch, settings, words):
    codes, said = launch("train_mlm", *line(tiny, tmp_path / "out"), **settings)
    assert codes == [1] and words in said and "Traceback" not in said and not (tmp_path / "out").exists()


# Checkpoints.


def copy(whole, tmp_path, *names):
    for name in names:
        shutil.copytree(whole / name, tmp_path / "out" / name)
    return tmp_path / "out"


@pytest.mark.parametrize("harm", ["missing", "short", "no manifest", "half a manifest"])
def test_a_torn_checkpoint_is_skipped(tiny, tmp_path, launch, whole, harm):
    best = f"best_{record(whole)['best_step']}"
    output = copy(whole, tmp_path, "step_3", "step_6", *([best] if record(whole)["best_step"] <= 3 else []))
    skipped = f"{output / 'step_6'} is not complete, and left out"
    if harm == "missing":
        (output / "step_6" / "optimizer.bin").unlink()
    elif harm == "short":
        os.truncate(output / "step_6" / "model.safetensors", 1000)
    elif harm == "no manifest":
        (output / "step_6" / "checkpoint.json").unlink()
    else:
        os.truncate(output / "step_6" / "checkpoint.json", 40)
    with pytest.warns(UserWarning, match=re.escape(skipped)):
        assert checkpoints.newest(output) == output / "step_3"
    if harm != "missing":
        return
    said = good(launch("train_mlm", *line(tiny, output, "--position_encoding", "t5", *KEEPING, *LATEST)))
    assert skipped in said and f"resumed from {output / 'step_3'}" in said
    assert_same(whole, output)


def test_resumed_from_a_path(tiny, tmp_path, launch, whole):
    chosen = ("--resume_from_checkpoint", whole / "step_3")
    said = good(launch("train_mlm", *line(tiny, tmp_path / "out", "--position_encoding", "t5", *KEEPING, *chosen)))
    assert f"resumed from {whole / 'step_3'}, after step 3" in said
    assert record(tmp_path / "out")["losses"] == record(whole)["losses"]


def test_what_a_resumed_run_may_not_change(tiny, tmp_path, launch, whole):
    output = copy(whole, tmp_path, "step_3")
    before = sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))
    for flag, value in (("learning_rate", 0.02), ("seed", 1), ("max_train_steps", 9), ("position_encoding", "alibi")):
        codes, said = launch(
            "train_mlm", *line(tiny, output, "--position_encoding", "t5", *KEEPING, *LATEST), f"--{flag}", value
        )
        assert (
            codes == [1] and f"was written with {flag} " in said and f"this run has {value}" in said and "Traceback" not in said
        )
    codes, said = launch("train_mlm", *line(tiny, output, "--position_encoding", "t5", *KEEPING))
    assert codes == [2] and f"{output / 'step_3'} is there from an earlier run" in said
    for path in (output / "step_4", whole / f"best_{record(whole)['best_step']}"):
        codes, said = launch("train_mlm", *line(tiny, output, *KEEPING, "--resume_from_checkpoint", path))
        assert codes == [2] and f"--resume_from_checkpoint {path}: there is no complete checkpoint" in said
    assert before == sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))


def test_a_full_disk(tiny, tmp_path, launch, whole):
    """The optimizer's file is larger than the limit, the weights are not."""
    output = copy(whole, tmp_path, "step_3")
    arguments = line(tiny, output, "--position_encoding", "t5", *KEEPING, *LATEST, "--eval_steps", 20)
    for manifest in output.glob("*/checkpoint.json"):
        manifest.write_text(manifest.read_text().replace('"eval_steps": 2', '"eval_steps": 20'))
    limit = (whole / "step_3" / "optimizer.bin").stat().st_size * 3 // 4
    assert (whole / "step_3" / "model.safetensors").stat().st_size < limit
    codes, said = launch("train_mlm", *arguments, largest_file=limit)
    assert codes == [1] and "Traceback" not in said
    assert f"{output / 'step_6'} can't be written" in said and f"the last complete checkpoint is {output / 'step_3'}" in said
    assert [path.name for path in output.iterdir()] == ["step_3"] and checkpoints.manifest(output / "step_3")
    good(launch("train_mlm", *arguments))
    assert record(output)["losses"] == record(whole)["losses"]
    codes, said = launch("train_mlm", *line(tiny, tmp_path / "other", "--max_train_steps", 1), largest_file=limit // 4)
    assert codes == [1] and f"the model can't be written to {tmp_path / 'other'}" in said and "Traceback" not in said
    assert not (tmp_path / "other").exists()


def test_what_is_kept_and_what_is_cleared_away(tmp_path):
    for step, best in ((2, 1), (4, 1), (6, 5)):
        (tmp_path / f"step_{step}").mkdir()
        manifest = {"step": step, "best_step": best, "arguments": {}, "files": {}}
        (tmp_path / f"step_{step}" / "checkpoint.json").write_text(json.dumps(manifest))
    for name in ("best_1", "best_3", "best_5", ".step_8", ".step_2-old", ".mine", "step_x", "other_2"):
        (tmp_path / name).mkdir()
    checkpoints.prune(tmp_path, 2, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".mine",
        "best_1",
        "best_5",
        "other_2",
        "step_4",
        "step_6",
        "step_x",
    ]
    checkpoints.prune(tmp_path, 1, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "best_5", "other_2", "step_6", "step_x"]


# Several processes.


@pytest.mark.parametrize("encoding", PARAMETRISED)
def test_two_processes_do_what_one_does(tiny, tmp_path, launch, encoding):
    more = ("--position_encoding", encoding, "--eval_steps", 4, "--checkpointing_steps", 4)
    good(launch("train_mlm", *line(tiny, tmp_path / "one", *more, "--per_device_train_batch_size", 8, model="still")))
    for folder, batch, accumulated in (("two", 4, 1), ("accumulated", 2, 2)):
        cut = ("--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulated)
        said = good(launch("train_mlm", *line(tiny, tmp_path / folder, *more, *cut, model="still"), processes=2))
        assert said.count(f"2 processes on cpu, precision no: 8 steps of 8 rows ({batch} x 2 x {accumulated} accumulated)") == 1
        one, two = record(tmp_path / "one"), record(tmp_path / folder)
        assert two["processes"] == 2 and two["losses"] == pytest.approx(one["losses"], **CLOSE)
        for before, after in zip(one["evaluations"], two["evaluations"], strict=True):
            assert after == pytest.approx(before, rel=1e-3, abs=1e-4)
    # One goes on where two stopped.
    shutil.copytree(tmp_path / "two" / "step_4", tmp_path / "on" / "step_4")
    more = (*more, "--per_device_train_batch_size", 8, *LATEST)
    good(launch("train_mlm", *line(tiny, tmp_path / "on", *more, model="still")))
    assert record(tmp_path / "on")["losses"] == pytest.approx(one["losses"], **CLOSE)
    # What was trained is what is loaded.
    first = AutoModelForMaskedLM.from_pretrained(tmp_path / "one").state_dict()
    for name, weight in AutoModelForMaskedLM.from_pretrained(tmp_path / "two").state_dict().items():
        torch.testing.assert_close(weight, first[name], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("script", [slow("finetune"), "train_clm", slow("distill"), slow("stream"), "stream and pack"])
def test_two_processes_do_what_one_does_in_each_script(tiny, tmp_path, launch, script):
    labelled = write_labels(tiny, tmp_path)
    name, model, more = {
        "finetune": ("finetune", "still", labelled),
        "train_clm": ("train_clm", "gpt2", ["--position_encoding", "rope"]),
        "distill": ("distill", "still", ["--position_encoding", "shaw", *SHORT]),
        "stream": ("train_mlm", "still", ["--streaming", "--shuffle_buffer", 5]),
        "stream and pack": ("train_clm", "gpt2", ["--streaming", "--packing", "--text_length", 12]),
    }[script]  # fmt: skip
    for folder, processes, batch in (("one", 1, 6), ("two", 2, 3)):
        cut = ("--per_device_train_batch_size", batch)
        good(launch(name, *line(tiny, tmp_path / folder, *more, *cut, model=model), processes=processes))
    one, two = (
        record(tmp_path / folder, "distillation" if script == "distill" else "all_results") for folder in ("one", "two")
    )
    assert two["losses"] == pytest.approx(one["losses"], **CLOSE)
    (before,), (after,) = one["evaluations"][-1:], two["evaluations"][-1:]
    assert after == pytest.approx(before, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("encoding", [slow("t5"), "learned+shaw"])
def test_sharded_over_two_processes(tiny, tmp_path, launch, encoding):
    """FSDP2 as the scripts do it: trains as one process, killed and resumed, saved as a whole."""
    more = ("--position_encoding", encoding, "--eval_steps", 4, "--checkpointing_steps", 3, *LATEST)
    good(launch("train_mlm", *line(tiny, tmp_path / "one", *more, "--per_device_train_batch_size", 8, model="still")))
    arguments = line(tiny, tmp_path / "two", *more, model="still")
    codes, said = launch("sharded", *arguments, processes=2, kill=("hf_posenc.training.loop.Run._step", 5))
    assert -signal.SIGKILL in codes, said
    assert "resumed from" in good(launch("sharded", *arguments, processes=2))
    assert (tmp_path / "two" / "step_3" / "pytorch_model_fsdp_0" / "__1_0.distcp").exists()
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    assert two["processes"] == 2 and two["losses"] == pytest.approx(one["losses"], **CLOSE)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert type(model).__name__ == "PosEncBertForMaskedLM"
    expected = AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    with torch.no_grad():
        logits = (each(torch.arange(5, 15)[None]).logits for each in (model, expected))
        torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("host", "encoding"),
    [
        (host, encoding) if host in ("albert", "gpt2", "mpnet") else slow(host, encoding)
        for host, encoding in zip(HOSTS, itertools.cycle(name for name in VARIANTS if suits("bert", name)), strict=False)
    ],
)
def test_every_host_trains_in_two_processes(tiny, tmp_path, launch, host, encoding):
    """With parameters that the loss doesn't reach, too; what is saved is what was trained."""
    model = stock(host, HOSTS[host].head)
    model.save_pretrained(tmp_path / "model")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    pad = model.config.pad_token_id
    vocabulary[0], vocabulary[pad] = vocabulary[pad], vocabulary[0]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(tmp_path / "model")
    script, kind = ("train_clm", AutoModelForCausalLM) if HOSTS[host].causal else ("train_mlm", AutoModelForMaskedLM)
    more = ("--model_name_or_path", tmp_path / "model", "--position_encoding", encoding, "--max_train_steps", 2)
    good(launch(script, *line(tiny, tmp_path / "out", *more), processes=2))
    trained = kind.from_pretrained(tmp_path / "out")
    assert type(trained).__name__ == f"PosEnc{HOSTS[host].prefix}{HOSTS[host].head}"
    assert all(math.isfinite(loss) for loss in record(tmp_path / "out")["losses"])
    weights = trained.state_dict()
    kept = [name for name, weight in model.named_parameters() if name in weights and torch.equal(weight, weights[name])]
    assert all(weight.isfinite().all() for weight in weights.values()) and len(kept) < len(weights) / 4, kept


def test_other_processes_only_with_the_same_global_batch(tiny, tmp_path, launch, whole):
    output = copy(whole, tmp_path, "step_3")
    codes, said = launch("train_mlm", *line(tiny, output, "--position_encoding", "t5", *KEEPING, *LATEST), processes=2)
    assert 1 in codes and "was written with global_batch 8, and this run has 16" in said


# What goes wrong.


def test_a_loss_that_is_not_finite(tiny, tmp_path, launch):
    arguments = line(tiny, tmp_path / "out", "--checkpointing_steps", 2, "--learning_rate", "3e37", model="still")
    codes, said = launch("train_mlm", *arguments)
    assert codes == [1] and "the loss is nan at step 2" in said and "nothing was saved" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_row_that_ruins_the_loss(tiny, tmp_path, launch, processes):
    """Step 5 is the first with the token whose embedding overflows: the state after step 4 stays the last."""
    order = data.endless(Dataset.from_dict({"number": list(range(43))}), 0, 0, 1)
    ruined = next(row["number"] for number, row in order if number == 18)
    arguments = line_with_a_ruined_token(tiny, tmp_path, 3e38, ruined)
    codes, said = launch("train_mlm", *arguments, "--per_device_train_batch_size", 4 // processes, processes=processes)
    assert 1 in codes and "Traceback" not in said
    assert (
        "at step 5: lower --learning_rate, or look at the rows; " in said
        and f"{tmp_path / 'out' / 'step_4'} is the last" in said
    )
    kept = load_file(tmp_path / "out" / "step_4" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values()) and checkpoints.newest(tmp_path / "out").name == "step_4"


def line_with_a_ruined_token(tiny, tmp_path, value, row):
    """A model with `value` for the embedding of w55, which is in one row alone."""
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
    assert codes == [1] and "after step 2 the weights are not finite" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metrics", [{"eval_f1": 0.5, "eval_loss": math.nan}, {"eval_f1": math.inf, "eval_loss": 0.5}])
def test_metrics_are_all_finite(metrics, tmp_path):
    """Classes are predicted from outputs of NaN as well, so F1, by which the best model is chosen, may be finite."""
    task = SimpleNamespace(evaluate=lambda *_: metrics, best_by="eval_f1", greater_is_better=True)
    run = object.__new__(loop.Run)
    run.accelerator, run.task = SimpleNamespace(is_main_process=False), task
    run.progress, run.output_dir = loop.Progress(step=3), tmp_path
    run.model = torch.nn.Linear(1, 1)
    name = next(name for name, value in metrics.items() if not math.isfinite(value))
    with pytest.raises(SystemExit, match=f"{name} is {metrics[name]} at step 3: lower --learning_rate, .* nothing was saved"):
        run._evaluate([])
    assert not run.progress.evaluations


def test_an_evaluation_that_is_not_finite(tiny, tmp_path, launch):
    (tmp_path / "validation.txt").write_text("w55 " * 9 + "\nw1 w2 w3")
    arguments = line_with_a_ruined_token(tiny, tmp_path, 3e38, None)
    codes, said = launch("train_mlm", *arguments, "--validation_file", tmp_path / "validation.txt", "--eval_steps", 3)
    assert codes == [1] and "eval_loss is nan at step 3" in said and "step_2 is the last good state" in said


def test_flags_refused(tiny, tmp_path, capsys):
    wrong = {
        "--streaming": "--streaming goes with --max_train_steps",
        "--validation_split_percentage 5 --validation_file v.txt": "is for data without another validation file",
        "--validation_split_percentage 100": "'100': allowed is an integer from 1 to 99",
        "--early_stopping_patience 2": "need validation rows",
        "--keep_last 2": "--keep_last goes with --checkpointing_steps",
        "--checkpointing_steps 0": "'0': allowed is an integer from 1 on",
        "--checkpointing_steps often": "'often': allowed is an integer from 1 on",
        "--streaming --max_train_steps 5 --checkpointing_steps epoch": "a stream has no known epochs",
        "--streaming --max_train_steps 5 --validation_split_percentage 5": "a stream doesn't have",
        "--learning_rate nan": "'nan': allowed is a number above 0",
        "--learning_rate 3e38": "'3e38': allowed is a number above 0, up to 3.4e+37",
        "--weight_decay nan": "'nan': allowed is a number from 0 on",
        "--weight_decay -1": "'-1': allowed is a number from 0 on",
        "--seed 1.5": "'1.5': allowed is an integer from 0 to 2^32 - 1",
        f"--seed {10**400}": "allowed is an integer from 0 to 2^32 - 1",
        "--max_grad_norm 0": "'0': allowed is a number above 0",
        "--with_tracking --report_to wandbb": "--report_to wandbb: installed here is",
        "--resume_from_checkpoint nowhere": "--resume_from_checkpoint nowhere: there is no complete checkpoint",
        "--lr_scheduler_type square": "invalid choice: 'square'",
    }
    for given, words in wrong.items():
        arguments = [
            "--model_name_or_path",
            "m",
            "--output_dir",
            str(tmp_path / "out"),
            "--train_file",
            "t.txt",
            *given.split(),
        ]
        with pytest.raises(SystemExit) as stopped:
            flags.parse(flags.argument_parser(""), arguments)
        assert stopped.value.code == 2 and words in capsys.readouterr().err, given


def test_a_folder_without_a_tokenizer(tmp_path):
    """Transformers makes one of special tokens for it, which reads every word as unknown."""
    stock("bert").save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="bare has no tokenizer. Save the original model's tokenizer there: AutoTokenizer"):
        training_models.load_tokenizer(str(tmp_path / "bare"))
    AutoTokenizer.from_pretrained(tmp_path / "bare").save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="bare has a tokenizer without a vocabulary"):
        training_models.load_tokenizer(str(tmp_path / "bare"))


def test_a_checkpoint_that_has_lost_its_positions(tmp_path):
    given = ["--model_name_or_path", str(ROOT / "tests" / "v4" / "bert"), "--output_dir", str(tmp_path)]
    arguments = flags.argument_parser("").parse_args(given)
    tokenizer = SimpleNamespace(pad_token_id=0)
    with pytest.raises(SystemExit, match=r"its outputs are wrong. position_embedding_type=.*`hf-posenc patch .* relative_key`"):
        training_models.load_model(arguments, AutoModelForMaskedLM, tokenizer)


def test_encodings_of_ones_own(tmp_path, monkeypatch, own_registry, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("import hf_posenc\n\nclass Mine(hf_posenc.PositionEncoding, type='mine'):\n    pass\n")
    given = ["--model_name_or_path", "x", "--train_file", "y.txt", "--output_dir", "z", "--position_encoding", "mine"]
    with pytest.raises(SystemExit):
        flags.parse(flags.argument_parser(""), given)
    assert "(here: --import MODULE)" in capsys.readouterr().err
    assert flags.parse(flags.argument_parser(""), [*given, "--import", "mine"]).position_encoding == "mine"
    del sys.modules["mine"]
    with pytest.raises(SystemExit, match="--import nothing_here: No module named 'nothing_here'"):
        flags.parse(flags.argument_parser(""), [*given, "--import", "nothing_here"])


@pytest.mark.parametrize(
    ("script", "model", "more", "words"),
    [
        ("train_mlm", "bert", ("--position_encoding", "alibbi"), "unknown position encoding 'alibbi'"),
        ("train_mlm", "gpt2", (), "has no mask_token: see train_clm.py"),
        ("train_clm", "bert", ("--text_column", "said"), "columns ['text'], but no `said`: see --text_column"),
        ("train_mlm", "bert", ("--train_file", "empty.txt"), "empty.txt"),
        ("train_mlm", "bert", ("--train_file", "blank.txt"), "the train data have no rows"),
        ("train_mlm", "bert", ("--train_file", "blank.txt", "--streaming"), "the train data have no rows"),
        ("train_mlm", "bert", ("--train_file", "numbers.jsonl"), "`text` is to hold strings, but a row has 1"),
        ("train_mlm", "bert", ("--train_file", "."), "holds files of several kinds, .jsonl, .txt"),
        ("train_mlm", "bert", ("--train_file", "nowhere.txt"), "nowhere.txt is not a file"),
        ("train_mlm", "bert", ("--train_file", "x.docx"), "x.docx is not a file"),
        ("train_mlm", "bert", ("--text_length", LENGTH + 1), "--text_length 25 is above the usable length of BertForMaskedLM"),
        ("train_mlm", "bert", ("--text_length", 2), "--text_length 2 leaves no room for text beside 2 special tokens"),
        ("train_mlm", "bert", ("--train_positions_only",), "'learned' has no parameters that could be trained alone"),
        ("train_mlm", "bert", ("--position_encoding", "alibi", "--train_positions_only"), "'alibi' has no parameters"),
        ("train_mlm", "bert", ("--packing", "--position_encoding", "nope", "--text_length", 900), "no block of 900 tokens"),
        ("train_mlm", "bert", ("--model_name_or_path", "nowhere"), "nowhere"),
        ("train_mlm", "bert", ("--mlm_probability", 1.5), "'1.5': allowed is a number between 0 and 1"),
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


# What the flags do.


def test_positions_alone_are_trained(tiny, tmp_path, launch):
    flags_given = ("--position_encoding", "t5", "--train_positions_only", "--max_train_steps", 3)
    good(launch("train_mlm", *line(tiny, tmp_path / "out", *flags_given, model="still")))
    before = BertForMaskedLM.from_pretrained(tiny / "still").state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if "posenc" not in name)
    fresh = good(
        launch("train_mlm", *line(tiny, tmp_path / "none", *flags_given, "--max_train_steps", 1, "--learning_rate", 1e-30))
    )
    assert fresh and not torch.equal(
        after["bert.posenc.weight"], load_file(tmp_path / "none" / "model.safetensors")["bert.posenc.weight"]
    )
    # A classifier that is new is trained with them.
    more = (*flags_given, *write_labels(tiny, tmp_path))
    good(launch("finetune", *line(tiny, tmp_path / "head", *more, model="still")))
    after = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(after["bert.encoder.layer.0.output.dense.weight"], before["bert.encoder.layer.0.output.dense.weight"])
    assert after["classifier.bias"].abs().max() > 1e-4


@pytest.mark.parametrize(
    ("encoding", "more"),
    [
        ("t5", "--gradient_checkpointing"),
        ("learned+alibi", "--mixed_precision"),
        slow("t5", "--torch_compile"),
        slow("t5", "--mixed_precision"),
        slow("learned+alibi", "--gradient_checkpointing"),
        slow("shaw", "--gradient_checkpointing"),
        slow("shaw", "--mixed_precision"),
    ],
)
def test_what_the_machine_is_told_changes_no_result(tiny, tmp_path, launch, encoding, more):
    values = {"--torch_compile": ("--torch_compile_backend", "aot_eager"), "--mixed_precision": ("bf16",)}
    for folder, flags_given in (("plain", ()), ("told", (more, *values.get(more, ())))):
        arguments = ("--position_encoding", encoding, "--max_train_steps", 2, "--checkpointing_steps", 1, *flags_given)
        good(launch("train_mlm", *line(tiny, tmp_path / folder, *arguments, model="still", validation=None)))
    plain, told = record(tmp_path / "plain"), record(tmp_path / "told")
    assert told["losses"] == pytest.approx(plain["losses"], rel=1e-2 if more == "--mixed_precision" else 1e-4)
    for file in ("model.safetensors", "step_1/model.safetensors"):
        assert load_file(tmp_path / "told" / file).keys() == load_file(tmp_path / "plain" / file).keys()
    arguments = ("--resume_from_checkpoint", tmp_path / "told" / "step_1", *arguments)
    good(launch("train_mlm", *line(tiny, tmp_path / "on", *arguments, model="still", validation=None)))
    assert record(tmp_path / "on")["losses"] == told["losses"]
    if more != "--mixed_precision":
        weights = load_file(tmp_path / "plain" / "model.safetensors")
        for name, weight in load_file(tmp_path / "told" / "model.safetensors").items():
            torch.testing.assert_close(weight, weights[name], atol=1e-3, rtol=1e-3)


def test_losses_are_those_of_the_model(tiny, tmp_path, launch):
    """Computed again, without the scripts: the first step's loss, of all labels in two accumulated batches."""
    more = ("--position_encoding", "alibi", "--gradient_accumulation_steps", 2, "--max_train_steps", 1)
    good(launch("train_clm", *line(tiny, tmp_path / "out", *more, model="gpt2", validation=None)))
    model = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(tiny / "gpt2"), "alibi").double()
    tokenizer, texts = AutoTokenizer.from_pretrained(tiny / "gpt2"), (tiny / "train.txt").read_text().split("\n\n")
    order = torch.randperm(43, generator=torch.Generator().manual_seed(0))[:8]
    losses = []
    for text in (texts[i] for i in order):
        ids = tokenizer(text, return_tensors="pt").input_ids
        losses += [-row[label] for row, label in zip(model(ids).logits.log_softmax(-1)[0], ids[0, 1:], strict=False)]
    assert record(tmp_path / "out")["losses"] == [pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)]


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
    """After w7 comes w8: a causal model finds out."""
    (tmp_path / "train.txt").write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(40)))
    files = ("--train_file", tmp_path / "train.txt", "--validation_split_percentage", 20, "--max_train_steps", 120)
    more = ("--position_encoding", "rope", "--from_scratch", "--lr_scheduler_type", "constant", "--num_train_epochs", 1)
    good(launch("train_clm", *line(tiny, tmp_path / "out", *files, *more, model="gpt2", validation=None)))
    shown = record(tmp_path / "out")
    assert shown["eval_accuracy"] > 0.9 and shown["losses"][0] > 3.5


def test_tracked(tiny, tmp_path, launch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ("--with_tracking", "--report_to", "tensorboard", "--eval_steps", 4)
    good(launch("train_mlm", *line(tiny, tmp_path / "out", *more)))
    events = EventAccumulator(str(tmp_path / "out" / "hf-posenc"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert shown == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(record(tmp_path / "out")["losses"])]
    assert [event.step for event in events.Scalars("eval_loss")] == [4, 8]


def test_early_stopping_leaves_the_best(tiny, tmp_path, launch):
    more = ("--early_stopping_patience", 2, "--eval_steps", 1, "--learning_rate", 0.3)
    good(launch("train_mlm", *line(tiny, tmp_path / "out", *more)))
    shown = record(tmp_path / "out")
    losses = [each["eval_loss"] for each in shown["evaluations"]]
    assert shown["best_step"] == losses.index(min(losses)) + 1 == shown["steps"] - 2 and shown["eval_loss"] == min(losses)
    best = load_file(tmp_path / "out" / f"best_{shown['best_step']}" / "model.safetensors")
    assert all(torch.equal(best[name], tensor) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items())
    assert not (tmp_path / "out" / "checkpoint.json").exists()


@pytest.mark.parametrize("kind", ["txt", "csv", "json", "jsonl", "parquet", "folder"])
def test_all_kinds_of_files_hold_the_same_rows(tiny, tmp_path, monkeypatch, launch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = Dataset.from_dict({"text": [text for text in (tiny / "train.txt").read_text().split("\n\n")]})
    file = tmp_path / f"train.{kind}"
    if kind == "folder":
        file = tmp_path / "folder"
        file.mkdir()
        for number, part in enumerate((rows.select(range(20)), rows.select(range(20, 43)))):
            part.to_json(file / f"train-{number}.jsonl")
    elif kind == "txt":
        file.write_text("\n".join(rows["text"]))
    else:
        {"csv": rows.to_csv, "json": rows.to_json, "jsonl": rows.to_json, "parquet": rows.to_parquet}[kind](file)
    assert list(data.read(file)["text"]) == list(rows["text"])
    if kind != "folder":
        return
    # As a data set, it is trained on like the file.
    arguments = line(tiny, tmp_path / "out", "--max_train_steps", 2, validation=None)
    at = arguments.index("--train_file")
    arguments[at : at + 2] = ["--dataset_name", file]
    good(launch("train_mlm", *arguments))
    good(launch("train_mlm", *line(tiny, tmp_path / "known", "--max_train_steps", 2, validation=None)))
    assert record(tmp_path / "out")["losses"] == record(tmp_path / "known")["losses"]


# Rows.


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


def test_warned_where_texts_are_cut_or_fill_the_model(tiny, tmp_path, launch):
    lengths = [len(text.split()) + 2 for text in (tiny / "train.txt").read_text().split("\n\n")]
    assert max(lengths) == 13
    usable = "less than 1.2 times the length of most texts; the 95th percentile of their lengths is 13 tokens"
    for more, words, silent in (
        (
            ("--text_length", 8),
            f"{sum(length > 8 for length in lengths)} of 43 training texts are cut to 8 tokens; the 95th percentile",
            usable,
        ),
        (
            ("--position_encoding", "alibi", "--model_max_length", 15),
            f"length is 15 tokens, {usable}. For longer texts, set --model_max_length 16",
            "training texts are cut",
        ),
        (("--position_encoding", "alibi", "--model_max_length", 16), "1 steps", "warning: "),
        (("--position_encoding", "alibi"), "1 steps", "warning: "),
    ):
        output = tmp_path / "-".join(map(str, more))
        said = good(launch("train_mlm", *line(tiny, output, *more, "--max_train_steps", 1, validation=None)))
        assert words in said and silent not in said, more


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
    """And is followed once, so that it works; random numbers are drawn as if it weren't."""
    model = stock(host) if encoding is None else hf_posenc.patch(stock(host), encoding, max_length=LENGTH)
    arguments = SimpleNamespace(position_encoding=None, model_name_or_path="a/it")
    state = torch.get_rng_state()
    said = training_models.longer(arguments, model, 99)
    command = f"hf-posenc extend a/it --max-length 99{flags} --output-dir it-99"
    assert said == f"`{command}` keeps what it has learned. Train that with --model_name_or_path it-99"
    assert torch.equal(torch.get_rng_state(), state)
    said = training_models.longer(SimpleNamespace(position_encoding="alibi"), model, 99)
    assert said == "set --model_max_length 99"


def test_one_long_text_is_no_reason_to_warn(capsys):
    rows = Dataset.from_dict({"length": [10] * 99 + [5000]})
    arguments = SimpleNamespace(position_encoding=None, model_name_or_path="it")
    training_models.warn_of_length(SimpleNamespace(print=print), arguments, stock("bert"), rows, LENGTH)
    assert capsys.readouterr().out == (
        f"warning: 1 of 100 training texts are cut to {LENGTH} tokens; the 95th percentile of their lengths is 10 tokens\n"
    )


def test_masks_belong_to_rows(tiny):
    """Whatever batch a row is in; anew in each epoch; about as many as asked for, by the usual three ways."""
    from hf_posenc.training import train_mlm

    tokenizer = AutoTokenizer.from_pretrained(tiny / "bert")
    task = train_mlm.MaskedLanguageModeling(tokenizer, 0.15, seed=5)
    ids = tokenizer(" ".join(WORDS[:40])).input_ids
    alone, again, other = (task.collate([(number, {"input_ids": ids})]) for number in (7, 7, 8))
    short = tokenizer("w1 w2").input_ids
    together = task.collate([(1, {"input_ids": short}), (7, {"input_ids": ids})])
    assert torch.equal(alone["input_ids"], again["input_ids"]) and not torch.equal(alone["labels"], other["labels"])
    assert torch.equal(together["input_ids"][1], alone["input_ids"][0]) and torch.equal(
        together["labels"][1], alone["labels"][0]
    )
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
