"""`on_wait: suspend-idle`: who is asked to leave, and processes on simulated GPUs that take turns."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasing import GPU, heard, lease, told, until

import memguard
from memguard._devices import suspension
from memguard._node.identity import Process, machine, this_process
from memguard._node.leases import choose, decide, returning, store
from memguard._node.leases.decide import Want
from memguard._node.leases.store import Store
from memguard._node.leases.types import Claim
from memguard._node.suspend import requests
from memguard._node.suspend.triggers import for_lease, listener, making_room, own_lease
from memguard._node.suspend.triggers.making_room import MakingRoom
from memguard._runtime import runtime
from memguard.errors import CannotResume, CannotSuspend, MemguardError, NotActive

ROOT = Path(__file__).resolve().parents[2]
BUDGET: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "100GiB", "lease": True, "wait": "1min", "on_wait": "suspend-idle"},
    "frameworks": {"torch": {"limit": "10GiB"}},
    "suspend": {"on_demand": "1s"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MEMGUARD_LEASES", raising=False)
    yield tmp_path / "memguard"
    if suspension.now is not None:
        memguard.resume()
    memguard.shutdown()


# Who is asked


def test_who_was_idle_for_longest_is_asked_and_no_more_than_it_takes() -> None:
    held = [Want(1, True, {"a": 40}), Want(2, True, {"a": 30}), Want(3, True, {"a": 30})]
    wanted = [*held, Want(4, False, {"a": 30})]
    room = {"a": 100}
    assert choose.to_suspend(4, wanted, room, {2: 5.0, 3: 9.0}) == (3,)
    assert choose.to_suspend(4, wanted, room, {1: 9.0, 2: 5.0, 3: 5.0}) == (1,)
    assert choose.to_suspend(4, [*held, Want(4, False, {"a": 60})], room, {2: 5.0, 3: 9.0}) == (3, 2)
    assert choose.to_suspend(4, [*held, Want(4, False, {"a": 70})], room, {2: 5.0, 3: 9.0}) == ()  # in vain
    assert choose.to_suspend(4, [*held, Want(4, False, {"a": 40})], room, {3: 9.0, 1: 5.0}) == (1,)  # 3 is not needed


def test_nobody_leaves_for_one_before_whom_another_comes() -> None:
    claims = [Want(1, True, {"a": 100}), Want(2, False, {"a": 100}), Want(3, False, {"a": 50})]
    assert choose.to_suspend(3, claims, {"a": 100}, {1: 9.0}) == ()
    assert choose.to_suspend(2, claims, {"a": 100}, {1: 9.0}) == (1,)


@given(
    st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.sampled_from("ab"), st.integers(1, 60), min_size=1)), max_size=6
    ),
    st.dictionaries(st.integers(0, 5), st.floats(0, 100), max_size=6),
)
def test_after_they_have_left_it_is_served_and_each_of_them_was_needed(
    given_claims: list[tuple[bool, dict[str, int]]], idle: dict[int, float]
) -> None:
    claims: list[Want] = []
    capacity = {"a": 100, "b": 100}
    for number, (held, sizes) in enumerate(given_claims):
        fits = all(decide.leased(claims).get(gpu, 0) + size <= capacity[gpu] for gpu, size in sizes.items())
        claims.append(Want(number, held and fits, sizes))
    asked = Want(99, False, {"a": 50})
    idle = {number: seconds for number, seconds in idle.items() if number < len(claims) and claims[number].held}
    chosen = choose.to_suspend(99, [*claims, asked], capacity, idle)
    assert set(chosen) <= set(idle)

    def served(without: set[int]) -> bool:
        return 99 in decide.grantable([one for one in [*claims, asked] if one.id not in without], capacity)

    if chosen:
        assert not served(set()) and served(set(chosen))
        assert all(not served(set(chosen) - {one}) for one in chosen)
    else:
        assert served(set()) or not served(set(idle))


def claim(number: int, size: int, state: Any = "held", leaves: float | None = 10.0, **changes: Any) -> Claim:
    parts = lease(size).parts
    whole = Claim(number, 100 + number, 7, machine(), "python a.py", "b.yaml", state, 1.0, 1.0, None, parts, leaves)
    return whole._replace(**changes)


class Scene:
    """One that waits for all of a GPU, and what its eyes and its voice are given."""

    def __init__(self) -> None:
        self.time = 0.0
        self.at_work: dict[int, bool | None] = {}
        self.asked: list[Process] = []
        self.said: list[str] = []
        self.refuses = False
        waiting = lease(100)
        waiting.number = 9
        self.room = MakingRoom(waiting, self.said.append, self.request, self.at_work.get, lambda: self.time)

    def request(self, process: Process) -> tuple[dict[str, int], float]:
        self.asked.append(process)
        if self.refuses:
            raise requests.RefusedError("a workload runs in it\n    fix: wait for it", reason="a workload runs in it")
        return {GPU: 1 << 30}, 0.5

    def look(self, claims: list[Claim], seconds: float = 1.0) -> None:
        self.time += seconds
        self.room.look([*claims, claim(9, 100, "waiting")])
        if self.room._asking is not None:
            self.room._asking.join(10)


def test_one_is_asked_once_it_was_seen_idle_for_as_long_as_it_says() -> None:
    scene = Scene()
    scene.at_work = {101: True}
    scene.room._used = lambda pid: scene.at_work[pid]
    for _ in range(15):
        scene.look([claim(1, 60)])
    assert scene.asked == []
    scene.at_work[101] = False
    for _ in range(10):
        scene.look([claim(1, 60)])
        assert (scene.asked == []) == (scene.time < 25)
    assert scene.asked == [Process(101, 7)]
    assert "asks process 101 (python a.py), which has nothing to do, to leave" in scene.said[0]
    assert "has left with 1.00 GiB, in 0.5 s" in scene.said[1]


@pytest.mark.parametrize(
    "other",
    [claim(1, 60, leaves=None), claim(1, 60, machine="elsewhere"), claim(1, 60, "off"), claim(1, 60, "waiting")],
    ids=["does not allow it", "of another container", "suspended already", "waits too"],
)
def test_others_are_never_asked(other: Claim) -> None:
    scene = Scene()
    scene.room._used = lambda pid: False
    for _ in range(30):
        scene.look([other])
    assert scene.asked == []


def test_what_nobody_knows_counts_as_work() -> None:
    scene = Scene()
    scene.room._used = lambda pid: None
    for _ in range(30):
        scene.look([claim(1, 60)])
    assert scene.asked == []


def test_one_that_refuses_is_left_alone_for_a_while() -> None:
    scene = Scene()
    scene.refuses = True
    scene.room._used = lambda pid: False
    for _ in range(15):
        scene.look([claim(1, 60)])
    assert len(scene.asked) == 1 and scene.said[-1] == "process 101 (python a.py) stays: a workload runs in it"
    scene.look([claim(1, 60)], making_room._REFUSED)
    assert len(scene.asked) == 2


def test_one_that_is_off_its_gpus_learns_from_its_helper_what_others_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own calls of NVML would wait until it is back, and nobody would be asked to leave for it."""
    from suspending import way_of

    rooms: list[MakingRoom] = []

    class Noted(MakingRoom):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            rooms.append(self)

    def nobody_waits(*_: object, **__: object) -> None:
        raise CannotResume("enough was seen", lost=True)

    memguard.init(BUDGET, simulate="h200")
    monkeypatch.setattr(making_room, "MakingRoom", Noted)
    with way_of(monkeypatch) as way:
        way.use_of = {101: False, 102: True}
        found, lease = memguard.suspend(), own_lease.current()
        assert lease is not None
        with monkeypatch.context() as patched:
            patched.setattr(lease, "back", nobody_waits)
            with pytest.raises(CannotResume, match="enough was seen"):
                memguard.resume()
            for_lease._return(found, lease)
        assert len(rooms) == 2
        for room in rooms:
            assert [room._used(101), room._used(102), room._used(103)] == [False, True, None]
        memguard.resume()
        way.use_of = {101: True}
        assert {room._used(101) for room in rooms} == {None}  # it waits no more


# A suspended process and its lease


def states() -> list[tuple[int, str]]:
    from memguard._node.leases.folders import folder

    return [(one.pid, one.state) for one in Store(folder()).claims()]


def test_a_lease_is_for_others_while_its_process_is_off_and_is_claimed_again_after_that(folder: Path) -> None:
    memguard.init(BUDGET, simulate="h200")
    me = os.getpid()
    with memguard.suspended():
        assert states() == [(me, "off")]
        other = lease_of_simulated(100)
        other.take()
        other.close()
    assert states() == [(me, "held")]


def lease_of_simulated(gib: int) -> Any:
    from memguard._node.leases.lease import Lease
    from memguard._node.leases.types import Part

    (part,) = runtime.this.session.lease.parts.values()  # type: ignore[attr-defined]
    return Lease({part.gpu: Part(part.gpu, gib << 30, part.total, part.number, part.name)}, "other.yaml")


def test_without_its_lease_it_stays_suspended_and_says_who_has_it(folder: Path) -> None:
    memguard.init(BUDGET, simulate="h200")
    memguard.suspend()
    other = lease_of_simulated(100)
    other.take()
    try:
        seen: list[Any] = []
        with pytest.raises(CannotResume, match=f"no room for 100.00 GiB .* process {os.getpid()} .*holds 100.00 GiB"):
            memguard.resume(timeout=0.5, progress=seen.append)
        assert suspension.now is not None and not suspension.now.moving
        assert sorted(state for _, state in states()) == ["held", "off"]
        assert seen and "100.00 GiB  process" in seen[0].holders[0] and seen[0].needs == 100 << 30
        text = returning.refusal(this_process())
        assert text.startswith(f"process {os.getpid()} gave its lease of 100.00 GiB back, and there is no room for it")
    finally:
        other.close()
    assert returning.refusal(this_process()) == ""
    memguard.resume()
    assert states() == [(os.getpid(), "held")]


def test_a_process_with_a_workload_does_not_leave(folder: Path) -> None:
    memguard.init(BUDGET, simulate="h200")
    with (
        memguard.workload("step", framework="torch", needs="1GiB"),
        pytest.raises(CannotSuspend, match="a workload runs in it"),
    ):
        for_lease.leave()
    assert suspension.now is None and states() == [(os.getpid(), "held")]


def test_without_a_lease_nothing_leaves_for_one(folder: Path) -> None:
    memguard.init({**BUDGET, "device": {"limit": "100GiB"}}, simulate="h200")
    with pytest.raises(CannotSuspend, match="it holds no lease"):
        for_lease.leave()


def test_a_process_leaves_only_while_somebody_waits_for_its_lease(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has asked may have gone, or been served, before the request is read. So may a stranger ask."""
    monkeypatch.setattr(own_lease, "back_since", float("-inf"))
    memguard.init(BUDGET, simulate="h200")
    with pytest.raises(CannotSuspend, match="nobody waits for its lease"):
        listener._leave()
    waiting = lease_of_simulated(100)
    waiter = threading.Thread(target=waiting.take, args=(60,))
    waiter.start()
    until(lambda: sorted(state for _, state in states()) == ["held", "waiting"])
    assert listener._leave().why == "lease"
    waiter.join(20)
    assert waiting.held
    until(lambda: sorted(state for _, state in states()) == ["held", "waiting"])  # on a thread of its own
    waiting.close()
    until(lambda: suspension.now is None)
    assert own_lease.current() is not None and states() == [(os.getpid(), "held")]


def test_a_process_does_not_leave_while_init_is_at_work_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a larger lease for an hour, and must then end the budget that is active."""
    memguard.init(BUDGET, simulate="h200")
    monkeypatch.setattr(runtime.this, "applying", True)
    with pytest.raises(CannotSuspend, match=r"memguard\.init is at work in it"):
        listener._leave()
    assert suspension.now is None


def test_whoever_waits_for_the_lease_ends_no_suspension_that_came_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard._node.leases.lease import Lease

    memguard.init(BUDGET, simulate="h200")
    first = memguard.suspend()
    one = own_lease.current()
    assert one is not None
    back = Lease.back

    def meanwhile(self: Lease, *given: Any, **more: Any) -> None:
        monkeypatch.setattr(Lease, "back", back)
        back(self, *given, **more)
        memguard.resume()  # by the program, which then leaves by itself
        memguard.suspend()

    monkeypatch.setattr(Lease, "back", meanwhile)
    for_lease._return(first, one)
    assert suspension.now is not None and states() == [(os.getpid(), "off")]


@pytest.mark.parametrize("how", ["held", "damaged"])
def test_a_process_comes_back_although_the_database_cannot_be_used(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It claims its lease once it is back."""
    waited: list[float] = []
    clock = SimpleNamespace(**{name: getattr(time, name) for name in ("time", "monotonic")})
    clock.sleep = lambda seconds: (waited.append(seconds), time.sleep(seconds))
    claim = own_lease._claim
    memguard.init(BUDGET, simulate="h200")
    memguard.suspend()
    database = folder / "leases.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = database.read_bytes()
    monkeypatch.setattr(store, "time", clock)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        if how == "held":
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
        else:
            database.write_bytes(b"this is no database" * 2000)
        claims = threading.Event()
        monkeypatch.setattr(own_lease, "_claim", lambda lease: claims.wait(20) and claim(lease))
        memguard.resume(timeout=5)
        assert suspension.now is None and sum(waited) < 1.0
        assert "comes back on its GPUs without its lease: " in caplog.text
    database.write_bytes(whole)
    claims.set()
    until(lambda: states() == [(os.getpid(), "held")])


def test_a_lease_that_no_thread_can_claim_leaves_nothing_else_undone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process has no more threads: it is back without its lease, and its helper and its exit hook have ended."""
    from suspending import way_of

    def no_more(self: threading.Thread) -> None:
        if self.name == "memguard-lease":
            raise RuntimeError("can't start new thread")
        start(self)

    start, leave, kinds = threading.Thread.start, sys.exit, list[str]()
    memguard.init(BUDGET, simulate="h200")
    watch = memguard.on_event(lambda event: kinds.append(event.kind))
    with way_of(monkeypatch) as way, monkeypatch.context() as patched:
        memguard.suspend()
        patched.setattr(own_lease, "claim", lambda timeout, *_: timeout)  # the database cannot be used
        patched.setattr(threading.Thread, "start", no_more)
        memguard.resume(timeout=5)
        assert (way.closed, sys.exit, suspension.now) == (1, leave, None)
    watch.remove()
    assert kinds == ["suspended", "resumed"]
    assert "back on its GPUs without its lease: RuntimeError: can't start new thread" in caplog.text


def test_one_that_another_has_brought_back_claims_nothing_once_it_is_off_again(folder: Path) -> None:
    memguard.init(BUDGET, simulate="h200")
    memguard.suspend()
    one = own_lease.current()
    other = lease_of_simulated(100)
    other.take()
    assert one is not None
    claims = threading.Thread(target=own_lease._claim, args=(one,))
    claims.start()
    claims.join(20)
    assert not claims.is_alive() and sorted(state for _, state in states()) == ["held", "off"]
    other.close()
    assert states() == [(os.getpid(), "off")]


def test_an_interrupted_return_gives_the_lease_back_that_came_just_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memguard.init(BUDGET, simulate="h200")
    memguard.suspend()
    one = own_lease.current()
    assert one is not None

    def comes_late(*_: object) -> None:
        raise NotActive("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(one, "_until", comes_late)
        with pytest.raises(CannotResume, match="interrupted"):
            own_lease.claim(None, lambda: True, lambda wait: None, lambda pid: None)
    assert states() == [(os.getpid(), "off")] and not one.held


@pytest.mark.parametrize("how", ["stopped", "late"])
def test_an_interrupted_return_stays_off_although_the_database_fails_just_then(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memguard.init(BUDGET, simulate="h200")
    memguard.suspend()
    other = lease_of_simulated(100)
    other.take()
    stopped, clock = threading.Event(), [0.0]

    def fails(*_: object) -> None:
        if how == "stopped":
            stopped.set()
        clock[0] += 100.0
        raise MemguardError("the database is damaged")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(own_lease, "time", SimpleNamespace(monotonic=lambda: clock[0]))
            patched.setattr(Store, "read", fails)
            timeout, text = (None, "interrupted") if how == "stopped" else (50, "cannot be had again: the database is")
            with pytest.raises(CannotResume, match=text):
                own_lease.claim(timeout, stopped.is_set, lambda wait: None, lambda pid: None)
        assert sorted(state for _, state in states()) == ["held", "off"]
    finally:
        other.close()


# Two processes that take turns

PROGRAM = """
    import json, sys
    import memguard
    from memguard._devices import suspension
    budget = json.loads(sys.argv[1])
    memguard.init(budget, simulate="h200")
    (torch,) = memguard.api.current().frameworks.values()
    block = torch.allocate(5 << 30)
    print("on", flush=True)
    for line in sys.stdin:
        if line.strip() == "resume":
            memguard.resume()
        print("off" if suspension.now is not None else "on", flush=True)
"""


def program(budget: dict[str, Any]) -> subprocess.Popen[str]:
    import json

    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(budget)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def ask(child: subprocess.Popen[str], what: str) -> str:
    assert child.stdin is not None
    child.stdin.write(f"{what}\n")
    child.stdin.flush()
    return heard(child)


def test_two_that_each_need_the_card_take_turns(folder: Path) -> None:
    first = program(BUDGET)
    second = None
    try:
        assert heard(first) == "on"
        second = program(BUDGET)
        assert heard(second) == "on"  # the first has left for it
        assert ask(first, "state") == "off"
        assert ask(first, "resume") == "on"  # it needs the card: the second has left
        assert ask(second, "state") == "off"
        assert ask(second, "resume") == "on"
        second.kill()
        until(lambda: ask(first, "state") == "on")  # nobody had to ask: there was room
        assert states() == [(first.pid, "held")]
    finally:
        for child in (first, second):
            if child is not None:
                child.kill()
                child.communicate()


def test_without_suspend_idle_the_second_waits(folder: Path) -> None:
    waits = {**BUDGET, "device": {"limit": "100GiB", "lease": True, "wait": "2s"}}
    first = program(waits)
    try:
        assert heard(first) == "on"
        with pytest.raises(memguard.LeaseRefused, match=f"process {first.pid} "):
            memguard.init(waits, simulate="h200")
        assert ask(first, "state") == "on"
    finally:
        first.kill()
        first.communicate()


def test_one_that_does_not_allow_it_is_not_asked(folder: Path) -> None:
    first = program({**BUDGET, "suspend": {"by_others": True}})
    try:
        assert heard(first) == "on"
        with pytest.raises(memguard.LeaseRefused):
            memguard.init({**BUDGET, "device": {**BUDGET["device"], "wait": "3s"}}, simulate="h200")
        assert ask(first, "state") == "on"
    finally:
        told(first)
        first.kill()
        first.communicate()


def test_the_list_says_that_a_suspended_one_does_not_count() -> None:
    from memguard._node.leases.listing import Listing, listing
    from memguard.cli.leases import table

    gpus, _ = listing([claim(1, 60, "off"), claim(2, 70, "held"), claim(3, 40, "waiting", since=None)], {}, machine())
    (gpu,) = gpus
    assert (gpu.leased, gpu.free, [row.ahead for row in gpu.rows]) == (70, 30, [None, None, 0])
    lines = table(Listing("/there", tuple(gpus), (), "ok", ()), 1.0).splitlines()
    assert [line.split("  ")[-1].split()[0] for line in lines[1:4]] == ["held", "suspended,", "waiting"]
