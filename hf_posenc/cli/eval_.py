"""hf-posenc eval"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import FILES, Queries, TextColumn
from hf_posenc.cli.output import AsJson, Output, by_length, comparison

if TYPE_CHECKING:
    from rich.table import Table

    from hf_posenc.cli.folders import Original
    from hf_posenc.evaluation.classification import Accuracy, Classification
    from hf_posenc.evaluation.masked_losses import MaskedLoss
    from hf_posenc.evaluation.model_comparison import Pair
    from hf_posenc.evaluation.passkeys import PasskeyAccuracy
    from hf_posenc.evaluation.perplexity import Perplexity

PERPLEXITY, MASKED, ACCURACY, RETRIEVAL = "perplexity", "masked loss", "accuracy", "retrieval"
"""How causal language models, masked language models, classifiers, and other models are evaluated."""
KINDS = {PERPLEXITY: "causal language models", ACCURACY: "classifiers", RETRIEVAL: "embedding models"}
COUNTS = {PERPLEXITY: 32, MASKED: 32, RETRIEVAL: 200}
"""Default maximum number of texts. Classifiers are evaluated on all texts."""
KEYS = 4
"""Default number of passkeys per depth."""


@app.command("eval", cls=ModelCommand)
def eval_(
    models: Annotated[
        list[str],
        typer.Argument(help="Local paths or Hub IDs of models of one kind. The first is the baseline."),
    ],
    texts: Annotated[Path, typer.Option(help=f"File with long in-domain texts ({FILES}).")],
    text_column: TextColumn = "text",
    label_column: Annotated[
        str | None,
        typer.Option(help="Classifiers: column of --texts with class names or IDs.", show_default="label"),
    ] = None,
    queries: Queries = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Input length in tokens. Can be repeated.", show_default="doubling up to the texts' length"),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help="Embedding models: also evaluate chunks of this many tokens.", show_default="none"),
    ] = None,
    passkey: Annotated[bool, typer.Option("--passkey", help="Causal language models: also measure passkey retrieval.")] = False,
    keys: Annotated[
        int | None, typer.Option(min=1, help="Number of passkeys at each of 5 depths.", show_default=str(KEYS))
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of texts, from the start.",
            show_default=f"{COUNTS[PERPLEXITY]} for language models, {COUNTS[RETRIEVAL]} for embedding models",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare models by input length.

    The measure depends on the kind of the models. All differences are from the first model, over the same texts, with 95%
    intervals that aren't corrected for multiple comparisons.

    Embedding models are compared by retrieval MRR with documents cut at each length. Texts beyond a model's maximum length are
    truncated and chunked. With --chunks, all models also read chunks of this size.

    Causal language models are compared by perplexity in sliding windows, and with --passkey by the share of numbers that they
    find in filler text. Masked language models are compared by their loss on the same tokens with increasing context.

    Sequence classifiers are compared by accuracy and macro-F1 on texts of increasing length.

    Examples:
    [bold]hf-posenc eval bert-base-uncased bert-alibi --texts my.jsonl --length 64 --length 128[/]
    [bold]hf-posenc eval gpt2 gpt2-alibi --texts my.jsonl --length 128 --count 2 --passkey --keys 1[/]
    """
    from hf_posenc.cli.folders import Original, names_of
    from hf_posenc.cli.texts import labeled_texts_in, pairs_in, texts_in

    if keys is not None and not passkey:
        raise ValueError(f"--keys {keys} applies only to --passkey. Add --passkey, or omit --keys.")
    names, labels = names_of(models), list[str | int]()
    pairs = pairs_in(queries)
    rows = texts_in(texts, text_column)
    loaded = {name: Original.load(model) for name, model in zip(names, models, strict=True)}
    kind = _kind_of_all(loaded)
    for flag, given, of in (
        ("--queries", queries, RETRIEVAL),
        ("--chunks", chunks, RETRIEVAL),
        ("--passkey", passkey or None, PERPLEXITY),
        ("--label-column", label_column, ACCURACY),
    ):
        if given is not None and kind != of:
            raise ValueError(
                f"{flag} doesn't apply to {names[0]}, which is evaluated by {kind}. It applies to {KINDS[of]}. Omit {flag}."
            )
    out, lengths, most = Output(as_json), sorted({*(length or ())}), count or COUNTS.get(kind)
    if kind == ACCURACY:
        rows, labels = labeled_texts_in(texts, text_column, label_column or "label")
        found = _accuracies(out, loaded, rows[:most], labels[:most], lengths)
    elif kind == RETRIEVAL:
        found = _retrieval(out, loaded, rows[:most], pairs[:most], lengths, chunks)
    elif kind == MASKED:
        found = _masked_losses(out, loaded, rows[:most], lengths)
    else:
        found = _perplexities(out, loaded, rows[:most], lengths, (keys or KEYS) if passkey else 0)
    out.document({"measure": kind, **found})


def _kind_of_all(models: "dict[str, Original]") -> str:
    """How the models are evaluated. Raises ValueError if they differ, or if one has no tokenizer."""
    if without := [name for name, each in models.items() if each.tokenizer is None]:
        raise ValueError(f"{without[0]} has no tokenizer. Save one in its directory.")
    kinds = {name: _kind(each.model) for name, each in models.items()}
    if len({*kinds.values()}) > 1:
        raise ValueError(
            "The models are evaluated in different ways: "
            + ", ".join(f"{name} by {kind}" for name, kind in kinds.items())
            + ". Run eval once for each kind."
        )
    return next(iter(kinds.values()))


def _kind(model: Any) -> str:
    from hf_posenc.cli.folders import inner_model
    from hf_posenc.diagnostics.length_curves import is_language_model, measure_of
    from hf_posenc.evaluation.classification import is_classifier

    if model is not inner_model(model):
        return RETRIEVAL
    if is_classifier(model):
        return ACCURACY
    if not is_language_model(model):
        return RETRIEVAL
    return PERPLEXITY if measure_of(model) == "loss" else MASKED


def _retrieval(
    out: Output,
    models: "dict[str, Original]",
    texts: list[str],
    pairs: "list[Pair]",
    lengths: list[int],
    chunks: int | None,
) -> dict[str, Any]:
    from hf_posenc.cli.folders import embedder
    from hf_posenc.evaluation import model_comparison

    embedders = {name: embedder(each.model, each.tokenizer) for name, each in models.items()}
    for name, each in embedders.items():
        if chunks is not None and each.limit is not None and chunks > each.limit:
            raise ValueError(f"--chunks {chunks} is above the maximum length of {name}. Choose at most {each.limit}.")
    first = next(iter(embedders.values()))
    about = f"{len(pairs)} of your queries"
    if not pairs:
        pairs, about = model_comparison.synthetic_pairs(first, texts)
    elif len(pairs) < model_comparison.FEWEST:
        raise ValueError(f"--count {len(pairs)} is too small for queries. Choose at least {model_comparison.FEWEST}.")
    if not lengths:
        lengths = model_comparison.lengths_of(first, [pair.document for pair in pairs], None)
        out.message(model_comparison.REACH)
    if chunks is not None and chunks >= lengths[-1]:
        out.message(f"No length is above --chunks {chunks}, so the documents are not divided into chunks of this size.")
    found = model_comparison.compare_models(embedders, pairs, lengths, chunks)
    out.result(comparison(found, f"{about}: MRR (and the improvement over the first method)", [*models]))
    rows = {tokens: {name: asdict(row) for name, row in rows.items()} for tokens, rows in found.items()}
    return {"questions": about, "rows": rows}


def _masked_losses(out: Output, models: "dict[str, Original]", texts: list[str], lengths: list[int]) -> dict[str, Any]:
    from hf_posenc.diagnostics import length_curve
    from hf_posenc.evaluation import masked_losses
    from hf_posenc.evaluation.metrics import UNCORRECTED
    from hf_posenc.inspection import supported_length

    texts = _checked(out, models, texts)
    losses: dict[int, dict[str, Any]] = {}
    for name, each in models.items():
        most = supported_length(each.model)
        chosen = [length for length in lengths if most is None or length <= most] or None
        if lengths and chosen is None:
            out.message(f"{name} supports none of these lengths and is omitted.")
            continue
        curve = length_curve(each.model, texts, tokenizer=each.tokenizer, lengths=chosen)
        for number, tokens in enumerate(curve.lengths):
            losses.setdefault(tokens, {})[name] = curve.by_text[:, number].numpy()
    if not losses:
        raise ValueError(f"No model supports {lengths[0]} tokens. Choose smaller lengths.")
    losses = dict(sorted(losses.items()))
    rows = masked_losses.compared(losses, next(iter(models)))
    cells = {tokens: {name: _shown_loss(row) for name, row in by.items()} for tokens, by in rows.items()}
    about = f"loss in nats per masked token, {len(texts)} texts (and the difference from the first model)"
    out.result(by_length(about, cells, caption=UNCORRECTED))
    return {
        "texts": len(texts),
        "rows": {tokens: {name: asdict(row) for name, row in by.items()} for tokens, by in rows.items()},
    }


def _perplexities(
    out: Output, models: "dict[str, Original]", texts: list[str], lengths: list[int], keys: int
) -> dict[str, Any]:
    from hf_posenc.evaluation import perplexity
    from hf_posenc.evaluation.metrics import UNCORRECTED
    from hf_posenc.evaluation.model_comparison import REACH, doubled
    from hf_posenc.inspection import supported_length

    texts, first = _checked(out, models, texts), next(iter(models))
    limits = {name: supported_length(each.model) for name, each in models.items()}
    longest = None if None in limits.values() else max(limit for limit in limits.values() if limit is not None)
    if not lengths:
        sizes = [len(ids) for ids in perplexity.read_ids(models[first].tokenizer, texts, None)]
        lengths = sorted({min(length, longest or length) for length in doubled(sizes, longest)})
        out.message(REACH)
    for length in [length for length in lengths if longest is not None and length > longest]:
        out.message(f"No model supports {length} tokens, so this length is omitted.")
        lengths.remove(length)
    if not lengths:
        raise ValueError(f"No model supports these lengths. Choose lengths of at most {longest} tokens.")
    for name, limit in limits.items():
        if limit is not None and limit < lengths[-1]:
            out.message(f"{name} supports {limit} tokens. Its perplexity beyond them is that of windows of {limit} tokens.")
    pairs = {name: (each.model, each.tokenizer) for name, each in models.items()}
    rows = perplexity.evaluate(pairs, texts, lengths, first)
    cells = {
        tokens: {name: _shown_perplexity(row, tokens, name == first) for name, row in by.items()} for tokens, by in rows.items()
    }
    about = f"perplexity by window size, {len(texts)} texts (and the ratio to the first model)"
    out.result(by_length(about, cells, caption=UNCORRECTED))
    found = {
        "texts": len(texts),
        "rows": {tokens: {name: asdict(row) for name, row in by.items()} for tokens, by in rows.items()},
    }
    if keys:
        found["passkeys"] = _passkeys(out, pairs, limits, lengths, keys)
    return found


def _passkeys(
    out: Output, models: dict[str, tuple[Any, Any]], limits: dict[str, int | None], lengths: list[int], keys: int
) -> dict[int, dict[str, Any]]:
    from hf_posenc.evaluation import passkeys
    from hf_posenc.evaluation.metrics import UNCORRECTED

    least = passkeys.least_length(next(iter(models.values()))[1])
    if short := [length for length in lengths if length < least]:
        out.message(f"Passkeys need inputs of at least {least} tokens, so {_numbers(short)} tokens are omitted.")
    lengths = [length for length in lengths if length >= least]
    for name, limit in limits.items():
        if limit is not None and (long := [length for length in lengths if length > limit]):
            out.message(f"{name} supports {limit} tokens, so passkeys in {_numbers(long)} tokens are omitted for it.")
    rows = passkeys.evaluate(models, lengths, keys)
    if not rows:
        out.message("No length is left for passkeys.")
        return {}
    cells: dict[int, dict[str, str]] = {}
    names = [name for name in models if any(name in by for by in rows.values())]
    for tokens, by in rows.items():
        cells[tokens] = {}
        for name in names:
            cells[tokens][name] = _shown_passkeys(by[name]) if name in by else ""
            for depth in passkeys.DEPTHS:
                cells[tokens][f"{name}, depth {depth:.0%}"] = f"{by[name].by_depth[depth]:.2f}" if name in by else ""
    about = f"share of {len(passkeys.DEPTHS) * keys} passkeys found (and the difference from the first model)"
    out.result(by_length(about, cells, caption=UNCORRECTED))
    return {tokens: {name: asdict(row) for name, row in by.items()} for tokens, by in rows.items()}


def _accuracies(
    out: Output, models: "dict[str, Original]", texts: list[str], labels: list[str | int], lengths: list[int]
) -> dict[str, Any]:
    from hf_posenc.evaluation import classification
    from hf_posenc.evaluation.model_comparison import SHORTEST

    first = next(iter(models.values()))
    if not lengths:
        longest = max(classification.token_counts(first.tokenizer, texts))
        lengths = [SHORTEST]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
    pairs = {name: (each.model, each.tokenizer) for name, each in models.items()}
    found = classification.compare_classifiers(pairs, texts, labels, lengths)
    out.result(_buckets(found))
    return asdict(found)


def _buckets(found: "Classification") -> "Table":
    """Accuracy by length, with a row per model."""
    from rich.table import Table

    from hf_posenc.evaluation.metrics import UNCORRECTED

    about = "accuracy, macro-F1 (and the difference in accuracy from the first model) by number of tokens"
    table = Table(title=about, caption=UNCORRECTED)
    table.add_column("model", overflow="fold")
    for each in found.buckets:
        where = f"more than {each.above}" if each.up_to is None else f"{each.above + 1} to {each.up_to}"
        table.add_column(f"{where} ({each.texts} texts)", justify="right")
    table.add_column(f"all ({found.all.texts} texts)", justify="right")
    for name in found.all.rows:
        table.add_row(name, *(_shown_accuracy(each.rows[name]) for each in (*found.buckets, found.all)))
    return table


def _checked(out: Output, models: "dict[str, Original]", texts: list[str]) -> list[str]:
    """The texts of two or more tokens. Raises ValueError for fewer than two, and for models that tokenize them differently."""
    from hf_posenc.evaluation.perplexity import read_ids

    (first, baseline), *others = models.items()
    ids = read_ids(baseline.tokenizer, texts, None)
    for name, each in others:
        if any(own.tolist() != its.tolist() for own, its in zip(ids, read_ids(each.tokenizer, texts, None), strict=True)):
            raise ValueError(
                f"{first} and {name} tokenize the texts differently, so their losses can't be compared. Run eval for each "
                "model."
            )
    long = [text for text, own in zip(texts, ids, strict=True) if len(own) > 1]
    if len(long) < len(texts):
        out.message(f"{len(texts) - len(long)} texts of fewer than 2 tokens are omitted.")
    if len(long) < 2:
        raise ValueError(f"{len(long)} texts are too few for intervals. Use two or more texts of two or more tokens.")
    return long


def _numbers(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths))


def _interval(low: float, high: float) -> str:
    return f"[{low:.2f}, {high:.2f}]"


def _shown_loss(row: "MaskedLoss") -> str:
    return f"{row.loss:.3f} {_interval(*row.interval)}" + (f" ({row.difference.shown(3)})" if row.difference else "")


def _shown_perplexity(row: "Perplexity", length: int, first: bool) -> str:
    ratio = "" if first else f" ({row.shown_ratio()})"
    return row.shown() + ratio + ("" if row.window == length else f", windows of {row.window}")


def _shown_passkeys(row: "PasskeyAccuracy") -> str:
    return f"{row.accuracy:.2f} {_interval(*row.interval)}" + (f" ({row.difference.shown()})" if row.difference else "")


def _shown_accuracy(row: "Accuracy") -> str:
    shown = f"{row.accuracy:.3f} {_interval(*row.interval)}, {row.macro_f1:.3f}"
    return shown + (f" ({row.difference.shown()})" if row.difference else "")
