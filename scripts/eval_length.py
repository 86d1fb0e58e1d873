"""Sentence embeddings by length: retrieval, and the retrieval of one fact, at 128 … 2048 tokens.

    python scripts/eval_length.py MODEL [MODEL …] --output_dir lengths

*Retrieval*: a module's one-line summary is to find its documentation, cut at each length. *Needle*: a sentence with a fact
is put at a random depth into a long document; a question is to find the document with its fact among copies of the same
document with other facts. Facts are drawn at random from the same lists; no training text has one. Facts behind the first
512 tokens are scored apart, and the level of chance stands beside.

A model that ends before the longest length is shown in three ways: truncated, and chunked into even pieces that fit it,
whose embeddings are averaged ("mean"), or compared each, the best counting ("max"). A bag of words sees all of the text.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModel, AutoTokenizer

from evaluation import records
from evaluation.figures import draw, tables
from evaluation.lengths import evaluate
from evaluation.needles import NAMES, OBJECTS, chance

LENGTHS = (128, 256, 512, 1024, 2048)


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
    add("--add_to_models", action="store_true", help=f"put the figures into each model's own {records.FILE}, for its card")
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
    records.write(arguments.output_dir / "length.json", record)
    for name, folder in folders.items() if arguments.add_to_models else ():
        records.add(folder, records.of_lengths(records.read(arguments.output_dir / "length.json"), name))
    draw(results, settings, arguments.output_dir / "length.png")
    with (arguments.output_dir / "length.txt").open("w") as file:
        for console in (Console(), Console(file=file, width=150)):
            for table in tables(results, settings):
                console.print(table)


if __name__ == "__main__":
    main()
