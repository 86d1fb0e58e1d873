"""The limits of the page on the memory, time, and inputs of a request."""

import contextlib
import math
from dataclasses import dataclass, field

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MAX_PARAMETERS = 500_000_000
"""The default limit on the size of a model, which is 2 GB in float32."""
MAX_LAYERS = 256
"""The maximum of any setting of a model's config that counts layers."""
MAX_CHARACTERS = 10_000
"""The maximum total length of all texts."""
MAX_TEXTS = 16
"""The maximum number of texts."""
MAX_WRITTEN = 256
"""The maximum length of the name of an encoding or model, or of an option's value, in characters."""
GIB = 2**30


class Refused(ValueError):
    """Error for the visitor of the page, for example if a request exceeds a limit. The message names the remedy."""


@dataclass(frozen=True)
class Budget:
    """The resources of one request.

    memory: bytes in addition to those of an idle process.
    seconds: wall-clock time.
    """

    memory: int
    seconds: float

    def check(self, what: str, needed: float, remedy: str) -> None:
        """Raises `Refused` if `what` needs more bytes than the budget allows."""
        if needed > self.memory:
            raise Refused(f"{what} needs about {_gib(needed)} of memory. A request can use up to {_gib(self.memory)}. {remedy}")

    def enforce(self) -> None:
        """Limit the memory, the CPU time, and the size of written files of the current process.

        macOS ignores the memory limit, and Windows has none of these limits.
        """
        if resource is None:
            return
        with contextlib.suppress(OSError, ValueError):
            with open("/proc/self/statm") as file:
                taken = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + self.memory,) * 2)
        for limit, value in ((resource.RLIMIT_CPU, math.ceil(self.seconds) + 5), (resource.RLIMIT_FSIZE, self.memory)):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(limit, (value, value))

    def too_slow(self) -> str:
        return f"The request took longer than {self.seconds:g} seconds and was stopped."

    def too_large(self) -> str:
        return f"The request needed more than {_gib(self.memory)} of memory and was stopped."


@dataclass(frozen=True)
class Limits:
    """The limits of the page.

    max_parameters: the maximum number of values in a model's parameters and buffers.
    model: the budget of a measurement of models.
    drawing: the budget of the figures of encodings.
    hub_only: whether models are named by Hub ID only. The page then never uses a visitor's input as a path.
    """

    max_parameters: int = MAX_PARAMETERS
    model: Budget = field(default_factory=lambda: Budget(6 * GIB, 300))
    drawing: Budget = field(default_factory=lambda: Budget(GIB, 60))
    hub_only: bool = False


def checked_texts(written: str) -> list[str]:
    """The nonempty lines. Raises `Refused` if there are too many, or if they are too long."""
    if len(written) > MAX_CHARACTERS:
        raise Refused(
            f"The texts have {len(written):,} characters. Up to {MAX_CHARACTERS:,} are allowed. Enter shorter or fewer texts."
        )
    lines = [line for line in map(str.strip, written.splitlines()) if line]
    if len(lines) > MAX_TEXTS:
        raise Refused(f"There are {len(lines):,} texts. Up to {MAX_TEXTS} are allowed, one per line. Enter fewer texts.")
    return lines


def checked_field(what: str, written: object) -> str:
    """The text of a one-line field, without whitespace around it. Raises `Refused` for a long text and for other types."""
    if not isinstance(written, str | None):
        raise Refused(f"{what} must be text, not {type(written).__name__}. Enter its name.")
    text = (written or "").strip()
    if len(text) > MAX_WRITTEN:
        raise Refused(f"{what} has {len(text):,} characters. Up to {MAX_WRITTEN} are allowed. Enter a shorter text.")
    return text


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
