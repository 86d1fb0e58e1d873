"""The peak memory of a computation, in addition to what was allocated before."""

from types import TracebackType

from torch.profiler import ProfilerActivity, profile, record_function

START = "counted from here"


class Peak:
    """Measures torch's peak memory within a `with` statement.

    `bytes` is the peak in addition to what was allocated at the beginning, or at the last call of `start`.

    The profiler reports each allocation and release, including those within an operation, such as SDPA's copy of a
    transposed mask. It doesn't report scratch memory of oneDNN and MKL, because torch doesn't allocate it. Nor does it report
    the release of memory that was allocated before the `with` statement. A computation that releases such memory must run once
    before `start`.
    """

    bytes = 0

    def __enter__(self) -> "Peak":
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        self.start()
        return self

    def start(self) -> None:
        """Measure from here."""
        with record_function(START):
            pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
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
