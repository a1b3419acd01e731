"""What CUDA's Multi-Process Service lets a process have (docs/mps.md), beside what the budget says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from memguard._base.types import Device, DevicePlan, Plan
from memguard._budget import mps
from memguard._tools.doctor.checks.gpu_memory import same_gpu
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Finding, Severity


def limit(facts: Facts) -> Iterator[Finding]:
    """A limit that is below the budget's, or that MPS drops with all the others."""
    given, shown = facts.environment.get(mps.LIMIT, ""), facts.driver.cuda.devices
    if not given.strip() or not shown:
        return
    limits = facts.budget.limits if facts.budget is not None else {}
    parts = []
    for gpu in shown:
        device = Device(gpu.uuid, gpu.name or gpu.uuid, gpu.ordinal, gpu.total or 0, None, "unknown", gpu.ordinal)
        size = next((size for uuid, size in limits.items() if same_gpu(uuid, gpu.uuid)), 0)
        parts.append(DevicePlan(device, size, 0, {}, size))
    visible = f"CUDA shows {', '.join(gpu.uuid for gpu in shown[:4])}{' and others' if len(shown) > 4 else ''}"
    source = [facts.budget.source] if facts.budget is not None and limits else []
    for said in mps.shortfalls(Plan(tuple(parts)), given):
        yield Finding(
            "mps-limit",
            Severity.WARNING,
            said.reason,
            (f"{mps.LIMIT}={given} (environment)", visible, *(f"{name} has the limit" for name in source)),
            said.fix or f"unset {mps.LIMIT} and start the program by `memguard run --mps`, or lower device.limit",
        )


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (limit,)
