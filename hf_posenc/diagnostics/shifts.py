"""How far an encoding's vectors are from being shifted by a linear map: p(t + k) = M_k p(t)."""

from dataclasses import dataclass

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class ShiftError(Result):
    """The result of `shift_error`.

    offsets: k, in tokens.
    error: for each k ‖p(t + k) - M_k p(t)‖ over the positions t that M_k was not fitted to, divided by the distance of these
        p(t + k) from their mean: 0 is exact, 1 as good as always giving the mean.
    length: number of positions.
    """

    encoding: str
    length: int
    offsets: tuple[int, ...]
    error: tuple[float, ...]
