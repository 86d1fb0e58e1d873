"""Refuses to work outside the range of versions that pyproject.toml states."""

from importlib import metadata

from packaging.requirements import Requirement

CHECKED = ("transformers", "torch")


def check() -> None:
    """Raises ImportError which names the version found, the range, and the remedy."""
    try:
        stated = metadata.requires("hf-posenc") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return
    for requirement in map(Requirement, stated):
        if requirement.name in CHECKED:
            found = metadata.version(requirement.name)
            if not requirement.specifier.contains(found, prereleases=True):
                raise ImportError(
                    f"hf_posenc works with {requirement.name}{requirement.specifier}, but {found} is installed: "
                    f'pip install "{requirement.name}{requirement.specifier}"'
                )
