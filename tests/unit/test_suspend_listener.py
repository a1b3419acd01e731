"""A process that others may suspend: it is asked over a socket, and answers for itself."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from suspending import left

from memguard._base.units import GIB
from memguard._node.identity import Process, process_of, this_process
from memguard._node.suspend import requests
from memguard._node.suspend.store import records
from memguard._node.suspend.triggers import listener
from memguard._node.suspend.types import Suspension
from memguard.errors import CannotSuspend, MemguardError, Suspended
from memguard.exchange.ipc import wire

ROOT = Path(__file__).resolve().parents[2]
ME = this_process()
PROGRAM = """
    import os, sys, time
    from memguard._node.suspend.triggers import listener
    from memguard._node.identity import this_process
    from memguard._node.suspend.types import Suspension
    from memguard.errors import MemguardError

    def suspend():
        if {refuses}:
            raise MemguardError("a graph is being captured")
        while not os.path.exists({until!r}):
            time.sleep(0.01)
        return Suspension(this_process(), {{"GPU-a": 1 << 30}}, None, time.time(), 0.5, "by_others")

    undo = listener.start(suspend, "b.yaml")
    print("ready", flush=True)
    sys.stdin.readline()
    {end}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "memguard"
    for undo in tuple(listener._active):
        undo.run()


class Program:
    """Another process that listens."""

    def __init__(self, refuses: bool = False, until: str = "/", end: str = "undo.run()") -> None:
        code = textwrap.dedent(PROGRAM.format(refuses=refuses, until=until, end=end))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> Process:
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        found = process_of(self.process.pid)
        assert found is not None
        return found

    def __exit__(self, *_: object) -> None:
        self.process.communicate("\n", timeout=10)


def suspension(**changes: Any) -> Suspension:
    given: dict[str, Any] = {"bytes": {"GPU-a": GIB}, "seconds": 0.5, **changes}
    return Suspension(ME, host=None, since=time.time(), why="by_others", **given)


def test_another_process_is_asked_and_answers(folder: Path) -> None:
    with Program() as process:
        budget = records.budget_of(process)
        assert budget is not None and (budget.budget, budget.by_others) == ("b.yaml", True)
        assert requests.request(process, "state") == "running"
        assert requests.request(process) == ({"GPU-a": GIB}, 0.5)
    assert left(folder) == [] and records.budgets() == []  # and its end removed what told of it


@pytest.mark.parametrize("gone", [True, False])
def test_who_has_gone_is_not_obeyed(gone: bool, tmp_path: Path) -> None:
    """A process that was stopped reads the request when it goes on: nobody may wait for it any more."""
    asked: list[int] = []
    serves = listener.Listener({"suspend": lambda: asked.append(1) or suspension()}, str(tmp_path / "socket"))
    serves.begin()
    peer, own = socket.socketpair()
    with own, peer:
        wire.send(peer, {"memguard": requests.VERSION, "op": "suspend"})
        if gone:
            peer.close()
        serves._serve(own, 7)
    serves.end()
    assert bool(asked) is not gone


@pytest.mark.parametrize(
    ("op", "why"), [("suspend", "its budget does not allow it"), ("leave", "does not let it leave")]
)
def test_what_its_budget_does_not_say_is_refused_with_the_reason(op: str, why: str, tmp_path: Path) -> None:
    """One that leaves for a lease need not be one that others may suspend, and the other way round."""
    other = {"suspend": "leave", "leave": "suspend"}[op]
    serves = listener.Listener({other: suspension}, str(tmp_path / "socket"))
    answer = serves._answer(op, 7)
    assert answer["done"] is False and why in answer["text"]
    serves._socket._socket.close()


def test_its_refusal_comes_back_in_its_words() -> None:
    with (
        Program(refuses=True) as process,
        pytest.raises(requests.RefusedError, match="graph is being captured") as told,
    ):
        requests.request(process)
    assert not told.value.suspended


def test_its_state_is_told_while_it_is_busy(tmp_path: Path) -> None:
    with Program(until=str(tmp_path / "over")) as process:
        found: list[Any] = []
        asked = threading.Thread(target=lambda: found.append(requests.request(process)))
        asked.start()
        assert requests.request(process, "state") == "running" and asked.is_alive()
        (tmp_path / "over").touch()
        asked.join()
    assert found == [({"GPU-a": GIB}, 0.5)]


@pytest.mark.parametrize("end", ["", "raise SystemExit", "import os; os.kill(os.getpid(), 9)"])
def test_a_process_that_has_ended_does_not_answer(folder: Path, end: str) -> None:
    with Program(end=end) as process:
        pass
    with pytest.raises(requests.SilentError):
        requests.request(process)
    assert records.budgets() == []
    assert bool(left(folder)) == ("kill" in end)  # a killed one leaves its socket


def test_sockets_of_those_that_were_killed_are_removed(folder: Path) -> None:
    with Program(end="import os; os.kill(os.getpid(), 9)") as dead, Program() as process:
        assert requests.request(process, "state") == "running"
        requests.tidy(str(folder))
        assert os.path.exists(requests.path_of(process)) and os.path.exists(requests.path_of(dead))
    requests.tidy(str(folder))
    assert not os.path.exists(requests.path_of(dead))


def test_errors_of_all_kinds_are_answers() -> None:
    wrong: list[BaseException] = [Suspended("it is"), CannotSuspend([("a", "b", "c")]), ValueError("x"), SystemExit(3)]

    def ask() -> Suspension:
        raise wrong[0]

    undo = listener.start(ask, "b")
    while wrong:
        with pytest.raises(requests.RefusedError) as told:
            requests.request(ME)
        assert told.value.suspended is isinstance(wrong.pop(0), Suspended)
    undo.run()


def test_a_long_text_is_shortened_and_arrives() -> None:
    def ask() -> Suspension:
        raise MemguardError("\N{SNOWMAN}" * 50_000)

    listener.start(ask, "b")
    with pytest.raises(requests.RefusedError, match="\N{SNOWMAN}" * 100):
        requests.request(ME)


def test_a_path_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    undo = listener.start(suspension, "b")
    assert requests.request(ME) == ({"GPU-a": GIB}, 0.5)
    undo.run()
    assert left(deep / "memguard") == [] and records.budgets() == []


def test_without_permission_nobody_listens(folder: Path) -> None:
    undo = listener.start(None, "b")
    budget = records.budget_of(ME)
    assert budget is not None and not budget.by_others
    with pytest.raises(requests.SilentError):
        requests.request(ME)
    undo.run()
    undo.run()
    assert left(folder) == [] and records.budgets() == []


def test_it_begins_again_after_its_end() -> None:
    for _ in range(3):
        undo = listener.start(suspension, "b")
        assert requests.request(ME, "state") == "running"
        undo.run()
        with pytest.raises(requests.SilentError):
            requests.request(ME, "state")


def connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(requests.path_of(ME))
    return connection


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        wire.encode({"memguard": 1, "op": "eval"}),
        wire.encode({"memguard": 2, "op": "suspend"}),
        wire.encode({"memguard": 1, "op": ["suspend"]}),
        wire.encode({"memguard": 1, "op": "suspend", "why": "asked"}),
        wire.encode({"memguard": 1, "token": "0" * 32}),
    ],
)
def test_what_is_no_request_does_nothing(data: bytes) -> None:
    asked: list[None] = []

    def ask() -> Suspension:
        asked.append(None)
        return suspension()

    listener.start(ask, "b")
    with connected() as connection, contextlib.suppress(ConnectionResetError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert asked == []
    assert requests.request(ME, "state") == "running"


def test_another_users_request_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def ask() -> Suspension:
        asked.append(None)
        return suspension()

    listener.start(ask, "b")
    monkeypatch.setattr(wire, "same_user", lambda who: False)
    with connected() as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(wire.encode({"memguard": 1, "op": "suspend"}))
        assert connection.recv(100) == b""
    assert asked == []
    with pytest.raises(requests.SilentError, match="another process listens in its place"):
        requests.request(ME)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"memguard": 2, "done": True},
        {"memguard": 1, "done": "yes"},
        {"memguard": 1, "done": True},
        {"memguard": 1, "done": True, "bytes": {"GPU-a": -1}, "seconds": 1},
        {"memguard": 1, "done": True, "bytes": {}, "seconds": "1"},
        {"memguard": 1, "done": False, "text": 7},
    ],
)
def test_a_wrong_answer_is_none(folder: Path, answer: dict[str, Any]) -> None:
    listener.start(None, "b")  # makes the folder
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as fake:
        fake.bind(requests.path_of(ME))
        fake.listen(1)

        def serve() -> None:
            connection, _ = fake.accept()
            with connection:
                wire.receive(connection, 5)
                wire.send(connection, answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(requests.SilentError, match="does not answer"):
            requests.request(ME)
        thread.join()
    os.unlink(requests.path_of(ME))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_serves_nobody_and_removes_nothing() -> None:
    listener.start(suspension, "b")
    pid = os.fork()
    if not pid:
        os._exit(0 if not listener._active else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert requests.request(ME, "state") == "running" and records.budget_of(ME) is not None
