"""The helper process of a suspension, over a stub of the driver whose calls fail, hang, or kill their caller."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stub_gpus import GIB, ONE, UUIDS

from memguard._devices.checkpoint import State
from memguard._node.identity import Process, process_of, this_process
from memguard._node.suspend.course import flow
from memguard._node.suspend.course.steps import End
from memguard._node.suspend.driver.channel import Answer
from memguard._node.suspend.driver.client import Client

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {UUIDS[0]: GIB}
CALLS = ("state", "lock", "checkpoint", "restore", "unlock")
SHORT = flow.Limits(state=0.4, lock=0.3, unlock=0.4, copy=0.4, rate=1 << 40, unknown=0.4)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stubs of libcuda and NVML, and one `old` with a driver that cannot suspend."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "old").mkdir()
    here = Path(__file__).parent
    for source, library, flags in (
        ("checkpoint_stub.c", "libcuda.so.1", ()),
        ("checkpoint_stub.c", "old/libcuda.so.1", ("-DOLD",)),
        ("nvml_stub.c", "libnvidia-ml.so.1", ()),
    ):
        command = ["gcc", "-Wall", "-shared", "-fPIC", *flags, "-o", str(folder / library), str(here / source)]
        subprocess.run(command, check=True)
    return folder


class Machine:
    """A folder of the stub's, a process that has CUDA, and helpers over it."""

    def __init__(self, folder: Path, libraries: Path) -> None:
        self.folder = folder
        self.target = subprocess.Popen(["sleep", "600"])
        self.process = process_of(self.target.pid) or Process(0, 0)
        scenario = {
            **ONE,
            "total0": 16 * GIB,
            "reserved0": 0,
            "used0": 2 * GIB,
            "processes0": f"{self.target.pid}:{GIB}",
        }
        (folder / "scenario").write_text("".join(f"{key}={value}\n" for key, value in scenario.items()))
        (folder / "free").write_text(f"{8 * GIB}\n")
        self.environ = {
            "CHECKPOINT_STUB": str(folder),
            "NVML_STUB": str(folder / "scenario"),
            "LD_LIBRARY_PATH": str(libraries),
        }
        self.clients: list[Client] = []
        self.begin()

    def begin(self) -> None:
        (self.folder / f"{self.target.pid}.process").write_text(f"0 0 {GIB}\n")
        (self.folder / "calls").write_text("")
        self.wrong()

    def wrong(self, *faults: str) -> None:
        (self.folder / "faults").write_text("".join(f"{fault}\n" for fault in faults))

    def client(self) -> Client:
        self.clients.append(Client(self.environ))
        return self.clients[-1]

    @property
    def state(self) -> State:
        return State(self._fields()[0])

    @property
    def destroyed(self) -> bool:
        return bool(self._fields()[1])

    def _fields(self) -> list[int]:
        return [int(field) for field in (self.folder / f"{self.target.pid}.process").read_text().split()]

    @property
    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "calls").read_text().splitlines()]

    def becomes(self, state: State, seconds: float = 10.0) -> bool:
        return until(lambda: self.state is state, seconds)

    def off(self, client: Client, **options: Any) -> flow.Outcome:
        options = {"lock_timeout": 0.1, "settle": 0.0, "limits": SHORT, "room": room, **options}
        return flow.take_off(self.process, client=client, **options)

    def back(self, client: Client, **options: Any) -> flow.Outcome:
        return flow.bring_back(
            self.process, client=client, **{"needs": NEEDS, "limits": SHORT, "room": room, **options}
        )

    def end(self) -> None:
        (self.folder / "over").write_text("")
        for client in self.clients:
            client.close()
        self.target.kill()
        self.target.wait()


@contextlib.contextmanager
def room(*_: object) -> Iterator[None]:
    """There is always room."""
    yield None


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    return process_of(pid) is None


@pytest.fixture
def machine(tmp_path: Path, libraries: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, libraries)
    yield made
    made.end()


def test_off_and_back(machine: Machine) -> None:
    client = machine.client()
    usage = client.usage()
    assert usage is not None and usage[UUIDS[0]].processes == {machine.target.pid: GIB}
    assert (usage[UUIDS[0]].total, usage[UUIDS[0]].free) == (16 * GIB, 14 * GIB)
    off = flow.take_off(machine.process, client=client)
    assert (off.end, off.text, off.bytes) == (End.SUSPENDED, "", {UUIDS[0]: GIB})
    assert machine.state is State.CHECKPOINTED and off.host is not None
    back = flow.bring_back(machine.process, client=client, needs=off.bytes)
    assert (back.end, back.text) == (End.RUNNING, "") and machine.state is State.RUNNING
    assert machine.calls == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("done", [0, 300])
def test_killed_within_each_call_it_always_comes_back(machine: Machine, call: str, done: int) -> None:
    """The driver goes on by itself in the target, and a new helper waits for that."""
    client = machine.client()
    machine.wrong(f"{call} die {done}")
    off = machine.off(client, limits=flow.Limits())
    judge(machine, off)
    assert off.end in (End.SUSPENDED, End.RUNNING, End.UNTOUCHED), off.text
    back = machine.back(client, limits=flow.Limits())
    assert (back.end, back.text) == (End.RUNNING, "") and machine.state is State.RUNNING


@pytest.mark.parametrize("step", ["state", "lock", "settle", "checkpoint", "room", "restore", "unlock"])
def test_killed_before_each_step_it_always_comes_back(machine: Machine, step: str) -> None:
    client = machine.client()
    killed: list[int] = []

    def kill(name: str) -> None:
        if name == step and client.pid is not None and not killed:
            killed.append(client.pid)
            os.kill(killed[0], signal.SIGKILL)

    assert client.state(machine.process).state is State.RUNNING
    judge(machine, machine.off(client, on_step=kill))
    assert machine.back(client, on_step=kill).end is End.RUNNING and machine.state is State.RUNNING
    assert killed and client.pid != killed[0]


def test_a_program_that_does_not_ignore_sigpipe_survives_the_death_of_its_helper(machine: Machine) -> None:
    client = machine.client()
    assert client.state(machine.process).state is State.RUNNING and client._connection is not None
    client._connection.process.kill()
    os.waitid(os.P_PID, client._connection.process.pid, os.WEXITED | os.WNOWAIT)  # nothing has noticed it yet
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        assert client.state(machine.process).trouble == "died"
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert client.state(machine.process).state is State.RUNNING


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("done", [0, 1])
def test_a_call_that_hangs_is_given_up_and_the_state_asked(machine: Machine, call: str, done: int) -> None:
    client = machine.client()
    machine.wrong(f"{call} hang {done}")
    judge(machine, machine.off(client))
    back = machine.back(client)
    assert back.end is End.RUNNING or (call == "state" and not done), back.text
    machine.wrong()
    assert machine.back(client).end is End.RUNNING and machine.state is State.RUNNING


faults = st.lists(
    st.one_of(
        st.builds("{} code {}".format, st.sampled_from(CALLS), st.sampled_from((1, 2, 3, 304, 401, 600, 801, 999))),
        st.builds("{} die {}".format, st.sampled_from(CALLS), st.sampled_from((0, 50))),
    ),
    max_size=4,
)


def test_whatever_fails_what_is_said_is_true(tmp_path: Path, libraries: Path) -> None:
    machine = Machine(tmp_path, libraries)
    client = machine.client()

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(first=faults, second=faults)
    def holds(first: list[str], second: list[str]) -> None:
        machine.begin()
        machine.wrong(*first)
        judge(machine, machine.off(client, limits=flow.Limits()))
        machine.wrong(*second)
        before = machine.state
        judge(machine, machine.back(client, limits=flow.Limits()), before)
        machine.wrong()
        if not machine.destroyed:
            assert machine.back(client, limits=flow.Limits()).end is End.RUNNING
            assert machine.state is State.RUNNING
        else:
            assert any(fault.startswith("restore code ") for fault in first + second)

    try:
        holds()
    finally:
        machine.end()


def judge(machine: Machine, outcome: flow.Outcome, before: State = State.RUNNING) -> None:
    """What is said of the process is true."""
    state, end = machine.state, outcome.end
    if end is End.SUSPENDED:
        assert state is State.CHECKPOINTED and not machine.destroyed
    elif end is End.RUNNING:
        assert state is State.RUNNING
    elif end is End.LOST:
        assert machine.destroyed
    elif end is End.UNTOUCHED:
        assert state is before
    assert end is not End.ENDED


def test_room_that_went_with_its_helper_is_no_room(machine: Machine) -> None:
    client = machine.client()
    assert machine.off(client).end is End.SUSPENDED and client.pid is not None
    client._holding = client._connection  # as `hold` leaves it
    os.kill(client.pid, signal.SIGKILL)
    assert client.usage() is not None, "another helper, which holds nothing"
    answer = client.restore(machine.process, 5.0)
    assert answer.trouble == "unheld" and "restore" not in machine.calls


def test_what_cannot_be_held_is_no_room_and_nothing_is_started_to_let_it_go(machine: Machine) -> None:
    client = machine.client()
    client.release()
    client.unwatch(machine.process)
    assert client.pid is None
    answer = client.hold({"GPU-nowhere": GIB})
    assert answer.trouble == "room" and answer.text
    assert client._holding is None and client.state(machine.process).code == 0


def test_asked_by_a_signal_handler_while_it_waits(machine: Machine) -> None:
    client, found = machine.client(), []
    assert client.lock(machine.process, 100, 20.0).code == 0
    machine.wrong("checkpoint slow 500")
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(client.request("ping", 5.0)))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert client.checkpoint(machine.process, 20.0).code == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found[0]["pid"] == client.pid


def test_a_state_that_waits_for_an_operation_does_not_end_it(machine: Machine) -> None:
    client = machine.client()
    assert client.lock(machine.process, 100, 20.0).code == 0
    helper = client.pid
    machine.wrong("checkpoint slow 700")
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(client.checkpoint(machine.process, 20.0)))
    thread.start()
    assert until(lambda: machine.calls[-1] == "checkpoint")
    assert client.state(machine.process, 0.1) == Answer(None, trouble="timeout")
    thread.join()
    assert found == [Answer(0)] and client.pid == helper and machine.state is State.CHECKPOINTED


def test_an_operation_of_one_who_has_died_is_waited_for(machine: Machine) -> None:
    client, other = machine.client(), machine.client()
    assert client.lock(machine.process, 100, 20.0).code == other.state(machine.process).code == 0
    machine.wrong("checkpoint die 900")
    assert client.checkpoint(machine.process, 20.0).trouble == "died"
    back = machine.back(other, limits=flow.Limits(state=0.2))
    assert back.end is End.RUNNING and machine.calls == ["lock", "checkpoint", "restore", "unlock"]


def test_without_nvml_nothing_is_begun(machine: Machine) -> None:
    """Nobody could tell whether there is room for it to come back."""
    scenario = machine.folder / "scenario"
    scenario.write_text(scenario.read_text() + "init=9\n")
    off = machine.off(machine.client())
    assert off.end is End.UNTOUCHED and "NVML does not say" in off.text and machine.calls == []


def test_a_stopped_process(machine: Machine) -> None:
    """The lock hangs, and is done when the process continues. Nobody is left to undo it but the helper that hangs."""
    client = machine.client()
    assert client.state(machine.process).code == 0
    (machine.folder / "stopped").write_text("")
    machine.target.send_signal(signal.SIGSTOP)
    machine.wrong("lock stopped 0", "state slow 0", "state stopped 0", "state stopped 0", "state stopped 0")
    (machine.folder / "faults").write_text("lock stopped 0\n")
    assert until(lambda: flow.stopped(machine.process))
    helper = client.pid
    off = machine.off(client)
    assert off.end is End.UNKNOWN and f"`kill -CONT {machine.target.pid}`" in off.text, off
    assert f"`memguard resume {machine.target.pid}`" in off.text
    machine.target.send_signal(signal.SIGCONT)
    (machine.folder / "stopped").unlink()
    assert helper is not None and until(lambda: gone(helper))
    assert machine.state is State.RUNNING and machine.calls == ["lock", "unlock"]


def test_its_client_ends_within_an_operation(machine: Machine) -> None:
    """It ends the operation first, and undoes a lock that nobody is left to undo."""
    for op, before, after in (
        ("lock", "0", State.RUNNING),
        ("checkpoint", "1", State.CHECKPOINTED),
        ("restore", "2", State.RUNNING),
    ):
        (machine.folder / f"{machine.target.pid}.process").write_text(f"{before} 0 {GIB}\n")
        client = machine.client()
        assert client.state(machine.process).code == 0
        helper = client.pid
        machine.wrong(f"{op} slow 400")
        fields = {**machine.process._asdict(), "timeout_ms": 100}
        thread = threading.Thread(target=client.request, args=(op, 20.0), kwargs=fields)
        thread.start()
        assert until(lambda op=op: machine.calls[-1:] == [op])
        client.close()
        thread.join()
        assert helper is not None and until(lambda helper=helper: gone(helper))
        assert machine.state is after, op


PROGRAM = """
import json, os, sys, time
from memguard._node.suspend.driver.client import Client
from memguard._node.identity import Process
client = Client(json.loads(sys.argv[1]))
process = Process(*json.loads(sys.argv[2]))
assert client.lock(process, 100, 20.0).code == 0
if os.fork():  # the child has the pipe too, so that it does not close
    print(client.pid, flush=True)
time.sleep(60)
"""


def test_its_program_is_killed_and_a_child_of_that_lives_on(machine: Machine) -> None:
    arguments = [json.dumps(machine.environ), json.dumps(machine.process)]
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert program.stdout is not None
    helper = int(program.stdout.readline())
    assert machine.state is State.LOCKED
    program.kill()
    program.wait()
    try:
        assert until(lambda: gone(helper)) and machine.state is State.RUNNING
    finally:
        os.killpg(program.pid, signal.SIGKILL)  # the child
        program.stdout.close()


def test_signals_of_the_terminal_do_not_reach_it(machine: Machine) -> None:
    client = machine.client()
    assert client.state(machine.process).code == 0
    helper = client.pid
    assert helper is not None and os.getsid(helper) == helper
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(helper, number)
    assert client.state(machine.process).state is State.RUNNING and client.pid == helper
    client.close()
    assert until(lambda: gone(helper))


def test_who_watches_is_told(machine: Machine) -> None:
    mine, other = machine.client(), machine.client()
    assert machine.off(mine).end is End.SUSPENDED
    mine.watch(machine.process)
    assert mine.next_event(0.7) is None
    assert mine.pid is not None
    os.kill(mine.pid, signal.SIGKILL)  # what watches then is the next one
    assert machine.back(other).end is End.RUNNING
    event = mine.next_event(10)
    assert event is not None and (event.what, event.process) == ("running", machine.process)
    assert mine.next_event(0.7) is None, "once"
    assert machine.off(mine).end is End.SUSPENDED
    mine.watch(machine.process)
    machine.target.kill()
    machine.target.wait()
    event = mine.next_event(10)
    assert event is not None and event.what == "ended"
    assert machine.back(mine).end is End.ENDED


def test_an_answer_comes_at_once_while_another_thread_waits_for_news(machine: Machine) -> None:
    """Whoever reads for others lets them know: they do not wait on for what is there."""
    client = machine.client()
    assert client.state(machine.process).code == 0
    own = this_process()  # it has no GPU, so there is no news of it
    client.watch(own)
    waiting = threading.Thread(target=client.next_event, args=(60.0,), daemon=True)
    waiting.start()
    begun = time.monotonic()
    for _ in range(200):
        assert client.state(machine.process).code == 0
    assert time.monotonic() - begun < 20, "each waited for 0.2 s: 40 s"
    assert waiting.is_alive()
    client.unwatch(own)


def test_a_pid_that_was_given_again_is_never_touched(machine: Machine) -> None:
    client = machine.client()
    other = Process(machine.target.pid, machine.process.start - 1)
    assert flow.take_off(other, client=client).end is End.ENDED
    assert flow.bring_back(other, client=client).end is End.ENDED
    assert machine.calls == []


def test_a_forked_child_has_a_helper_of_its_own(machine: Machine) -> None:
    client = machine.client()
    assert client.state(machine.process).code == 0
    helper = client.pid
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with client._lock:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold)  # which is not in the child, and has the lock there for ever
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        pid = os.fork()
    if not pid:
        signal.alarm(20)
        good = client.pid is None and client.state(machine.process).code == 0 and client.pid not in (None, helper)
        client.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    over.set()
    thread.join()
    assert client.pid == helper and client.state(machine.process).code == 0


def test_a_program_with_many_open_files(machine: Machine) -> None:
    """A descriptor above 1,023 is none for select()."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        raise AssertionError("this test opens 1,100 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
    try:
        assert machine.client().state(machine.process).code == 0
    finally:
        for file in files:
            os.close(file)
        machine.clients[-1].close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_budget_and_no_framework_in_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_CONFIG", "/nowhere.yaml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    client = machine.client()
    assert client.state(machine.process).code == 0
    environ = Path(f"/proc/{client.pid}/environ").read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in environ}
    assert not [name for name in names if name.startswith(("MEMGUARD", "PYTHON", "CUDA_VISIBLE"))]
    code = "import sys; from memguard._node.suspend.driver import helper; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"pydantic", "yaml", "rich", "click", "pynvml", "subprocess", "memguard.api", "memguard._budget"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"LD_LIBRARY_PATH": "old"}, "update the NVIDIA driver to version 570 or later"),
        ({"LD_LIBRARY_PATH": "none"}, "install the NVIDIA driver"),
        ({"CHECKPOINT_STUB": None}, "cuInit: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_where_no_driver_can_do_it(machine: Machine, libraries: Path, changes: dict[str, Any], says: str) -> None:
    (libraries / "none").mkdir(exist_ok=True)
    (libraries / "none" / "libcuda.so.1").write_text("no library")
    for name, value in changes.items():
        if value is None:
            del machine.environ[name]
        else:
            machine.environ[name] = str(libraries / value)
    off = machine.off(machine.client())
    assert off.end is End.UNTOUCHED and says in off.text and "nothing was changed" in off.text


def test_the_driver_hangs_when_it_is_started(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.environ["CHECKPOINT_STUB_INIT"] = "hang"
    monkeypatch.setattr("memguard._node.suspend.driver.client.START", 0.3)
    client = machine.client()
    off = machine.off(client)
    assert off.end is End.UNTOUCHED and "does not answer" in off.text and client.pid is None


@pytest.mark.parametrize("named", ["", None, "python3"])
@pytest.mark.parametrize("installed", [True, False])
def test_no_python_of_the_path_is_taken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, installed: bool
) -> None:
    """A program that embeds Python has no `sys.executable`. What PATH has may be anybody's."""
    for name in ("python3", "python"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/taken\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", named)
    if not installed:
        monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path / "nowhere"))
    answer = machine.client().state(machine.process)
    assert not (tmp_path / "taken").exists()
    if installed:
        assert answer.state is State.RUNNING
    else:
        assert answer.trouble == "start" and "does not know its interpreter: set sys.executable" in answer.text


def test_it_cannot_be_started(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    off = machine.off(machine.client())
    assert off.end is End.UNTOUCHED and "/nowhere/python" in off.text
