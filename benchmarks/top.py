"""What the screen of `memguard top` takes of a core at 2 Hz, in a terminal of 80×24. It takes about 40 s.

    python benchmarks/top.py -o benchmarks/results/h200-top.json

Three screens run at the same time: one follows a timeline of six frameworks that is written twice a second, one watches
this machine's GPUs and a process whose budget says `monitor: {top: true}`, and one is the control: textual itself, with
one line that changes twice a second. Each has a pseudo-terminal of its own, which is read and not interpreted. Counted
is the CPU time of the process and of what it starts.

The process that is watched works on this machine's GPU where there is one, else on a simulated one, and the result says
which. Beside it a second one does the same and is not watched: what it takes less is what being watched costs. Without
textual nothing can be measured, and the result says so.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _listed
from _run import ROOT, Judge, Tell, attempt, conclude, header, judged
from light import gpu_here

SECONDS = 20.0
BAR = 0.02
"""Of a core."""
DRAWN = 1.5
"""Times a second that figures have to reach the screen: they change twice."""
WITHOUT = "textual is not installed in this Python: pip install 'textual>=1.0'"
WRITER = """
import random, sys, time
from memguard import _config, _policy
from memguard._devices.simulated import SimulatedHost
from memguard._timeline import Writer
from memguard._types import DeviceSample, Event, FrameworkSample, Pressure, Sample

budget = {"version": 1, "device": {"limit": "40GiB", "reserve": "2GiB"},
          "frameworks": {name: {"share": "16%"} for name in _config.FRAMEWORKS}}
plan = _policy.plan(_config.from_mapping(budget), SimulatedHost(["h200"]).devices())
part, draw = plan.devices[0], random.Random(1)
with Writer(sys.argv[1], plan) as writer:
    for number in range(10_000):
        held = {name: draw.randrange(1 << 30, cap) for name, cap in part.caps.items()}
        rows = {n: FrameworkSample(size, size // 2, size // 4, part.caps[n]) for n, size in held.items()}
        used = sum(held.values()) + (1 << 30)
        row = DeviceSample(part.device.uuid, part.device.total, used, part.device.usable - used, used, part.limit,
                           1 << 30, 0, rows)
        writer.sample(Sample(time.time(), (row,)))
        if number % 10 == 0:
            writer.event(Event(time.time(), "pressure", f"pressure warn number {number}", Pressure.WARN,
                               part.device.uuid, "torch"))
        if number == 0:
            print("ready", flush=True)
        time.sleep(0.5)
"""
TARGET = """
import random, sys, time
import memguard

real, watched = sys.argv[1] == "real", sys.argv[2] == "watched"
names = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
guard = memguard.init(
    {"version": 1, "device": {"limit": "12GiB"}, "frameworks": {name: {"share": "15%"} for name in names},
     "monitor": {"interval": "500ms", "top": watched}},
    simulate=None if real else "h200",
)
draw, kept = random.Random(1), []
if real:
    try:
        import torch
    except ImportError:
        torch = None
print("ready", flush=True)
while True:
    size = draw.randrange(1 << 20, 1 << 29)
    if not real:
        for each in kept:
            guard.frameworks["torch"].free(each)
        kept = [guard.frameworks["torch"].allocate(size)]
    elif torch is not None:
        kept = [torch.empty(size, dtype=torch.uint8, device="cuda")]
    memguard.checkpoint()
    time.sleep(0.2)
"""
CONTROL = """
import time
from textual.app import App
from textual.widgets import Static

class Line(App):
    BINDINGS = [("q", "quit", "quit")]
    ENABLE_COMMAND_PALETTE = False

    def compose(self):
        yield Static("torch", id="line")

    def on_mount(self):
        self.set_interval(0.5, lambda: self.query_one("#line").update(f"torch {time.time():.1f}"))

Line().run()
"""


class Screen:
    """A program in a pseudo-terminal of 80×24."""

    def __init__(self, environ: dict[str, str], *words: str) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._master = master
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.text = ""
        self.drawn: list[float] = []
        """When something was drawn: the beginning of each burst of output."""
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
                raise RuntimeError(f"{seen!r} did not come to the screen: {said}")
            time.sleep(0.05)

    def end(self) -> int | None:
        """Quit as a user does. Its exit code."""
        with contextlib.suppress(OSError):
            os.write(self._master, b"q")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        code = self.process.poll()
        if code is None:
            self.process.kill()
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
        name: [
            (after[name] - before[name]) / (end - began)
            for (began, before), (end, after) in itertools.pairwise(moments)
        ]
        for name in pids
    }  # fmt: skip


@contextlib.contextmanager
def running(environ: dict[str, str], code: str, *arguments: str) -> Iterator[int]:
    """A program at work; its PID, once it has said that it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            if process.stdout.readline() != "ready\n":
                process.kill()
                raise RuntimeError(f"a program did not begin: {process.stderr.read()[-800:]}")
            yield process.pid
        finally:
            process.kill()


def environment(folder: Path) -> dict[str, str]:
    """With a folder for sockets of its own, so that no other process is watched."""
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    without = ("MEMGUARD_", "COLUMNS", "LINES", "NO_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return {**kept, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(runtime), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


def measure(folder: Path, seconds: float, real: bool) -> dict[str, dict[str, Any]]:
    """All of it at the same time. By scenario: `shares`, `drawn` (times a second), `returncode`."""
    environ, kind = environment(folder), "real" if real else "simulated"
    timeline = str(folder / "run.0.jsonl")
    top = ("-m", "memguard", "top")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(environ, WRITER, str(folder / "run.{rank}.jsonl")))
        beside = stack.enter_context(running(environ, TARGET, kind, "beside"))
        target = stack.enter_context(running(environ, TARGET, kind, "watched"))
        screens: dict[str, Screen] = {}
        for name, words in (("follows", (*top, timeline)), ("attached", top), ("control", ("-c", CONTROL))):
            screens[name] = Screen(environ, *words)
            stack.callback(screens[name].process.kill)
        for screen in screens.values():
            screen.until("torch")
        time.sleep(min(seconds, 3.0))
        pids = {name: screen.process.pid for name, screen in screens.items()}
        began = time.monotonic()
        taken = shares({**pids, "watched": target, "beside": beside}, seconds)
        ended = time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for name, screen in screens.items():
            drawn = sum(1 for moment in screen.drawn if began <= moment <= ended) / (ended - began)
            code = screen.end()
            died = {} if code == 0 else {"stderr_tail": f"the screen did not end with q: {code}"}
            found[name] = {"returncode": 0 if code == 0 else 1, **died, "shares": taken[name], "drawn": drawn}
        found["attached"] |= {"target": kind, "watched": taken["watched"], "beside": taken["beside"]}
    return found


def percent(values: list[float]) -> str:
    return " and ".join(f"{100 * value:.1f}" for value in values) + " %"


def top_checks(result: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of this benchmark."""

    def screen(name: str, what: str) -> Judge:
        def told(check: Tell) -> None:
            one, control = result[name], result.get("control", {}).get("shares")
            figure = f"{percent(one['shares'])} of a core"
            figure += f"; an almost empty screen {percent(control)}" if control else ""
            check(f"{what}: at most 2 % of a core at 2 Hz, in both halves", max(one["shares"]) <= BAR, figure)
            figure = f"{one['drawn']:.1f} times a second"
            check(f"{what}: drawn at least 1.5 times a second", one["drawn"] >= DRAWN, figure)

        return told

    def control(check: Tell) -> None:
        one = result["control"]
        check(_listed.TOP["control"][0], one["drawn"] >= DRAWN, f"{percent(one['shares'])} of a core")

    judges: dict[str, Judge] = {
        "follows": screen("follows", "following a timeline of six frameworks"),
        "attached": screen("attached", "watching this machine and a process"),
        "control": control,
    }
    return judged(_listed.TOP, judges, {name: result[name] for name in judges if name in result})


def measured(seconds: float, real: bool, run: Callable[..., dict[str, Any]] = measure) -> dict[str, Any]:
    """What each scenario came to; that it could not be, where there is no textual."""
    if importlib.util.find_spec("textual") is None:
        return {name: {"returncode": 1, "stderr_tail": WITHOUT} for name in _listed.TOP}
    with tempfile.TemporaryDirectory() as name:
        found = attempt(lambda: run(Path(name), seconds, real))
    if "returncode" in found:  # it broke off: of all of them
        return dict.fromkeys(_listed.TOP, found)
    return {"textual": importlib.metadata.version("textual"), **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    about = header("python benchmarks/top.py", "_processes", "_top", "cli")
    result: dict[str, Any] = {"about": about, "cpus": os.cpu_count()}
    result |= measured(arguments.seconds, gpu_here())
    result["checks"] = top_checks(result)
    conclude(result, arguments.output)
    one = result["attached"]
    if "watched" in one:
        print(
            f"      the {one['target']} process takes {percent(one['watched'])} watched, {percent(one['beside'])} not"
        )


if __name__ == "__main__":
    main()
