"""The groups of subjects that are compared with each other, and the settings of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 64


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    rounds: how often each subject is timed.
    warmup: how often each subject runs before that.
    clock: a key of `timing.CLOCKS`.
    encodings: the encodings to measure. Empty for all.
    modules: modules that define encodings, imported first.
    """

    rounds: int = 20
    warmup: int = 2
    threads: int = 2
    clock: str = "wall"
    seed: int = 0
    encodings: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Subjects that are compared with each other, in one process.

    kind: what is measured, a key of `measuring.KINDS`.
    length: tokens of a text. For "decode", tokens in the cache. For "generate", new tokens.
    `host`: the model type.
    padded: whether every other text is a quarter shorter.
    dropout: of hidden states and attention, as original models train.
    encodings: the encodings to measure. Empty for all.
    what: description of a group that isn't described by sizes.
    """

    kind: str
    length: int = 0
    batch: int = 1
    layers: int = 3
    heads: int = 12
    dtype: str = "float32"
    host: str = "bert"
    padded: bool = False
    dropout: float = 0.0
    encodings: tuple[str, ...] = ()
    what: str = ""

    @property
    def name(self) -> str:
        if self.what:
            return self.kind
        host = "" if self.host == "bert" else f"-{self.host}"
        dtype = "-" + self.dtype.replace("float", "fp").replace("bfp", "bf")
        more = ("-padded" if self.padded else "") + ("-dropout" if self.dropout else "")
        return f"{self.kind}{host}-{self.length}{dtype}{more}"

    def about(self) -> dict[str, Any]:
        """The part of a record that describes the group."""
        if self.what:
            return {"kind": self.kind, "what": self.what}
        names = ("kind", "host", "length", "batch", "layers", "heads", "dtype")
        more = {name: value for name in ("padded", "dropout") if (value := getattr(self, name))}
        return {**{name: getattr(self, name) for name in names}, **more}

    @property
    def hidden_size(self) -> int:
        return self.heads * HEAD_DIM


COMMON = ("none", "alibi", "relative", "t5", "rope", "shaw")
IN_WINDOWS = ("none", "alibi", "sandwich", "rope", "rope_2d", "shaw", "sinusoidal_2d")
FLOAT, HALF = "float32", "bfloat16"
GROUPS = (
    *(
        Group("forward", length, batch=batch, layers=layers, heads=heads, dtype=dtype)
        for dtype in (FLOAT, HALF)
        for length, batch, layers, heads in ((128, 4, 3, 12), (512, 1, 3, 12), (2048, 1, 3, 12), (8192, 1, 1, 4))
    ),
    Group("forward", 512, batch=2, padded=True),
    *(Group("forward", length, dtype=dtype, host="gpt2") for dtype in (FLOAT, HALF) for length in (512, 2048)),
    Group("forward", 576, host="vit"),
    Group("forward", 3136, layers=4, heads=6, host="swin", encodings=IN_WINDOWS),
    *(Group("train", length, batch=batch, layers=layers) for length, batch, layers in ((128, 4, 3), (512, 1, 3), (2048, 1, 1))),
    *(Group("train", length, layers=layers, dtype=HALF) for length, layers in ((512, 3), (2048, 1))),
    Group("train", 512, dropout=0.1),
    *(Group("decode", 4096, layers=12, host="gpt2", dtype=dtype) for dtype in (FLOAT, HALF)),
    Group("decode", 4096, layers=12, host="llama", encodings=("none", "rope", "alibi")),
    Group("generate", 256, batch=8, layers=4, host="llama", encodings=COMMON),
    *(Group("compile", 512, host=host, encodings=COMMON) for host in ("bert", "llama")),
    *(
        Group("attention", length, batch=batch, layers=1, heads=heads, dtype=dtype)
        for dtype in (FLOAT, HALF)
        for length, batch, heads in ((512, 4, 12), (2048, 1, 12), (8192, 1, 4))
    ),
    *(Group("attention-train", length, batch=batch, layers=1) for length, batch in ((512, 4), (2048, 1))),
    Group("x-transformers", 512),
    Group("x-transformers", 512, dtype=HALF),
    Group("x-transformers", 2048),
    Group("rotation", 512, batch=4),
    Group("rotation", 2048),
    Group("patch", layers=12, what="hf_posenc.patch of a BERT-base with 12 layers"),
    Group("import", what="import after `from transformers import BertModel`, in new processes"),
    Group("encode", encodings=COMMON, what="SentenceTransformer.encode, 1,000 passages of documentation, MiniLM-L6"),
    Group("load", what="a BERT of 1 GB loaded in new processes, up to the first output: stock, and patched in two ways"),
)
"""All groups have the width of BERT-base, except those with 8,192 tokens, which have a third of it (4 heads) to save time.

Swin has the width of Swin-tiny, 2 layers in each of its first two stages, and 3 and 6 heads there.
"""
QUICK = ("forward-512-fp32", "forward-512-bf16", "train-512-fp32", "attention-2048-fp32", "decode-gpt2-4096-fp32")
"""The groups of --quick."""


def groups(quick: bool = False, only: tuple[str, ...] = ()) -> list[Group]:
    """All groups, those of --quick, or those with a name or kind in `only`.

    Raises ValueError for an unknown name or kind.
    """
    if not only:
        return [group for group in GROUPS if not quick or group.name in QUICK]
    known = list(dict.fromkeys(_known()))
    if unknown := {*only} - {*known}:
        raise ValueError(
            f"there is no group {', '.join(sorted(unknown))}; there are {', '.join(known)} (--list says what each measures)"
        )
    return [group for group in GROUPS if {group.name, group.kind} & {*only}]


def _known() -> Iterator[str]:
    for kind in dict.fromkeys(group.kind for group in GROUPS):
        yield kind
        yield from (group.name for group in GROUPS if group.kind == kind)
