"""One hour of simulated time: six simulated frameworks under one budget, at their caps, and a ledger each second.

Everything goes through memguard's public functions, on a simulated H200. The clock is this file's own: an hour takes as
long as the computing does. No figure of it was measured on a GPU.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from typing import Any

import memguard
from bench.programs import six
from memguard import BudgetExceeded
from memguard._frameworks.simulated.adapter import oom_type

MIB = 1 << 20
SECONDS = 3600.0
DRIFT = 64 * MIB  # What `unaccounted` may move by.
_EVERY = {"step": 0.1, "ledger": 1.0, "trim": 45.0}
"""Simulated seconds: between two steps of one framework and between two trims on the average, between two ledgers."""


class Mixed:
    """One framework's part of the loop: it fills up until it is refused, gives some back, and begins anew."""

    def __init__(self, name: str, framework: Any, cap: int, rng: random.Random) -> None:
        self.name, self.framework, self.cap, self.rng = name, framework, cap, rng
        self.live: list[int] = []
        self.keep = 0  # so many arrays are left when it fills up again; fewer live means that it is filling
        self.draining = False
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        if self.draining and len(self.live) > self.keep:
            self._free()
            return
        self.draining = False
        if self.live and self.rng.random() < 0.2:
            self._free()
        else:
            self._allocate()

    def _free(self) -> None:
        at = self.rng.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        self.framework.free(self.live.pop())

    def _allocate(self) -> None:
        size = int(2 ** self.rng.uniform(9, 28.2))  # 512 bytes to 300 MiB, as many small ones as large ones
        if self.rng.random() < 0.01:
            size = int(self.cap * self.rng.uniform(0.1, 0.9))
        admitted = self._admitted(size) if self.rng.random() < 0.1 else None
        try:
            self.live.append(self.framework.allocate(size))
        except Exception as error:
            self.seen["refused"] += 1
            self.seen["refused with another error"] += not isinstance(error, oom_type(self.name))
            self.draining, self.keep = True, int(len(self.live) * self.rng.uniform(0, 0.95))
        else:
            self.seen["allocated"] += 1
            self.seen["served after require refused"] += admitted is False

    def _admitted(self, size: int) -> bool:
        self.seen["required"] += 1
        try:
            memguard.require(self.name, size)
        except BudgetExceeded:
            self.seen["require refused"] += 1
            return False
        return True


class Readings:
    """Every ledger, and what of it would be wrong."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unaccounted: list[int] = []
        self.most = Counter[str]()
        self.overhead = self.process = self.sum_minus_total = self.over_cap = self.over_limit = 0

    def add(self) -> None:
        (part,) = memguard.ledger().devices
        unaccounted, process = part.row("unaccounted").bytes, part.process
        assert unaccounted is not None and process is not None
        self.unaccounted.append(unaccounted)
        self.process = max(self.process, process)
        self.over_limit += process > self.limit
        self.overhead = max(self.overhead, part.row("overhead").bytes or 0)
        self.sum_minus_total = max(self.sum_minus_total, abs(sum(r.bytes or 0 for r in part.rows) - part.device.total))
        for row in part.rows:
            if row.kind == "framework":
                assert row.bytes is not None and row.cap is not None and row.at_least is None, row
                self.most[row.name] = max(self.most[row.name], row.bytes)
                self.over_cap += row.bytes > row.cap


def simulated_hour(seed: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Run the loop for that many simulated seconds; bytes, and counts by framework."""
    started = time.perf_counter()
    guard = memguard.init(six.budget("40GiB", growth=False), simulate="h200")
    try:
        rng = random.Random(seed)
        part = guard.plan.devices[0]
        mixed = {name: Mixed(name, guard.frameworks[name], part.caps[name], rng) for name in six.NAMES}
        readings = Readings(part.limit)
        for one in mixed.values():  # all live before the first ledger
            one.live.append(one.framework.allocate(MIB))
        events = [(rng.expovariate(1 / _EVERY["step"]), name) for name in mixed]
        events += [(0.0, "ledger"), (rng.expovariate(1 / _EVERY["trim"]), "trim")]
        heapq.heapify(events)
        trims = returned = steps = 0
        while events[0][0] <= seconds:
            now, what = events[0]
            if what == "ledger":
                readings.add()
            elif what == "trim":
                returned += memguard.trim(rng.choice([None, *mixed]))
                trims += 1
            else:
                mixed[what].step()
                steps += 1
            wait = _EVERY["ledger"] if what == "ledger" else rng.expovariate(1 / _EVERY.get(what, _EVERY["step"]))
            heapq.heapreplace(events, (now + wait, what))
        counts = {key: {name: one.seen[key] for name, one in mixed.items()} for key in (
            "allocated", "refused", "refused with another error", "required", "require refused",
            "served after require refused",
        )}  # fmt: skip
        first = readings.unaccounted[0]
        return {
            "simulated": True, "seed": seed, "seconds": seconds,
            "real_seconds": round(time.perf_counter() - started, 1), "limit": part.limit, "reserve": part.reserve,
            "caps": dict(part.caps), "steps": steps, **{key.replace(" ", "_"): value for key, value in counts.items()},
            "trims": trims, "trimmed": returned, "readings": len(readings.unaccounted), "unaccounted_first": first,
            "unaccounted_drift": max(abs(value - first) for value in readings.unaccounted),
            "unaccounted_range": [min(readings.unaccounted), max(readings.unaccounted)],
            "sum_minus_total": readings.sum_minus_total, "most_held": dict(readings.most),
            "readings_over_cap": readings.over_cap, "most_process": readings.process,
            "readings_over_limit": readings.over_limit, "overhead": readings.overhead,
            "notes": list(memguard.ledger().notes),
        }  # fmt: skip
    finally:
        memguard.shutdown()


def wrong(outcome: dict[str, Any]) -> list[str]:
    """What of the outcome does not hold, as sentences; an empty list where all does."""
    found = {
        f"unaccounted drifts by {outcome['unaccounted_drift'] / MIB:.1f} MiB": outcome["unaccounted_drift"] > DRIFT,
        "a framework was never refused": not all(outcome["refused"].values()),
        "a refusal was not the framework's own error": any(outcome["refused_with_another_error"].values()),
        "require refused what was served": any(outcome["served_after_require_refused"].values()),
        "a framework held more than its cap": outcome["readings_over_cap"] > 0,
        "the process held more than its limit": outcome["readings_over_limit"] > 0,
        "the rows do not sum to the total": outcome["sum_minus_total"] != 0,
    }
    return [sentence for sentence, holds in found.items() if holds]
