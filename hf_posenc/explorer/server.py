"""Serves the page."""

import dataclasses
import ipaddress
import os
import socket

import gradio as gr
from starlette.middleware import Middleware

from hf_posenc.explorer.budget import GIB, MAX_PARAMETERS, Budget, Limits
from hf_posenc.explorer.gate import Gate, Visitors
from hf_posenc.explorer.page import page
from hf_posenc.explorer.work import check_main, prepare

CSS = """
.block.problem { border-left: 4px solid #d55e00; padding: 0.3rem 0.8rem; }
.numbers textarea, .reports textarea { font-family: ui-monospace, monospace; font-size: 0.85rem; }
"""

SESSIONS = 200
"""The maximum number of sessions whose state is kept."""


def serve(
    host: str | None = None,
    port: int | None = None,
    *,
    browser: bool = False,
    max_parameters: int = MAX_PARAMETERS,
    max_memory: float | None = None,
    max_seconds: float | None = None,
    hub_only: bool | None = None,
    block: bool = True,
) -> gr.Blocks:
    """Serve the page until the process is stopped.

    The page downloads only models that a visitor names by Hub ID. Requests run in separate processes, so a script must
    call this function under `if __name__ == "__main__":`.

    Args:
        `host`: an address of this machine. Default: GRADIO_SERVER_NAME, which a Space sets, or 127.0.0.1.
        port: default: 7860 or the next free port. 0 for any free port.
        browser: whether to open a browser.
        max_parameters: the maximum number of values in a model's parameters and buffers.
        max_memory: the memory of a measurement of models, in GiB. Default: 6. A figure of an encoding has 1 GiB.
        max_seconds: the time of a measurement of models, in seconds. Default: 300. A figure of an encoding has 60 seconds.
        hub_only: whether models are named by Hub ID only. Default: True in a Space, or if other machines can reach the page.
        block: False serves in the background until `close()` of the returned page is called.

    Returns:
        The page. Its `local_url` is the address.

    Raises:
        OSError: the port isn't available.
        ValueError: the port or a limit is invalid.
        RuntimeError: a script calls this function outside of `if __name__ == "__main__":`.
    """
    check_main()
    limits = _limits(max_parameters, max_memory, max_seconds, _is_public(host) if hub_only is None else hub_only)
    if port is not None:
        port = _checked(host or "127.0.0.1", port)
    visitors = Visitors()
    made = page(limits, visitors)
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
        max_file_size=0,
        enable_monitoring=False,
        state_session_capacity=SESSIONS,
        app_kwargs={"middleware": [Middleware(Gate, visitors=visitors)]},
    )
    prepare()
    if block:
        made.block_thread()
    return made


def _limits(max_parameters: int, max_memory: float | None, max_seconds: float | None, hub_only: bool) -> Limits:
    given = {"max_parameters": max_parameters, "max_memory": max_memory, "max_seconds": max_seconds}
    if wrong := [name for name, value in given.items() if value is not None and not value > 0]:
        raise ValueError(f"{wrong[0]}={given[wrong[0]]} must be a number above 0.")
    limits = Limits(max_parameters=max_parameters, hub_only=hub_only)
    memory = limits.model.memory if max_memory is None else int(max_memory * GIB)
    seconds = limits.model.seconds if max_seconds is None else max_seconds
    return dataclasses.replace(limits, model=Budget(memory, seconds))


def _is_public(host: str | None) -> bool:
    """Whether other machines can reach the page. They can in a Space, and at any address that isn't a loopback address."""
    host = host or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = host == "localhost"
    return "SPACE_ID" in os.environ or not local


def _checked(host: str, port: int) -> int:
    """A free port for the server. Raises OSError if the port isn't available."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} must be from 1 to 65535, or 0 for a free one.")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(
                f"Port {port} of {host} isn't available ({error.strerror}). Choose another one, or 0 for a free one."
            ) from None
        return listener.getsockname()[1]
