"""What may look on while a guard works: at checkpoints on the user's threads, at errors, at the end of workloads.

The guard knows no more of it than this. The default one does nothing.
"""

from __future__ import annotations

from memguard._types import WorkloadReport


class Observer:
    """No method may raise but `checkpoint`, which runs on the user's thread before the guard does anything."""

    def checkpoint(self) -> None:
        """`require`, `workload` or `trim` begins: the moment for what must not happen in the background."""

    def failed(self, error: BaseException) -> None:
        """An error leaves a block of the guard's; it goes on to the user whatever happens here."""

    def finished(self, report: WorkloadReport) -> None:
        """A workload has ended without an error."""

    def stop(self) -> None:
        """The guard is about to stop."""

    def forked(self) -> None:
        """In a forked child: no thread of the parent's is there, and its locks may be held."""
