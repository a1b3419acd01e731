"""`monitor: {top: true}`: a program under a budget lets `memguard top` watch it, and does what that asks of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guards import BUDGET, simulated, start
from interruptions import Points

import memguard
from memguard import api
from memguard._base.types import Event
from memguard._base.undo import Undo
from memguard._base.units import GIB, MIB
from memguard._guard.guard import Guard
from memguard._node.identity import this_process
from memguard._node.suspend import sockets
from memguard._node.suspend.requests import SilentError
from memguard._node.top import server
from memguard._runtime import runtime, session
from memguard._runtime.pressure import Action
from memguard._tools.top import client

ROOT = Path(__file__).resolve().parents[2]
ME = this_process()
WATCHED: dict[str, Any] = {**BUDGET, "monitor": {"interval": "1h", "top": True}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder; whatever a test did, nothing of a budget stays in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "memguard"
    if memguard.shutdown() == []:
        assert left(tmp_path / "memguard") == NOTHING


NOTHING: tuple[list[Any], ...] = ([], [], [])


def left(folder: Path) -> tuple[list[Any], ...]:
    """Files, threads and callbacks."""
    ending = [one for one in threading.enumerate() if one.name == "memguard-top"]
    for thread in ending:
        thread.join(5)  # it ends by itself: nobody waits for it
    files = list(folder.iterdir()) if folder.exists() else []
    return files, [one.name for one in ending if one.is_alive()], list(session.event_callbacks)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "COLUMNS"))}
    return {**kept, "PYTHONPATH": str(ROOT)}


PROGRAM = """
    import sys, memguard
    guard = memguard.init({
        "version": 1, "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"limit": "1GiB"}},
        "monitor": {"interval": "1h", "top": True},
    }, simulate="h200")
    torch = guard.frameworks["torch"]
    kept = torch.allocate(1 << 30)
    torch.free(torch.allocate(512 << 20))
    print("ready", flush=True)
    for line in sys.stdin:
        eval(line)
        print("done", flush=True)
"""


class Program:
    """A program under such a budget, which does a line when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip
        self.pid = self._process.pid

    def __enter__(self) -> Program:
        self._says("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._says("done")

    def _says(self, word: str) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline() == f"{word}\n"


def top(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "top", "--once", *options], env=environment(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown() -> dict[str, Any]:
    (target,) = json.loads(top("--json"))["targets"]
    found: dict[str, Any] = target
    return found


def test_top_watches_a_program_and_asks_it(folder: Path) -> None:
    with Program() as program:
        target = shown()
        torch = target["shares"][0]["frameworks"][0]
        assert (target["pid"], target["state"], target["requests"]) == (program.pid, "live", [])
        assert (torch["name"], torch["held"], torch["cap"], torch["level"]) == ("torch", 1536 * MIB, 4 * GIB, "ok")
        (process,) = client.listening(str(folder))
        client.trim(process, "torch")
        client.resize(process, "torch", 3 * GIB)
        assert [one["state"] for one in shown()["requests"]] == ["waiting", "waiting"]
        program.do("memguard.require('cupy', 1)")  # a checkpoint, as any other
        target = shown()
        torch = target["shares"][0]["frameworks"][0]
        assert [one["state"] for one in target["requests"]] == ["done", "done"]
        assert (torch["held"], torch["cap"]) == (GIB, 3 * GIB)
        assert [one["kind"] for one in target["events"]] == ["trim", "note"]
    assert list(folder.iterdir()) == []  # it ended without `shutdown`


def test_a_suspended_program_is_shown_and_does_what_was_asked_when_it_is_back(folder: Path) -> None:
    with Program() as program:
        live = [shown()["since"] for _ in range(2)]
        assert live[0] == live[1], "the time from which the state holds"
        program.do("memguard.suspend()")
        before = time.time()
        target = shown()
        assert target["state"] == "suspended" and target["shares"][0]["process"] == 0
        assert live[0] < target["since"] <= before and shown()["since"] == target["since"]
        assert target["shares"][0]["suspended"] > GIB
        assert "in host memory" in top()
        (process,) = client.listening(str(folder))
        client.trim(process, None)
        program.do("memguard.checkpoint()")
        assert [one["state"] for one in shown()["requests"]] == ["waiting"]
        program.do("memguard.resume()")
        program.do("memguard.checkpoint()")
        target = shown()
        assert (target["state"], [one["state"] for one in target["requests"]]) == ("live", ["done"])
        assert target["since"] > before


def test_while_it_is_suspended_no_call_of_the_driver_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    host = type(start(WATCHED).host)
    calls: list[str] = []
    memguard.suspend()
    try:
        monkeypatch.setattr(server.contexts, "relax", lambda: calls.append("relax"))
        for name in ("memory", "processes", "context_active"):
            asked = getattr(host, name)
            monkeypatch.setattr(
                host, name, lambda *given, asked=asked, name=name: (calls.append(name), asked(*given))[1]
            )
        assert client.snapshot(ME)[0].state == "suspended" and calls == []
    finally:
        memguard.resume()
    assert client.snapshot(ME)[0].state == "live" and calls[0] == "relax" and "memory" in calls


@pytest.mark.parametrize("monitor", [None, {}, {"top": False}])
def test_a_budget_that_does_not_ask_opens_nothing_and_loads_nothing(folder: Path, monitor: Any) -> None:
    budget = {**BUDGET, "monitor": {"interval": "1h", **monitor}} if monitor is not None else BUDGET
    code = f"import sys, memguard\nmemguard.init({budget!r}, simulate='h200')\nmemguard.checkpoint()\n" + (
        "print([name for name in sys.modules if name.startswith(("
        "'memguard._tools.top', 'memguard._node.top', 'memguard._node.suspend.sock'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
    assert not folder.exists()


def test_a_request_is_not_lost_among_the_trims_that_are_due() -> None:
    guard = start(WATCHED)
    running = api.current_session()
    client.resize(ME, "torch", 3 * GIB)
    for _ in range(70):
        running._act(Action("trim", Event(1.0, "pressure", "", framework="torch")))
    assert None not in running._pending_trims
    memguard.checkpoint()
    assert guard.plan.devices[0].caps["torch"] == 3 * GIB


def test_an_interrupted_checkpoint_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = start(WATCHED)
    simulated(guard, "torch").free(simulated(guard, "torch").allocate(GIB))

    def interrupted(self: Guard, framework: str | None = None) -> int:
        raise KeyboardInterrupt

    client.trim(ME, "torch")
    client.resize(ME, "torch", 3 * GIB)
    with monkeypatch.context() as patched:
        patched.setattr(Guard, "trim", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memguard.checkpoint()
    memguard.checkpoint()
    requests = client.snapshot(ME)[0].requests
    assert [(one.state, one.answer) for one in requests] == [
        ("failed", "interrupted"), ("done", "its cap is 3.00 GiB"),
    ]  # fmt: skip
    assert not api.current_session()._pending_trims


def test_the_next_budget_is_watched_in_its_place() -> None:
    start(WATCHED)
    start({**WATCHED, "device": {"limit": "20GiB"}}, replace=True)
    assert client.snapshot(ME)[0].shares[0].limit == 20 * GIB
    memguard.shutdown()
    with pytest.raises(SilentError):
        client.snapshot(ME)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    before = start({**BUDGET, "device": {"limit": "20GiB"}})
    with pytest.raises(memguard.errors.TimelineError):
        late = tmp_path / "run.jsonl"
        late.mkdir()
        start({**WATCHED, "monitor": {"top": True, "timeline": str(late / "no" / "run.jsonl")}}, replace=True)
    assert api.current() is before and left(folder) == NOTHING


def test_a_monitor_that_cannot_begin_ends_the_socket_too(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from memguard._runtime.sampler import Monitor

    seen: list[str] = []

    def fails(self: Monitor) -> None:
        seen.append(client.snapshot(ME)[0].state)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Monitor, "start", fails)
    with pytest.raises(RuntimeError):
        start(WATCHED)
    assert seen == ["live"] and runtime.this.session is None and left(folder) == NOTHING


@pytest.mark.parametrize("wrong", ["folder", "socket"])
def test_a_socket_that_cannot_be_had_is_a_warning(
    wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if wrong == "folder":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(sockets.Listening, "begin", lambda self: (_ for _ in ()).throw(OSError(28, "no space")))
        monkeypatch.setattr(sockets.Listening, "end", lambda self: self._socket.close())
    with caplog.at_level(logging.WARNING, "memguard"):
        guard = start(WATCHED)
    assert guard.active and "memguard top cannot watch this process" in caplog.text
    memguard.checkpoint()


def attempt(at: int | None, folder: Path, guard: Guard) -> bool:
    """Begin it, interrupted at that point, and take it back. Whether that point was reached."""
    undo = Undo()
    points = Points(at)
    try:
        points.run(lambda: server.of_budget(guard, undo, lambda: None))
    except KeyboardInterrupt:
        pass
    else:
        assert not points.place, f"it swallowed the interruption at {points.place}"
    undo.run()
    assert left(folder) == NOTHING, points.place
    return bool(points.place)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket that never listened is freed
def test_a_ctrl_c_anywhere_in_its_beginning_leaves_nothing(folder: Path) -> None:
    guard, at = start(BUDGET), 1
    while attempt(at, folder, guard):
        at += 1
    assert at > 40


def test_a_ctrl_c_anywhere_in_its_end_leaves_what_the_next_end_does(folder: Path) -> None:
    guard, at, reached = start(BUDGET), 1, True
    while reached:
        undo = Undo()
        server.of_budget(guard, undo, lambda: None)
        points = Points(at)
        with contextlib.suppress(KeyboardInterrupt):
            points.run(undo.run)
        reached, at = bool(points.place), at + 1
        undo.run()
        assert left(folder) == NOTHING, points.place
    assert at > 20


def test_a_forked_child_is_not_watched_and_its_parent_is() -> None:
    start(WATCHED)
    child = os.fork()
    if child == 0:
        os._exit(0 if not session.event_callbacks and runtime.this.session is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert client.snapshot(ME)[0].pid == os.getpid()
