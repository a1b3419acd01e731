"""Processes that measurements start: in a group of their own, with a time limit, killed with all their children."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COVERS = Path(__file__).resolve().parent / "covers"
"""A `sitecustomize` that records which modules of memguard and bench a process imports."""
TOKEN = "BENCH_RUN"  # In the environment of every process of a run; finds those that left their group.
_MARK = "BENCH-RESULT "


class Failed(Exception):
    """A measurement has no figure. Says why, with the end of the process's stderr if a process failed."""


def package() -> Path:
    """The folder `memguard/`: of this tree, or the installed one where the tree is tested against a wheel."""
    here = ROOT / "memguard"
    spec = None if here.is_dir() else importlib.util.find_spec("memguard")
    return here if spec is None or spec.origin is None else Path(spec.origin).parent


def emit(result: Mapping[str, Any]) -> None:
    """In a child: give a result to the process that started it."""
    print(f"\n{_MARK}{json.dumps(dict(result))}", flush=True)


def main(programs: Mapping[str, Callable[..., Mapping[str, Any] | None]]) -> None:
    """In a child: run the program that argv names with the words after it, and emit what it returns, if anything."""
    result = programs[sys.argv[1]](*sys.argv[2:])
    if result is not None:
        emit(result)


def environment(more: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment of a child: the checkout first on PYTHONPATH, tracebacks at a crash, TensorFlow's messages."""
    found = {**os.environ, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    for name, value in (more or {}).items():
        found.pop(name, None)
        if value is not None:
            found[name] = value
    ours = [str(COVERS), str(ROOT)] if "BENCH_COVERS" in found else [str(ROOT)]
    others = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path and path not in ours]
    return {**found, "PYTHONPATH": os.pathsep.join([*ours, *others])}


class Child:
    """A Python process in a session of its own. `ask` and `read` exchange lines with it; `end` waits for its end.
    Raises Failed where the process fails or takes longer than its time limit."""

    def __init__(
        self, words: Sequence[str], *, name: str = "", env: Mapping[str, str | None] | None = None,
        timeout: float = 120, sampled: float = 0,
    ) -> None:  # fmt: skip
        self.name = name or " ".join(words)
        self.timeout = timeout
        self.last: dict[str, Any] | None = None  # What it emitted last, of what was read.
        self._until = time.monotonic() + timeout
        self._sampler = Sampler(sampled) if sampled else None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            errors="replace", env=environment(env), start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid
        if self._sampler is not None:
            self._sampler.start(self.pid)
        self._results: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._timer = threading.Timer(timeout, self.kill)
        self._timer.daemon = True
        self._timer.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self.process.stdout:
                if line.startswith(_MARK):
                    self._results.put(json.loads(line[len(_MARK) :]))
        self._results.put(None)

    def read(self, timeout: float | None = None) -> dict[str, Any]:
        """The next result it emits. `timeout`: seconds to wait, else until its time limit."""
        left = self._until - time.monotonic() + 5 if timeout is None else timeout
        try:
            found = self._results.get(timeout=max(left, 0.01))
        except queue.Empty:
            self.kill()
            raise self._failed(f"no answer within {left:.0f} s") from None
        if found is None:
            self._results.put(None)
            raise self._failed(self._ended("before it answered"))
        self.last = found
        return found

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._failed(self._ended("before it was asked")) from None

    def ask(self, line: str, timeout: float | None = None) -> dict[str, Any]:
        """Write a line to its stdin; the next result it emits."""
        self.tell(line)
        return self.read(timeout)

    def end(self) -> dict[str, Any]:
        """Close its stdin and wait for its end; what it emitted last, and `nvml` if it was sampled."""
        code = self.close()
        with contextlib.suppress(queue.Empty):  # a process that left the group may still hold the pipe
            while (found := self._results.get_nowait()) is not None:
                self.last = found
        if code or self.last is None:
            raise self._failed(self._ended("and emitted nothing"))
        if self._sampler is not None:
            self.last = {**self.last, "nvml": self._sampler.stop()}
        return self.last

    def close(self) -> int:
        """Close its stdin, wait for its end within its time limit, and kill what it left. Its exit code."""
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        code = self.process.wait()  # the timer ends this
        self._timer.cancel()
        kill_group(self.pid)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """Kill the process with its group."""
        self._timer.cancel()
        kill_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self._sampler is not None:
            self._sampler.stop()

    def _ended(self, when: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.returncode == -signal.SIGKILL and time.monotonic() >= self._until:
            return f"killed: it took longer than {self.timeout:.0f} s"
        return f"ended with {self.process.returncode} {when}"

    def _failed(self, what: str) -> Failed:
        return Failed(f"{self.name}: {what}: {self.stderr()}")

    def stderr(self, characters: int = 1500) -> str:
        """The end of its stderr."""
        self._stderr.seek(0)
        return self._stderr.read()[-characters:].strip()


class Sampler:
    """NVML's figure for one PID at a fixed rate, by a process of its own: no other GIL can slow it.

    interval   seconds between two samples
    """

    def __init__(self, interval: float = 0.05) -> None:
        self.interval = interval
        self._found: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.sampler", str(interval)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it samples from the process's first moment on

    def start(self, pid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: `stop` says that it saw nothing
            self._process.stdin.write(f"{pid}\n")
            self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """What it saw: `max_bytes`, `samples`, `longest_gap_ms`, `seconds`, `failed`."""
        if self._found is None:
            from bench.sampler import summary

            try:
                self._found = json.loads(self._process.communicate(timeout=10)[0])
            except (ValueError, subprocess.TimeoutExpired):
                kill_group(self._process.pid)
                self._found = summary([], self.interval)
        return dict(self._found or {})


def kill_group(pid: int) -> None:
    """Kill a session's process group, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_run(token: str) -> None:
    """Kill every other process that has the run's token in its environment, whatever its group."""
    wanted = f"{TOKEN}={token}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
