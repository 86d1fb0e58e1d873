"""Performance targets, and whether results meet them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.comparing import NONE, STOCK, Record
from benchmarks.peers import THEIRS
from benchmarks.scale import AFTERWARDS

CHEAP = {"embed", "rotate", "distance_bias"}
"""The mechanisms of the encodings that targets call cheap."""
COUNTS = {"graph breaks": "graph_breaks", "recompilations": "recompilations"}
"""Unit of a target -> the field of a record that is compared with that of the reference."""


def is_cheap(name: str, record: Record) -> bool:
    """Whether an encoding only adds vectors, rotates, or has a distance bias. False for `none`, and for `pope`, whose rotation
    doubles the width of queries and keys.
    """
    return bool(record.get("mechanisms")) and {*record["mechanisms"]} <= CHEAP and name != "pope"


def is_fixed_bias(name: str, record: Record) -> bool:
    return record.get("mechanisms") == ["distance_bias"] and not record["learned"]


def is_learned_bias(name: str, record: Record) -> bool:
    return record.get("mechanisms") == ["distance_bias"] and record["learned"]


def named(*wanted: str) -> Callable[[str, Record], bool]:
    return lambda name, record: name in wanted


@dataclass(frozen=True)
class Target:
    """A bound on a measurement.

    groups: the groups in which it is measured.
    applies: whether it applies to a subject.
    unit: the measurement that is compared with the bound. "x" is the throughput, and "x time" the time, each
        relative to `against`. "MB more" is the peak memory in addition to that of `against`. "ms" is the time, and
        "MB copied" the size of copied weights. "graph breaks" and "recompilations" are in addition to those of `against`.
    limit: what takes the additional time. The page shows it if the target is missed.
    """

    what: str
    groups: tuple[str, ...]
    applies: Callable[[str, Record], bool]
    bound: float
    unit: str = "x"
    against: str = STOCK
    limit: str = ""

    @property
    def at_least(self) -> bool:
        return self.unit == "x"

    @property
    def shown_bound(self) -> str:
        words = {"x": "", "x time": "time ", "ms": "time ", "MB copied": "copied "}
        ends = {
            "ms": f"{self.bound:g} ms",
            "MB more": f"{self.bound:g} MB more than {self.against}",
            "MB copied": f"{self.bound:g} MB",
        }
        if self.unit in COUNTS:
            return f"≤ {self.bound:g} {self.unit} more than {self.against}"
        what = ends.get(self.unit, f"{self.bound:g}x {self.against}")
        return f"{words.get(self.unit, 'memory ')}{'≥' if self.at_least else '≤'} {what}"


def _shapes(kind: str, lengths: tuple[int, ...], dtypes: tuple[str, ...] = ("fp32", "bf16")) -> tuple[str, ...]:
    return tuple(f"{kind}-{length}-{dtype}" for length in lengths for dtype in dtypes)


COMPILED = ("compile-512-fp32", "compile-llama-512-fp32")
MASKED = "a mask slows down torch's attention; rotating is another pass"
FUSED = "gradients of biases need the scores, which fused kernels discard"
PRODUCTS = "more products with queries and keys, stored as a mask"
WIDER = f"{PRODUCTS}; `pope` doubles the width"
PADDED = "padded texts need a mask for each head"
TARGETS = (
    Target("cheap encodings: forward, 128 and 512", _shapes("forward", (128, 512)), is_cheap, 0.97, limit=MASKED),
    Target("cheap encodings: forward, 2048", _shapes("forward", (2048,)), is_cheap, 0.95, against=NONE, limit=MASKED),
    Target(
        "fixed distance bias: attention alone, 8192",
        _shapes("attention", (8192,)),
        is_fixed_bias,
        1.08,
        "x time",
        NONE,
        limit=MASKED,
    ),
    Target("fixed distance bias: memory, 8192", _shapes("attention", (8192,)), is_fixed_bias, 100, "MB more", NONE),
    Target("learned distance bias: training, 512", _shapes("train", (512,), ("fp32",)), is_learned_bias, 0.97, limit=FUSED),
    Target("learned distance bias: training, 2048", _shapes("train", (2048,), ("fp32",)), is_learned_bias, 0.85, limit=FUSED),
    Target("cheap encodings: images", ("forward-vit-576-fp32", "forward-swin-3136-fp32"), is_cheap, 0.97, limit=MASKED),
    Target(
        "deberta, fox, pope, transformer_xl, tupe: forward, 512",
        ("forward-512-fp32", "forward-gpt2-512-fp32"),
        named("deberta", "fox", "pope", "transformer_xl", "tupe"),
        0.88,
        limit=WIDER,
    ),
    Target("cope: forward, 512", ("forward-gpt2-512-fp32",), named("cope"), 0.75, limit=PRODUCTS),
    Target(
        "content-based: forward, 2048 and bf16, and decoding",
        ("forward-gpt2-2048-fp32", "forward-gpt2-512-bf16", "forward-gpt2-2048-bf16", "decode-gpt2-4096-fp32"),
        named("cope", "deberta", "fox", "pope", "transformer_xl", "tupe"),
        0.75,
        limit=WIDER,
    ),
    Target("shaw: forward, 512", ("forward-512-fp32",), named("shaw"), 0.92, limit=PRODUCTS),
    Target("shaw: forward, 2048", ("forward-2048-fp32",), named("shaw"), 0.88, limit=PRODUCTS),
    Target("shaw: forward, bf16", _shapes("forward", (512, 2048), ("bf16",)), named("shaw"), 0.9, limit=PRODUCTS),
    Target("deberta: forward, bf16", _shapes("forward", (512, 2048), ("bf16",)), named("deberta"), 0.85, limit=PRODUCTS),
    Target("shaw: training, 512", ("train-512-fp32",), named("shaw"), 0.92, limit=PRODUCTS),
    *(
        Target(f"{name}: against x-transformers, 512", ("x-transformers-512-fp32",), named(name), bound, against=THEIRS + name)
        for name, bound in (("alibi", 0.97), ("rope", 0.97), ("t5", 1.3))
    ),
    Target("one step of decoding behind 4096", ("decode-gpt2-4096-fp32",), is_cheap, 1.1, "x time"),
    Target(
        "cheap encodings: generate 256 tokens",
        ("generate-llama-256-fp32",),
        is_cheap,
        0.97,
        limit="Python code that runs at each step",
    ),
    Target("cheap encodings: compiled, 512", COMPILED, is_cheap, 0.97, limit=MASKED),
    Target("compiled: graph breaks", COMPILED, lambda name, record: name != STOCK, 0, "graph breaks"),
    Target("compiled: recompilations", COMPILED, lambda name, record: name != STOCK, 0, "recompilations"),
    Target("patch, 12 layers", ("patch",), lambda name, record: True, 30, "ms", limit="large tables of random numbers"),
    Target("patch, 12 layers: weights", ("patch",), lambda name, record: True, 0, "MB copied"),
    Target("import hf_posenc", ("import",), named("hf_posenc"), 150, "ms"),
    Target(
        "cheap encodings: SentenceTransformer.encode",
        ("encode",),
        is_cheap,
        0.97,
        limit=PADDED,
    ),
    Target(
        "a model of 1 GB, loaded and patched",
        ("load",),
        lambda name, record: name != STOCK,
        0.97,
        limit="finding the positions, checking the weights",
    ),
    Target("a model of 1 GB, loaded and patched: weights", ("load",), named(AFTERWARDS), 0, "MB copied"),
)


@dataclass(frozen=True)
class Verdict:
    """The measurement of a target for one subject of a group, with its interval if there is one."""

    target: Target
    group: str
    subject: str
    value: float
    interval: tuple[float, float] | None

    @property
    def met(self) -> bool:
        return self.value >= self.target.bound if self.target.at_least else self.value <= self.target.bound

    @property
    def missed(self) -> bool:
        """Whether the target isn't met, and the interval doesn't contain the bound."""
        low, high = self.interval or (self.value, self.value)
        return not (self.met or low <= self.target.bound <= high)


def verdicts(groups: dict[str, Any]) -> Iterator[Verdict]:
    """The verdicts of all targets whose group was measured."""
    for target in TARGETS:
        for group in target.groups:
            subjects = groups.get(group, {}).get("subjects", {})
            for name, record in subjects.items():
                if target.applies(name, record) and "failed" not in record:
                    found = _figure(target, record, subjects.get(target.against, {}))
                    if found is not None:
                        yield Verdict(target, group, name, *found)


def _figure(target: Target, record: Record, other: Record) -> tuple[float, tuple[float, float] | None] | None:
    if target.unit in ("x", "x time"):
        if target.against not in record["ratios"]:
            return None
        value, low, high = record["ratios"][target.against]
        return (value, (low, high)) if target.unit == "x" else (1 / value, (1 / high, 1 / low))
    if target.unit == "ms":
        return record["milliseconds"], record.get("interval")
    if target.unit == "MB copied":
        return record["copied_mb"], None
    if target.unit in COUNTS:
        name = COUNTS[target.unit]
        return record[name] - other[name], None
    if "peak_mb" not in other:
        return None
    return record["peak_mb"] - other["peak_mb"], None
