"""What the flows ask for: the driver's calls and NVML's readings of another process, each within a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from memguard._devices.checkpoint import State
from memguard._node.identity import Process


class Answer(NamedTuple):
    """What came of a step. `code` is a CUresult; None if there was no answer, and `trouble` says why.

    timeout      the call hangs
    died         the helper has ended
    start        no helper could be started, or it cannot use the driver here: nothing was done
    ended        the process has ended, or its PID is another's
    room         no room for a restore, which was not begun (`fix` says who holds it)
    unheld       the room that was held is gone with the helper: a restore was not begun
    interrupted  the wait for the answer was interrupted
    """

    code: int | None
    state: State | None = None
    trouble: str = ""
    text: str = ""
    fix: str = ""


class Card(NamedTuple):
    """One GPU as NVML sees it, in bytes. `processes` by PID; None where NVML does not say."""

    total: int
    free: int
    used: int | None
    processes: Mapping[int, int | None]


class Event(NamedTuple):
    """Of a watched process: `running` again (whoever brought it back), `failed`, or `ended`."""

    what: str
    process: Process


class CheckpointChannel(Protocol):
    """`client.Client` (a helper process) or `simulated.Direct`. `limit` is in seconds: then the answer is a timeout.

    No method raises for what the driver or the helper does: `Answer.trouble` says it.
    """

    def state(self, process: Process, limit: float = 10.0) -> Answer: ...

    def lock(self, process: Process, timeout_ms: int, limit: float) -> Answer: ...

    def checkpoint(self, process: Process, limit: float) -> Answer: ...

    def restore(self, process: Process, limit: float) -> Answer:
        """Lets go what `hold` holds, and restores at once."""

    def unlock(self, process: Process, limit: float) -> Answer: ...

    def usage(self, limit: float = 20.0) -> Mapping[str, Card] | None:
        """Every GPU by its UUID; None if NVML did not answer."""

    def hold(self, sizes: Mapping[str, int], limit: float = 60.0) -> Answer:
        """Take that many bytes on each GPU (UUID) for the restore. Code 0, or trouble `room`, and why in `text`."""

    def release(self, limit: float = 60.0) -> None:
        """Let go what `hold` holds."""
