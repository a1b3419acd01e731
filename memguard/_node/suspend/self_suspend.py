"""Suspend the calling process, one call at a time. Each call ends in RUNNING, OFF or LOST, whatever interrupts it.

`_devices.phase` has the table of the transitions between these phases, `_devices.suspension` the phase now.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, Protocol

from memguard._base import life
from memguard._base.advice import Advice
from memguard._base.locks import LockedRunner, LockOrder
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event
from memguard._base.undo import Undo
from memguard._base.units import format_size
from memguard._devices import contexts, suspension
from memguard._devices.phase import Phase
from memguard._node.identity import Process
from memguard._node.suspend import pause_memguard
from memguard._node.suspend.course.task import Calls, Task
from memguard._node.suspend.triggers import at_exit
from memguard._node.suspend.types import Progress, Suspension, Why
from memguard._runtime.runtime import this
from memguard._runtime.session import on_monitor
from memguard.errors import CannotResume, CannotSuspend, Suspended

if TYPE_CHECKING:
    from memguard._node.suspend.backend import SuspendBackend

QUIET = 10.0
"""Seconds in which what memguard has under way must end."""
_NOT_THERE = "set a flag there, and call memguard.suspend() on a thread of the program"
_LOOK = 0.5
"""Seconds for which the watcher waits for news at a time."""
_SLICE = 0.05
"""Seconds for which `suspend` waits at a time, between two looks at what it waits for."""


class Gate(Protocol):
    closed: bool
    unheld: tuple[str, ...]

    @property
    def inside(self) -> int: ...

    def open(self) -> None: ...

    def on_this_thread(self) -> contextlib.ExitStack: ...


class _Own:
    """One suspension of this process."""

    def __init__(self, way: SuspendBackend, owner: int | None) -> None:
        self.way, self.owner = way, owner
        self.pid = os.getpid()
        self.undo = Undo()
        self.guard = this.session.guard if this.session is not None else None
        self.gate: Gate | None = None
        self.suspension: Suspension | None = None
        """Once the process is off its GPUs."""
        self.events: list[Event] = []
        """Not announced yet."""
        self.lost: Advice | None = None
        """In the phase LOST: what happened."""

    def shut(self) -> None:
        """Pause memguard, then close the gates."""
        try:
            pause_memguard.begin(self.undo, QUIET, self.way.memory)
            self.gate = closed_gate(self.owner, self.undo)
            if self.gate.unheld:  # after the assignment: `finish` destroys what waited at this gate
                _refuse_unheld(self.gate.unheld)
        except BaseException:
            self.on()
            raise

    def on(self) -> None:
        """The process is on its GPUs. On the thread of the task, which no interruption reaches, or the watcher's."""
        pause_memguard.end()  # first: what waited at the gates may call memguard
        self.undo.run()

    def finish(self) -> None:
        """Once it is on its GPUs: destroy what waited for that, and tell of the return. On the thread of the call.

        PyCUDA frees nothing on another thread than the one that allocated it. A second call does what is left.
        """
        if suspension.phase() is not Phase.RUNNING:
            return
        if self.gate is not None:
            self.gate.open()
        suspension.run_deferred()
        events, self.events = self.events, []
        for event in events:
            _announce(event)

    def off(self, error: BaseException | None = None, sizes: dict[str, int] | None = None) -> None:
        """The process is off its GPUs, or lost, as the error of the driver's calls says."""
        if isinstance(error, CannotResume) and error.lost:
            self.lost = error.advice
        suspension.enter(Phase.OFF if self.lost is None else Phase.LOST, sizes)


_locked = LockedRunner(order=LockOrder.SUSPENSION)
"""Of the thread that takes the process off its GPUs, or brings it back."""
_BUSY = "another call takes this process off its GPUs, or brings it back"
_now: _Own | None = None
_of_parent: list[_Own] = []
"""In a forked child."""


def closed_gate(owner: int | None, undo: Undo) -> Gate:
    from memguard._node.suspend.gates import gate

    return gate.close(owner, undo)


def _refuse_unheld(libraries: tuple[str, ...]) -> NoReturn:
    from memguard._node.suspend.checks import refusals

    raise CannotSuspend([(one.code, one.reason, one.remedy) for one in refusals.unheld(libraries)])


def chosen_way() -> SuspendBackend:
    """How this process leaves: through the driver, or the simulated one of a budget on simulated GPUs."""
    from memguard._node.suspend import backend

    return backend.of_this_process()


def suspend(
    timeout: float, why: Why, owner: int | None = None, ignore_host_memory: bool = False, patience: float = QUIET
) -> Suspension:
    """Take this process off its GPUs. As `memguard.suspend`; `owner` as for `Gate`.

    While another call takes it off it is refused at once. One that has brought it back may still put things away: that
    is waited for, up to `patience` seconds and no longer than `timeout`. What the caller has looked at may change
    meanwhile.
    """
    _refuse_twice()
    _refuse_here()
    given, until = (timeout, why, owner, ignore_host_memory), time.monotonic() + min(patience, timeout)
    done = None if _locked.held_here else _locked.run(_suspend, 0, *given)
    while done is None and not _locked.held_here and not _leaves() and time.monotonic() < until:
        done = _locked.run(_suspend, _SLICE, *given)
    if done is None:
        raise Suspended(f"{_BUSY}", fix="wait for it")
    _tell(done[0])
    return done[0]


def ignores_host_memory() -> bool:
    """Whether the active budget has `suspend: {host_memory: ignore}`."""
    session = this.session
    section = session.guard.budget.suspend if session is not None and session.active else None
    return section is not None and section.host_memory == "ignore"


def _suspend(timeout: float, why: Why, owner: int | None, ignore_host_memory: bool) -> Suspension:
    global _now
    _refuse_twice()
    _refuse_here()
    _watch_forks()
    own = _now = _Own(chosen_way(), owner)
    task = Task(functools.partial(_leave, own, timeout, why))
    try:
        own.way.check(ignore_host_memory)
        return task.wait(after=own.finish)
    except BaseException:
        if own.suspension is None:
            _now = None
            own.way.close()
        elif task.result is not None and not task.given_up:  # the interruption came when it was off already
            _take_back(own)
        elif task.result is not None:
            _log.warning("the process stays suspended. fix: memguard.resume()")
        raise


def _leave(own: _Own, timeout: float, why: Why, calls: Calls) -> Suspension:
    """On the thread of the task."""
    try:
        found = own.way.off(why, timeout, calls, own.shut)
    except BaseException as error:
        if isinstance(error, CannotSuspend) or suspension.phase() is Phase.RUNNING:
            own.on()
            own.way.close()
        else:  # lost, or nobody knows: the gates stay closed, and `resume` asks the driver again
            own.off(error)
            own.suspension = Suspension(Process(own.pid, 0), {}, None, time.time(), 0.0, why)
            at_exit.arrange(_at_exit)
        raise
    own.off(sizes=dict(found.bytes))
    own.suspension = found
    lease = _lease()
    if lease is not None:
        lease.give_back()
    at_exit.arrange(_at_exit)
    threading.Thread(target=_watch, args=(own,), name="memguard-suspended", daemon=True).start()
    return found


def _take_back(own: _Own) -> None:
    """Interrupted when it was off already: bring it back, unless a second interruption comes in the wait for room."""
    _log.warning("the suspension was interrupted: the process is brought back; interrupt again to leave it suspended")
    try:
        _return(own, None, None)
    except BaseException as error:
        _log.warning("the process stays suspended (%s). fix: memguard.resume()", type(error).__name__)


def resume(timeout: float | None, progress: Progress | None, only: Suspension | None = None) -> None:
    """Bring this process back. As `memguard.resume`. What another thread is at ends first: it may just be leaving.

    `only`: from that suspension, and from none that came after it.
    """
    if _locked.held_here and current() is None:  # within the call that takes it off: there is nothing yet to bring back
        return
    patience = -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
    if _locked.held_here or _locked.run(_resume, patience, timeout, progress, only) is None:
        raise Suspended(f"{_BUSY}", fix="wait for it")


def _resume(timeout: float | None, progress: Progress | None, only: Suspension | None) -> None:
    own = _now
    if own is not None and own.suspension is not None and (only is None or only is own.suspension):
        if own.lost is not None:
            raise CannotResume(own.lost, lost=True)
        _return(own, timeout, progress)


def _at_exit(patience: float) -> None:
    resume(patience, None)


def _return(own: _Own, timeout: float | None, progress: Progress | None) -> None:
    """With the turn."""
    Task(functools.partial(_restore, own, timeout)).wait(progress, after=own.finish)


def _restore(own: _Own, timeout: float | None, calls: Calls) -> bool:
    """On the thread of the task."""
    assert own.suspension is not None
    lease = _lease()
    left = timeout if lease is None else lease.claim(timeout, calls.stop.is_set, calls.tell, used)
    suspension.enter(Phase.RETURNING)
    try:
        own.way.back(own.suspension, left, calls)
    except BaseException as error:
        own.off(error)
        if lease is not None and own.lost is None:
            lease.give_back()
        raise
    _is_back(own)
    return True


def _is_back(own: _Own, by: str = "") -> None:
    """It is on its GPUs again: all that needs no particular thread."""
    global _now
    own.on()
    found, _now = own.suspension, None
    at_exit.dismiss()
    own.way.close()
    if found is not None:
        seconds = max(time.time() - found.since, 0.0)
        text = f"back on its GPUs after {seconds:,.0f} s{by}: {format_size(found.total)}"
        _log.info("%s", text)
        own.events.append(Event(time.time(), "resumed", text, seconds=seconds, bytes=found.total))
    lease = _lease()
    if lease is not None:
        try:
            lease.is_back()
        except RuntimeError as error:  # last, as it starts a thread: the interpreter ends, or has no more threads
            _log.warning("back on its GPUs without its lease: %s", text_of(error))


def _came_back(own: _Own, by: str) -> None:
    """Another process has resumed it. With the turn."""
    if _now is own and own.lost is None:  # else it may be off its GPUs once more: nothing of that is undone here
        _is_back(own, by)
        own.finish()


def _watch(own: _Own) -> None:
    """Another process may bring it back (`memguard resume PID`)."""
    while _now is own and own.lost is None:
        try:
            back = own.way.returned(_LOOK)
        except Exception as error:
            _log.debug("whether the process is still suspended is unknown: %s", str(error))
            time.sleep(_LOOK)
            continue
        while back and _now is own and own.lost is None:  # while `resume` here is at it, it has the turn
            _locked.run(_came_back, _LOOK, own, ", brought back by another process")


def _tell(found: Suspension) -> None:
    _log.info("%s", found)
    _announce(Event(time.time(), "suspended", str(found), seconds=found.seconds, bytes=found.total))


def _announce(event: Event) -> None:
    session = this.session
    if session is not None and session.guard.active:
        session.announce(event)


def _lease() -> ModuleType | None:
    """What a suspension does with the budget's lease; None, and nothing of it is loaded, if there is none."""
    session = this.session
    if session is None or session.lease is None or not session.guard.active:
        return None
    from memguard._node.suspend.triggers import own_lease

    return own_lease


def awaited() -> bool:
    """Whether a call waits for this process to come back."""
    own = _now
    return own is not None and own.gate is not None and own.gate.inside > 0


def used(pid: int) -> bool | None:
    """Whether another process has used a GPU since that was asked last. This one cannot ask NVML itself, being off."""
    own = _now
    return None if own is None else own.way.used(pid)


def refusals() -> contextlib.ExitStack:
    """What the gate does on the thread of a block, until it is closed: before the process comes back."""
    own = _now
    return contextlib.ExitStack() if own is None or own.gate is None else own.gate.on_this_thread()


def current() -> Suspension | None:
    """The suspension of this process; None while it is on its GPUs."""
    own = _now
    return None if own is None else own.suspension


def _leaves() -> bool:
    """Whether a call is at taking it off."""
    own = _now
    return own is not None and own.suspension is None


def _refuse_twice() -> None:
    if suspension.now is not None:
        raise Suspended(suspension.off_its_gpus())


def _refuse_here() -> None:
    """What only memguard knows against it."""
    if on_monitor():
        raise CannotSuspend([("monitor", "a function of on_event runs on the monitor's thread", _NOT_THERE)])
    for kind, (pid, reason, fix) in [*suspension.forbidden.items()]:
        if pid == os.getpid():
            raise CannotSuspend([(kind, reason, fix)])
    if contexts.unusable_after_fork or this.was_forked:
        reason = "this process was forked from one that uses CUDA, and has no GPU of its own"
        raise CannotSuspend(
            [("forked", reason, "suspend the parent, or start children with multiprocessing's 'spawn'")]
        )


@functools.cache
def _watch_forks() -> None:
    life.at_fork(life.HookOrder.SUSPENSION, child=_forked)


def _forked() -> None:
    """A forked child has no CUDA: it is not suspended, and waits at no gate."""
    global _now, _locked
    own, _now, _locked = _now, None, LockedRunner(order=LockOrder.SUSPENSION)
    suspension.forked()
    at_exit.dismiss()
    if own is not None:
        _of_parent.append(own)  # what it keeps alive would call CUDA at its end
        if own.gate is not None:
            own.gate.closed = False
        if own.guard is not None:
            own.guard.resumed()
