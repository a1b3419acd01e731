"""The suspension state of this process. Every layer checks this state before a call to CUDA or NVML.

While a process is suspended, NVML's calls and CUDA's allocations block, and a synchronize or an event query crashes the
process (SIGSEGV; driver 580.159, H200). So memguard must call neither CUDA nor NVML then. `_node.suspend` changes this
state by `enter`; the ledger, the monitor, `memguard top`, metrics, trims and exit hooks read it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.units import format_size
from memguard._devices.phase import SETTLED, TRANSITIONS, IllegalTransition, Phase
from memguard.errors import Suspended


@dataclass(frozen=True)
class Off:
    """The state of a suspended process. `since` is the Unix time of the suspension, `bytes` the bytes moved to the host
    from each GPU (UUID)."""

    bytes: dict[str, int]
    since: float
    phase: Phase = Phase.OFF
    """Never RUNNING."""

    @property
    def moving(self) -> bool:
        """True while a suspension or a resume is in progress."""
        return self.phase not in SETTLED

    def __str__(self) -> str:
        """The text for messages, such as `suspended, 12.3 GiB in host memory`."""
        if self.phase is Phase.LOST:
            return "lost: the driver has destroyed what it had on its GPUs"
        return f"suspended, {self.text_of_bytes} in host memory" if self.bytes else "suspended"

    @property
    def text_of_bytes(self) -> str:
        """The bytes of all GPUs as text, such as `12.3 GiB`."""
        return format_size(sum(self.bytes.values()))


LOST_FIX = "end it and start it again"
"""The fix in every message about a process in the phase LOST."""
now: Off | None = None
"""None in the phase RUNNING. `enter` sets `now` before memguard blocks CUDA calls, and resets `now` to None before
memguard permits CUDA calls again. Each change is one assignment, so that readers take no lock."""
forbidden: dict[str, tuple[int, str, str]] = {}
"""Operations in progress that forbid a suspension, by kind: the PID, the reason, and the fix.

An operation adds its entry when it begins and removes it when it ends. The PID excludes entries that a forked child
inherited.
"""
_deferred: deque[Callable[[], object]] = deque()
"""Driver calls that destructors deferred."""
_of_parent: list[deque[Callable[[], object]]] = []


def phase() -> Phase:
    """The phase of this process."""
    off = now
    return Phase.RUNNING if off is None else off.phase


def enter(new: Phase, sizes: dict[str, int] | None = None) -> None:
    """Change the phase. Called only by the thread that holds the suspension lock.

    `sizes`: the bytes that leave each GPU; None keeps the earlier sizes. Entering the current phase again is legal.
    Raises IllegalTransition for a change that is not in `TRANSITIONS`.
    """
    global now
    off = now
    before = Phase.RUNNING if off is None else off.phase
    if new is not before and (before, new) not in TRANSITIONS:
        raise IllegalTransition(before, new)
    if new is Phase.RUNNING:
        now = None
    elif off is None:
        now = Off(sizes or {}, time.time(), new)
    else:
        now = Off(sizes or off.bytes, off.since, new)


def refused(what: str) -> Suspended:
    """Create the error of a call that needs the GPUs while the process is suspended. `what` names the call."""
    return Suspended(off_its_gpus(what))


def off_its_gpus(what: str = "") -> Advice:
    """The text of the error that `refused` creates. Without `what`, the text is for the error of a second
    suspension."""
    head = f"{what}: this process is" if what else "this process is already"
    off = now
    since = "" if off is None else f" since {time.strftime('%H:%M:%S', time.localtime(off.since))}"
    if off is not None and off.phase is Phase.LOST:
        return Advice(f"{head} off its GPUs{since} ({off})", LOST_FIX)
    return Advice(
        f"{head} off its GPUs{since} ({off or 'suspended'})",
        f"memguard.resume(), or `memguard resume {os.getpid()}` from a shell; inside "
        "`with memguard.suspended():` end the block first",
    )


def check(what: str) -> None:
    """Raise Suspended if this process is suspended."""
    if now is not None:
        raise refused(what)


def defer(call: Callable[[], object]) -> None:
    """Defer a call until the process is resumed. Takes no lock, so that destructors may call it on any thread."""
    _deferred.append(call)


def run_deferred() -> None:
    """Run the deferred calls, after a resume."""
    while _deferred:
        try:
            call = _deferred.popleft()
        except IndexError:  # another thread took the last call
            return
        try:
            call()
        except Exception as error:
            _log.warning("what was put off while the process was suspended failed: %s", text_of(error))


def forked() -> None:
    """In a forked child, which has no CUDA, drop the parent's deferred calls."""
    global now, _deferred
    now = None
    _of_parent.append(_deferred)
    _deferred = deque()
