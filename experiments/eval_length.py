"""Evaluate models by length: sentence embeddings by retrieval, language models by perplexity, at 128 to 2,048 tokens.

    python scripts/eval_length.py minilm=DIRECTORY minilm-alibi=DIRECTORY --pages DIR --output_dir lengths

The documents are the pages of a directory that its --train_file excludes (experiments/data/pages.py). Without --pages, they are
the standard library's documentation, which has fewer long texts. The tasks:

title       A title must find its document among all documents, truncated at each length. The document excludes its title.
deep        A sentence must find the document that it was removed from, beyond the first 512 tokens and within the length.
needle      A sentence with an invented fact is inserted into a document. A question must find that document among copies
            with other facts. The heat map shows length by depth.
perplexity  Sliding windows of each length over the same tokens. This is the default for language models. The default for
            other models is the other three tasks.

A model whose maximum length is less than the longest length is truncated, and also run on equal chunks that fit. Chunk
embeddings are averaged ("mean"), or only the best-matching chunk counts ("max"). A bag of words reads the whole text. Each
method is compared with the baseline on the same queries. The baseline is the first model, truncated, or --baseline. Judge
methods by the intervals of the differences. Intervals of single scores can overlap even if a difference is clear.

On one CPU core, MiniLM takes 1 s for a document of 1,024 tokens and 2 s for 2,048. "title" and "deep" take about 15 minutes per
model, with 200 documents at five lengths.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import hf_posenc  # noqa: F401  (registers patched models with the Auto classes)
from experiments import length_figures, stdlib_retrieval
from experiments.data import pages
from experiments.length_tables import tables
from experiments.needles import BOUNDARY, NAMES, OBJECTS, chance
from experiments.retrieval_by_length import Found, Texts, baseline_of, cases, evaluate, evaluate_needles, ways
from hf_posenc.evaluation import perplexity, records, retrieval, terminals
from hf_posenc.evaluation.retrieval import Embedder
from hf_posenc.evaluation.stdlib_corpus import EVALUATION_MODULES
from hf_posenc.serialization.atomic import atomic_file
from hf_posenc.serialization.tokenizer_files import required_tokenizer
from hf_posenc.training import sentences

LENGTHS = (128, 256, 512, 1024, 2048)
RETRIEVAL, TASKS = ("title", "deep", "needle"), ("title", "deep", "needle", "perplexity")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", help="directories or Hub IDs, optionally as name=directory; the first is the baseline")
    add("--tasks", nargs="+", choices=TASKS, help="default: perplexity for language models, otherwise the others")
    add("--pages", type=Path, help="directory of .rst, .txt, .md, or .html pages; default: standard library documentation")
    share_help = "share of evaluation pages; 1 if no model was trained on any page"
    add("--evaluation_share", type=float, default=pages.EVALUATION_SHARE, help=share_help)
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), help="lengths in tokens")
    add("--documents", type=int, default=200, help="number of documents, each as long as the longest length")
    add("--haystacks", type=int, default=8, help="documents with inserted facts in each cell of the heat map")
    add("--depths", type=int, default=5, help="number of equal parts of a document for inserting facts")
    add("--candidates", type=int, default=4, help="copies of each haystack, each with a different fact")
    add("--needle_lengths", type=int, nargs="+", help="default: the --lengths from 512, or the longest")
    add("--baseline", help="name of a method (for perplexity, of a model); default: first model, truncated")
    add("--window", type=int, help="truncation and chunk length for models that need neither")
    add("--seed", type=int, default=0, help="seed for documents, sentences, facts, and depths")
    add("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.lengths = sorted({*arguments.lengths})
    given = (
        arguments.needle_lengths or [length for length in arguments.lengths if length >= BOUNDARY] or [arguments.lengths[-1]]
    )
    arguments.needle_lengths = sorted({*given})
    if min(arguments.lengths) < 8:
        parser.error(f"--lengths {min(arguments.lengths)}: 8 tokens or more are needed")
    if min(arguments.needle_lengths) < 32 and "needle" in (arguments.tasks or RETRIEVAL):
        parser.error(f"--needle_lengths {min(arguments.needle_lengths)}: a fact needs 32 tokens or more around it")
    if max(arguments.needle_lengths) > max(arguments.lengths):
        parser.error(f"--needle_lengths {max(arguments.needle_lengths)} is beyond the longest of --lengths")
    if arguments.candidates < 2 or arguments.documents < 2 or arguments.haystacks < 1 or arguments.depths < 1:
        parser.error("--documents and --candidates are 2 or more, --haystacks and --depths 1 or more")
    if arguments.candidates > len(NAMES) * len(OBJECTS):
        parser.error(f"--candidates {arguments.candidates}: there are {len(NAMES) * len(OBJECTS)} different facts")
    if arguments.tasks and "deep" in arguments.tasks and max(arguments.lengths) <= BOUNDARY:
        parser.error(f"--tasks deep asks for text behind {BOUNDARY} tokens: give --lengths beyond, or leave it out")
    if not 0 < arguments.evaluation_share <= 1:
        parser.error(f"--evaluation_share {arguments.evaluation_share}: allowed are shares above 0, up to 1")
    return arguments


def is_language_model(path: str) -> bool:
    """Whether the checkpoint was saved with a causal language modeling head."""
    classes = AutoConfig.from_pretrained(path).architectures or []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes)


def named(given: list[str]) -> dict[str, str]:
    """Name -> directory or Hub ID."""
    paths: dict[str, str] = {}
    for each in given:
        name, _, path = each.rpartition("=")
        name = name or path
        if name in paths:
            raise SystemExit(f"two models are called {name!r}: give one another name, as name=folder")
        paths[name] = path
    return paths


def load_tokenizers(paths: dict[str, str]) -> dict[str, Any]:
    """The tokenizers by model name.

    Raises SystemExit if a model has no fast tokenizer, or if vocabularies differ, because text lengths would differ.
    """
    try:
        tokenizers = {name: required_tokenizer(path) for name, path in paths.items()}
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    first, vocabulary = next(iter(paths)), next(iter(tokenizers.values())).get_vocab()
    for name, tokenizer in tokenizers.items():
        if not tokenizer.is_fast:
            raise SystemExit(f"{name} has a slow tokenizer, which doesn't tell where a token begins: a fast one is needed")
        if tokenizer.get_vocab() != vocabulary:
            raise SystemExit(f"{name} has another vocabulary than {first}: evaluate it in a run of its own")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # padding is masked
    return tokenizers


def load_embedder(path: str, tokenizer: Any) -> Embedder:
    """A SentenceTransformer with its own modules, or another model with mean pooling."""
    found = sentences.load(path)
    model = AutoModel.from_pretrained(path) if found is None else found[0].model
    return Embedder(model.eval(), tokenizer, retrieval.pooling(found, model.device))


def load_texts(arguments: argparse.Namespace, tokenizer: Any) -> Texts:
    if arguments.pages is None:
        return stdlib_retrieval.long_documents(tokenizer, max(arguments.lengths), EVALUATION_MODULES, fewer=True)
    evaluation, _ = pages.split(arguments.pages, share=arguments.evaluation_share)
    return [(page.title, page.document) for page in evaluation]


def main() -> None:
    arguments, console = parse_arguments(), Console()
    paths = named(arguments.models)
    languages = {name for name, path in paths.items() if is_language_model(path)}
    tasks = arguments.tasks or [*(RETRIEVAL if languages != {*paths} else ()), *(["perplexity"] if languages else ())]
    if "perplexity" in tasks and languages != {*paths}:
        raise SystemExit(f"--tasks perplexity: {', '.join(sorted({*paths} - languages))} has no head of a language model")
    tokenizers, lengths, longest = load_tokenizers(paths), arguments.lengths, max(arguments.lengths)
    first, tokenizer = next(iter(tokenizers.items()))
    if longest <= BOUNDARY:
        tasks = [task for task in tasks if task != "deep"]
    texts = load_texts(arguments, tokenizer)
    documents = cases(tokenizer, texts, lengths, arguments.documents, arguments.seed, deep="deep" in tasks)
    if len(documents) < 2:
        raise SystemExit(f"{len(documents)} documents have {longest} tokens or more: lower --lengths, or give other --pages")
    if len(documents) < arguments.documents:
        hint = "" if arguments.pages else "; --pages takes a folder with more"
        console.print(f"{len(documents)} documents have {longest} tokens or more, not {arguments.documents}{hint}")

    found, perplexities, baseline, model_baseline = Found(), {}, first, first
    haystacks = documents[: arguments.haystacks]
    if {*RETRIEVAL} & {*tasks}:
        embedders = {name: load_embedder(path, tokenizers[name]) for name, path in paths.items()}
        compared = ways(embedders, longest, arguments.window)
        baseline = baseline_of(compared, arguments.baseline)
        if {"title", "deep"} & {*tasks}:
            evaluate(found, compared, tokenizer, documents, lengths, tasks)
        if "needle" in tasks:
            sizes = (arguments.depths, arguments.candidates, arguments.seed)
            evaluate_needles(found, compared, tokenizer, haystacks, arguments.needle_lengths, *sizes)
    if "perplexity" in tasks:
        if arguments.baseline in paths:
            model_baseline = arguments.baseline
        elif arguments.baseline and {*tasks} == {"perplexity"}:
            raise SystemExit(f"--baseline {arguments.baseline!r} is none of the models: {', '.join(map(repr, paths))}")
        models: dict[str, tuple[PreTrainedModel, Any]] = {
            name: (AutoModelForCausalLM.from_pretrained(path), tokenizers[name]) for name, path in paths.items()
        }
        perplexities = perplexity.evaluate(models, [case.document for case in documents], lengths, model_baseline)

    settings: dict[str, Any] = {
        "texts": pages.name_of(arguments.pages) if arguments.pages else records.LIBRARY,
        "models": list(paths),
    }
    settings |= {
        name: getattr(arguments, name)
        for name in ("evaluation_share", "lengths", "needle_lengths", "depths", "candidates", "window", "seed")
    }
    settings |= {"documents": len(documents), "haystacks": len(haystacks), "tasks": list(tasks), "baseline": baseline}
    settings["perplexity_baseline"] = model_baseline
    record: dict[str, Any] = {
        "settings": settings,
        "chance": {name: chance(settings[name]) for name in ("documents", "candidates")},
        "depths": {length: [case.deep[length].depth for case in documents if case.deep] for length in documents[0].deep},
        "scores": found.scores(),
        "differences": found.differences(baseline) if found.ranks else {},
        "heat": found.heat(),
        "perplexity": perplexities,
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    records.write(arguments.output_dir / "length.json", record)
    written = records.read(arguments.output_dir / "length.json")
    length_figures.lengths(written, path=arguments.output_dir / "length.png")
    if found.cells:
        length_figures.needle(written, path=arguments.output_dir / "needle.png")
    with atomic_file(arguments.output_dir / "length.txt") as file:
        for each in (console, Console(file=file, width=170)):
            for table in tables(found, perplexities, settings):
                each.print(table)


if __name__ == "__main__":
    terminals.set_up()
    main()
