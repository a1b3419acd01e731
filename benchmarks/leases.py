"""Real processes with leases on one card: four beside each other while a fifth waits, and two that take turns.

    python benchmarks/leases.py --part four -o 1.json
    python benchmarks/leases.py --part turns --merge 1.json -o benchmarks/results/h200-leases.json

Each part in a call of at most ten minutes; without `--part` both run. The result is written as soon as something is
known, so that what ends the run does not lose what was measured.

four    torch, TensorFlow, JAX, and CuPy with PyCUDA: each process claims 34 GiB, context included, and fills its caps.
        The fifth (torch) waits until one of them ends, and fills its caps then. The control is the same five at once
        without leases: each has the same caps, and together they are more than the card.
turns   Two torch processes that fill 44 GiB each take turns on what a card of 80 GB has: `on_wait: suspend-idle`. The
        control is the same two without that key. It needs 100 GiB of host memory.

What a process holds is NVML's figure for its PID, read by this process, which is none of them. What its arrays hold is
compared with what was written into them. The leases of each scenario lie in a folder of this run's own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _leases_turns
from _leases_checks import WAITS, lease_checks
from _leases_job import JOBS, REHEARSAL
from _leases_turns import Tell
from _run import ROOT, Kept, attempt, conclude, header, merged

HERE = Path(__file__).resolve().parent
FULL = 120.0
"""Seconds in which processes that started together must have filled their caps, or have died."""
FIRST = 200.0
"""The same for the first ones on a machine, which read every framework from its disk."""
CHECKED = 30.0
Listed = Callable[[], dict[int, int]]
Scenario = Callable[[Tell], dict[str, Any]]


class Job:
    """One process of `_leases_job.py`."""

    def __init__(self, name: str, leased: bool, environ: dict[str, str]) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads fills up)
        words = [sys.executable, str(HERE / "_leases_job.py"), name, "leased" if leased else "free", "300"]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environ
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                if line.startswith("ANSWER "):  # libraries print what they like
                    self._said.put(json.loads(line[7:]))
        self._said.put(None)

    def step(self, name: str, until: float) -> dict[str, Any] | None:
        """What it tells at that step; None if it ends before, or does not come so far in time (CLOCK_MONOTONIC)."""
        while True:
            try:
                said = self._said.get(timeout=max(until - time.monotonic(), 0.01))
            except queue.Empty:
                return None
            if said is None:
                self._said.put(None)
                return None
            if said["step"] == name:
                return said

    def must(self, name: str, until: float) -> dict[str, Any]:
        found = self.step(name, until)
        if found is None:
            raise RuntimeError(f"{self.name}: it did not come to {name!r}: {self.stderr()}")
        return found

    def check(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def end(self) -> float:
        """As a program ends. When it was told to (CLOCK_MONOTONIC)."""
        at = time.monotonic()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(CHECKED)
        except subprocess.TimeoutExpired:
            self.kill()
        return at

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-1500:]


class Watcher:
    """The most that each PID ever had on the card, by what `listed` says ten times a second."""

    def __init__(self, listed: Listed) -> None:
        self._listed, self._over = listed, threading.Event()
        self.most: dict[int, int] = {}
        self.looks = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.look()

    def look(self) -> None:
        for pid, size in self._listed().items():
            self.most[pid] = max(self.most.get(pid, 0), size)
        self.looks += 1


@contextlib.contextmanager
def by_nvml() -> Iterator[Listed]:
    """NVML's bytes by PID on the first GPU, past memguard."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    try:
        yield lambda: {one.pid: one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def card(folder: Path) -> Iterator[Listed]:
    if REHEARSAL is None:
        with by_nvml() as listed:
            yield listed
        return
    from _leases_stand_in import Card

    yield Card(REHEARSAL).listed


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    path = os.pathsep.join([str(ROOT), str(HERE), kept.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if REHEARSAL is not None:
        own["MEMGUARD_LEASES_REHEARSAL"] = REHEARSAL
    return {**kept, **own, "MEMGUARD_LEASES": str(folder / "leases")}


def together(folder: Path) -> dict[str, Any]:
    """Four at once with leases, and a fifth."""
    environ = environment(folder)
    with contextlib.ExitStack() as stack:
        listed = stack.enter_context(card(folder))
        watcher = stack.enter_context(Watcher(listed))

        def started(name: str) -> Job:
            job = Job(name, True, environ)
            stack.callback(job.close)
            return job

        four = {name: started(name) for name in JOBS}
        until = time.monotonic() + FIRST
        full = {name: job.must("full", until) for name, job in four.items()}
        fifth = started("torch")
        until = time.monotonic() + FULL
        while not _waits(fifth):  # it has to import memguard first
            if fifth.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the fifth does not wait: {fifth.stderr()}")
            time.sleep(0.1)
        early = fifth.step("has", time.monotonic() + WAITS)
        meanwhile = watcher.most.get(fifth.process.pid, 0)
        right = _right([*four.values()])
        first = four.pop("torch")
        ended = first.end()
        gone = time.monotonic()
        has = fifth.must("has", time.monotonic() + FULL) if early is None else early
        found = fifth.must("full", time.monotonic() + FULL)
        again = _right([*four.values(), fifth])
        watcher.look()
        jobs = {**four, "torch": first, "the fifth": fifth}
        most = {name: watcher.most.get(job.process.pid, 0) for name, job in jobs.items()}
        for job in (*four.values(), fifth):
            job.end()
        return {
            "returncode": 0,
            "filled": {**{name: one["bytes"] for name, one in full.items()}, "the fifth": found["bytes"]},
            "most": most, "looks": watcher.looks, "right": right, "right_after": again,
            "fifth": {
                "early": early is not None, "meanwhile": meanwhile, "waited": has["waited"],
                "after_told_s": has["at"] - ended, "after_end_s": has["at"] - gone,
            },
        }  # fmt: skip


def _waits(job: Job) -> bool:
    return "waiting for" in job.stderr()


def _right(jobs: list[Job]) -> dict[str, bool]:
    for job in jobs:
        job.check()
    until = time.monotonic() + CHECKED
    return {f"{job.name} {place}": job.must("checked", until)["right"] for place, job in enumerate(jobs, 1)}


def control(folder: Path) -> dict[str, Any]:
    """Five at once without leases. Which of them died, and of what."""
    environ = environment(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(card(folder))
        jobs = [Job(name, False, environ) for name in (*JOBS, "torch")]
        for job in jobs:
            stack.callback(job.close)
        until = time.monotonic() + FULL
        full = [job.step("full", until) for job in jobs]
        died = {}
        for place, (job, found) in enumerate(zip(jobs, full, strict=True), 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = job.process.wait(0.1 if found is not None else CHECKED)
                lines = [line.strip() for line in job.stderr().splitlines() if line.strip()]
                died[f"{job.name} {place}"] = f"rc {code}: {lines[-1][:200] if lines else 'nothing on its stderr'}"
        return {"returncode": 0, "full": sum(one is not None for one in full), "died": died}


def _in_folder(do: Callable[[Path], dict[str, Any]]) -> Scenario:
    def run(tell: Tell) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            return do(Path(name))

    return run


def _in_runtime(do: Callable[[Path, Tell], dict[str, Any]]) -> Scenario:
    def run(tell: Tell) -> dict[str, Any]:
        with _leases_turns.where() as folder:
            return do(folder, tell)

    return run


PARTS: dict[str, dict[str, Scenario]] = {
    "four": {"together": _in_folder(together), "control": _in_folder(control)},
    "turns": {"turns": _in_runtime(_leases_turns.turns), "without suspend-idle": _in_runtime(_leases_turns.without)},
}
SCENARIOS = {name: do for of in PARTS.values() for name, do in of.items()}


def ran(names: Sequence[str], add: Callable[[str, dict[str, Any]], None]) -> None:
    """These scenarios one after the other, and what each has seen so far as it goes on."""
    for name in names:
        began = time.monotonic()
        outcome = attempt(lambda name=name: SCENARIOS[name](functools.partial(add, name)))  # type: ignore[misc]
        outcome["wall_s"] = round(time.monotonic() - began, 1)
        print(f"{name}: rc {outcome['returncode']}, {outcome['wall_s']} s", file=sys.stderr, flush=True)
        add(name, outcome)


def kept(output: Path | None, before: Mapping[str, Any]) -> Kept:
    """The result, as it is until something is added."""
    about = header("python benchmarks/leases.py", "_leases", "_processes", "_suspend", "cli")

    def whole(scenarios: dict[str, Any]) -> dict[str, Any]:
        return {"about": about, "scenarios": scenarios, "checks": lease_checks(scenarios)}

    return Kept(output, before, SCENARIOS, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), help="this part alone")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = [*PARTS[arguments.part]] if arguments.part else [name for name in SCENARIOS if name not in before]
    result = kept(arguments.output, before)
    ran(names, result.add)
    conclude(result.whole(), arguments.output)


if __name__ == "__main__":
    main()
