"""Seeded schedules of six frameworks on the real GPU, judged by an oracle afterwards.

`schedules.py` generates and plays them, and `oracle.py` judges them. This module runs them on the real frameworks: it
fills every array with its own pattern and checks it at the free, and reads the process's memory from NVML."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.programs.patterned import GIB, Arrays, Card
from support import schedules
from support.oracle import FIXED, PAGE, Books, Refused, Terms, judge
from support.schedules import FRAMEWORKS, Step

LIMIT, RESERVE = 12 * GIB, 3 * GIB
"""The limit of one schedule: several run at the same time, each in its own process."""
ASKS = ("cupy", "pycuda", "numba")  # memguard's allocators serve these: they request room within an allocation.
TICK = 0.1  # The monitor's interval in seconds.
WAITS = 1  # Failing requests of TensorFlow and of JAX per schedule: each blocks for 10 s.
ROOMY = 0.6  # Their request has room if at most this share of the cap is live with it: their pools fragment.


class Most:
    """The peak of this process's GPU memory while the block runs: a thread samples NVML every 20 ms."""

    def __init__(self, card: Card) -> None:
        self._card, self._over, self.bytes = card, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Most:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, self._card.own())


def text_of(error: BaseException) -> str:
    """The recorded part of an error, without references that would keep its arrays alive."""
    return f"{type(error).__module__}.{type(error).__qualname__}: {str(error)[:300]}"


def played(seed: int, lends: bool = True) -> dict[str, Any]:
    """Play one schedule. Without `lends` the caps are fixed at their initial values."""
    import memguard

    agreed = schedules.terms(seed, LIMIT, RESERVE)._replace(kept={"pycuda": PAGE})
    steps = eased(schedules.schedule(seed, agreed), agreed)
    made = schedules.budget(agreed) if lends else fixed(agreed)
    guard: Any = memguard.init({**made, "monitor": {"interval": f"{TICK * 1e3:.0f}ms"}})
    frameworks = {name: Arrays(name) for name in FRAMEWORKS}
    for one in frameworks.values():
        one.load()
    for one in frameworks.values():
        one.begin()
    gc.collect()
    gc.freeze()
    memguard.trim()
    runner = Runner(guard, frameworks, Card(), lends)
    with Most(runner.card) as most:
        log = schedules.play(steps, runner, agreed)
    found = judge(log, agreed)
    return {
        "seed": seed, "limit": agreed.limit, "steps": len(steps), "requests": found.requests,
        "refused": sum(entry.refused is not None for entry in log), "infeasible": found.infeasible,
        "blocked": found.blocked, "fragments": dict(found.fragments), "avoidable": len(found.avoidable),
        "above_limit": len(found.above_limit), "minima": len(found.minima), "wrong": len(found.wrong),
        "faults": [fault.what[:600] for fault in found.faults[:6]],
        "most_process": max(most.bytes, *(entry.process for entry in log)),
        "by_framework": {name: sum(entry.op == "allocate" and entry.framework == name for entry in log)
                         for name in FRAMEWORKS},
    }  # fmt: skip


def fixed(agreed: Terms) -> dict[str, Any]:
    """Fixed caps in the proportions of the maxima, as in a budget without elastic caps."""
    shrinks = [name for name in FRAMEWORKS if name not in FIXED]
    left = agreed.room - sum(agreed.least(name) for name in FIXED)
    whole = sum(agreed.most(name) for name in shrinks)
    caps = {name: left * agreed.most(name) // whole for name in shrinks} | {name: agreed.least(name) for name in FIXED}
    return {
        "version": 1,
        "device": {"limit": agreed.limit, "reserve": agreed.reserve},
        "frameworks": {name: {"limit": caps[name]} for name in FRAMEWORKS},
    }


def eased(steps: Sequence[Step], agreed: Terms) -> list[Step]:
    """Drop all but the first requests of TensorFlow and JAX that may lack room, including those at peaks."""
    books, arrays, waits = Books(agreed), dict[int, tuple[str, int]](), dict.fromkeys(FIXED, 0)
    kept: list[Step] = []

    def wanted(name: str, size: int) -> bool:
        if name not in FIXED or books.live(name) + size <= ROOMY * books.most(name):
            return True
        waits[name] += 1
        return waits[name] <= WAITS

    for step in steps:
        if step.op == "free" and step.block in arrays:
            books.remove(*arrays.pop(step.block))
        if step.op not in ("allocate", "peak"):
            kept.append(step)
            continue
        sizes, within = [], []
        for size in step.sizes:
            if not wanted(step.framework, size):
                continue
            sizes.append(size)
            if books.fits(step.framework, size):
                books.add(step.framework, size)
                within.append(size)
        if sizes:
            kept.append(step._replace(sizes=tuple(sizes)))
        if step.op == "peak":
            for size in within:
                books.remove(step.framework, size)
        elif within:
            arrays[step.block] = step.framework, within[0]
    return kept


class Runner:
    """`schedules.Runner` on the real frameworks, with the schedule's threads."""

    def __init__(self, guard: Any, frameworks: Mapping[str, Any], card: Any, lends: bool = True) -> None:
        self.guard, self.frameworks, self.card, self.lends = guard, frameworks, card, lends
        self._device = guard.plan.devices[0].device
        self._number = 0
        self._context: Any = None
        if "pycuda" in frameworks and isinstance(frameworks["pycuda"], Arrays):
            import pycuda.driver as drv

            self._context = drv.Context.get_current()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Create PyCUDA's context on the playing thread and detach it afterwards: at exit an attached one would
        abort."""
        if self._context is None:
            yield
            return
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()

    def allocate(self, framework: str, size: int) -> object | Refused:
        one = self.frameworks[framework]
        self._number += 1
        with self._current():
            try:
                if self.lends and framework not in ASKS:
                    import memguard

                    array = memguard.retry.call(one.take, size, self._number)
                else:
                    array = one.take(size, self._number)
            except Exception as error:
                return Refused(text_of(error))
            one.write(array, size, self._number)
        return [array, size, self._number]

    def free(self, framework: str, array: Any) -> bool:
        with self._current():
            right = bool(self.frameworks[framework].right(*array))
            array.clear()
        return right

    def idle(self) -> None:
        time.sleep(2 * TICK)

    def held(self) -> Mapping[str, int | None]:
        return {name: self._held(name) for name in self.frameworks}

    def _held(self, name: str) -> int | None:
        usage = self.guard.frameworks[name].usage(self._device)
        return 0 if usage is None else usage.held

    def held_by_process(self) -> int:
        return int(self.card.own())

    def trimmed(self) -> Mapping[str, int | None]:
        """Trim each framework through its adapter's `trim`, because memguard implements PyCUDA's and Numba's caches."""
        with self._current():
            for name in self.frameworks:
                self.guard.frameworks[name].trim(self._device)
        return self.held()
