"""`memguard top` asks a process that lets itself be watched: what it holds, to trim, to change a cap."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guards import BUDGET, simulated, start
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._base.types import Event, Pressure
from memguard._base.units import GIB, MIB
from memguard._guard.guard import Guard
from memguard._node.identity import Process, process_of, this_process
from memguard._node.suspend import sockets
from memguard._node.suspend.requests import SilentError
from memguard._node.top import requests, server
from memguard._node.top.snapshot import Target
from memguard._tools.top import client
from memguard.errors import MemguardError
from memguard.exchange.ipc import wire

ROOT = Path(__file__).resolve().parents[2]
ME = this_process()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "memguard"
    memguard.shutdown()


@pytest.fixture
def guard() -> Guard:
    guard = start({**BUDGET, "monitor": {"interval": "1h"}})
    torch = simulated(guard, "torch")
    torch.allocate(3 * GIB)
    torch.free(torch.allocate(512 * MIB))
    return guard


@pytest.fixture
def served(guard: Guard) -> Iterator[server.Served]:
    found = server.serve(guard, whole=True)
    yield found
    found.end()


def target() -> Target:
    return client.snapshot(ME)[0]


def test_a_snapshot_is_the_ledger(guard: Guard, served: server.Served, folder: Path) -> None:
    found, (gpu,) = client.snapshot(ME)
    ledger = guard.ledger().devices[0]
    (share,) = found.shares
    torch, row = share.frameworks[0], ledger.row("torch")
    assert (torch.held, torch.in_use, torch.cap, torch.cached) == (row.bytes, row.in_use, row.cap, row.cached)
    assert (share.process, share.limit) == (ledger.process, ledger.limit) and torch.cached
    assert share.overhead == ledger.row("overhead").bytes and share.unaccounted == ledger.row("unaccounted").bytes
    assert (found.pid, found.state, found.simulated, found.key) == (os.getpid(), "live", True, f"{ME.pid}-{ME.start}")
    assert gpu.used == (ledger.process or 0) + (ledger.row("other processes").bytes or 0)
    assert client.listening(str(folder)) == [ME]


def test_only_this_user_can_enter(served: server.Served, folder: Path) -> None:
    assert stat.S_IMODE(os.stat(served.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_peer_of_another_user_is_not_served(served: server.Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells each side who the other one is: here the server's hears of another user."""
    main = threading.current_thread()
    monkeypatch.setattr(wire, "same_user", lambda who: threading.current_thread() is main)
    with pytest.raises(SilentError):
        target()
    with pytest.raises(SilentError):
        client.trim(ME, None)
    monkeypatch.undo()
    assert served._requests.seen() == ()


def test_an_answer_of_another_user_is_not_believed(served: server.Served, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.current_thread()
    monkeypatch.setattr(wire, "same_user", lambda who: threading.current_thread() is not main)
    with pytest.raises(SilentError, match="another process listens"):
        target()


def test_another_process_in_its_place_is_not_believed(served: server.Served, folder: Path) -> None:
    other = Process(os.getppid(), 1)
    os.rename(served.path, sockets.path_of(server.KIND, other, str(folder)))
    with pytest.raises(SilentError, match="another process listens in its place"):
        client.snapshot(other, str(folder))


def test_events_and_levels_come_along(guard: Guard, served: server.Served) -> None:
    uuid = guard.plan.devices[0].device.uuid
    assert target().shares[0].frameworks[0].level == "ok"
    assert guard.callbacks.event is not None
    guard.callbacks.event(Event(1.0, "pressure", "pressure warn: torch", Pressure.WARN, uuid, "torch"))
    found = target()
    assert found.shares[0].frameworks[0].level == "warn"
    assert [(said.kind, said.level) for said in found.events] == [("pressure", "warn")]


def test_a_trim_waits_for_the_checkpoint_and_is_done_on_its_thread(guard: Guard, served: server.Served) -> None:
    threads: list[int] = []
    trim = guard.trim
    guard.trim = lambda name=None: (threads.append(threading.get_ident()), trim(name))[1]  # type: ignore[method-assign, assignment]
    before = guard.ledger().devices[0].row("torch").bytes or 0
    assert client.trim(ME, "torch") == 1
    assert [(one.what, one.state) for one in target().requests] == [("trim torch", "waiting")]
    assert guard.ledger().devices[0].row("torch").bytes == before
    served.checkpoint()
    (request,) = target().requests
    assert (request.state, request.answer) == ("done", "512.0 MiB went back to the driver")
    assert guard.ledger().devices[0].row("torch").bytes == before - 512 * MIB
    assert threads == [threading.get_ident()]
    assert target().events[-1].kind == "trim"  # as every event: into the timeline and to callbacks too


def test_a_cap_is_changed_at_the_checkpoint(guard: Guard, served: server.Served) -> None:
    client.resize(ME, "torch", 5 * GIB)
    client.resize(ME, "pycuda", 1 << 49)
    served.checkpoint()
    done, failed = target().requests
    assert (done.state, failed.state) == ("done", "failed") and failed.answer
    assert guard.ledger().devices[0].row("torch").cap == 5 * GIB


def test_what_cannot_be_asked_is_refused_at_once(served: server.Served) -> None:
    with pytest.raises(MemguardError, match="'jax' is not in the budget"):
        client.trim(ME, "jax")
    for _ in range(requests.WAITING):
        client.trim(ME, None)
    with pytest.raises(MemguardError, match="wait for the process's next checkpoint"):
        client.trim(ME, None)


def test_the_cap_of_an_elastic_share_is_refused_at_once() -> None:
    frameworks = {"torch": {"limit": "2GiB"}, "cupy": {"min": "1GiB", "max": "8GiB"}}
    found = server.serve(start({**BUDGET, "frameworks": frameworks, "monitor": {"interval": "1h"}}), whole=True)
    try:
        with pytest.raises(
            MemguardError, match=r"(?s)its share is elastic.*fix: change frameworks\.cupy\.min or \.max"
        ):
            client.resize(ME, "cupy", GIB)
        assert not target().requests
        client.resize(ME, "torch", GIB)
        client.trim(ME, "cupy")
        assert len(target().requests) == 2
    finally:
        found.end()


def test_an_answer_has_the_remedy() -> None:
    waiting = requests.Requests()

    def refuse() -> str:
        raise MemguardError("it cannot be", fix="do that")

    waiting.add("a", refuse)
    waiting.perform()
    assert waiting.seen()[0].answer == "it cannot be; fix: do that"


def test_nothing_is_done_on_the_monitor_s_thread_nor_while_suspended(
    served: server.Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.checkpoint()
    client.trim(ME, None)
    with monkeypatch.context() as patched:
        patched.setattr(server, "on_monitor", lambda: True)
        served.checkpoint()
    with monkeypatch.context() as patched:
        patched.setattr(server.suspension, "now", object())
        served.checkpoint()
    assert [one.state for one in target().requests] == ["waiting"]
    served.checkpoint()
    assert [one.state for one in target().requests] == ["done"]


def test_errors_of_what_is_asked_are_answers_and_interruptions_are_not_lost() -> None:
    waiting = requests.Requests()

    def fail() -> str:
        raise ValueError("broken")

    def interrupt() -> str:
        raise KeyboardInterrupt

    def within() -> str:
        waiting.add("d", lambda: "later")
        waiting.perform()  # a checkpoint within a checkpoint does nothing
        assert [one.state for one in waiting.seen() if one.what == "d"] == ["waiting"]
        return "done within"

    for what, do in (("a", fail), ("b", interrupt), ("c", within)):
        waiting.add(what, do)
    with pytest.raises(KeyboardInterrupt):
        waiting.perform()
    waiting.perform()
    assert [(one.what, one.state) for one in waiting.seen()] == [
        ("a", "failed"), ("b", "failed"), ("c", "done"), ("d", "done"),
    ]  # fmt: skip
    assert "broken" in waiting.seen()[0].answer


def test_the_end_of_the_budget_is_an_answer(guard: Guard, served: server.Served) -> None:
    guard.stop()
    try:
        found = target()
    except MemguardError as error:
        assert not isinstance(error, SilentError)
    else:
        assert found.pid == os.getpid()
    served.end()
    served.end()
    with pytest.raises(SilentError):
        target()
    assert not os.path.exists(served.path)


def test_a_long_snapshot_comes_in_pieces(guard: Guard, served: server.Served) -> None:
    assert guard.callbacks.event is not None
    for _ in range(60):
        guard.callbacks.event(Event(2.0, "note", '"\\\N{SNOWMAN}\x1b' * 120))
    found = target()
    assert len(found.events) == 50 and found.events[-1].text == '"\\\N{SNOWMAN}\x1b' * 120


BAD = [
    {},
    {"memguard": 1, "op": "more"},
    {"memguard": 2, "op": "snapshot"},
    {"memguard": 1, "op": "snapshot", "x": 1},
    {"memguard": 1, "op": "suspend"},
    {"memguard": 1, "op": "trim", "framework": 1},
    {"memguard": 1, "op": "resize", "framework": None, "bytes": 1},
    {"memguard": 1, "op": "resize", "framework": "torch", "bytes": -1},
    {"memguard": 1, "op": "resize", "framework": "torch", "bytes": True},
    {"memguard": 1, "op": []},
]


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_request_gets_no_answer(served: server.Served, message: dict[str, Any]) -> None:
    with sockets.connected(server.KIND, ME) as connection:
        wire.send(connection, message)
        with pytest.raises((EOFError, OSError)):
            sockets.received(connection)
    assert target().requests == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_a_snapshot_that_was_changed_is_read_or_refused(data: st.DataObject) -> None:
    """Any value replaced by any other: never another error, never a figure that is none."""
    from top_screens import GPU, TARGET

    from memguard._node.top.snapshot import Request

    target = replace(TARGET, requests=(Request(1, "trim", "done"),))
    said: Any = json.loads(json.dumps({"target": target.__dict__, "gpus": [GPU.__dict__]}, default=vars))
    at = said
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(JSON)
        break
    try:
        found, _ = client._read(json.dumps(said), ME)
    except wire.BadMessage:
        return
    assert found.pid == ME.pid
    for share in found.shares:
        for part in share.frameworks:
            assert all(size is None or type(size) is int for size in (part.held, part.in_use, part.cap))


@pytest.mark.parametrize("value", ["1", 1.5, True, 1 << 60, -(1 << 60), [], {}])
@pytest.mark.parametrize("key", ["process", "overhead", "held", "cap"])
def test_a_figure_that_is_none_is_refused(key: str, value: object) -> None:
    from top_screens import GPU, TARGET

    said: Any = json.loads(json.dumps({"target": TARGET.__dict__, "gpus": [GPU.__dict__]}, default=vars))
    assert client._read(json.dumps(said), ME)[0].shares == TARGET.shares
    share = said["target"]["shares"][0]
    (share if key in share else share["frameworks"][0])[key] = value
    with pytest.raises(wire.BadMessage):
        client._read(json.dumps(said), ME)


PROGRAM = """
    import sys, memguard
    from memguard._node.top import server
    guard = memguard.init({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}, simulate="h200")
    served = server.serve(guard)
    print("ready", flush=True)
    for line in sys.stdin:
        served.checkpoint()
        print("checked", flush=True)
"""


def test_another_process_is_watched_asked_and_may_die(folder: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert program.stdin is not None and program.stdout is not None
    with program:
        assert program.stdout.readline() == "ready\n"
        process = process_of(program.pid)
        assert process is not None
        client.resize(process, "torch", 2 * GIB)
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "checked\n"
        found, _ = client.snapshot(process)
        assert found.requests[0].answer == "its cap is 2.00 GiB" and found.shares[0].frameworks[0].cap == 2 * GIB
        program.kill()
        program.wait()
        with pytest.raises(SilentError):
            client.snapshot(process)
    assert client.listening(str(folder)) == [process]  # what it left
    sockets.tidy(server.KIND, str(folder))
    assert client.listening(str(folder)) == []


def test_a_forked_child_serves_nobody_and_removes_nothing(served: server.Served) -> None:
    child = os.fork()
    if child == 0:
        served.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert target().pid == os.getpid()
