"""While the process is off its GPUs, nothing of memguard's goes through a door to NVML, CUDA or a framework."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gpu_clocks
import pytest
from suspending import Doors, FakeWay, way_of
from waiting import until

import memguard
from memguard import api, exchange
from memguard._base.types import Event, Pressure, Shortage
from memguard._base.units import GIB
from memguard._devices import contexts, pool_blocks, suspension
from memguard._devices.host import Host
from memguard._devices.nvml import Nvml
from memguard._devices.simulated import SimulatedHost
from memguard._devices.suspension import Off
from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.lifetimes import Offer
from memguard._frameworks.arrays.view import View
from memguard._frameworks.base import Framework
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard.guard import Guard
from memguard._oom import hooks
from memguard.errors import Suspended

BUDGET: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "40GiB"},
    "frameworks": {"torch": {"min": "5GiB", "max": "10GiB"}, "cupy": {"limit": "20GiB"}},
    "monitor": {"interval": "50ms"},
    "on_pressure": ["trim", "raise"],
}
METHODS = (
    "usage", "trim", "trim_partly", "drift", "capturing", "resize", "apply", "state", "footprint", "contexts",
    "uncounted", "libraries", "record",
)  # fmt: skip


class NoLibrary:
    """libcuda, of which no function may be called while the process is suspended."""

    def __init__(self, touched: list[str]) -> None:
        self.touched = touched

    def __getattr__(self, name: str) -> Any:
        if suspension.now is not None:
            self.touched.append(name)
        return lambda *args: 0


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    found = Doors(monkeypatch)
    found.guard(SimulatedHost, "memory", "processes", "devices", "context_active", "entries", "libraries")
    found.guard(SimulatedFramework, *(name for name in METHODS if name in vars(SimulatedFramework)))
    found.guard(Framework, *(name for name in METHODS if name in vars(Framework)))
    yield found
    assert found.touched == []


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch, doors: Doors) -> Iterator[FakeWay]:
    with way_of(monkeypatch) as found:
        yield found


@pytest.fixture
def guard(way: FakeWay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    active = memguard.init(BUDGET, simulate="h200")
    torch = active.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    torch.allocate(2 * GIB)
    yield active
    memguard.resume()
    memguard.shutdown()


def workload() -> None:
    with memguard.workload("w", framework="torch", needs="1GiB", wait="0.1s"):
        raise AssertionError("it ran")


async def workload_in_loop() -> None:
    async with memguard.workload("w", framework="torch"):
        raise AssertionError("it ran")


def recording() -> None:
    with memguard.record_trace("nowhere.jsonl"):
        raise AssertionError("it ran")


def another_budget() -> None:
    with memguard.guard({**BUDGET, "on_pressure": []}, replace=True, simulate="h200"):
        raise AssertionError("it ran")


def pycuda_block() -> None:
    with exchange.pycuda_context():
        raise AssertionError("it ran")


REFUSED: dict[str, Callable[[], object]] = {
    "require": lambda: memguard.require("torch", "1GiB"),
    "resize": lambda: memguard.resize("cupy", "1GiB"),
    "trim": lambda: memguard.trim(),
    "reclaimable": lambda: memguard.reclaimable(),
    "workload": workload,
    "init": lambda: memguard.init({**BUDGET, "on_pressure": []}, replace=True, simulate="h200"),
    "guard": another_budget,
    "shutdown": lambda: memguard.shutdown(),
    "record_trace": recording,
    "suspend": lambda: memguard.suspend(),
    "suspended": lambda: memguard.suspended().__enter__(),
    "exchange.to": lambda: exchange.to([1.0], "torch"),
    "exchange.export": lambda: exchange.export(object()),
    "exchange.attach": lambda: exchange.attach("memguard:1:a:b:c:d", "cupy"),
    "exchange.pycuda_context": pycuda_block,
}
"""Raises Suspended, and says what to do."""


def attempting() -> None:
    for attempt in memguard.retry.attempts(times=1):
        with attempt:
            pass


def no_timeline() -> None:
    with pytest.raises(memguard.errors.TimelineError):
        memguard.load_timeline("nothing.jsonl")


ANSWERED: dict[str, Callable[[], object]] = {
    "ledger": lambda: str(memguard.ledger()) + memguard.ledger().to_json() + memguard.ledger()._repr_html_(),
    "checkpoint": lambda: memguard.checkpoint(),
    "on_event": lambda: memguard.on_event(print).remove(),
    "on_sample": lambda: memguard.on_sample(lambda sample: None).remove(),
    "last_oom": lambda: memguard.last_oom(),
    "call": lambda: memguard.retry.call(lambda: 1),
    "retry": lambda: memguard.retry()(lambda: 1)(),
    "attempts": attempting,
    "exchange.last_route": lambda: exchange.last_route(),
    "the same budget": lambda: memguard.init(BUDGET, simulate="h200"),
    "load_timeline": no_timeline,
}
ELSEWHERE = {"doctor", "resume", "load_ipython_extension", "unload_ipython_extension"}
"""Tested by themselves below and in `test_suspend_own`; those of a notebook ask no GPU."""


def test_no_public_function_is_forgotten() -> None:
    functions = {name for name in memguard.__all__ if inspect.isfunction(getattr(memguard, name))}
    of_exchange = {f"exchange.{name}" for name in exchange.__all__ if name not in ("CannotShare", "Handle", "Route")}
    assert functions | of_exchange <= {*REFUSED, *ANSWERED, *ELSEWHERE}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_gpus_is_refused_with_a_remedy(guard: Guard, name: str) -> None:
    with memguard.suspended():
        with pytest.raises(Suspended, match=r"off its GPUs since .*suspended, .*\n    fix: memguard.resume\(\)"):
            REFUSED[name]()
        assert suspension.now is not None


@pytest.mark.parametrize("name", ANSWERED)
def test_what_needs_no_gpu_is_answered(guard: Guard, name: str) -> None:
    with memguard.suspended():
        ANSWERED[name]()


def test_a_workload_in_a_loop_is_refused(guard: Guard) -> None:
    with memguard.suspended(), pytest.raises(Suspended):
        asyncio.run(workload_in_loop())


def test_the_doctor_looks_at_everything_but_the_gpus_of_this_process(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard._tools.doctor.collect import this_process

    monkeypatch.setattr(contexts, "_initialised", NoLibrary(touched := []))
    monkeypatch.setattr(Nvml, "processes", lambda *_: touched.append("nvml"))
    monkeypatch.setitem(sys.modules, "pycuda.driver", object())
    with memguard.suspended():
        found = this_process.process(["GPU-1"])
    assert found.contexts == {} and found.foreign_context is None and touched == []


def test_the_guard_itself_answers_or_refuses(guard: Guard) -> None:
    sample = guard.sample()
    with memguard.suspended():
        assert "suspended, " in str(guard) and repr(guard) and guard.active
        assert guard.peaks() == {} and guard.take_events() == []
        assert guard.rebalance(sample) is sample
        assert not guard.elastic.capturing()
        assert not guard.elastic.shortage(Shortage("torch", guard.plan.devices[0].device.uuid, 1, 1, True))
        for refused in (guard.sample, guard.stop, guard.trim, lambda: guard.make_room("torch", 1)):
            with pytest.raises(Suspended):
                refused()  # type: ignore[operator]
        for framework in guard.frameworks.values():
            framework._check_drift_now()
    assert guard.sample().devices


def test_the_monitor_runs_on_and_asks_nothing(guard: Guard, doors: Doors) -> None:
    monitor = api.current_session().monitor
    assert monitor is not None
    with memguard.suspended():
        time.sleep(0.3)
        assert monitor.alive and doors.touched == []
    assert monitor._failures == 0


def test_trims_and_errors_that_are_due_wait(guard: Guard) -> None:
    session = api.current_session()
    uuid = guard.plan.devices[0].device.uuid
    event = Event(time.time(), "pressure", "torch is critical", Pressure.CRITICAL, uuid, "torch")
    trimmed: list[Event] = []
    watch = memguard.on_event(trimmed.append)
    with memguard.suspended():
        session._pending_trims.append(event)
        session._pending_errors[uuid, "torch"] = event
        memguard.checkpoint()
        assert session._pending_trims and session._pending_errors
    memguard.checkpoint()
    watch.remove()
    assert "trim" in [one.kind for one in trimmed] and not session._pending_trims and not session._pending_errors


def test_an_out_of_memory_error_is_reported_from_the_record(guard: Guard) -> None:
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    with pytest.raises(FrameworkOutOfMemory) as caught:
        torch.allocate(100 * GIB)
    with memguard.suspended():
        assert hooks.report_error(caught.value, show=False) is not None


def test_a_block_of_work_that_was_open_ends_without_figures(guard: Guard) -> None:
    with memguard.workload("w", framework="torch", needs="1GiB") as report:
        memguard.suspend()
    assert report.after is None and report.reserved == GIB
    memguard.resume()
    assert guard.reserved_not_taken("torch", guard.plan.devices[0].device.uuid) == 0


def test_a_workload_that_waits_for_room_goes_on_waiting(guard: Guard) -> None:
    went_on, hold = threading.Event(), threading.Event()

    def holding() -> None:
        with memguard.workload("first", framework="cupy", needs="20GiB"):
            hold.wait(20)

    def waiting() -> None:
        with memguard.workload("second", framework="cupy", needs="20GiB", wait="20s"):
            went_on.set()

    first, second = threading.Thread(target=holding), threading.Thread(target=waiting)
    turns = guard.admission.get().queue
    first.start()
    until(lambda: turns.prune().active)
    second.start()
    until(lambda: turns.prune().waiting)
    with memguard.suspended():
        hold.set()
        first.join(10)
        assert not went_on.wait(0.3)
    assert went_on.wait(10)
    second.join(10)


def test_a_notebook_shows_the_record(guard: Guard) -> None:
    from memguard import notebook

    with memguard.suspended():
        assert notebook._in_use()["torch"] == 2 * GIB
        assert notebook._line([], None).devices[0].suspended is not None


def test_nothing_stays_replaced(guard: Guard) -> None:
    before = (guard.caps.suspended, guard.host, dict(vars(guard)).keys(), sys.exit, sys.excepthook)
    for _ in range(3):
        with memguard.suspended():
            pass
    assert (guard.caps.suspended, guard.host, dict(vars(guard)).keys(), sys.exit, sys.excepthook) == before
    assert guard.ledger().devices[0].row("torch").bytes == 2 * GIB


# NVML


class FakeNvml:
    """nvidia-ml-py, as far as a reading needs it."""

    class NVMLError(Exception):
        pass

    NVMLError_Uninitialized = NVMLLibraryMismatchError = type("Other", (NVMLError,), {})

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return 0

        return call


def test_nvml_is_not_asked_and_not_shut_down(monkeypatch: pytest.MonkeyPatch, way: FakeWay) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    nvml = Nvml()
    nvml._pid, nvml._handles = os.getpid(), {"GPU-1": 1}
    prepared: Any = object()
    nvml._ready = {"GPU-1": prepared}
    with memguard.suspended():
        assert nvml._ready == {}
        for ask in (nvml.devices, lambda: nvml.memory("GPU-1"), lambda: nvml.processes("GPU-1")):
            with pytest.raises(Suspended, match="NVML: this process is off its GPUs"):
                ask()
        nvml.close()
    assert fake.calls == []


# destructors


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> gpu_clocks.Driver:
    return gpu_clocks.stand_in(monkeypatch)


def off() -> None:
    suspension.now = Off({}, time.time())


def on() -> None:
    suspension.now = None
    suspension.run_deferred()


class Owner:
    def __init__(self, ends: list[str]) -> None:
        self.ends = ends

    def __del__(self) -> None:
        self.ends.append("owner")


@pytest.mark.parametrize("producer", [None, "stream"])
@pytest.mark.parametrize("thread", [None, "this"])
def test_a_view_that_dies_keeps_its_memory_until_the_process_is_back(
    driver: gpu_clocks.Driver, producer: str | None, thread: str | None
) -> None:
    ends: list[str] = []
    mine, theirs = driver.stream() if producer else None, driver.stream()
    view = View(driver.alloc(1024), (1024,), (1,), "uint8", 0)
    place = threading.get_ident() if thread else None
    lifetime: Any = lifetimes.begin(Offer("torch", view, Owner(ends), mine, None, place), "cupy", theirs)
    asked = len(driver.asked)
    off()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del lifetime
            gc.collect()
            lifetimes.sweep()
            time.sleep(0.05)
        assert ends == [] and len(driver.asked) == asked
    finally:
        on()
    until = time.monotonic() + 5
    while not ends and time.monotonic() < until:
        lifetimes.sweep()
        time.sleep(0.005)
    assert ends == ["owner"]


def test_what_is_parked_is_not_asked_about(driver: gpu_clocks.Driver) -> None:
    ends: list[str] = []
    theirs = driver.stream()
    view = View(driver.alloc(1024), (1024,), (1,), "uint8", 0)
    lifetime: Any = lifetimes.begin(Offer("torch", view, Owner(ends)), "cupy", theirs)
    driver.read(theirs, view.address)
    del lifetime  # parked: its work is not done
    assert ends == []
    off()
    try:
        time.sleep(0.02)  # the sweeper may be within a look
        asked = len(driver.asked)
        driver.finish()
        time.sleep(0.1)
        assert ends == [] and len(driver.asked) == asked
    finally:
        on()
    until = time.monotonic() + 5
    while not ends and time.monotonic() < until:
        time.sleep(0.005)
    assert ends == ["owner"]


def test_a_block_of_the_shared_pool_is_freed_when_the_process_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    def free(self: Any, cuda: Any, held: Any) -> None:
        assert suspension.now is None
        freed.append(held.address)
        held.answers.append(0)

    monkeypatch.setattr(pool_blocks.PoolBlocks, "_free", free)
    monkeypatch.setattr(contexts, "_initialised", NoLibrary(touched := []))
    pool: Any = object()
    blocks = pool_blocks.PoolBlocks(pool, 0, 1)
    held = pool_blocks.PoolBlock(blocks)
    held.address = 4096
    off()
    try:
        del held
        gc.collect()
        assert freed == [] and touched == []
        with pytest.raises(Suspended):
            blocks.take(1)
    finally:
        on()
    blocks._settle()
    assert freed == [4096]


def test_cuda_is_given_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_initialised", NoLibrary(touched := []))
    off()
    try:
        with pytest.raises(Suspended, match="CUDA: this process is off its GPUs"):
            contexts.driver()
    finally:
        on()
    assert touched == []


def test_what_was_put_off_is_done_and_its_failure_said(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fails() -> None:
        raise ValueError("gone")

    off()
    for call in (lambda: done.append(1), fails, lambda: done.append(2)):
        suspension.defer(call)
    assert done == []
    on()
    assert done == [1, 2] and "gone" in caplog.text


def test_a_forked_child_gives_nothing_back() -> None:
    done: list[int] = []
    off()
    suspension.defer(lambda: done.append(1))
    child = os.fork()
    if not child:
        code = 1
        try:
            suspension.forked()
            suspension.run_deferred()
            code = 0 if not done and suspension.now is None and suspension._of_parent else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    on()
    assert done == [1]


def test_a_framework_imported_meanwhile_gets_its_cap_afterwards(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    capped: list[str] = []
    monkeypatch.setattr(Guard, "_apply_imported", lambda self, name: capped.append(name))
    with memguard.suspended():
        guard._imported("cupy")
        assert capped == []
    assert capped == ["cupy"]


def test_a_view_that_dies_just_then_keeps_its_memory_too(
    driver: gpu_clocks.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process leaves between the first look at that and the first call of CUDA."""
    ends: list[str] = []
    view = View(driver.alloc(1024), (1024,), (1,), "uint8", 0)
    lifetime: Any = lifetimes.begin(Offer("torch", view, Owner(ends)), "cupy", driver.stream())
    quiet = lifetimes.streams.quick_idle

    def leaves(*args: Any) -> Any:
        off()
        raise suspension.refused("CUDA")

    monkeypatch.setattr(lifetimes.streams, "quick_idle", leaves)
    del lifetime
    assert ends == []
    monkeypatch.setattr(lifetimes.streams, "quick_idle", quiet)
    on()
    until = time.monotonic() + 5
    while not ends and time.monotonic() < until:
        lifetimes.sweep()
        time.sleep(0.005)
    assert ends == ["owner"]


CALLS = sorted(name for name, one in vars(Host).items() if callable(one) and not name.startswith("_"))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_nobody_thought_of_reaches_a_host_that_refuses(guard: Guard, name: str) -> None:
    real = guard.host
    with memguard.suspended():
        assert type(guard) is Guard
        assert guard.host is not real and guard.host.pid == real.pid and guard.host.simulated == real.simulated
        with pytest.raises(Suspended, match=rf"a look at the GPUs \({name}\): this process is off its GPUs"):
            getattr(guard.host, name)()
        with pytest.raises(Suspended):
            guard.reader.reading(guard.plan.devices[0], guard.frameworks)
    assert guard.host is real


def test_a_reading_that_was_refused_while_the_process_came_back_is_read_again(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, refusals = guard.reader.reading, iter([True])

    def read(*given: Any) -> Any:
        if next(refusals, False):
            with memguard.suspended(), pytest.raises(Suspended) as caught:
                reading(*given)
            raise caught.value
        return reading(*given)

    monkeypatch.setattr(guard.reader, "reading", read)
    assert guard.ledger().devices[0].suspended is None
