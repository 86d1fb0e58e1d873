"""hf-posenc eval"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import FILES, Queries, TextColumn
from hf_posenc.cli.output import AsJson, Output, by_length, comparison

if TYPE_CHECKING:
    from hf_posenc.cli.folders import Original
    from hf_posenc.evaluation.model_comparison import Pair

LOSS, RETRIEVAL = "their loss", "retrieval"
"""How language models and other models are evaluated."""
DOCUMENTS = 200
"""Maximum number of documents that are searched."""


@app.command("eval", cls=ModelCommand)
def eval_(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Local paths or Hub IDs. The first is the baseline. Use only language models or only embedding models."
        ),
    ],
    texts: Annotated[Path, typer.Option(help=f"File with long in-domain texts ({FILES}).")],
    text_column: TextColumn = "text",
    queries: Queries = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Input length in tokens. Can be repeated.", show_default="doubling up to the texts' length"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of texts for language models, from the start.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Compare models by input length.

    Language models are compared by their loss on the same tokens after more and more context (nats per token ± standard error).

    Other models are compared by retrieval MRR with documents truncated to each length, and by the difference from the first
    model (95% CI). Texts beyond a model's maximum length are truncated and chunked.

    Example:
    [bold]hf-posenc eval bert-base-uncased bert-alibi --texts my.jsonl --length 64 --length 128[/]
    """
    from hf_posenc.cli.folders import Original, names_of
    from hf_posenc.cli.texts import pairs_in, texts_in

    names = names_of(models)
    rows, pairs = texts_in(texts, text_column), pairs_in(queries)
    loaded = {name: Original.load(model) for name, model in zip(names, models, strict=True)}
    kinds = {name: _kind(each) for name, each in loaded.items()}
    if len({*kinds.values()}) > 1:
        raise ValueError(
            "The models are evaluated in different ways: "
            + ", ".join(f"{name} by {kind}" for name, kind in kinds.items())
            + ". Run eval once for each kind."
        )
    if without := [name for name, each in loaded.items() if each.tokenizer is None]:
        raise ValueError(f"{without[0]} has no tokenizer. Save one in its directory.")
    kind, lengths = kinds[names[0]], sorted({*(length or ())})
    out = Output(as_json)
    if kind == RETRIEVAL:
        out.document(_retrieval(out, loaded, rows[:DOCUMENTS], pairs[:DOCUMENTS], lengths))
    elif queries is not None:
        raise ValueError(
            f"--queries {queries} doesn't apply to {names[0]}: language models are evaluated by their loss. Omit --queries."
        )
    else:
        out.document(_losses(out, loaded, rows[:count], lengths))


def _kind(given: "Original") -> str:
    from hf_posenc.cli.folders import inner_model
    from hf_posenc.diagnostics.length_curves import is_language_model

    language = given.model is inner_model(given.model) and is_language_model(given.model)
    return LOSS if language else RETRIEVAL


def _losses(out: Output, models: "dict[str, Original]", texts: list[str], lengths: list[int]) -> dict[str, Any]:
    from hf_posenc import diagnostics

    curves = {}
    for name, each in models.items():
        chosen = [length for length in lengths if length <= _usable(each.model, length)] or None
        if lengths and chosen is None:
            out.message(f"{name} supports none of these lengths and is omitted.")
            continue
        curves[name] = diagnostics.length_curve(each.model, texts, tokenizer=each.tokenizer, lengths=chosen)
    if not curves:
        raise ValueError(f"No model supports {lengths[0]} tokens. Choose smaller lengths.")
    measures = {curve.measure for curve in curves.values()}
    if len(measures) > 1:
        raise ValueError(
            f"The models are measured by {' and '.join(sorted(measures))}, which can't be compared. Run eval for each model."
        )
    columns = sorted({length for curve in curves.values() for length in curve.lengths})
    cells = {column: dict.fromkeys(curves, "") for column in columns}
    for name, curve in curves.items():
        for column, mean, error in zip(curve.lengths, curve.mean, curve.error, strict=True):
            cells[column][name] = _shown(mean, error)
    out.result(by_length(f"{measures.pop()}, nats per token, {len(texts)} texts", cells))
    return {name: curve.to_dict() for name, curve in curves.items()}


def _retrieval(
    out: Output, models: "dict[str, Original]", texts: list[str], pairs: "list[Pair]", lengths: list[int]
) -> dict[str, Any]:
    from hf_posenc.cli.folders import embedder
    from hf_posenc.evaluation import model_comparison

    embedders = {name: embedder(each.model, each.tokenizer) for name, each in models.items()}
    first = next(iter(embedders.values()))
    about = f"{len(pairs)} of your queries"
    if not pairs:
        pairs, about = model_comparison.synthetic_pairs(first, texts)
    if not lengths:
        lengths = model_comparison.lengths_of(first, [pair.document for pair in pairs], None)
        out.message(model_comparison.REACH)
    found = model_comparison.compare_models(embedders, pairs, lengths)
    out.result(comparison(found, f"{about}: MRR (and the improvement over the first model)"))
    return {
        "questions": about,
        "rows": {tokens: {name: asdict(row) for name, row in rows.items()} for tokens, rows in found.items()},
    }


def _usable(model: Any, otherwise: int) -> int:
    from hf_posenc.architectures.components import UnsupportedModelError
    from hf_posenc.inspection import inspect

    try:
        return inspect(model).max_length or otherwise
    except UnsupportedModelError:
        return otherwise


def _shown(mean: float, error: float | None) -> str:
    return f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")
