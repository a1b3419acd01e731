"""Extensions: features that a section of the budget adds to its session, such as leases, metrics or suspension.

`api.EXTENSIONS` lists them. A session knows only the class `Extension`. `load` imports only the extensions that the
budget enables.
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
OnPoll = Callable[[list[Any]], object]
"""A callback for a budget that waits for its lease: each poll passes it the leases that all processes of the machine
claim."""


class BudgetLease(Protocol):
    """The lease of a budget among the processes of this machine. It is released after all caps of the budget."""

    held: bool
    kept: bool
    """True if the next budget takes over this lease."""

    def take(
        self,
        wait: float = ...,
        say: Say | None = ...,
        unwanted: Callable[[], bool] | None = ...,
        look: OnPoll | None = ...,
    ) -> bool:
        """Claim the lease, waiting up to `wait` seconds. Returns whether it had to wait."""

    def close(self) -> None:
        """Release the lease. A second call does nothing."""


class SessionContext(Protocol):
    """The attributes and methods of a session that extensions use."""

    guard: Guard
    monitor: Monitor | None
    """Set from `start` on, if the budget has a monitor."""
    undo: Undo
    """Undo steps that run at the budget's end, while its caps still hold."""
    lease: BudgetLease | None

    @property
    def active(self) -> bool:
        """Whether the budget is in effect in this process."""

    @property
    def writer(self) -> Writer | None:
        """The timeline's writer, if the budget has a timeline."""

    def set_lease(self, lease: BudgetLease) -> None:
        """Set the budget's lease, and release it after all caps."""

    def write_to(self, writer: Writer) -> None:
        """Set the timeline of samples, events and refusals."""

    def begin_timeline(self, writer: Writer) -> None:
        """Begin to write the timeline."""

    def announce(self, event: Event) -> None:
        """Write the event to the timeline and pass it to the `on_event` callbacks. Any thread."""

    def wake(self) -> None:
        """Make the next checkpoint call `Extension.checkpoint`. Any thread."""


class Extension:
    """Implements one section of a budget file for one session, from the session's preparation to its end. By default a
    method does nothing.

    No method is called at the session's end. Instead `start` adds an undo step to `session.undo` before each change, so
    that an interrupted `start` is undone too.
    """

    before_monitor: ClassVar[bool] = False
    """Whether the extension starts before the monitor, to receive the first event. Otherwise it starts last."""

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        """Raise an error to reject the budget. Nothing is applied yet, and the budget `before` is still in effect."""

    def while_waiting(self, session: SessionContext, say: Say) -> OnPoll | None:
        """A function to call at each poll while the budget waits for its lease, or None."""

    def start(self, session: SessionContext) -> None:
        """Called once the caps are applied. An error ends the budget."""

    def tick(self, reading: Sample) -> None:
        """Called after each sample, on the monitor's thread; not while suspended. A failed reading has no devices."""

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """Called when a workload has ended after `seconds`. `failed`: the class name of its error."""

    def checkpoint(self) -> None:
        """Called after `session.wake()`, on a thread of the program. The extension may trim and wait there."""

    @property
    def waiting(self) -> bool:
        """Whether the next `checkpoint` has work to do."""
        return False

    def forked(self) -> None:
        """Reset in a forked child: threads of the parent do not exist there, and inherited locks may be held."""

    def at_exit(self) -> None:
        """Called at a program's end without `shutdown`, after the monitor has stopped. Not called in a forked child."""


def load(budget: Budget, table: Mapping[str, str]) -> tuple[Extension, ...]:
    """The extensions that the budget enables, in the table's order. Imports no other extension.

    A key of the table is a section or key of the budget that must be set and not false (`metrics`,
    `suspend.when_idle`), or a key with its required value (`device.on_wait: suspend-idle`). A value is
    `module:factory`.
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
