"""A process whose lease another one waits for: it leaves its GPUs if it has nothing to do, and comes back in its turn.

It gives the lease back with the GPUs, and queues for it again at once. A thread of its own waits there, and brings the
process back. While nobody needs the process it only waits; once a call waits for its GPUs, or `memguard.resume`,
it asks others to leave, if the budget's `on_wait` says so.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Claim
from memguard._node.suspend import self_suspend
from memguard._node.suspend.triggers import notebook_cells, own_lease
from memguard._node.suspend.types import Suspension
from memguard._runtime.runtime import this
from memguard.errors import CannotResume, CannotSuspend, MemguardError, NotActive

_LOCK = 5.0
"""Seconds for the work on the GPUs to end. There should be none."""
_AGAIN = 5.0
"""Seconds until it is tried again to bring the process back."""
_PATIENCE = 2.0
"""Seconds in which it must be known who waits."""


def leave() -> Suspension:
    """Take this process off its GPUs, for one that waits for its lease. On a thread of the listener's.

    Raises CannotSuspend if it has something to do, or none of its own reasons allows it.
    """
    lease = own_lease.current()
    if lease is None or not lease.held:
        raise _busy("it holds no lease")
    shell = notebook_cells.shell_here()
    with notebook_cells.attach(shell).none() if shell is not None else nullcontext(True) as free:
        if not free:
            raise _busy("a cell runs in it")
        if why := _at_work() or _unneeded(lease):
            raise _busy(why)
        ignored = self_suspend.ignores_host_memory()
        found = self_suspend.suspend(_LOCK, "lease", notebook_cells.owner(), ignored, patience=0)
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
    since = time.monotonic() - own_lease.back_since
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


def _return(found: Suspension, lease: Lease) -> None:
    from memguard._node.suspend.triggers.making_room import MakingRoom

    room = MakingRoom(lease, used=self_suspend.used)
    pid = os.getpid()

    def over() -> bool:
        return self_suspend.current() is not found or os.getpid() != pid

    def look(claims: list[Claim]) -> None:
        if own_lease.suspends_idle() and self_suspend.awaited():
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
