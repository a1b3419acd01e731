"""Suspended processes, controlled by their parent: requests with a time limit, and a safe way to end them.

The parent itself does not use CUDA. It reads NVML, which a suspended process cannot."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.programs import six

TESTS = Path(__file__).resolve().parents[1]
ORDERLY = 20.0  # Seconds within which a process must exit by itself.
harsh: list[str] = []  # Processes that had to be killed although they were restored and could not be suspended again.


_runtime: contextvars.ContextVar[str | None] = contextvars.ContextVar("runtime", default=None)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Give the processes started within the block their own queue of turns. Otherwise one that hangs during its turn
    would block every other scenario until the time limit."""
    with tempfile.TemporaryDirectory(prefix="memguard-", ignore_cleanup_errors=True) as folder:
        token = _runtime.set(folder)
        try:
            yield
        finally:
            _runtime.reset(token)


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a process: PYTHONPATH begins with this tree and tests/."""
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(TESTS.parent), str(TESTS), *([before] if before else [])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
    folder = _runtime.get()
    return found if folder is None else {**found, "XDG_RUNTIME_DIR": folder}


class Broke(Exception):
    """A child died, or did not answer in time."""


class Child:
    """A process running a program of tests/support, which answers each input line with an output line."""

    def __init__(self, script: str, *words: str, env: dict[str, str] | None = None) -> None:
        ours = {
            "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }  # fmt: skip
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads would fill up)
        self.words = words
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"support.{script}", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env=surroundings(**{**ours, **(env or {})}),
        )  # fmt: skip
        self.touched = False  # Whether suspending it has started.
        self.lost = False
        """Whether restoring it has failed: then it can neither be suspended again nor exit by itself."""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        end(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                if line.startswith("ANSWER "):  # libraries also print to stdout
                    self._lines.put(line[7:])
        self._lines.put(None)

    def close(self) -> None:
        """Clean up after the process has ended."""
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def send(self, do: str, /, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.touched |= do in ("off", "round", "broken", "calls")
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self.process.stdin.flush()

    def answer(self, limit: float, what: str = "its answer") -> dict[str, Any]:
        """Raises Broke if it dies, or does not answer within `limit` seconds."""
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise Broke(f"{' '.join(self.words)}: {what} did not come in {limit:.0f} s; {self.stderr()}") from None
        if line is None:
            code = self.process.wait(10)
            self._lines.put(None)
            raise Broke(f"{' '.join(self.words)}: it died at {what}, rc {code}; {self.stderr()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, limit: float = 60.0, /, **fields: Any) -> dict[str, Any]:
        """Its answer, which may contain an `error`."""
        self.send(do, **fields)
        return self.answer(limit, do)

    def must(self, do: str, limit: float = 60.0, /, **fields: Any) -> dict[str, Any]:
        """Its answer. Raises Broke if it is an error."""
        found = self.ask(do, limit, **fields)
        if found.get("error"):
            raise Broke(f"{' '.join(self.words)}: {do}: {found['error']['exception']}: {found['error']['text']}")
        return found

    def stderr(self, last: int = 1500) -> str:
        self.errors.flush()
        with open(f"/proc/self/fd/{self.errors.fileno()}", errors="replace") as file:
            return file.read()[-last:]

    def crashed_in(self) -> str:
        """The call of `suspend_target.py` that crashed, from faulthandler's output; empty if there is none."""
        lines = self.stderr(20000).partition("Current thread")[2].splitlines()
        return next((line.rpartition(" in ")[2].strip() for line in lines if " in call: " in line), "")


_door: Any = None
_opening = threading.Lock()


def door() -> Any:
    """The parent's own helper process."""
    global _door
    with _opening:
        if _door is None:
            from memguard._node.suspend.driver.client import Client

            _door = Client()
        return _door


def end(child: Child) -> None:
    """End a process. Suspend a restored one first: killing it directly may hang the machine."""
    process = child.process
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGCONT)
        off = not child.touched or child.lost or away_again(process.pid)
        if not (child.touched and off):
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ORDERLY)
        if process.poll() is None:
            if not off:
                harsh.append(f"{process.pid}: {' '.join(child.words)}")
            process.kill()
    process.wait(60)
    child.close()


def away_again(pid: int) -> bool:
    """Whether it is suspended or uses no GPU, so that killing it is safe."""
    from memguard._devices.checkpoint import State
    from memguard._node.identity import process_of
    from memguard._node.suspend.course import flow
    from memguard._node.suspend.course.steps import End

    process = process_of(pid)
    if process is None:
        return True
    state = door().state(process, 30.0)
    if state.state is State.LOCKED:
        door().unlock(process, 60.0)
    if state.state is State.CHECKPOINTED or state.code == 3:
        return True
    done = flow.take_off(process, client=door(), lock_timeout=5.0)
    return done.end in (End.SUSPENDED, End.ENDED, End.LOST)


class Card(six.Card):
    """The first GPU."""

    def of(self, pid: int) -> int | None:
        """A process's bytes by NVML; None if NVML does not list it."""
        return self.listed().get(pid)


def host_bytes(pid: int) -> int:
    """Its anonymous host memory, resident or swapped."""
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def command(*words: str, limit: float = 60.0) -> dict[str, Any]:
    """Run `memguard WORDS` in a new process: its exit code, seconds and output."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "memguard", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings(),
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()  # it has no GPU memory of its own; its helper completes the unfinished step
        out, err = child.communicate()
        err += f"\n(killed after {limit:.0f} s)"
    return {"rc": child.returncode, "seconds": round(time.monotonic() - started, 2), "out": out, "err": err[-1500:]}


def resume(pid: int) -> dict[str, Any]:
    """Run `memguard resume PID`, which waits for room, up to a time limit."""
    return command("resume", str(pid), "--wait", "45s", limit=100)


@contextlib.contextmanager
def target(*words: str, env: dict[str, str] | None = None, **begin: Any) -> Iterator[Child]:
    """A process with arrays of these frameworks. It is ended safely, even if the block raises."""
    with Child("suspend_target", *words, env=env) as child:
        child.must("begin", 180, names=list(words), **begin)
        yield child


@contextlib.contextmanager
def other(what: str, **begin: Any) -> Iterator[Child]:
    """A process that allocates from the driver directly, and is never suspended (`suspend_others.py`)."""
    with Child("suspend_others", what) as child:
        child.must("begin", 60, **begin)
        yield child
