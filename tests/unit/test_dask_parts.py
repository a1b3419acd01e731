"""What the integration of Dask decides without Dask: the part of a worker, its pause, and what it says of itself."""

from __future__ import annotations

import enum
import json
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._base.types import DeviceSample, FrameworkSample, Pressure, Sample
from memguard._base.undo import Undo
from memguard._base.units import GIB, MIB
from memguard._budget.policy import plan
from memguard._devices.simulated import SimulatedHost
from memguard.integrations import dask as integration
from memguard.integrations import tables as common
from memguard.integrations.dask import tables
from memguard.integrations.dask.parts import explained, part_of_worker
from memguard.integrations.dask.pause import Pause


def budget(**frameworks: dict[str, Any]) -> memguard.Budget:
    return memguard.Budget.from_mapping({"version": 1, "device": {"limit": "80%"}, "frameworks": frameworks})


@given(
    parts=st.integers(1, 8),
    limit=st.one_of(st.integers(10, 100).map(lambda n: f"{n}%"), st.integers(64, 130).map(lambda n: f"{n}GiB")),
    torch=st.one_of(
        st.integers(1, 50).map(lambda n: {"share": f"{n}%"}),
        st.integers(100, 8000).map(lambda n: {"limit": f"{n}MiB"}),
        st.just({"min": "5%", "max": "40%"}),
        st.just({"min": "512MiB", "max": "4GiB"}),
    ),
)
def test_the_parts_never_add_up_to_more_than_the_whole(parts: int, limit: str, torch: dict[str, str]) -> None:
    whole = memguard.Budget.from_mapping(
        {
            "version": 1,
            "device": {"limit": limit, "reserve": "600MiB"},
            "frameworks": {"torch": torch, "cupy": {"share": "9%"}},
        }
    )
    one = part_of_worker(whole, parts)
    devices = SimulatedHost().devices()
    try:
        (large,), (small,) = plan(whole, devices).devices, plan(one, devices).devices
    except memguard.PlanError:  # so small a part has no room for its context
        return
    assert small.limit * parts <= large.limit
    for name, cap in small.caps.items():
        assert cap * parts <= large.caps[name]
    assert small.reserve == large.reserve, "each process has a context of its own"
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_part_that_is_too_small_is_refused_with_its_place() -> None:
    whole = budget(torch={"limit": "4GiB"}, cupy={"limit": "6MiB"})
    assert part_of_worker(whole, 1) is whole and part_of_worker(whole, 3).frameworks["cupy"].limit == 2 * MIB
    with pytest.raises(memguard.PlanError, match=r"cupy.*\n?.*6.0 MiB for 4 workers"):
        part_of_worker(whole, 4)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="workers_per_gpu is a number from 1 on"):
            part_of_worker(whole, wrong)  # type: ignore[arg-type]


def test_a_budget_for_ranks_is_refused() -> None:
    for written, fix in (("auto", "workers_per_gpu=2"), ({"per_gpu": 3}, "workers_per_gpu=3")):
        whole = memguard.Budget.from_mapping(
            {"version": 1, "ranks": written, "frameworks": {"torch": {"share": "50%"}}}
        )
        with pytest.raises(memguard.ConfigError, match=f"(?s)Dask's workers are none.*{fix}"):
            part_of_worker(whole, 1)


def test_figures_of_a_part_are_said_to_be_that() -> None:
    whole = memguard.Budget.from_mapping(
        {"version": 1, "device": {"limit": "1GiB"}, "frameworks": {"torch": {"share": "50%"}}}
    )
    with pytest.raises(memguard.PlanError) as caught:
        plan(part_of_worker(whole, 2), SimulatedHost().devices())
    text = str(explained(caught.value, 2))
    assert "limit 512.0 MiB" in text and "whose limits are 1/2 of the budget's (workers_per_gpu=2)" in text
    assert explained(caught.value, 1) is caught.value


def test_without_distributed_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_missing", "No module named 'distributed'")
    with pytest.raises(ImportError, match=r"No module named 'distributed'.*\n.*pip install distributed"):
        integration.MemguardPlugin({"version": 1, "frameworks": {"torch": {"share": "50%"}}})


class Status(enum.Enum):
    running, paused, closing = range(3)


class Manager:
    """Decides as distributed's does."""

    memory_limit: int | None = 100
    memory_pause_fraction: Any = 0.8
    collected = 0

    def _maybe_pause_or_unpause(self, worker: Any, memory: int) -> None:
        if self.memory_pause_fraction is False:
            return
        assert self.memory_limit
        if memory / self.memory_limit > self.memory_pause_fraction:
            self.collected += 1  # garbage
            if worker.status is Status.running:
                worker.status = Status.paused
        elif worker.status is Status.paused:
            worker.status = Status.running


class Worker:
    def __init__(self) -> None:
        self.status = Status.running
        self.memory = 10
        self.memory_manager: Any = Manager()
        self.monitor = SimpleNamespace(get_process_memory=lambda: self.memory)
        self.loop = SimpleNamespace(add_callback=lambda call, *given: call(*given))

    def look(self) -> Status:
        """Dask's memory monitor."""
        self.memory_manager._maybe_pause_or_unpause(self, self.memory)
        return self.status


@pytest.fixture
def pausing() -> tuple[Worker, Pause, Undo, list[str]]:
    worker, undo, said = Worker(), Undo(), list[str]()
    pause = Pause(worker, said.append)
    pause.begin(undo)
    return worker, pause, undo, said


Pausing = tuple[Worker, Pause, Undo, "list[str]"]


def test_the_pause_holds_against_dasks_monitor_and_against_others(pausing: Pausing) -> None:
    worker, pause, _, said = pausing
    pause.set_pressure(False)
    assert worker.look() is Status.running and said == []
    for _ in range(3):
        pause.set_pressure(True)
        assert worker.look() is Status.paused
    worker.status = Status.running
    pause.set_pressure(True)
    assert worker.look() is Status.paused and said == ["paused"]
    pause.set_pressure(False)
    assert worker.status is Status.running and said == ["paused", "resumed"]


def test_the_hosts_memory_pauses_and_resumes_as_without(pausing: Pausing) -> None:
    worker, pause, _, _ = pausing
    worker.memory = 90
    assert worker.look() is Status.paused
    pause.set_pressure(True)  # both
    assert worker.look() is Status.paused and worker.memory_manager.collected == 2, "Dask goes on freeing host memory"
    pause.set_pressure(False)
    assert worker.look() is Status.paused
    pause.set_pressure(True)
    worker.memory = 10
    assert worker.look() is Status.paused, "the GPU's is critical still"
    pause.set_pressure(False)
    assert worker.look() is Status.running
    pause.set_pressure(True)
    worker.memory = 90
    pause.set_pressure(False)
    assert worker.status is Status.paused
    worker.memory = 10
    assert worker.look() is Status.running


@pytest.mark.parametrize("without", [{"memory_limit": None}, {"memory_limit": 0}, {"memory_pause_fraction": False}])
def test_without_dasks_own_pause(pausing: Pausing, without: dict[str, Any]) -> None:
    worker, pause, _, _ = pausing
    vars(worker.memory_manager).update(without)
    pause.set_pressure(True)
    assert worker.status is Status.paused
    pause.set_pressure(False)
    assert worker.status is Status.running


def test_a_worker_that_closes_is_left_alone(pausing: Pausing) -> None:
    worker, pause, undo, _ = pausing
    worker.status = Status.closing
    pause.set_pressure(True)
    assert worker.status is Status.closing
    pause.set_pressure(False)
    worker.status = Status.running
    pause.set_pressure(True)
    worker.status = Status.closing
    undo.run()
    assert worker.status is Status.closing


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_end_resumes_and_unwraps_also_after_an_interruption(pausing: Pausing) -> None:
    worker, pause, undo, _ = pausing
    pause.set_pressure(True)
    undo.add("something", interrupt)
    with pytest.raises(KeyboardInterrupt):
        undo.run()
    assert worker.status is Status.running and "_maybe_pause_or_unpause" not in vars(worker.memory_manager)
    pause.set_pressure(True)
    assert worker.status is Status.running, "it is over"


def test_what_was_wrapped_before_and_after_stays() -> None:
    worker, undo = Worker(), Undo()
    manager, calls = worker.memory_manager, list[str]()

    def around(name: str) -> Callable[..., None]:
        inner = manager._maybe_pause_or_unpause

        def call(one: Any, memory: int) -> None:
            calls.append(name)
            inner(one, memory)

        return call

    manager._maybe_pause_or_unpause = before = around("before")
    pause = Pause(worker, lambda what: None)
    pause.begin(undo)
    undo.run()
    assert manager._maybe_pause_or_unpause is before
    pause = Pause(worker, lambda what: None)
    pause.begin(undo)
    manager._maybe_pause_or_unpause = after = around("after")
    undo.run()
    assert manager._maybe_pause_or_unpause is after
    worker.status = Status.paused
    assert worker.look() is Status.running and calls == ["after", "before"]


def test_without_the_private_method_samples_hold_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    worker, undo = Worker(), Undo()
    worker.memory_manager = SimpleNamespace(memory_limit=0, memory_pause_fraction=0.8)
    pause = Pause(worker, lambda what: None)
    pause.begin(undo)
    assert "between two samples" in caplog.text
    pause.set_pressure(True)
    worker.status = Status.running
    pause.set_pressure(True)
    assert worker.status is Status.paused
    undo.run()
    assert worker.status is Status.running


SAMPLE = Sample(
    7.0,
    (
        DeviceSample(
            "GPU-0",
            141 * GIB,
            9 * GIB,
            132 * GIB,
            None,
            40 * GIB,
            0,
            None,
            {"torch": FrameworkSample(GIB, None, 0, 4 * GIB)},
        ),
    ),
)


def test_a_summary_is_plain_and_what_is_unknown_stays_so() -> None:
    more = {"active": True, "simulated": False, "pressure": "critical", "paused": True}
    ledger = common.summary(SAMPLE, {}, more)
    assert json.loads(json.dumps(ledger)) == ledger
    (device,) = ledger["devices"]
    assert device["process"] is None and device["frameworks"]["torch"]["in_use"] is None
    assert tables.held(ledger) == "unknown of 40.00 GiB" and tables.pressure(ledger) == "critical, paused"
    assert tables.held(common.summary(None, {}, more)) == "unknown"
    assert tables.pressure({**ledger, "pressure": None, "paused": False}) == "unknown"
    assert tables.held({"active": False}) == tables.pressure({"active": False}) == "no budget"
    assert common.worst(iter([Pressure.OK, Pressure.CRITICAL, Pressure.WARN])) is Pressure.CRITICAL
    assert common.worst(iter([])) is Pressure.OK


def test_the_table_is_in_the_order_of_the_workers_names() -> None:
    ledger = common.summary(SAMPLE, {}, {"active": True, "simulated": False, "pressure": "ok", "paused": False})
    metrics: dict[str, Any] = {"memguard": ledger}
    workers = {
        "tcp://b": {"name": 10, "metrics": metrics},
        "tcp://a": {"name": 2, "metrics": {"memguard": {"active": False, "simulated": False}}},
        "tcp://c": {"name": "tcp://c", "metrics": {}},
    }
    found = tables.Ledgers.of({"workers": workers})
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["worker", "2", "10", "10", "tcp://c"]
    assert "no budget" in lines[1] and "unknown" in lines[2] and "says nothing" in lines[4]
    assert found.as_dict()["tcp://b"] == ledger and found.as_dict()["tcp://c"] is None and len(found) == 3
    assert repr(found) == "<Ledgers of 3 workers: print it for a table>"
