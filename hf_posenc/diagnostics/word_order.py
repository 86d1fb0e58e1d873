"""Order sensitivity: how much a model's states change when the tokens of a text change places."""

from dataclasses import dataclass

from hf_posenc.diagnostics.result import Result


@dataclass(frozen=True, eq=False)
class OrderSensitivity(Result):
    """The result of `order_sensitivity`.

    model: its class. texts: how many were read.
    changes: "shuffled", all tokens in a random order; "neighbours", each pair of tokens swapped; "halves", the text's two halves
        swapped.
    tokens: by change, 1 - the cosine of a token's last state with its state in the text as it was, wherever it stands now; the
        mean over tokens. text: 1 - the cosine of the mean over tokens. 0: order changes nothing.
    """

    model: str
    texts: int
    changes: tuple[str, ...]
    tokens: tuple[float, ...]
    text: tuple[float, ...]
