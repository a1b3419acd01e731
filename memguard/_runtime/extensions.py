"""Extensions: optional features of a budget's session, each configured by one section of the budget file.

Examples are leases, metrics and suspension. `memguard.api.EXTENSIONS` lists all extensions. `load` imports only the
extensions that the budget enables. A session calls them only through the base class `Extension`.
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
"""A callback that is called at each poll while a budget waits for its lease, with the leases that all processes of the
machine have claimed."""


class BudgetLease(Protocol):
    """A claim of GPU memory, registered on this machine so that no other process with memguard claims that memory.

    At the end of the budget the lease is released after all allocator caps.
    """

    held: bool
    kept: bool
    """True while a replacing budget takes over this lease, so that the end of the replaced budget does not release the
    lease."""

    def take(
        self,
        wait: float = ...,
        say: Say | None = ...,
        unwanted: Callable[[], bool] | None = ...,
        look: OnPoll | None = ...,
    ) -> bool:
        """Claim the lease, waiting for at most `wait` seconds. Returns True if the call waited.

        `say` logs a sentence, `unwanted` returns True to end the wait, `look` is called at each poll.
        """

    def close(self) -> None:
        """Release the lease. A second call does nothing."""


class SessionContext(Protocol):
    """The attributes and methods of a session that extensions use."""

    guard: Guard
    monitor: Monitor | None
    """None before `start`, and if the budget has no monitor."""
    undo: Undo
    """Undo steps that run at the end of the budget, before its allocator caps are removed."""
    lease: BudgetLease | None

    @property
    def active(self) -> bool:
        """True if the budget is in effect in this process."""

    @property
    def writer(self) -> Writer | None:
        """The timeline's writer, if the budget has a timeline."""

    def set_lease(self, lease: BudgetLease) -> None:
        """Set the budget's lease. At the end of the budget the lease is released after all caps are removed."""

    def write_to(self, writer: Writer) -> None:
        """Set the writer of samples, events and refused requests. `begin_timeline` later creates the file."""

    def begin_timeline(self, writer: Writer) -> None:
        """Create the timeline file, and add undo steps that close the file."""

    def announce(self, event: Event) -> None:
        """Write the event to the timeline and pass it to the `on_event` callbacks. Any thread may call this."""

    def wake(self) -> None:
        """Make the next `memguard.checkpoint` call `Extension.checkpoint`. Any thread may call this."""


class Extension:
    """Base class of the feature that one section of a budget file configures. By default every method does nothing.

    The methods are called from `prepare` until the session ends. No method is called when the session ends. Instead
    `start` adds an undo step to `session.undo` before each change, so that an interrupted `start` is also undone.
    """

    before_monitor: ClassVar[bool] = False
    """True to start the extension before the monitor, so that it receives the first event."""

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        """Raise an error to reject the budget. Called before anything is applied. `before` is the session in effect, or
        None."""

    def while_waiting(self, session: SessionContext, say: Say) -> OnPoll | None:
        """Return a function to call at each poll while the budget waits for its lease, or None."""

    def start(self, session: SessionContext) -> None:
        """Called after the caps are applied. An exception ends the budget."""

    def tick(self, reading: Sample) -> None:
        """Called after each sample, on the monitor's thread; not while suspended. After a failed reading, `reading`
        has no devices."""

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """Called after a workload that took `seconds`. `failed`: the class name of its exception, or None."""

    def checkpoint(self) -> None:
        """Called by the first `memguard.checkpoint` after `session.wake()`, on a thread of the program. May trim and
        wait."""

    @property
    def waiting(self) -> bool:
        """True if an interrupted `checkpoint` has work left for the next call."""
        return False

    def forked(self) -> None:
        """Reset in a forked child: threads of the parent do not exist there, and inherited locks may be held."""

    def at_exit(self) -> None:
        """Called after the monitor has stopped if the program ends without `memguard.shutdown`. Not called in a forked
        child."""


def load(budget: Budget, table: Mapping[str, str]) -> tuple[Extension, ...]:
    """Import and create the extensions that the budget enables, in the order of `table`.

    A key of `table` is either the path of a setting that must be set and not false (`metrics`, `suspend.when_idle`), or
    a path with the required value (`device.on_wait: suspend-idle`). A value of `table` is `module:factory`.
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
