"""Measures the effective receptive field: the distance of the tokens on which a state depends (Chi et al., 2023,
https://aclanthology.org/2023.acl-long.756)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.diagnostics.encoding_input import POSITIVE
from hf_posenc.diagnostics.figures import NORMAL, SMALL, WIDTH, Sheet
from hf_posenc.diagnostics.model_input import ModelRunner, Texts, prepare_model
from hf_posenc.diagnostics.registry import Dark, Path, TextLength, diagnostic, figure
from hf_posenc.diagnostics.result import Result
from hf_posenc.encodings import checked_value


@dataclass(frozen=True, eq=False)
class ReceptiveField(Result):
    """The result of `receptive_field`.

    model: name of its class.
    texts: number of texts.
    query: the token whose state is measured, "middle" or "last".
    distances: N distances of input tokens from the query, in tokens. Up to 0 in decoders.
    share: `[N]`, the norm of the state's gradient with respect to the input's embedding, divided by the sum over the text,
        averaged over texts.
    cumulative: `[R]`, the total share of tokens up to r = 0, 1, … tokens away.
    shares: cumulative shares.
    radius: the smallest r at which each of `shares` is reached.
    """

    model: str
    texts: int
    query: Literal["middle", "last"]
    distances: tuple[int, ...]
    share: Tensor
    cumulative: Tensor
    shares: tuple[float, ...]
    radius: tuple[int, ...]

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: gradient of the {self.query} token's state by the inputs, {self.texts} texts"
        for share, radius in zip(self.shares, self.radius, strict=True):
            yield f"  {share:.0%} of it within {radius} tokens"


@diagnostic("texts", on_page=True)
def receptive_field(
    model: Any,
    texts: Texts,
    *,
    tokenizer: Any = None,
    length: TextLength = 256,
    query: Literal["middle", "last"] | None = None,
    shares: Sequence[float] = (0.5, 0.9, 0.99),
    probes: int = 4,
    seed: int = 0,
) -> ReceptiveField:
    """The distance of the inputs on which a token's last state depends, measured by gradients through all layers.

    Chi et al. take the norm of the gradient with respect to each token's embedding, as a share of the sum over the text. They
    call the tokens with 99% of it the empirical receptive field. They use the gradient of the last token's prediction. We use
    gradients of `probes` random projections of the state. Their root mean square estimates the norm of the Jacobian, and models
    don't need a head.

    Args:
        model, texts, tokenizer, length: as for `attention_by_distance`.
        query: the token of the state. By default the middle one, or the last if no state depends on later tokens.
        shares: shares for which `radius` is computed, above 0 and up to 1.
        probes: number of projections.
        seed: seed of the projections.

    Raises:
        ValueError: a text has fewer than two tokens, an ID is unknown, or a share is invalid.
    """
    if query not in (None, "middle", "last"):
        raise ValueError(f"query={query!r} must be 'middle', 'last', or None.")
    if odd := [share for share in checked_value("shares", shares, tuple[float, ...]) if not 0 < share <= 1]:
        raise ValueError(f"shares contains {odd[0]!r}. Pass numbers above 0 and at most 1.")
    checked_value("probes", probes, POSITIVE)
    runner = prepare_model(model, tokenizer)
    rows = runner.read(texts, length)
    if query is None:
        query = "middle" if sees_later(runner, rows[0]) else "last"
    farthest = max(row["input_ids"].shape[1] for row in rows)
    distances = torch.arange(-farthest, farthest + 1)
    total, count = torch.zeros(2, len(distances), dtype=torch.float64)
    for row in rows:
        size = row["input_ids"].shape[1]
        place = size // 2 if query == "middle" else size - 1
        norms = _norms(runner, row, place, probes, seed)
        read = slice(farthest - place, farthest - place + size)
        total[read] += norms / norms.sum()
        count[read] += 1
    seen = ((count > 0) & ((distances <= 0) | (total > 0))).nonzero()[:, 0]
    kept = slice(int(seen[0]), int(seen[-1]) + 1)
    radii, mean = distances[kept].abs(), total[kept] / len(rows)
    cumulative = torch.zeros(int(radii.max()) + 1, dtype=torch.float64).index_add_(0, radii, mean).cumsum(0)
    return ReceptiveField(
        runner.name,
        len(rows),
        query,
        tuple(distances[kept].tolist()),
        (total / count)[kept],
        cumulative,
        tuple(shares),
        tuple(int((cumulative < share - 1e-9).sum()) for share in shares),
    )


@figure(
    receptive_field,
    example="bert-base-uncased --texts my.jsonl",
    caption="How far away the tokens are on which a state depends",
)
def draw_receptive_field(
    results: ReceptiveField | Mapping[str, ReceptiveField], *, dark: Dark = False, path: Path = None
) -> Any:
    """Draw how far away the tokens are on which a state depends.

    The left panel shows the share of the gradient by distance. The right panel shows the cumulative share up to a distance,
    with the radius of each of `shares`.

    results: a result of `diagnostics.receptive_field`, or results of several models by name, each with a line.

    Raises ValueError for another result.
    """
    named = ReceptiveField.named(results)
    sheet = Sheet((WIDTH, 3.2), 1, 2, dark=dark, path=path)
    left, right = sheet.axes[0]
    for place, (name, result) in enumerate(named.items()):
        style = sheet.line(place)
        left.plot(result.distances, result.share.numpy(), label=name, **style)
        cumulative = result.cumulative.numpy()
        right.plot(range(len(cumulative)), cumulative, **style)
        marker = sheet.line(place, markers=True)["marker"]
        right.plot(result.radius, result.shares, color=style["color"], linestyle="none", marker=marker, markersize=5)
        for radius, share in zip(result.radius, result.shares, strict=True) if len(named) == 1 else ():
            right.annotate(
                f"{share:.0%} within {radius}",
                (radius, share),
                xytext=(7, -3),
                textcoords="offset points",
                va="top",
                fontsize=SMALL,
                color=sheet.theme.ink,
            )
    left.set_yscale("log")
    left.set(xlabel="distance in tokens: input − state", ylabel="share of the gradient")
    right.set(xlabel="tokens up to this distance", ylabel="share of the gradient", ylim=(0, 1.03), xlim=(0, None))
    sheet.grid(right, "y")
    sheet.title(left, "by distance", NORMAL)
    sheet.title(right, "all up to a distance", NORMAL)
    sheet.name_lines([*named])
    return sheet.finish()


def sees_later(runner: ModelRunner, row: Mapping[str, Tensor]) -> bool:
    """Whether the first token's state depends on any other."""
    return bool((_norms(runner, row, 0, 1, 0)[1:] > 0).any())


def _norms(runner: ModelRunner, row: Mapping[str, Tensor], place: int, probes: int, seed: int) -> Tensor:
    """For each token, the norm of the gradient of the state at `place` with respect to its embedding, times √probes.

    `[L]`, float64."""
    inputs: list[Tensor] = []
    generator, size = torch.Generator().manual_seed(seed), row["input_ids"].shape[1]

    def leaf(module: Any, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.shape[:2] != (1, size):  # quantized (I-BERT), padded (Longformer)
            raise ValueError(
                f"{runner.name} doesn't embed each token as one vector, so it has no gradients with respect to them. Use a "
                "diagnostic without gradients, such as order_sensitivity."
            )
        inputs.append(output.detach().requires_grad_())
        return inputs[-1].clone()  # some models (CTRL) scale it in place

    with torch.inference_mode(False), torch.enable_grad():
        row = {name: values.clone() for name, values in row.items()}  # autograd can't save tensors of inference mode
        handle = runner.embedding.register_forward_hook(leaf)  # the model is a copy
        try:
            state = runner.states(row)[place]
        finally:
            handle.remove()
        squares = torch.zeros(size, dtype=torch.float64)
        for probe in range(probes):
            signs = torch.randint(0, 2, state.shape, generator=generator).mul(2).sub(1).to(state)
            (gradient,) = torch.autograd.grad((state * signs).sum(), inputs[0], retain_graph=probe < probes - 1)
            squares += gradient[0].double().square().sum(-1).cpu()
    return squares.sqrt()
