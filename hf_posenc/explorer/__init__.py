"""An interactive page of encodings and models: `hf-posenc explore`, or an app, such as a Space.

`option_fields` says which fields an encoding's options have, `encodings` and `models` compute what is shown of each,
`components` shows it in Gradio, `page` lays it out, and `server` starts it. Without Gradio, importing
this package raises an ImportError that names the extra `explore`.
"""

from hf_posenc._versions import install

try:
    import gradio  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(f"The page needs Gradio and matplotlib ({error}). Run: {install('explore')}") from None

from hf_posenc.explorer.page import page
from hf_posenc.explorer.server import serve

__all__ = ["page", "serve"]
