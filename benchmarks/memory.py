"""The peak of the memory that a computation takes, beyond what was taken before it."""

from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

START = "counted from here"


class Peak:
    """Counts what torch allocates within a `with` statement: `bytes` is the most that was taken at a time, beyond what was
    there at the beginning, or at the last call of `start`.

    On a CPU each allocation and release is read from the profiler, those within an operation among them (the copy that SDPA
    makes of a transposed mask); scratch memory of oneDNN and MKL isn't torch's, and isn't seen. Nor is the release of what was
    allocated before the `with` statement: a computation that releases such memory is run once ahead of `start`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> "Peak":
        if self.device == "cpu":
            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()
        self.start()
        return self

    def start(self) -> None:
        """Count from here."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            with record_function(START):
                pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
            return
        self.profile.__exit__(kind, error, traceback)
        if kind is not None:
            return
        taken = 0
        for event in sorted(self.profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == START:
                taken = self.bytes = 0
            elif event.name() == "[memory]":
                taken += event.nbytes()
                self.bytes = max(self.bytes, taken)
