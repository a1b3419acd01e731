"""Timelines for the tests of reports: what memguard's writer wrote of simulated frameworks, on a clock of its own."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timelines import START, Clock, busy, plan_of

import memguard
from memguard._base.types import Event
from memguard._base.units import GIB, MIB
from memguard._runtime import pressure
from memguard._timeline.writer import Writer

EVERY = 0.5
SIX = ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba")
VERSIONS = {"torch": {"version": "2.11.0"}, "tensorflow": {"version": "2.21.0"}, "jax": {"version": "0.11.2"}}


def budget(torch: str = "14GiB", gpu_limit: str = "40GiB") -> dict[str, Any]:
    """A budget of all six; `growth` leaves TensorFlow's pool silent about what it holds."""
    return {
        "version": 1,
        "device": {"limit": gpu_limit, "reserve": "2GiB"},
        "frameworks": {
            "torch": {"limit": torch}, "tensorflow": {"limit": "8GiB"}, "jax": {"limit": "6GiB"},
            "cupy": {"limit": "4GiB"}, "pycuda": {"limit": "2GiB"}, "numba": {"limit": "1GiB"},
        },
    }  # fmt: skip


class Load:
    """What one framework does: it keeps `base` bytes, and `wave` more come and go every `period` steps."""

    def __init__(self, name: str, base: int, wave: int, period: int, piece: int, rng: random.Random) -> None:
        self.name, self.base, self.wave, self.period, self.piece, self.rng = name, base, wave, period, piece, rng
        self.live: list[tuple[int, Any]] = []

    def wanted(self, step: int) -> int:
        ramp = min(step / 40, 1.0)
        phase = (step % self.period) / self.period
        level = math.sin(math.pi * phase) ** 2 if self.name != "torch" else min(phase * 1.3, 1.0) * (phase < 0.85)
        return int(self.base * ramp + self.wave * level * ramp)

    def step(self, framework: Any, step: int) -> None:
        wanted = self.wanted(step)
        have = sum(size for size, _ in self.live)
        while have > wanted + self.piece and self.live:
            size, block = self.live.pop(self.rng.randrange(len(self.live) // 2, len(self.live)))
            framework.free(block)
            have -= size
        while have < wanted - self.piece:
            size = int(self.piece * self.rng.uniform(0.5, 1.5))
            self.live.append((size, framework.allocate(size)))
            have += size


def loads(rng: random.Random, torch: float = 1.0) -> list[Load]:
    return [
        Load("torch", int(4.5 * torch * GIB), int(6 * torch * GIB), 60, 96 * MIB, rng),
        Load("tensorflow", 2 * GIB, 3 * GIB, 95, 64 * MIB, rng),
        Load("jax", 2 * GIB, 2 * GIB, 41, 64 * MIB, rng),
        Load("cupy", 512 * MIB, 2 * GIB, 33, 48 * MIB, rng),
        Load("pycuda", 768 * MIB, 512 * MIB, 120, 32 * MIB, rng),
        Load("numba", 256 * MIB, 256 * MIB, 20, 16 * MIB, rng),
    ]


def record(
    folder: Path, name: str = "run", steps: int = 400, *, seed: int = 7, torch: float = 1.0, cap: str = "14GiB",
    gpus: tuple[str, ...] = ("h200",), clock: Clock | None = None,
) -> Path:  # fmt: skip
    """Train for so many samples: waves of six frameworks, an out-of-memory error of torch, pressure, a suspension."""
    clock, rng = clock or Clock(), random.Random(seed)
    guard = memguard.init(budget(cap), simulate=list(gpus))
    settings, state = pressure.Settings(names={part.device.uuid: "" for part in guard.plan.devices}), pressure.START
    path = folder / f"{name}-{{pid}}-{{rank}}.jsonl"
    try:
        with Writer(path, guard.plan, clock=clock, rank=0, frameworks=VERSIONS) as writer:
            chosen = loads(rng, torch)
            for step in range(steps):
                clock.now = round(clock.now + EVERY, 3)
                for load in chosen:
                    _step(writer, guard, load, step, clock)
                if step == steps * 6 // 10:
                    _too_large(writer, guard, chosen[0], clock)
                if step == steps * 8 // 10:
                    writer.event(Event(clock.now, "suspended", "the process left its GPUs", seconds=1.4, bytes=9 * GIB))
                    clock.now += 20.0
                    writer.event(Event(clock.now, "resumed", "the process is back", seconds=2.0, bytes=9 * GIB))
                sample = guard.sample()._replace(time=clock.now)
                writer.sample(sample)
                state, actions = pressure.decide(settings, sample, state)
                for action in actions:
                    if action.kind == "callback":
                        writer.event(action.event)
            return Path(writer.path)
    finally:
        memguard.shutdown()


def _step(writer: Writer, guard: Any, load: Load, step: int, clock: Clock) -> None:
    try:
        load.step(guard.frameworks[load.name], step)
    except Exception as error:
        text = f"{load.name}: a request was refused: {str(error).splitlines()[0]}"
        uuid = guard.plan.devices[0].device.uuid
        writer.event(Event(clock.now, "refused", text, uuid=uuid, framework=load.name, bytes=load.piece, times=1))
        for _, block in load.live[: len(load.live) // 2]:
            guard.frameworks[load.name].free(block)
        del load.live[: len(load.live) // 2]


def _too_large(writer: Writer, guard: Any, load: Load, clock: Clock) -> None:
    """torch asks for more than its cap has left; memguard's own report on that goes into the timeline."""
    with contextlib.suppress(Exception), memguard.workload("step", framework=load.name):
        guard.frameworks[load.name].allocate(12 * GIB)
    report = memguard.last_oom()
    assert report is not None, "nothing was refused"
    text = f"{load.name}: a request for 12.00 GiB was refused"
    writer.event(Event(clock.now, "refused", text, uuid=report.uuid, framework=load.name, bytes=12 * GIB, times=1))
    writer.oom(report.as_dict())
    writer.event(Event(clock.now, "workload", "validation", framework=load.name, seconds=12.0))


def many(folder: Path, samples: int) -> Path:
    """As many samples of six busy frameworks, and nothing else."""
    clock, rng = Clock(), random.Random(samples)
    plan = plan_of()
    with Writer(folder / "many-{rank}.jsonl", plan, clock=clock, rank=0) as writer:
        for _ in range(samples):
            clock.now = round(clock.now + EVERY, 3)
            writer.sample(busy(plan, clock.now, rng))
        return Path(writer.path)


def texts(report: Mapping[str, Any]) -> str:
    return "\n".join(map(str, report.values()))


__all__ = ["EVERY", "SIX", "START", "budget", "many", "record"]
