"""Sentence embeddings by length: retrieval, and the retrieval of one fact, at 128 … 2048 tokens.

    python scripts/eval_length.py MODEL [MODEL …] --output_dir lengths

*Retrieval*: a module's one-line summary is to find its documentation, cut at each length. *Needle*: a sentence with a fact
is put at a random depth into a long document; a question is to find the document with its fact among copies of the same
document with other facts. Facts are drawn at random from the same lists; no training text has one. Facts behind the first
512 tokens are scored apart, and the level of chance stands beside.

A model that ends before the longest length is shown in three ways: truncated, and chunked into even pieces that fit it,
whose embeddings are averaged ("mean"), or compared each, the best counting ("max"). A bag of words sees all of the text.

Shapes: N queries, M documents, C chunks, D hidden_size.
"""

import argparse
import itertools
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_posenc
from corpus import split
from retrieval import Score, embed, score
from training import evaluation

LENGTHS = (128, 256, 512, 1024, 2048)
BOUNDARY = 512
"""Tokens that a BERT-style model sees, special ones included; needles behind them are scored apart."""
TIE = 1e-5
NAMES = [
    "Alba",
    "Bruno",
    "Carla",
    "Dario",
    "Elena",
    "Fabio",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Katia",
    "Luca",
    "Marta",
    "Nadia",
    "Oscar",
    "Paola",
    "Quirin",
    "Rosa",
    "Silvio",
    "Tessa",
]
OBJECTS = [
    "accordion",
    "barometer",
    "candelabra",
    "dulcimer",
    "easel",
    "flute",
    "globe",
    "harpoon",
    "kettle",
    "lantern",
    "mandolin",
    "oboe",
    "parasol",
    "quilt",
    "saddle",
]
COLOURS = ["amber", "crimson", "ivory", "lilac", "olive", "scarlet", "turquoise", "white"]
PLACES = [
    "attic",
    "bakery",
    "cellar",
    "chapel",
    "garage",
    "greenhouse",
    "hayloft",
    "kitchen",
    "library",
    "museum",
    "orchard",
    "pantry",
    "shed",
    "stable",
    "tower",
]


@dataclass(frozen=True)
class Needle:
    """A document with a fact in it, the question for the fact, and where the fact begins, in tokens."""

    document: str
    question: str
    depth: int


@dataclass(frozen=True)
class Method:
    """A way to compare queries with documents: texts `[N]`, texts `[M]`, title -> similarities `[N, M]`."""

    name: str
    similarity: Callable[[Sequence[str], Sequence[str], str], Tensor]


def cut(tokenizer: Any, text: str, length: int) -> str:
    """The beginning of a text that fits `length` tokens, special ones included."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    room = length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise SystemExit(f"{length} tokens leave no room for text beside {tokenizer.num_special_tokens_to_add()} special ones")
    return text if len(offsets) <= room else text[: offsets[room - 1][1]]


def long_documents(tokenizer: Any, least: int, count: int) -> list[tuple[str, str]]:
    """(summary, documentation) of `count` evaluation modules with at least this many tokens.

    Where there are too few, neighbouring shorter modules are joined to one document, with the summary of the first, so
    that however short it is cut, what the summary is about stays in it. Raises SystemExit where that isn't enough.
    """
    modules, _ = split()
    sizes = [len(tokenizer(module.document, verbose=False)["input_ids"]) for module in modules]
    found = [(module.summary, module.document) for module, size in zip(modules, sizes, strict=True) if size >= least]
    if len(found) >= count:
        step = len(found) / count
        return [found[int(i * step)] for i in range(count)]
    group, total = [], 0
    for module, size in zip(modules, sizes, strict=True):
        if size < least and len(found) < count:
            group.append(module)
            total += size - tokenizer.num_special_tokens_to_add()
            if total >= least:
                found.append((group[0].summary, "\n\n".join(member.document for member in group)))
                group, total = [], 0
    if len(found) < count:
        raise SystemExit(f"there are {len(found)} documents of at least {least} tokens, not --documents {count}")
    return found


def facts(count: int, choose: random.Random) -> list[tuple[str, str]]:
    """`count` facts and their questions; no two share a name and an object."""
    pairs = choose.sample([(name, thing) for name in NAMES for thing in OBJECTS], count)
    drawn = [(name, choose.choice(COLOURS), thing, choose.choice(PLACES)) for name, thing in pairs]
    return [
        (f"{name} keeps the {colour} {thing} in the {place}.", f"Where is the {colour} {thing} that belongs to {name}?")
        for name, colour, thing, place in drawn
    ]


def needles(
    tokenizer: Any, haystack: str, length: int, candidates: int, choose: random.Random, part: tuple[int, int] = (0, 1)
) -> list[Needle]:
    """The same document with each of some facts, at one random depth (between sentences), within `length` tokens.

    `part` (i, n) draws the depth from the i-th of n equal parts. No fact lies across the boundary: it is wholly before or
    wholly behind what a model of BOUNDARY tokens sees. Raises SystemExit where the facts leave no room for the document.
    """
    drawn = facts(candidates, choose)
    room = max(len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence, _ in drawn)
    if length - room <= tokenizer.num_special_tokens_to_add():
        raise SystemExit(f"--lengths {length}: a fact takes up to {room} tokens here, which leaves none for a document")
    text = cut(tokenizer, haystack, length - room)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    wanted = offsets[int((part[0] + choose.random()) / part[1] * len(offsets))][0]
    ends, last = [end for _, end in offsets], seen(tokenizer)
    places = [0, *(m.end() for m in re.finditer(r"(?<=[.!?:])\s+|\n\s*\n", text) if m.end() <= wanted)]
    depth, place = max((d, p) for p in places if not (d := bisect_right(ends, p)) < last < d + room)
    before, after = text[:place], text[place:]
    return [Needle(f"{before}{sentence} {after}", question, depth) for sentence, question in drawn]


def seen(tokenizer: Any) -> int:
    """How many tokens of a text a model of BOUNDARY tokens sees, beside the special ones."""
    return BOUNDARY - tokenizer.num_special_tokens_to_add()


def chunk(tokenizer: Any, text: str, window: int) -> list[str]:
    """A text in as few pieces as fit `window` tokens each, special ones included; all about as long, so that none is a rag."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    pieces = max(1, math.ceil(len(offsets) / (window - tokenizer.num_special_tokens_to_add())))
    edges = [round(i * len(offsets) / pieces) for i in range(pieces + 1)]
    return [text[offsets[low][0] : offsets[high - 1][1]] for low, high in zip(edges, edges[1:], strict=False) if low < high]


def embed_chunks(model: PreTrainedModel, tokenizer: Any, texts: Sequence[str], window: int, title: str) -> list[Tensor]:
    """For each text the embeddings of its chunks of at most this many tokens, `[C, D]`, in order."""
    chunks = [chunk(tokenizer, text, window) for text in texts]
    embeddings = embed(model, tokenizer, [piece for pieces in chunks for piece in pieces], window, title)
    return list(embeddings.split([len(pieces) for pieces in chunks]))


def methods(name: str, model: PreTrainedModel, tokenizer: Any, length: int, longest: int) -> list[Method]:
    """How a model is compared at a length: as it is; or, where it ends before the longest one, truncated and chunked."""
    limit = hf_posenc.inspect(model).max_length
    if limit is None or limit >= longest:
        return [Method(name, lambda queries, documents, title: _whole(model, tokenizer, length, queries, documents, title))]
    kept: dict[tuple, tuple[Tensor, list[Tensor]]] = {}

    def chunks(queries: Sequence[str], documents: Sequence[str], title: str) -> tuple[Tensor, list[Tensor]]:
        key = (*queries, *documents)
        if key not in kept:
            asked = embed(model, tokenizer, queries, limit, f"{title}: queries")
            kept[key] = asked, embed_chunks(model, tokenizer, documents, limit, f"{title}: chunks")
        return kept[key]

    def mean(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        asked, parts = chunks(queries, documents, title)
        means = torch.stack([torch.nn.functional.normalize(part.mean(0), dim=-1) for part in parts])
        return asked @ means.T

    def best(queries: Sequence[str], documents: Sequence[str], title: str) -> Tensor:
        asked, parts = chunks(queries, documents, title)
        return torch.stack([(asked @ part.T).amax(1) for part in parts], dim=1)

    return [
        Method(f"{name}, truncated at {limit}", lambda q, d, title: _whole(model, tokenizer, limit, q, d, title)),
        Method(f"{name}, chunked by {limit}, mean", mean),
        Method(f"{name}, chunked by {limit}, max", best),
    ]


def _whole(
    model: PreTrainedModel, tokenizer, length: int, queries: Sequence[str], documents: Sequence[str], title: str
) -> Tensor:
    asked = embed(model, tokenizer, queries, length, f"{title}: queries")
    return asked @ embed(model, tokenizer, documents, length, f"{title}: documents").T


def bag_of_words(queries: Sequence[str], documents: Sequence[str], title: str = "") -> Tensor:
    """TF-IDF similarities."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(documents)
    return torch.from_numpy((vectorizer.transform(queries) @ vectorizer.transform(documents).T).toarray()).float()


def score_needles(groups: list[Tensor], seed: int = 0, samples: int = 10_000) -> Score:
    """Similarities `[N, N]` within each group of copies, whose diagonal is right.

    Equal similarities count as a draw by lot, so that a model which doesn't see the fact is at the level of chance. The
    95 % intervals are bootstrapped over groups, whose members are not independent.
    """
    hits, reciprocals = [], []
    for similarity in groups:
        right = similarity.diagonal()[:, None]
        above = (similarity > right + TIE).sum(1)
        level = ((similarity - right).abs() <= TIE).sum(1)
        hits.append([float(a == 0) / int(n) for a, n in zip(above, level, strict=True)])
        reciprocals.append(
            [sum(1 / (int(a) + k) for k in range(1, int(n) + 1)) / int(n) for a, n in zip(above, level, strict=True)]
        )
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(groups), (samples, len(groups)))

    def interval(values: list[list[float]]) -> tuple[float, float]:
        low, high = np.percentile(np.asarray(values).mean(1)[drawn].mean(1), [2.5, 97.5])
        return float(low), float(high)

    flat = np.asarray(hits), np.asarray(reciprocals)
    return Score(float(flat[0].mean()), interval(hits), float(flat[1].mean()), interval(reciprocals), flat[0].size)


def evaluate(
    models: dict[str, tuple[PreTrainedModel, Any]],
    lengths: Sequence[int],
    documents: int,
    haystacks: int,
    candidates: int,
    seed: int,
) -> dict[str, dict[int, dict[str, dict]]]:
    """Task -> length -> method -> score, for "retrieval", "needle" and, behind the boundary, "needle beyond".

    Raises SystemExit for models whose tokenizers differ: the same text would be within a length for one of them alone.
    """
    (first, (_, tokenizer)), *others = models.items()
    if not tokenizer.is_fast:
        raise SystemExit(f"{first} has a slow tokenizer, which doesn't tell where a token begins: a fast one is needed")
    for name, (_, other) in others:
        if other.get_vocab() != tokenizer.get_vocab():
            raise SystemExit(f"{name} has another vocabulary than {first}: evaluate it in a run of its own")
    longest = max(lengths)
    pairs = long_documents(tokenizer, longest, max(documents, haystacks))
    results: dict[str, dict[int, dict[str, dict]]] = {"retrieval": {}, "needle": {}, "needle beyond": {}}
    for length in tqdm(lengths, desc="lengths", unit="length"):
        ways = [way for name, (model, own) in models.items() for way in methods(name, model, own, length, longest)]
        ways.insert(0, Method("bag of words", bag_of_words))
        queries = [query for query, _ in pairs[:documents]]
        texts = [cut(tokenizer, document, length) for _, document in pairs[:documents]]
        choose = random.Random(f"{seed} {length}")
        # Depths spread evenly, so that neither side of the boundary is left to a few documents by chance.
        groups = [
            needles(tokenizer, document, length, candidates, choose, part=(i, haystacks))
            for i, (_, document) in enumerate(pairs[:haystacks])
        ]
        for way in ways:
            title = f"{way.name} at {length}"
            found = score(way.similarity(queries, texts, title))
            results["retrieval"].setdefault(length, {})[way.name] = asdict(found)
            questions = [needle.question for group in groups for needle in group]
            everything = way.similarity(questions, [needle.document for group in groups for needle in group], title)
            blocks = [everything[i : i + candidates, i : i + candidates] for i in range(0, len(questions), candidates)]
            for task, here in (("needle", lambda d: d < seen(tokenizer)), ("needle beyond", lambda d: d >= seen(tokenizer))):
                chosen = [block for block, group in zip(blocks, groups, strict=True) if here(group[0].depth)]
                if chosen:
                    results[task].setdefault(length, {})[way.name] = asdict(score_needles(chosen))
    return results


def chance(candidates: int) -> tuple[float, float]:
    """R@1 and MRR of drawing lots among so many."""
    return 1 / candidates, sum(1 / k for k in range(1, candidates + 1)) / candidates


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
TASKS = {
    "retrieval": ("mrr", "retrieval of {documents} documents by their summary: MRR", "documents"),
    "needle": ("recall_at_1", "a fact within the first 512 tokens, among {candidates}: R@1", "candidates"),
    "needle beyond": ("recall_at_1", "a fact behind the first 512 tokens, among {candidates}: R@1", "candidates"),
}
"""Task -> the figure shown, the title, and among how many."""


def tables(results: dict, arguments: dict) -> list[Table]:
    """One for each task; the level of chance stands in its last row."""
    made = []
    for task, (figure, title, among) in TASKS.items():
        if not results[task]:
            continue
        table = Table("method", title=title.format(**arguments))
        names = list(dict.fromkeys(name for by_name in results[task].values() for name in by_name))
        for length, by_name in results[task].items():
            table.add_column(f"{length} [95 %]\nN = {next(iter(by_name.values()))['queries']}", justify="right")
        for name in names:
            table.add_row(name, *(_cell(by_name.get(name), figure) for by_name in results[task].values()))
        level = chance(arguments[among])[figure == "mrr"]
        table.add_row("chance", *[f"{level:.3f}"] * len(results[task]))
        made.append(table)
    return made


def _cell(found: dict | None, figure: str) -> str:
    if found is None:
        return ""
    low, high = found[f"{figure}_interval"]
    return f"{found[figure]:.3f} [{low:.2f}, {high:.2f}]"


def draw(results: dict, arguments: dict, path: Path) -> None:
    """One panel for each task; bands are 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(13, 4.2), sharey=True, constrained_layout=True)
    names = list(dict.fromkeys(name for task in TASKS for by_name in results[task].values() for name in by_name))
    styles = dict(zip(names, itertools.product(("-", "--", ":", "-."), PALETTE), strict=False))
    for axis, (task, (kind, title, among)) in zip(axes, TASKS.items(), strict=True):
        for name in names:
            points = [(length, by_name[name]) for length, by_name in results[task].items() if name in by_name]
            if points:
                x = [length for length, _ in points]
                (line, colour), (low, high) = (
                    styles[name],
                    zip(*(found[f"{kind}_interval"] for _, found in points), strict=True),
                )
                axis.plot(x, [found[kind] for _, found in points], line, marker="o", color=colour, label=name)
                axis.fill_between(x, low, high, color=colour, alpha=0.12)
        level = chance(arguments[among])[kind == "mrr"]
        axis.axhline(level, color="grey", linestyle=":", linewidth=1)
        axis.annotate("chance", (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
        axis.set_xscale("log", base=2)
        axis.set_xticks(arguments["lengths"], [str(length) for length in arguments["lengths"]])
        axis.set(
            title=title.format(**arguments),
            xlabel="tokens",
            ylim=(0, 1.04),
            xlim=(arguments["lengths"][0] * 0.85, arguments["lengths"][-1] * 1.18),
        )
        axis.title.set_fontsize(9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*_legend(axes), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _legend(axes) -> tuple[list, list]:
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return list(entries.values()), list(entries)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", help="folders or Hub ids, name=folder to give it a name")
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="in tokens")
    add("--documents", type=int, default=48, help="how many are retrieved; each as long as the longest length")
    add("--haystacks", type=int, default=12, help="documents that facts are put into")
    add("--candidates", type=int, default=6, help="copies of each, with another fact in each")
    add("--seed", type=int, default=0)
    add("--output_dir", type=Path, required=True)
    add("--add_to_models", action="store_true", help=f"put the figures into each model's own {evaluation.FILE}, for its card")
    arguments = parser.parse_args()
    if min(arguments.lengths) < 32:
        parser.error(f"--lengths {min(arguments.lengths)}: a fact needs 32 tokens or more around it")
    if arguments.candidates < 2 or arguments.haystacks < 1 or arguments.documents < 2:
        parser.error("--documents and --candidates are 2 or more, --haystacks 1 or more")
    if arguments.candidates > len(NAMES) * len(OBJECTS):
        parser.error(f"--candidates {arguments.candidates}: there are {len(NAMES) * len(OBJECTS)} different facts")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    models, folders = {}, {}
    for given in arguments.models:
        name, _, path = given.rpartition("=")
        name = name or path
        if name in models:
            raise SystemExit(f"two models are called {name!r}: give one another name, as name=folder")
        if arguments.add_to_models and not Path(path).is_dir():
            raise SystemExit(f"--add_to_models writes into the models' folders, and {path} is none")
        models[name] = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
        folders[name] = Path(path)
    settings = {"lengths": sorted(set(arguments.lengths))} | {
        name: getattr(arguments, name) for name in ("documents", "haystacks", "candidates", "seed")
    }
    results = evaluate(models, **settings)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"settings": settings}
    record["chance"] = {name: chance(settings[name]) for name in ("documents", "candidates")}
    record["scores"] = results
    (arguments.output_dir / "length.json").write_text(json.dumps(record, indent=2))
    for name, folder in folders.items() if arguments.add_to_models else ():
        evaluation.add(folder, evaluation.of_lengths(record, name))
    draw(results, settings, arguments.output_dir / "length.png")
    with (arguments.output_dir / "length.txt").open("w") as file:
        for console in (Console(), Console(file=file, width=150)):
            for table in tables(results, settings):
                console.print(table)


if __name__ == "__main__":
    main()
