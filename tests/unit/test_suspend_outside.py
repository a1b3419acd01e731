"""Suspending from outside: who belongs together, what is needed to come back, and how a wait is shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from memguard._base.units import GIB, MIB
from memguard._devices.checkpoint import State
from memguard._devices.simulated_checkpoint import Fault, SimulatedCheckpoint, Target
from memguard._node.identity import Process, folder, process_of, this_process
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend import processes, remote_suspend
from memguard._node.suspend.checks import facts
from memguard._node.suspend.driver.simulated import Direct
from memguard._node.suspend.processes import Listing, Row
from memguard._node.suspend.remote_suspend import NO, UNKNOWN, Stop
from memguard._node.suspend.store import records
from memguard._node.suspend.store.records import Record
from memguard._node.suspend.types import Wait
from memguard.cli.support import waiting

A, B = "GPU-a", "GPU-b"


def row(pid: int, sizes: dict[str, int | None] | None = None, state: processes.At = "running") -> Row:
    return Row(pid, 1, "me", "python", sizes or {A: GIB}, None, None, None, state)


@pytest.fixture
def parent() -> Iterator[tuple[Process, list[int]]]:
    """A process with a child that has a child."""
    inner = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    program = f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', {inner!r}])\n"
    program += "print(child.pid, flush=True)\ntime.sleep(60)"
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stdout is not None
    pids = [int(started.stdout.readline()), int(started.stdout.readline())]
    child = process_of(started.pid)
    assert child is not None
    yield child, sorted(pids)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    started.stdout.close()


def test_those_furthest_down_go_first(parent: tuple[Process, list[int]]) -> None:
    process, (child, grandchild) = parent
    listed = Listing((), tuple(map(row, (process.pid, child, grandchild, os.getpid()))), ())
    chosen = remote_suspend.family(process, listed, lambda one: one.state == "running")
    assert [one.pid for one in chosen] == [grandchild, child, process.pid]
    assert chosen[0] == process_of(grandchild)
    launcher = Listing((), (row(grandchild), row(child, state="suspended")), ())
    chosen = remote_suspend.family(process, launcher, lambda one: one.state == "running")
    assert [one.pid for one in chosen] == [grandchild]  # neither the launcher nor what is off already
    assert remote_suspend.family(process, Listing((), (), ()), lambda one: True) == [process]


def test_a_stopped_process_is_refused_before_it_is_asked(
    parent: tuple[Process, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not answer, and would suspend itself long after whoever asked has gone."""
    process, _ = parent
    monkeypatch.setattr(remote_suspend, "_listens", lambda one: True)
    asked: list[Process] = []
    monkeypatch.setattr(
        remote_suspend,
        "_answered",
        lambda one: asked.append(one) or remote_suspend.Result(one, remote_suspend.DONE, ""),
    )
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 10
    while facts.paused(process).state != "T" and time.monotonic() < until:
        time.sleep(0.01)
    client: Any = None
    (refused,) = remote_suspend.suspend([process], client, sizes={})
    assert refused.code == remote_suspend.NO and refused.state == "running" and not asked
    assert f"process {process.pid} is stopped (state T)" in refused.text and "kill -CONT" in refused.text
    os.kill(process.pid, signal.SIGCONT)
    while facts.paused(process).state == "T" and time.monotonic() < until:
        time.sleep(0.01)
    (done,) = remote_suspend.suspend([process], client, sizes={})
    assert done.code == remote_suspend.DONE and asked == [process]


def test_memguards_helpers_are_no_part_of_a_tree(
    parent: tuple[Process, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, (child, grandchild) = parent
    listed = Listing((), tuple(map(row, (process.pid, child, grandchild))), ())
    monkeypatch.setattr(processes, "is_helper", lambda pid: pid == child)
    chosen = remote_suspend.family(process, listed, lambda one: True)
    assert [one.pid for one in chosen] == [grandchild, process.pid]


def test_a_helper_is_told_by_its_command() -> None:
    code = "import time\ntime.sleep(60)\nfrom memguard._node.suspend.driver import helper; helper.main()"
    helper = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 10
        while not processes.is_helper(helper.pid) and time.monotonic() < until:
            time.sleep(0.01)  # until it has begun with its program
        assert processes.is_helper(helper.pid) and not processes.is_helper(os.getpid())
        assert processes.person(helper.pid).command == "memguard (room for a restore)"
    finally:
        helper.kill()
        helper.wait()


def test_unknown_sizes_are_none_at_all() -> None:
    assert remote_suspend.sizes_of(row(1, {A: GIB, B: 2 * GIB})) == {A: GIB, B: 2 * GIB}
    assert (
        remote_suspend.sizes_of(row(1, {A: GIB, B: None}))
        == remote_suspend.sizes_of(row(1, {A: 0}))
        == remote_suspend.sizes_of(None)
        == {}
    )


def test_a_restore_never_begins_with_less_than_it_needs() -> None:
    """What NVML lists is less than what a process has: unless that was measured, more is asked for."""
    record = Record(Process(1, 2), "suspended", {A: GIB}, 5.0, "asked", measured=True)
    assert remote_suspend.needs_of(record) == {A: GIB}
    unmeasured = Record(Process(1, 2), "checkpoint", {A: GIB}, 5.0, "asked")
    assert remote_suspend.needs_of(unmeasured) == {A: GIB + remote_suspend.SPARE}
    for sizes in (None, {}):
        assert remote_suspend.needs_of(Record(Process(1, 2), "suspended", sizes, 5.0, "asked", measured=True)) is None
    assert remote_suspend.needs_of(None) is None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedCheckpoint, Process, str]:
    """This process, under a simulated driver."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    driver = SimulatedCheckpoint({A: 16 * GIB})
    driver.targets[os.getpid()] = Target({A: 4 * GIB})
    return driver, this_process(), folder()


def test_resume_from_each_state(here: tuple[SimulatedCheckpoint, Process, str]) -> None:
    driver, process, where = here
    target = driver.targets[process.pid]
    client = Direct(driver)
    result = remote_suspend.resume(process, client)
    assert (result.code, result.changed) == (0, False) and "nothing was to be done" in result.text
    driver.lock(process.pid, 1)
    result = remote_suspend.resume(process, client)
    assert (result.code, result.changed) == (0, True) and "was locked, and runs on" in result.text
    driver.lock(process.pid, 1)
    driver.checkpoint(process.pid)
    records.write(Record(process, "suspended", {A: 4 * GIB}, time.time() - 90, "asked", measured=True), where)
    result = remote_suspend.resume(process, client)
    assert result.code == 0 and "back on its GPUs with 4.00 GiB, after 90 s" in result.text
    assert target.whole and target.state is State.RUNNING and records.of(process, where) is None


def test_without_room_and_without_an_end(here: tuple[SimulatedCheckpoint, Process, str]) -> None:
    driver, process, where = here
    driver.lock(process.pid, 1)
    driver.checkpoint(process.pid)
    driver.others[A] = 13 * GIB
    records.write(Record(process, "suspended", {A: 4 * GIB}, 5.0, "asked", measured=True), where)
    waits: list[Wait] = []
    result = remote_suspend.resume(process, Direct(driver), timeout=0.0, progress=waits.append)
    assert (result.code, result.state) == (NO, "suspended") and "stays suspended and whole" in result.text
    assert waits[0].uuid == A and waits[0].free == 3 * GIB and not waits[0].ahead
    cancel = threading.Event()
    cancel.set()
    assert remote_suspend.resume(process, Direct(driver), cancel=cancel).state == "suspended"
    record = records.of(process, where)
    assert record is not None and (record.step, record.since) == ("suspended", 5.0)


def test_lost_is_said_and_kept(here: tuple[SimulatedCheckpoint, Process, str]) -> None:
    driver, process, where = here
    driver.lock(process.pid, 1)
    driver.checkpoint(process.pid)
    driver.targets[process.pid].importer = True
    result = remote_suspend.resume(process, Direct(driver))
    assert (result.code, result.state) == (NO, "lost") and "is lost" in result.text
    record = records.of(process, where)
    assert record is not None and record.step == "lost"


def test_one_that_does_not_answer_is_unknown(here: tuple[SimulatedCheckpoint, Process, str]) -> None:
    driver, process, where = here
    records.write_budget(Budgeted(process, "b", True), where)
    (result,) = remote_suspend.suspend([process], Direct(driver), sizes={})
    records.remove_budget(process, where)
    assert result.code == UNKNOWN and "does not answer" in result.text


@pytest.mark.parametrize("unsafe", [False, True])
def test_simulated_gpus_are_said_to_be(here: tuple[SimulatedCheckpoint, Process, str], unsafe: bool) -> None:
    driver, process, where = here
    records.write_budget(Budgeted(process, "b", False, True), where)
    assert records.budget_of(process) == Budgeted(process, "b", False, True)
    (result,) = remote_suspend.suspend([process], Direct(driver), sizes={}, unsafe=unsafe)
    records.remove_budget(process, where)
    assert records.budget_of(process) is None
    assert result.code == NO and "its GPUs are simulated" in result.text and "memguard.suspend()" in result.text
    assert driver.targets[process.pid].state is State.RUNNING


def test_a_budget_on_simulated_gpus_tells_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import memguard

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    budget = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "suspend": {"by_others": True}}
    memguard.init(budget, simulate="h200")
    try:
        found = records.budget_of(this_process())
        assert found is not None and found.simulated and not found.by_others
    finally:
        memguard.shutdown()
    assert records.budget_of(this_process()) is None


def test_interrupted_before_it_began(here: tuple[SimulatedCheckpoint, Process, str]) -> None:
    driver, process, _ = here
    stop = Stop()
    stop.once.set()
    (result,) = remote_suspend.suspend([process], Direct(driver), sizes={}, unsafe=True, stop=stop)
    assert result.code == NO and "nothing was changed" in result.text and driver.targets[process.pid].calls == []


RESULT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["pid", "start", "done", "code", "text", "state", "bytes", "seconds", "changed"],
    "properties": {
        **{key: {"type": "integer"} for key in ("pid", "start")},
        **{key: {"type": "boolean"} for key in ("done", "changed")},
        "code": {"enum": [0, 1, 4]},
        "text": {"type": "string", "minLength": 1},
        "state": {"enum": ["running", "suspended", "lost", "ended", "unknown"]},
        "bytes": {"type": ["object", "null"], "additionalProperties": {"type": "integer", "minimum": 0}},
        "seconds": {"type": ["number", "null"]},
    },
}
"""Of each process, in the JSON of `suspend` and `resume`."""


@pytest.mark.parametrize("call", ["state", "lock", "checkpoint", "restore", "unlock"])
@pytest.mark.parametrize("fault", [*(Fault("code", code) for code in (1, 2, 3, 304, 401, 600, 801)), Fault("die")])
def test_whatever_the_driver_says_the_answer_is_whole(
    here: tuple[SimulatedCheckpoint, Process, str], call: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And true: a process of which it says that it runs does, and one that is said to be off can be brought back."""
    driver, process, _ = here
    monkeypatch.setattr(remote_suspend.refusals, "reasons", lambda *_, **__: ())
    driver.fail(call, fault)
    sizes = {process.pid: {A: 4 * GIB}}
    first = remote_suspend.suspend([process], Direct(driver), sizes=sizes, unsafe=True)
    second = remote_suspend.resume(process, Direct(driver), timeout=0.0)
    for result in (*first, second):
        said = result.as_dict()
        Draft202012Validator(RESULT).validate(json.loads(json.dumps(said)))
        assert said["done"] == (said["code"] == 0)
    target = driver.targets[process.pid]
    if second.state == "running" and second.code == 0:
        assert target.whole and target.state is State.RUNNING
    if second.state == "lost":
        assert not target.whole


WAIT = Wait(A, 4 * GIB, GIB, 2, ("9.00 GiB  python (PID 7, bob)",), 3.0)


def test_the_lines_of_a_wait() -> None:
    assert waiting.lines(WAIT) == [
        "GPU-a: 1.00 GiB free, 4.00 GiB needed; 2 came before it",
        "    9.00 GiB  python (PID 7, bob)",
    ]
    assert waiting.lines(replace(WAIT, free=5 * GIB, ahead=0))[0] == "GPU-a: 5.00 GiB free, enough"


def test_a_line_only_when_something_changes(capsys: pytest.CaptureFixture[str]) -> None:
    show = waiting._Plain()
    for free in (GIB, GIB, 2 * GIB, 2 * GIB):
        show(replace(WAIT, free=free, seconds=9.0))
    said = capsys.readouterr().err
    assert said.count("waits for room on GPU-a") == 2 and "2.00 GiB free" in said


def test_bars_on_a_terminal() -> None:
    import io

    from rich.console import Console
    from rich.live import Live

    out = io.StringIO()
    with Live(console=Console(file=out, force_terminal=True, width=100)) as live:
        show = waiting._Drawn(live)
        show(WAIT)
        show(replace(WAIT, uuid=B, holders=("1.00 GiB  \x1b[31mevil",), free=MIB))
    text = out.getvalue()
    assert "Ctrl-C leaves it suspended" in text and "bob" in text and "\x1b[31mevil" not in text
    assert "━" in text and not any("━" in line and "GPU" in line for line in text.splitlines())


def test_ctrl_c_once_and_twice(capsys: pytest.CaptureFixture[str]) -> None:
    stop = Stop()

    def call() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.once.wait(10) and not stop.twice.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.twice.wait(10)
        return "ended by itself"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert waiting.interruptible(call, stop, "says once") == ("ended by itself", True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.count("says once") == 1
    with pytest.raises(ValueError, match="what it raises"):
        waiting.interruptible(lambda: (_ for _ in ()).throw(ValueError("what it raises")), Stop(), "")
