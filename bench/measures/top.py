"""What the screen of `memguard top` takes of a core at 2 Hz, in a terminal of 80×24.

Three screens run at the same time: one follows a timeline of six frameworks that is written twice a second, one watches
this machine's GPUs and a process, and one is the control: textual itself, with one line that changes twice a second."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.child import emit, environment, kill_group, main
from bench.measure import Failed, Run, Values, gpu_here, measure
from bench.programs.six import NAMES

SECONDS = 16.0
SCREENS = ("follows", "attached", "control")
DRAWN = {f"{name}.drawn": ">= 1.5" for name in SCREENS}
"""Times a second that figures have to reach the screen: they change twice."""


@measure(
    "top", unit={**dict.fromkeys(SCREENS, "% of a core"), **dict.fromkeys(DRAWN, "times/s")},
    bar={"follows": "<= 2", "attached": "<= 2", **DRAWN}, by=dict.fromkeys(("follows", "attached"), "p95"), seconds=35,
    needs=("textual",),
)  # fmt: skip
def top(run: Run) -> dict[str, Values]:
    """The share of a core that `memguard top` takes at 2 Hz, in both halves of the time; `control`: textual alone."""
    seconds, kind = 2.0 if run.quick else SECONDS, "real" if gpu_here() else "simulated"
    runtime = run.folder / "run"
    runtime.mkdir(mode=0o700)  # a folder for sockets of its own, so that no other process is watched
    place = {"XDG_RUNTIME_DIR": str(runtime), "MEMGUARD_CONFIG": None}
    writer = run.start("writer", run.folder / "run.{rank}.jsonl", env=place)
    target = run.start("target", kind, env=place)
    for one in (writer, target):
        one.read(60)
    environ = environment({**place, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"})
    environ = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    words = {
        "follows": ("-m", "memguard", "top", str(run.folder / "run.0.jsonl")), "attached": ("-m", "memguard", "top"),
        "control": ("-m", "bench.measures.top", "control"),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        screens: dict[str, Screen] = {}
        for name in SCREENS:
            screens[name] = Screen(environ, *words[name])
            stack.callback(kill_group, screens[name].process.pid)
        for screen in screens.values():
            screen.until("torch")
        time.sleep(min(seconds, 3.0))
        pids = {name: screen.process.pid for name, screen in screens.items()}
        began = time.monotonic()
        taken = shares(pids, seconds)
        ended = time.monotonic()
        drawn = {
            f"{name}.drawn": [sum(began <= moment <= ended for moment in screen.drawn) / (ended - began)]
            for name, screen in screens.items()
        }
        for name, screen in screens.items():
            if (code := screen.end()) != 0:
                raise Failed(f"the screen {name} did not end with q: {code}")
    return {**{name: [100 * one for one in values] for name, values in taken.items()}, **drawn}


class Screen:
    """A program in a pseudo-terminal of 80×24."""

    def __init__(self, environ: Mapping[str, str], *words: str) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._master = master
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.text = ""
        self.drawn: list[float] = []  # When something was drawn: the beginning of each burst of output.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        last = 0.0
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            now = time.monotonic()
            if now - last > 0.1:
                self.drawn.append(now)
            last = now
            self.text = (self.text + data.decode("utf-8", "replace"))[-(1 << 20) :]

    def until(self, seen: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while seen not in self.text:
            if self.process.poll() is not None or time.monotonic() > end:
                said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", self.text)[-800:]
                raise Failed(f"{seen!r} did not come to the screen: {said}")
            time.sleep(0.05)

    def end(self) -> int | None:
        """Quit as a user does. Its exit code."""
        with contextlib.suppress(OSError):
            os.write(self._master, b"q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        code = self.process.poll()
        if code is None:
            kill_group(self.process.pid)
            self.process.wait()
        self._reader.join(2)
        os.close(self._master)
        return code


def cpu(pid: int) -> float:
    """Seconds of CPU of a process and of all that it has started, ended or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended: what it took is in the figures of who started it, once that knows
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu, children))


def shares(pids: dict[str, int], seconds: float) -> dict[str, list[float]]:
    """The part of a core that each takes, in both halves of the time."""
    moments = []
    for half in range(3):
        if half:
            time.sleep(seconds / 2)
        moments.append((time.monotonic(), {name: cpu(pid) for name, pid in pids.items()}))
    return {
        name: [(after[name] - before[name]) / (end - began) for (began, before), (end, after)
               in itertools.pairwise(moments)]
        for name in pids
    }  # fmt: skip


def program_writer(path: str) -> None:
    """Write a timeline of six frameworks, a sample every half second."""
    from memguard import _budget
    from memguard._base.types import DeviceSample, Event, FrameworkSample, Pressure, Sample
    from memguard._budget import policy
    from memguard._devices.simulated import SimulatedHost
    from memguard._timeline import Writer

    frameworks = {name: {"share": "16%"} for name in NAMES}
    budget = {"version": 1, "device": {"limit": "40GiB", "reserve": "2GiB"}, "frameworks": frameworks}
    plan = policy.plan(_budget.from_mapping(budget), SimulatedHost(["h200"]).devices())
    part, draw = plan.devices[0], random.Random(1)
    with Writer(path, plan) as writer:
        for number in range(10_000):
            held = {name: draw.randrange(1 << 30, cap) for name, cap in part.caps.items()}
            rows = {n: FrameworkSample(size, size // 2, size // 4, part.caps[n]) for n, size in held.items()}
            used = sum(held.values()) + (1 << 30)
            row = DeviceSample(part.device.uuid, part.device.total, used, part.device.usable - used, used, part.limit,
                               1 << 30, 0, rows)  # fmt: skip
            writer.sample(Sample(time.time(), (row,)))
            if number % 10 == 0:
                said = f"pressure warn number {number}"
                writer.event(Event(time.time(), "pressure", said, Pressure.WARN, part.device.uuid, "torch"))
            if number == 0:
                emit({"ready": True})
            time.sleep(0.5)


def program_target(kind: str) -> None:
    """Allocate five times a second under a budget that `memguard top` may watch."""
    import memguard

    real = kind == "real"
    frameworks = {name: {"share": "15%"} for name in NAMES}
    monitor = {"interval": "500ms", "top": True}
    guard: Any = memguard.init(
        {"version": 1, "device": {"limit": "12GiB"}, "frameworks": frameworks, "monitor": monitor},
        simulate=None if real else "h200",
    )
    draw, kept = random.Random(1), []
    if real:
        import torch
    emit({"ready": True})
    while True:
        size = draw.randrange(1 << 20, 1 << 29)
        if real:
            kept = [torch.empty(size, dtype=torch.uint8, device="cuda")]
        else:
            for each in kept:
                guard.frameworks["torch"].free(each)
            kept = [guard.frameworks["torch"].allocate(size)]
        memguard.checkpoint()
        time.sleep(0.2)


def program_control() -> None:
    """Textual itself, with one line that changes twice a second."""
    from textual.app import App
    from textual.widgets import Static

    class Line(App):  # type: ignore[type-arg]
        BINDINGS = [("q", "quit", "quit")]  # noqa: RUF012
        ENABLE_COMMAND_PALETTE = False

        def compose(self):  # type: ignore[no-untyped-def]
            yield Static("torch", id="line")

        def on_mount(self) -> None:
            self.set_interval(0.5, lambda: self.query_one("#line", Static).update(f"torch {time.time():.1f}"))

    Line().run()


if __name__ == "__main__":
    main({"writer": program_writer, "target": program_target, "control": program_control})
