"""hf-posenc convert"""

import copy
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import (
    FILES,
    Encoding,
    Layers,
    MaxLength,
    Options,
    OutputDir,
    Overwrite,
    Queries,
    Submodel,
    TextColumn,
    Where,
    given_encoding,
    given_where,
)
from hf_posenc.cli.output import AsJson, Output

if TYPE_CHECKING:
    from hf_posenc.cli.folders import Original
    from hf_posenc.evaluation.model_comparison import Pair

DOCUMENTS = 200
"""Maximum number of documents in the comparison, which takes much longer than the conversion."""

TEXT_LENGTH = 256
"""Maximum length of a text in training, in tokens. It is the default of hf_posenc.training.distill."""

STDERR = 2
"""The file descriptor of standard error."""


@app.command("convert", cls=ModelCommand)
def convert(
    model: Annotated[str, typer.Argument(help="Local path or Hub ID of a trained, unpatched model.")],
    encoding: Encoding,
    texts: Annotated[Path, typer.Option(help=f"File with at least 24 in-domain texts ({FILES} with one text per line).")],
    output_dir: OutputDir,
    max_length: MaxLength = None,
    option: Options = None,
    layers: Layers = None,
    submodel: Submodel = None,
    where: Where = None,
    text_column: TextColumn = "text",
    queries: Queries = None,
    train_steps: Annotated[int, typer.Option(min=0, help="Number of distillation steps after the calibration.")] = 0,
    calibration_texts: Annotated[int, typer.Option(min=1, help="Number of texts to calibrate on.")] = 24,
    calibration_length: Annotated[
        int | None,
        typer.Option(min=1, help="Number of tokens of these texts.", show_default="256, or more for max_distance"),
    ] = None,
    exportable: Annotated[bool, typer.Option(help="Choose options that hf-posenc export supports.")] = False,
    compare: Annotated[bool, typer.Option(help="Compare the models by input length at the end.")] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a trained model to another position encoding, calibrated on your texts, and compare the results.

    A sentence-transformers model keeps its modules, pooling, and lengths.

    At the end, the command compares retrieval with the original, the calibrated, and the trained model. All models answer the
    same queries: those of --queries, or sentences from the last half of the texts (at most 200). These texts, or the documents
    of --queries, aren't used for calibration and training. The original reads texts beyond its maximum length truncated and
    chunked.

    Example:
    [bold]hf-posenc convert bert-base-uncased relative --texts my.jsonl --max-length 2048 --output-dir bert-2048[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, save
    from hf_posenc.cli.texts import pairs_in, texts_in
    from hf_posenc.encodings import parse_value

    check_output_dir(output_dir, overwrite)
    if train_steps and submodel is not None:
        raise ValueError(
            "--train-steps distills whole models and can't be combined with --submodel. Omit it, or train the submodel "
            "separately."
        )
    rows, pairs = texts_in(texts, text_column), pairs_in(queries)
    out, original = Output(as_json), Original.load(model)
    some: dict[str, Any] = {} if layers is None else {"layers": parse_value(layers)}
    some |= {} if submodel is None else {"submodel": submodel}
    some |= {} if where is None else {"where": given_where(where)}
    chosen = given_encoding(encoding, option or [])
    # Raises an error for too few queries before the calibration.
    stock = _within(original.model, submodel)
    held_out = dict.fromkeys([pair.document for pair in pairs[:DOCUMENTS]] or rows[-min(DOCUMENTS, len(rows) // 2) :])
    asked = _questions(out, stock, original.tokenizer, [*held_out], pairs) if compare else None
    if asked and not (rows := [text for text in rows if text not in held_out]):
        raise ValueError("All texts are documents of --queries, and no text is left for calibration. Add others to --texts.")
    some |= {"max_length": max_length, "exportable": exportable}
    some |= {"calibration_texts": calibration_texts, "calibration_length": calibration_length}
    converted = hf_posenc.convert(original.model, chosen, texts=rows, tokenizer=original.tokenizer, **some)
    models = {"calibrated": converted}
    if train_steps:
        models["trained"] = _distilled(converted, original, rows, train_steps, max_length)
    saved = save(out, [*models.values()][-1], original, output_dir, submodel)
    if asked:
        models = {name: _within(model, submodel) for name, model in models.items()}
        saved["comparison"] = _compare(out, stock, models, original.tokenizer, *asked, max_length)
    out.document(saved)


def _within(model: Any, submodel: str | None) -> Any:
    """The submodel that was converted."""
    return model if submodel is None else model.base_model.get_submodule(submodel)


def _distilled(converted: Any, original: "Original", texts: list[str], steps: int, max_length: int | None) -> Any:
    """A copy of the converted model, trained by hf_posenc.training.distill in a separate process.

    The process prints its progress and errors. Raises ValueError if it fails.
    """
    from transformers import AutoModel, PreTrainedModel

    import hf_posenc
    from hf_posenc.cli.folders import load, write

    sentences = not isinstance(converted, PreTrainedModel)
    usable = hf_posenc.inspect(original.model).max_length
    with tempfile.TemporaryDirectory() as folder:
        calibrated, made, rows = Path(folder, "calibrated"), Path(folder, "trained"), Path(folder, "texts.jsonl")
        write(converted, original, calibrated)
        rows.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        command = [sys.executable, "-m", "hf_posenc.training.distill", "--max_train_steps", str(steps)]
        command += ["--model_name_or_path", str(calibrated)]
        # "=", because a name can begin with a dash.
        command += [f"--teacher={original.name}", "--train_file", str(rows)]
        if usable is not None:
            command += ["--text_length", str(min(TEXT_LENGTH, usable))]
            command += ["--long_text_length", str(max_length)] if max_length is not None and max_length > usable else []
        # The standard output of this command can be JSON.
        if subprocess.run([*command, "--output_dir", str(made)], check=False, stdout=STDERR).returncode:
            raise ValueError("The distillation failed. Nothing was saved. See its error above.")
        if sentences:
            return load(str(made))
        weights = AutoModel.from_pretrained(made).state_dict()
    trained = copy.deepcopy(converted)  # the converted model shares its parameters with the original
    found = trained.base_model.load_state_dict(weights, strict=False)
    if others := [name for name in (*found.missing_keys, *found.unexpected_keys) if not name.startswith("pooler.")]:
        raise ValueError(
            f"The distilled and the converted model have different parameters: {', '.join(others[:4])}. Nothing was saved."
        )
    return trained


def _questions(
    out: Output, original: Any, tokenizer: Any, texts: list[str], pairs: "list[Pair]"
) -> "tuple[list[Pair], str] | None":
    """The queries with their documents, and a description of them.

    Without a tokenizer, prints a message and returns None. Raises ValueError if the texts have too few sentences.
    """
    from hf_posenc.cli.folders import embedder
    from hf_posenc.evaluation import model_comparison

    if tokenizer is None:
        out.message("The model has no tokenizer, so the models are not compared.")
        return None
    if pairs:
        return pairs[:DOCUMENTS], f"{min(len(pairs), DOCUMENTS)} of your queries find their documents"
    try:
        return model_comparison.synthetic_pairs(embedder(original, tokenizer), texts)
    except ValueError as error:
        raise ValueError(f"{error} Or omit the comparison (--no-compare).") from error


def _compare(
    out: Output,
    original: Any,
    models: dict[str, Any],
    tokenizer: Any,
    pairs: "list[Pair]",
    about: str,
    max_length: int | None,
) -> dict[str, Any]:
    """Prints the comparison and returns it for --json."""
    from hf_posenc.cli.folders import embedder
    from hf_posenc.cli.output import comparison
    from hf_posenc.evaluation import model_comparison

    embedders = {name: embedder(model, tokenizer) for name, model in {"original": original, **models}.items()}
    lengths = model_comparison.lengths_of(embedders["original"], [pair.document for pair in pairs], max_length)
    found = model_comparison.compare(embedders.pop("original"), embedders, pairs, lengths)
    last = [*embedders][-1]
    out.result(comparison(found, f"{about}: MRR (and the improvement with the {last} model)"))
    out.message(model_comparison.REACH)
    rows = {tokens: {name: asdict(row) for name, row in by_name.items()} for tokens, by_name in found.items()}
    return {"questions": about, "rows": rows}
