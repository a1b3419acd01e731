"""A hard time limit for each test, which ends the test and the processes that it started.

A separate watchdog process measures the time, so that the test cannot block it by a lock, the GIL, a replaced clock or
a swallowed exception. At the limit the watchdog kills the processes that the test started: its descendants, and orphans
with its marker in their environment. Most hanging tests wait for such a process; they then fail, and the run continues.
If the test is still running `GRACE` seconds later, the watchdog aborts its pytest process. faulthandler writes the
stacks of all threads; pytest-xdist reports the test as failed and starts a new worker for the remaining tests.

pytest-timeout 2.4 is not sufficient (tried with a test that sleeps in C and has a sleeping child): neither of its
methods ends the child, `signal` cannot end a test that catches all exceptions, `thread` cannot end one that holds the
GIL.
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
from time import monotonic  # imported by name: tests replace `time.monotonic`

GRACE = 10.0
SECONDS = {"gpu": 360.0, "native": 360.0, "engines": 600.0}
"""Limits by folder of tests/, longer than the timeouts that tests set for their subprocesses.
`@pytest.mark.time_limit(seconds)` overrides them."""
OTHERWISE = 150.0


def limit(path: Path, mark: object, times: float = 1.0) -> float:
    """The limit in seconds for a test of this file; `mark` is its `time_limit` marker, or None."""
    if mark is not None:
        (seconds,) = mark.args  # type: ignore[attr-defined]
        return float(seconds)
    room = path.relative_to(Path(__file__).parent).parts[0] if path.is_relative_to(Path(__file__).parent) else ""
    return SECONDS.get(room, OTHERWISE) * times


class Keeper:
    """Starts and controls the watchdog process for the tests of this process."""

    def __init__(self) -> None:
        self.ends = 0.0
        self._errors = os.dup(2)  # before pytest captures output
        self._tell: int | None = None
        self._owner = os.getpid()

    @contextlib.contextmanager
    def keeping(self, test: str, seconds: float) -> Iterator[None]:
        """End the block after this many seconds."""
        if self._tell is None:
            self._tell = self._start()
        self.ends = monotonic() + seconds
        os.write(self._tell, f"{seconds} {test!r}\n".encode())
        try:
            yield
        finally:
            if os.getpid() == self._owner:  # not in a forked child that failed to exit
                os.write(self._tell, b"\n")

    def _start(self) -> int:
        name = f"PYTEST_TIME_KEPT_{os.getpid()}"
        reads, tell = os.pipe()
        # Orphaned at once, so that a test that waits for any child does not receive it.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), name]
        subprocess.run(command, stdin=reads, stdout=subprocess.DEVNULL, stderr=self._errors, check=True)
        os.close(reads)
        os.environ[name] = "1"
        return tell


def _processes() -> Iterator[tuple[int, int]]:
    """The PID and parent PID of each process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The program's name, in parentheses, may contain spaces and parentheses.
                yield int(entry), int(Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[1])


def _started_by(pid: int, mark: str) -> list[int]:
    """Descendants of the process, and processes started with the marker in their environment."""
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
    """The watchdog's loop. Each line of stdin starts a test with its limit in seconds; an empty line ends it."""
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
