"""The peak of the memory that a computation takes, beyond what was taken before it."""

import os
from types import TracebackType

# The profiler would print a line at each start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.profiler import ProfilerActivity, profile


class Peak:
    """Counts what torch allocates within a `with` statement: `bytes` is the most that was taken at a time.

    On a CPU each allocation and release is read from the profiler, those within an operation among them (the copy that SDPA
    makes of a transposed mask); scratch memory of oneDNN and MKL isn't torch's, and isn't seen.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> "Peak":
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
            return
        self.profile.__exit__(kind, error, traceback)
        if kind is not None:
            return
        events = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        taken = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            taken += event.nbytes()
            self.bytes = max(self.bytes, taken)
