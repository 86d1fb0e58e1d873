"""An interactive page of encodings and models: `hf-posenc explore`, or an app, such as a Space.

`option_fields` says which fields an encoding's options have, `encodings` and `models` compute what is shown of each,
`components` shows it in Gradio, `page` lays it out, and `server` starts it. Without Gradio, importing
this package raises an ImportError which names the extra: `pip install "hf-posenc[explore]"`.
"""

try:
    import gradio  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(f'the page is made by Gradio and matplotlib ({error}): pip install "hf-posenc[explore]"') from None

from hf_posenc.explorer.page import page
from hf_posenc.explorer.server import serve

__all__ = ["page", "serve"]
