"""A process that suspends itself says so to others: its record, and one at a time."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from suspending import left

from memguard._base.units import GIB
from memguard._devices.simulated_checkpoint import SimulatedCheckpoint, Target
from memguard._node.identity import folder, this_process
from memguard._node.suspend.backend import SuspendBackend
from memguard._node.suspend.course.task import Calls
from memguard._node.suspend.driver.simulated import Direct
from memguard._node.suspend.store import records
from memguard._node.suspend.store.work_lock import Work
from memguard.errors import CannotResume, CannotSuspend

ME = this_process()


@pytest.fixture
def route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuspendBackend:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    driver = SimulatedCheckpoint({"GPU-a": 16 * GIB})
    driver.targets[os.getpid()] = Target({"GPU-a": 4 * GIB})
    return SuspendBackend(Direct(driver))


def test_it_is_written_down_while_it_is_off(route: SuspendBackend) -> None:
    seen: list[str] = []

    def close() -> None:
        seen.append(str(records.of(ME)))

    found = route.off("idle", 1.0, Calls(), close)
    record = records.of(ME)
    assert seen == ["None"] and record is not None
    assert (record.step, record.why, record.bytes, record.measured) == ("suspended", "idle", {"GPU-a": 4 * GIB}, True)
    route.back(found, 1.0, Calls())
    assert records.of(ME) is None and left(folder()) == []


def test_what_is_refused_is_not_written_down(route: SuspendBackend) -> None:
    assert isinstance(route.door, Direct)
    route.door.driver.targets[os.getpid()].managed = True
    with pytest.raises(CannotSuspend, match="managed"):
        route.off("asked", 1.0, Calls(), lambda: None)
    assert records.of(ME) is None


def test_not_while_another_process_is_at_it(route: SuspendBackend) -> None:
    closed: list[None] = []
    with Work(ME, "unsafe"), pytest.raises(CannotSuspend, match="is suspending or resuming it just now"):
        route.off("asked", 1.0, Calls(), lambda: closed.append(None))
    assert closed == []  # no gate was closed
    found = route.off("asked", 1.0, Calls(), lambda: None)
    with Work(ME, "unsafe"), pytest.raises(CannotResume, match="is suspending or resuming it just now"):
        route.back(found, 0.0, Calls())
    calls = Calls()
    calls.stop.set()
    with Work(ME, "unsafe"), pytest.raises(CannotResume):
        route.back(found, None, calls)
    other = Work(ME, "unsafe")
    other.__enter__()
    threading.Timer(0.3, other.__exit__).start()
    route.back(found, None, Calls())  # it waits for the other one
    assert records.of(ME) is None


def test_without_a_place_for_the_record_nothing_is_touched(
    route: SuspendBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        patched.setattr(sqlite3, "connect", fails)
        with pytest.raises(CannotSuspend, match=r"its record cannot be written: .*No space left"):
            route.off("asked", 1.0, Calls(), lambda: None)
    assert isinstance(route.door, Direct) and route.door.driver.targets[os.getpid()].calls == []
    os.chmod(folder(), 0o777)
    with pytest.raises(CannotSuspend, match="cannot be trusted"):
        route.off("asked", 1.0, Calls(), lambda: None)
