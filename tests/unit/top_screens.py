"""Snapshots and timelines for the tests of `memguard top`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from timelines import START, Clock, busy, plan_of

from memguard._base.types import Event, Plan, Pressure
from memguard._base.units import GIB, MIB
from memguard._node.top.snapshot import Forecast, Gpu, Listed, Part, Request, Said, Share, Snapshot, Target
from memguard._timeline import Writer

UUID = "GPU-00000000-0000-4000-8000-000000000000"
SIX = (
    Part("torch", 12 * GIB, 6 * GIB, 5 * GIB, 16 * GIB, level="warn", enforcement="enforced"),
    Part("tensorflow", None, 2 * GIB, None, 8 * GIB, at_least=3 * GIB, level="ok"),
    Part("jax", 6 * GIB, 6 * GIB, 0, 6 * GIB, level="critical"),
    Part("cupy", 3 * GIB, GIB, 2 * GIB, 4 * GIB, level="ok"),
    Part("pycuda", 0, 0, 0, GIB, level="ok"),
    Part("numba", 2 * MIB, None, None, None, level=None),
)
SHARE = Share(
    UUID, 25 * GIB, 40 * GIB, GIB, 512 * MIB, SIX, "warn", (Forecast("torch", START + 8), Forecast(None, START))
)
EVENTS = (
    Said(START - 4, "pressure", "pressure warn: torch needs 7.00 GiB of 16.00 GiB (88%) of its cap", "warn"),
    Said(START - 3, "forecast", "torch grows by 512.0 MiB/s: its cap of 16.00 GiB is reached in about 8 s", "warn"),
    Said(START - 2, "trim", "trimmed torch under pressure: 1.00 GiB went back to the driver"),
    Said(START - 1, "oom", "out of memory: jax: its cap refused it"),
)
TARGET = Target(
    "run-4711-0.jsonl", "run-4711-0.jsonl", 4711, "live", START, START, "run-4711-0.jsonl", True, (SHARE,), EVENTS
)
GPU = Gpu(UUID, 0, "NVIDIA H200", 140 * GIB, 30 * GIB, 110 * GIB, 5 * GIB, 615 * MIB, simulated=True)
FOLLOWED = Snapshot(START, False, (GPU,), (TARGET,))


def attached(**more: Any) -> Snapshot:
    """Two GPUs of this machine, a process that answers, others, and one that is suspended."""
    done = Request(1, "trim torch", "done", "1.00 GiB went back to the driver")
    asked = (done, Request(2, "cap of jax to 8.00 GiB", "waiting"))
    target = replace(TARGET, key="4711-1", name="train.py", file=None, requests=asked)
    listed = (
        Listed(4711, "alice", "python train.py", "running", {UUID: 25 * GIB}),
        Listed(52, "bob", "python serve.py --port 80", "running", {UUID: 4 * GIB}),
        Listed(61, None, None, "running", {UUID: None}),
        Listed(77, "alice", "python idle.py", "suspended", {UUID: 9 * GIB}, "b.yaml", START - 600),
    )
    second = replace(GPU, uuid="GPU-1", index=1, used=None, free=None, others=None)
    return replace(FOLLOWED, machine=True, gpus=(GPU, second), targets=(target,), processes=listed, **more)


def run(path: Path, clock: Clock, plan: Plan | None = None, **more: Any) -> Writer:
    """A timeline of six frameworks that is being written, with a few records in it."""
    plan = plan or plan_of()
    writer = Writer(path, plan, clock=clock, **more)
    write(writer, plan, clock)
    return writer


def write(writer: Writer, plan: Plan, clock: Clock, samples: int = 3, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(samples):
        writer.sample(busy(plan, clock(), rng))
        clock.now += 0.5
    uuid = plan.devices[0].device.uuid
    text = "pressure warn: torch needs 5.00 GiB"
    writer.event(Event(clock(), "pressure", text, Pressure.WARN, uuid, "torch"))
    writer.event(Event(clock(), "forecast", "torch reaches its cap", Pressure.WARN, uuid, "torch", 8.0))
