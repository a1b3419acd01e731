"""Extensions: what a section of the budget adds to its session, such as leases, metrics or suspension.

`api.EXTENSIONS` names them. A session knows only this class, and `load` imports only those that its budget asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from memguard._base.types import Event, Sample, WorkloadReport
    from memguard._base.undo import Undo
    from memguard._budget import Budget
    from memguard._guard.guard import Guard
    from memguard._runtime.sampler import Monitor
    from memguard._timeline import Writer

Say = Callable[[str], object]
Look = Callable[[list[Any]], object]
"""Called with the claims of all processes at each look of a budget that waits for its lease."""


class Claimed(Protocol):
    """What a budget has claimed among the processes of this machine. It outlives every cap of the budget."""

    held: bool
    kept: bool
    """Whether it outlives its budget too, as another budget takes its place."""

    def take(
        self,
        wait: float = ...,
        say: Say | None = ...,
        unwanted: Callable[[], bool] | None = ...,
        look: Look | None = ...,
    ) -> bool:
        """Claim it, and wait up to that many seconds. Returns whether it had to wait."""

    def close(self) -> None:
        """Give it back. May be called again."""


class Context(Protocol):
    """The session of a budget, as far as its extensions use it."""

    guard: Guard
    monitor: Monitor | None
    """From `start` on, if the budget has one."""
    undo: Undo
    """What ends with the budget, while its caps still hold."""
    lease: Claimed | None

    @property
    def active(self) -> bool:
        """Whether the budget is in effect in this process."""

    @property
    def writer(self) -> Writer | None:
        """The timeline, if there is one."""

    def have(self, lease: Claimed) -> None:
        """Claim this for the budget, and give it back after all of its caps."""

    def write_to(self, writer: Writer) -> None:
        """Samples, events and refusals go into this timeline."""

    def begin_timeline(self, writer: Writer) -> None:
        """Write from now on."""

    def announce(self, event: Event) -> None:
        """Into the timeline, and to the functions of `on_event`. On any thread."""

    def wake(self) -> None:
        """Let the next checkpoint call those of the extensions. On any thread."""


class Extension:
    """One section of one budget, from the preparation of its session to its end. By default each method does nothing.

    There is no method for the end: `start` adds it to `session.undo` before what it takes back, because an interruption
    may come between the two.
    """

    before_monitor: ClassVar[bool] = False
    """Whether it starts before the monitor, so that it sees the first event; else it starts last."""

    def prepare(self, session: Context, before: Context | None) -> None:
        """Raise what prevents the budget. Nothing is applied yet, and the budget `before` is still in effect."""

    def while_waiting(self, session: Context, say: Say) -> Look | None:
        """What to call at each look while the budget waits for its lease; None for nothing."""

    def start(self, session: Context) -> None:
        """The caps are applied. What this raises ends the budget."""

    def tick(self, reading: Sample) -> None:
        """After each sample, on the monitor's thread. A failed reading has no devices. None while suspended."""

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """A workload has ended, within `seconds`; with an error of the class `failed`."""

    def checkpoint(self) -> None:
        """On a thread of the program that may trim and wait. Called after `session.wake()` only."""

    @property
    def waiting(self) -> bool:
        """Whether something is left for the next `checkpoint`."""
        return False

    def forked(self) -> None:
        """In a forked child: no thread of the parent's is there, and its locks may be held."""

    def at_exit(self) -> None:
        """The program ends without `shutdown`; the monitor has stopped. Not called in a forked child."""


def load(budget: Budget, table: Mapping[str, str]) -> tuple[Extension, ...]:
    """The extensions that the budget asks for, in the table's order. Nothing else of the table is imported.

    The table's keys are a section or key of the budget, `metrics` or `suspend.when_idle`, which must be set and not
    false, or with the value that it must have: `device.on_wait: suspend-idle`. The values are `module:factory`.
    """
    made = []
    for key, place in table.items():
        path, _, wanted = key.partition(": ")
        found: Any = budget
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        if found == wanted if wanted else found is not None and found is not False:
            module, _, factory = place.partition(":")
            made.append(getattr(importlib.import_module(module), factory)())
    return tuple(made)
