"""`memguard ps`, `suspend` and `resume`, over stubs of the driver and NVML: also after whoever did it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from stub_gpus import GIB, ONE, UUIDS

from memguard._node.identity import Process, process_of
from memguard._node.suspend import remote_suspend
from memguard._node.suspend.driver.client import Client
from memguard._node.suspend.store import records, spare

ROOT = Path(__file__).resolve().parents[2]
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    here = Path(__file__).parent
    for source, library in (("room_stub.c", "libcuda.so.1"), ("nvml_stub.c", "libnvidia-ml.so.1")):
        command = ["gcc", "-Wall", "-shared", "-fPIC", "-o", str(folder / library), str(here / source)]
        subprocess.run(command, check=True)
    return folder


class Machine:
    """A GPU with some processes on it, and the commands of a user there."""

    def __init__(self, folder: Path, libraries: Path) -> None:
        self.folder, self.runtime = folder, folder / "run"
        self.runtime.mkdir(0o700)
        self.where = str(self.runtime / "memguard")
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("MEMGUARD_", "CUDA_"))},
            "CHECKPOINT_STUB": str(folder),
            "NVML_STUB": str(folder / "scenario"),
            "ROOM_STUB_UUID": UUIDS[0].removeprefix("GPU-").replace("-", ""),
            "LD_LIBRARY_PATH": str(libraries),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(folder),  # nothing of this machine's is listed
            "PYTHONPATH": str(ROOT),
        }
        self.library = libraries / "libcuda.so.1"
        self.targets: list[subprocess.Popen[str]] = []
        self.sizes: dict[int, int] = {}
        self.wrong()

    def start(self, code: str = "", children: int = 0, loads: bool = True) -> Process:
        """A process that has 1 GiB. `code` runs in it, then it sleeps. It says the PIDs of its `children`.

        `loads`: it has libcuda mapped, and none of the driver's devices.
        """
        program = f"""
            import ctypes, subprocess, sys, time
            {loads} and ctypes.CDLL({str(self.library)!r})
            children = [subprocess.Popen(["sleep", "600"]) for _ in range({children})]
            {textwrap.indent(textwrap.dedent(code), "            ").strip()}
            print(*(child.pid for child in children), flush=True)
            time.sleep(600)
        """
        self.scenario()
        target = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            text=True,
            env=self.environ,
            start_new_session=True,
        )
        self.targets.append(target)
        assert target.stdout is not None
        pids = [target.pid, *map(int, target.stdout.readline().split())]
        for pid in pids:
            self.sizes[pid] = GIB
            (self.folder / f"{pid}.process").write_text(f"0 0 {GIB}\n")
        self.children = [process_of(pid) for pid in pids[1:]]
        self.scenario()
        found = process_of(target.pid)
        assert found is not None
        return found

    def scenario(self, used: int | None = None, **changes: object) -> None:
        """What NVML says: processes that are on the GPU, by the driver."""
        sizes = {pid: size for pid, size in self.sizes.items() if self.state(pid) != CHECKPOINTED}
        said = {
            **ONE,
            "total0": 16 * GIB,
            "reserved0": 0,
            "used0": sum(sizes.values()) if used is None else used,
            "processes0": ",".join(f"{pid}:{size}" for pid, size in sizes.items()),
            **changes,
        }
        (self.folder / "new").write_text("".join(f"{key}={value}\n" for key, value in said.items()))
        (self.folder / "new").rename(self.folder / "scenario")

    def wrong(self, *faults: str) -> None:
        (self.folder / "faults").write_text("".join(f"{fault}\n" for fault in faults))

    def state(self, pid: int) -> int:
        return int((self.folder / f"{pid}.process").read_text().split()[0])

    def becomes(self, pid: int, state: int, seconds: float = 10.0) -> bool:
        until = time.monotonic() + seconds
        while self.state(pid) != state and time.monotonic() < until:
            time.sleep(0.02)
        return self.state(pid) == state

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def call(self, *arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
        """A command. `before` runs in its process first."""
        program = f"import sys\n{textwrap.dedent(before)}\nfrom memguard.cli import main\nmain(sys.argv[1:])"
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environ,
        )

    def typed(self, answer: str, *arguments: object) -> tuple[str, int]:
        """A command on a terminal, where somebody types. What the terminal showed, and the exit code."""
        code = "from memguard.cli import main; main()"
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", code, *map(str, arguments)], self.environ)
        said, typed = b"", b""
        with os.fdopen(terminal, "r+b", buffering=0) as file, contextlib.suppress(OSError):  # as a terminal ends
            while True:
                # Python's `input` may miss a Ctrl-C that comes just before it waits: somebody would press it again.
                if not select.select([file], [], [], 10)[0] and typed == b"\3":
                    file.write(typed)
                    continue
                if not (got := file.read(4096)):
                    break
                said += got
                if answer and b"[y/N]:" in said:
                    typed, answer = answer.encode(), ""
                    file.write(typed)
        return said.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def json(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        done = self.call(*arguments, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def row(self, process: Process) -> dict[str, Any]:
        """What `memguard ps` says of it. Processes of other tests may be listed too, found through /proc."""
        (found,) = [row for row in self.json("ps")["processes"] if row["pid"] == process.pid]
        return cast("dict[str, Any]", found)

    def resume(self, process: Process) -> remote_suspend.Result:
        """As the command does it, in this process."""
        names = ("CHECKPOINT_STUB", "NVML_STUB", "ROOM_STUB_UUID", "LD_LIBRARY_PATH")
        with Client({name: self.environ[name] for name in names}) as client:
            return remote_suspend.resume(process, client, timeout=10.0)

    def record(self, process: Process) -> records.Record | None:
        return records.of(process, self.where)

    def end(self) -> None:
        (self.folder / "over").write_text("")
        for target in self.targets:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(target.pid, signal.SIGKILL)
            target.wait()
            assert target.stdout is not None
            target.stdout.close()


@pytest.fixture
def machine(tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path, libraries)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made.runtime))
    yield made
    made.end()


def test_off_unsafe_listed_and_back(machine: Machine) -> None:
    process = machine.start()
    pid = process.pid
    done = machine.call("suspend", pid)
    assert done.returncode == 1 and "by_others: true" in done.stderr and machine.state(pid) == RUNNING
    assert "the same command with --unsafe" in done.stderr and "docs/suspend.md" in done.stderr
    done = machine.call("suspend", pid, "--unsafe", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"process {pid} is suspended: 1.00 GiB" in done.stdout and "CUDA IPC" in done.stderr
    assert machine.state(pid) == CHECKPOINTED
    machine.scenario()
    record = machine.record(process)
    assert record is not None and (record.step, record.why, record.bytes) == ("suspended", "unsafe", {UUIDS[0]: GIB})
    row = machine.row(process)
    assert (row["pid"], row["state"], row["bytes"]) == (pid, "suspended", {UUIDS[0]: GIB})
    again = machine.call("suspend", pid, "--unsafe", "--yes")
    assert again.returncode == 0 and "already" in again.stdout
    back = machine.call("resume", pid)
    assert back.returncode == 0 and "is back on its GPUs with 1.00 GiB" in back.stdout, back.stderr
    assert machine.state(pid) == RUNNING and machine.record(process) is None
    assert "alloc" in machine.calls  # room was held for it
    assert "nothing was to be done" in machine.call("resume", pid).stdout


@pytest.mark.parametrize(
    ("answer", "options", "code", "state"),
    [("n\n", (), 1, RUNNING), ("\n", (), 1, RUNNING), ("\4", (), 130, RUNNING), ("\3", (), 130, RUNNING),
     ("y\n", (), 0, CHECKPOINTED), ("", ("--yes",), 0, CHECKPOINTED), ("", ("--json", "--yes"), 0, CHECKPOINTED),
     ("", ("--json",), 2, RUNNING)],
)  # fmt: skip
def test_on_a_terminal_unsafe_asks_first(
    machine: Machine, answer: str, options: tuple[str, ...], code: int, state: int
) -> None:
    """After the hazards, and before anything is touched. No answer, but Enter, is no."""
    process = machine.start()
    said, done = machine.typed(answer, "suspend", process.pid, "--unsafe", *options)
    assert (done, machine.state(process.pid)) == (code, state), said
    assert ("Suspend python" in said) is bool(answer)
    if answer:
        assert said.index("CUDA IPC") < said.index("Suspend python") and f"(PID {process.pid}" in said
    if code == 1:
        assert "nothing was changed" in said
    assert bool(machine.calls) is (state == CHECKPOINTED)


def test_top_shows_what_is_on_the_gpu_and_what_is_off_it(machine: Machine) -> None:
    process, other = machine.start(), machine.start()
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    machine.scenario()
    found = machine.json("top")
    (gpu,) = found["gpus"]
    assert (gpu["uuid"], gpu["used"]) == (UUIDS[0], machine.json("ps")["gpus"][0]["used"])
    assert gpu["others"] == gpu["used"] and found["targets"] == []
    seen = {one["pid"]: (one["state"], one["bytes"]) for one in found["processes"]}
    assert seen[process.pid] == ("suspended", {UUIDS[0]: GIB}) and seen[other.pid][0] == "running"
    lines = machine.call("top", "--once").stdout.splitlines()
    assert any("1.00  suspended for " in line and f"PID {process.pid} " in line for line in lines)
    assert machine.call("resume", process.pid).returncode == 0


KILL = """
    import os
    from memguard._node.suspend.store.work_lock import Work
    told = Work.__call__

    def call(self, step):
        told(self, step)
        if step == {step!r}:
            os.kill(os.getpid(), 9)

    Work.__call__ = call
    """


@pytest.mark.parametrize("step", ["lock", "settle", "checkpoint", "suspended"])
def test_a_suspend_that_is_killed_is_finished_by_resume(machine: Machine, step: str) -> None:
    process = machine.start()
    before = KILL.format(step=step)
    if step == "suspended":  # it is off already, and nobody has written that down
        before = KILL.format(step="state").replace("step ==", "self._now and step ==")
    assert machine.call("suspend", process.pid, "--unsafe", "--yes", before=before).returncode == -signal.SIGKILL
    record = machine.record(process)
    assert record is not None and record.step == step.replace("suspended", "checkpoint")
    assert record.bytes == {UUIDS[0]: GIB} and not record.measured
    assert machine.becomes(process.pid, CHECKPOINTED if step == "suspended" else RUNNING)  # by its helper
    if step == "suspended":
        machine.scenario()
        row = machine.row(process)
        assert (row["state"], row["step"], row["worker"]) == ("suspended", "checkpoint", None)
    done = machine.resume(process)
    assert (done.code, done.changed) == (0, step == "suspended"), done.text
    assert machine.state(process.pid) == RUNNING and machine.record(process) is None
    assert records.every(machine.where) == []


@pytest.mark.parametrize("how", ["damaged", "held", "of memguard 0.1.0"])
def test_a_process_comes_back_without_the_database(machine: Machine, how: str) -> None:
    process = machine.start()
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    record = machine.record(process)
    assert record is not None and record.measured
    database, (message,) = Path(machine.where, "leases.sqlite"), spare.read(machine.where)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        if how == "damaged":
            database.write_bytes(b"this is no database" * 2000)
        elif how == "held":
            other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
        else:
            for path in Path(machine.where).iterdir():
                path.unlink()
            old = Path(records.path_of(process, machine.where))
            old.write_text(json.dumps({key: value for key, value in message.items() if key != "written"}))
            old.chmod(0o600)
        row = machine.row(process)
        assert (row["state"], row["step"], row["bytes"]) == ("suspended", "suspended", {UUIDS[0]: GIB})
        back = machine.call("resume", process.pid)
        assert back.returncode == 0 and machine.state(process.pid) == RUNNING, back.stderr
        assert spare.read(machine.where) == [] and not os.path.exists(records.path_of(process, machine.where))


@pytest.mark.parametrize("step", ["room", "restore", "unlock"])
def test_a_resume_that_is_killed_is_finished_by_another(machine: Machine, step: str) -> None:
    process = machine.start()
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    assert machine.call("resume", process.pid, before=KILL.format(step=step)).returncode == -signal.SIGKILL
    record = machine.record(process)
    assert record is not None and (record.step, record.measured) == (step, True)
    done = machine.resume(process)
    assert done.code == 0, done.text
    assert machine.becomes(process.pid, RUNNING) and machine.record(process) is None


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore"])
def test_killed_within_the_drivers_call(machine: Machine, call: str) -> None:
    """The driver ends it by itself, whoever is killed."""
    process = machine.start()
    command = ["suspend", "--unsafe", "--yes"] if call != "restore" else ["resume"]
    if call == "restore":
        assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    machine.wrong(f"{call} slow 700")
    step = KILL.format(step=call).replace("os.kill(os.getpid(), 9)", KILL_SOON)
    assert machine.call(*command, process.pid, before=step).returncode == -signal.SIGKILL
    done = machine.resume(process)
    assert done.code == 0, done.text
    assert machine.becomes(process.pid, RUNNING) and machine.record(process) is None


KILL_SOON = "__import__('threading').Timer(0.3, os.kill, (os.getpid(), 9)).start()"


def test_it_allows_it_and_suspends_itself(machine: Machine) -> None:
    """With its own word for how it went; --unsafe does not go behind its back."""
    says = """
        from memguard._node.suspend.triggers import listener
        from memguard._node.identity import this_process
        from memguard._node.suspend.types import Suspension
        from memguard.errors import CannotSuspend
        asked = []

        def suspend():
            asked.append(None)
            if len(asked) < 3:
                raise CannotSuspend([("capture", "a CUDA graph is being captured", "wait for it")])
            return Suspension(this_process(), {"GPU-a": 3 << 30}, None, time.time(), 0.5, "by_others")

        listener.start(suspend, "b.yaml")
    """
    process = machine.start(says)
    row = machine.row(process)
    assert (row["budget"], row["by_others"], row["state"]) == ("b.yaml", True, "running")
    for options in ((), ("--unsafe", "--yes")):
        done = machine.call("suspend", process.pid, *options)
        assert done.returncode == 1 and "refuses" in done.stderr and "a CUDA graph is being captured" in done.stderr
    found = machine.json("suspend", process.pid)
    assert found["processes"][0]["bytes"] == {"GPU-a": 3 * GIB} and found["processes"][0]["done"] is True
    assert machine.calls == []


def test_a_budget_that_allows_it(machine: Machine) -> None:
    """The whole of it: the process takes itself off its GPU, and sees that it was brought back."""
    says = """
        import memguard, threading, types
        # This is about who asks whom: what waits at the gates has tests of its own.
        open_gate = types.SimpleNamespace(closed=True, unheld=(), open=lambda: None)
        sys.modules["memguard._node.suspend.gates.gate"] = types.SimpleNamespace(close=lambda owner, undo: open_gate)
        budget = {"version": 1, "frameworks": {"pycuda": {"share": "50%"}}, "suspend": {"by_others": True}}
        memguard.init(budget)

        def tell():
            while memguard.ledger().devices[0].suspended is None:
                time.sleep(0.02)
            print("off", flush=True)
            while memguard.ledger().devices[0].suspended is not None:
                time.sleep(0.02)
            memguard.shutdown()
            print("back", flush=True)

        threading.Thread(target=tell).start()
    """
    process = machine.start(says, loads=False)
    row = machine.row(process)
    assert (row["budget"], row["by_others"], row["state"]) == ("budget", True, "running")
    done = machine.call("suspend", process.pid)
    assert done.returncode == 0, done.stderr
    out = machine.targets[0].stdout
    assert out is not None and out.readline() == "off\n" and machine.state(process.pid) == CHECKPOINTED
    machine.scenario()
    row = machine.row(process)
    assert (row["state"], row["why"], row["bytes"]) == ("suspended", "by_others", {UUIDS[0]: GIB})
    assert "already" in machine.call("suspend", process.pid).stdout
    back = machine.call("resume", process.pid)
    assert back.returncode == 0 and machine.state(process.pid) == RUNNING, back.stderr
    machine.scenario()
    assert out.readline() == "back\n"
    assert [name for name in os.listdir(machine.where) if not name.startswith(("leases.", "suspended.spare"))] == []
    assert records.budgets(machine.where) == []


@pytest.mark.parametrize("within", [False, True])
def test_a_program_that_stands_still(machine: Machine, within: bool) -> None:
    """A thread waits with Python's lock, as in a call of the driver. The command brings the process back all the same.

    Within its own `resume` nobody else can: it says so, and that the program may have to be ended.
    """
    says = f"""
        import memguard, os, threading, types
        # This is about who asks whom: what waits at the gates has tests of its own.
        open_gate = types.SimpleNamespace(closed=True, unheld=(), open=lambda: None)
        sys.modules["memguard._node.suspend.gates.gate"] = types.SimpleNamespace(close=lambda owner, undo: open_gate)
        budget = {{"version": 1, "frameworks": {{"pycuda": {{"share": "50%"}}}}, "suspend": {{"by_others": True}}}}
        memguard.init(budget)
        away = lambda: memguard.ledger().devices[0].suspended is not None
        resumes = lambda: os.path.exists({str(machine.folder / "resumes")!r})

        def tell():
            while not away():
                time.sleep(0.02)
            print("off", flush=True)
            while not resumes():
                time.sleep(0.02)
            if {within}:
                threading.Thread(target=memguard.resume, daemon=True).start()
                time.sleep(0.5)
            print("still", flush=True)
            ctypes.PyDLL(None).system(b"while ! [ -e {machine.folder / "goes"} ]; do sleep 0.05; done")
            while away():
                time.sleep(0.02)
            memguard.shutdown()
            print("back", flush=True)

        threading.Thread(target=tell).start()
    """
    process = machine.start(says, loads=False)
    assert machine.call("suspend", process.pid).returncode == 0
    out = machine.targets[0].stdout
    assert out is not None and out.readline() == "off\n"
    machine.scenario(used=16 * GIB)  # no room
    (machine.folder / "resumes").write_text("")
    assert out.readline() == "still\n"
    machine.scenario()
    done = machine.call("resume", process.pid, "--wait", "5s")
    if within:
        assert done.returncode == 1 and machine.state(process.pid) == CHECKPOINTED
        assert f"if it stands still (`py-spy dump --pid {process.pid}`), only ending the process is left" in done.stderr
    else:
        assert done.returncode == 0 and machine.state(process.pid) == RUNNING, done.stderr
    (machine.folder / "goes").write_text("")
    machine.becomes(process.pid, RUNNING)
    machine.scenario()
    assert out.readline() == "back\n" and machine.state(process.pid) == RUNNING


def test_one_that_was_started_elsewhere(machine: Machine) -> None:
    """Its folder is another: that of a job, of cron, of a session."""
    process = machine.start(
        "from memguard._node.suspend.triggers import listener\nlistener.start(lambda: 1 / 0, 'b.yaml')"
    )
    here = machine.environ["XDG_RUNTIME_DIR"]
    (machine.folder / "other").mkdir(0o700)
    machine.environ["XDG_RUNTIME_DIR"] = str(machine.folder / "other")
    row = machine.row(process)
    assert (row["budget"], row["by_others"]) == ("b.yaml", True)
    done = machine.call("suspend", process.pid)
    assert done.returncode == 1 and "division by zero" in done.stderr
    records.remove_budget(process, machine.where)
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    machine.environ["XDG_RUNTIME_DIR"] = here
    machine.where = str(machine.folder / "other" / "memguard")
    record = machine.record(process)
    assert record is not None and record.step == "suspended"


def test_a_tree_goes_together(machine: Machine) -> None:
    process = machine.start(children=2)
    children = [one for one in machine.children if one is not None]
    done = machine.json("suspend", process.pid, "--unsafe", "--yes", "--tree")
    assert {one["pid"] for one in done["processes"]} == {process.pid, *(one.pid for one in children)}
    assert done["processes"][-1]["pid"] == process.pid  # children first
    assert all(machine.state(one.pid) == CHECKPOINTED for one in (process, *children))
    machine.scenario()
    back = machine.json("resume", process.pid, "--tree")
    assert len(back["processes"]) == 3 and all(one["done"] for one in back["processes"])
    assert all(machine.state(one.pid) == RUNNING for one in (process, *children))


def test_a_tree_of_which_one_refuses_comes_back(machine: Machine) -> None:
    process = machine.start(children=2)
    children = [one for one in machine.children if one is not None]
    machine.wrong("lock slow 0", "lock code 600")  # the second one
    done = machine.json("suspend", process.pid, "--unsafe", "--yes", "--tree", code=1)
    codes = {one["pid"]: one["done"] for one in done["processes"]}
    assert codes == dict.fromkeys((process.pid, *(one.pid for one in children)), False)
    texts = " ".join(one["text"] for one in done["processes"])
    assert "brought back" in texts and "did not end" in texts and "nothing was changed" in texts
    assert all(machine.state(one.pid) == RUNNING for one in (process, *children))
    assert machine.calls.count("restore") == 1 and all(machine.record(one) is None for one in (process, *children))


def test_no_room_says_who_holds_it_and_leaves_it_whole(machine: Machine) -> None:
    process = machine.start()
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    other = machine.start()
    machine.sizes[other.pid] = 16 * GIB - 1
    machine.scenario()
    done = machine.call("resume", process.pid, "--wait", "0s")
    assert done.returncode == 1
    lines = done.stderr[done.stderr.index(f"process {process.pid}: it stays suspended and whole: {UUIDS[0]} has") :]
    said, fix, held, holder, *_ = lines.splitlines()
    assert f"`memguard resume {process.pid} --wait" in fix and held.endswith("is held by")
    assert f"(PID {other.pid}" in holder and "(PID" not in said
    assert "restore" not in machine.calls and machine.state(process.pid) == CHECKPOINTED
    record = machine.record(process)
    assert record is not None and record.step == "suspended"


def test_ctrl_c_while_it_waits_leaves_it_suspended(machine: Machine) -> None:
    process = machine.start()
    assert machine.call("suspend", process.pid, "--unsafe", "--yes").returncode == 0
    machine.scenario(used=16 * GIB)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "memguard", "resume", str(process.pid)],
        stderr=subprocess.PIPE,
        text=True,
        env=machine.environ,
    )
    assert waiting.stderr is not None
    assert "waits for room" in waiting.stderr.readline()
    busy = machine.call("resume", process.pid)
    assert busy.returncode == 1 and f"process {waiting.pid} is suspending or resuming it" in busy.stderr
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(20) == 130
    said = waiting.stderr.read()
    waiting.stderr.close()
    assert "stays suspended" in said and machine.state(process.pid) == CHECKPOINTED
    machine.scenario()
    assert machine.call("resume", process.pid).returncode == 0


@pytest.mark.parametrize("options", [(), ("--unsafe",), ("--unsafe", "--yes"), ("--tree",), ("--json",)])
def test_without_a_gpu_nothing_is_advised_or_asked(machine: Machine, options: tuple[str, ...]) -> None:
    process = machine.start()
    machine.scenario(count=0)
    done = machine.call("suspend", process.pid, *options)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert done.stderr.startswith("memguard: NVML sees no GPU\n    fix: ") and "--unsafe" not in done.stderr
    assert machine.state(process.pid) == RUNNING and machine.calls == []


def test_an_nvml_that_fails_is_no_missing_gpu(machine: Machine) -> None:
    """CUDA may work without it: what follows says what it found."""
    process = machine.start()
    machine.scenario(init=999)
    done = machine.call("suspend", process.pid)
    assert done.returncode == 1 and "by_others: true" in done.stderr


def test_what_cannot_be(machine: Machine) -> None:
    process = machine.start()
    gone = machine.call("suspend", 2**22 + 5)
    assert gone.returncode == 2 and "there is no process" in gone.stderr
    other = machine.call("resume", process.pid, before="import os; os.geteuid = lambda: 12345")
    assert other.returncode == 1 and "only its own user can" in other.stderr
    process_file = machine.folder / f"{process.pid}.process"
    process_file.unlink()  # the driver knows of no CUDA in it: as another's
    done = machine.call("suspend", process.pid, "--unsafe", "--yes")
    assert done.returncode == 1 and "nothing was changed" in done.stderr and machine.record(process) is None
    os.kill(process.pid, signal.SIGSTOP)
    process_file.write_text(f"0 0 {GIB}\n")
    done = machine.call("suspend", process.pid, "--unsafe", "--yes")
    assert done.returncode == 1 and "is stopped (state T)" in done.stderr and machine.calls == []
