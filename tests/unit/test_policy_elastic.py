"""Elastic shares in the plan: minima are had in any case, no sum passes the room, and what is spare is lent."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from memguard._base.types import DevicePlan, MemoryInfo, Plan, Room, Usage
from memguard._base.units import GIB, GRANULE, MIB, round_down
from memguard._budget import FRAMEWORKS, from_mapping, parse, policy
from memguard._budget.policy import starting_caps
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.specs import NEVER_GIVE_BACK, SPECS
from memguard.errors import ConfigError, MemguardError, PlanError

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

more = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROOM = 1000 * GRANULE


def planned(gpu: str = "h200", **frameworks: Any) -> Plan:
    budget = {"version": 1, "device": {"limit": "90%"}, "frameworks": frameworks}
    return policy.plan(from_mapping(budget), SimulatedHost([gpu]).devices())


def of_room(**frameworks: Any) -> DevicePlan:
    """The plan of one GPU on which the frameworks may take `ROOM`."""
    device = {"limit": 2 * GIB + ROOM, "reserve": 2 * GIB}
    budget = from_mapping({"version": 1, "device": device, "frameworks": frameworks})
    return policy.plan(budget, SimulatedHost(["h200"]).devices()).devices[0]


def test_min_and_max_in_per_cent_and_bytes() -> None:
    part = of_room(cupy={"min": "5%", "max": "15%"}, numba={"min": "6MiB", "max": "30MiB"}, torch={"share": "50%"})
    assert part.elastic == {"cupy": (50 * GRANULE, 150 * GRANULE), "numba": (3 * GRANULE, 15 * GRANULE)}
    assert part.caps == {"cupy": 150 * GRANULE, "numba": 15 * GRANULE, "torch": 500 * GRANULE}
    assert part.unallocated == 335 * GRANULE


def test_a_max_is_rounded_down_and_no_larger_than_the_room() -> None:
    part = of_room(cupy={"min": "2MiB", "max": 5 * MIB}, numba={"min": "2MiB", "max": "500GiB"})
    assert part.elastic == {"cupy": (GRANULE, 2 * GRANULE), "numba": (GRANULE, ROOM)}


def test_a_max_that_equals_its_min_is_no_less_after_rounding() -> None:
    """A remainder may give the min one granule more than its exact part."""
    part = of_room(cupy={"min": "10.06%", "max": "10.06%"}, numba={"share": "10.04%"})
    assert part.elastic == {"cupy": (101 * GRANULE, 101 * GRANULE)}


def test_what_is_spare_goes_first_to_torch_which_cannot_ask() -> None:
    part = of_room(cupy={"min": "10%", "max": "100%"}, torch={"min": "20%", "max": "60%"}, jax={"share": "25%"})
    assert part.caps == {"cupy": 150 * GRANULE, "torch": 600 * GRANULE, "jax": 250 * GRANULE}
    assert part.unallocated == 0


def test_torch_gets_as_much_of_its_max_as_there_is_and_the_others_their_min() -> None:
    part = of_room(cupy={"min": "30%", "max": "40%"}, torch={"min": "20%", "max": "90%"}, numba={"limit": "10MiB"})
    assert part.caps == {"cupy": 300 * GRANULE, "torch": 695 * GRANULE, "numba": 5 * GRANULE}


def test_the_others_get_what_torch_leaves_in_file_order() -> None:
    part = of_room(numba={"min": "10%", "max": "50%"}, cupy={"min": "10%", "max": "50%"}, pycuda={"share": "20%"})
    assert part.caps == {"numba": 500 * GRANULE, "cupy": 300 * GRANULE, "pycuda": 200 * GRANULE}


@pytest.mark.parametrize("name", sorted(NEVER_GIVE_BACK))
def test_a_cap_that_cannot_move_is_the_min_and_the_plan_says_so(name: str) -> None:
    plan = planned(**{name: {"min": "10%", "max": "30%"}, "cupy": {"min": "5%", "max": "50%"}})
    (part,) = plan.devices
    room = part.limit - part.reserve
    assert part.caps[name] - Fraction(room, 10) < GRANULE and name not in part.elastic
    (note,) = plan.notes
    assert note.startswith(f"{name}: its limit cannot change while it runs")
    assert "of min 10% and max 30% it gets its min" in note


def test_frameworks_of_a_share_have_no_bounds_and_no_note() -> None:
    plan = planned(torch={"share": "50%"}, tensorflow={"limit": "1GiB"})
    assert plan.devices[0].elastic == {} and plan.notes == ()


def test_minima_that_do_not_fit_have_a_fix_that_does() -> None:
    text = "version: 1\ndevice: {limit: 90%}\nframeworks:\n  torch: {share: 60%}\n  cupy: {min: 70GiB, max: 90GiB}\n"
    with pytest.raises(PlanError) as raised:
        policy.plan(parse(text, "b.yaml"), SimulatedHost(["h200"]).devices())
    (problem,) = raised.value.problems
    assert problem.line == 3
    assert "lower shares, limits or minima, for example to " in problem.fix
    numbers = problem.fix.partition("for example to ")[2].partition(", or raise")[0]
    lowered = dict(one.split() for one in numbers.split(", "))
    assert set(lowered) <= {"torch", "cupy.min"}
    for name, part in lowered.items():
        text = text.replace("70GiB" if name == "cupy.min" else "60%", part)
    policy.plan(parse(text), SimulatedHost(["h200"]).devices())


@pytest.mark.parametrize("gpus", [["t4", "h100", "h200"], ["h200", "t4", "h100"]])
def test_a_max_below_its_min_is_told_with_the_line_and_one_number_for_all_gpus(gpus: list[str]) -> None:
    text = "version: 1\nframeworks:\n  cupy: {min: 10%, max: 4GiB}\n"
    with pytest.raises(PlanError) as raised:
        policy.plan(parse(text, "b.yaml"), SimulatedHost(gpus).devices())
    first, second = sorted(raised.value.problems, key=lambda problem: problem.message)
    assert (first.line, first.column, first.path) == (3, 25, "frameworks.cupy.max")
    assert "its max of 4.00 GiB on NVIDIA H100" in first.message and "H200" in second.message
    number = first.fix.split()[6].rstrip(",")
    assert first.fix == second.fix and number.endswith("MiB")
    policy.plan(parse(text.replace("4GiB", number)), SimulatedHost(gpus).devices())


def test_a_min_too_small_for_a_granule() -> None:
    with pytest.raises(PlanError, match="raise its min to at least"):
        planned("t4", cupy={"min": "0.001%", "max": "1%"})


@pytest.mark.parametrize(("live", "bound"), [({}, "max"), ({"torch": GIB}, "min and max")])
def test_a_refusal_says_which_bound_to_raise(live: dict[str, int], bound: str) -> None:
    part = of_room(cupy={"min": "5%", "max": "15%"}, torch={"min": "5%", "max": "90%"}, jax={"share": "10%"})
    usage, memory = Usage(0, 0, 0), MemoryInfo(100 * GIB, 0, 0, 100 * GIB)
    for name, said in (
        ("cupy", f"raise frameworks.cupy.{bound} in the budget"),
        ("jax", "raise frameworks.jax in the"),
    ):
        refusal = policy.admit(name, GIB, GIB, part.caps[name], {name: usage}, memory).refusal
        assert refusal is not None
        assert said in str(policy.elastic_advice(refusal, part, Room({}, None, GIB, live)))


@pytest.mark.parametrize("live", [{}, {"torch": 100 * MIB}])
@pytest.mark.parametrize("needed", [500, 1100, 1300, 1500, 1900])
def test_the_budget_that_a_refusal_asks_for_has_room_for_the_request(needed: int, live: dict[str, int]) -> None:
    """MiB, in a room of 2000: CuPy's max is 1400, and what others have for sure leaves 1200."""
    shares: dict[str, Any] = {
        "cupy": {"min": 200 * MIB, "max": 1400 * MIB}, "torch": {"min": 600 * MIB, "max": 900 * MIB},
        "jax": {"limit": 200 * MIB},
    }  # fmt: skip
    part = of_room(**shares)
    part = dataclasses.replace(part, caps={**part.caps, "cupy": 400 * MIB})
    cap = 400 * MIB if needed == 500 else 1200 * MIB  # refused by the cap of now, or by the most that it may be
    memory = MemoryInfo(100 * GIB, 0, 0, 100 * GIB)
    plain = policy.admit("cupy", needed * MIB, needed * MIB, cap, {"cupy": Usage(0, 0, 0)}, memory).refusal
    if plain is None:  # it is not refused
        assert needed == 1100
        return
    refusal = str(policy.elastic_advice(plain, part, Room({}, None, GIB, live)))
    assert ("its cap can rise to 1.17 GiB" in refusal) == (cap == 1200 * MIB)
    assert "what others have for sure leaves 1.17 GiB" in refusal
    keys, mib = re.findall(
        r"raise frameworks\.cupy\.(min|max|min and max) in the budget to at least (\d+)MiB", refusal
    )[0]
    less = re.search(r"lower what torch or jax has for sure \(min, share or limit\) by (\d+)MiB", refusal)
    for key in keys.split(" and "):
        shares["cupy"][key] = int(mib) * MIB
    if less is not None:
        part_of_it = min(int(less[1]), 598)
        shares["torch"]["min"] -= part_of_it * MIB
        shares["jax"]["limit"] -= (int(less[1]) - part_of_it) * MIB
    again = of_room(**shares)
    assert again.elastic["cupy"][0] >= needed * MIB


def test_a_refusal_never_asks_for_more_than_the_budget_has() -> None:
    part = of_room(cupy={"min": "5%", "max": "100%"}, torch={"min": "5%", "max": "90%"})
    memory, most = MemoryInfo(100 * GIB, 0, 0, 100 * GIB), policy.guaranteed_cap(part, "cupy")
    plain = policy.admit("cupy", 3 * GIB, 3 * GIB, most, {"cupy": Usage(0, 0, 0)}, memory).refusal
    assert plain is not None
    refusal = str(policy.elastic_advice(plain, part, Room({}, None, GIB, {})))
    assert "raise frameworks" not in refusal and "use a larger GPU: the budget has 1.95 GiB of this one" in refusal


def test_where_the_card_is_full_the_bounds_are_no_matter() -> None:
    part = of_room(cupy={"min": "5%", "max": "15%"})
    plain = policy.admit("cupy", MIB, MIB, GIB, {"cupy": Usage(0, 0, 0)}, MemoryInfo(GIB, 0, GIB, 0)).refusal
    assert plain is not None
    assert policy.elastic_advice(plain, part, Room({}, None, GIB, {})) == plain.advice()


PERCENTS = st.integers(1, 40_000).map(lambda n: f"{n / 1000:.3f}%")
SIZES = st.integers(GRANULE, 2 * GIB) | st.integers(GRANULE, 100 * GIB)
AMOUNTS = PERCENTS | SIZES
ELASTIC = st.fixed_dictionaries({"min": AMOUNTS, "max": AMOUNTS | st.sampled_from(["100%", "90%", "50%"])})
ENTRY = st.one_of(ELASTIC, ELASTIC, st.fixed_dictionaries({"share": PERCENTS}), st.fixed_dictionaries({"limit": SIZES}))
BUDGETS = st.fixed_dictionaries(
    {"version": st.just(1), "frameworks": st.dictionaries(st.sampled_from(FRAMEWORKS), ENTRY, min_size=1, max_size=4)},
    optional={"device": st.fixed_dictionaries({"limit": SIZES | st.just("100%")}, optional={"reserve": SIZES})},
)
MODELS = st.lists(st.sampled_from(sorted(CATALOGUE)), min_size=1, max_size=3)


def outcome(asked: dict[str, Any], models: list[str]) -> Plan | MemguardError:
    try:
        return policy.plan(from_mapping(asked), SimulatedHost(models).devices())
    except MemguardError as error:
        assert "fix: " in str(error)
        return error


@more
@given(BUDGETS, MODELS)
def test_every_cap_is_within_its_bounds_and_the_sum_within_the_room(asked: dict[str, Any], models: list[str]) -> None:
    plan = outcome(asked, models)
    assume(isinstance(plan, Plan))
    assert isinstance(plan, Plan)
    declared = from_mapping(asked).frameworks
    moving = {name for name, own in declared.items() if own.min is not None} - NEVER_GIVE_BACK
    for part in plan.devices:
        room = part.limit - part.reserve
        assert set(part.elastic) == moving and list(part.caps) == list(declared)
        assert part.limit == part.reserve + sum(part.caps.values()) + part.unallocated and part.unallocated >= 0
        assert all(cap >= GRANULE and cap % GRANULE == 0 for cap in part.caps.values())
        for name, cap in part.caps.items():
            own = declared[name]
            exact = own.guaranteed * room if isinstance(own.guaranteed, Fraction) else Fraction(own.guaranteed)
            least, most = part.elastic.get(name, (cap, cap))
            assert GRANULE <= least <= cap <= most <= room and abs(least - exact) < GRANULE
            if name in moving:
                assert own.max is not None
                bound = own.max * room if isinstance(own.max, Fraction) else own.max
                assert most <= max(bound, least)
        spare = room - sum(part.elastic.get(name, (cap, cap))[0] for name, cap in part.caps.items())
        lent = sum(part.caps[name] - least for name, (least, _) in part.elastic.items())
        assert 0 <= lent <= spare
        if any(part.caps[name] < most for name, (_, most) in part.elastic.items()):
            assert lent == round_down(spare), "what is spare is lent while somebody's max allows it"


@more
@given(BUDGETS, MODELS)
def test_gpus_are_planned_each_for_itself_in_any_order(asked: dict[str, Any], models: list[str]) -> None:
    devices = SimulatedHost(models).devices()
    plan = outcome(asked, models)
    assume(isinstance(plan, Plan))
    assert isinstance(plan, Plan)
    again = policy.plan(from_mapping(asked), list(reversed(devices)))
    assert list(reversed(again.devices)) == list(plan.devices) and again.notes == plan.notes
    for device, part in zip(devices, plan.devices, strict=True):
        assert policy.plan(from_mapping(asked), [device]).devices == (part,)


@more
@given(BUDGETS, MODELS)
def test_a_budget_written_again_gives_the_same_plan(asked: dict[str, Any], models: list[str]) -> None:
    plan = outcome(asked, models)
    assume(isinstance(plan, Plan))
    assert outcome(from_mapping(asked).model_dump(exclude_none=True), models) == plan


@pytest.mark.long  # of the generator of these tests
def test_each_kind_of_outcome_is_really_tried() -> None:
    kinds = {"plan": 0, "lent": 0, "PlanError": 0, "ConfigError": 0, "below": 0}

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(BUDGETS, MODELS)
    def count(asked: dict[str, Any], models: list[str]) -> None:
        found = outcome(asked, models)
        kinds["plan" if isinstance(found, Plan) else type(found).__name__] += 1
        if isinstance(found, Plan):
            kinds["lent"] += any(p.caps[n] > least for p in found.devices for n, (least, _) in p.elastic.items())
        elif isinstance(found, ConfigError | PlanError):
            said = [problem.message for problem in found.problems]
            kinds["below"] += any("than its min of" in one or "than the min of" in one for one in said)

    count()
    assert min(kinds.values()) >= 15, kinds


UNITS = st.integers(1, 300)


@more
@given(st.lists(st.tuples(st.sampled_from(FRAMEWORKS), UNITS, UNITS, st.booleans()), unique_by=lambda t: t[0]), UNITS)
@example([("cupy", 1, 10, True), ("torch", 1, 10, True)], 5)
def test_starting_caps_lend_to_those_who_cannot_ask_first(parts: list[tuple[str, int, int, bool]], spare: int) -> None:
    least = {name: units * GRANULE for name, units, _, _ in parts}
    elastic = {n: (least[n], least[n] + extra * GRANULE) for n, _, extra, moves in parts if moves}
    room = sum(least.values()) + spare * GRANULE + GRANULE // 2
    caps = starting_caps(room, least, elastic)
    assert list(caps) == list(least) and sum(caps.values()) <= room
    assert all(caps[name] == size for name, size in least.items() if name not in elastic)
    order = [n for n in elastic if not SPECS[n].requests_room] + [n for n in elastic if SPECS[n].requests_room]
    for before, after in pairwise(order):
        if caps[after] > elastic[after][0]:
            assert caps[before] == elastic[before][1], "nobody is lent anything before all before it have their max"
