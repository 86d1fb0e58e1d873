"""hf-posenc convert"""

import copy
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
    given_encoding,
)
from hf_posenc.cli.output import AsJson, Output

if TYPE_CHECKING:
    from hf_posenc.cli.folders import Original
    from hf_posenc.evaluation.model_comparison import Pair

DOCUMENTS = 200
"""Maximum number of documents in the comparison, which takes far longer than the conversion."""

TEXT_LENGTH = 256
"""Maximum length of a text in training, in tokens. The default of hf_posenc.training.distill."""

STDERR = 2
"""The file descriptor of standard error."""


@app.command("convert", cls=ModelCommand)
def convert(
    model: Annotated[str, typer.Argument(help="Local path or Hub ID of a trained model that isn't patched.")],
    encoding: Encoding,
    texts: Annotated[Path, typer.Option(help=f"24 in-domain texts or more: {FILES} with one in each line.")],
    output_dir: OutputDir,
    max_length: MaxLength = None,
    option: Options = None,
    layers: Layers = None,
    submodel: Submodel = None,
    text_column: TextColumn = "text",
    queries: Queries = None,
    train_steps: Annotated[int, typer.Option(min=0, help="Steps of distillation after the calibration.")] = 0,
    exportable: Annotated[bool, typer.Option(help="Choose options that hf-posenc export supports.")] = False,
    compare: Annotated[bool, typer.Option(help="Compare the models by length at the end.")] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a trained model to another position encoding, calibrated on your texts, and measure what changes.

    A model of sentence-transformers keeps its modules, pooling and lengths.

    [bold]hf-posenc convert bert-base-uncased relative --texts my.jsonl --max-length 2048 --output-dir bert-2048[/]

    At the end, the original (truncated and chunked beyond its length), the calibrated and the trained model answer the same
    queries: those of --queries, or sentences of the texts.
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, check_output_dir, save
    from hf_posenc.cli.texts import pairs_in, texts_in
    from hf_posenc.encodings import parse_value

    check_output_dir(output_dir, overwrite)
    if train_steps and submodel is not None:
        raise ValueError("--train-steps distills whole models: leave it out with --submodel, or train the submodel separately")
    rows, pairs = texts_in(texts, text_column), pairs_in(queries)
    out, original = Output(as_json), Original.load(model)
    some: dict[str, Any] = {} if layers is None else {"layers": parse_value(layers)}
    some |= {} if submodel is None else {"submodel": submodel}
    chosen = given_encoding(encoding, option or [])
    # Too few queries are an error, which comes before the calibration.
    stock = _within(original.model, submodel)
    asked = _questions(out, stock, original.tokenizer, rows, pairs) if compare else None
    some |= {"max_length": max_length, "exportable": exportable}
    converted = hf_posenc.convert(original.model, chosen, texts=rows, tokenizer=_only_called(original.tokenizer), **some)
    models = {"calibrated": converted}
    if train_steps:
        models["trained"] = _distilled(converted, original, texts, text_column, train_steps, max_length)
    saved = save(out, [*models.values()][-1], original, output_dir, submodel)
    if asked:
        models = {name: _within(model, submodel) for name, model in models.items()}
        saved["comparison"] = _compare(out, stock, models, original.tokenizer, *asked, max_length)
    out.document(saved)


def _within(model: Any, submodel: str | None) -> Any:
    """The submodel that was converted."""
    return model if submodel is None else model.base_model.get_submodule(submodel)


def _only_called(tokenizer: Any) -> Any:
    """The tokenizer as a function, so that its model_max_length doesn't change."""
    return None if tokenizer is None else tokenizer.__call__


def _distilled(converted: Any, original: "Original", texts: Path, column: str, steps: int, max_length: int | None) -> Any:
    """A copy of the converted model, trained by hf_posenc.training.distill in a separate process, which shows its progress.

    Raises ValueError if that fails. It explains why.
    """
    from transformers import AutoModel, PreTrainedModel

    import hf_posenc
    from hf_posenc.cli.folders import load, write

    sentences = not isinstance(converted, PreTrainedModel)
    usable = hf_posenc.inspect(original.model).max_length
    with tempfile.TemporaryDirectory() as folder:
        calibrated, made = Path(folder, "calibrated"), Path(folder, "trained")
        write(converted, original, calibrated)
        command = [sys.executable, "-m", "hf_posenc.training.distill", "--max_train_steps", str(steps)]
        command += ["--model_name_or_path", str(calibrated)]
        # With "=", since a name may begin with a dash.
        command += [f"--teacher={original.name}", f"--train_file={texts}", f"--text_column={column}"]
        if usable is not None:
            command += ["--text_length", str(min(TEXT_LENGTH, usable))]
            command += ["--long_text_length", str(max_length)] if max_length is not None and max_length > usable else []
        # The standard output of this command may be JSON.
        if subprocess.run([*command, "--output_dir", str(made)], check=False, stdout=STDERR).returncode:
            raise ValueError("the distillation failed, as it says above; nothing was saved")
        if sentences:
            return load(str(made))
        weights = AutoModel.from_pretrained(made).state_dict()
    trained = copy.deepcopy(converted)  # the converted model shares its parameters with the original
    found = trained.base_model.load_state_dict(weights, strict=False)
    if others := [name for name in (*found.missing_keys, *found.unexpected_keys) if not name.startswith("pooler.")]:
        raise ValueError(f"the distilled model and the converted one differ in {', '.join(others[:4])}; nothing was saved")
    return trained


def _questions(
    out: Output, original: Any, tokenizer: Any, texts: list[str], pairs: "list[Pair]"
) -> "tuple[list[Pair], str] | None":
    """The queries with their documents, and their description. None, with a message, without a tokenizer.

    Raises ValueError if the texts have too few sentences.
    """
    from hf_posenc.cli.folders import embedder
    from hf_posenc.evaluation import model_comparison

    if tokenizer is None:
        out.message("The model has no tokenizer, so nothing is compared.")
        return None
    if pairs:
        return pairs[:DOCUMENTS], f"{min(len(pairs), DOCUMENTS)} of your queries find their documents"
    # The last ones: calibration takes its texts from the beginning.
    return model_comparison.synthetic_pairs(embedder(original, tokenizer), texts[-DOCUMENTS:])


def _compare(
    out: Output,
    original: Any,
    models: dict[str, Any],
    tokenizer: Any,
    pairs: "list[Pair]",
    about: str,
    max_length: int | None,
) -> dict[str, Any]:
    """Prints the comparison, and returns it for --json."""
    from hf_posenc.cli.folders import embedder
    from hf_posenc.cli.output import comparison
    from hf_posenc.evaluation import model_comparison

    embedders = {name: embedder(model, tokenizer) for name, model in {"original": original, **models}.items()}
    lengths = model_comparison.lengths_of(embedders["original"], [pair.document for pair in pairs], max_length)
    found = model_comparison.compare(embedders.pop("original"), embedders, pairs, lengths)
    last = [*embedders][-1]
    out.result(comparison(found.rows, f"{about}: MRR, and how much better the {last} model is"))
    out.result(found.verdict)
    out.message(model_comparison.REACH)
    return {"questions": about, **asdict(found)}
