"""Rejects uploads that contain access tokens or local paths."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

TOKEN = re.compile(
    rb"""(?<![A-Za-z0-9])(?:
        (?:hf|api_org)_[A-Za-z0-9]{16,}                             # the Hub
        | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}               # OpenAI, Anthropic
        | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35}                 # AWS, Google
        | xox[abeoprs]-[\w-]{10,}                                   # Slack
        | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    )""",
    re.VERBOSE,
)
HOME = rb"/(?:home|Users)/[^/\s\"'<>]+|[A-Za-z]:\\{1,2}Users\\{1,2}[^\\\s\"'<>]+"
"""Home directories of any user and machine."""
VALUE = re.compile(rb'"(?:/[^"/\s]+/[^"\n]*|[A-Za-z]:\\\\[^"\n]*)"')
"""A JSON string that is an absolute path."""
LONGEST_HEADER = 100_000_000
"""Maximum size in bytes of the header of a safetensors file, from its specification."""


def refuse(texts: Mapping[str, bytes], token: str | None, folders: Iterable[str | os.PathLike[str]]) -> None:
    """Raises ValueError if a text contains an access token or a local path.

    It searches for:

    - `token`, also in binary files
    - tokens and keys in the formats of well-known services
    - home directories of any user, and paths in the current directory, the temporary directory, and `folders`
    - in configs, all values that are absolute paths
    """
    paths = re.compile(rb"(?<![\w.~-])(?:%b|(?:%b)(?=[/\\][\w.~-]))" % (HOME, b"|".join(map(re.escape, _spellings(folders)))))
    for name, text in texts.items():
        if token and token.encode() in text:
            raise ValueError(f"{name} contains your Hub token, so nothing was uploaded. Remove the token, and revoke it.")
        if b"\0" in text[:8192]:  # a binary file, in which the patterns would match by chance
            continue
        if found := TOKEN.search(text):
            raise ValueError(
                f"{name}, line {_line(text, found.start())}, looks like an access token or a key, so nothing was uploaded. "
                "Remove it, and revoke it if it is one."
            )
        found = paths.search(text) or (VALUE.search(text) if name.endswith("config.json") else None)
        if found:
            shown = found[0].decode(errors="replace").strip('"')
            raise ValueError(
                f"{name}, line {_line(text, found.start())}: {shown!r:.80} is a local path, so nothing was uploaded. Use the "
                "name without its directory."
            )


def _spellings(folders: Iterable[str | os.PathLike[str]]) -> list[bytes]:
    """Absolute paths of directories, plain and JSON-escaped. A root is excluded, because all absolute paths begin with it."""
    known = [Path(folder).absolute() for folder in (os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir(), *folders)]
    names = {str(path) for folder in known for path in (folder, folder.resolve()) if path != Path(path.anchor)}
    spelled = {spelling for name in names for spelling in (name, json.dumps(name)[1:-1])}
    return sorted((name.encode(errors="surrogateescape") for name in spelled), key=len, reverse=True)


def _line(text: bytes, place: int) -> int:
    return text.count(b"\n", 0, place) + 1


def texts(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Name -> content of the files in a directory. For safetensors files, only the header."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            weights = name.endswith(".safetensors")
            found[name] = file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER) if weights else -1)
    return found
