"""When a notebook's process has had nothing to do for long enough, it leaves its GPUs.

`idle_for` decides, from what was seen. `Watcher` looks once a second at most, on a thread of its own. Nothing here
suspends a process while a cell runs, or twice: `leave` of `session` sees to the former, `self_suspend` to the latter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.units import format_duration
from memguard._devices import suspension
from memguard._devices.nvml import Nvml
from memguard._runtime.runtime import this
from memguard._runtime.sampler import Flag
from memguard.errors import CannotSuspend, MemguardError

LOOK = 1.0
"""Seconds between two looks, at most. NVML keeps the utilisation of a process for some seconds only."""
_PARTS = 10
"""Looks within the time that counts as idle, at least."""
_AGAIN, _SLOWEST = 60.0, 3600.0
"""Seconds until a suspension that was refused is tried again: twice as long each time, up to the second."""


class Look(NamedTuple):
    """What one look saw. `time` is monotonic, in seconds.

    `cells`: whether a cell runs, or has run since the look before. `used`: whether this process has used a GPU since
    then; None if nobody knows. `off`: whether it is off its GPUs.
    """

    time: float
    cells: bool
    used: bool | None
    off: bool = False

    @property
    def active(self) -> bool:
        return self.cells or bool(self.used) or self.off


def idle_for(looks: Sequence[Look]) -> float:
    """Seconds at the last look without anything that was seen to be active. It counts from the first look at most."""
    if not looks:
        return 0.0
    last_active = next((look.time for look in reversed(looks) if look.active), looks[0].time)
    return looks[-1].time - last_active


def patience(refusals: int) -> float:
    """Seconds until the next attempt, after so many refusals in a row."""
    return 0.0 if refusals <= 0 else min(_AGAIN * 2.0 ** min(refusals - 1, 30), _SLOWEST)


class Watcher:
    """Calls `leave` after `seconds` in which nothing was active.

    `cells` says whether a cell runs or has run since it was last asked, `used` whether a GPU was used since then (None:
    unknown). `leave` returns whether the process has left its GPUs; it may raise. `say` is for people.
    """

    def __init__(
        self,
        seconds: float,
        cells: Callable[[], bool],
        used: Callable[[], bool | None],
        leave: Callable[[], bool],
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._cells, self._used, self._leave, self._say, self._clock = cells, used, leave, say, clock
        self._looks: list[Look] = []
        self._refused = 0
        self._next = float("-inf")
        """When it is tried again."""
        self._said: set[str] = set()
        self._pid = os.getpid()
        self._stop = Flag()
        self._thread: Thread | None = None

    @property
    def alive(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stop.is_set() and self._pid == os.getpid()

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="memguard-idle", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """It suspends nothing from now on, unless it is just doing that."""
        self._stop.set()

    def _run(self) -> None:
        pause = min(LOOK, self.seconds / _PARTS)
        while not self._stop.wait(pause) and self._pid == os.getpid():
            try:
                self.look()
            except BaseException as error:  # of what a program has replaced, such as `logging`
                self._once("watch", f"the watch for idleness failed: {text_of(error)}")

    def look(self) -> bool:
        """Look once. Returns whether the process has left its GPUs now."""
        look = self._seen()
        if look.cells:  # what was refused may have changed
            self._refused, self._next = 0, float("-inf")
        # Of the looks before the last active one nothing counts, and of those after it only the first and the last.
        self._looks = [look] if look.active or not self._looks else [self._looks[0], look]
        if look.off or idle_for(self._looks) < self.seconds or look.time < self._next:
            return False
        return self._suspended(look.time)

    def _seen(self) -> Look:
        now, cells = self._clock(), self._cells()
        if _off():
            return Look(now, cells, None, off=True)
        used = self._used()
        if _off():  # by another thread meanwhile
            return Look(now, cells, None, off=True)
        if used is None:
            self._once("unknown", "NVML does not say whether this process uses a GPU: only cells count as work")
        return Look(now, cells, used)

    def _suspended(self, now: float) -> bool:
        try:
            return self._leave()
        except CannotSuspend as error:
            key, text = "refused " + ",".join(sorted(one[0] for one in error.reasons)), str(error)
        except Exception as error:
            key, text = f"failed {type(error).__name__}", text_of(error)
        self._refused += 1
        self._next = now + patience(self._refused)
        self._once(key, f"idle for {format_duration(self.seconds)}, and stays on its GPUs: {text}", loud=True)
        return False

    def _once(self, key: str, text: str, loud: bool = False) -> None:
        if key in self._said:
            return
        self._said.add(key)
        if loud:
            self._say(text)
        else:
            _log.info("suspend: %s", text)


class Usage:
    """Whether a process, this one unless `pid` is another, has used a GPU since that was asked last, by NVML."""

    def __init__(self, nvml: Nvml | None = None, pid: int | None = None) -> None:
        self._nvml, self._of = nvml or Nvml(), pid
        self._uuids: list[str] = []
        self._stamps: dict[str, int] = {}

    def __call__(self) -> bool | None:
        """None if NVML does not say: also where it does not name the process, as in another PID namespace."""
        if simulated():
            return None
        try:
            answers = [*self._answers(self._of or os.getpid())]
        except MemguardError:  # also Suspended, if another thread suspends the process just now
            self._uuids = []
            return None
        return True if True in answers else None if not answers or None in answers else False

    def _answers(self, pid: int) -> Iterator[bool | None]:
        """Of each GPU on which NVML names this process."""
        self._uuids = self._uuids or [device.uuid for device in self._nvml.devices()]
        for uuid in self._uuids:
            if pid in self._nvml.processes(uuid):
                used, self._stamps[uuid] = self._nvml.used_since(uuid, pid, self._stamps.get(uuid, 0))
                yield used


def simulated() -> bool:
    """Whether the GPUs of the active budget are simulated."""
    session = this.session
    return session is not None and session.guard.active and session.guard.host.simulated


def _off() -> bool:
    return suspension.now is not None
