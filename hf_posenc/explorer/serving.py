"""Serving the page."""

import socket

import gradio as gr

from hf_posenc.explorer.models import MAX_PARAMETERS
from hf_posenc.explorer.page import page

CSS = """
.block.problem { border-left: 4px solid #d55e00; padding: 0.3rem 0.8rem; }
.numbers textarea, .reports textarea { font-family: ui-monospace, monospace; font-size: 0.85rem; }
"""


def serve(
    host: str | None = None,
    port: int | None = None,
    *,
    browser: bool = False,
    max_parameters: int = MAX_PARAMETERS,
    block: bool = True,
) -> gr.Blocks:
    """Serve the page at `local_url` of what is returned, until the process is stopped; with `block=False` in the background,
    until `close()`.

    host: an address of this machine; by default 127.0.0.1, or what the environment says (GRADIO_SERVER_NAME, as in a Space).
    port: by default 7860 or a free one after it; 0 for any free one. browser: whether a browser is opened.

    Nothing is fetched from elsewhere, but for models that a reader names by their id on the Hub.

    Raises OSError for a port that is taken, and ValueError for one that there isn't.
    """
    if port is not None:
        port = _checked(host or "127.0.0.1", port)
    made = page(max_parameters)
    made.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        footer_links=[],
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=CSS,
    )
    if block:
        made.block_thread()
    return made


def _checked(host: str, port: int) -> int:
    """A port that can be listened at. Raises OSError for one that is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: allowed is 1 to 65535, or 0 for a free one")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(
                f"port {port} of {host} can't be had ({error.strerror}): give another one, or 0 for a free one"
            ) from None
        return listener.getsockname()[1]
