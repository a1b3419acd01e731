"""Whatever budget and GPUs come together: a plan whose sums hold, or a MemguardError with a fix."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memguard._base.types import Device, MemoryInfo, Plan, Usage
from memguard._base.units import GIB, GRANULE, MIB, TIB, round_down
from memguard._budget import FRAMEWORKS, Budget, from_mapping, policy
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard.errors import MemguardError, PlanError

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

more = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PERCENTS = st.one_of(
    st.sampled_from(["1%", "10%", "25%", "33.3%", "50%", "90%", "100%", "0.0001%"]),
    st.integers(1, 99_999).map(lambda n: f"{n / 1000:.3f}%"),
)
SIZES = st.one_of(st.integers(GRANULE, 200 * GIB), st.sampled_from(["2MiB", "512MiB", "1GiB", "15GiB", "80GiB"]))
ENTRY = st.one_of(
    st.fixed_dictionaries({"share": st.integers(1, 33_000).map(lambda n: f"{n / 1000:.3f}%") | PERCENTS}),
    st.fixed_dictionaries({"limit": SIZES | st.integers(GRANULE, 2 * GIB)}),
)
DEVICE = st.fixed_dictionaries({}, optional={"limit": PERCENTS | SIZES, "reserve": SIZES | st.just("auto")})
KEYS = st.sampled_from(["0", "1", "*", "NVIDIA*", "Tesla T4", "GPU-00000000-0000-4000-8000-000000000000"])
FRAMEWORK_ENTRIES = st.dictionaries(st.sampled_from(FRAMEWORKS), ENTRY, min_size=1)
MAPPINGS = st.fixed_dictionaries(
    {"version": st.just(1), "frameworks": FRAMEWORK_ENTRIES},
    optional={"device": DEVICE, "devices": st.dictionaries(KEYS, DEVICE, max_size=3)},
)
MODELS = st.lists(st.sampled_from(sorted(CATALOGUE)), min_size=1, max_size=3)


def outcome(asked: Mapping[str, Any] | Budget, models: list[str]) -> Plan | MemguardError:
    try:
        budget = asked if isinstance(asked, Budget) else from_mapping(asked)
        return policy.plan(budget, SimulatedHost(models).devices())
    except MemguardError as error:
        if "fix: " not in str(error):
            pytest.fail(f"no fix in {error}")
        return error


def sums_hold(plan: Plan) -> None:
    for part in plan.devices:
        assert part.limit <= part.device.usable
        assert part.limit == part.reserve + sum(part.caps.values()) + part.unallocated
        assert part.unallocated >= 0 and part.reserve > 0
        assert all(cap >= GRANULE and cap % GRANULE == 0 for cap in part.caps.values())


@more
@given(MAPPINGS, MODELS)
def test_sums_hold_or_it_is_said_why_not(asked: dict[str, Any], models: list[str]) -> None:
    plan = outcome(asked, models)
    if isinstance(plan, Plan):
        sums_hold(plan)
        assert [part.device for part in plan.devices] == list(SimulatedHost(models).devices())
        assert all(list(part.caps) == list(asked["frameworks"]) for part in plan.devices)


@more
@given(MAPPINGS, MODELS)
def test_no_cap_is_above_what_was_declared_and_none_misses_a_whole_granule(
    asked: dict[str, Any], models: list[str]
) -> None:
    plan = outcome(asked, models)
    assume(isinstance(plan, Plan))
    assert isinstance(plan, Plan)
    declared = from_mapping(asked).frameworks
    for part in plan.devices:
        room = part.limit - part.reserve
        shares = [f.share for f in declared.values() if f.share is not None]
        for name, cap in part.caps.items():
            rule = declared[name]
            if rule.limit is not None:
                assert cap == round_down(rule.limit)
            else:
                assert rule.share is not None
                assert abs(cap - rule.share * room) < GRANULE
        divided = sum(part.caps[n] for n, f in declared.items() if f.share is not None)
        assert divided == round_down(int(sum(shares, Fraction(0)) * room)), "the sum of the exact shares, rounded down"


@more
@given(MAPPINGS, MODELS)
def test_the_same_question_has_the_same_answer(asked: dict[str, Any], models: list[str]) -> None:
    first, second = outcome(asked, models), outcome(asked, models)
    assert str(first) == str(second)


@more
@given(MAPPINGS, MODELS, st.randoms(use_true_random=False))
def test_the_order_of_frameworks_only_breaks_ties(asked: dict[str, Any], models: list[str], rng: Any) -> None:
    names = list(asked["frameworks"])
    rng.shuffle(names)
    plan = outcome(asked, models)
    other = outcome({**asked, "frameworks": {name: asked["frameworks"][name] for name in names}}, models)
    assert isinstance(plan, Plan) is isinstance(other, Plan)
    if isinstance(plan, Plan) and isinstance(other, Plan):
        for part, again in zip(plan.devices, other.devices, strict=True):
            assert (part.limit, part.reserve, part.unallocated) == (again.limit, again.reserve, again.unallocated)
            moved = {name: again.caps[name] - part.caps[name] for name in names}
            assert all(abs(step) <= GRANULE for step in moved.values()) and sum(moved.values()) == 0
            room = part.limit - part.reserve
            rests = [from_mapping(asked).frameworks[n].share * room / GRANULE % 1 for n, step in moved.items() if step]  # type: ignore[operator]
            assert len(set(rests)) <= 1, "only equal remainders may change places"


@more
@given(MAPPINGS, MODELS)
def test_a_budget_written_again_gives_the_same_plan(asked: dict[str, Any], models: list[str]) -> None:
    plan = outcome(asked, models)
    assume(isinstance(plan, Plan))
    dumped = from_mapping(asked).model_dump(exclude_none=True)
    assert outcome(dumped, models) == plan


@pytest.mark.long  # of the generator of these tests
def test_each_kind_of_outcome_is_really_tried() -> None:
    kinds = {"plan": 0, "PlanError": 0, "ConfigError": 0}

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(MAPPINGS, MODELS)
    def count(asked: dict[str, Any], models: list[str]) -> None:
        found = outcome(asked, models)
        kinds["plan" if isinstance(found, Plan) else type(found).__name__] += 1

    count()
    assert min(kinds.values()) >= 15, kinds


PLANS = st.tuples(MAPPINGS, MODELS).map(lambda pair: outcome(*pair)).filter(lambda found: isinstance(found, Plan))


@more
@given(PLANS, st.sampled_from(FRAMEWORKS), st.integers(1, 160 * GIB))
def test_a_resize_keeps_the_sums_or_says_what_is_possible(plan: Plan, framework: str, size: int) -> None:
    assume(framework in plan.devices[0].caps)
    most = min(part.unallocated + part.caps[framework] for part in plan.devices)
    if GRANULE <= round_down(size) <= most:
        changed = policy.resized(plan, framework, size)
        sums_hold(changed)
        for part, before in zip(changed.devices, plan.devices, strict=True):
            assert part.caps[framework] == round_down(size)
            assert all(part.caps[n] == cap for n, cap in before.caps.items() if n != framework)
    else:
        with pytest.raises(PlanError, match="is possible beside the other caps"):
            policy.resized(plan, framework, size)


BYTES = st.integers(0, 96 * GIB // MIB).map(lambda n: n * MIB) | st.integers(0, TIB)


@st.composite
def usages(draw: st.DrawFn) -> Usage | None:
    kind = draw(st.sampled_from(["none", "exact", "silent", "grows"]))
    if kind == "none":
        return None
    in_use = draw(BYTES)
    held = in_use + draw(BYTES)
    if kind == "grows":
        return Usage(None, in_use, 0, held_at_least=held, held_at_most=held + draw(BYTES))
    return Usage(held, in_use, None if kind == "silent" else draw(st.integers(0, held - in_use)))


def idle(usage: Usage) -> int:
    """What may go back: all of the cache where the framework does not say."""
    if usage.reclaimable is not None:
        return usage.reclaimable
    return usage.held - usage.in_use if usage.held is not None and usage.in_use is not None else 0


@more
@given(
    st.sampled_from(FRAMEWORKS),
    st.integers(1, TIB),
    st.integers(GRANULE, TIB),
    st.dictionaries(st.sampled_from(FRAMEWORKS), usages()),
    BYTES,
)
def test_admission_never_promises_what_cannot_be_had(
    framework: str, needed: int, cap: int, found: dict[str, Usage | None], free: int
) -> None:
    memory = MemoryInfo(4 * TIB, 0, 4 * TIB - free, free)
    answer = policy.admit(framework, needed, needed, cap, found, memory)
    own = found.get(framework) or Usage(0, 0, 0)
    others = {n: idle(u) for n, u in found.items() if n != framework and u is not None}
    assert answer.available >= 0
    if answer.refusal is None:
        assert needed <= answer.available
        held = own.held if own.held is not None else own.held_at_least
        back = idle(own)
        within = (held or 0) - back - (own.in_use or 0)  # what its pool may serve from, and cannot give back
        counted = own.held if own.held is not None else own.in_use
        assert needed <= within or (counted or 0) - back + needed <= cap, "never above the cap"
        on_card = back + free + sum(others[name] for name in answer.trim)
        assert needed <= within or needed <= on_card, "never above the card"
        assert framework not in answer.trim and all(others[name] > 0 for name in answer.trim)
        if answer.trim:
            assert needed > back + free + sum(others[name] for name in answer.trim[:-1]), "none trimmed in vain"
    else:
        assert needed > answer.available and answer.trim == () and answer.refusal.advice().fix
        if answer.available:
            again = policy.admit(framework, answer.available, answer.available, cap, found, memory)
            assert again.refusal is None or again.available < answer.available


@more
@given(MODELS, st.integers(0, 200 * GIB), st.none() | st.integers(0, 200 * GIB))
def test_busy_warns_exactly_where_the_limit_cannot_be_had(models: list[str], others: int, own: int | None) -> None:
    budget = from_mapping({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
    gpu: Device = SimulatedHost(models).devices()[0]
    (part,) = policy.plan(budget, [gpu]).devices
    used = min(others + (own or 0), gpu.usable)
    warning = policy.busy(part, MemoryInfo(gpu.total, gpu.reserved, used, gpu.usable - used), own)
    assert (warning is None) is (gpu.usable - used + (own or 0) >= part.limit)
