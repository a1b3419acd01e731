"""Two jobs of 44 GiB take turns on what a card of 80 GB has, through `on_wait: suspend-idle`; and without that.

A third process has a lease of all that such a card would not have, and fills it. Who is on the card is what NVML says
to this process, which is none of them; what is leased is what `memguard leases --json` prints, once a second.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _leases_turn_job import REHEARSAL
from _run import GIB, MIB, ROOT
from _suspend_children import Broke, Child, apart, end, host_bytes, surroundings
from _suspend_rounds import available

LEASE = 44 * GIB
ROOM = 81_079 * MIB
"""What CUDA can give of an H100 of 80 GB: that much is left for the two."""
COUNT = 3
"""Turns of each."""
ON_DEMAND, WORK, PAUSE = 3, 4.0, 12.0
"""Seconds without work after which a job may be asked to leave, of work in each turn, and of a pause after it."""
AT_MOST = 340.0
"""Seconds after which the turns are over, whatever has come of them."""
WAIT = 10
"""Seconds for which the second waits without suspend-idle."""
NAMES = ("first", "second")
Tell = Callable[[dict[str, Any]], object]


def budget(wait: float, idle: bool) -> dict[str, Any]:
    """The memory of a virtual machine may grow as it is used: what is available at first says nothing there."""
    device: dict[str, Any] = {"limit": f"{LEASE // GIB}GiB", "lease": True, "wait": f"{wait:.0f}s"}
    if idle:
        device["on_wait"] = "suspend-idle"
    suspend = {"on_demand": f"{ON_DEMAND}s", "host_memory": "ignore"}
    return {"version": 1, "device": device, "frameworks": {"torch": {"share": "100%"}}, "suspend": suspend}


class Card:
    """The first GPU, by NVML; in a rehearsal who holds a lease there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if REHEARSAL is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
            self._stamps: dict[int, int] = {}

    def look(self) -> tuple[int, int, dict[int, int]]:
        """Total, free, and bytes by PID."""
        if REHEARSAL is not None:
            from _leases_stand_in import TOTAL, leased

            held = leased(self._folder)
            return TOTAL, TOTAL - sum(held.values()), held
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return int(memory.total), int(memory.free), {one.pid: one.usedGpuMemory or 0 for one in running}

    def used(self, pid: int) -> str:
        """What NVML says of a process's use of the card since it was asked last: what idleness is read from."""
        if REHEARSAL is not None:
            return "idle"
        try:
            found = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._stamps.get(pid, 0))
        except self._nvml.NVMLError as error:
            return "idle" if "Not Found" in str(error) else str(error)
        fresh = [one for one in found if one.timeStamp > self._stamps.get(pid, 0)]
        self._stamps[pid] = max((one.timeStamp for one in fresh), default=self._stamps.get(pid, 0))
        return "at work" if any(one.pid == pid and (one.smUtil or one.memUtil) for one in fresh) else "idle"


class Watch:
    """What NVML and the leases say, until the block ends. Two threads."""

    def __init__(self, card: Card, pids: dict[str, int]) -> None:
        self._card, self._pids, self._over = card, pids, threading.Event()
        self._environ = environment()
        self.nvml: dict[str, Any] = {
            "looks": 0, "both": 0, "over": 0, "least_free": None, "most": dict.fromkeys(pids, 0), "changes": [],
        }  # fmt: skip
        self.leases: dict[str, Any] = {
            "looks": 0, "wrong_sums": 0, "both": 0, "above": 0, "failed": [], "states": [], "notes": [],
        }  # fmt: skip
        self.use: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self.most_host = 0
        self._began = time.monotonic()
        self._threads = [threading.Thread(target=self._each, args=one, daemon=True) for one in self._work()]

    def _work(self) -> list[tuple[Callable[[], object], float]]:
        return [(self.look, 0.05), (lambda: self.see(self._listing()), 1.0)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def _each(self, work: Callable[[], object], pause: float) -> None:
        while not self._over.wait(pause):
            try:
                work()
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if len(self.leases["failed"]) < 5:
            self.leases["failed"].append(f"{type(error).__name__}: {error}"[:300])

    def _at(self) -> float:
        return round(time.monotonic() - self._began, 2)

    def look(self) -> None:
        """By NVML, and what the two have in host memory together."""
        total, free, listed = self._card.look()
        seen, on = self.nvml, [name for name in NAMES if self._pids[name] in listed]
        seen["looks"] += 1
        seen["both"] += len(on) == 2
        seen["over"] += sum(listed.values()) > total
        seen["least_free"] = min(free, free if seen["least_free"] is None else seen["least_free"])
        for name, pid in self._pids.items():
            seen["most"][name] = max(seen["most"][name], listed.get(pid, 0))
        if not seen["changes"] or seen["changes"][-1][1] != on:
            seen["changes"].append([self._at(), on])
        with contextlib.suppress(OSError, KeyError):  # one has ended
            self.most_host = max(self.most_host, sum(host_bytes(self._pids[name]) for name in NAMES))

    def _listing(self) -> dict[str, Any]:
        for name in NAMES:
            said = self._card.used(self._pids[name])
            self.use[name][said] = self.use[name].get(said, 0) + 1
        return listing(self._environ)

    def see(self, listed: dict[str, Any]) -> None:
        """One listing of `memguard leases`, judged by its own claims."""
        seen = self.leases
        seen["looks"] += 1
        seen["wrong_sums"] += listed["database"] != "ok"
        names = {pid: name for name, pid in self._pids.items()}
        for gpu in listed["gpus"]:
            held = [claim for claim in gpu["claims"] if claim["state"] == "held"]
            whole = sum(claim["bytes"] for claim in held)
            right = gpu["leased"] == whole <= gpu["total"] and gpu["free"] == gpu["total"] - whole
            jobs = [claim for claim in gpu["claims"] if names.get(claim["pid"]) in NAMES]
            right = right and all(claim["bytes"] == LEASE for claim in jobs)
            seen["wrong_sums"] += not right
            seen["both"] += sum(claim in held for claim in jobs) == 2
            seen["above"] += any((claim["used"] or 0) > claim["bytes"] for claim in held)
            states = {names[claim["pid"]]: claim["state"] for claim in jobs}
            if not seen["states"] or seen["states"][-1][1] != states:
                seen["states"].append([self._at(), states])
        for note in listed["notes"]:
            if note not in seen["notes"] and len(seen["notes"]) < 5:
                seen["notes"].append(note)

    def as_dict(self) -> dict[str, Any]:
        return {"nvml": self.nvml, "leases": self.leases, "use": self.use, "most_host": self.most_host}


def environment() -> dict[str, str]:
    """Of a process in this scenario. Its leases are those of `apart`, on whose thread this must be called."""
    more = {} if REHEARSAL is None else {"MEMGUARD_LEASES_REHEARSAL": REHEARSAL}
    return surroundings(ROOT, MEMGUARD_LEASES="", **more)


def listing(environ: dict[str, str]) -> dict[str, Any]:
    words = [sys.executable, "-m", "memguard", "leases", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, env=environ)
    if done.returncode:
        raise RuntimeError(f"memguard leases: rc {done.returncode}: {done.stderr[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def process(name: str) -> Child:
    more = {} if REHEARSAL is None else {"MEMGUARD_LEASES_REHEARSAL": REHEARSAL}
    return Child("_leases_turn_job.py", name, env={**more, "MEMGUARD_LEASES": ""})


def _over(child: Child) -> None:
    end(child)
    for pipe in (child.process.stdin, child.process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def started(card: Card) -> Iterator[tuple[dict[str, Child], int, int]]:
    """Two jobs that have imported all, and the placeholder at its place: its lease, and what is free beside it."""
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name in ("placeholder", *NAMES):
            jobs[name] = process(name)
            stack.callback(_over, jobs[name])
            jobs[name].touched = REHEARSAL is None and name in NAMES  # they are off their GPU before they may be killed
            jobs[name].send("load")
        for child in jobs.values():
            child.answer(120, "load")
        lease = jobs["placeholder"].must("room", 60, leave=ROOM)["lease"]
        yield jobs, lease, card.look()[1]


def turns(folder: Path, tell: Tell) -> dict[str, Any]:
    """Three turns of each, then the first comes back by itself. `tell` hears what was seen by then, at each turn."""
    began = time.monotonic()
    found: dict[str, Any] = {"turns": {name: [] for name in NAMES}, "available": available(), "broke": []}
    card = Card(folder)
    with started(card) as (jobs, lease, room):
        found.update(placeholder=lease, room=room, began_s=round(time.monotonic() - began, 1))
        pids = {name: child.pid for name, child in jobs.items()}
        with Watch(card, pids) as watch:

            def so_far() -> None:
                tell({**found, **watch.as_dict(), "returncode": 1, "stderr_tail": "it was cut off"})

            until = time.monotonic() + AT_MOST
            with ThreadPoolExecutor(2) as threads:
                each = [threads.submit(_takes, name, jobs[name], found, until, so_far) for name in NAMES]
                for name, one in zip(NAMES, each, strict=True):
                    try:
                        one.result()
                    except Exception as error:
                        found["broke"].append(f"{name}: {error}"[:900])
            if not found["broke"]:
                found["alone"] = _alone(jobs)
        found.update(watch.as_dict())
    found["left"] = _left(card, pids)
    found["available_after"] = available()
    broke = found["broke"]
    return {**found, "returncode": 1 if broke else 0, **({"stderr_tail": "; ".join(broke)} if broke else {})}


def _takes(name: str, child: Child, found: dict[str, Any], until: float, told: Callable[[], None]) -> None:
    """One job's turns, noted as they end. The second asks once the first is there."""
    if name == NAMES[1]:
        while "first" not in found.get("filled", {}):
            if time.monotonic() > until or found["broke"]:
                raise Broke("the first did not begin")
            time.sleep(0.05)
    begun = child.must("begin", max(until - time.monotonic(), 1), budget=budget(AT_MOST, True))
    if "refused" in begun:
        raise Broke(f"no lease: {begun['refused']}")
    found.setdefault("filled", {})[name] = begun["bytes"]
    child.send("turns", count=COUNT, work=WORK, pause=PAUSE)
    for number in range(COUNT):
        answer = child.answer(max(until - time.monotonic(), 1), f"turn {number + 1}")
        if answer.get("error"):
            raise Broke(f"turn {number + 1}: {answer['error']['text']}")
        if number == 0:  # it asked when it began
            answer["asked"], answer["served"] = begun["asked"], begun["served"]
        found["turns"][name].append(answer)
        told()


def _alone(jobs: dict[str, Child]) -> dict[str, Any]:
    """The second ends. Nobody needs the first just then, and it comes back all the same."""
    first, second = (jobs[name] for name in NAMES)
    for child in (first, second):
        child.answer(PAUSE + 10, "the end of its turns")
    ended = time.monotonic()
    second.must("leave", 60)
    second.process.wait(30)
    until = time.monotonic() + 60
    while "held" not in [one["state"] for one in _claims() if one["pid"] == first.pid]:
        if time.monotonic() > until:
            raise Broke("the first did not have its lease again")
        time.sleep(0.2)
    back = first.must("check", 90)
    first.must("leave", 60)
    first.process.wait(30)
    return {"ended": ended, **back}


def _claims() -> list[dict[str, Any]]:
    return [claim for gpu in listing(environment())["gpus"] for claim in gpu["claims"]]


def _left(card: Card, pids: dict[str, int]) -> dict[str, Any]:
    """What is there still after all have ended."""
    listed = card.look()[2]
    return {"listed": sorted(name for name, pid in pids.items() if pid in listed), "claims": len(_claims())}


def without(folder: Path, tell: Tell) -> dict[str, Any]:
    """The control: the second has no `on_wait`, and the first would leave if it were asked."""
    card = Card(folder)
    with started(card) as (jobs, lease, room):
        first, second = (jobs[name] for name in NAMES)
        begun = first.must("begin", 60, budget=budget(AT_MOST, True))
        refused = second.must("begin", WAIT + 60, budget=budget(WAIT, False))
        listed = card.look()[2]
        answer = first.must("check", 60)
        found = {
            "returncode": 0, "placeholder": lease, "room": room, "filled": begun["bytes"], "first": first.pid,
            "refused": refused.get("refused"), "waited": refused.get("waited"), "wrong": answer["wrong"],
            "out": len(answer["out"]), "listed": [child.pid in listed for child in (first, second)],
        }  # fmt: skip
        for child in (first, second):
            child.must("leave", 60)
            child.process.wait(30)
    return found


@contextlib.contextmanager
def where() -> Iterator[Path]:
    """Where the leases of one scenario lie. Its processes find them by XDG_RUNTIME_DIR."""
    with apart():
        yield Path(surroundings()["XDG_RUNTIME_DIR"])
