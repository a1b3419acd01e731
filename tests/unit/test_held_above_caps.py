"""A cap that is lowered below live arrays frees none of them: what is held above it is given to nobody else.

Whatever happens after that, the process keeps within `device.limit`; and if it held more than that already when the
budget began, it takes no more.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from guards import host_of, replaced, simulated, start
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import memguard
from memguard import Budget
from memguard._base.types import Device, Sample, Usage
from memguard._base.units import GIB, MIB
from memguard._devices.catalog import Model
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard.guard import Guard
from memguard.errors import BudgetExceeded, MemguardError, PlanError

pytestmark = pytest.mark.usefixtures("nothing_stays")


def budget(**frameworks: Any) -> dict[str, Any]:
    return {"version": 1, "device": {"limit": "40GiB", "reserve": "2GiB"}, "frameworks": frameworks}


ELASTIC = budget(torch={"limit": "10GiB"}, cupy={"min": "2GiB", "max": "90%"}, numba={"limit": "16GiB"})
FIXED = budget(torch={"limit": "19GiB"}, numba={"limit": "19GiB"})


def filled(guard: Guard, name: str) -> list[int]:
    arrays: list[int] = []
    try:
        while True:
            arrays.append(simulated(guard, name).allocate(GIB // 2))
    except FrameworkOutOfMemory:
        return arrays


def held_by_process(guard: Guard) -> int:
    host, part = host_of(guard), guard.plan.devices[0]
    return host.processes(part.device)[host.pid] or 0


def within_limit(guard: Guard) -> bool:
    return held_by_process(guard) <= guard.plan.devices[0].limit


def lowered(given: dict[str, Any]) -> tuple[Guard, list[int]]:
    """14 GiB of numba's are live under a cap of 1."""
    guard = start(given)
    arrays = [simulated(guard, "numba").allocate(GIB) for _ in range(14)]
    memguard.resize("numba", "1GiB")
    return guard, arrays


def test_an_elastic_sibling_gets_none_of_it_until_it_is_freed() -> None:
    guard, arrays = lowered(ELASTIC)
    filled(guard, "torch"), filled(guard, "cupy")
    assert within_limit(guard)
    before = guard.plan.devices[0].caps["cupy"]
    with pytest.raises(BudgetExceeded, match=r"held above their caps: numba 13\.00 GiB"):
        memguard.require("cupy", "4GiB")
    for array in arrays[4:]:
        simulated(guard, "numba").free(array)
    memguard.require("cupy", "4GiB")
    assert filled(guard, "cupy") and within_limit(guard) and guard.plan.devices[0].caps["cupy"] >= before + 9 * GIB


def test_a_resize_gets_none_of_it_and_the_refusal_says_who_holds_it() -> None:
    guard, arrays = lowered(FIXED)
    with pytest.raises(PlanError) as caught:
        memguard.resize("torch", "37GiB")
    text = str(caught.value)
    assert (
        "between 2.0 MiB and 24.00 GiB is possible beside the other caps; held above their caps: numba 13.00 GiB"
        in text
    )
    assert text.endswith("ask for at most 24576MiB, or free arrays of numba and call memguard.trim() first")
    memguard.resize("torch", "24GiB")  # what it says is possible
    filled(guard, "torch")
    assert within_limit(guard)
    for array in arrays:
        simulated(guard, "numba").free(array)
    memguard.resize("torch", "37GiB")
    filled(guard, "torch"), filled(guard, "numba")
    assert within_limit(guard)


def test_what_is_only_cached_above_a_cap_is_called_back_for_a_resize() -> None:
    guard = start(budget(torch={"limit": "19GiB"}, cupy={"limit": "19GiB"}))
    torch, arrays = simulated(guard, "torch"), filled(guard, "torch")
    memguard.resize("torch", "1GiB")
    for array in arrays[2:]:
        torch.free(array)
    assert torch.stats(host_of(guard).devices()[0]).held > 18 * GIB, "its cache"
    memguard.resize("cupy", "37GiB")
    filled(guard, "cupy")
    assert within_limit(guard)


def test_it_may_have_its_own_bytes_back() -> None:
    lowered(FIXED)
    memguard.resize("torch", "24GiB")
    memguard.resize("numba", "14GiB")
    memguard.resize("numba", "13GiB")  # lower is always possible
    with pytest.raises(PlanError):
        memguard.resize("numba", "15GiB")


def test_a_framework_that_is_not_imported_yet_gets_none_of_it_either() -> None:
    guard, _ = lowered(FIXED)
    assert guard.frameworks["torch"].usage(guard.plan.devices[0].device) is None
    with pytest.raises(PlanError, match="numba 13"):
        memguard.resize("torch", "37GiB")


def test_neither_a_trim_nor_a_tick_nor_a_demand_gives_it_away() -> None:
    guard, _ = lowered(budget(torch={"min": "2GiB", "max": "90%"}, cupy={"limit": "4GiB"}, numba={"limit": "16GiB"}))
    for _ in range(3):
        filled(guard, "torch")
        guard.rebalance(guard.sample())
        memguard.trim()
        with contextlib.suppress(BudgetExceeded):
            memguard.require("torch", "1GiB")
        guard.rebalance(guard.sample())
    filled(guard, "cupy")
    assert within_limit(guard) and guard.plan.devices[0].caps["torch"] == 20 * GIB, "all that is left"


def test_it_is_held_back_after_a_suspension_too() -> None:
    guard, _ = lowered(ELASTIC)
    with memguard.suspended():
        pass
    filled(guard, "torch"), filled(guard, "cupy")
    guard.rebalance(guard.sample())
    filled(guard, "cupy")
    assert within_limit(guard)


class Live(SimulatedFramework):
    """It holds 14 GiB before the budget is there."""

    def __init__(self, host: SimulatedHost, name: str) -> None:
        super().__init__(host, name, imported=True)
        self.allocate(14 * GIB)


@pytest.mark.parametrize("order", [("torch", "cupy"), ("cupy", "torch")])
@pytest.mark.parametrize("replace", [False, True])
def test_nothing_is_lent_of_what_was_held_when_the_budget_began(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str], replace: bool
) -> None:
    if replace:
        start(budget(torch={"limit": "20GiB"}))
    replaced(monkeypatch, torch=Live)
    parts = {"torch": {"limit": "1GiB"}, "cupy": {"min": "2GiB", "max": "100%"}}
    guard = start(budget(**{name: parts[name] for name in order}), replace=replace)
    assert guard.plan.devices[0].caps["cupy"] == 24 * GIB, "37 GiB are not in torch's cap, and 13 are its arrays"
    simulated(guard, "cupy").start_importing()
    filled(guard, "cupy")
    assert within_limit(guard)


def test_a_framework_whose_cap_came_too_late_counts_with_what_it_holds() -> None:
    guard = start(budget(jax={"limit": "1GiB"}, cupy={"min": "2GiB", "max": "100%"}))
    part, seen = guard.plan.devices[0], Usage(14 * GIB, 14 * GIB, 0)
    guard.frameworks["jax"].usage = lambda device: seen  # type: ignore[method-assign]
    host_of(guard).take(part.device, 14 * GIB)
    guard.rebalance(guard.sample())
    assert guard.plan.devices[0].caps["cupy"] == 24 * GIB, "a tick calls back what nobody uses"
    filled(guard, "cupy")
    assert within_limit(guard)


def test_a_tick_reads_each_framework_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    ticks: list[list[str]] = []
    enough, main = threading.Event(), threading.main_thread()

    class Counted(SimulatedFramework):
        def usage(self, device: Device) -> Usage | None:
            if threading.current_thread() is not main:
                read.append(self.name)
            return super().usage(device)

    def ticked(sample: Sample) -> None:
        ticks.append(sorted(read))
        read.clear()
        if len(ticks) >= 5:
            enough.set()

    replaced(monkeypatch, torch=Counted, cupy=Counted, numba=Counted)
    part = {"min": "10%", "max": "90%"}
    guard = start({**budget(torch=part, cupy=part, numba={"share": "10%"}), "monitor": {"interval": "50ms"}})
    for name in guard.frameworks:
        simulated(guard, name).allocate(GIB)
    with memguard.workload("w", framework="cupy", needs="1GiB"), memguard.on_sample(ticked):
        assert enough.wait(30)
    assert ticks[-1] == ["cupy", "numba", "torch"], "the first ones move caps"


def test_a_tick_shows_the_caps_that_it_has_set() -> None:
    part = {"min": "10%", "max": "90%"}
    guard = start(budget(torch=part, cupy=part))
    cupy, torch = simulated(guard, "cupy"), simulated(guard, "torch")
    torch.start_importing()
    cupy.free(cupy.allocate(30 * GIB))
    memguard.trim()
    torch.allocate(guard.plan.devices[0].caps["torch"] - MIB)
    before = guard.sample()
    after = guard.rebalance(before)
    caps = guard.plan.devices[0].caps
    assert after.devices[0].frameworks["torch"].cap == caps["torch"] > (before.devices[0].frameworks["torch"].cap or 0)
    assert after.devices[0].frameworks["cupy"].cap == caps["cupy"]
    assert guard.rebalance(before) is before, "by caps of before nothing is moved"


# Whatever a program does

CARD = Model("card of the property", "hopper", 40 * GIB)
LIMIT, RESERVE = 17 * GIB, GIB
NAMES = ("torch", "cupy", "pycuda", "numba", "jax")
names = st.sampled_from(NAMES)
sizes = st.one_of(st.integers(1, 256 * MIB), st.integers(1, 30).map(lambda part: part * LIMIT // 30))


class HeldAboveCaps(RuleBasedStateMachine):
    """Fixed and elastic caps, of which the fixed ones are moved by the program as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[tuple[str, int]] = []

    @initialize(elastic=st.sets(st.sampled_from(("torch", "cupy", "pycuda")), max_size=3), live=st.integers(0, 20))
    def begin(self, elastic: set[str], live: int) -> None:
        frameworks = {name: {"min": "10%", "max": "80%"} if name in elastic else {"share": "15%"} for name in NAMES}
        given = {"version": 1, "device": {"limit": LIMIT, "reserve": RESERVE}, "frameworks": frameworks}
        host = SimulatedHost([CARD])
        self.guard = Guard(Budget.from_mapping(given), host)
        self.gpu = host.devices()[0]
        if live:  # before the budget: more than its cap, at times more than the limit
            before = SimulatedFramework(host, "cupy", imported=True)
            self.arrays += [("cupy", before.allocate(GIB)) for _ in range(live)]
            create = self.guard.caps.create
            self.guard.caps.create = lambda name: before if name == "cupy" else create(name)  # type: ignore[method-assign]
        self.guard.start()
        caps = self.guard.plan.devices[0].caps
        self.above = sum(
            max(one.stats(self.gpu).held - caps[name], 0)
            for name, one in self.guard.frameworks.items()
            if isinstance(one, SimulatedFramework)
        )

    def teardown(self) -> None:
        if hasattr(self, "guard"):
            self.guard.stop()

    def one(self, name: str) -> SimulatedFramework:
        return simulated(self.guard, name)

    @rule(name=names, size=sizes)
    def allocate(self, name: str, size: int) -> None:
        try:
            self.arrays.append((name, self.one(name).allocate(size)))
        except FrameworkOutOfMemory:
            self.guard.make_room(name, self.one(name).footprint(size), self.gpu)

    @rule(name=names)
    def fill(self, name: str) -> None:
        for size in (4 * GIB, GIB, 256 * MIB, 32 * MIB):
            for _ in range(LIMIT // size):
                before = len(self.arrays)
                self.allocate(name, size)
                if len(self.arrays) == before:
                    break

    @precondition(lambda self: self.arrays)
    @rule(data=st.data(), many=st.booleans())
    def free(self, data: st.DataObject, many: bool) -> None:
        for _ in range(len(self.arrays) if many else 1):
            name, array = self.arrays.pop(data.draw(st.integers(0, len(self.arrays) - 1)) if not many else -1)
            self.one(name).free(array)

    @rule(name=names, size=sizes)
    def resize(self, name: str, size: int) -> None:
        caps = dict(self.guard.plan.devices[0].caps)
        try:
            self.guard.resize(name, size)  # type: ignore[arg-type]
        except MemguardError:
            assert self.guard.plan.devices[0].caps[name] == caps[name]

    @rule(name=names)
    def lower_below_what_is_live(self, name: str) -> None:
        self.fill(name)
        self.resize(name, 2 * MIB)

    @rule(name=names)
    def take_all_that_the_caps_leave(self, name: str) -> None:
        part = self.guard.plan.devices[0]
        self.resize(name, part.caps[name] + part.unallocated)
        self.fill(name)

    @rule(name=names, size=sizes)
    def require(self, name: str, size: int) -> None:
        with contextlib.suppress(BudgetExceeded):
            self.guard.require(name, size)  # type: ignore[arg-type]

    @rule()
    def tick(self) -> None:
        self.guard.rebalance(self.guard.sample())

    @rule(name=st.none() | names)
    def trim(self, name: str | None) -> None:
        self.guard.trim(name)  # type: ignore[arg-type]

    @invariant()
    def keeps_within_the_limit(self) -> None:
        if not hasattr(self, "above"):
            return
        host, part = host_of(self.guard), self.guard.plan.devices[0]
        assert sum(part.caps.values()) + part.unallocated == LIMIT - RESERVE and part.unallocated >= 0
        assert (host.processes(self.gpu).get(host.pid) or 0) <= LIMIT + self.above


TestHeldAboveCaps = HeldAboveCaps.TestCase
TestHeldAboveCaps.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
