"""The public names of hf_posenc, which imports them on access."""

from hf_posenc.architectures.components import UnsupportedModelError  # noqa: F401
from hf_posenc.architectures.registration import register_attention, register_positions  # noqa: F401
from hf_posenc.conversion.converting import convert  # noqa: F401
from hf_posenc.conversion.exporting import to_stock  # noqa: F401
from hf_posenc.conversion.extension import extend  # noqa: F401
from hf_posenc.conversion.legacy_v4 import from_v4  # noqa: F401
from hf_posenc.conversion.patching import patch, unpatch  # noqa: F401
from hf_posenc.encodings import PositionEncoding, list_encodings  # noqa: F401
from hf_posenc.hub.cards import model_card  # noqa: F401
from hf_posenc.hub.push import push_to_hub  # noqa: F401
from hf_posenc.inspection import inspect  # noqa: F401
from hf_posenc.modeling.embedding import PositionEmbedding, TokenPositionEmbedding  # noqa: F401
