"""`memguard top` in a real terminal (tmux): keys, resizing, a process that is killed, and what the screen costs.

Needs tmux: `apt-get install tmux`. The cost is printed (`pytest -s`, or the report of a failure), and not judged here:
`bench` does that.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memguard

HOME = Path(memguard.__file__).parents[1]
TMUX = shutil.which("tmux")
WRITER = """
    import random, sys, time
    from memguard import _budget; from memguard._budget import policy
    from memguard._devices.simulated import SimulatedHost
    from memguard._timeline import Writer
    from memguard._base.types import DeviceSample, Event, FrameworkSample, Pressure, Sample

    names = _budget.FRAMEWORKS
    budget = {"version": 1, "device": {"limit": "40GiB", "reserve": "2GiB"},
              "frameworks": {name: {"share": "16%"} for name in names}}
    plan = policy.plan(_budget.from_mapping(budget), SimulatedHost(["h200"]).devices())
    part, rng = plan.devices[0], random.Random(1)
    with Writer(sys.argv[1], plan) as writer:
        for number in range(10_000):
            held = {name: rng.randrange(1 << 30, cap) for name, cap in part.caps.items()}
            rows = {n: FrameworkSample(size, size // 2, size // 4, part.caps[n]) for n, size in held.items()}
            used = sum(held.values()) + (1 << 30)
            free = part.device.usable - used
            row = DeviceSample(part.device.uuid, part.device.total, used, free, used, part.limit, 1 << 30, 0, rows)
            writer.sample(Sample(time.time(), (row,)))
            if number % 10 == 0:
                writer.event(Event(time.time(), "pressure", f"pressure warn number {number}", Pressure.WARN,
                                   part.device.uuid, "torch"))
            time.sleep(0.5)
"""
ATTACHED = """
    import time, memguard
    memguard.init({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}, "monitor": {"top": True}}, simulate="h200")
    while True:
        memguard.checkpoint()
        time.sleep(0.1)
"""


class Terminal:
    """A window of a tmux server of its own."""

    def __init__(
        self, folder: Path, environ: dict[str, str], *arguments: str, width: int = 80, height: int = 24
    ) -> None:
        assert TMUX is not None, "tmux is needed: apt-get install tmux"
        self._call = [TMUX, "-S", str(folder / "tmux"), "-f", os.devnull]
        self._environ = environ
        command = [sys.executable, "-m", "memguard", "top", *arguments]
        # tmux 3.3 does not always hear of the end of what it started: the shell writes the exit code down, and stays.
        self._code = folder / "code"
        script = '"$@"; echo $? >"$0"; exec sleep 1000'
        self.tmux("new-session", "-d", "-x", "80", "-y", "24", "sh", "-c", script, str(self._code), *command)
        shell = self.tmux("display-message", "-p", "#{pane_pid}").strip()
        children, end = "", time.monotonic() + 20
        while not children and time.monotonic() < end:
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text()
        self.pid = int(children)

    def tmux(self, *words: str) -> str:
        done = subprocess.run([*self._call, *words], env=self._environ, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def until(self, true: Callable[[str], bool], seconds: float = 30.0) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = self.text()
            if true(text):
                return text
            time.sleep(0.2)
        raise AssertionError(self.text())

    def ends(self) -> None:
        """It has ended, or does so now, with exit code 0."""
        end = time.monotonic() + 20
        while not (self._code.exists() and self._code.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        assert self._code.read_text() == "0\n", self.text()

    def close(self) -> None:
        subprocess.run([*self._call, "kill-server"], env=self._environ, capture_output=True, timeout=20)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    # Without the size that pytest-xdist gives its processes: textual would take it for the terminal's for ever.
    without = ("TMUX", "MEMGUARD_", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    return {**kept, "PYTHONPATH": str(HOME), "XDG_RUNTIME_DIR": str(runtime), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def program(environ: dict[str, str], tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run.{rank}.jsonl")]
        started.append(subprocess.Popen(words, env=environ))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_timeline_is_followed_through_all_that_happens(
    environ: dict[str, str], tmp_path: Path, program: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    terminal = Terminal(tmp_path, environ, str(tmp_path / "run.0.jsonl"))
    try:
        terminal.until(lambda text: "waiting for the file" in text)
        writer = program(WRITER)
        text = terminal.until(lambda text: "torch" in text and "warn" in text)
        assert all(
            name in text for name in ("tensorflow", "jax", "cupy", "pycuda", "numba", "overhead", "other processes")
        )
        assert f"PID {writer.pid}" in text and "█" in text and "▒" in text and "│" in text
        terminal.keys("?")
        terminal.until(lambda text: "live arrays" in text)
        terminal.keys("Escape")
        terminal.keys("Down")
        terminal.until(lambda text: re.search(r"^> \w+ +█", text, re.MULTILINE) is not None)
        terminal.keys("t")
        terminal.until(lambda text: "a timeline is only read" in text)
        terminal.keys("p")
        paused = terminal.until(lambda text: "PAUSED" in text)
        time.sleep(1.2)
        assert terminal.text() == paused
        terminal.keys("p")
        terminal.until(lambda text: "PAUSED" not in text)
        for width, height in ((120, 40), (200, 60), (50, 12), (80, 24)):
            terminal.tmux("resize-window", "-x", str(width), "-y", str(height))
            text = terminal.until(lambda text: len(text.splitlines()) == height)  # noqa: B023
            terminal.until(lambda text: text.startswith("memguard top") and "q quit" in text)
        before, began = seconds_of(terminal.pid), time.monotonic()
        time.sleep(10)
        share = (seconds_of(terminal.pid) - before) / (time.monotonic() - began)
        print(f"memguard top: {100 * share:.1f} % of a core at 2 Hz, six frameworks on 80x24")
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        text = terminal.until(lambda text: "nobody writes it any more" in text)
        assert "torch" in text
        terminal.keys("q")
        terminal.ends()
    finally:
        terminal.close()


def test_a_process_is_asked_and_may_be_killed(
    environ: dict[str, str], tmp_path: Path, program: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    target = program(ATTACHED)
    sockets = tmp_path / "run" / "memguard"
    end = time.monotonic() + 30
    while not list(sockets.glob("top-*")) and time.monotonic() < end:
        time.sleep(0.1)
    terminal = Terminal(tmp_path, environ)
    try:
        terminal.until(lambda text: f"PID {target.pid}" in text and "torch" in text)
        terminal.keys("Down")
        terminal.keys("c")
        terminal.until(lambda text: "The new cap of torch" in text)
        terminal.keys("-l", "2GiB")
        terminal.keys("Enter")
        terminal.until(lambda text: "to 2.00 GiB?" in text)
        terminal.keys("y")
        terminal.until(lambda text: "cap of torch to 2.00 GiB: done" in text)
        terminal.keys("t")
        terminal.until(lambda text: "Trim torch" in text)
        terminal.keys("y")
        terminal.until(lambda text: "trim torch: done" in text)
        target.kill()
        target.wait()
        text = terminal.until(lambda text: "ended at" in text)
        assert "torch" in text
        terminal.keys("t")
        terminal.until(lambda text: "has ended" in text)
        terminal.keys("C-c")
        terminal.ends()
    finally:
        terminal.close()
