"""What can be measured of an encoding, and of a model before and after it is patched. Results are frozen dataclasses with
`to_dict`, `to_json` and a summary as `str`; `hf_posenc.plots` draws them."""

from hf_posenc.diagnostics.curves import LengthCurve
from hf_posenc.diagnostics.gradients import ReceptiveField
from hf_posenc.diagnostics.maps import AttentionByDistance
from hf_posenc.diagnostics.probing import Probing
from hf_posenc.diagnostics.result import Result
from hf_posenc.diagnostics.roundings import Precision, Uniqueness
from hf_posenc.diagnostics.shifts import ShiftError
from hf_posenc.diagnostics.similarities import Decay, Properties, Similarity
from hf_posenc.diagnostics.waves import Wavelengths
from hf_posenc.diagnostics.word_order import OrderSensitivity

__all__ = [
    "AttentionByDistance",
    "Decay",
    "LengthCurve",
    "OrderSensitivity",
    "Precision",
    "Probing",
    "Properties",
    "ReceptiveField",
    "Result",
    "ShiftError",
    "Similarity",
    "Uniqueness",
    "Wavelengths",
]
