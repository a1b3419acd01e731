"""The lease of a suspended process: given back when it leaves its GPUs, and claimed again before it returns."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._devices import suspension
from memguard._node.identity import machine
from memguard._node.leases import decide, said, store
from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Claim
from memguard._node.suspend.types import Progress, Wait
from memguard._runtime.runtime import this
from memguard.errors import CannotResume, LeaseRefused, MemguardError, NotActive

Used = Callable[[int], "bool | None"]
_INTERRUPTED = "it was interrupted while it waited for its lease"
back_since = float("-inf")
"""When this process was on its GPUs again, by the monotonic clock."""


def current() -> Lease | None:
    """This process's lease, if its budget has one."""
    session = this.session
    lease = session.lease if session is not None and session.guard.active else None
    return lease if isinstance(lease, Lease) else None


def give_back() -> None:
    """The process is off its GPUs: its lease is for others."""
    lease = current()
    if lease is None:
        return
    try:
        lease.leave()
    except MemguardError as error:
        _log.warning("the lease is kept, although the process is off its GPUs: %s", text_of(error))


def claim(timeout: float | None, stop: Callable[[], bool], tell: Progress, used: Used) -> float | None:
    """Claim the lease again, before the process returns. What is left of `timeout` (seconds; None: no end).

    `used` as for `MakingRoom`. If the database cannot be used, the process returns without its lease, and `is_back`
    claims that; not if `stop` is set or the time is over by then. Raises CannotResume; then it waits for nothing any
    more.
    """
    lease = current()
    if lease is None or lease.held:
        return timeout
    from memguard._node.suspend.triggers.making_room import MakingRoom

    began, room = time.monotonic(), MakingRoom(lease, used=used)

    def look(claims: list[Claim]) -> None:
        for wait in _waits(lease, claims, time.monotonic() - began):
            tell(wait)
        if suspends_idle():
            room.look(claims)

    try:
        lease.back(math.inf if timeout is None else timeout, unwanted=stop, look=look, hurry=True)
    except NotActive:
        if (now := current()) is not None and now.held:  # its turn came with the interruption
            give_back()
        raise CannotResume(_INTERRUPTED) from None
    except LeaseRefused as error:
        longer = "wait longer (memguard.resume(timeout='1h')), or end or suspend one of them"
        raise CannotResume(f"its lease cannot be had again: {error.advice.reason}", fix=longer) from None
    except CannotResume:
        raise
    except MemguardError as error:
        if stop():
            raise CannotResume(_INTERRUPTED) from None
        if timeout and time.monotonic() - began >= timeout:  # 0: one attempt, and that was it
            raise CannotResume(error.advice.within("its lease cannot be had again")) from None
        _log.warning("comes back on its GPUs without its lease: %s", text_of(error))
    return None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)


def is_back() -> None:
    """The process is on its GPUs. If another one has brought it back, or the database could not be used, it is without
    its lease yet."""
    global back_since
    back_since = time.monotonic()
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


def suspends_idle() -> bool:
    """Whether it may ask others that have nothing to do to leave their GPUs (`on_wait: suspend-idle`)."""
    session = this.session
    return session is not None and session.guard.budget.device.on_wait == "suspend-idle"


def _waits(lease: Lease, claims: list[Claim], seconds: float) -> list[Wait]:
    """How it stands with each GPU, as progress shows it."""
    taken, here = decide.leased(store.wants(claims)), machine()
    held = [claim for claim in claims if claim.state == "held" and claim.id != lease.number]
    ahead = [claim for claim in claims if claim.state == "waiting" and claim.id < (lease.number or 0)]
    found = []
    for gpu, part in lease.parts.items():
        free = max(part.total - taken.get(gpu, 0), 0)
        lines = tuple(said.holding(claim, gpu, here) for claim in held if gpu in claim.parts)
        found.append(Wait(part.uuid, part.bytes, free, sum(gpu in one.parts for one in ahead), lines, seconds))
    return found
