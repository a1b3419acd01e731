"""Where elastic caps, reservations and the monitor meet: what one of them does must not undo what another promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from guards import host_of, replaced, simulated, start
from waiting import until

import memguard
from memguard import api
from memguard._base.types import Device, State, Usage
from memguard._base.units import GIB
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard.errors import BudgetExceeded

pytestmark = pytest.mark.usefixtures("nothing_stays")


def elastic(*names: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "frameworks": {name: {"min": "10%", "max": "90%"} for name in names}, **more}


def caps(guard: Any) -> dict[str, int]:
    return dict(guard.plan.devices[0].caps)


def imported(guard: Any) -> Any:
    for name in guard.frameworks:
        simulated(guard, name).start_importing()
    return guard


def test_what_a_missing_framework_was_lent_is_lent_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(SimulatedFramework):
        def state(self) -> State:
            return State.ABSENT

        def why_absent(self) -> str:
            return "torch is not installed"

    replaced(monkeypatch, torch=Absent)
    guard = start(elastic("torch", "cupy"))
    assert caps(guard)["torch"] == guard.plan.devices[0].elastic["torch"][0]
    simulated(guard, "cupy").allocate(60 * GIB)


def test_a_cap_that_will_not_move_begins_at_its_min(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(SimulatedFramework):
        def fixed(self) -> bool:
            return True

    replaced(monkeypatch, torch=Fixed)
    guard = imported(start(elastic("torch", "cupy")))
    assert caps(guard)["torch"] == guard.plan.devices[0].elastic["torch"][0]
    simulated(guard, "cupy").allocate(60 * GIB)


def test_a_cap_that_does_not_move_fails_neither_a_request_nor_the_monitor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(SimulatedFramework):
        def resize(self, caps: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    replaced(monkeypatch, torch=Broken)
    guard = imported(start(elastic("torch", "cupy", monitor={"interval": "50ms"})))
    with pytest.raises(BudgetExceeded):
        memguard.require("cupy", "60GiB")
    assert caplog.text.count("torch: its cap stays at") == 1
    simulated(guard, "torch").allocate(GIB)
    guard.rebalance(guard.sample())
    assert guard.sample().devices


def test_what_is_reserved_while_somebody_lends_is_not_lent() -> None:
    guard = start(elastic("pycuda", "cupy"))
    cupy, pycuda = simulated(guard, "cupy"), simulated(guard, "pycuda")
    cupy.free(cupy.allocate(90 * GIB))
    memguard.trim()
    lowering, reserved, set_cap = threading.Event(), threading.Event(), guard.caps.set_cap
    outcome: list[object] = []

    def slow(name: str, uuid: str, cap: int) -> None:
        if name == "cupy" and not lowering.is_set():
            lowering.set()
            reserved.wait(10)
        set_cap(name, uuid, cap)

    def ask() -> None:
        try:
            outcome.append(pycuda.allocate(100 * GIB))
        except Exception as error:
            outcome.append(type(error).__name__)

    guard.caps.set_cap = slow  # type: ignore[method-assign]
    asking = threading.Thread(target=ask)
    asking.start()
    assert lowering.wait(10)
    with memguard.workload("w", framework="cupy", needs="60GiB"):
        reserved.set()
        asking.join(10)
        assert outcome == ["SimulatedPycudaOutOfMemory"]
        cupy.allocate(60 * GIB)


def test_a_request_that_must_wait_costs_nobody_a_cache_and_moves_no_cap() -> None:
    guard = start(elastic("torch", "cupy", "pycuda"))
    for name in guard.frameworks:
        simulated(guard, name).start_importing()
    host, gpu, cupy = host_of(guard), host_of(guard).devices()[0], simulated(guard, "cupy")
    cupy.free(cupy.allocate(20 * GIB))
    host.occupy(gpu, 4242, host.memory(gpu).free - 34 * GIB)
    said: list[str] = []

    def ask() -> None:
        for call in (
            lambda: memguard.require("pycuda", "50GiB"),
            lambda: memguard.workload("waits", framework="pycuda", needs="50GiB", wait=0.2).__enter__(),
        ):
            try:
                call()
            except BudgetExceeded as error:
                said.append(str(error))

    with memguard.workload("holds", framework="torch", needs="30GiB"):
        before, held = caps(guard), cupy.stats(gpu).held
        other = threading.Thread(target=ask)
        other.start()
        other.join(10)
        assert len(said) == 2 and all("'holds' (torch" in text for text in said)
        assert (caps(guard), cupy.stats(gpu).held) == (before, held)


def test_a_min_is_there_for_a_workload_though_others_wait_for_more() -> None:
    guard = imported(start(elastic("torch", "cupy", "numba")))
    part = guard.plan.devices[0]
    least, room = part.elastic["numba"][0], part.limit - part.reserve
    live = simulated(guard, "cupy").allocate(room * 6 // 10)
    waiting = threading.Thread(
        target=lambda: memguard.workload("big", framework="torch", needs=room * 6 // 10, wait=60).__enter__()
    )
    waiting.start()
    until(lambda: api.current().admission.get().queue.prune().waiting)
    with memguard.workload("small", framework="numba", needs=least - 4 * GIB):
        simulated(guard, "numba").allocate(least - 4 * GIB)
    assert waiting.is_alive(), "it was not waited for"
    simulated(guard, "cupy").free(live)
    waiting.join(30)
    assert not waiting.is_alive()


def test_nobody_waits_for_what_the_minima_of_others_never_leave() -> None:
    budget = {
        "version": 1,
        "frameworks": {"torch": {"min": "10%", "max": "100%"}, "cupy": {"min": "50%", "max": "60%"}},
    }
    guard = imported(start(budget))
    part = guard.plan.devices[0]
    begun = time.monotonic()
    with pytest.raises(BudgetExceeded, match=r"raise frameworks\.torch\.min|never") as caught:
        memguard.workload("w", framework="torch", needs=(part.limit - part.reserve) * 8 // 10, wait=60).__enter__()
    assert time.monotonic() - begun < 30, caught.value


def test_what_is_reserved_is_not_said_to_be_live() -> None:
    guard = imported(start(elastic("torch", "cupy")))
    with memguard.workload("w", framework="cupy", needs="80GiB"):
        assert guard.make_room("torch", 100 * GIB).live == {}


@pytest.fixture
def hangs() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_driver_that_hangs_under_the_monitor_hangs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
) -> None:
    main, there = threading.main_thread(), threading.Event()

    class Hanging(SimulatedFramework):
        def usage(self, device: Device) -> Usage | None:
            if threading.current_thread() is not main and not hangs.is_set():
                there.set()
                hangs.wait(30)
            return super().usage(device)

    replaced(monkeypatch, cupy=Hanging)
    guard = imported(start(elastic("torch", "cupy", monitor={"interval": "50ms"})))
    assert there.wait(10)
    begun = time.monotonic()
    simulated(guard, "torch").allocate(GIB)
    memguard.shutdown()
    assert time.monotonic() - begun < 8, "two seconds for the monitor's thread"


def test_a_tick_that_moves_a_cap_says_so() -> None:
    guard = imported(start(elastic("torch", "cupy")))
    cupy, torch = simulated(guard, "cupy"), simulated(guard, "torch")
    cupy.free(cupy.allocate(100 * GIB))  # torch keeps what it holds, and its headroom is gone
    memguard.trim()
    guard.take_events()
    low = caps(guard)
    torch.allocate(low["torch"] - GIB)
    guard.rebalance(guard.sample())
    (event,) = guard.take_events()
    assert (event.kind, event.framework) == ("reclaim", "torch") and "its cap moved from" in event.text
    assert caps(guard)["torch"] > low["torch"] and caps(guard)["cupy"] < low["cupy"]
    guard.rebalance(guard.sample())
    assert guard.take_events() == []
