"""One driver pool for several frameworks, as far as it is decided without a GPU: the budget, the plan, admission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._base.types import POOL, DevicePlan, FrameworkSample, MemoryInfo, Usage
from memguard._base.units import GIB, MIB
from memguard._budget import from_mapping, policy, shared_pool
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import specs
from memguard._frameworks.shared_pool import remainder
from memguard._frameworks.specs import SPECS, pool_capped
from memguard.cli import main
from memguard.errors import ConfigError, PlanError

BESIDE = {"limit": "2GiB", "context": "own"}
BOTH = {"torch": {"share": "40%"}, "cupy": {"limit": "4GiB"}, "pycuda": BESIDE}


def budget(frameworks: Any = BOTH, **more: Any) -> Any:
    return from_mapping({"version": 1, "strategy": "pool", "frameworks": frameworks, **more})


def plan(*args: Any, **more: Any) -> Any:
    return policy.plan(budget(*args, **more), SimulatedHost(["h200"]).devices())


def test_what_can_draw_from_the_pool_shares_one_cap_and_the_rest_keep_theirs() -> None:
    (part,) = plan().devices
    (apart,) = policy.plan(from_mapping({"version": 1, "frameworks": BOTH}), SimulatedHost(["h200"]).devices()).devices
    assert part.joined == ("torch", "cupy") and apart.joined == ()
    assert part.caps["torch"] == part.caps["cupy"] == apart.caps["torch"] + apart.caps["cupy"]
    assert part.caps["pycuda"] == apart.caps["pycuda"] == 2 * GIB
    assert part.unallocated == apart.unallocated
    assert part.limit == part.reserve + sum(shared_pool.caps_of(part).values()) + part.unallocated


def test_a_joint_cap_cannot_be_resized_and_one_beside_it_can() -> None:
    found = plan()
    with pytest.raises(PlanError, match="torch draws from the pool of torch and cupy, whose size is fixed"):
        policy.resized(found, "torch", GIB)
    with pytest.raises(PlanError, match="cupy draws from the pool"):
        policy.resized(found, "cupy", GIB)
    assert policy.resized(found, "pycuda", GIB).devices[0].caps == {**found.devices[0].caps, "pycuda": GIB}


def test_the_minima_beside_an_elastic_share_count_the_pool_once() -> None:
    pycuda = {"min": "1GiB", "max": "8GiB", "context": "own"}
    frameworks = {"torch": {"limit": "40GiB"}, "cupy": {"limit": "40GiB"}, "pycuda": pycuda}
    (part,) = plan(frameworks).devices
    assert policy.guaranteed_cap(part, "pycuda") == part.limit - part.reserve - 80 * GIB


@pytest.mark.parametrize(
    ("frameworks", "at", "words"),
    [
        ({"torch": {"min": "1GiB", "max": "2GiB"}}, "frameworks.torch.min", "each may use"),
        ({"pycuda": BESIDE}, "strategy", "no framework of this budget can draw"),
    ],
)
def test_what_a_pool_cannot_be_is_refused(frameworks: Any, at: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        budget(frameworks)
    (problem,) = [problem for problem in caught.value.problems if problem.path == at]
    assert words in problem.message and "strategy: caps" in problem.fix


def test_a_strategy_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        from_mapping({"version": 1, "strategy": "pools", "frameworks": BOTH})


def test_every_framework_that_can_join_has_an_adapter_for_it() -> None:
    joined = [name for name, spec in SPECS.items() if spec.pooled]
    assert set(joined) == set(SPECS)
    for name in joined:
        cls = specs.load(name, "pooled", SPECS[name].pooled)
        assert cls.pooled and issubclass(cls, specs.load(name, "adapter", SPECS[name].adapter))
    assert [name for name in joined if SPECS[name].remainder] == ["torch"], "two remainders would count bytes twice"


def test_simulated_gpus_have_no_pool_to_share(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="simulated GPUs have no driver pool to share") as caught:
        memguard.init(budget(), simulate="h200")
    assert "strategy: caps" in str(caught.value)
    with pytest.raises(memguard.errors.NotActive):
        memguard.ledger()


def test_the_plan_says_which_caps_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "budget.yaml"
    path.write_text(json.dumps({"version": 1, "strategy": "pool", "frameworks": BOTH}))
    shown = CliRunner().invoke(main, ["plan", str(path), "--device", "h200"])
    assert shown.exit_code == 0 and shown.output.count("enforced, jointly") == 2, shown.output
    told = json.loads(CliRunner().invoke(main, ["plan", str(path), "--device", "h200", "--json"]).output)
    assert told["devices"][0]["joined"] == ["torch", "cupy"]
    checked = CliRunner().invoke(main, ["check", str(path)])
    assert "pool: torch and cupy draw from one pool" in checked.output


def test_with_jax_or_tensorflow_it_is_the_default_pool_which_nothing_caps() -> None:
    part = plan({name: {"limit": "1GiB"} for name in SPECS}).devices[0]
    assert set(part.joined) == set(SPECS) and not pool_capped(part.joined) and pool_capped(("torch", "cupy"))
    assert set(part.caps.values()) == {6 * GIB}
    said = {name: shared_pool.how(part, name).partition(" ")[0].rstrip(":,") for name in SPECS}
    assert said == {
        "torch": "watched", "tensorflow": "watched", "jax": "watched",
        "cupy": "enforced", "pycuda": "enforced", "numba": "enforced",
    }  # fmt: skip
    assert "memguard's allocator" in shared_pool.how(part, "cupy")


SIZES = st.integers(0, 64).map(lambda units: units * 32 * MIB)


@given(live=st.lists(SIZES, min_size=1, max_size=4), cache=SIZES, spare=SIZES, asked=SIZES)
def test_admission_is_that_of_one_owner_of_the_whole_pool(live: list[int], cache: int, spare: int, asked: int) -> None:
    """Whoever asks: it fits if the pool's live bytes and the request stay within its size."""
    cap, used = sum(live) + cache + spare, sum(live)
    memory = MemoryInfo(141 * GIB, 0, 0, 141 * GIB)
    for own in live:
        usages = {"torch": Usage(own, own, 0), POOL: Usage(used + cache, used)}
        admission = policy.admit("torch", asked, asked, cap, usages, memory, POOL)
        assert (admission.refusal is None) == (used + asked <= cap)
        if admission.refusal is None:
            assert admission.trim == ()


@given(parts=st.dictionaries(st.sampled_from(["a", "b", "c"]), SIZES), others=SIZES, cache=SIZES)
def test_no_byte_of_the_pool_is_counted_twice(parts: dict[str, int], others: int, cache: int) -> None:
    used = sum(parts.values()) + others
    rest = remainder(used, parts)
    assert rest == others and sum(parts.values()) + rest + cache == used + cache


def test_a_remainder_is_never_negative_whatever_was_freed_between_two_readings() -> None:
    assert remainder(GIB, {"cupy": 2 * GIB}) == 0


def test_pressure_is_that_of_what_the_others_leave() -> None:
    (part,) = plan({"torch": {"limit": "6GiB"}, "cupy": {"limit": "2GiB"}}).devices
    figures = {
        "torch": FrameworkSample(4 * GIB, 4 * GIB, 0, 8 * GIB), "cupy": FrameworkSample(3 * GIB, 3 * GIB, 0, 8 * GIB),
        POOL: FrameworkSample(GIB, 0, None, None),
    }  # fmt: skip
    found = shared_pool.left_to(part, figures)
    assert (found["torch"].cap, found["cupy"].cap, found[POOL].cap) == (5 * GIB, 4 * GIB, None)


def test_a_refusal_says_what_the_pool_is_and_what_others_have_of_it() -> None:
    (part,) = plan({"torch": {"limit": "6GiB"}, "cupy": {"limit": "2GiB"}, "pycuda": BESIDE}).devices
    whole = policy.OverCap("torch", 5, 5, 0, 8 * GIB, Usage(7 * GIB, 6 * GIB))
    said = whole.for_client(5 * GIB, shared_pool.note_on(part, "torch", 5 * GIB)).advice()
    assert "its cap is 3.00 GiB and it holds 2.00 GiB, of which 1.00 GiB in use" in said.reason
    assert said.reason.endswith(
        " in use; torch and cupy share one pool of 8.00 GiB, of which others have 5.00 GiB in use"
    )
    assert shared_pool.note_on(part, "pycuda", 0) == ""


def test_the_notes_name_the_remainder_and_the_cache() -> None:
    (part,) = plan().devices
    notes = shared_pool.shared_notes(part)
    assert set(notes) == {"torch", POOL} and "remainder" in notes["torch"]
    assert shared_pool.shared_notes(None) == shared_pool.shared_notes(DevicePlan(part.device, 1, 1, {}, 0)) == {}
