"""Rotary position embeddings: https://arxiv.org/abs/2104.09864

Shapes: B batch, L tokens, E head_dim, R the rotated features of each head.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from hf_posenc.encodings.base import Geometry, PositionEncoding
from hf_posenc.encodings.context import PositionContext
from hf_posenc.encodings.frequency_rules import (
    BY_LENGTH,
    EXTENDING,
    ORIGINAL,
    check_parameters,
    check_sizes,
    computed,
    extended,
    with_explicit_defaults,
)
from hf_posenc.encodings.options import GreaterThan
from hf_posenc.encodings.rotation import cos_sin, rotated
from hf_posenc.encodings.sinusoidal import frequencies
from hf_posenc.encodings.table_interpolation import Extension

Positive = Annotated[float, GreaterThan(0)]


class RoPE(PositionEncoding, type="rope", aliases=("rotary",)):
    """Each pair of features (i of R/2) of a query or key at position p is rotated by p·theta^(-2i/R), so that the score of two
    tokens depends on their distance (Su et al., 2021, equation 15).

    Frequencies and angles are computed in float64 and cast last. There is no length limit.

    Options:
        theta: the base of the frequencies.
        layout: which features form a pair, "half" (i and i + R/2, as in GPT-NeoX and Llama) or "interleaved"
            (2i and 2i + 1, as in the paper and GPT-J).
        partial_rotary_factor: the rotated fraction of a head's E features, R = int(E·factor), from the first feature on
            (GPT-NeoX, GPT-J, Phi). For "proportional", the fraction of the pairs.
        rope_type: the rule for the frequencies f_i, which Transformers computes (`ROPE_INIT_FUNCTIONS`). The parameters of the
            rule are options with the same names as in Transformers:

            "linear"        f_i / factor.
            "dynamic"       theta grows with n, the length of the text, above L (https://arxiv.org/abs/2306.15595, NTK):
                            theta·(factor·n/L - factor + 1)^(R/(R-2)).
            "yarn"          f_i / factor for low frequencies, f_i for high frequencies, and a ramp over the pairs between, from
                            `beta_fast` to `beta_slow` turns in L tokens (rounded to whole pairs with `truncate`)
                            (https://arxiv.org/abs/2309.00071).
            "longrope"      f_i / short_factor_i up to n = L, f_i / long_factor_i above (https://arxiv.org/abs/2402.13753).
            "llama3"        as "yarn", with a ramp over frequencies, from `high_freq_factor` to `low_freq_factor` turns
                            (https://arxiv.org/abs/2407.21783).
            "proportional"  p-RoPE: the lowest frequencies are 0, and the others keep their spacing over all of E
                            (https://arxiv.org/abs/2410.06205). `factor` divides them.

        original_max_position_embeddings: L. None uses the maximum length of the model's original positions.
        attention_factor, mscale, mscale_all_dim: for "yarn" and "longrope", the factor on cosines and sines. None derives it
            from `factor` ("longrope" without `factor`: from the model's maximum length / L).

    n is the last position of a row + 1, so padding and other rows have no effect. If a row holds several texts, n is that of
    the longest. With "dynamic" and "longrope", the cache holds unrotated keys, and every step rotates all keys by the current
    length. In decoders, the cached states of later layers still depend on the frequencies before the text exceeded L. From
    then on, cached decoding differs from a forward pass over the whole text.
    """

    title = "Rotary position embeddings"
    paper = ("https://arxiv.org/abs/2104.09864",)
    translation_invariant = True

    theta: Annotated[float, GreaterThan(1)] = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    partial_rotary_factor: Positive = 1.0
    rope_type: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"] = "default"
    factor: Positive | None = None
    original_max_position_embeddings: Annotated[int, GreaterThan(1)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool | None = None
    short_factor: tuple[Positive, ...] | None = None
    long_factor: tuple[Positive, ...] | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None

    def __init__(self, geometry: Geometry, **options: object) -> None:
        super().__init__(geometry, **options)
        size, rule, part = geometry.head_dim, self.rope_type, self.partial_rotary_factor
        self._size = size if rule == "proportional" else int(size * part)
        self._given = {
            **self.with_explicit_defaults(geometry, self._options or {}),
            "rope_theta": self.theta,
            "partial_rotary_factor": part,
        }
        check_sizes(self.type, rule, self._given, part, size, self._size)
        self._steps: tuple[tuple[float, ...], ...] = ()
        self._magnitude = 1.0
        if self.rope_type not in ("default", "dynamic"):
            original = self._given.get(ORIGINAL)
            lengths = (original, original + 1) if original and self.rope_type == "longrope" else (original,)
            with torch.device("cpu"):
                found = [computed(self.rope_type, self._given, size, length) for length in lengths]
            self._steps, self._magnitude = tuple(tuple(steps.tolist()) for steps, _ in found), found[0][1]

    @classmethod
    def checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Checked options without those at their defaults, except theta and layout, because no rule has all options."""
        checked = super().checked_options(options)
        check_parameters(cls.type, checked)
        return {name: value for name, value in checked.items() if name in ("theta", "layout") or value != getattr(cls, name)}

    @classmethod
    def with_explicit_defaults(cls, geometry: Geometry, options: dict[str, Any]) -> dict[str, Any]:
        return with_explicit_defaults(options, geometry.trained_length)

    @classmethod
    def extended(cls, options: dict[str, Any], asked: Extension, geometry: Geometry) -> dict[str, Any] | None:
        if asked.method not in EXTENDING:
            return None
        rotated = int(geometry.head_dim * options.get("partial_rotary_factor", 1.0))
        given = {name: value for name, value in options.items() if name != "theta"}
        longer = extended({**given, "rope_theta": options["theta"]}, asked, rotated)
        theta = longer.pop("rope_theta")
        return cls.checked_options({**longer, "theta": theta})

    @classmethod
    def rotation_depends_on_length(cls, options: dict[str, Any]) -> bool:
        return options.get("rope_type", cls.rope_type) in BY_LENGTH

    def rotate(self, query: Tensor | None, key: Tensor | None, context: PositionContext) -> tuple[Tensor | None, Tensor | None]:
        def turned(states: Tensor | None) -> Tensor | None:
            if states is None:
                return None
            cos, sin = context.cached((self, "cos_sin", states.dtype), lambda: self._cos_sin(context, states.dtype))
            return rotated(states, cos, sin, self.layout)

        return turned(query), turned(key)

    def angular_frequencies(self, length: int) -> Tensor:
        positions = torch.arange(length)[None]
        return self._frequencies(PositionContext(self, positions, 0, positions[:, :1])).flatten()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in (self._options or {}).items())

    def _cos_sin(self, context: PositionContext, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines `[1 or B, 1, L, R]` and sines `[1 or B, 1, L, R/2]`."""
        angles = context.positions.double()[:, None, :, None] * self._frequencies(context)
        return cos_sin(angles, dtype, self.layout, self._magnitude)

    def _frequencies(self, context: PositionContext) -> Tensor:
        """Radians per position, float64: `[R/2]`, or `[1 or B, 1, 1, R/2]` if they differ between texts."""
        device = context.positions.device
        if self.rope_type == "default":
            return frequencies(self._size, self.theta, device)
        if self.rope_type == "dynamic":
            return computed(self.rope_type, self._given, self.geometry.head_dim, context.lengths.double())[0][:, None, None]
        steps = torch.tensor(self._steps, dtype=torch.float64, device=device)
        if len(steps) == 1:
            return steps[0]
        short, long = steps
        return torch.where(context.lengths[:, None, None] > self._given[ORIGINAL], long, short)
