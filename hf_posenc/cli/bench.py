"""hf-posenc bench"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posenc.cli import ModelCommand, app
from hf_posenc.cli.output import AsJson, Output

if TYPE_CHECKING:
    import torch

    from hf_posenc.evaluation.throughput import Speed


@app.command("bench", cls=ModelCommand)
def bench(
    models: Annotated[list[str], typer.Argument(help="Local paths or Hub IDs. The first is the baseline.")],
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Input length in tokens. Can be repeated.", show_default="128 and 512")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=2, help="Number of rounds per model.")] = 10,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu or cuda:0.", show_default="cuda if available, otherwise cpu")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Benchmark forward passes by input length, relative to the first model (medians over rounds).

    Example:
    [bold]hf-posenc bench bert-base-uncased bert-alibi --length 128 --rounds 5[/]
    """
    from hf_posenc.cli.folders import load, names_of
    from hf_posenc.cli.output import by_length
    from hf_posenc.evaluation import throughput

    out, names = Output(as_json), names_of(models)
    place = _device(device)
    loaded = {name: _placed(load(model), place) for name, model in zip(names, models, strict=True)}
    found = throughput.speeds(loaded, length or [128, 512], batch_size, rounds)
    about = f"milliseconds per forward pass (batch size {batch_size}, {place}), throughput relative to {names[0]} (quartiles)"
    out.result(by_length(about, {tokens: {name: _shown(each.get(name)) for name in names} for tokens, each in found.items()}))
    out.document({tokens: {name: asdict(speed) for name, speed in each.items()} for tokens, each in found.items()})


def _placed(model: Any, place: "torch.device") -> Any:
    from hf_posenc.cli.folders import inner_model

    return inner_model(model).to(place)  # type: ignore[arg-type]


def _device(name: str | None) -> "torch.device":
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # an unknown name, a torch without CUDA, or a missing device
        raise ValueError(
            f"--device {name!r} isn't available: {str(error).splitlines()[0]} Use cpu or another device."
        ) from None


def _shown(speed: "Speed | None") -> str:
    if speed is None:
        return "too long"
    shown = f"{speed.milliseconds:.3g}"
    if speed.ratio is None or speed.quartiles is None:
        return shown
    low, high = speed.quartiles
    return f"{shown}, ×{speed.ratio:.2f} ({low:.2f} to {high:.2f})"
