"""Measure the speed and memory of common encodings on a GPU, relative to the original model.

    python -m benchmarks.gpu --seconds 240 --output_dir build/gpu

Each row times the original model and a patched one in turn, in bfloat16, with random weights and the sizes of BERT-base. Its
ratio is the median of the original's time divided by the patched model's: below 1 is slower. Rows are measured by importance,
and saved in gpu_bench.jsonl and in the tables of gpu_bench.md at once. Those for which no time remains are left out.

With `--device cpu`, the rows run once with small sizes and without generated code, to rehearse the command. Flex attention has
no backward pass there. The exit code is 1 if a row fails.
"""

import argparse
import copy
import datetime
import functools
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import BertConfig, BertModel, GPT2Model, LlamaConfig, LlamaModel, StaticCache

import hf_posenc

ORIGINAL, SDPA, FLEX, COMPILED = "original", "sdpa", "flex_attention", "sdpa, compiled"
BASELINE = (ORIGINAL, SDPA)
SUBJECTS = (
    BASELINE,
    *((encoding, attention) for encoding in ("alibi", "t5") for attention in (SDPA, FLEX)),
    *((encoding, SDPA) for encoding in ("rope", "shaw", "relative", "none", "learned")),
    *((encoding, FLEX) for encoding in (ORIGINAL, "shaw", "relative")),
)
STEPS = ("forward", "training")
GROUPS = (
    *((step, length, True) for length in (2048, 8192) for step in STEPS),
    ("decoding", 4096, False),
    *((step, length, False) for length in (8192, 2048) for step in STEPS),
    *((step, 512, padded) for padded in (True, False) for step in STEPS),
)
"""Step, tokens of a text or in the cache, and whether every other text is a quarter shorter, by importance."""
DECODING = (ORIGINAL, "rope", "alibi", "t5", "shaw", "none")
TOKENS, TEXTS, ROOM = 16_384, 8, 64
"""Tokens of a batch. In decoding, its texts, and the room of the cache for more tokens."""
ROUNDS, WARMUP = 7, 3
CACHE = "cache" if "cache" in inspect.signature(GPT2Model.forward).parameters else "past_key_values"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One measurement. error: why there is none."""

    step: str
    length: int
    padded: bool
    encoding: str
    attention: str
    batch: int = 0
    milliseconds: float = 0.0
    tokens_per_second: int = 0
    ratio: float = 0.0
    peak_gb: float = 0.0
    error: str = ""

    def cell(self) -> str:
        speed = f"{self.milliseconds:.3g} ms" if self.encoding == ORIGINAL and self.ratio == 1 else f"{self.ratio:.2f}"
        return self.error.partition(":")[0] or f"{speed}, {self.peak_gb:.2f} GB"


def rows(device: str) -> Iterator[Row]:
    for group in GROUPS:
        subjects = SUBJECTS if group[0] != "decoding" else [(encoding, SDPA) for encoding in DECODING]
        subjects = [each for each in subjects if device != "cpu" or each[1] != FLEX or group[0] != "training"]
        yield from (Row(*group, *subject) for subject in subjects)
    yield from (Row("decoding", 4096, False, encoding, COMPILED) for encoding in DECODING)


@functools.cache
def model_of(device: str, decodes: bool, encoding: str, attention: str) -> Any:
    """An original model, or a patched one that shares the parameters of the baseline."""
    if (encoding, attention) == BASELINE:
        small = device == "cpu"
        heads, layers = (2, 1) if small else (12, 12)
        sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64 * heads, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "intermediate_size": 256 * heads, "max_position_embeddings": 8192}
        without: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        torch.manual_seed(0)
        made: Any = LlamaModel(LlamaConfig(**sizes)) if decodes else BertModel(BertConfig(**sizes, **without))
        return made.to(device, torch.float32 if small else torch.bfloat16).eval()
    baseline = model_of(device, decodes, *BASELINE)
    model = copy.deepcopy(baseline) if encoding == ORIGINAL else hf_posenc.patch(baseline, encoding, max_length=8192)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "posenc." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.set_attn_implementation(attention.partition(",")[0])
    return torch.compile(model, mode="reduce-overhead") if attention == COMPILED else model


def prepared(device: str, row: Row) -> tuple[Run, int, int]:
    """The computation of a row, its number of texts, and the number of tokens that it computes."""
    length, batch = (row.length // 16, 2) if device == "cpu" else (row.length, TOKENS // row.length)
    batch = TEXTS if row.step == "decoding" and device != "cpu" else batch
    model = model_of(device, row.step == "decoding", row.encoding, row.attention)
    ids = torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    given: dict[str, Any] = {"input_ids": ids}
    if row.padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1::2, -(length // 4) :] = 0

    @torch.no_grad()
    def forward() -> None:
        model(**given)

    def training() -> None:
        model(**given).last_hidden_state.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    if row.step != "decoding":
        return forward if row.step == "forward" else training, batch, batch * length
    given[CACHE] = StaticCache(config=model.config, max_cache_len=length + ROOM)
    with torch.no_grad():
        getattr(model, "_orig_mod", model)(**given)
    given["input_ids"] = ids[:, :1]
    return forward, batch, batch


def seconds(device: str, run: Run) -> float:
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()  # type: ignore[no-untyped-call]
    run()
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()  # type: ignore[no-untyped-call]
    return start.elapsed_time(end) / 1000  # type: ignore[no-untyped-call]


def measured(device: str, row: Row) -> Row:
    """The row with its figures, or with an error."""
    baseline = replace(row, encoding=ORIGINAL, attention=COMPILED if row.attention == COMPILED else SDPA)
    rounds, warmup = (1, 0) if device == "cpu" else (ROUNDS, WARMUP)
    try:
        run, batch, tokens = prepared(device, row)
        other = None if row == baseline else prepared(device, baseline)[0]
        times: list[tuple[float, float]] = []
        for _ in range(warmup + rounds):
            time_of_this = seconds(device, run)
            times.append((time_of_this, seconds(device, other) if other else time_of_this))
        peak = 0
        if device != "cpu":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
    except torch.OutOfMemoryError:
        return replace(row, error="out of memory")
    except Exception as error:  # The other rows are measured.
        return replace(row, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    middle = statistics.median(each for each, _ in times[warmup:])
    ratio = statistics.median(theirs / ours for ours, theirs in times[warmup:])
    return replace(
        row,
        batch=batch,
        milliseconds=round(1e3 * middle, 3),
        tokens_per_second=round(tokens / middle),
        ratio=round(ratio, 3),
        peak_gb=round(peak / 1e9, 3),
    )


def tables(about: str, done: list[Row]) -> str:
    """A Markdown table for each step: a row for each model, and a column for each length."""
    lines = [about]
    for step in dict.fromkeys(row.step for row in done):
        mine = [row for row in done if row.step == step]
        columns = sorted({(row.length, row.padded) for row in mine})
        heads = [f"{length:,}{', padded' if padded else ''}" for length, padded in columns]
        lines += ["", f"| {step} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for subject in dict.fromkeys((row.encoding, row.attention) for row in mine):
            cells = {(row.length, row.padded): row.cell() for row in mine if (row.encoding, row.attention) == subject}
            lines.append(f"| {', '.join(subject)} | {' | '.join(cells.get(column, '–') for column in columns)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="seconds after which no other row is measured")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("build/gpu"), help="directory of gpu_bench.jsonl and gpu_bench.md"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=os.environ.get("HF_POSENC_GPU", "cuda"))
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here. --device cpu rehearses the command")
    torch._dynamo.config.disable = arguments.device == "cpu"
    torch._dynamo.config.recompile_limit = 100  # Flex attention is compiled for each model, in one process.
    started, done, planned = time.monotonic(), [], [*rows(arguments.device)]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "a rehearsal on a CPU"
    about = f"{name}; torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}; bfloat16."
    about += " Time or ratio to the original model (below 1 is slower), and peak memory without weights."
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with (arguments.output_dir / "gpu_bench.jsonl").open("a", encoding="utf-8") as file:
        for row in planned:
            if time.monotonic() - started > arguments.seconds:
                break
            done.append(measured(arguments.device, row))
            print(json.dumps({**asdict(done[-1]), "device": name}), file=file, flush=True)
            (arguments.output_dir / "gpu_bench.md").write_text(tables(about, done), encoding="utf-8")
    print(tables(about, done))
    failed = [row for row in done if row.error]
    print(*failed, f"{len(done)} of {len(planned)} rows in {time.monotonic() - started:.0f} seconds", sep="\n")
    sys.exit(any(row.error != "out of memory" for row in failed))


if __name__ == "__main__":
    main()
