"""A helper undoes a lock after which nobody asks for anything: who asked may be stopped by that very lock."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memguard._base.units import GIB
from memguard._devices.checkpoint import State
from memguard._devices.simulated_checkpoint import SimulatedCheckpoint, Target
from memguard._node.identity import this_process
from memguard._node.suspend.driver import helper

ME = this_process()


class Asked:
    """A helper on a thread of this process, and what it answers."""

    def __init__(self) -> None:
        self.driver = SimulatedCheckpoint({"GPU-a": 16 * GIB})
        self.driver.targets[ME.pid] = Target({"GPU-a": GIB})
        (read, self._write), (self._answers, write) = os.pipe(), os.pipe()
        self._ends = (read, self._write, self._answers, write)
        serves = self.helper = helper.Helper(read, write, lambda: self.driver, os.getppid())
        self._thread = threading.Thread(target=serves.run)
        self._thread.start()

    def __call__(self, op: str, **more: Any) -> dict[str, Any]:
        request = {"id": 1, "op": op, **ME._asdict(), "limit": 10, **more}
        os.write(self._write, json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(os.read(self._answers, 1 << 16))
        return answer

    @property
    def state(self) -> State | None:
        return self.driver.state(ME.pid)[1]

    def end(self) -> None:
        os.write(self._write, b"")
        os.close(self._write)
        self._thread.join(10)
        for end in self._ends:
            if end != self._write:
                os.close(end)


class Nvml:
    """One GPU with process 41 on it."""

    def __init__(self) -> None:
        self.stamps: list[int] = []
        self.says: bool | None = True

    def devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(uuid="GPU-a")]

    def processes(self, uuid: str) -> dict[int, int | None]:
        return {41: 1}

    def used_since(self, uuid: str, pid: int, stamp: int) -> tuple[bool | None, int]:
        self.stamps.append(stamp)
        return self.says, stamp + 100


def test_a_helper_says_whether_a_process_has_used_a_gpu_since_it_was_asked(asked: Asked) -> None:
    nvml = asked.helper._nvml = Nvml()
    assert asked("used", pid=41)["used"] is True
    nvml.says = False
    assert asked("used", pid=41)["used"] is False and nvml.stamps == [0, 100]
    nvml.says = None
    assert asked("used", pid=41)["used"] is None
    assert asked("used", pid=42)["used"] is None  # NVML does not name it


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setattr(helper, "FORGOTTEN", 2.0)
    monkeypatch.setattr(helper, "_TICK", 0.05)
    one = Asked()
    yield one
    one.end()


def becomes(asked: Asked, state: State, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while asked.state is not state and time.monotonic() < end:
        time.sleep(0.01)
    return asked.state is state


def test_a_lock_that_is_forgotten_is_undone(asked: Asked) -> None:
    assert asked("lock", timeout_ms=100)["code"] == 0 and asked.state is State.LOCKED
    time.sleep(0.2)
    assert asked.state is State.LOCKED, "who settles still wants it"
    assert becomes(asked, State.RUNNING)
    assert asked("checkpoint")["code"] != 0, "who comes late is told"
    assert asked.state is State.RUNNING


def test_what_is_off_stays_off(asked: Asked) -> None:
    assert asked("lock", timeout_ms=100)["code"] == asked("checkpoint")["code"] == 0
    assert not becomes(asked, State.RUNNING, 3.0) and asked.state is State.CHECKPOINTED
    assert asked("restore")["code"] == 0 and asked.state is State.LOCKED
    assert becomes(asked, State.RUNNING)
