"""Fits the encodings of a patched model to its original, layer by layer, without training.

The patched model runs once over all texts. Each attention gets the parameters that minimize the mean Kullback-Leibler
divergence KL(original ‖ model) of its queries' attention. Its inputs come from the layers that are already calibrated. Then
each of the layer's two blocks gets one vector: the median difference of its contributions to the residual stream. A mean would
depend mostly on a few tokens, such as [SEP], whose states are far larger than all others. Position embeddings are replaced by
their medians in ranges of positions, because the first tokens and short texts differ most from the median of a long text.
Several attentions can share parameters (`per_layer=False`, ALBERT's layers). These are fitted to all of them jointly, in
several runs, because the inputs change with the parameters.

If a bias has one free number for each head and bias row, model and original give equal attention mass to each row at the
minimum. Iterative proportional fitting reaches it by repeating bias += log(mass in the original / mass in the model)
(https://doi.org/10.1214/aoms/1177731829). Other parameters are fitted with L-BFGS.

Shapes: N texts, L tokens, H heads, E head_dim, D hidden_size, R bias rows.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.architectures.components import UnsupportedModelError
from hf_posenc.attention.bias_backends import score_bias
from hf_posenc.attention.dispatch import active_encodings, adds_score_bias
from hf_posenc.encodings import PositionContext, PositionEncoding, placed
from hf_posenc.modeling.offsets import range_of
from hf_posenc.modeling.text_batches import Features, real_tokens

MAX_IPF_ROUNDS, MAX_TURNS, IPF_TOLERANCE = 50, 10, 1e-4
"""Maximum number of rounds of proportional fitting, maximum number of turns of several encodings, and the relative error of
attention masses at which they end."""
ITERATIONS, BY_GRADIENTS, MEASURED = 30, 8, 8
"""Maximum number of L-BFGS iterations, of texts that they use, and of texts on which the divergence is measured."""
RUNS = 5
"""Number of runs that fit parameters shared by several attentions."""
FARTHEST = 2**24
"""A distance beyond all that encodings distinguish."""
LEAST = 1e-6
"""Attention mass below which a bias row counts as unseen."""


@dataclass
class Original:
    """Outputs of the original on a batch.

    attentions: path of an attention -> its probabilities in each call, `[N, H, L, L]` in bfloat16.
    contributions: path of a module -> its outputs for real tokens in each call, `[tokens, D]`.
    states: the last hidden states, `[N, L, D]`.
    """

    attentions: dict[str, list[Tensor]]
    contributions: dict[str, list[Tensor]]
    states: Tensor


@dataclass
class AttentionRecord:
    """One call of an attention of the patched model.

    goal: the original's probabilities, `[N, H, L, L]`.
    shown: which tokens are real, `[N, L]`.
    """

    encodings: list[PositionEncoding]
    query: Tensor
    key: Tensor
    context: PositionContext
    goal: Tensor
    shown: Tensor

    def texts(self) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """For each text, the original's probabilities `[H, Q, L]` of real queries, and a function that returns the model's log
        probabilities.

        L ends with the last real token, so that padding costs no time.
        """
        for i, shown in enumerate(self.shown):
            end = _end(shown)
            goal = self.goal[i][:, shown, :end].float()
            seen = self.seen[shown, :end] & shown[:end]
            yield goal, partial(self._log_probabilities, i, shown[:end], seen)

    @functools.cached_property
    def seen(self) -> Tensor:
        """Which keys each query position can attend to, `[L, L]`: those with a nonzero probability in any head of any text.
        A single probability may be rounded to 0, such as those below 6e-8 in float16."""
        return ((self.goal.amax(1) > 0) & self.shown[:, :, None]).any(0)

    def numbered(self) -> Iterator[tuple[tuple[Tensor, Callable[[], Tensor]], Tensor]]:
        """`texts`, each with a mask of its real tokens, `[L]`."""
        return zip(self.texts(), (shown[: _end(shown)] for shown in self.shown), strict=True)

    def _log_probabilities(self, text: int, shown: Tensor, seen: Tensor) -> Tensor:
        """Keys that the original masks (padding, later tokens, tokens beyond a window) are masked in the model also."""
        row, end = slice(text, text + 1), len(shown)
        own: dict[str, Any] = {
            name: value if value is None or isinstance(value, int) else (value if len(value) == 1 else value[row])[:, :end]
            for name in ("positions", "start", "keys")
            for value in (getattr(self.context, name),)
        }
        query, key = (states[row, :, :end].float() for states in (self.query, self.key))
        bias = score_bias(self.encodings, query, key, replace(self.context, computed={}, **own))
        scores = query @ key.transpose(2, 3) * self.context.scaling
        scores = (scores if bias is None else scores + bias)[0, :, shown]
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).log_softmax(-1)


def _end(shown: Tensor) -> int:
    """The number of tokens up to the last real one."""
    return int(shown.nonzero()[-1]) + 1


def states(stack: Any, batch: Mapping[str, Tensor], **asked: bool) -> Tensor:
    """Run a stack on a batch, regardless of its config's output and cache settings. Returns the last hidden states `[N, L, D]`.

    asked: further arguments of the stack.
    """
    cache = {} if isinstance(batch, Features) else {"use_cache": False}
    return stack(**batch, **cache, return_dict=True, **asked).last_hidden_state


def observed(stack: Any, attentions: Sequence[str], contributions: Sequence[str], batch: Mapping[str, Tensor]) -> Original:
    """Run an original stack on a batch. Its attention implementation must be "eager". Paths are relative to the stack."""
    original, shown = Original(defaultdict(list), defaultdict(list), torch.empty(0)), real_tokens(batch)
    square = (shown.shape[1],) * 2

    def attended(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        tensors = [each for each in output if isinstance(each, Tensor)]
        # T5's attentions also return their biases, which have the same shape for one text.
        found = next((each for each in tensors if each.ndim == 4 and each.shape[-2:] == square and _sums_to_1(each)), None)
        if found is None:
            raise UnsupportedModelError(
                f"{type(stack).__name__}.{path} doesn't return its attention probabilities, which calibration needs",
                reason="hidden attention probabilities",
                remedy="Patch the model, then distill it (python -m hf_posenc.training.distill).",
            )
        original.attentions[path].append(found.bfloat16())

    def contributed(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[:-1] in (
            shown.shape,
            (1, *shown.shape[1:]),
        ):  # an expert gets only some of the tokens
            original.contributions[path].append(_of_tokens(output, shown))

    with _hooked(stack, dict.fromkeys(attentions, attended)), _hooked(stack, dict.fromkeys(contributions, contributed)):
        original.states = states(stack, batch, output_attentions=True)
    return original


def _sums_to_1(tensor: Tensor) -> bool:
    """Whether the last dimension contains probabilities, up to the rounding of 16-bit floats."""
    sums = tensor.float().sum(-1)
    return bool(torch.allclose(sums, torch.ones_like(sums), atol=0.05)) and float(tensor.min()) >= 0


def calibrate(
    stack: Any, original: Original, batch: Mapping[str, Tensor], progress: Callable[[], Any]
) -> list[tuple[float, float]]:
    """Fit the encodings and `MeanOffset`s of a patched stack. It calls `progress` after each attention of each run.

    Returns the divergence of each attention call, before and after calibration.
    """
    return _Calibration(stack, original, real_tokens(batch), progress).run(batch)


def runs(original: Original, stack: Any) -> int:
    """Number of runs of the model in `calibrate`. Shared parameters need several runs, and one more for measuring."""
    shared = any(map(trained, stack.posenc.named_parts().values()))
    return RUNS + 1 if shared or any(len(calls) > 1 for calls in original.attentions.values()) else 1


class _Calibration:
    count: Counter[str]
    calls: list[AttentionRecord]
    gaps: dict[str, list[Tensor]]

    def __init__(self, stack: Any, original: Original, shown: Tensor, progress: Callable[[], Any]) -> None:
        self.stack, self.original, self.shown, self.progress = stack, original, shown, progress
        self.before: dict[tuple[str, int], float] = {}
        self.after: dict[tuple[str, int], float] = {}
        self.runs = runs(original, stack)

    @torch.no_grad()
    def run(self, batch: Mapping[str, Tensor]) -> list[tuple[float, float]]:
        with self._watching():
            for number in range(self.runs):
                self.is_last = number == self.runs - 1
                self.count, self.calls, self.gaps = Counter(), [], defaultdict(list)
                states(self.stack, batch)
                if not self.is_last:
                    fit(self.calls)
                    for path, gaps in self.gaps.items():
                        self.stack.get_submodule(path).posenc.weight += torch.cat(gaps).median(0).values
        return [(self.before[call], self.after[call]) for call in self.before]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Calls `attended` for each attention before its bias is computed, and `contributed` with each block's output."""
        modules = {path: self.stack.get_submodule(path) for path in self.original.attentions}
        own = {path: getattr(module, "posenc", None) for path, module in modules.items()}
        for path, module in modules.items():
            module.posenc = _CallRecorder(own[path], partial(self.attended, path, module))
        try:
            with _hooked(self.stack, dict.fromkeys(self.original.contributions, self.contributed)):
                yield
        finally:
            for path, module in modules.items():
                del module.posenc
                if own[path] is not None:
                    module.posenc = own[path]

    def attended(self, path: str, module: nn.Module, query: Tensor, key: Tensor, context: PositionContext) -> None:
        number = self.count[path]
        self.count[path] += 1
        encodings = [encoding for encoding in active_encodings(module, context) if not isinstance(encoding, _CallRecorder)]
        goals = self.original.attentions[path]
        if number == len(goals):
            raise UnsupportedModelError(
                f"{type(self.stack).__name__}.{path} attends several times but returns fewer attention probabilities, "
                "which calibration needs",
                reason="hidden attention probabilities",
                remedy="Patch the model, then distill it (python -m hf_posenc.training.distill).",
            )
        call = AttentionRecord(encodings, query, key, context, goals[number], self.shown)
        if (path, number) not in self.before:
            self.before[path, number] = divergence([call])
        if self.runs == 1:
            fit([call])
        elif not self.is_last:
            self.calls.append(call)
        if self.is_last:
            self.after[path, number] = divergence([call])
        self.progress()

    @functools.cached_property
    def positions(self) -> Tensor:
        """Of real tokens, `[tokens]`."""
        return (self.shown.cumsum(1) - 1)[self.shown]

    def contributed(self, path: str, module: Any, args: tuple, output: Tensor) -> Tensor:
        number = self.count[f"{path} contributed"]
        self.count[f"{path} contributed"] += 1
        calls = self.original.contributions[path]
        gaps = calls[number].float() - _of_tokens(output, self.shown).float()
        if len(calls) > 1:
            self.gaps[path].append(gaps)
            return output
        gap = self._medians(gaps, module.posenc.weight)
        module.posenc.weight += gap
        return module.posenc.added(output, gap)

    def _medians(self, gaps: Tensor, weight: Tensor) -> Tensor:
        """The medians of vectors `[tokens, D]`, in the shape of the weight of a MeanOffset.

        A range without tokens gets the vector of the one before.
        """
        if weight.ndim == 1:
            return gaps.median(0).values
        ranges = range_of(self.positions, len(weight))
        medians: list[Tensor] = []
        for number in range(len(weight)):
            inside = gaps[ranges == number]
            medians.append(inside.median(0).values if len(inside) else medians[-1])
        return torch.stack(medians)


class _CallRecorder(PositionEncoding):
    """A part added before an attention's own encodings. It observes each call before their biases are computed."""

    observes = True

    def __init__(self, own: PositionEncoding | None, watch: Callable[[Tensor, Tensor, PositionContext], None]) -> None:
        nn.Module.__init__(self)
        self.own, self.watch = own, watch

    def named_parts(self) -> dict[str, PositionEncoding]:
        return {"watch": self, **(self.own.named_parts() if self.own is not None else {})}

    def score_bias(self, query: Tensor, key: Tensor, context: PositionContext) -> None:
        self.watch(query, key, context)


def trained(encoding: PositionEncoding) -> list[nn.Parameter]:
    """The trainable parameters of an encoding's bias. Empty if it adds no bias."""
    return [parameter for parameter in encoding.parameters() if parameter.requires_grad] if adds_score_bias(encoding) else []


def fit(calls: Sequence[AttentionRecord]) -> None:
    """Minimize the divergence over these calls with respect to the parameters of all their encodings."""
    encodings = [e for e in dict.fromkeys(e for call in calls for e in call.encodings) if trained(e)]
    dtypes = [next(encoding.parameters()).dtype for encoding in encodings]
    for encoding in encodings:
        placed(encoding, next(encoding.parameters()).device, torch.float32)
    if encodings and not _fit_in_proportion(encodings, calls):
        _fit_by_gradients(encodings, calls)
    for encoding, dtype in zip(encodings, dtypes, strict=True):
        placed(encoding, next(encoding.parameters()).device, dtype)


def divergence(calls: Sequence[AttentionRecord]) -> float:
    """Mean KL(original ‖ model) over heads and real queries of up to MEASURED texts of each call, in nats."""
    texts = [text for call in calls for text in islice(call.texts(), MEASURED)]
    return sum(float(_divergence(*text)) for text in texts) / sum(goal.shape[:2].numel() for goal, _ in texts)


def _divergence(goal: Tensor, log_probabilities: Callable[[], Tensor]) -> Tensor:
    return F.kl_div(log_probabilities(), goal, reduction="sum")


def _fit_in_proportion(encodings: Sequence[PositionEncoding], calls: Sequence[AttentionRecord]) -> bool:
    """Iterative proportional fitting. Returns False if a bias doesn't have one free number for each head and row.

    A change of one number multiplies the probabilities of its row, so each query's sums over rows are sufficient. Several
    encodings are fitted in turns.
    """
    length = calls[0].goal.shape[-1]
    distance = torch.arange(1 - length, length, device=calls[0].query.device)
    rows = [(encoding, encoding.rows(distance)) for encoding in encodings]
    if any(row is None for _, row in rows):
        return False
    for _ in range(MAX_TURNS if len(rows) > 1 else 1):
        largest = 0.0
        for encoding, row in rows:
            count, acted = row_count(encoding), [call for call in calls if encoding in call.encodings]
            texts = [(each, shown, call.context.extra_tokens) for call in acted for each, shown in call.numbered()]
            by_row = partial(_by_row, rows=row, count=count)  # type: ignore[arg-type]
            goal = _total(by_row(each, shown, extra).sum(1) for (each, _), shown, extra in texts)
            given = [by_row(log().exp(), shown, extra) for (_, log), shown, extra in texts]
            amounts = _proportional_amounts(goal, given)
            # Adding a number to all rows changes nothing, so extra tokens keep a bias of 0.
            amounts = amounts[:, :count] - amounts[:, count:].sum(1, keepdim=True)
            if not encoding.add_to_bias_rows(amounts):
                return False
            largest = max(largest, float(amounts.abs().max()))
        if largest < IPF_TOLERANCE:
            break
    return True


def _proportional_amounts(goal: Tensor, given: Sequence[Tensor]) -> Tensor:
    """What to add to each row's bias so that the probabilities `[H, Q, R]` of all texts sum up to `goal`. Both are `[H, R]`."""
    goal, amounts = goal.clamp(min=LEAST), torch.zeros_like(goal)
    for _ in range(MAX_IPF_ROUNDS):
        factors = amounts.exp()[..., None]
        masses = (each.transpose(1, 2) @ (each @ factors).reciprocal() for each in given)
        now = (_total(masses) * factors)[..., 0].clamp(min=LEAST)
        amounts += (goal / now).log()
        if float((goal - now).abs().sum() / goal.sum()) < IPF_TOLERANCE:
            break
    return amounts


def _total(masses: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, masses)


def row_count(encoding: PositionEncoding) -> int:
    """The number of an encoding's bias rows. 0 if it has none."""
    ends = encoding.rows(torch.tensor([-FARTHEST, 0, 1, FARTHEST]))
    return 0 if ends is None else int(ends.max()) + 1


def _by_row(probabilities: Tensor, shown: Tensor, extra: tuple[int, int], *, rows: Tensor, count: int) -> Tensor:
    """Probabilities `[H, Q, L]` of the shown queries, summed by bias row: `[H, Q, R]`.

    extra: number of tokens before and after the others that have no position (of images). They have a row of their own.
    rows: the row of each distance, from the smallest to the largest.
    """
    places = torch.arange(len(shown), device=shown.device)
    middle = len(rows) // 2  # the row of distance 0
    index = rows[places - places[shown][:, None] + middle]
    if any(extra):
        outside = (places < extra[0]) | (places >= len(places) - extra[1])
        index = index.masked_fill(outside | outside[shown][:, None], count)
    index = index.expand(len(probabilities), -1, -1)
    return probabilities.new_zeros(*index.shape[:2], count + any(extra)).scatter_add_(2, index, probabilities)


def _fit_by_gradients(encodings: Sequence[PositionEncoding], calls: Sequence[AttentionRecord]) -> None:
    parameters = [parameter for encoding in encodings for parameter in trained(encoding)]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=ITERATIONS, tolerance_change=IPF_TOLERANCE, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        optimizer.zero_grad()
        total = 0.0
        for text in (text for call in calls for text in islice(call.texts(), BY_GRADIENTS)):
            with torch.enable_grad():
                part = _divergence(*text) / (len(calls) * text[0].shape[:2].numel())
            part.backward(inputs=parameters)
            total += part.item()
        return total

    optimizer.step(loss)
    optimizer.zero_grad()


def _of_tokens(output: Tensor, shown: Tensor) -> Tensor:
    """The hidden states of real tokens, `[tokens, D]`, from `[1 or N, L, D]`."""
    return output.expand(*shown.shape, -1)[shown]


@contextmanager
def _hooked(stack: nn.Module, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    handles = [stack.get_submodule(path).register_forward_hook(partial(hook, path)) for path, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
