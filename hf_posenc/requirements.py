"""Refuses to work outside the range of versions that pyproject.toml states."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

REQUIRED = {"torch": ">=2.13,<3", "transformers": ">=5.23,<6"}
"""As in pyproject.toml, which the code that travels with a model doesn't have."""


def check() -> None:
    """Raises ImportError which names the version found, the range, and the remedy."""
    for name, specifier in REQUIRED.items():
        found = metadata.version(name)
        if not SpecifierSet(specifier).contains(found, prereleases=True):
            raise ImportError(
                f'hf_posenc works with {name}{specifier}, but {found} is installed: pip install "{name}{specifier}"'
            )
