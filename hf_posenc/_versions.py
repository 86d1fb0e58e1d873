"""The versions of Transformers and torch that hf_posenc is tested with, and what is known to fail with others."""

import warnings
from importlib import metadata

from packaging.version import Version

REPOSITORY = "https://github.com/hf-posenc/hf-posenc"
DOCS = f"{REPOSITORY}/blob/main/docs"
"""The pages that error messages refer to, which aren't installed."""
INSTALL = f"pip install git+{REPOSITORY}"
"""How to install the package; a release to PyPI changes it here."""
TESTED = {"transformers": ("5.15", "6"), "torch": ("2.6", "3")}
"""The oldest version that is tested, and the first that isn't. The oldest are also in pyproject.toml, which isn't part of the
code saved with a checkpoint."""
IMPORTS = "5.6"
"""The oldest version of Transformers with all modules that the package imports."""
FAILS = {
    "transformers": (
        "models can't be saved, static caches fail, and T5, UMT5, and about 30 other architectures can't be patched"
    ),
    "torch": "compilation and torch.export, in part",
}
"""What is known to fail with versions that are older than those tested."""


def install(extra: str) -> str:
    """How to install the package with an extra."""
    return f'pip install "hf-posenc[{extra}] @ {INSTALL.partition("install ")[2]}"'


def check() -> None:
    """Raises an ImportError if the package can't be imported with the installed Transformers; warns as `warn` does."""
    found = _installed("transformers")
    if found is not None and Version(found) < Version(IMPORTS):
        oldest = TESTED["transformers"][0]
        raise ImportError(
            f"hf_posenc needs Transformers {oldest} or newer, and {found} is installed, which lacks modules that it imports: "
            f'pip install "transformers>={oldest}"'
        )
    warn()


def warn() -> None:
    """Warns of versions outside the tested range: what is known to fail, and the remedy. Code in checkpoints does only this."""
    for name, (oldest, untested) in TESTED.items():
        found = _installed(name)
        if found is None:
            continue
        if Version(found).release < Version(oldest).release:
            warnings.warn(
                f"hf_posenc is tested with {name} {oldest} or newer, and {found} is installed. Known to fail: {FAILS[name]}. "
                f'To upgrade: pip install "{name}>={oldest}"',
                stacklevel=3,
            )
        elif Version(found).release >= Version(untested).release:
            warnings.warn(
                f"hf_posenc isn't tested with {name} {untested} or newer, and {found} is installed. If something fails: pip "
                f'install "{name}<{untested}"',
                stacklevel=3,
            )


def _installed(name: str) -> str | None:
    """The version of a package; None if it isn't installed as one, but found on the path."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
