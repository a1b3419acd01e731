"""Processes with leases on one card: how soon the next waiter has its lease, and whether anybody passes its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.child import Child, main
from bench.measure import Failed, Run, measure
from bench.programs.patterned import GIB, MIB, Arrays, Card, serve

JOBS: dict[str, dict[str, str]] = {
    "torch": {"torch": "100%"}, "tensorflow": {"tensorflow": "100%"}, "jax": {"jax": "100%"},
    "cupy and pycuda": {"cupy": "60%", "pycuda": "40%"},
}  # fmt: skip
"""The frameworks of each process that holds a lease at first, with their shares. Then PyTorch's end, one by one."""
WAITERS = 4
PIECE = 512 * MIB
WAITS = 0.5  # Seconds in which a waiter shows that it waits.
QUICK = {"torch": JOBS["torch"]}


@measure(
    "leases", unit={"turn": "s", "over": "MiB"}, bar={"turn": "<= 1", "over": "<= 0"},
    by={"turn": "high", "over": "high"}, seconds=50, whole_card=True,
    needs=("torch", "tensorflow", "jax", "cupy", "pycuda"),
)  # fmt: skip
def leases(run: Run) -> dict[str, list[float]]:
    """Seconds from the end of a process with a lease to the lease of the next waiter.

    turn   a little below 0 where the waiter has it before the kernel has reaped the other's PID
    over   what a process has at most by NVML, beyond its lease: the largest of them all has to be 0 or less
    """
    card, jobs = Card(), QUICK if run.quick else JOBS
    part = 60 if run.quick else 24  # four and no fifth; of 60 % one alone
    lease = card.total() * part // 100 // GIB * GIB
    most = GIB if run.quick else lease
    env = {"MEMGUARD_LEASES": str(run.folder / "leases"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    children = {name: run.start("job", name, lease, most, env=env, timeout=115) for name in jobs}
    waiters = [run.start("job", "torch", lease, most, env=env, timeout=115) for _ in range(run.rounds(WAITERS, 1))]
    every = [*children.values(), *waiters]
    for name, child in (*children.items(), *(("torch, a waiter", waiter) for waiter in waiters)):
        child.name = name
    turn: list[float] = []
    with Watcher(card) as watcher, ThreadPoolExecutor(len(every)) as threads:
        list(threads.map(lambda child: child.ask("load"), every))
        list(threads.map(lambda child: (child.ask("claim"), child.ask("fill")), children.values()))
        holders = dict(children)
        for waiter in waiters:
            claim = threads.submit(waiter.ask, "claim")
            time.sleep(WAITS)
            if claim.done():
                raise Failed(f"the lease was given beside {len(holders)} others: {claim.result()}")
            right(holders)
            watcher.look()
            holders.pop("torch").close()
            ended = time.monotonic()
            turn.append(claim.result()["at"] - ended)
            waiter.ask("fill")
            holders["torch"] = waiter
        right(holders)
        watcher.look()
        for child in holders.values():
            child.close()
    peaks = {child.pid: watcher.most.get(child.pid, 0) for child in every}
    if min(peaks.values()) < (0 if run.quick else lease * 3 // 4):
        raise Failed(f"by NVML the processes had {sorted(peaks.values())} of {lease} bytes at most")
    return {"turn": turn, "over": [(size - lease) / MIB for size in peaks.values()]}


def right(holders: Mapping[str, Child]) -> None:
    """Raise Failed if a holder's arrays have other values than they were given."""
    for name, child in holders.items():
        wrong = child.ask("check")["wrong"]
        if wrong:
            raise Failed(f"{name}: {wrong} arrays have other values")


class Watcher:
    """The most that each PID ever had on the card, by ten looks a second."""

    def __init__(self, card: Card) -> None:
        self._card, self._over = card, threading.Event()
        self.most: dict[int, int] = {}
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
        for pid, size in self._card.listed().items():
            self.most[pid] = max(self.most.get(pid, 0), size)


def program_job(name: str, lease: str, most: str) -> None:
    """Claims its lease, and fills its caps with values that it knows, up to so many bytes."""
    import memguard

    frameworks = [Arrays(one) for one in JOBS[name]]
    kept: list[tuple[Arrays, Any, int]] = []
    guard: Any = None

    def load() -> None:
        for one in frameworks:
            one.load()

    def claim() -> None:
        nonlocal guard
        device = {"limit": int(lease), "lease": True, "wait": "100s"}
        shares = {one: {"share": part} for one, part in JOBS[name].items()}
        guard = memguard.init({"version": 1, "device": device, "frameworks": shares})

    def fill() -> None:
        """All of the caps but what the read-back needs, and what allocators round."""
        caps = guard.plan.devices[0].caps
        for one in frameworks:
            one.begin()
            spared = max(caps[one.name] // 20, GIB)
            for seed in range(1, 1 + min(caps[one.name] - spared, int(most)) // PIECE):
                array = one.take(PIECE, seed)
                one.write(array, PIECE, seed)
                kept.append((one, array, seed))

    def check() -> dict[str, Any]:
        return {"wrong": sum(not one.right(array, PIECE, seed) for one, array, seed in kept)}

    serve({"load": load, "claim": claim, "fill": fill, "check": check})


if __name__ == "__main__":
    main({"job": program_job})
