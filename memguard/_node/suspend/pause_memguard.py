"""Nothing of memguard's own calls CUDA or NVML while the process is off its GPUs.

What runs by itself or is under way ends first: a sample of the monitor, a trim, a reading. Then the guard answers from
its last reading, and `_devices.suspension` tells all others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memguard._base.types import MemoryInfo
from memguard._base.undo import Undo
from memguard._devices import suspension
from memguard._devices.phase import Phase
from memguard._devices.suspension import Off
from memguard._guard.guard import Guard
from memguard._guard.suspended import Figures
from memguard._ledger.types import Ledger
from memguard._runtime.runtime import this
from memguard._runtime.session import Session
from memguard.errors import CannotSuspend

_NVML = "memguard._devices.nvml"
"""If it was never loaded, there is nothing to forget."""


def begin(undo: Undo, seconds: float, figures: Figures | None = None) -> Ledger | None:
    """Be quiet, until `undo` runs. The last reading, if a budget is active.

    Raises CannotSuspend if something that is under way does not end within `seconds`; DeviceError if a GPU cannot be
    read. `figures` are asked for what the GPUs have while this process cannot ask.
    """
    until = time.monotonic() + seconds
    if not this.lock.acquire(timeout=_left(until)):
        raise _busy("memguard.init or shutdown on another thread", "let it end")
    try:
        return _begin(undo, until, figures)
    finally:
        this.lock.release()


def _begin(undo: Undo, until: float, figures: Figures | None) -> Ledger | None:
    session = this.session
    if session is None or not session.active:
        undo.add("the word that the process is suspended", end)
        suspension.enter(Phase.LEAVING)
        _forget_nvml()
        return None
    guard = session.guard
    _pause(session, undo, until)
    reading = guard.ledger()
    with _alone(guard, until):
        undo.add("the guard of a suspended process", lambda: _wake(guard))
        off = Off(_own_bytes(reading), time.time(), Phase.LEAVING)
        # First: a reading on another thread, which is refused from the next line on, finds the guard suspended.
        guard.suspend(reading, figures if figures is not None else _unknown, off)
        suspension.enter(Phase.LEAVING, off.bytes)
    _forget_nvml()
    if not guard.reader.wait(_left(until)):  # one that began before
        raise _busy("a reading of the GPUs", "run `nvidia-smi` to see if the driver hangs, and try again")
    return reading


def end() -> None:
    """The process is on its GPUs. The guard asks them from now on."""
    session = this.session
    suspension.enter(Phase.RUNNING)
    if session is not None:
        session.guard.resumed()


def _wake(guard: Guard) -> None:
    suspension.enter(Phase.RUNNING)  # first: the guard asks the GPUs from now on
    guard.resumed()


def _pause(session: Session, undo: Undo, until: float) -> None:
    monitor = session.monitor
    if monitor is None:
        return
    undo.add("the pause of the monitor", monitor.resume)
    if not monitor.pause(_left(until)):
        raise _busy("the monitor's sample", "run `nvidia-smi` to see if the driver hangs, and try again")


@contextmanager
def _alone(guard: Guard, until: float) -> Iterator[None]:
    """With no thread within a call of the guard that frees memory or changes a cap."""
    if not guard.caps.lock.acquire(timeout=_left(until)):
        raise _busy("a call of memguard on another thread", "let it end (a trim, a resize, a request for room)")
    try:
        yield
    finally:
        guard.caps.lock.release()


def _busy(what: str, remedy: str) -> CannotSuspend:
    return CannotSuspend([("busy", f"{what} has not ended", remedy)])


def _own_bytes(reading: Ledger) -> dict[str, int]:
    return {part.device.uuid: part.process for part in reading.devices if part.process is not None}


def _forget_nvml() -> None:
    module = sys.modules.get(_NVML)
    if module is not None:
        module.forget_prepared()


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def _unknown(uuid: str) -> MemoryInfo | None:
    return None
