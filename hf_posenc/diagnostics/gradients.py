"""The effective receptive field: how far away the tokens are on which a state depends (Chi et al., 2023,
https://aclanthology.org/2023.acl-long.756)."""

from dataclasses import dataclass

from torch import Tensor

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class ReceptiveField(Result):
    """The result of `receptive_field`.

    model: its class. texts: how many were read. query: which token's state, an index from the end of the text (-1: the last), or
        None for the one in the middle.
    distances: of the input token from the query, in tokens, N of them; up to 0 in decoders.
    share: `[N]`, the norm of the state's gradient by the input's embedding, as part of the sum over the text; mean over texts.
    cumulative: `[R]`, the share of the tokens up to r = 0, 1, … tokens away.
    shares: cumulative shares; radius: the least r at which each is reached.
    """

    model: str
    texts: int
    query: int | None
    distances: tuple[int, ...]
    share: Tensor
    cumulative: Tensor
    shares: tuple[float, ...]
    radius: tuple[int, ...]
