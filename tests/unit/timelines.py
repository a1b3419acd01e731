"""Plans, samples and clocks for the tests of timelines and of their replay."""

from __future__ import annotations

import random
from pathlib import Path

from memguard import _budget
from memguard._base.types import DeviceSample, FrameworkSample, Plan, Sample
from memguard._base.units import GIB, MIB
from memguard._budget import policy
from memguard._devices.simulated import SimulatedHost

START = 1763737200.0


def plan_of(*gpus: str, **limits: str) -> Plan:
    """A plan of 40 GiB of each GPU, in equal shares or with these limits."""
    frameworks = {name: {"limit": size} for name, size in limits.items()}
    equal = {name: {"share": "16%"} for name in _budget.FRAMEWORKS}
    budget = {"version": 1, "device": {"limit": "40GiB", "reserve": "2GiB"}, "frameworks": frameworks or equal}
    return policy.plan(_budget.from_mapping(budget), SimulatedHost(list(gpus) or ["h200"]).devices())


def sample_of(plan: Plan, time: float, gpu: int = 0, **frameworks: FrameworkSample) -> Sample:
    """One GPU's figures: 1 GiB of overhead, and what the frameworks hold."""
    part = plan.devices[gpu]
    held = sum(usage.held or usage.in_use or 0 for usage in frameworks.values())
    used = GIB + held
    row = DeviceSample(
        part.device.uuid, part.device.total, used, part.device.usable - used, used, part.limit, GIB, 0, frameworks
    )
    return Sample(time, (row,))


def busy(plan: Plan, time: float, rng: random.Random) -> Sample:
    """All six at work, with figures of as many digits as real ones have; TensorFlow does not say what it holds."""
    frameworks = {}
    for name, cap in plan.devices[0].caps.items():
        held, in_use = rng.randrange(3 * GIB, cap), rng.randrange(GIB, 3 * GIB)
        frameworks[name] = FrameworkSample(held, in_use, rng.randrange(MIB, held - in_use), cap)
    frameworks["tensorflow"] = frameworks["tensorflow"]._replace(held=None, reclaimable=0)
    return sample_of(plan, time, **frameworks)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def total(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())
