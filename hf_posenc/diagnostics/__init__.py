"""What can be measured of an encoding, and of a model before and after it is patched. Results are frozen dataclasses with
`to_dict`, `to_json` and a summary as `str`."""

from hf_posenc.diagnostics.attention_distance_maps import AttentionByDistance, attention_by_distance
from hf_posenc.diagnostics.length_curves import LengthCurve, length_curve
from hf_posenc.diagnostics.precision_errors import Precision, Uniqueness, precision, uniqueness
from hf_posenc.diagnostics.probing import Probing, probing
from hf_posenc.diagnostics.receptive_fields import ReceptiveField, receptive_field
from hf_posenc.diagnostics.result import Result
from hf_posenc.diagnostics.shift_errors import ShiftError, shift_error
from hf_posenc.diagnostics.similarities import Decay, Properties, Similarity, decay, properties, similarity
from hf_posenc.diagnostics.wavelength_tables import Wavelengths, wavelengths
from hf_posenc.diagnostics.word_order import OrderSensitivity, order_sensitivity

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
    "attention_by_distance",
    "decay",
    "length_curve",
    "order_sensitivity",
    "precision",
    "probing",
    "properties",
    "receptive_field",
    "shift_error",
    "similarity",
    "uniqueness",
    "wavelengths",
]
