"""`memguard ps`, `suspend` and `resume`, over stubs of the driver and NVML: also after whoever did it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import GIB, ONE, UUIDS

from memguard._suspend import records
from memguard._suspend.identity import process_of
from memguard._suspend.types import Process

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
            "PYTHONPATH": str(ROOT),
        }
        self.library = libraries / "libcuda.so.1"
        self.targets: list[subprocess.Popen[str]] = []
        self.sizes: dict[int, int] = {}
        self.wrong()

    def start(self, code: str = "", children: int = 0) -> Process:
        """A process that has 1 GiB. `code` runs in it, then it sleeps. It says the PIDs of its `children`."""
        program = f"""
            import ctypes, subprocess, sys, time
            ctypes.CDLL({str(self.library)!r})
            children = [subprocess.Popen(["sleep", "600"]) for _ in range({children})]
            {textwrap.indent(textwrap.dedent(code), "            ").strip()}
            print(*(child.pid for child in children), flush=True)
            time.sleep(600)
        """
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

    def json(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        done = self.call(*arguments, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

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
def machine(tmp_path: Path, libraries: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, libraries)
    yield made
    made.end()


def test_off_unsafe_listed_and_back(machine: Machine) -> None:
    process = machine.start()
    pid = process.pid
    done = machine.call("suspend", pid)
    assert done.returncode == 1 and "by_others: true" in done.stderr and machine.state(pid) == RUNNING
    done = machine.call("suspend", pid, "--unsafe")
    assert done.returncode == 0, done.stderr
    assert f"process {pid} is suspended: 1.00 GiB" in done.stdout and "CUDA IPC" in done.stderr
    assert machine.state(pid) == CHECKPOINTED
    machine.scenario()
    record = machine.record(process)
    assert record is not None and (record.step, record.why, record.bytes) == ("suspended", "unsafe", {UUIDS[0]: GIB})
    listed = machine.json("ps")
    (row,) = listed["processes"]
    assert (row["pid"], row["state"], row["bytes"]) == (pid, "suspended", {UUIDS[0]: GIB})
    again = machine.call("suspend", pid, "--unsafe")
    assert again.returncode == 0 and "already" in again.stdout
    back = machine.call("resume", pid)
    assert back.returncode == 0 and "is back on its GPUs with 1.00 GiB" in back.stdout, back.stderr
    assert machine.state(pid) == RUNNING and machine.record(process) is None
    assert "alloc" in machine.calls  # room was held for it
    assert "nothing was to be done" in machine.call("resume", pid).stdout
