"""hf-posenc patch"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.arguments import (
    Encoding,
    Inject,
    KeepHost,
    Layers,
    MaxLength,
    Options,
    OutputDir,
    Overwrite,
    Submodel,
    Where,
    given_encoding,
    given_where,
)
from hf_posenc.cli.output import AsJson, Output


@app.command("patch", cls=ModelCommand)
def patch(
    model: Annotated[str, typer.Argument(help="Local path or Hub ID of an unpatched model.")],
    encoding: Encoding,
    output_dir: OutputDir,
    max_length: MaxLength = None,
    option: Options = None,
    layers: Layers = None,
    submodel: Submodel = None,
    where: Where = None,
    inject: Inject = "input",
    keep_original: KeepHost = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Replace a model's position encoding, and save the model with its tokenizer.

    A sentence-transformers model keeps its modules if that package is installed.

    A Transformers v4 checkpoint with relative_key or relative_key_query keeps its relative vectors if you patch it with the
    same encoding. Transformers 5 drops these vectors.

    Examples:
    [bold]hf-posenc patch bert-base-uncased alibi --max-length 2048 --output-dir bert-alibi[/]
    [bold]hf-posenc patch bert-base-uncased sinusoidal+alibi --option sinusoidal__base=5000 --output-dir both[/]
    [bold]hf-posenc patch openai/clip-vit-base-patch32 alibi --submodel text_model --output-dir clip-alibi[/]
    """
    import hf_posenc
    from hf_posenc.cli.folders import Original, asks_for_its_own, check_output_dir, load_v4, save
    from hf_posenc.configuration import dropped_v4_relative_within
    from hf_posenc.encodings import parse_value
    from hf_posenc.serialization import sentence_models

    check_output_dir(output_dir, overwrite)
    out, chosen = Output(as_json), given_encoding(encoding, option or [])
    if asks_for_its_own(model, chosen):
        others = {"--layers": layers, "--submodel": submodel, "--where": where, "--inject": inject != "input" or None}
        if did_you_mean := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{did_you_mean[0]} doesn't apply to the relative positions of {model}. Omit it.")
        original, with_vectors = load_v4(model, max_length)
        saved = save(out, with_vectors, original, output_dir)
        out.message("The model keeps the checkpoint's relative vectors and gives the same outputs as in Transformers v4.")
        out.document(saved)
        return
    some = {} if layers is None else {"layers": parse_value(layers)}
    original = Original.load(model)
    wrong = dropped_v4_relative_within(original.model)
    patched = hf_posenc.patch(
        original.model,
        chosen,
        max_length=max_length,
        submodel=submodel,
        where=None if where is None else given_where(where),
        inject=inject,
        keep_original=keep_original,
        **some,
    )
    saved = save(out, patched, original, output_dir, submodel)
    untrained = "The model has not been trained with this encoding. Fine-tune it"
    if wrong:
        out.message(
            f"{untrained}. Transformers 5 computes wrong outputs for the original. `hf-posenc patch {model} relative_key` "
            "saves a correct copy, which you can pass to `python -m hf_posenc.training.distill` as --teacher."
        )
    elif submodel is not None or type(patched).__name__ in sentence_models.CLASSES[1:]:  # distill doesn't support these
        out.message(f"{untrained}.")
    elif Path(model).resolve() != output_dir.resolve():
        out.message(f"{untrained}, or distill it from the original:")
        out.message(_distillation(model, output_dir))
    elif keep_original:
        restored = f"{output_dir}-original"
        out.message(f"{untrained}. This command has replaced the original. To distill from it, restore it first:")
        out.message(shlex.join(["hf-posenc", "unpatch", str(output_dir), "--output-dir", restored]))
        out.message(_distillation(restored, output_dir))
    else:
        out.message(f"{untrained}.")
    out.document(saved)


def _distillation(original: str, patched: Path) -> str:
    """The command that distills a patched model from its original."""
    names = ("--model_name_or_path", str(patched), "--teacher", original, "--output_dir", f"{patched}-distilled")
    return shlex.join(["python", "-m", "hf_posenc.training.distill", *names])
