"""Leases on a real GPU: one process waits for another, neighbours are named, `ps` lists both, and idle ones make room.

Each test has leases of its own, in a folder of its own. The processes hold 1 GiB and less, whatever they have claimed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpus_here import GPUS

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
SHARE = 60
"""Percent of the first GPU that each claims: two do not fit."""
# Answers each line; ends at the end of its input, off the card if it was suspended before.
PROGRAM = """
import json, os, sys, time
import torch
import memguard
def tell(**what): print("ANSWER " + json.dumps(what), flush=True)
began = time.monotonic()
try:
    memguard.init(json.loads(sys.argv[1]))
except memguard.LeaseRefused as error:
    tell(refused=str(error))
    sys.exit(0)
waited = time.monotonic() - began
size = int(sys.argv[2]) << 27
x = torch.arange(size, dtype=torch.int64, device="cuda")  # so many GiB
torch.cuda.synchronize()
tell(waited=waited)
touched = False
for line in sys.stdin:
    if line.strip() == "away":
        from memguard._devices import suspension
        touched = touched or suspension.now is not None
        tell(away=suspension.now is not None)
        continue
    torch.cuda.synchronize()  # waits while the process is off
    right = all(torch.equal(x[at:at + (1 << 24)], torch.arange(at, at + (1 << 24), device="cuda"))
                for at in range(0, size, 1 << 24))
    tell(right=right)
if touched:  # one that was restored is not to be ended as it is
    if suspension.now is None:
        memguard.suspend()
    os._exit(0)
"""


class Program:
    """One process under a budget with a lease."""

    def __init__(self, folder: Path, size: int = 1, **device: Any) -> None:
        budget: dict[str, Any] = {
            "version": 1,
            "device": {"limit": f"{SHARE}%", "lease": True, **device},
            "frameworks": {"torch": {"limit": f"{size + 1}GiB"}},
            "suspend": {"on_demand": "2s", "by_others": True, "host_memory": "ignore"},
        }
        self.errors = (folder / f"stderr {time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(budget), str(size)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment(folder),
        )  # fmt: skip

    def heard(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                found: dict[str, Any] = json.loads(line[7:])
                return found
        raise AssertionError(f"it ended: {self.said()}")

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.heard()

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.process.stdout.close()
        self.errors.close()


Start = Callable[..., Program]


@contextmanager
def programs(folder: Path) -> Iterator[Start]:
    begun: list[Program] = []

    def start(size: int = 1, **device: Any) -> Program:
        begun.append(Program(folder, size, **device))
        return begun[-1]

    try:
        yield start
    finally:
        for one in begun:
            if one.process.stdin is not None and not one.process.stdin.closed:
                one.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs(tmp_path) as start:
        yield start


def environment(folder: Path) -> dict[str, str]:
    """One GPU, and a folder for everything that processes leave for each other."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    own = {"XDG_RUNTIME_DIR": str(folder), "MEMGUARD_LEASES": "", "CUDA_VISIBLE_DEVICES": GPUS[0]}
    return {**os.environ, **own, "PYTHONPATH": path}


def command(folder: Path, *words: str) -> Any:
    """What `memguard WORDS --json` prints."""
    words = (sys.executable, "-m", "memguard", *words, "--json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(there: Callable[[], bool], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.1)


def states(listed: Any) -> dict[int, str]:
    return {claim["pid"]: claim["state"] for gpu in listed["gpus"] for claim in gpu["claims"]}


def holders(folder: Path) -> list[int]:
    return [pid for pid, state in states(command(folder, "leases")).items() if state == "held"]


def test_a_second_waits_with_nothing_on_the_card_until_the_first_ends(start: Start, tmp_path: Path) -> None:
    first = start()
    first.heard()
    second = start(wait="1min")
    until(lambda: "waiting for" in second.said())
    listed = command(tmp_path, "leases")
    assert states(listed) == {first.process.pid: "held", second.process.pid: "waiting"}
    (gpu,) = listed["gpus"]
    assert gpu["uuid"] == GPUS[0] and not gpu["simulated"] and gpu["leased"] == gpu["claims"][0]["bytes"]
    used = {claim["pid"]: claim["used"] for claim in gpu["claims"]}
    assert GIB < used[first.process.pid] < 3 * GIB and used[second.process.pid] == 0
    assert f"process {first.process.pid} " in second.said()
    first.end()
    assert second.heard()["waited"] > 0 and second.ask("check")["right"]


def test_a_neighbour_without_a_lease_is_named_and_ps_lists_who_has_a_budget(start: Start, tmp_path: Path) -> None:
    first = start()
    first.heard()
    stranger = start(lease=False)
    stranger.heard()
    listed = command(tmp_path, "leases")
    (found,) = [one for one in listed["neighbours"] if one["pid"] == stranger.process.pid]
    assert found["leased"] is None and GIB < found["used"] < 3 * GIB and found["uuid"] == GPUS[0]
    notes = [note for note in listed["notes"] if f"process {stranger.process.pid} " in note]
    assert len(notes) == 1 and "without a lease" in notes[0]
    pids = {one["pid"] for one in _flat(command(tmp_path, "ps"))}
    assert {first.process.pid, stranger.process.pid} <= pids


def _flat(value: Any) -> list[dict[str, Any]]:
    """Every mapping with a PID."""
    if isinstance(value, list):
        return [one for each in value for one in _flat(each)]
    if isinstance(value, dict):
        return [value] * ("pid" in value) + [one for each in value.values() for one in _flat(each)]
    return []


class Watch:
    """Sample NVML's figures of some processes twenty times a second, and run `memguard leases` once a second."""

    def __init__(self, folder: Path, *pids: int) -> None:
        self._folder, self._pids, self._over = folder, set(pids), threading.Event()
        self.looks = self.both = self.off = 0
        self.most = dict.fromkeys(pids, 0)
        self.listings: list[Any] = []
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._card, self._leases)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _card(self) -> None:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(GPUS[0])
        while not self._over.wait(0.05):
            listed = {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            on = self._pids & set(listed)
            self.looks, self.both, self.off = self.looks + 1, self.both + (len(on) > 1), self.off + (not on)
            self.most.update({pid: max(self.most[pid], listed[pid]) for pid in on})

    def _leases(self) -> None:
        while not self._over.wait(1):
            self.listings += command(self._folder, "leases")["gpus"]


def test_two_idle_jobs_suspend_for_each_other_and_keep_their_values(
    start: Start, tmp_path: Path, thorough: bool
) -> None:
    size, turns = (40, 3) if thorough else (1, 1)
    first = start(size, wait="5min", on_wait="suspend-idle")
    first.heard()
    second = start(size, wait="5min", on_wait="suspend-idle")
    with Watch(tmp_path, first.process.pid, second.process.pid) as seen:
        second.heard()  # the first has suspended itself for it
        for _ in range(turns):
            assert first.ask("away")["away"] and not second.ask("away")["away"]
            assert holders(tmp_path) == [second.process.pid]
            assert first.ask("check")["right"]  # a call that needs the GPU: now the second suspends itself
            assert second.ask("away")["away"] and not first.ask("away")["away"]
            assert holders(tmp_path) == [first.process.pid]
            assert second.ask("check")["right"]
        assert first.ask("away")["away"]
    assert seen.looks >= 20 and seen.both == 0 and seen.off > 0, "both lie in host memory between two turns"
    assert all(size * GIB < most < (size + 3) * GIB for most in seen.most.values())
    assert seen.listings
    for gpu in seen.listings:
        held = [claim["bytes"] for claim in gpu["claims"] if claim["state"] == "held"]
        assert gpu["leased"] == sum(held) <= gpu["total"] and gpu["free"] == gpu["total"] - sum(held), gpu
        assert len(held) <= 1


def test_without_that_key_it_is_refused_when_its_time_is_up_and_nobody_leaves(start: Start) -> None:
    first = start()
    first.heard()
    text = start(wait="6s").heard()["refused"]
    assert f"process {first.process.pid} " in text and "fix:" in text
    assert not first.ask("away")["away"] and first.ask("check")["right"]
