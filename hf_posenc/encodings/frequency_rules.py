"""The frequency rules of RoPE in Transformers: parameters, their checks, and frequencies."""

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
"""The required parameters of each rule."""
TAKEN: dict[str, tuple[str, ...]] = {
    "dynamic": (ORIGINAL,),
    "yarn": (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (ORIGINAL, "factor", "attention_factor"),
    "llama3": (ORIGINAL,),
    "proportional": ("factor",),
}
"""The optional parameters of each rule."""
ALL = {rule: (*needed, *TAKEN.get(rule, ())) for rule, needed in NEEDED.items()}
BY_LENGTH = ("dynamic", "longrope")
"""Rules whose frequencies depend on the length of the text."""
RAMPS: dict[str, dict[str, Any]] = {
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
    "llama3": {"low_freq_factor": None, "high_freq_factor": None},
}
"""The lower and upper parameter of each rule's ramp between frequencies, with their defaults."""

NTK = "ntk"
"""The method of `extend` that increases theta, once for all lengths."""
EXTENDING: dict[str, dict[str, Any]] = {
    "linear": {},
    NTK: {},
    "dynamic": {},
    "yarn": {},
    "longrope": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""The methods of `extend` for RoPE, with the values of Llama 3.1 for required parameters."""


def check_parameters(kind: str, options: dict[str, Any]) -> None:
    """Raises ValueError for options of an encoding `kind` that contradict each other or don't belong to their rule."""
    rule = options["rope_type"]
    for name in dict.fromkeys(name for names in ALL.values() for name in names):
        if options[name] is not None and name not in ALL[rule]:
            others = " or ".join(repr(other) for other, names in ALL.items() if name in names)
            raise ValueError(
                f"{kind}.{name}={short_repr(options[name])} isn't an option of rope_type={rule!r} (its options: "
                f"{quoted(ALL[rule]) or 'none'}). Omit it, or use rope_type={others}."
            )
    if missing := [name for name in NEEDED[rule] if options[name] is None]:
        raise ValueError(
            f"{kind}.rope_type={rule!r} requires {quoted(missing)}. Set {', '.join(f'{name}=…' for name in missing)}."
        )
    if (part := options["partial_rotary_factor"]) > 1:
        raise ValueError(f"{kind}.partial_rotary_factor={part} isn't valid. It is the rotated fraction of features, up to 1.")
    if (options["mscale"] is None) != (options["mscale_all_dim"] is None):
        raise ValueError(f"{kind}: mscale and mscale_all_dim must be set together. Set both or neither, or attention_factor.")
    if rule in RAMPS:
        low, high = ((name, options[name] or default) for name, default in RAMPS[rule].items())
        if low[1] >= high[1]:
            raise ValueError(f"{kind}.{low[0]}={low[1]} isn't valid. It must be below {high[0]}={high[1]}.")


def with_explicit_defaults(options: dict[str, Any], trained: int | None) -> dict[str, Any]:
    """Checked options, with defaults set from the maximum length of the model's original positions, if known."""
    rule = options.get("rope_type", "default")
    if ORIGINAL not in ALL[rule] or trained is None:
        return options
    filled = {ORIGINAL: trained, **options}
    if rule == "longrope" and not {"factor", "attention_factor"} & {*options}:
        filled["factor"] = trained / filled[ORIGINAL]
    return filled


def extended(parameters: Mapping[str, Any], asked: Extension, rotated: int) -> dict[str, Any]:
    """The `rope_parameters` of Transformers for longer inputs.

    parameters: the current ones. rotated: number of rotated features per head.

    "linear"    position interpolation (https://arxiv.org/abs/2306.15595): frequencies / s, s the new / the trained length.
    "ntk"       theta · s^(R/(R - 2)), which divides the lowest frequency by s and doesn't change the highest. The frequencies
        between need a larger s, so that it is twice the ratio of the lengths.
    others      Transformers' rules of these names with factor s. "longrope" needs its two lists of factors.

    A second extension by the same rule starts from the trained length. Only "ntk" doesn't record that length.

    Raises ValueError if another rule is already set, this version of Transformers doesn't have the rule, or settings are
    missing or don't belong to the method.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    method, given = asked.method, dict(parameters)
    rule = given.pop("rope_type", "default")
    if method in (NTK, "dynamic") and rotated < 4:
        raise ValueError(f"method={method!r} needs at least 4 rotated features, but this model has {rotated}. Use 'linear'.")
    if method == NTK:
        asked.refuse_other_settings("factor")
        if rule != "default":
            raise _other_rule(rule, method)
        factor = _factor(asked, asked.before, margin=2.0)
        return {**given, "rope_type": rule, "rope_theta": given["rope_theta"] * factor ** (rotated / (rotated - 2))}
    if method not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"method={method!r} isn't available in this version of Transformers. It has {quoted([*ROPE_INIT_FUNCTIONS])}."
        )
    if rule not in ("default", method):
        raise _other_rule(rule, method)
    # With "dynamic", the factor gives the new length, and the config the old one.
    asked.refuse_other_settings(*(ALL[method] if method != "dynamic" else ()))
    trained = asked.settings.get(ORIGINAL) or given.get(ORIGINAL) or round(asked.before / (given.get("factor") or 1))
    own: dict[str, Any] = {"factor": _factor(asked, trained)} if "factor" in NEEDED[method] else {}
    if "factor" in TAKEN.get(method, ()):
        own["factor"] = asked.after / trained
    if ORIGINAL in ALL[method]:
        own[ORIGINAL] = trained
    if method == rule and asked.after > asked.before:  # the lists were found for one length
        given = {name: value for name, value in given.items() if name not in ("short_factor", "long_factor")}
    defaults = {name: value for name, value in EXTENDING[method].items() if name not in given}
    longer = {**given, **own, **defaults, **asked.settings, "rope_type": method}
    if missing := [name for name in NEEDED[method] if longer.get(name) is None]:
        raise ValueError(
            f"method={method!r} requires {quoted(missing)}, which a search on the model finds. Set "
            f"{', '.join(f'{name}=…' for name in missing)}."
        )
    return longer


def _factor(asked: Extension, trained: int, margin: float = 1.0) -> float:
    """The given factor, or the smallest one times `margin`. Raises ValueError if it is too small for the new length."""
    least = asked.after / checked_value(ORIGINAL, trained, Annotated[int, GreaterThan(1)])
    factor = checked_value("factor", asked.settings.get("factor", margin * least), Annotated[float, GreaterThan(0)])
    if factor < least * (1 - 1e-6):
        raise ValueError(
            f"factor={factor} is too small for max_length={asked.after}, because the model was trained with {trained} tokens. "
            f"It must be at least {least:g}. Set a larger factor, or omit it."
        )
    return factor


def _other_rule(rule: str, method: str) -> ValueError:
    return ValueError(
        f"method={method!r} can't be combined with rope_type={rule!r}, which these positions already use. Use "
        f"method={rule!r}, or start from the original model."
    )


def check_sizes(kind: str, rule: str, parameters: dict[str, Any], part: float, head_dim: int, rotated: int) -> None:
    """Raises ValueError if parameters don't fit a head's features, or need a length that is unknown.

    part: fraction of the head's features to rotate. rotated: number of rotated features.
    """
    pairs = int(part * head_dim // 2) if rule == "proportional" else rotated // 2
    least = 2 if rule == "dynamic" else 1  # theta is raised to the power R/(R - 2)
    if rotated % 2 or pairs < least:
        found = "an odd number" if rotated % 2 else f"fewer than {2 * least}"
        even, remedy = max(2 * least, rotated - rotated % 2), "choose an additive encoding or a bias"
        if even <= head_dim and (rule != "proportional" or not rotated % 2):
            remedy = f"set partial_rotary_factor={min(1.0, round((even + 0.5) / head_dim, 4))}, or {remedy}"
        raise ValueError(
            f"{kind!r} rotates pairs of features, but this model's head_dim is {head_dim}, of which partial_rotary_factor="
            f"{part} rotates {rotated if rotated % 2 else 2 * pairs}, {found}. To fix this, {remedy}."
        )
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != pairs:
            raise ValueError(
                f"{kind}.{name} has {len(parameters[name])} values, but this model's heads have {pairs} rotated pairs. Set one "
                "value per pair."
            )
    if ORIGINAL in ALL[rule] and ORIGINAL not in parameters:
        raise ValueError(
            f"{kind}.{ORIGINAL}=None: rope_type={rule!r} needs the maximum length of the original positions, which this model "
            f"doesn't record. Set it explicitly, for example {ORIGINAL}=2048."
        )
    if rule == "longrope" and not {"factor", "attention_factor"} & {*parameters}:
        raise ValueError(
            f"{kind}.rope_type='longrope' requires 'factor' or 'attention_factor', because this model doesn't record the "
            f"maximum length of its original positions. Set factor=…, the maximum length divided by {ORIGINAL}."
        )


def computed(rule: str, parameters: dict[str, Any], head_dim: int, length: Any) -> tuple[Tensor, float]:
    """The frequencies of a rule in Transformers, and the factor on cosines and sines.

    Frequencies are `[R/2]` for one length or `[B, R/2]` for lengths `[B, 1]`, in float64 and radians per position."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    device = length.device if isinstance(length, Tensor) else torch.device("cpu")
    config = _Config(parameters, head_dim, head_dim, 1, parameters.get(ORIGINAL))
    with _InFloat64():
        return ROPE_INIT_FUNCTIONS[rule](config, device, length)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Config:
    """The fields of a config that Transformers' rules read."""

    rope_parameters: dict[str, Any]
    head_dim: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int | None

    def standardize_rope_params(self) -> None:
        """Does nothing, because the parameters are already standardized."""


class _InFloat64(TorchFunctionMode):
    """Makes Transformers' rules compute in float64.

    They request float32, which rounds frequencies by up to 6e-8, and an angle at position 1e6 by 0.06."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **kwargs)
