"""A timeline that is closed while somebody writes it: the file is let go of, and a new one can be begun.

Nothing is drawn by chance: a call comes at each point of another one at which Python may run a finalizer, one after the
other; and a write ends when the test says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interruptions import Points
from timelines import START, plan_of, sample_of

import memguard
from memguard import api
from memguard._base import locks
from memguard._base.types import Event
from memguard._timeline import Writer, files, load_timeline, writer
from memguard.errors import MemguardError, TimelineError

STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "7"))
"""Every so many points are tried. 1 tries all."""
PLAN = plan_of()
ONE, OTHER = Event(START, "note", "one"), Event(START, "note", "other")
OUTER: dict[str, Callable[[Writer], object]] = {
    "begin": lambda out: out.begin(),
    "event": lambda out: out.event(ONE),
    "sample": lambda out: out.sample(sample_of(PLAN, START)),
    "close": lambda out: out.close(),
}
INNER: dict[str, Callable[[Writer], object]] = {
    "close": lambda out: out.close(),
    "event": lambda out: out.event(OTHER),
    "both": lambda out: (out.event(OTHER), out.close()),
}


def within(outer: str, inner: str, path: Path, at: int | None) -> tuple[Points, list[str]]:
    """Call `inner` at that point of `outer`, and close at last. What is wrong afterwards."""
    out = Writer(path, PLAN, begin=False)
    if outer != "begin":
        out.begin()
    points = Points(at, lambda: INNER[inner](out))
    points.run(lambda: OUTER[outer](out))
    if outer != "close" and (not points.place or inner == "event"):
        out.close()
    wrong = []
    if os.path.exists(out.path) and files.in_use(out.path):
        wrong.append("it is open")
    if out._pending or writer._closing_writers:
        wrong.append("something waits")
    if inner == "event" and outer != "close" and points.place:
        written = [event.text for event in load_timeline(out.path).events()]
        if "other" not in written:
            wrong.append(f"written: {written}")
    out._close()  # whatever was wrong
    writer._closing_writers.clear()
    for one in path.parent.iterdir():
        one.unlink()
    return points, wrong


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_a_call_at_any_point_of_another_leaves_no_file_open(outer: str, inner: str, tmp_path: Path) -> None:
    path = tmp_path / "{pid}.jsonl"
    points, wrong = within(outer, inner, path, None)
    assert wrong == [] and points.count > 20
    failures = {}
    for at in range(1, points.count + 1, STRIDE):
        called, wrong = within(outer, inner, path, at)
        if wrong:
            failures[f"{at} {called.place}"] = wrong
    assert failures == {}, f"{len(failures)} of {points.count}"


class Disk:
    """Writes to timelines wait in it until it goes on; `meanwhile` is called first, within the write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self._write, self._meanwhile, self._first = os.write, meanwhile, True
        monkeypatch.setattr(os, "write", self.write)

    def write(self, handle: int, data: bytes) -> int:
        if self._first and b'"event"' in data:
            self._first = False
            self.reached.set()
            self._meanwhile()
            assert self.goes_on.wait(20)
        return self._write(handle, data)


def begun(call: Callable[..., object], *given: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=given, daemon=True)
    thread.start()
    return thread


def test_who_writes_closes_if_the_close_did_not_wait_for_that_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LOCK_TIMEOUT", 0.05)
    disk, out = Disk(monkeypatch), Writer(tmp_path / "run.jsonl", PLAN)
    thread = begun(out.event, ONE)
    assert disk.reached.wait(20)
    out.close()
    assert files.in_use(out.path)
    disk.goes_on.set()
    thread.join()
    assert not files.in_use(out.path) and not writer._closing_writers
    assert [event.text for event in load_timeline(out.path).events()] == ["one"]


def test_a_new_timeline_waits_for_who_still_writes_the_closed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LOCK_TIMEOUT", 0.05)
    disk, out = Disk(monkeypatch), Writer(tmp_path / "run.jsonl", PLAN)
    thread = begun(out.event, ONE)
    assert disk.reached.wait(20)
    out.close()
    begun(lambda: (time.sleep(0.1), disk.goes_on.set()))
    with Writer(tmp_path / "run.jsonl", PLAN) as new:
        new.event(OTHER)
    thread.join()
    assert [event.text for event in load_timeline(new.path).events()] == ["other"]
    assert [event.text for event in load_timeline(files.rotated(new.path, 1)).events()] == ["one"]


def test_the_wait_for_a_disk_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOCK_TIMEOUT", 0.05)
    monkeypatch.setattr(writer, "_CLOSING_TIMEOUT", 0.1)
    disk, out = Disk(monkeypatch), Writer(tmp_path / "run.jsonl", PLAN)
    thread = begun(out.event, ONE)
    assert disk.reached.wait(20)
    out.close()
    with pytest.raises(TimelineError, match="another budget in this process, is writing it"):
        Writer(tmp_path / "run.jsonl", PLAN)
    disk.goes_on.set()
    thread.join()


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    memguard.shutdown()


def budget(folder: Path, gib: int = 4) -> dict[str, Any]:
    timeline = str(folder / "{pid}.jsonl")
    limits = {"torch": {"limit": f"{gib}GiB"}}
    return {"version": 1, "frameworks": limits, "monitor": {"interval": "1h", "timeline": timeline}}


def test_a_budget_stays_if_its_replacement_comes_within_its_own_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: None
) -> None:
    guard, said = memguard.init(budget(tmp_path), simulate="h200"), []

    def handler() -> None:
        with pytest.raises(TimelineError) as refused:
            memguard.init(budget(tmp_path, 8), simulate="h200", replace=True)
        said.append(str(refused.value))

    disk = Disk(monkeypatch, handler)
    disk.goes_on.set()
    api.current_session()._announce(ONE)
    assert "this thread is just writing it" in said[0] and "    fix: call it once the other call" in said[0]
    assert guard.active and memguard.ledger()


def test_a_budget_begins_while_finalizers_within_the_last_ones_write_ask_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: None
) -> None:
    """A collection within the monitor's write runs many of them. Each used to wait 2 seconds for this `init`."""
    memguard.init(budget(tmp_path), simulate="h200")
    monkeypatch.setattr(writer, "_LOCK_TIMEOUT", 0.05)
    refused = []

    def finalizers() -> None:
        assert over.wait(20)
        for _ in range(8):
            time.sleep(0.02)
            try:
                memguard.init(budget(tmp_path), simulate="h200")
            except MemguardError as error:
                refused.append(str(error))

    over, disk = threading.Event(), Disk(monkeypatch, finalizers)
    disk.goes_on.set()
    thread = begun(api.current_session()._announce, ONE)
    assert disk.reached.wait(20)
    memguard.shutdown()
    begun(lambda: (time.sleep(0.1), over.set()))
    began = time.monotonic()
    guard = memguard.init(budget(tmp_path), simulate="h200")
    assert time.monotonic() - began < 10, "each waits for 2 s: 16 s"
    thread.join(20)
    assert len(refused) == 8 and all("this call could deadlock" in text for text in refused)
    assert guard.active and memguard.ledger() and locks._awaited == []
