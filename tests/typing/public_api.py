"""Typed use of everything public. Checked by `mypy --strict`, never run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import assert_type

import memguard
from memguard import Budget, Guard, exchange
from memguard.errors import FactsError, Problem, TimelineError, TraceError
from memguard.exchange import Route
from memguard.types import (
    Attempt,
    Attempts,
    Device,
    DeviceLedger,
    DoctorReport,
    Event,
    Finding,
    FrameworkName,
    Ledger,
    Plan,
    Reclaimable,
    Report,
    Row,
    Sample,
    Suspension,
    Timeline,
    Wait,
    Watch,
    WorkloadReport,
    framework_name,
)


def applying(path: os.PathLike[str]) -> None:
    assert_type(memguard.init("budget.yaml"), Guard)
    memguard.init(Path("budget.yaml"), replace=True)
    memguard.init(path, simulate="h200")
    memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, simulate=["h200", "a100"])
    memguard.init(3)  # type: ignore[arg-type]
    memguard.init("budget.yaml", simulate=1)  # type: ignore[arg-type]
    memguard.init("budget.yaml", missing_gpu="warn")
    memguard.init("budget.yaml", missing_gpu="ignore")  # type: ignore[arg-type]
    memguard.init("budget.yaml", True)  # type: ignore[call-arg]
    with memguard.guard("budget.yaml", missing_gpu="simulate") as active:
        assert_type(active, Guard)
        assert_type(active.plan, Plan)
        assert_type(active.plan.devices[0].device, Device)
    assert_type(memguard.shutdown(), list[str])


def annotating(budget: Budget, guard: Guard, event: Event) -> tuple[Ledger, str]:
    assert_type(memguard.init(budget), Guard)
    assert_type(guard.budget, Budget)
    assert_type(event.framework, str | None)
    with memguard.on_event(lambda event: assert_type(event, Event)) as watch:
        assert_type(watch, Watch)
    with memguard.on_sample(lambda sample: assert_type(sample, Sample)) as watch:
        assert_type(watch, Watch)
    watch.remove()
    seen: list[Event] = []
    memguard.on_event(seen.append)
    memguard.on_event(lambda: None)  # type: ignore[misc, arg-type]
    memguard.on_sample(lambda: None)  # type: ignore[misc, arg-type]
    return guard.ledger(), event.text


def asking() -> None:
    reading = memguard.ledger()
    assert_type(reading, Ledger)
    assert_type(reading.simulated, bool)
    memguard.require("torch", "4GiB")
    memguard.require("torch", 4 << 30)
    memguard.require("torch", 0.5)  # type: ignore[arg-type]
    memguard.require(None, "4GiB")  # type: ignore[arg-type]
    memguard.resize("torch", "12GiB")
    memguard.trim("shared pool")  # that of `strategy: pool`
    memguard.trim(["torch"])  # type: ignore[arg-type]
    exchange.to(object(), 3)  # type: ignore[arg-type]
    assert_type(memguard.trim(), int)
    assert_type(memguard.trim("torch"), int)


def naming(given: str, name: FrameworkName, guard: Guard) -> None:
    """A misspelt framework is found without running anything. One that is known at run time only is checked there."""
    memguard.require("torhc", "4GiB")  # type: ignore[arg-type]
    memguard.resize("torhc", "4GiB")  # type: ignore[arg-type]
    memguard.trim("torhc")  # type: ignore[arg-type]
    memguard.workload("train", framework="torhc")  # type: ignore[arg-type]
    memguard.doctor(frameworks="torhc")  # type: ignore[arg-type]
    memguard.doctor(frameworks=["torch", "torhc"])  # type: ignore[list-item]
    exchange.to(object(), "torhc")  # type: ignore[arg-type]
    exchange.attach("a handle", "torhc")  # type: ignore[arg-type]
    guard.require("torhc", "4GiB")  # type: ignore[arg-type]
    misspelt: FrameworkName = "torhc"  # type: ignore[assignment]
    memguard.require(given, "4GiB")  # type: ignore[arg-type]
    assert_type(framework_name(given), FrameworkName)
    memguard.require(framework_name(given), "4GiB")
    for one in (name, misspelt, framework_name(given)):
        memguard.trim(one)
        memguard.workload("train", framework=one)
        exchange.to(object(), one)
    memguard.doctor(frameworks=[name, framework_name(given)])
    exchange.to(object(), "numpy")  # has arrays, and no GPU memory to budget:
    memguard.require("numpy", "4GiB")  # type: ignore[arg-type]


def annotated(
    plan: Plan, device: Device, report: DoctorReport, watch: Watch, oom: Report, timeline: Timeline, wait: Wait
) -> tuple[DeviceLedger, Row, Finding]:
    """The types that are returned have public names: what a program writes about them passes `mypy --strict`."""
    assert_type(memguard.init("budget.yaml").plan, Plan)
    assert_type(plan.devices[0].device, Device)
    assert_type(memguard.last_oom(), Report | None)
    assert_type(memguard.load_timeline("run.jsonl"), Timeline)
    assert_type(timeline.plan, Plan)
    assert_type(memguard.errors.TraceError, type[TraceError])
    assert_type(memguard.types.Ledger, type[Ledger])
    assert_type(oom.ledger, Ledger | None)
    memguard.resume(progress=lambda found: print(assert_type(found, Wait).holders))
    print(device.uuid, watch, wait.needs)
    part = memguard.ledger().devices[0]
    assert_type(part.rows, tuple[Row, ...])
    return part, part.row("free"), report.findings[0]


def gone() -> None:
    """Names that live elsewhere."""
    memguard.on_pressure(print)  # type: ignore[attr-defined]
    memguard.call(print)  # type: ignore[attr-defined]
    memguard.attempts()  # type: ignore[attr-defined]
    memguard.Ledger  # type: ignore[attr-defined]  # noqa: B018


def examining() -> None:
    report = memguard.doctor()
    assert_type(report, DoctorReport)
    assert_type(report.healthy, bool)
    assert_type(report.errors, tuple[Finding, ...])
    memguard.doctor("budget.yaml", frameworks=["torch"], ignore={"mig"}, timeout=5)
    memguard.doctor({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
    memguard.doctor(3)  # type: ignore[arg-type]
    memguard.doctor("budget.yaml", ["torch"])  # type: ignore[call-arg]


def suspending() -> None:
    assert_type(memguard.suspend(timeout="30s", why="idle", host_memory="ignore"), Suspension)
    memguard.suspend("30s")  # type: ignore[call-arg]
    memguard.suspend(why="bored")  # type: ignore[arg-type]
    memguard.resume(timeout=60, progress=lambda wait: print(wait.free, wait.holders))
    with memguard.suspended() as found:
        assert_type(found, Suspension)
        assert_type(found.total, int)
        assert_type(found.host, int | None)


@memguard.suspended(timeout=5)
def without_a_gpu(rows: int) -> str:
    return str(rows)


assert_type(without_a_gpu(3), str)


def exchanging(x: object) -> None:
    memguard.exchange.to(x, "tensorflow")
    exchange.to(x, "cupy", copy=True, stream=7, device=1)
    exchange.to(x, "torch", copy=None, device=None)
    assert_type(exchange.last_route(), Route | None)
    exchange.to(x)  # type: ignore[call-arg]
    exchange.to(x, "torch", True)  # type: ignore[call-arg]
    exchange.to(x, "torch", copy="yes")  # type: ignore[arg-type]
    exchange.to(x, "torch", device="cuda:0")  # type: ignore[arg-type]
    try:
        exchange.to(x, "jax")
    except exchange.CannotShare as error:
        assert_type(error.consumer, str | None)
        assert_type((error.producer, error.reason, error.remedy), tuple[str, str, str])
        assert_type((error.source, error.target), tuple[str, str | None])  # the older names
        error.source = "torch"  # type: ignore[misc]
    except memguard.errors.CannotShare:  # the same
        pass


def recording() -> None:
    with memguard.record_trace("trace.jsonl", interval=0.1):
        pass


def working() -> None:
    with memguard.workload("train", framework="torch", needs="6GiB") as report:
        pass
    assert_type(report, WorkloadReport)
    assert_type(report.peak, int | None)
    assert_type(report.waited, float)
    assert_type(report.reserved, int | None)
    with memguard.workload("train", framework="torch", needs=1 << 30, wait="10s"):
        pass
    with memguard.workload("train"):  # type: ignore[call-arg]
        pass
    memguard.workload("train", framework="torch", wait=[1])  # type: ignore[arg-type]


@memguard.workload("train", framework="torch", needs="6GiB", wait=10.5)
def decorated(number: int) -> str:
    return str(number)


@memguard.workload("batches", framework="torch", needs="6GiB")
def batches(number: int) -> Iterator[int]:
    yield number


@memguard.workload("batches", framework="torch", needs="6GiB")
async def later(number: int) -> AsyncIterator[int]:
    yield number


@memguard.workload("serve", framework="torch", needs="6GiB", wait=10)
async def serve(number: int) -> str:
    async with memguard.workload("step", framework="torch") as report:
        assert_type(report, WorkloadReport)
    async for found in later(number):
        assert_type(found, int)
    return str(number)


async def running() -> None:
    assert_type(decorated(1), str)
    assert_type(batches(1), Iterator[int])
    assert_type(await serve(1), str)
    decorated("1")  # type: ignore[arg-type]


def reclaiming() -> None:
    found = memguard.reclaimable()
    assert_type(found, Reclaimable)
    for part in found.devices:
        for one in part.frameworks:
            assert_type(one.reclaimable, int | None)


@memguard.retry()
def trained(batch: list[int], *, epochs: int = 1) -> float:
    return epochs / len(batch)


@memguard.retry(shrink="batch_size", floor=8, multiple=8, times=3)
def fitted(data: list[int], batch_size: int = 64) -> float:
    return batch_size / len(data)


class Model:
    @memguard.retry(times=2, ranks="independent")
    def step(self, x: int) -> str:
        return str(x)

    @memguard.retry(shrink="n")
    def fit(self, n: int) -> str:
        return str(n)

    @memguard.retry()
    async def later(self, x: int) -> str:
        return str(x)


async def retrying(model: Model) -> None:
    assert_type(trained([1], epochs=2), float)
    trained("abc", epochs="2")  # type: ignore[arg-type]
    trained([1], 2)  # type: ignore[call-arg]
    assert_type(fitted([1], batch_size=8), float)
    fitted([1], "8")  # type: ignore[arg-type]
    fitted.forget()
    trained.forget()  # type: ignore[attr-defined]
    assert_type(model.step(3), str)
    model.step("3")  # type: ignore[arg-type]
    assert_type(model.fit(3), str)
    model.fit("3")  # type: ignore[arg-type]
    Model.fit(model, 3)
    model.fit.forget()
    assert_type(await model.later(3), str)
    assert_type(memguard.retry.call(trained, [1], epochs=2), float)
    assert_type(await memguard.retry.call(model.later, 3), str)
    memguard.retry.call(trained, 3)  # type: ignore[arg-type]
    assert_type(memguard.retry.attempts(), Attempts)
    for attempt in memguard.retry.attempts(times=2, size=64, floor=4):
        assert_type(attempt, Attempt)
        with attempt:
            assert_type(attempt.size, int | None)
            assert_type(attempt.number, int)
    memguard.retry(3, ranks="alone")  # type: ignore[call-overload]
    memguard.retry(floor=3)  # type: ignore[call-overload]
    memguard.retry.attempts(size="64")  # type: ignore[arg-type]


def caught() -> int:
    for attempt in memguard.retry.attempts():
        with attempt:
            return 1
    raise AssertionError


def failing() -> None:
    try:
        memguard.init("budget.yaml")
    except (memguard.ConfigError, memguard.PlanError) as error:
        assert_type(error.problems, tuple[Problem, ...])
    except memguard.BudgetExceeded as error:
        assert_type(error.needed, int)
        assert_type(error.available, int)
    except memguard.CapNotApplied as error:
        assert_type(error.remedy, str)
    except (memguard.DeviceError, memguard.NotActive, memguard.AlreadyActive):
        pass
    except (TraceError, TimelineError, FactsError):
        pass
    except memguard.MemguardError as error:
        assert_type(error.exit_code, int)
