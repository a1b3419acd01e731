"""Ctrl-C anywhere in `init`, `shutdown`, `guard`, `resize` and `workload`: the next call finishes what is left.

At each point at which Python may run a signal handler, one after the other, for real: nothing is drawn by chance.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guards import cap_of, replaced
from interruptions import Points, ctrl_c

import memguard
from memguard._base import life
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._runtime import runtime

STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "97"))
"""Every so many points are tried. 1 tries all."""


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimulatedFramework]:
    """Frameworks that live as long as the test, as real ones do; torch and pycuda are imported already."""
    kept: dict[str, SimulatedFramework] = {}

    def make(host: SimulatedHost, name: str) -> SimulatedFramework:
        kept[name] = SimulatedFramework(host, name, imported=name != "tensorflow")
        return kept[name]

    replaced(monkeypatch, torch=make, tensorflow=make, pycuda=make)
    return kept


def budget(folder: Path, gib: int = 4) -> dict[str, Any]:
    return {
        "version": 1,
        "frameworks": {name: {"limit": f"{gib}GiB"} for name in ("torch", "tensorflow", "pycuda")},
        "monitor": {"interval": "10s", "timeline": str(folder / "{pid}.jsonl")},
    }


def state(folder: Path) -> dict[str, object]:
    """What must be as before: hooks, threads, files and locks of this process."""
    files = sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(
        f"/proc/self/fd/{n}"))  # fmt: skip
    locked = []
    for path in folder.glob("*.jsonl"):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(path.name)
    return {
        "finders": list(sys.meta_path),
        "excepthooks": (sys.excepthook, threading.excepthook),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "atexit": list(life.exits),
        "files": [name for name in files if str(folder) in name],
        "locked": locked,
        "trials": [path.name for path in folder.iterdir() if "check" in path.name or "tmp" in path.name],
        "handlers": list(logging.getLogger("memguard").handlers),
        "environ": dict(os.environ),
    }


def workload() -> None:
    with memguard.workload("w", framework="torch", needs="1GiB"):
        memguard.ledger()


def in_guard(folder: Path) -> None:
    with memguard.guard(budget(folder), simulate="h200"):
        pass


def free(lock: Any) -> bool:
    """Whether another thread can have the lock."""
    taken: list[bool] = []

    def take() -> None:
        taken.append(lock.acquire(timeout=10))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


CALLS: dict[str, tuple[bool, Callable[[Path], object]]] = {
    "init": (False, lambda folder: memguard.init(budget(folder), simulate="h200")),
    "replace": (True, lambda folder: memguard.init(budget(folder, 8), simulate="h200", replace=True)),
    "shutdown": (True, lambda folder: memguard.shutdown()),
    "guard": (False, in_guard),
    "resize": (True, lambda folder: memguard.resize("torch", "2GiB")),
    "workload": (True, lambda folder: workload()),
    "trim": (True, lambda folder: memguard.trim()),
}
"""Whether a budget is active before, and the call."""


def attempt(
    name: str, folder: Path, kept: dict[str, SimulatedFramework], at: int | None, how: Callable[[], object] | None
) -> tuple[Points, list[str]]:
    """Interrupt the call at that point. What is wrong afterwards."""
    active, call = CALLS[name]
    before = state(folder)
    if active:
        memguard.init(budget(folder), simulate="h200")
    points, wrong = Points(at, how), []
    try:
        points.run(lambda: call(folder))
        if points.place:
            wrong.append("it swallowed the interruption")
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        wrong.append(f"{type(error).__name__}: {error}")
    found = runtime.this.session
    if found is not None and found.active:  # wholly
        try:
            memguard.ledger()
        except BaseException as error:
            wrong.append(f"active, but {type(error).__name__}: {error}")
        if found.guard.budget.monitor is not None and not (found.monitor and found.monitor.alive):
            wrong.append("active without its monitor")
    try:
        if memguard.shutdown():
            wrong.append("something stays")
    except BaseException as error:
        wrong.append(f"the next shutdown: {type(error).__name__}: {error}")
    if runtime.this.session is not None:
        wrong.append("still active after the next shutdown")
    after = state(folder)
    wrong += [f"{what}: {after[what]} instead of {before[what]}" for what in before if before[what] != after[what]]
    wrong += [f"{one.name} has a cap" for one in kept.values() if cap_of(one) is not None]
    if not free(runtime.this.lock):
        wrong.append("a lock is held for ever")
    try:  # it can be used again
        memguard.init(budget(folder), simulate="h200")
        memguard.ledger()
        memguard.shutdown()
    except BaseException as error:
        wrong.append(f"used again: {type(error).__name__}: {error}")
    return points, wrong


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # it was just opened for reading, and is closed
@pytest.mark.parametrize("how", [None, ctrl_c], ids=["raised", "signal"])
@pytest.mark.parametrize("name", CALLS)
def test_after_an_interruption_the_next_call_finishes(
    name: str, how: Callable[[], object] | None, tmp_path: Path, standing: dict[str, SimulatedFramework]
) -> None:
    attempt(name, tmp_path, standing, None, how)  # imports what is imported late
    points, wrong = attempt(name, tmp_path, standing, None, how)
    assert wrong == []
    failures = {}
    tried = range(1, points.count + 1, STRIDE)
    for at in tried:
        interrupted, wrong = attempt(name, tmp_path, standing, at, how)
        if wrong:
            failures[f"{at} {interrupted.place}"] = wrong
            memguard.shutdown()
            sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ImportHook"]
    print(f"{name}: {len(tried)} of {points.count} points tried, {len(failures)} wrong")
    assert failures == {}, f"{len(failures)} of {len(tried)}"


def test_a_ctrl_c_while_the_caps_are_undone_is_raised_once_all_are(
    tmp_path: Path, standing: dict[str, SimulatedFramework]
) -> None:
    """At every point from the first undo step of the guard to its last: no cap is left for another call to undo."""
    memguard.init(budget(tmp_path), simulate="h200")
    counted = Points()

    def undoing(points: Points) -> None:
        guard = memguard.init(budget(tmp_path), simulate="h200")
        first = guard.undo
        run = first.run
        first.run = lambda: points.run(run)  # type: ignore[method-assign]
        memguard.shutdown()

    memguard.shutdown()
    undoing(counted)
    assert counted.count > 50
    for at in range(1, counted.count + 1):
        points = Points(at, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            undoing(points)
        assert [one.name for one in standing.values() if cap_of(one) is not None] == [], points.place
        assert runtime.this.session is None or runtime.this.session.guard.undone, points.place
        memguard.shutdown()
