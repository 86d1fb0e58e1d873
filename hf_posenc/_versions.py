"""Checks at import that the installed versions are within the ranges that pyproject.toml states."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

REQUIRED = {"torch": ">=2.13,<3", "transformers": ">=5.23,<6"}
"""As in pyproject.toml, which isn't part of the code saved with a checkpoint."""


def check() -> None:
    """Raises an ImportError that names the installed version, the supported range and the remedy."""
    for name, specifier in REQUIRED.items():
        found = metadata.version(name)
        if not SpecifierSet(specifier).contains(found, prereleases=True):
            raise ImportError(
                f'hf_posenc works with {name}{specifier}, but {found} is installed: pip install "{name}{specifier}"'
            )
