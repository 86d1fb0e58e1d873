"""An interactive page for encodings and models, for `hf-posenc explore` or an app such as a Space.

`option_fields` defines the form fields of an encoding's options. `encodings` and `models` compute the content, `components`
shows it in Gradio, `page` contains the layout, and `server` serves it. Without Gradio or matplotlib, importing this package
raises an ImportError that names the extra `explore`.
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
