"""A hard time limit for each test: a test over it ends, and so do the processes that it started.

A separate process keeps the time, so that nothing in the test can hold it up: no lock, no GIL, no replaced clock, no
swallowed exception. At the limit it kills the processes that the test started: its descendants, and those with its mark
in the environment, whose parent may be gone. Most tests that hang wait for one of them, fail then, and the run goes on.
A test that still runs `GRACE` seconds later is aborted with its pytest process. faulthandler writes the stacks of all
threads; under pytest-xdist the test counts as failed, and a new worker takes the rest.

pytest-timeout 2.4 does less, tried with a test that sleeps in C and has a child that sleeps: neither of its methods
ends the child, `signal` no test that catches all exceptions, `thread` no test that holds the GIL.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic  # not by way of the module: tests replace `time.monotonic`

GRACE = 10.0
SECONDS = {"gpu": 360.0, "native": 360.0, "engines": 600.0}
"""By the folder in tests/: more than tests give the programs that they run. `@pytest.mark.time_limit(seconds)`
overrides it."""
OTHERWISE = 150.0


def limit(path: Path, mark: object, times: float = 1.0) -> float:
    """Seconds that a test of this file has; `mark` is its `time_limit`, or None."""
    if mark is not None:
        (seconds,) = mark.args  # type: ignore[attr-defined]
        return float(seconds)
    room = path.relative_to(Path(__file__).parent).parts[0] if path.is_relative_to(Path(__file__).parent) else ""
    return SECONDS.get(room, OTHERWISE) * times


class Keeper:
    """This side of the process that keeps the time for the tests of this process."""

    def __init__(self) -> None:
        self.ends = 0.0
        self._errors = os.dup(2)  # before pytest catches what tests write
        self._tell: int | None = None
        self._owner = os.getpid()

    @contextlib.contextmanager
    def keeping(self, test: str, seconds: float) -> Iterator[None]:
        """Whatever runs within is ended after so many seconds."""
        if self._tell is None:
            self._tell = self._start()
        self.ends = monotonic() + seconds
        os.write(self._tell, f"{seconds} {test!r}\n".encode())
        try:
            yield
        finally:
            if os.getpid() == self._owner:  # else a fork that has not ended as it should
                os.write(self._tell, b"\n")

    def _start(self) -> int:
        name = f"PYTEST_TIME_KEPT_{os.getpid()}"
        reads, tell = os.pipe()
        # Orphaned at once: a test that waits for any child must not find it.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), name]
        subprocess.run(command, stdin=reads, stdout=subprocess.DEVNULL, stderr=self._errors, check=True)
        os.close(reads)
        os.environ[name] = "1"
        return tell


def _processes() -> Iterator[tuple[int, int]]:
    """Each process and its parent."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may hold blanks and parentheses.
                yield int(entry), int(Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[1])


def _started_by(pid: int, mark: str) -> list[int]:
    """What descends from the process, and what has the mark in the environment that it was started with."""
    parents = dict(_processes())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    for other in parents:
        with contextlib.suppress(OSError):
            if f"\0{mark}=".encode() in b"\0" + Path("/proc", str(other), "environ").read_bytes():
                found.add(other)
    return sorted(found - {pid, os.getpid()})


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _abort(pid: int, tested: int) -> None:
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        os.kill(pid, signal.SIGABRT)
        if not select.select([tested], [], [], 5.0)[0]:
            os.kill(pid, signal.SIGKILL)


def keep(pid: int, mark: str) -> None:
    """Read from standard input which test has begun and how many seconds it has, or that it is over."""
    tested = os.pidfd_open(pid)
    test, ends, warned, rest = "", None, False, b""
    while True:
        ready = select.select([0, tested], [], [], None if ends is None else max(0.0, ends - monotonic()))[0]
        if 0 in ready:
            if not (read := os.read(0, 65536)):
                break
            *lines, rest = (rest + read).split(b"\n")
            if lines:
                seconds, _, test = lines[-1].decode(errors="replace").partition(" ")
                ends, warned = (monotonic() + float(seconds) if seconds else None), False
        elif tested in ready:
            break
        elif not ready and ends is not None:
            processes = _started_by(pid, mark)
            print(
                f"\n{test}: over its limit of {seconds} s; "
                + ("aborted" if warned else f"the {len(processes)} processes that it started are killed"),
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if warned:
                _abort(pid, tested)
            _kill(processes)
            ends, warned = monotonic() + GRACE, True
    _kill(set(_started_by(pid, mark)) if tested in ready else ())


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(_number, signal.SIG_IGN)
    keep(int(sys.argv[1]), sys.argv[2])
