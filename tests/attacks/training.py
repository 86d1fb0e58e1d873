"""Training that is stopped by signals at random moments and resumed, that diverges, or that is given bad rows.

A resumed run equals an undisturbed one. A run that can't train ends by an error that says why, and saves no model.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from attacks.cases import Case, Comparison, Refused, Settings, new_folder
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from tools.hosts.tiny import randomized

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SCRIPTS = {
    "finetune": "hf_posenc.training.finetune",
    "distill": "hf_posenc.training.distill",
    "generalise": "experiments.extrapolation",
}
RECORDS = {"finetune": "all_results.json", "distill": "distillation.json", "generalise": "extrapolation.json"}
WORDS = [f"w{number}" for number in range(40)]
LIMIT = 120.0
MEASURED = ("losses", "evaluations", "best_step", "runs")
"""The entries of a record that a resumed run has in common with an undisturbed one."""
BAD_ROWS: dict[str, list[str]] = {
    "no label": ['{"text": "w1 w2", "label": null}'],
    "NaN for a label": ['{"text": "w1 w2", "label": NaN}'],
    "a list for a text": ['{"text": ["w1"], "label": "a"}'],
    "a number for a text": ['{"text": 5, "label": "a"}'],
    "an empty text": ['{"text": "  ", "label": "a"}'],
    "no text": ['{"label": "a"}'],
    "half a row": ['{"text": "w1 w'],
    "no JSON": ["w1 w2 w3"],
    "zero bytes": ["\x00\x00\x00"],
    "nothing": [],
}
"""Rows that follow good ones; for "nothing" there are no rows at all."""


def cases(settings: Settings) -> Iterator[Case]:
    chance = random.Random(settings.seed)
    for number in range(settings.kills):
        script, stop = [*SCRIPTS][number % len(SCRIPTS)], SIGNALS[number // len(SCRIPTS) % len(SIGNALS)]
        parts = [chance.random() for _ in range(1 + number % 2)]
        run = functools.partial(stopped, script, stop, parts)
        moments = " and ".join(f"{part:.3f}" for part in parts)
        yield Case(f"{stop.name}, then resumed", script, f"at {moments} of the run", run, limit=LIMIT)
    for script in ("finetune", "distill"):
        for rate in ("1e3", "1e30", "3e38"):
            yield Case("a learning rate that explodes", script, rate, functools.partial(diverged, script, rate), limit=LIMIT)
        for value in (torch.nan, torch.inf, 3e38):
            run = functools.partial(ruined, script, value)
            yield Case("weights that are not finite", script, str(value), run, limit=LIMIT)
    yield Case("a learning rate that explodes", "generalise", "1e30", marked, limit=LIMIT)
    for script in ("finetune", "distill"):
        for name, rows in BAD_ROWS.items():
            yield Case("bad rows", script, name, functools.partial(misfed, script, rows), limit=LIMIT)


@functools.cache
def folder() -> Path:
    """A tiny BERT with its tokenizer, and rows with texts and labels."""
    made = Path(new_folder())
    (made / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    sizes: dict[str, Any] = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16
    )
    model = randomized(BertForMaskedLM(BertConfig(vocab_size=5 + len(WORDS), **sizes)))
    model.save_pretrained(made / "bert")
    BertTokenizer(str(made / "vocab.txt")).save_pretrained(made / "bert")
    (made / "train.jsonl").write_text("\n".join(rows()))
    return made


def rows() -> list[str]:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=3 + number % 9)) for number in range(24)]
    return [json.dumps({"text": text, "label": text[1]}) for text in texts]


def line(script: str, output: Path, model: Path | None = None, train: Path | None = None, *more: str) -> list[str]:
    """The command line of a run of some two seconds, which resumes what is there."""
    if script == "generalise":
        sizes = ("--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--intermediate_size", "16")
        few = ("--tasks", "copy", "--encodings", "none", "rope", "alibi", "--seeds", "0", "1", "--length", "4", "--steps", "40")
        return [*few, *sizes, "--output_dir", str(output), *more]
    data = train or folder() / "train.jsonl"
    given = ["--model_name_or_path", str(model or folder() / "bert"), "--train_file", str(data), "--output_dir", str(output)]
    given += ["--position_encoding", "t5", "--checkpointing_steps", "2", "--keep_last", "2", "--max_train_steps", "8"]
    given += ["--resume_from_checkpoint", "latest", "--per_device_train_batch_size", "4", "--eval_steps", "2"]
    given += ["--validation_file", str(folder() / "train.jsonl"), "--load_best_model_at_end", "--learning_rate", "0.01"]
    given += ["--no-calibrate", "--min_text_length", "4", "--text_length", "9"] if script == "distill" else []
    return [*given, *more]


def started(script: str, argv: list[str], log: Path) -> int:
    """The process id of a fork that runs a script: 0 is the status of success, 1 of a message, 2 of a traceback."""
    main = importlib.import_module(SCRIPTS[script]).main
    child = os.fork()
    if child:
        return child
    status = 2
    with contextlib.suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                main(argv)
                status = 0
            except SystemExit as error:
                sys.stdout.flush()
                print(f"\n{error.code}" if isinstance(error.code, str) else "", file=sys.stderr)
                status = 0 if not error.code else 1
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(status)


def finished(script: str, argv: list[str], log: Path) -> tuple[int, str]:
    """The exit status of a run, and what it has said."""
    child = started(script, argv, log)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text(errors="replace")


def made(script: str, output: Path) -> Any:
    """What a run has measured, and a digest of each of its tensors."""
    record = json.loads((output / RECORDS[script]).read_text())
    if script == "generalise":
        files = sorted((output / "llama" / "runs").glob("*.json"))
        runs = {file.name: json.loads(file.read_text()) for file in files}
        return {name: {key: run[key] for key in ("losses", "scores", "digests")} for name, run in runs.items()}
    tensors = load_file(output / "model.safetensors")
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
    return {key: record[key] for key in MEASURED if key in record}, digests


@functools.cache
def undisturbed(script: str) -> tuple[float, str]:
    """How many seconds a run takes, and what it makes."""
    output, begin = Path(new_folder()) / "out", time.perf_counter()
    status, said = finished(script, line(script, output), output.with_suffix(".log"))
    if status:
        raise RuntimeError(f"{script} failed undisturbed: {said[-400:]}")
    return time.perf_counter() - begin, repr(made(script, output))


def stopped(script: str, stop: signal.Signals, parts: list[float]) -> Iterator[Comparison]:
    seconds, expected = undisturbed(script)
    output = Path(new_folder()) / "out"
    log, argv = output.with_suffix(".log"), line(script, output)
    for part in parts:
        child = started(script, argv, log)
        time.sleep(part * seconds)
        os.kill(child, stop)
        os.waitpid(child, 0)
    status, said = finished(script, argv, log)
    yield (repr(made(script, output)) if not status else f"status {status}: {said[-200:]}"), expected
    left = [path.name for path in output.iterdir() if path.name.startswith(".")]
    yield left, []


def diverged(script: str, rate: str) -> Iterator[Comparison]:
    yield from refused(script, lambda output: line(script, output, None, None, "--learning_rate", rate))


def ruined(script: str, value: float) -> Iterator[Comparison]:
    """The embedding of a token that most rows have."""
    model = BertForMaskedLM.from_pretrained(folder() / "bert")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[6:20] = value
    broken = Path(new_folder())
    model.save_pretrained(broken)
    required_tokenizer(str(folder() / "bert")).save_pretrained(broken)
    yield from refused(script, lambda output: line(script, output, broken))


def misfed(script: str, bad: list[str]) -> Iterator[Comparison]:
    train = Path(new_folder()) / "train.jsonl"
    train.write_text("\n".join([*rows()[:8], *bad, *rows()[8:]]) if bad else "")
    yield from refused(script, lambda output: line(script, output, None, train))


def refused(script: str, argv: Callable[[Path], list[str]]) -> Iterator[Comparison]:
    """Raises Refused for a run that ends by a message and leaves no model. One that finishes has finite weights and metrics."""
    output = Path(new_folder()) / "out"
    status, said = finished(script, argv(output), output.with_suffix(".log"))
    weights = [*output.glob("model*.safetensors")]
    # Progress bars are drawn again when they are closed.
    last = [line for line in said.splitlines() if line.strip() and "%|" not in line][-1]
    if status == 1 and not weights and "Traceback" not in said:
        raise Refused(last)
    if status:
        yield f"status {status}, {len(weights)} files of weights: {last}", "a message and no model"
        return
    finite = all(bool(tensor.isfinite().all()) for file in weights for tensor in load_file(file).values())
    yield finite and "NaN" not in (output / RECORDS[script]).read_text(), True


def marked() -> Iterator[Comparison]:
    """A study goes on after runs that diverge, and its table says which those are."""
    output = Path(new_folder()) / "out"
    argv = line("generalise", output, None, None, "--learning_rate", "1e30")
    status, said = finished("generalise", argv, output.with_suffix(".log"))
    yield status, 0
    yield (output / "extrapolation.txt").read_text().count("2 runs diverged") >= 3, True
    yield "NaN" in (output / "extrapolation.json").read_text(), False
