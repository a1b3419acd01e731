"""A process whose lease another one waits for: it leaves its GPUs if it has nothing to do, and comes back in its turn.

It gives the lease back with the GPUs, and queues for it again at once. A thread of its own waits there, and brings the
process back. While nobody needs the process it only waits; once a call waits for its GPUs, or `memguard.resume`,
it asks others to leave, if the budget's `on_wait` says so.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._devices import suspension
from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Claim
from memguard._node.suspend import self_suspend
from memguard._node.suspend.triggers import notebook_cells
from memguard._node.suspend.types import Progress, Suspension, Wait
from memguard._runtime.runtime import this
from memguard.errors import CannotResume, CannotSuspend, LeaseRefused, MemguardError, NotActive

_LOCK = 5.0
"""Seconds for the work on the GPUs to end. There should be none."""
_AGAIN = 5.0
"""Seconds until it is tried again to bring the process back."""
_PATIENCE = 2.0
"""Seconds in which it must be known who waits."""
_back = float("-inf")
"""When this process was on its GPUs again, by the monotonic clock."""


def current() -> Lease | None:
    """This process's lease, if its budget has one."""
    session = this.session
    lease = session.lease if session is not None and session.guard.active else None
    return lease if isinstance(lease, Lease) else None


# off


def leave() -> Suspension:
    """Take this process off its GPUs, for one that waits for its lease. On a thread of the listener's.

    Raises CannotSuspend if it has something to do, or none of its own reasons allows it.
    """
    lease = current()
    if lease is None or not lease.held:
        raise _busy("it holds no lease")
    shell = notebook_cells.shell_here()
    with notebook_cells.attach(shell).none() if shell is not None else nullcontext(True) as free:
        if not free:
            raise _busy("a cell runs in it")
        if why := _at_work() or _unneeded(lease):
            raise _busy(why)
        from memguard._node import suspend as _suspend

        found = self_suspend.suspend(_LOCK, "lease", notebook_cells.owner(), _suspend.ignores_host_memory(), patience=0)
    threading.Thread(target=_return, args=(found, lease), name="memguard-lease", daemon=True).start()
    return found


def _at_work() -> str:
    """What it does, as far as memguard knows; empty if nothing. Who waits has looked at what NVML says."""
    session = this.session
    if session is None:
        return ""
    if this.applying:  # it may end the active budget, which cannot be ended off the GPUs
        return "memguard.init is at work in it"
    if session.guard.admission.working:
        return "a workload runs in it"
    suspend = session.guard.budget.suspend
    since = time.monotonic() - _back
    if suspend is not None and since < (suspend.on_demand or 0.0):
        return f"it has been back on its GPUs for {since:.0f} s"
    return ""


def _unneeded(lease: Lease) -> str:
    """Why it would leave in vain: who asked may wait no more by now. Empty if it would not."""
    try:
        claims = lease.store.claims(_PATIENCE)
    except MemguardError as error:
        return f"who waits for its lease cannot be read: {text_of(error)}"
    if any(one.state == "waiting" and not lease.parts.keys().isdisjoint(one.parts) for one in claims):
        return ""
    return "nobody waits for its lease"


def _busy(why: str) -> CannotSuspend:
    return CannotSuspend([("busy", why, "wait for it: it is asked again")])


def given_back() -> None:
    """The process is off its GPUs: its lease is for others."""
    lease = current()
    if lease is None:
        return
    try:
        lease.leave()
    except MemguardError as error:
        _log.warning("the lease is kept, although the process is off its GPUs: %s", text_of(error))


# back


def have(timeout: float | None, stop: Callable[[], bool], tell: Progress) -> float | None:
    """Have the lease again, before the process comes back. What is left of `timeout` (seconds; None: no end).

    If the database cannot be used, it comes back without its lease, and `is_back` claims that. Raises CannotResume;
    then it waits for nothing any more.
    """
    lease = current()
    if lease is None or lease.held:
        return timeout
    from memguard._node.suspend.triggers.making_room import MakingRoom

    began, room = time.monotonic(), MakingRoom(lease)

    def look(claims: list[Claim]) -> None:
        for wait in _waits(lease, claims, time.monotonic() - began):
            tell(wait)
        if _suspends_idle():
            room.look(claims)

    try:
        lease.back(math.inf if timeout is None else timeout, unwanted=stop, look=look, hurry=True)
    except NotActive:
        if (now := current()) is not None and now.held:  # its turn came with the interruption
            given_back()
        raise CannotResume("it was interrupted while it waited for its lease") from None
    except LeaseRefused as error:
        longer = "wait longer (memguard.resume(timeout='1h')), or end or suspend one of them"
        raise CannotResume(f"its lease cannot be had again: {error.advice.reason}", fix=longer) from None
    except MemguardError as error:
        _log.warning("comes back on its GPUs without its lease: %s", text_of(error))
    return None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)


def is_back() -> None:
    """The process is on its GPUs. If another one has brought it back, or the database could not be used, it is without
    its lease yet."""
    global _back
    _back = time.monotonic()
    lease = current()
    if lease is not None and not lease.held and lease.number is not None:
        threading.Thread(target=_claim, args=(lease,), name="memguard-lease", daemon=True).start()


def _claim(lease: Lease) -> None:
    def say(text: str) -> None:
        _log.warning("back on its GPUs without its lease: %s", text)

    try:
        lease.back(say=say, unwanted=lambda: suspension.now is not None)
    except NotActive:  # its budget is over, or it is off its GPUs again
        return
    except MemguardError as error:
        _log.warning("back on its GPUs without its lease: %s", text_of(error))


def _return(found: Suspension, lease: Lease) -> None:
    from memguard._node.suspend.triggers.making_room import MakingRoom

    room = MakingRoom(lease)
    pid = os.getpid()

    def over() -> bool:
        return self_suspend.current() is not found or os.getpid() != pid

    def look(claims: list[Claim]) -> None:
        if _suspends_idle() and self_suspend.awaited():
            room.look(claims)

    said = ""
    while not over():
        try:
            lease.back(unwanted=over, look=look)
            self_suspend.resume(None, None, found)
            return
        except NotActive:  # it is back already; or another thread has given the lease back, and it is claimed again
            continue
        except Exception as error:
            if isinstance(error, CannotResume) and error.lost:
                return
            if text_of(error) != said:
                said = text_of(error)
                _log.warning("it stays off its GPUs for now: %s", said)
            time.sleep(_AGAIN)


def _suspends_idle() -> bool:
    session = this.session
    return session is not None and session.guard.budget.device.on_wait == "suspend-idle"


def _waits(lease: Lease, claims: list[Claim], seconds: float) -> list[Wait]:
    """How it stands with each GPU, as progress shows it."""
    from memguard._node.identity import machine
    from memguard._node.leases import decide, said, store

    taken, here = decide.leased(store.wants(claims)), machine()
    held = [claim for claim in claims if claim.state == "held" and claim.id != lease.number]
    ahead = [claim for claim in claims if claim.state == "waiting" and claim.id < (lease.number or 0)]
    found = []
    for gpu, part in lease.parts.items():
        free = max(part.total - taken.get(gpu, 0), 0)
        lines = tuple(said.holding(claim, gpu, here) for claim in held if gpu in claim.parts)
        found.append(Wait(part.uuid, part.bytes, free, sum(gpu in one.parts for one in ahead), lines, seconds))
    return found
