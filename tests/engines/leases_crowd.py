"""A crowd of processes that claim and die at random: `python leases_crowd.py FOLDER LOG SECONDS LEAST AT_ONCE SEED`.

Each is forked from this one, which has imported memguard and claims nothing, so that a small machine copes. Each is a
process of its own, with locks of its own, and writes into the log what it does, by CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from memguard._node.leases.lease import Lease
from memguard._node.leases.store import Store
from memguard._node.leases.types import Part

TOTAL = 1000
GPUS = ("GPU-a", "GPU-b")
PROBE = "GPU-probe"
"""One process holds all of it, and the next one waits for its death."""
WAIT = 300.0
"""Seconds after which one that waits counts as starved."""


class Log:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, what: str, name: str, **more: Any) -> None:
        line = {"at": time.monotonic(), "unix": time.time(), "what": what, "name": name, **more}
        os.write(self.fd, json.dumps(line).encode() + b"\n")  # one call: lines of several processes do not mix


def wanted(rng: random.Random) -> dict[str, int]:
    if rng.random() < 0.2:
        return {gpu: rng.randrange(100, 400) for gpu in GPUS}
    return {rng.choice(GPUS): rng.randrange(50, 600)}


def claim(name: str, sizes: dict[str, int], log: Log, hold: float, end: str, worker: bool) -> NoReturn:
    parts = {gpu: Part(gpu, size, TOTAL, 0, "NVIDIA H200") for gpu, size in sizes.items()}
    code = 1
    try:
        lease = Lease(parts, f"{name}.yaml")
        log("claims", name, sizes=sizes)
        lease.take(WAIT, lambda text: log("waits", name, number=lease.number, sizes=sizes))
        (mine,) = (claim for claim in lease._seen if claim.id == lease.number)
        log("has", name, number=lease.number, since=mine.since, sizes=sizes)
        if worker and not os.fork():  # it lives on: it must not keep what its parent had
            time.sleep(3)
            os._exit(0)
        time.sleep(hold)
        log("ends", name, by=end)
        if end == "close":
            lease.close()
            code = 0
        elif end == "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        elif end == "exception":
            raise RuntimeError("the program fails")
    except BaseException as error:
        if not isinstance(error, RuntimeError):
            log("fails", name, error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


class Crowd:
    def __init__(self, folder: str, log: Log, rng: random.Random) -> None:
        self.store, self.log, self.rng = Store(folder), log, rng
        self.alive: dict[int, str] = {}
        self.doomed: dict[int, float] = {}
        self.born = 0

    def begin(self, make: Callable[[str], Any], kind: str = "job") -> int:
        self.born += 1
        name = f"{kind}-{self.born}"
        pid = os.fork()
        if not pid:
            make(name)
        self.alive[pid] = name
        return pid

    def job(self) -> None:
        rng = self.rng
        sizes, hold, worker = wanted(rng), rng.uniform(0.2, 2.5), rng.random() < 0.1
        end = rng.choice(["close", "close", "exit", "exception", "kill -9"])
        pid = self.begin(lambda name: claim(name, sizes, self.log, hold, end, worker))
        if rng.random() < 0.4:
            self.doomed[pid] = time.monotonic() + rng.choice([rng.uniform(0, 0.1), rng.uniform(0, 5)])

    def probe(self) -> int:
        return self.begin(lambda name: claim(name, {PROBE: TOTAL}, self.log, 3600, "close", False), "probe")

    def kill(self, pid: int) -> None:
        """And see how long its claim counts."""
        name = self.alive[pid]
        self.log("is killed", name)
        before = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while any(found.pid == pid for found in self.store.claims()):
            if time.monotonic() - before > 10:
                break
        self.log("is free", name, after=time.monotonic() - before)
        del self.alive[pid]
        self.doomed.pop(pid, None)

    def reap(self) -> None:
        while self.alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (name := self.alive.pop(pid, None)) is not None:
                self.doomed.pop(pid, None)
                self.log("ended", name, status=status)

    def run(self, seconds: float, least: int, at_once: int) -> None:
        end = time.monotonic() + seconds
        probes = [self.probe(), self.probe()]
        again = time.monotonic() + 1
        while time.monotonic() < end or self.born < least:
            self.reap()
            while len(self.alive) < at_once:
                self.job()
            now = time.monotonic()
            for pid in [pid for pid, when in self.doomed.items() if when <= now]:
                self.kill(pid)
            holders = {found.pid for found in self.store.claims() if PROBE in found.parts and found.state == "held"}
            if now > again and holders & set(probes):
                (first,) = holders
                self.kill(first)
                probes = [*(pid for pid in probes if pid != first), self.probe()]
                again = now + self.rng.uniform(0.3, 1)
            time.sleep(0.02)
        for pid in probes:
            self.kill(pid)
        while self.alive:
            self.reap()
            time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def main() -> None:
    folder, log, seconds, least, at_once, seed = sys.argv[1:]
    Crowd(folder, Log(log), random.Random(int(seed))).run(float(seconds), int(least), int(at_once))


if __name__ == "__main__":
    main()
