"""hf-posenc plot"""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc import plots
from hf_posenc.cli import app, console
from hf_posenc.cli.arguments import Options, given_encoding
from hf_posenc.plots.style import checked_path
from hf_posenc.serialization.saved_files import read_json

kinds = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Draw encodings, models, and records of what was measured: `hf-posenc plot vectors sinusoidal --output vectors.png`",
)
app.add_typer(kinds, name="plot")

ENCODING = 'A name, a composition "a+b", or JSON with "type".'
One = Annotated[str, typer.Argument(help=ENCODING)]
Several = Annotated[list[str], typer.Argument(help=f"One or more. {ENCODING}")]
Output = Annotated[Path, typer.Option(help="The figure's file: .png, .svg or .pdf.")]
Dark = Annotated[bool, typer.Option("--dark", help="For a dark page.")]
Length = Annotated[int, typer.Option(help="Number of positions.")]
HiddenSize = Annotated[int, typer.Option(help="Number of features of a vector.")]
Heads = Annotated[int, typer.Option(help="Number of attention heads.")]
Causal = Annotated[bool | None, typer.Option(help="Whether queries see no later keys.", show_default="of decoders' encodings")]
Record = Annotated[Path, typer.Argument(help="The JSON file that the script wrote.")]


@kinds.command("vectors")
def vectors(
    encoding: One,
    output: Output,
    option: Options = None,
    length: Length = 128,
    hidden_size: HiddenSize = 128,
    dark: Dark = False,
) -> None:
    """The vectors that an encoding adds: position × feature.

    [bold]hf-posenc plot vectors sinusoidal --option base=100 --output vectors.png[/]
    """
    chosen = given_encoding(encoding, option or [])
    plots.vectors(chosen, length=length, hidden_size=hidden_size, dark=dark, path=output)
    said(output)


@kinds.command("waves")
def waves(
    output: Output,
    encoding: One = "sinusoidal",
    option: Options = None,
    column: Annotated[list[int] | None, typer.Option(help="A feature; may be repeated.", show_default="six of them")] = None,
    length: Length = 64,
    hidden_size: HiddenSize = 32,
    dark: Dark = False,
) -> None:
    """Single columns of the vectors over the positions.

    [bold]hf-posenc plot waves --column 0 --column 8 --output waves.png[/]
    """
    chosen = given_encoding(encoding, option or [])
    plots.waves(chosen, columns=column or None, length=length, hidden_size=hidden_size, dark=dark, path=output)
    said(output)


@kinds.command("similarity")
def similarity(
    encoding: One,
    output: Output,
    option: Options = None,
    length: Length = 128,
    hidden_size: HiddenSize = 128,
    dark: Dark = False,
) -> None:
    """Dot products of the vectors, of all pairs of positions and by distance.

    [bold]hf-posenc plot similarity sinusoidal --output similarity.png[/]
    """
    chosen = given_encoding(encoding, option or [])
    plots.similarity(chosen, length=length, hidden_size=hidden_size, dark=dark, path=output)
    said(output)


@kinds.command("counter")
def counter(
    output: Output,
    bits: Annotated[int, typer.Option(help="Number of bits, 2 to 7.")] = 5,
    dark: Dark = False,
) -> None:
    """The binary counter beside sines: bits flip at different rates.

    [bold]hf-posenc plot counter --bits 4 --output counter.png[/]
    """
    plots.counter(bits=bits, dark=dark, path=output)
    said(output)


@kinds.command("criteria")
def criteria(
    output: Output,
    encodings: Annotated[
        list[str] | None, typer.Argument(help=f"Up to six. {ENCODING}", show_default="counter normalized sinusoidal")
    ] = None,
    hidden_size: HiddenSize = 64,
    dark: Dark = False,
) -> None:
    """The three criteria of an encoding, and which scheme fails which.

    [bold]hf-posenc plot criteria counter normalized learned --output criteria.png[/]
    """
    chosen = [given_encoding(each, []) for each in encodings or ("counter", "normalized", "sinusoidal")]
    plots.criteria(chosen, hidden_size=hidden_size, dark=dark, path=output)
    said(output)


@kinds.command("bias")
def bias(
    encoding: One,
    output: Output,
    option: Options = None,
    length: Length = 48,
    num_attention_heads: Heads = 8,
    causal: Causal = None,
    head: Annotated[list[int] | None, typer.Option(help="From 0; may be repeated.", show_default="up to 8")] = None,
    dark: Dark = False,
) -> None:
    """What an encoding adds to scores: a map of query × key for each head.

    [bold]hf-posenc plot bias alibi --causal --output bias.png[/]
    """
    chosen = given_encoding(encoding, option or [])
    sizes: Any = {"length": length, "num_attention_heads": num_attention_heads, "causal": causal}
    plots.bias(chosen, heads=head or None, dark=dark, path=output, **sizes)
    said(output)


@kinds.command("decay")
def decay(
    encodings: Several,
    output: Output,
    option: Options = None,
    length: Length = 128,
    num_attention_heads: Heads = 8,
    hidden_size: HiddenSize = 512,
    causal: Causal = None,
    head: Annotated[list[int] | None, typer.Option(help="From 0; may be repeated.", show_default="up to 4")] = None,
    dark: Dark = False,
) -> None:
    """What encodings make of distance, side by side: biases, rotations, vectors. --option is for a single encoding.

    [bold]hf-posenc plot decay alibi kerple rope sinusoidal --output decay.png[/]
    """
    if option and len(encodings) > 1:
        raise ValueError(
            f'--option {option[0]!r}: of several encodings give options as JSON, \'{{"type": "rope", "theta": 100}}\''
        )
    chosen = [given_encoding(each, option or []) for each in encodings]
    sizes: Any = {"num_attention_heads": num_attention_heads, "hidden_size": hidden_size, "causal": causal}
    plots.decay(chosen, length=length, heads=head or None, dark=dark, path=output, **sizes)
    said(output)


@kinds.command("lengths")
def lengths(record: Record, output: Output, dark: Dark = False) -> None:
    """Models by length, measured by scripts/eval_length.py.

    [bold]hf-posenc plot lengths scripts/results/length-linux-doc-6.1.json --output lengths.png[/]
    """
    plots.lengths(_read(record, output), dark=dark, path=output)
    said(output)


@kinds.command("needle")
def needle(record: Record, output: Output, dark: Dark = False) -> None:
    """How often a fact was found, by length and depth, measured by scripts/eval_length.py.

    [bold]hf-posenc plot needle scripts/results/needle.json --output needle.png[/]
    """
    plots.needle(_read(record, output), dark=dark, path=output)
    said(output)


@kinds.command("bench")
def bench(record: Record, output: Output, dark: Dark = False) -> None:
    """Throughput beside the stock model, measured by scripts/bench.py.

    [bold]hf-posenc plot bench scripts/results/bench.json --output bench.png[/]
    """
    plots.bench(_read(record, output), dark=dark, path=output)
    said(output)


def _read(file: Path, output: Path) -> Any:
    checked_path(output)
    return read_json(file)


def said(output: Path) -> None:
    console.print(f"{output} is written.", markup=False, highlight=False)
