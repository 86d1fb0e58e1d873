"""Do the papers' claims hold for tiny decoders? A study and a verdict for each of ALiBi, NoPE, FIRE, CoPE, and FoX.

    python -m experiments.claims alibi --processes 2 --output_dir OUT     # or nope, fire, cope, fox

Runs the study in experiments/studies/NAME.yaml, as `hf-posenc compare` does, with the same files in --output_dir and the same
resumption. Then it writes NAME.txt and NAME.json with a verdict on each claim. Differences and ratios are paired by seed. A
claim is reproduced if Student's 95% interval is on its side of the bound, and contradicted if it is on the other side.

These models have three layers and read bytes or symbols, so a claim that isn't reproduced here can hold at scale.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_posenc import compare
from hf_posenc.evaluation import records, terminals
from hf_posenc.serialization.atomic import write_text
from hf_posenc.studies import study
from hf_posenc.studies.results import Mean

STUDIES = Path(__file__).with_name("studies")
REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"


@dataclass(frozen=True)
class Claim:
    """A claim about a score: that it is above (sign 1) or below (sign -1) a bound.

    The score is that of `encoding` at a multiple of L, minus that of `other` at the same length, or divided by that of
    `encoding` at L if there is no `other`.
    """

    text: str
    task: str
    metric: str
    multiple: float
    encoding: str
    sign: int
    other: str | None = None
    bound: float = 0.0


def better(task: str, metric: str, multiples: tuple[float, ...], encoding: str, others: tuple[str, ...]) -> list[Claim]:
    """Claims that an encoding is better than each of the others."""
    lower = metric == "perplexity"
    return [
        Claim(
            f"{task} at {multiple:g} L: {metric} of {encoding} {'below' if lower else 'above'} {other}",
            *(task, metric, multiple, encoding, -1 if lower else 1, other),
        )
        for multiple in multiples
        for other in others
    ]


def flat(encoding: str, multiple: float, bound: float = 1.05) -> Claim:
    text = f"clm: perplexity of {encoding} at {multiple:g} L at most {bound} times that at L"
    return Claim(text, "clm", "perplexity", multiple, encoding, -1, bound=bound)


def grows(encoding: str, multiple: float, bound: float = 1.5) -> Claim:
    text = f"clm: perplexity of {encoding} at {multiple:g} L at least {bound} times that at L"
    return Claim(text, "clm", "perplexity", multiple, encoding, 1, bound=bound)


CLAIMS: dict[str, tuple[str, list[Claim]]] = {
    "alibi": (
        "Press et al., 2022: https://arxiv.org/abs/2108.12409",
        [flat("alibi", 4), flat("alibi", 8), grows("sinusoidal", 8), grows("rope", 8)]
        + better("clm", "perplexity", (4, 8), "alibi", ("sinusoidal", "rope")),
    ),
    "nope": (
        "Kazemnejad et al., 2023: https://arxiv.org/abs/2305.19466",
        [
            claim
            for task in ("copy", "reverse")
            for claim in better(task, "tokens", (2,), "none", ("alibi", "rope", "sinusoidal", "t5"))
        ],
    ),
    "fire": (
        "Li et al., 2024: https://arxiv.org/abs/2310.04418",
        better("clm", "perplexity", (2, 4, 8), "fire", ("alibi", "kerple", "t5", "rope")),
    ),
    "cope": (
        "Golovneva et al., 2024: https://arxiv.org/abs/2405.18719",
        better("counting", "accuracy", (1, 2, 4), "cope", ("rope", "sinusoidal", "relative")),
    ),
    "fox": (
        "Lin et al., 2025: https://arxiv.org/abs/2503.02130",
        better("clm", "perplexity", (1, 4, 8), "fox", ("rope", "alibi")) + [flat("fox", 4), flat("fox", 8)],
    ),
}
"""Study -> the paper and its claims."""


def value(record: Mapping[str, Any], claim: Claim, encoding: str, multiple: float) -> dict[int, float]:
    """Seed -> the score of an encoding."""
    where = {"task": claim.task, "metric": claim.metric, "encoding": encoding, "multiple": multiple}
    rows = (row for row in record["rows"] if where.items() <= row.items())
    return {row["seed"]: math.inf if row["value"] is None else row["value"] for row in rows}


def judge(record: Mapping[str, Any], claim: Claim) -> dict[str, Any]:
    """The verdict on a claim, with the mean over seeds that it is based on and half the width of its interval."""
    ours = value(record, claim, claim.encoding, claim.multiple)
    if claim.other is None:
        base = value(record, claim, claim.encoding, 1.0)
        found = Mean(tuple(ours[seed] / base[seed] for seed in sorted(ours.keys() & base.keys())))
    else:
        base = value(record, claim, claim.other, claim.multiple)
        found = Mean(tuple(ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())))
    distance = claim.sign * (found.mean - claim.bound)
    open_ = found.half is None or abs(distance) <= found.half
    answer = UNDECIDED if open_ else REPRODUCED if distance > 0 else CONTRADICTED
    return {"claim": claim.text, "verdict": answer, "mean": found.mean, "half_width": found.half, "shown": found.shown(3)}


def summary(name: str, verdicts: list[dict[str, Any]]) -> str:
    counts = {answer: sum(each["verdict"] == answer for each in verdicts) for answer in (REPRODUCED, CONTRADICTED, UNDECIDED)}
    return f"{name}: of {len(verdicts)} claims, {', '.join(f'{count} {answer}' for answer, count in counts.items())}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CLAIMS)
    parser.add_argument("--output_dir", type=Path, required=True)
    given, others = parser.parse_known_args(argv)
    compare.main([str(STUDIES / f"{given.name}.yaml"), "--output_dir", str(given.output_dir), *others])
    record, (paper, claims) = records.read(given.output_dir / "compare.json"), CLAIMS[given.name]
    verdicts = [judge(record, claim) for claim in claims]
    lines = [f"{each['verdict']:12} {each['claim']}: {each['shown']}" for each in verdicts]
    head = [paper, "Differences or ratios: mean over seeds ± half the width of Student's 95% interval, uncorrected.", ""]
    text = "\n".join([*head, *lines, "", summary(given.name, verdicts)]) + "\n"
    write_text(given.output_dir / f"{given.name}.txt", text)
    records.write(given.output_dir / f"{given.name}.json", {**record, "paper": paper, "verdicts": verdicts})
    print(text)


if __name__ == "__main__":
    terminals.set_up()
    study.quiet()
    main()
