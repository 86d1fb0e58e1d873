"""Tables of learned position vectors which the host adds to its inputs: BERT, RoBERTa, GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.encodings import check_size, shown
from hf_posenc.sources.relative import is_relative
from hf_posenc.sources.source import HostRefused, Silenced, Source, replace
from hf_posenc.spec import LENGTH_FIELD

NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


class Table(Source):
    """An `nn.Embedding` of one of NAMES, with as many rows as LENGTH_FIELD says.

    RoBERTa's ids begin behind its padding_idx, so 514 rows serve 512 tokens.
    """

    encoding, verb, takes_vectors = "learned", "embed", True
    module: nn.Embedding

    @classmethod
    def find(cls, stack: Any, modules: Mapping[str, nn.Module]) -> Iterator[Source]:
        for path, module in modules.items():
            if path.rpartition(".")[2] not in NAMES or is_relative(module):
                continue
            rows = getattr(stack.config, LENGTH_FIELD, None)
            if type(module) is not nn.Embedding or module.num_embeddings != rows:
                raise HostRefused(
                    f"{type(stack).__name__}.{path} counts its positions in a way of its own ({type(module).__name__}, "
                    f"{getattr(module, 'num_embeddings', '?')} rows for {LENGTH_FIELD}={rows})",
                    reason="position ids in a way of its own",
                )
            yield cls(path, module)

    @classmethod
    def check_config(cls, config: Any) -> None:
        rows, width = getattr(config, LENGTH_FIELD, None), getattr(config, "hidden_size", None)
        if isinstance(rows, int) and isinstance(width, int) and getattr(config, "rope_parameters", None) is None:
            if rows < 1:
                raise ValueError(f"{LENGTH_FIELD}={rows}: allowed is an integer above 0")
            check_size(f"{LENGTH_FIELD}={shown(rows)} at hidden_size={shown(width)}", rows * width)

    def silence(self, stack: Any, adds_vectors: bool) -> None:
        replace(stack, self.path, SilencedTable(stack, self.path, self.module, self.offset if adds_vectors else None))

    @property
    def offset(self) -> int:
        return 0 if self.module.padding_idx is None else self.module.padding_idx + 1

    @property
    def width(self) -> int:
        return self.module.embedding_dim

    def usable_length(self, config: Any) -> int:
        return getattr(config, LENGTH_FIELD) - self.offset

    def kept_shapes(self, rows: int | None) -> dict[str, tuple[int, ...]]:
        return {f"{self.path}.weight": (rows or 0, self.width)}

    def table(self) -> Tensor:
        return self.module.weight[self.offset :]


class SilencedTable(Silenced):
    """Answers the host's position ids with the vectors of the encoding, or with zeros where those are added elsewhere.

    offset: the id of the first token; None: no vectors are added here.
    """

    def __init__(self, stack: Any, path: str, table: nn.Embedding, offset: int | None) -> None:
        super().__init__(stack, path, table)
        self.offset = offset

    def forward(self, position_ids: Tensor) -> Tensor:
        (stack,) = self._stack
        encoding = stack.posenc
        dtype = stack.get_input_embeddings().weight.dtype
        vectors = None
        if self.offset is not None and "embed" in encoding.acts_by():
            vectors = encoding("embed", position_ids - self.offset)
        if vectors is None:
            vectors = torch.zeros((), dtype=dtype, device=position_ids.device).expand(*position_ids.shape, self.shape[1])
        return vectors.to(dtype)
