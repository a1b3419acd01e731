"""Every fix of a PlanError and of a refused resize is followed, and leads to a plan: sums in one round."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memguard
from memguard._base.types import MemoryInfo, Usage
from memguard._base.units import GIB, GRANULE, MIB, parse_size
from memguard._budget import from_mapping, policy
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.torch import settings as settings_of_torch
from memguard.errors import ConfigError, PlanError, Problem

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

DEVICES = SimulatedHost(["h200", "t4", "l40s"]).devices()


def follow(data: dict[str, Any], problem: Problem) -> bool:
    """Change the budget as the fix says. False if it says that this GPU cannot do."""
    fix, path = problem.fix, re.findall(r"[A-Za-z_]+|(?<=\[')[^']+(?='\])", problem.path)
    if found := re.match(r"lower it to at most (\w+)", fix):
        data[path[0]] = data.get(path[0], {})
        (data[path[0]] if len(path) == 2 else data[path[0]][path[1]])["limit"] = found[1]
    elif found := re.match(r"raise (\S+)\.limit to (\w+)", fix):
        first, _, key = found[1].partition(".")
        (data.setdefault(first, {}) if not key else data[first][key])["limit"] = found[2]
    elif found := re.search(r"for example to (.*?)(?:, or raise device\.limit)?$", fix):
        for name, part in (one.split() for one in found[1].split(", ")):
            kind = "share" if part.endswith("%") else "limit"
            assert kind in data["frameworks"][name]
            data["frameworks"][name][kind] = part
    elif found := re.match(r"raise its share to at least (\S+%)", fix):
        data["frameworks"][path[1]]["share"] = found[1]
    elif found := re.match(r"lower device.reserve to at most (\w+) for it", fix):
        for entry in (data["device"], *data.get("devices", {}).values()):
            if "reserve" in entry:
                entry["reserve"] = found[1]
    else:
        assert "this GPU is too small" in fix or "not even the smallest caps fit" in fix, fix
        return False
    return True


SHARES = st.integers(1, 100).map(lambda percent: {"share": f"{percent}%"})
SIZES = st.integers(1, 200_000).map(lambda mib: {"limit": f"{max(mib, 2)}MiB"})
LIMITS = st.integers(2, 200_000).map(lambda mib: f"{mib}MiB") | st.integers(1, 100).map(lambda percent: f"{percent}%")
ENTRY = st.fixed_dictionaries({}, optional={"limit": LIMITS, "reserve": st.sampled_from(["auto", "1GiB", "8GiB"])})
BUDGETS = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "frameworks": st.dictionaries(st.sampled_from(["torch", "jax", "cupy", "numba"]), SHARES | SIZES, min_size=1),
    },
    optional={"device": ENTRY, "devices": st.dictionaries(st.sampled_from(["0", "1", "*L40S*"]), ENTRY, max_size=2)},
)


def problems_of(data: dict[str, Any], devices: Any) -> tuple[Problem, ...] | None:
    """What does not fit; None if the file itself is wrong."""
    try:
        policy.plan(from_mapping(data), devices)
    except PlanError as error:
        return error.problems
    except ConfigError:
        return None
    return ()


@settings(max_examples=300, deadline=None)
@given(BUDGETS, st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3, unique=True))
def test_the_fixes_of_a_plan_lead_to_a_plan(data: dict[str, Any], devices: Any) -> None:
    """One round for sums and for limits; another where a limit that was raised or lowered leaves too little."""
    data, kinds = copy.deepcopy(data), []
    for _ in range(4):
        problems = problems_of(data, devices)
        if not problems:
            return
        kinds.append({problem.path.split("[")[0].split(".")[0] for problem in problems})
        followed = [follow(data, problem) for problem in problems]
        if not all(followed):
            return
    assert not problems_of(data, devices), (kinds, data)


def test_nobody_is_told_to_raise_a_limit_that_is_too_large_for_the_gpu() -> None:
    """The fixes of one plan do not contradict each other; where nothing can be lowered that is said."""
    for gpu in ("t4", "h100-1g.10gb", "a10", "rtx4090"):
        for frameworks in ({"torch": {"share": "80%"}, "cupy": {"limit": "8GiB"}}, {"cupy": {"limit": "23GiB"}}):
            for limit in ("40GiB", "100%"):
                mapping = {"version": 1, "device": {"limit": limit}, "frameworks": frameworks}
                with pytest.raises(PlanError) as raised:
                    policy.plan(from_mapping(mapping), SimulatedHost(gpu).devices())
                fixes = " ".join(problem.fix for problem in raised.value.problems)
                assert ("or raise device.limit" in fixes) is (limit == "100%")
                assert ("lower it to at most" in fixes) is (limit == "40GiB")


def test_sums_on_several_gpus_take_one_round() -> None:
    tried = 0
    for torch in ("limit: 90%", "share: 80%", "limit: 60GiB", "limit: 8GiB"):
        for jax in ("limit: 40GiB", "share: 20%", "share: 10%", "limit: 120GiB"):
            for limit in ("90%", "50%", "12GiB"):
                entries = [dict([one.split(": ")]) for one in (torch, jax)]
                data = {
                    "version": 1,
                    "device": {"limit": limit},
                    "frameworks": dict(zip(("torch", "jax"), entries, strict=True)),
                }
                if not (problems := problems_of(data, DEVICES)):
                    continue
                for problem in problems:
                    assert follow(data, problem)
                assert problems_of(data, DEVICES) == ()
                tried += 1
    assert tried > 10


@given(st.integers(1, 300_000))
def test_a_refused_resize_says_what_would_do(mib: int) -> None:
    budget = from_mapping({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}, "jax": {"limit": "4GiB"}}})
    plan = policy.plan(budget, DEVICES)
    try:
        policy.resized(plan, "torch", mib * MIB)
    except PlanError as error:
        fix = error.problems[0].fix
        found = re.match(r"ask for at (?:most|least) (\w+)", fix)
        assert found is not None
        policy.resized(plan, "torch", parse_size(found[1]))
    full = policy.resized(plan, "torch", min(part.caps["torch"] + part.unallocated for part in plan.devices))
    with pytest.raises(PlanError, match="lower another framework's cap first"):
        policy.resized(full, "cupy", GIB)


@given(st.integers(1, 100), st.integers(0, 40))
def test_a_refusal_says_which_cap_would_do(asked: int, held: int) -> None:
    cap, needed = 40 * GIB, asked * GIB
    memory = MemoryInfo(total=140 * GIB, used=held * GIB, free=(140 - held) * GIB, reserved=0)
    usage = {"torch": Usage(held=held * GIB, in_use=held * GIB)}
    refusal = policy.admit("torch", needed, needed, cap, usage, memory).refusal
    if isinstance(refusal, policy.OverCap):
        (mib,) = re.findall(r"raise frameworks.torch in the budget to at least (\d+)MiB", refusal.advice().fix)
        larger = int(mib) * MIB
        again = policy.admit("torch", needed, needed, larger, usage, memory).refusal
        assert again is None or "its cap allows it, but the card has only" in again.advice().reason
        assert larger - GRANULE < held * GIB + needed <= larger


def test_whoever_is_told_to_raise_a_cap_is_told_to_what() -> None:
    """In every message of the package."""
    texts = [path.read_text() for path in Path(memguard.__file__).parent.rglob("*.py")]
    sentence = r"raise frameworks\.\S+ in the budget"
    told = [text[at.end() : at.end() + 60] for text in texts for at in re.finditer(sentence, text)]
    assert len(told) >= 5 and all("to at" in one and "least" in one for one in told), told


def test_a_setting_that_is_looser_than_the_cap_fits_the_cap_that_is_named() -> None:
    for allowed in (5 * GIB, 5 * GIB + 1, 5 * GIB + MIB - 1):
        (size,) = re.findall(r"to at least (\w+)", settings_of_torch.looser("a setting", allowed, 4 * GIB).remedy)
        budget = from_mapping({"version": 1, "frameworks": {"torch": {"limit": size}}})
        assert policy.plan(budget, DEVICES[:1]).devices[0].caps["torch"] >= allowed - GRANULE
