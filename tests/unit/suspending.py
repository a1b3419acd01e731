"""A way off the GPUs without a driver, for the tests of a suspended process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memguard._base.types import MemoryInfo
from memguard._base.units import GIB
from memguard._devices import contexts, suspension
from memguard._devices.nvml import Nvml
from memguard._devices.phase import Phase
from memguard._node.identity import Process
from memguard._node.suspend import self_suspend
from memguard._node.suspend.course.task import Calls
from memguard._node.suspend.triggers import at_exit
from memguard._node.suspend.types import Suspension, Wait, Why
from memguard.errors import CannotResume, CannotSuspend


class FakeGate:
    """Closed, then open. Nothing is replaced."""

    unheld: tuple[str, ...] = ()

    def __init__(self, owner: int | None) -> None:
        self.owner, self.closed = owner, True
        self.told: Callable[[], object] = lambda: None
        self.destroys: Callable[[], object] = lambda: None

    def lift(self) -> None:
        self.closed = False
        self.told()

    def open(self) -> None:
        self.closed = False
        self.destroys()

    def on_this_thread(self) -> contextlib.ExitStack:
        return contextlib.ExitStack()


class FakeWay:
    """Says what it was asked, and fails, waits or is interrupted where a test wants it.

    `at` is called with the name of each step (`checks`, `lock`, `checkpoint`, `room`, `restore`), on the flow's thread.
    """

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.steps: list[str] = []
        self.at: Callable[[str], object] = lambda step: None
        self.room = threading.Event()
        self.room.set()
        self.by_others = threading.Event()
        self.gates: list[FakeGate] = []
        self.closed = 0
        self.running = True
        self.use_of: dict[int, bool | None] = {}
        """What NVML says of other processes' use of the GPUs, by PID."""
        self.memory_of: MemoryInfo | None = None

    def gate(self, owner: int | None, undo: Any) -> FakeGate:
        made = FakeGate(owner)
        undo.add("the gate", made.lift)
        self.gates.append(made)
        return made

    def _step(self, name: str) -> None:
        self.steps.append(name)
        self.at(name)

    def check(self, ignore_host_memory: bool) -> None:
        self._step("checks")

    def off(self, why: Why, timeout: float, calls: Calls, close: Callable[[], None]) -> Suspension:
        close()
        self._step("lock")
        if calls.stop.is_set():
            raise CannotSuspend([("driver", "this was interrupted; nothing was changed", "try again")])
        self.running = False
        self._step("checkpoint")
        if calls.stop.is_set() and self._wait(calls.give_up, None, calls):
            self.running = True
            raise CannotSuspend([("driver", "this was interrupted; it was brought back", "try again")])
        return Suspension(Process(1, 2), self.sizes, None, time.time(), 0.1, why)

    def back(self, found: Suspension, timeout: float | None, calls: Calls) -> None:
        self._step("room")
        if not self._wait(calls.stop, timeout, calls):
            raise CannotResume("there is no room; it stays suspended and whole", fix="memguard.resume()")
        self._step("restore")
        self.running = True

    def _wait(self, stop: threading.Event, timeout: float | None, calls: Calls) -> bool:
        until = time.monotonic() + (30 if timeout is None else timeout)
        while not self.room.is_set():
            calls.tell(Wait("GPU-1", 2 * GIB, GIB, 0, ("python (7) 70 GiB",), 0.1))
            if stop.is_set() or time.monotonic() >= until:
                return False
            time.sleep(0.005)
        return not stop.is_set()

    def returned(self, seconds: float) -> bool:
        return self.by_others.wait(min(seconds, 0.02))

    def memory(self, uuid: str) -> MemoryInfo | None:
        return self.memory_of

    def used(self, pid: int) -> bool | None:
        return self.use_of.get(pid)

    def close(self) -> None:
        self.closed += 1


@contextmanager
def way_of(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int] | None = None) -> Iterator[FakeWay]:
    """This process leaves by a fake way. At the end it is on its GPUs again, with nothing left."""
    way = FakeWay(sizes)
    monkeypatch.setattr(self_suspend, "chosen_way", lambda: way)
    monkeypatch.setattr(self_suspend, "closed_gate", way.gate)
    try:
        yield way
    finally:
        way.room.set()
        if self_suspend.current() is not None:
            way.at = lambda step: None
            self_suspend.resume(10, None)
        assert suspension.now is None and self_suspend.current() is None
        assert not any(gate.closed for gate in way.gates)
        assert way.running


def forget() -> None:
    """A lost process is as if it ran again: nothing else leads back from there."""
    own = self_suspend._now
    assert own is not None and suspension.phase() is Phase.LOST
    suspension.now = self_suspend._now = None
    own.on()
    own.finish()
    at_exit.dismiss()
    own.way.close()


class Touched(AssertionError):
    """NVML, CUDA or a framework was called while the process was off its GPUs."""


class Doors:
    """Each call through a door to the GPUs while the process is suspended is noted and fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.touched: list[str] = []
        self._patch = monkeypatch

    def guard(self, owner: Any, *names: str) -> None:
        for name in names:
            original = getattr(owner, name)

            def call(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                if suspension.now is not None and not suspension.now.moving:
                    self.touched.append(_name)
                    raise Touched(_name)
                return _original(*args, **kwargs)

            self._patch.setattr(owner, name, call)

    def library(self, cuda: Any) -> Any:
        """libcuda in whose place every call fails the test while suspended."""
        doors = self

        class Library:
            def __getattr__(self, name: str) -> Any:
                if suspension.now is not None and not suspension.now.moving:
                    doors.touched.append(name)
                    raise Touched(name)
                return getattr(cuda, name)

        self._patch.setattr(contexts, "_initialised", Library())
        return contexts._initialised


__all__ = ["Doors", "FakeWay", "Nvml", "Touched", "forget", "way_of"]


def left(folder: str | Path) -> list[str]:
    """The files of a folder, without the database that its processes share, and the file beside it, which stay."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(("leases.", "suspended.spare")))
