"""Drive frameworks to their caps in one process, through their own allocators, for the tests of `tests/gpu`.

Only records; the tests judge. Sizes are bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from bench.programs import six
from bench.programs.six import GIB, MIB, NAMES, WORK, all_live, allocator, load, reading, row_of
from bench.programs.six import RETURNING as COUNTED
from bench.programs.six import SHARES as SIX
from support.independent import emptied, raw_memory

__all__ = ["COUNTED", "GIB", "MIB", "NAMES", "SIX", "WORK", "all_live", "allocator", "load", "reading", "row_of"]
SEED = 20261121
MAIN = {"tensorflow": "30%", "torch": "50%", "pycuda": "20%"}  # The main job's caps.


def budget(shares: dict[str, str], limit: str = "40GiB") -> dict[str, Any]:
    return six.budget(limit, shares)


def budget_of_six(**tensorflow: Any) -> dict[str, Any]:
    return six.budget("40GiB", **tensorflow)


def capped(cap: str | int, *names: str, limit: str | int = "40GiB") -> dict[str, Any]:
    return {"version": 1, "device": {"limit": limit}, "frameworks": {name: {"limit": cap} for name in names}}


class Driven(six.Driven):
    """`six.Driven` that also records the text of each refusal, of any type."""

    def __init__(self, name: str, cap: int, seed: int = SEED) -> None:
        super().__init__(name, cap, seed)
        self.slack = 0  # bytes of the cap that cannot be allocated
        self.refusals: list[dict[str, Any]] = []

    def would_fit(self, size: int) -> bool | None:
        """Compute it from the framework's own figures and rules at its refusal. None if the driver is measured instead
        (`refusals`) or the framework's log states it (TensorFlow)."""
        if self.name == "torch":
            import torch

            rounded = -(-size // 512) * 512
            small, page = rounded <= MIB, 2 * MIB
            segment = page if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // page) * page
            return bool(torch.cuda.memory_stats()["reserved_bytes.all.current"] + segment <= self.cap - self.slack)
        if self.name != "jax":
            return None
        import jax

        stats = jax.local_devices()[0].memory_stats()
        rounded = -(-size // 256) * 256
        return bool(rounded <= max(stats["bytes_limit"] - stats["pool_bytes"], stats["largest_free_block_bytes"]))

    def until_refused(self, low: int, high: int) -> None:
        for _ in range(200_000):
            size = self.rng.randint(low, high)
            try:
                self.live.append(self.take(size))
            except Exception as error:
                self.refusals.append(
                    {
                        "refused_bytes": size,
                        "exception": f"{type(error).__module__}.{type(error).__qualname__}: {str(error)[:160]}",
                        "native": isinstance(error, self.native),
                        "would_have_fitted": self.would_fit(size),
                    }
                )
                return
            self.most = max(self.most, self.held())
        raise AssertionError(f"{self.name}: no refusal")

    def fill(self) -> None:
        self.until_refused(1 * MIB, 300 * MIB)
        self.until_refused(1, 1 * MIB)

    def free(self, count: int | None = None) -> None:
        if count is None:
            self.live.clear()
        else:
            self.rng.shuffle(self.live)
            del self.live[:count]

    def swap(self) -> None:
        """Free one array and allocate the same size again, which fits into the freed space."""
        one = self.live.pop(self.rng.randrange(len(self.live)))
        size = one.nbytes if hasattr(one, "nbytes") else int(one.shape[0]) * 4  # JAX, TensorFlow
        del one
        self.live.append(self.take(size))

    def summary(self) -> dict[str, Any]:
        return {"cap": self.cap, "most_held": max(self.most, self.held()), "refusals": self.refusals}


def together(shares: dict[str, str], again: bool) -> dict[str, Any]:
    """Fill each framework while the others stay full, empty each, and allocate raw memory outside their pools.

    again    drive each to its refusal once more while the others are full; otherwise PyTorch and PyCUDA alternately
             free and allocate at their caps for six seconds
    """
    import memguard

    guard, readings = all_live(six.budget("40GiB", shares), shares)
    caps = dict(guard.plan.devices[0].caps)
    driven = {name: Driven(name, caps[name], SEED + i) for i, name in enumerate(shares)}
    for one in driven.values():
        one.fill()
        readings.append(reading())
    time.sleep(1)  # all full: a sampler of 20 ms records it
    churned = churn([driven[name] for name in ("torch", "pycuda")], 0 if again else 6)
    for one in driven.values() if again else ():
        one.free()
        one.fill()
        readings.append(reading())
    readings.append(reading())
    time.sleep(1)
    in_turn = {
        name: emptied(
            name, lambda name=name: row_of(name)["held"], lambda name=name: (driven[name].free(), memguard.trim(name)),
            lambda: reading()["overhead"],
        )
        for name in shares if name in COUNTED
    }  # fmt: skip
    for one in driven.values():
        one.free()
    memguard.trim()
    readings.append(reading())
    raw = raw_memory(lambda: int(reading()["unaccounted"]))
    for name in shares:
        WORK[name]()
    readings.append(reading())
    return {
        "caps": caps, "reserve": guard.plan.devices[0].reserve, "churn": churned, "readings": readings,
        "driven": {name: one.summary() for name, one in driven.items()}, "emptied": in_turn, "raw": raw,
    }  # fmt: skip


def churn(driven: list[Driven], seconds: float) -> dict[str, int]:
    """Alternately free and allocate a few arrays, refusals included. TensorFlow would retry each one for ten
    seconds."""
    counts = {"allocated": 0, "refused": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for one in driven:
            one.free(one.rng.randint(1, 4))
            before = len(one.live)
            one.until_refused(1, 300 * MIB)
            counts["allocated"] += len(one.live) - before
            counts["refused"] += 1
    return counts


def loop(limit: str, seconds: float) -> dict[str, Any]:
    """Hold all six at their caps, freeing and allocating in turn, refusals included; read the ledger each second.
    TensorFlow runs without growth: it then reports its pool, and `unaccounted` contains none of it."""
    guard, _ = all_live(six.budget(limit, growth=False))
    caps = guard.plan.devices[0].caps
    driven = {name: Driven(name, caps[name], SEED + 100 + i) for i, name in enumerate(NAMES)}
    for one in driven.values():
        one.fill()
    series = [reading()]
    started = time.monotonic()
    refused = dict.fromkeys(NAMES, 0)
    slow_after = dict.fromkeys(("tensorflow", "jax"), 0.0)  # each of them takes ten seconds to refuse
    following = 0.0

    def look() -> None:
        """Take a reading if the last one is a second old. Called after each refusal, because ten of them take
        seconds."""
        nonlocal following
        elapsed = time.monotonic() - started
        if elapsed >= following:
            series.append(reading())
            following = elapsed + 1.0

    while time.monotonic() - started < seconds:
        for name, one in driven.items():
            look()
            elapsed = time.monotonic() - started
            slow = name in slow_after
            if slow and elapsed < slow_after[name]:
                for _ in range(20):
                    one.swap()
                continue
            for _ in range(1 if slow else 10):
                one.free(one.rng.randint(1, 8))
                one.until_refused(1 * MIB, 200 * MIB)
                refused[name] += 1
                look()
            if slow:
                slow_after[name] = elapsed + 60.0
    unaccounted = [r["unaccounted"] for r in series]
    outside = [r["unaccounted"] + r["overhead"] for r in series]  # a leak may be in either
    return {
        "seconds": time.monotonic() - started, "refused": refused,
        "not_native": [r for one in driven.values() for r in one.refusals if not r["native"]],
        "fitted": [r for r in driven["jax"].refusals if r["would_have_fitted"]],
        "held": {name: (max(one.most, one.held()), one.cap) for name, one in driven.items()}, "readings": len(series),
        "sum_minus_total": max(abs(r["sum_minus_total"]) for r in series),
        "unaccounted_drift": max(abs(value - unaccounted[0]) for value in unaccounted),
        "outside_drift": max(abs(value - outside[0]) for value in outside),
    }  # fmt: skip


def in_order(names: Iterable[str], cap: int = GIB) -> dict[str, Any]:
    """Import frameworks in this order under one budget: each must work and stop at its cap."""
    import memguard

    names = list(names)
    guard, _ = all_live(capped(cap, *names, limit=cap * len(names) + 2 * GIB), names)
    found: dict[str, Any] = {}
    for name in names:
        one = Driven(name, cap)
        one.until_refused(64 * MIB, 64 * MIB)
        found[name] = {**one.summary(), "allocated": 64 * MIB * len(one.live)}
        one.free()
    for name in reversed(names):
        WORK[name]()
    part = memguard.ledger().devices[0]
    return {
        "found": found, "enforcement": {name: part.row(name).enforcement for name in names}, **reading(),
        "reserve": guard.plan.devices[0].reserve,
    }  # fmt: skip


def circumstance(name: str, when: str) -> dict[str, Any]:
    """For a framework imported after `init`, imported before it, or initialised before it: does a cap of 2 GiB hold,
    and does `shutdown` undo it?"""
    import memguard

    if when == "imported" and name == "pycuda":
        import pycuda.driver
        import pycuda.gpuarray  # noqa: F401 (its defaults already reference mem_alloc)
    elif when != "later":
        load(name)
    take = allocator(name)[0] if when == "live" else None
    before = [take(64 * MIB) for _ in range(40)] if take is not None else []  # 2.5 GiB: above the cap
    try:
        guard = memguard.init(capped("2GiB", name, limit="8GiB"))
    except memguard.CapNotApplied as error:
        return {"too_late": str(error)}
    load(name)
    one = Driven(name, guard.plan.devices[0].caps[name])
    one.until_refused(64 * MIB, 64 * MIB)
    enforcement = memguard.ledger().devices[0].row(name).enforcement
    if name == "pycuda":
        import numpy as np
        import pycuda.gpuarray as gpuarray

        try:
            gpuarray.zeros(one.cap, np.uint8)
            one.refusals.append({"native": False, "exception": "gpuarray.zeros was not refused"})
        except one.native:
            pass
    summary = one.summary()
    stays = memguard.shutdown()
    beyond = []
    try:
        while len(beyond) < 40:
            beyond.append(one.take(64 * MIB))
    except one.native:
        pass
    return {
        **summary, "enforcement": enforcement, "notes": guard.notes, "stays": stays, "taken": len(one.live) * 64 * MIB,
        "before": len(before) * 64 * MIB, "undone": len(beyond) == 40,
    }  # fmt: skip


def bfc_refusals(log: str) -> list[dict[str, Any]]:
    """The figures that TensorFlow's allocator logs at each refusal, as printed (two decimals)."""
    size = r"([\d.]+)([KMGT]i)?B"
    pattern = rf"Total size in pool: {size} memory_limit_: {size} available size: {size}"
    scale = {"": 1, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}
    found = []
    for match in re.finditer(pattern, log):
        pool, limit, available = (float(match[i]) * scale[match[i + 1] or ""] for i in (1, 3, 5))
        found.append({"text": match[0], "pool": int(pool), "memory_limit": int(limit), "available": int(available)})
    return found
