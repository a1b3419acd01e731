"""`memguard top` without a timeline: this machine's GPUs, the processes on them, and those that may be watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from guards import start
from timelines import Clock

import memguard
from memguard._base.units import GIB
from memguard._node.identity import this_process
from memguard._node.suspend import processes
from memguard._node.suspend.processes import Gpu, Listing, Person, Row
from memguard._node.top import server
from memguard._tools.top import client, machine
from memguard._tools.top.machine import Machine
from memguard._tools.top.view import plain, view
from memguard.errors import DeviceError, MemguardError

ME = this_process()
UUID = "GPU-a"


class Card(machine.Card):
    def __init__(self, *gpus: Gpu) -> None:
        self.found: tuple[Gpu, ...] | DeviceError = gpus

    def gpus(self) -> tuple[Gpu, ...]:
        if isinstance(self.found, DeviceError):
            raise self.found
        return self.found

    def close(self) -> None:
        pass


class Lister(machine.Lister):
    def __init__(self, *rows: Row) -> None:
        self.found, self.wrong, self.rows, self.times = None, None, rows, 0

    def once(self) -> None:
        self.times += 1
        self.found = Listing((), self.rows, ("process 9 is stopped",))

    def begin(self) -> None:
        self.once()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "memguard").mkdir(mode=0o700)
    yield tmp_path / "memguard"
    memguard.shutdown()


def gpu(uuid: str = UUID, used: int | None = 30 * GIB, **listed: int | None) -> Gpu:
    by_pid = {int(name[1:]): size for name, size in listed.items()}
    return Gpu(uuid, 0, "NVIDIA H200", 140 * GIB, used, 109 * GIB, by_pid)


def row(pid: int, start: int | None, **more: object) -> Row:
    values = {"bytes": {UUID: 9 * GIB}, "busy": None, "budget": "b.yaml", "by_others": True, "state": "suspended"}
    return Row(pid, start, "alice", "python idle.py", **{**values, **more})  # type: ignore[arg-type]


def source(card: Card, lister: Lister | None = None, folder: Path | None = None, live: bool = True) -> Machine:
    clock = Clock()
    found = Machine(live, clock, card=card, lister=lister or Lister(), where=None if folder is None else str(folder))
    found.begin()
    found.clock = clock  # type: ignore[attr-defined]
    return found


def test_processes_are_named_as_ps_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(Card(gpu(p1=4 * GIB, p52=None)), Lister(row(77, 5, since=1.0))).read()
    assert {one.pid: (one.state, one.bytes[UUID]) for one in found.processes} == {
        1: ("running", 4 * GIB), 52: ("running", None), 77: ("suspended", 9 * GIB)
    }  # fmt: skip
    assert found.processes[0].command == processes.person(1).command or None
    assert found.gpus[0].others == 30 * GIB and found.gpus[0].reserved == GIB
    text = "\n".join(plain(view(found, 80)))
    assert "PID 77 alice  python idle.py" in text and "note: process 9 is stopped" in text
    assert "no process here lets memguard top watch it: a budget does with 'monitor: {top: true}'" in " ".join(
        text.split()
    )


def test_a_pid_that_became_another_s_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(processes, "person", lambda pid: (asked.append(pid), Person(len(asked), "u", "c"))[1])
    found = source(Card(gpu(p1=GIB)))
    for start_of in (1, 1, 2, 2):
        monkeypatch.setattr(machine.identity, "start_of", lambda pid, at=start_of: at)
        found.read()
    assert asked == [1, 1]


def test_a_listing_that_is_older_than_the_process_is_not_its(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "person", lambda pid: Person(6, "u", "c"))
    found = source(Card(gpu(p77=GIB)), Lister(row(77, 5))).read()
    assert [one.state for one in found.processes] == ["running"]


def test_each_reading_lists_for_once_and_a_screen_does_not() -> None:
    for live, times in ((True, 1), (False, 2)):
        lister = Lister()
        found = source(Card(gpu()), lister, live=live)
        found.read(), found.read()
        assert lister.times == times


def test_a_failed_query_is_unknown_and_no_idle_gpu() -> None:
    card = Card(gpu(p1=GIB))
    found = source(card)
    found.read()
    card.found = DeviceError("GPU is lost", fix="reboot")
    read = found.read()
    assert (read.gpus[0].used, read.gpus[0].free, read.gpus[0].others) == (None, None, None)
    assert "GPU is lost" in read.notes
    text = "\n".join(plain(view(read, 80)))
    assert "unknown used, unknown free" in text and "·" not in text.splitlines()[2]


def test_without_a_gpu_it_says_what_to_do() -> None:
    card = Card()
    card.found = DeviceError("no usable NVIDIA driver here", fix="install it", missing=True)
    with pytest.raises(DeviceError, match="memguard top TIMELINE") as told:
        source(card)
    assert told.value.missing


def test_a_process_that_is_watched_can_be_asked_and_may_stop_answering(folder: Path) -> None:
    card = Card()
    card.found = DeviceError("no usable NVIDIA driver here", missing=True)
    guard = start()
    served = server.serve(guard)
    found = source(card, folder=folder)
    read = found.read()
    (target,) = read.targets
    assert (target.pid, target.state, read.gpus[0].simulated) == (os.getpid(), "live", True)
    assert "next memguard.checkpoint()" in found.trim(target.key, None)
    assert "next memguard.checkpoint()" in found.resize(target.key, "torch", GIB)
    served.checkpoint()
    assert [one.state for one in found.read().targets[0].requests] == ["done", "done"]

    def fails(served: server.Served) -> str:
        raise OSError("it is gone")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.Served, "_snapshot", fails)
        (target,) = found.read().targets
    assert target.state == "silent" and target.shares and "does not answer" in target.notes[0]
    text = "\n".join(plain(view(found.read(), 80)))
    assert "it lives, and does not answer; the figures are" in text and "writes" not in text
    found.check(target.key)
    found.clock.now += machine.AGAIN + 1  # type: ignore[attr-defined]
    assert found.read().targets[0].state == "live"
    served.end()


def test_one_whose_budget_has_ended_is_as_one_that_has_ended_until_there_is_another(folder: Path) -> None:
    served = server.serve(start())
    found = source(Card(gpu()), folder=folder)
    found.read()
    served.end()
    (target,) = found.read().targets
    assert target.state == "ended" and target.shares
    assert "it, or its budget, has ended; the figures are" in "\n".join(plain(view(found.read(), 120)))
    with pytest.raises(MemguardError, match="its budget, has ended"):
        found.trim(target.key, None)
    again = server.serve(start())
    assert [one.state for one in found.read().targets] == ["live"]
    again.end()
    found.read()
    found.clock.now += machine.REMEMBERED + 1  # type: ignore[attr-defined]
    assert found.read().targets == ()


def test_one_that_has_ended_is_shown_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.serve(start())
    found = source(Card(gpu()), folder=folder)
    found.read()
    monkeypatch.setattr(machine.identity, "lives", lambda process: False)
    served.end()
    (target,) = found.read().targets
    assert target.state == "ended" and target.shares
    with pytest.raises(MemguardError, match="has ended"):
        found.check(target.key)
    found.clock.now += machine.REMEMBERED + 1  # type: ignore[attr-defined]
    assert found.read().targets == ()


def test_one_that_never_answers_is_asked_seldom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.serve(start())
    asked: list[object] = []

    def silent(process: object, where: object) -> object:
        asked.append(process)
        raise client.SilentError("no answer")

    monkeypatch.setattr(client, "snapshot", silent)
    found = source(Card(gpu()), folder=folder)
    for _ in range(3):
        (target,) = found.read().targets
    assert target.state == "silent" and len(asked) == 1
    found.clock.now += machine.AGAIN + 1  # type: ignore[attr-defined]
    found.read()
    assert len(asked) == 2
    served.end()


def test_what_a_target_holds_is_not_others() -> None:
    from dataclasses import replace

    from top_screens import SHARE, TARGET

    share = replace(SHARE, uuid=UUID, process=25 * GIB)
    target = replace(TARGET, shares=(share,))
    assert machine._gpu(gpu(), (target,), True).others == 5 * GIB
    assert machine._gpu(gpu(), (replace(target, shares=(replace(share, process=None),)),), True).others is None
    assert machine._gpu(gpu(), (replace(target, shares=(replace(share, suspended=GIB),)),), True).others == 30 * GIB
    assert machine._gpu(gpu(), (replace(target, state="suspended"),), True).others == 30 * GIB
    assert machine._gpu(gpu(used=None), (target,), True).others is None
