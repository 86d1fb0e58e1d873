"""The verdict of a comparison: the best method, and the methods that the data don't distinguish from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The best of several methods.

    best, baseline: names of methods. The baseline is the first.
    better: whether the paired interval of the best method and the baseline excludes no difference. None if they are the same.
    undistinguished: the methods whose paired interval with the best includes no difference.
    cheapest: the one with the fewest vectors per document, of the best and these. None if methods don't differ in cost.
    sentence: all of this in words.
    """

    best: str
    baseline: str
    better: bool | None
    undistinguished: tuple[str, ...]
    cheapest: str | None
    sentence: str


def verdict(
    place: str,
    metric: str,
    shown: Mapping[str, str],
    best: str,
    paired: Callable[[str, str], tuple[str, bool]],
    vectors: Mapping[str, float] | None = None,
) -> Verdict:
    """The verdict on methods that were compared on the same texts.

    Args:
        place: the start of the sentence, such as "At 1024 tokens".
        metric: its name.
        shown: method -> its score as text. The first method is the baseline.
        best: the method with the best score.
        paired: two methods -> their difference with its interval as text, and whether the interval excludes no difference.
        vectors: method -> number of vectors per document. Of methods with equal numbers, an earlier one is cheaper.
    """
    first = next(iter(shown))
    said, better = [f"{place}, {best!r} has the best {metric} ({shown[best]})."], None
    if best == first:
        said.append("It is the baseline.")
    else:
        text, better = paired(best, first)
        said.append(f"Its difference from the baseline {first!r} is {'' if better else 'not '}significant ({text}).")
    level = tuple(name for name in shown if name != best and not paired(best, name)[1])
    cheapest = None
    if level:
        said.append(f"These texts don't distinguish it from {_listed(level)}.")
    elif len(shown) > 2:
        said.append("It differs significantly from every other method.")
    if vectors is not None:
        cheapest = min((best, *level), key=lambda name: (vectors[name], [*shown].index(name)))
        if level:
            amount = f"{vectors[cheapest]:.3g} vector{'' if vectors[cheapest] == 1 else 's'} per document"
            said.append(f"The cheapest of these is {cheapest!r}, with {amount}.")
    return Verdict(best, first, better, level, cheapest, " ".join(said))


def _listed(names: tuple[str, ...]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
