"""The frequency rules of rotary positions, as Transformers has them: parameters, errors about these, frequencies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_posenc.encodings.options import GreaterThan, checked_value, quoted, short_repr
from hf_posenc.encodings.table_interpolation import Extension

ORIGINAL = "original_max_position_embeddings"
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Rule -> the parameters that it needs."""
TAKEN: dict[str, tuple[str, ...]] = {
    "dynamic": (ORIGINAL,),
    "yarn": (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (ORIGINAL, "factor", "attention_factor"),
    "llama3": (ORIGINAL,),
    "proportional": ("factor",),
}
"""Rule -> those that it takes besides."""
ALL = {rule: (*needed, *TAKEN.get(rule, ())) for rule, needed in NEEDED.items()}
BY_LENGTH = ("dynamic", "longrope")
"""Rules whose frequencies depend on the length of the text."""
RAMPS: dict[str, dict[str, Any]] = {
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
    "llama3": {"low_freq_factor": None, "high_freq_factor": None},
}
"""Rule -> the parameters between which it passes from one frequency to another, the lower one first, and their defaults."""

NTK = "ntk"
"""The method of `extend` that gives a larger theta, once for all lengths."""
EXTENDING: dict[str, dict[str, Any]] = {
    "linear": {},
    NTK: {},
    "dynamic": {},
    "yarn": {},
    "longrope": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""The methods of `extend` for rotary positions -> what Llama 3.1 has for parameters that its rule needs."""


def check_parameters(kind: str, options: dict[str, Any]) -> None:
    """Raises ValueError for options of an encoding `kind` that contradict each other, or that their rule doesn't take."""
    rule = options["rope_type"]
    for name in dict.fromkeys(name for names in ALL.values() for name in names):
        if options[name] is not None and name not in ALL[rule]:
            others = " or ".join(repr(other) for other, names in ALL.items() if name in names)
            raise ValueError(
                f"{kind}.{name}={short_repr(options[name])}: rope_type={rule!r} takes "
                f"{quoted(ALL[rule]) or 'none of these'}; leave "
                f"it out, or take rope_type={others}"
            )
    if missing := [name for name in NEEDED[rule] if options[name] is None]:
        raise ValueError(
            f"{kind}.rope_type={rule!r} needs {quoted(missing)}: give {', '.join(f'{name}=…' for name in missing)}"
        )
    if (part := options["partial_rotary_factor"]) > 1:
        raise ValueError(f"{kind}.partial_rotary_factor={part}: allowed is the part of the features that is rotated, up to 1")
    if (options["mscale"] is None) != (options["mscale_all_dim"] is None):
        raise ValueError(f"{kind}: mscale and mscale_all_dim act together alone: give both or none, or attention_factor")
    if rule in RAMPS:
        low, high = ((name, options[name] or default) for name, default in RAMPS[rule].items())
        if low[1] >= high[1]:
            raise ValueError(f"{kind}.{low[0]}={low[1]}: allowed is a number below {high[0]}={high[1]}, between them is a ramp")


def with_explicit_defaults(options: dict[str, Any], trained: int | None) -> dict[str, Any]:
    """Checked options with those that default to the longest input that the host's own positions were made for, if known."""
    rule = options.get("rope_type", "default")
    if ORIGINAL not in ALL[rule] or trained is None:
        return options
    filled = {ORIGINAL: trained, **options}
    if rule == "longrope" and not {"factor", "attention_factor"} & {*options}:
        filled["factor"] = trained / filled[ORIGINAL]
    return filled


def extended(parameters: Mapping[str, Any], asked: Extension, rotated: int) -> dict[str, Any]:
    """`rope_parameters` in the form of Transformers for longer inputs.

    parameters: those in force. rotated: how many features of a head they turn.

    "linear"    position interpolation (https://arxiv.org/abs/2306.15595): frequencies / s, s the new length / the trained one.
    "ntk"       theta · s^(R/(R - 2)), which divides the lowest frequency by s and leaves the highest as it is.
    others      Transformers' rules of these names with factor s; "longrope" needs its two lists of factors.

    What was extended before by the same rule goes on from the length it was trained for; only "ntk" leaves no mark.

    Raises ValueError for another rule in force, a rule that this version of Transformers doesn't have, and settings that the
    method doesn't take or lacks.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    method, given = asked.method, dict(parameters)
    rule = given.pop("rope_type", "default")
    if method in (NTK, "dynamic") and rotated < 4:
        raise ValueError(f"method={method!r} takes theta to the power R/(R - 2), and R is {rotated} here: take 'linear'")
    if method == NTK:
        asked.refuse_other_settings("factor")
        if rule != "default":
            raise _other_rule(rule, method)
        factor = _factor(asked, asked.before)
        return {**given, "rope_type": rule, "rope_theta": given["rope_theta"] * factor ** (rotated / (rotated - 2))}
    if method not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"method={method!r}: this version of Transformers has {quoted([*ROPE_INIT_FUNCTIONS])}")
    if rule not in ("default", method):
        raise _other_rule(rule, method)
    # By the factor of "dynamic" the new length is told, and by the config the old one.
    asked.refuse_other_settings(*(ALL[method] if method != "dynamic" else ()))
    trained = asked.settings.get(ORIGINAL) or given.get(ORIGINAL) or round(asked.before / (given.get("factor") or 1))
    own: dict[str, Any] = {"factor": _factor(asked, trained)} if "factor" in NEEDED[method] else {}
    if "factor" in TAKEN.get(method, ()):
        own["factor"] = asked.after / trained
    if ORIGINAL in ALL[method]:
        own[ORIGINAL] = trained
    if method == rule and asked.after > asked.before:  # lists were found for one length
        given = {name: value for name, value in given.items() if name not in ("short_factor", "long_factor")}
    defaults = {name: value for name, value in EXTENDING[method].items() if name not in given}
    longer = {**given, **own, **defaults, **asked.settings, "rope_type": method}
    if missing := [name for name in NEEDED[method] if longer.get(name) is None]:
        raise ValueError(
            f"method={method!r} needs {quoted(missing)}, found by a search on the model: give "
            f"{', '.join(f'{name}=…' for name in missing)}"
        )
    return longer


def _factor(asked: Extension, trained: int) -> float:
    """The factor that was given, or the least one. Raises ValueError for one by which the new length isn't reached."""
    least = asked.after / checked_value(ORIGINAL, trained, Annotated[int, GreaterThan(1)])
    factor = checked_value("factor", asked.settings.get("factor", least), Annotated[float, GreaterThan(0)])
    if factor < least * (1 - 1e-6):
        raise ValueError(
            f"factor={factor} with max_length={asked.after}, where {trained} tokens were trained: allowed is {least:g} or more"
            "; or leave it out"
        )
    return factor


def _other_rule(rule: str, method: str) -> ValueError:
    return ValueError(
        f"method={method!r}: these positions follow rope_type={rule!r} already, and two rules don't add up: take "
        f"method={rule!r}, or the model as it was before"
    )


def check_sizes(kind: str, rule: str, parameters: dict[str, Any], part: float, head_dim: int, rotated: int) -> None:
    """Raises ValueError for parameters that don't suit a head's features, or where nothing tells a length that they lack.

    part: of the head's features that are to be rotated. rotated: how many are.
    """
    pairs = int(part * head_dim // 2) if rule == "proportional" else rotated // 2
    least = 2 if rule == "dynamic" else 1  # it raises theta to R/(R - 2)
    if rotated % 2 or pairs < least:
        found = "an odd number" if rotated % 2 else f"fewer than {2 * least}"
        even, remedy = max(2 * least, rotated - rotated % 2), "choose an encoding which embeds or biases"
        if even <= head_dim and (rule != "proportional" or not rotated % 2):
            remedy = f"take partial_rotary_factor={min(1.0, round((even + 0.5) / head_dim, 4))}, or {remedy}"
        raise ValueError(
            f"{kind!r} turns pairs of features, but this host's head_dim is {head_dim}, of which partial_rotary_factor={part} "
            f"rotates {rotated if rotated % 2 else 2 * pairs}, {found}: {remedy}"
        )
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != pairs:
            raise ValueError(
                f"{kind}.{name} has {len(parameters[name])} values, for {pairs} rotated pairs in this host's heads: give one "
                "for each"
            )
    if ORIGINAL in ALL[rule] and ORIGINAL not in parameters:
        raise ValueError(
            f"{kind}.{ORIGINAL}=None: this host's own positions tell no length that they were made for, which "
            f"rope_type={rule!r} starts from, so give one: {ORIGINAL}=2048"
        )
    if rule == "longrope" and not {"factor", "attention_factor"} & {*parameters}:
        raise ValueError(
            f"{kind}.rope_type='longrope' needs 'factor' or 'attention_factor' here, where this host's own positions tell no "
            f"length: give factor=…, the longest length divided by {ORIGINAL}"
        )


def computed(rule: str, parameters: dict[str, Any], head_dim: int, length: Any) -> tuple[Tensor, float]:
    """The frequencies `[R/2]` of Transformers' rule for a length, or `[B, R/2]` for lengths `[B, 1]`; the factor on cosines and
    sines. float64, radians per position."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    device = length.device if isinstance(length, Tensor) else torch.device("cpu")
    config = _Config(parameters, head_dim, head_dim, 1, parameters.get(ORIGINAL))
    with _InFloat64():
        return ROPE_INIT_FUNCTIONS[rule](config, device, length)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Config:
    """What Transformers' rules read of a config."""

    rope_parameters: dict[str, Any]
    head_dim: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int | None

    def standardize_rope_params(self) -> None:
        """They are as they should be."""


class _InFloat64(TorchFunctionMode):
    """Transformers' rules ask for float32, by whose rounding a frequency is off by 6e-8, and an angle at position 1e6 by 0.06.
    Within, they get float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **kwargs)
