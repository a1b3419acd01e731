"""Budgets from what was recorded: whatever was recorded, they are valid, they fit, and the same run fits under them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import click_runner
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import START, Clock, plan_of, sample_of

import memguard
from memguard import _budget, cli
from memguard._base.types import Event, FrameworkSample, Plan, Sample
from memguard._base.units import GIB, GRANULE, MIB
from memguard._budget import policy
from memguard._devices.simulated import SimulatedHost
from memguard._timeline import Oom, Writer
from memguard._timeline.replay import replay_timeline, unmet_under, with_headroom
from memguard._tools.suggest import decide, text
from memguard._tools.suggest.evidence import PEAK, Run, observe

PLAN = plan_of(torch="8GiB", cupy="4GiB", jax="4GiB", tensorflow="4GiB")
UUID = PLAN.devices[0].device.uuid
NONE, DEFAULT = Fraction(0), Fraction(15, 100)
SIZES = st.integers(1, 7 * GIB) | st.sampled_from([1, GRANULE, GRANULE + 1, 2 * GIB])


def usage(held: int | None, in_use: int | None, reclaimable: int | None = 0, cap: int | None = 8 * GIB) -> Any:
    return FrameworkSample(held, in_use, reclaimable, cap)


def run_of(records: Sequence[object], plan: Plan = PLAN, file: str = "run.jsonl", **about: Any) -> Run:
    return observe(records, plan, **{"file": file, "run": file, "rank": None, "simulated": False, **about})


def torch(held: int, at: float = 0, **more: int) -> Sample:
    return sample_of(PLAN, START + at, torch=usage(held, held, **more))


def refused(asked: int | None, at: float = 0, name: str = "torch", times: int = 1) -> Event:
    return Event(START + at, "refused", "", uuid=UUID, framework=name, bytes=asked, times=times)


def suggested(*runs: Run, headroom: Fraction = DEFAULT, on: str | None = None) -> decide.Suggestion:
    found = decide.suggest(runs, headroom, SimulatedHost([on]).devices() if on else None)
    assert found is not None
    return found


def limits(found: decide.Suggestion) -> dict[str, int]:
    return {figure.framework: figure.limit for figure in found.figures}


def needs(found: decide.Suggestion) -> dict[str, int]:
    """As limits, without what is kept of a pool whose allocator does not say its peak."""
    return {figure.framework: with_headroom(figure.need.bytes) for figure in found.figures}


def unwrapped(written: str) -> str:
    return re.sub(r"\n *#   ", " ", written)


def evidence(found: decide.Suggestion, name: str = "torch") -> decide.Figure:
    (figure,) = (figure for figure in found.figures if figure.framework == name)
    return figure


def test_without_headroom_it_is_the_smallest_budget_of_replay() -> None:
    rows = {"torch": usage(7 * GIB + 5, 5 * GIB, GIB), "jax": usage(4 * GIB, 3 * GIB + 1)}
    samples = [sample_of(PLAN, START + at, **rows) for at in range(3)]
    smallest = replay_timeline(samples, PLAN).smallest
    found = suggested(run_of(samples), headroom=NONE)
    assert smallest is not None and limits(found) == smallest.limits and found.reserve.bytes == smallest.reserve
    assert found.limit == found.reserve.bytes + sum(smallest.limits.values())
    fifth = suggested(run_of(samples), headroom=Fraction(1, 5))
    assert limits(fifth)["torch"] == -(-(6 * GIB + 5) * 6 // 5 // GRANULE) * GRANULE
    assert fifth.reserve == found.reserve


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["torch", "cupy", "jax"]), st.tuples(SIZES, SIZES, SIZES)), min_size=1))
def test_without_headroom_and_refusals_it_is_always_that_of_replay(
    steps: list[dict[str, tuple[int, int, int]]],
) -> None:
    rows = [{name: usage(a + b, a - 1, min(b, c)) for name, (a, b, c) in step.items()} for step in steps]
    samples = [sample_of(PLAN, START + at, **row) for at, row in enumerate(rows)]
    smallest = replay_timeline(samples, PLAN).smallest
    found = decide.suggest([run_of(samples)], NONE)
    assert (found is None) == (smallest is None)
    if found is not None and smallest is not None:
        assert (needs(found), found.reserve.bytes) == (smallest.limits, smallest.reserve)
        assert (found.problem is None) == (smallest.problem is None)


def test_an_allocators_own_peak_counts_beside_the_samples_and_is_named() -> None:
    peak = Event(START + 2, PEAK, "", uuid=UUID, framework="torch", bytes=6 * GIB)
    lower = peak._replace(time=START + 3, bytes=5 * GIB)
    found = suggested(run_of([torch(4 * GIB), peak, lower]), headroom=NONE)
    assert limits(found) == {"torch": 6 * GIB} and evidence(found).need.source == "allocator"
    written = text.as_yaml(found)
    assert "its allocator's own peak" in written and "The peaks are those of the samples" not in written
    sampled = suggested(run_of([torch(7 * GIB), peak]), headroom=NONE)
    assert evidence(sampled).need.source == "samples" and limits(sampled) == {"torch": 7 * GIB}
    alone = suggested(run_of([torch(4 * GIB)]), headroom=NONE)
    assert "The peaks are those of the samples" in text.as_yaml(alone)
    foreign = [peak._replace(uuid="GPU-1"), peak._replace(framework="tinygrad"), peak._replace(bytes=None)]
    assert limits(suggested(run_of([torch(4 * GIB), *foreign]), headroom=NONE)) == {"torch": 4 * GIB}


def test_a_pool_whose_allocator_does_not_say_its_peak_gets_no_less_than_it_grew_to() -> None:
    samples = [sample_of(PLAN, START, cupy=usage(3 * GIB, 2 * GIB, GIB), torch=usage(3 * GIB, 2 * GIB, GIB))]
    found = suggested(run_of(samples), headroom=DEFAULT)
    assert limits(found) == {"cupy": 3 * GIB, "torch": with_headroom(2 * GIB, DEFAULT)}
    assert "Its allocator does not say its peak: its pool grew to that" in unwrapped(text.as_yaml(found))
    fuller = suggested(run_of(samples), headroom=Fraction(3, 5))
    assert limits(fuller)["cupy"] == with_headroom(2 * GIB, Fraction(3, 5)), "more headroom is more than that"
    assert "does not say its peak: its pool" not in unwrapped(text.as_yaml(fuller))
    said = Event(START + 2, PEAK, "", uuid=UUID, framework="cupy", bytes=2 * GIB)
    assert limits(suggested(run_of([*samples, said]), headroom=NONE))["cupy"] == 2 * GIB, "one that does say it"
    earlier = run_of([sample_of(PLAN, START + 9, cupy=usage(2 * GIB + GRANULE, 2 * GIB + GRANULE))], file="later")
    both = suggested(run_of(samples), earlier, headroom=NONE)
    assert limits(both)["cupy"] == 3 * GIB, "of several runs the largest limit counts"


def test_a_caught_refusal_is_a_need_of_what_was_held_and_what_was_asked() -> None:
    found = suggested(run_of([torch(6 * GIB), refused(5 * GIB, 1, times=3), torch(GIB, 2)]), headroom=NONE)
    assert limits(found) == {"torch": 11 * GIB} and evidence(found).need.source == "refused"
    assert evidence(found).need.requests == 3
    written = unwrapped(text.as_yaml(found))
    line = "5.00 GiB were refused on top of 6.00 GiB under a cap of 8.00 GiB, the last of 3."
    assert f"2025-11-21 15:00:01 UTC: {line}" in written and "3 refused requests" in written
    first = suggested(run_of([refused(9 * GIB), torch(GIB)]), headroom=NONE)
    assert limits(first) == {"torch": 9 * GIB}, "before the first sample nothing is known to be held"
    grown = suggested(run_of([torch(GIB), refused(GIB, 1)]), headroom=NONE)
    assert limits(grown) == {"torch": 8 * GIB + GRANULE}, "it must have held more than in the sample: its cap refused"
    unknown = suggested(run_of([torch(GIB), refused(None, 1)]), headroom=NONE)
    assert limits(unknown) == {"torch": 8 * GIB + GRANULE} and "of unknown size" in text.as_yaml(unknown)


def test_the_figures_of_a_refusals_own_moment_are_better_than_the_last_samples() -> None:
    then = {"held": 5 * GIB, "in_use": 3 * GIB, "reclaimable": GIB, "cap": 5 * GIB, "free": 90 * GIB}
    event = refused(2 * GIB, 1)._replace(**then)
    found = suggested(run_of([torch(GIB), event]), headroom=NONE)
    assert limits(found) == {"torch": 6 * GIB}, "4 GiB could not go, and 2 GiB were asked for"
    (refusal,) = evidence(found).need.refusals
    assert (refusal.held, refusal.cap, refusal.full) == (4 * GIB, 5 * GIB, False)
    full = event._replace(cap=20 * GIB, free=GIB)
    assert evidence(suggested(run_of([torch(GIB), full]), headroom=NONE)).need.refusals[0].full
    unknown = refused(2 * GIB, 1)._replace(cap=5 * GIB)
    found = suggested(run_of([torch(GIB), unknown]), headroom=NONE)
    assert limits(found) == {"torch": 5 * GIB + GRANULE}, "of what is not known the sample tells"


def test_a_request_that_a_full_gpu_refused_needs_no_more_than_it_asked_for() -> None:
    sample = torch(2 * GIB)
    full = Sample(sample.time, (sample.devices[0]._replace(free=MIB),))
    found = suggested(run_of([full, refused(GIB, 1)]), headroom=NONE)
    assert limits(found) == {"torch": 3 * GIB} and "as the GPU was full" in text.as_yaml(found)


def test_a_report_has_the_figures_of_the_moment_and_counts_once() -> None:
    moment = {"source": "refusal", "held": 7 * GIB, "reclaimable": GIB, "in_use": 5 * GIB, "requested": 4 * GIB}
    report = {"memory": "gpu", "requester": "torch", "uuid": UUID, "moment": {**moment, "cap": 8 * GIB}}
    found = suggested(run_of([torch(GIB), refused(4 * GIB, 1), Oom(START + 1, report)]), headroom=NONE)
    assert limits(found) == {"torch": 10 * GIB} and evidence(found).need.requests == 1
    alone = suggested(run_of([torch(GIB), Oom(START, {**report, "moment": None, "requested": 9 * GIB})]), headroom=NONE)
    assert limits(alone) == {"torch": 10 * GIB} and evidence(alone).need.requests == 1
    host = suggested(run_of([torch(GIB), Oom(START, {**report, "memory": "host"})]), headroom=NONE)
    assert limits(host) == {"torch": GIB}
    other = suggested(run_of([torch(GIB), Oom(START, {**report, "requester": "cublas"})]), headroom=NONE)
    assert limits(other) == {"torch": GIB} and "cublas ran out of GPU memory once" in unwrapped(text.as_yaml(other))
    broken = {**report, "moment": {"source": [], "held": "7", "cap": -1, "in_use": True, "requested": 1.5}}
    assert limits(suggested(run_of([torch(GIB), Oom(START, broken)]), headroom=NONE)) == {"torch": 8 * GIB + GRANULE}


def reported(asked: int | None, at: float, **moment: Any) -> Oom:
    """What a program did not catch. With a moment, that of its refusal, an event has counted it."""
    figures: dict[str, Any] = {
        "source": "refusal",
        "time": datetime.fromtimestamp(START + at, UTC).isoformat(),
    }
    report = {"requester": "torch", "uuid": UUID, "requested": asked}
    return Oom(START + at + 0.3, {**report, "moment": {**figures, "requested": asked, **moment} if moment else None})


ONCE = {"held": 7 * GIB, "in_use": 5 * GIB, "reclaimable": 0}


@pytest.mark.parametrize(
    ("records", "requests", "lines"),
    [
        ([refused(4 * GIB, 1), reported(4 * GIB, 1, **ONCE)], 1, 1),
        ([reported(4 * GIB, 1, **ONCE), refused(4 * GIB, 1)], 1, 1),
        ([refused(4 * GIB, 1), reported(4 * GIB, 1)], 1, 1),  # it knows nothing of the moment
        ([refused(4 * GIB, 1), reported(None, 1)], 1, 1),
        ([refused(4 * GIB, 1), refused(4 * GIB, 9, times=5), reported(4 * GIB, 8, **ONCE)], 6, 2),
        ([refused(4 * GIB, 1), reported(4 * GIB, 1, **ONCE), reported(4 * GIB, 1.5)], 2, 2),  # two, and one event
        ([refused(4 * GIB, 1), reported(4 * GIB, 5)], 2, 2),
        ([refused(4 * GIB, 1), reported(3 * GIB, 1)], 2, 2),
        ([refused(4 * GIB, 9, times=5), reported(4 * GIB, 1)], 6, 2),
        # the report names the event, which has the time and the size of the last of its requests
        ([refused(GIB, 2, times=3), reported(4 * GIB, 1.9, **ONCE, event=START + 2)], 3, 1),
        ([refused(4 * GIB, 2, times=3), reported(GIB, 1.9, **ONCE, event=START + 2)], 3, 1),
        ([refused(4 * GIB, 1), refused(4 * GIB, 1.001), reported(3 * GIB, 1, **ONCE, event=START + 1.001)], 2, 2),
        ([refused(4 * GIB, 1), reported(4 * GIB, 1, **ONCE, event=START + 3)], 1, 2),  # that event was left out
    ],
)
def test_a_request_is_counted_and_told_once(records: Sequence[object], requests: int, lines: int) -> None:
    found = suggested(run_of([torch(7 * GIB), *records]), headroom=NONE)
    assert limits(found) == {"torch": 11 * GIB} and evidence(found).need.requests == requests
    written = unwrapped(text.as_yaml(found))
    assert written.count(" refused on top of ") == lines
    assert f", {requests} refused request" in written


def test_an_error_that_a_monitor_recorded_is_told_once(tmp_path: Path) -> None:
    budget = {"version": 1, "device": {"limit": "8GiB"}, "frameworks": {"torch": {"limit": "2GiB"}}}
    budget["monitor"] = {"timeline": str(tmp_path / "run.jsonl")}
    code = (
        f"import memguard\nguard = memguard.init({budget!r}, simulate='h200')\nheld = guard.frameworks['torch']\n"
        "one = held.allocate(1 << 30); memguard.ledger(); held.allocate(3 << 30)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    (path,) = tmp_path.glob("run-*.jsonl")
    timeline = memguard.load_timeline(path)
    assert [len([one for one in timeline.events() if one.kind == "refused"]), len(list(timeline.ooms()))] == [1, 1]
    (entry,) = json.loads(call("--json", str(path))[1])["frameworks"]
    assert [refusal["times"] for refusal in entry["refused"]] == [1] and entry["needed"] == 4 * GIB


def test_a_refusal_of_a_common_pool_says_nothing_of_the_whole_pool() -> None:
    """Under `strategy: pool` each framework's cap is the sum of all that draw from it."""
    part = PLAN.devices[0]
    plan = Plan((replace(part, caps={"torch": 10 * GIB, "cupy": 10 * GIB}, unallocated=0, limit=12 * GIB),))
    found = suggested(run_of([torch(2 * GIB, cap=10 * GIB), refused(GIB, 1)], plan), headroom=NONE)
    assert limits(found) == {"torch": 3 * GIB} and "strategy: pool" in text.as_yaml(found)


def test_refusals_can_be_left_out() -> None:
    run = run_of([torch(GIB), refused(60 * GIB, 1), refused(GIB, 2, "cupy")])
    assert limits(suggested(run.without_refusals(), headroom=NONE)) == {"torch": GIB}


def test_pools_are_judged_by_what_was_in_use_and_the_comment_says_so() -> None:
    sample = sample_of(PLAN, START, jax=usage(6 * GIB, GIB), tensorflow=usage(None, 2 * GIB))
    found = suggested(run_of([sample]), headroom=NONE)
    assert limits(found) == {"tensorflow": 2 * GIB, "jax": GIB}
    written = text.as_yaml(found)
    assert written.count("Judged by what was in use") == 2
    assert written.count("tells nobody what it refused") == 2
    assert "peak held unknown" not in written


def test_many_ranks_on_one_gpu_add_up_and_runs_one_after_the_other_do_not() -> None:
    ranks = [run_of([torch((rank + 1) * GIB), torch(GIB, 9)], file=f"{rank}", rank=rank) for rank in range(3)]
    found = suggested(*ranks)
    assert [target.processes for target in found.targets] == [3] and limits(found)["torch"] == limits(
        suggested(ranks[2])
    )["torch"]
    assert "for 3 processes" in text.as_yaml(found)
    later = [run_of([torch(size * GIB, at)], file=f"{at}", rank=0) for at, size in ((0, 2), (100, 5), (200, 3))]
    found = suggested(*later)
    assert [target.processes for target in found.targets] == [1] and evidence(found).need.bytes == 5 * GIB
    assert "in 100:" in text.as_yaml(found)
    same = [run_of([torch(GIB)], file=name, run="one") for name in ("a", "b")]
    assert suggested(*same).targets[0].processes == 1, "two files of one process"


def test_what_does_not_fit_is_said_with_the_headroom_that_would() -> None:
    big = run_of([torch(60 * GIB)])
    assert suggested(big).problem is None
    ranks = [run_of([torch(60 * GIB)], file=name, rank=at) for at, name in enumerate("ab")]
    found = suggested(*ranks)
    assert found.problem is not None and "2 processes share it" in found.problem
    assert found.fix is not None and found.fix.startswith("--headroom 14% is the most that fits")
    assert suggested(*ranks, headroom=Fraction(14, 100)).problem is None
    small = suggested(run_of([torch(60 * GIB)]), on="l4")
    assert small.problem is not None and "NVIDIA L4" in small.problem and "--headroom" not in str(small.fix)
    tried = suggested(run_of([torch(GIB), refused(500 * GIB, 1)]))
    assert tried.problem is not None and "--ignore-refused" in str(tried.fix)


def test_another_gpu_gets_the_same_limits_and_a_reserve_of_its_architecture() -> None:
    run = run_of([torch(4 * GIB)])
    here, there = suggested(run), suggested(run, on="a100-80gb")
    assert limits(here) == limits(there)
    assert there.reserve.bytes == here.reserve.bytes == GIB and there.reserve.source == "measured"
    part = replace(PLAN.devices[0], device=replace(PLAN.devices[0].device, architecture="turing"))
    on_turing = run_of([torch(4 * GIB)], Plan((part,)))
    scaled = suggested(on_turing, on="h100")
    assert scaled.reserve.source == "scaled" and scaled.reserve.bytes == -(-GIB * 4 // 3 // GRANULE) * GRANULE
    assert "on turing" in text.as_yaml(scaled)


def test_a_reserve_that_was_not_measured_is_memguards_own() -> None:
    sample = torch(GIB)
    bare = Sample(START, (sample.devices[0]._replace(overhead=0, unaccounted=0),))
    found = suggested(run_of([bare]))
    assert found.reserve.source == "auto" and found.reserve.bytes == policy.auto_reserve("hopper", ["torch"])
    assert "was not measured" in text.as_yaml(found)


def test_options_of_the_recorded_budget_stay() -> None:
    sample = sample_of(PLAN, START, tensorflow=usage(GIB, GIB), pycuda=usage(GIB, GIB))
    options: dict[str, dict[str, Any]] = {"tensorflow": {"growth": False}, "pycuda": {"context": "own"}}
    written = text.as_yaml(suggested(run_of([sample], replace(PLAN, options=options))))
    assert "growth: false}" in written and "context: own}" in written
    budget = _budget.Budget.from_text(written)
    assert budget.frameworks["tensorflow"].growth is False
    hostile: Mapping[str, Any] = {"tensorflow": {"growth": "no}\nx: y"}, "pycuda": {"context": "}\n#", "nccl": 4}}
    _budget.Budget.from_text(text.as_yaml(suggested(run_of([sample], replace(PLAN, options=hostile)))))


NAMES = st.sampled_from(["torch", "cupy", "jax", "tensorflow", "pycuda"])
ROWS = st.builds(
    lambda in_use, cache, back, says: usage(in_use + cache if says else None, in_use, min(back, cache) if says else 0),
    SIZES,
    st.integers(0, GIB),
    st.integers(0, GIB),
    st.booleans(),
)
STEPS = st.lists(
    st.dictionaries(NAMES, ROWS, max_size=4) | st.tuples(NAMES, st.none() | st.integers(1, 9 * GIB)),
    min_size=1,
    max_size=8,
)


def recorded(steps: Sequence[Any], begin: float = 0) -> list[object]:
    found: list[object] = [sample_of(PLAN, START + begin, torch=usage(GRANULE, GRANULE))]
    for at, step in enumerate(steps, 1):
        if isinstance(step, dict):
            rows = {name: row._replace(cap=PLAN.devices[0].caps.get(name)) for name, row in step.items()}
            found.append(sample_of(PLAN, START + begin + at, **rows))
        else:
            found.append(refused(step[1], begin + at, step[0]))
    return found


@settings(max_examples=40, deadline=None)
@given(STEPS, st.lists(st.tuples(st.sampled_from(["torch", "cupy"]), SIZES), max_size=3))
def test_replay_has_the_same_budget_with_refusals_and_peaks_and_fits_under_it(
    steps: Sequence[Any], peaks: list[tuple[str, int]]
) -> None:
    records = recorded(steps)
    records += [Event(START + 9, PEAK, "", uuid=UUID, framework=name, bytes=size) for name, size in peaks]
    smallest = replay_timeline(records, PLAN).smallest
    found = suggested(run_of(records), headroom=NONE)
    assert smallest is not None and needs(found) == smallest.limits and found.reserve.bytes == smallest.reserve
    if smallest.problem is None:
        plan = policy.plan(_budget.Budget.from_text(smallest.yaml()), [PLAN.devices[0].device])
        assert replay_timeline(records, plan, unmet=unmet_under(PLAN)).fits
    for name, size in smallest.limits.items():
        part = PLAN.devices[0]
        less = replace(PLAN, devices=(replace(part, caps={**smallest.limits, name: size - GRANULE}, limit=part.limit),))
        if size > GRANULE:
            assert not replay_timeline(records, less, unmet=unmet_under(PLAN)).fits


@settings(max_examples=25, deadline=None)
@given(STEPS, st.fractions(0, 1))
def test_the_budget_is_valid_fits_and_the_same_run_fits_under_it(steps: Sequence[Any], headroom: Fraction) -> None:
    records = recorded(steps)
    found = suggested(run_of(records), headroom=headroom)
    if found.problem is not None:
        assert found.limit > PLAN.devices[0].device.usable and found.fix
        return
    budget = _budget.Budget.from_text(text.as_yaml(found))
    plan = policy.plan(budget, [PLAN.devices[0].device])
    assert plan.devices[0].unallocated == 0 and plan.devices[0].limit == found.limit
    assert dict(plan.devices[0].caps) == limits(found)
    outcome = replay_timeline(records, plan, unmet=unmet_under(PLAN))
    assert outcome.fits and all(row.cap is not None for row in outcome.frameworks if row.peak_held or row.peak_in_use)
    assert not any(gpu.overhead.times for gpu in outcome.devices)


@settings(max_examples=12, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=4), st.fractions(0, 1), st.fractions(0, 1), st.randoms())
def test_more_headroom_lowers_nothing_and_the_order_of_runs_means_nothing(
    all_steps: list[Any], one: Fraction, two: Fraction, rng: random.Random
) -> None:
    runs = [run_of(recorded(steps, at * 5), file=f"run-{at}.jsonl") for at, steps in enumerate(all_steps)]
    less, more = suggested(*runs, headroom=min(one, two)), suggested(*runs, headroom=max(one, two))
    assert all(limits(more)[name] >= size for name, size in limits(less).items())
    assert more.limit >= less.limit and more.reserve == less.reserve
    mixed = rng.sample(runs, len(runs))
    assert json.dumps(text.as_dict(suggested(*mixed, headroom=one))) == json.dumps(
        text.as_dict(suggested(*runs, headroom=one))
    )
    single = [limits(suggested(run, headroom=one)) for run in runs]
    largest = {name: max(found.get(name, 0) for found in single) for name in set().union(*single)}
    assert limits(suggested(*runs, headroom=one)) == largest


HOSTILE = st.text(max_size=40) | st.sampled_from(
    [
        "a\nversion: 2",
        "a\r\nb: c",
        "\x85x: 1",
        "\u2028x: 1",
        "\x00",
        "\x1b[2J",
        "# #",
        "'\"{}[]&*!|>%@`",
        "\ud800",
        "﻿",
        "",
    ]
)


@settings(max_examples=30, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_of_a_timeline_gets_out_of_its_comment(file: str, name: str, note: str) -> None:
    part = PLAN.devices[0]
    plan = Plan((replace(part, device=replace(part.device, name=name, architecture=note)),))
    event = refused(9 * GIB)._replace(text=note)
    oom = Oom(START, {"memory": "gpu", "requester": note, "moment": None})
    run = replace(run_of([torch(GIB), event, oom], plan, file), notes=(note, f"{note}: {name}"))
    found = suggested(run)
    written = text.as_yaml(found)
    budget = _budget.Budget.from_text(written.encode())
    clean = _budget.Budget.from_text(text.as_yaml(suggested(run_of([torch(GIB), refused(9 * GIB)]))))
    assert budget == clean
    assert [line for line in written.splitlines() if not line.lstrip().startswith("#")] == [
        line for line in written.split("\n") if line and not line.lstrip().startswith("#")
    ]
    json.dumps(text.as_dict(found)).encode()


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=3), st.fractions(0, 1))
def test_its_own_advice_to_record_again_is_valid_and_warns_above_what_was_recorded(
    sizes: list[int], headroom: Fraction
) -> None:
    rows = {name: usage(size, size) for name, size in zip(("torch", "cupy", "jax"), sizes, strict=False)}
    found = suggested(run_of([sample_of(PLAN, START, **rows)]), headroom=headroom)
    written = text.as_yaml(found)
    assert written.splitlines()[-1].startswith("# monitor: ")
    budget = _budget.Budget.from_text(written.replace("# monitor: ", "monitor: "))
    assert budget.monitor is not None
    most = max(figure.need.bytes / figure.limit for figure in found.figures)
    if most < 0.93 and (sum(figure.need.bytes for figure in found.figures) + found.reserve.bytes) / found.limit < 0.93:
        assert budget.monitor.warn > most


def test_an_allocators_peak_of_one_says_that_others_are_sampled() -> None:
    peak = Event(START + 2, PEAK, "", uuid=UUID, framework="torch", bytes=6 * GIB)
    sample = sample_of(PLAN, START, torch=usage(GIB, GIB), cupy=usage(GIB, GIB))
    assert "The peaks of cupy are those of the samples:" in unwrapped(text.as_yaml(suggested(run_of([sample, peak]))))


@given(HOSTILE)
def test_a_comment_is_made_of_lines_that_each_begin_with_its_sign(words: str) -> None:
    for lines in (text.comment(words), text.comment(words, "  ")):
        assert "\n".join(lines).splitlines() == lines and all(line.lstrip(" ").startswith("# ") for line in lines)
        assert all(len(line) <= 100 or " " not in words for line in lines)
        "\n".join(lines).encode()


def write(path: Path, records: Sequence[object], **more: Any) -> str:
    with Writer(path, PLAN, clock=Clock(), **more) as out:
        for record in records:
            out.sample(record) if isinstance(record, Sample) else out.event(record)  # type: ignore[arg-type]
    return out.path


def call(*arguments: str) -> tuple[int, str, str]:
    done = click_runner.apart().invoke(cli.main, ["suggest", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_a_budget_that_check_accepts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [torch(2 * GIB), refused(7 * GIB, 1)])
    second = write(tmp_path / "b.jsonl", [torch(3 * GIB, 50)])
    code, out, _ = call(first, second)
    assert code == 0 and out == call(second, first)[1]
    target = tmp_path / "budget.yaml"
    assert call(first, second, "-o", str(target)) == (0, "", "") and target.read_text() == out
    assert limits_of(out) == {"torch": -(-9 * GIB * 115 // 100 // GRANULE) * GRANULE}
    code, _, said = call(first, "-o", str(target))
    assert code == 2 and "exists already" in said and "--force" in said and target.read_text() == out
    assert call(first, "-o", str(target), "--force")[0] == 0 and target.read_text() != out
    assert limits_of(call(first, "--ignore-refused", "--headroom", "0%")[1]) == {"torch": 2 * GIB}
    code, out, _ = call(first, "--json", "--device", "l4", "--headroom", "50 %")
    found = json.loads(out)
    assert (code, found["memguard_suggest"], found["fits"]) == (0, 1, True)
    assert found["gpus"][0]["name"] == "NVIDIA L4" and limits_of(found["yaml"])["torch"] == 13.5 * GIB


def limits_of(written: str) -> dict[str, int]:
    return {name: part.guaranteed for name, part in _budget.Budget.from_text(written).frameworks.items()}  # type: ignore[misc]


def test_parts_of_a_run_and_copies_of_it_are_read_once(tmp_path: Path) -> None:
    samples = [torch((1 + at % 5) * GIB, at) for at in range(9000)]
    newest = write(tmp_path / "run.jsonl", samples, limit_bytes=1 << 20)
    parts = [str(path) for path in tmp_path.glob("*.jsonl")]
    assert len(parts) > 3
    code, out, _ = call("--json", newest)
    assert code == 0 and json.loads(call("--json", *parts)[1]) == json.loads(out)
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / Path(newest).name
    for part in parts:
        (copy.parent / Path(part).name).write_bytes(Path(part).read_bytes())
    assert len(json.loads(call("--json", newest, str(copy))[1])["runs"]) == 1


def test_what_is_counted_is_not_said_to_be_left_out(tmp_path: Path) -> None:
    newest = Path(write(tmp_path / "run.jsonl", [torch(GIB, 100)]))
    older = [newest.with_suffix(f".{number}.jsonl") for number in (1, 2, 10)]
    for number, path in enumerate(older):
        Path(write(tmp_path / f"other{number}.jsonl", [torch((2 + number) * GIB, number)])).rename(path)
    for count in range(4):
        code, out, _ = call(str(newest), *map(str, older[:count]), "--json", "--headroom", "0%")
        notes = [note for note in json.loads(out)["notes"] if "left out, as they" in note]
        left = ", ".join(map(str, older[count:]))
        said = f"{newest}: left out, as they belong to an earlier run: {left}; each can be read alone"
        assert code == 0 and notes == ([said] if left else [])
        assert limits_of(json.loads(out)["yaml"]) == {"torch": (1 + count) * GIB}


def test_what_cannot_be_done_ends_with_a_reason_and_a_fix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [torch(30 * GIB)])
    code, out, said = call(path, "--device", "l4")
    assert (code, out) == (1, "") and "does not fit NVIDIA L4" in said and "fix:" in said
    assert call(path, "--device", "l4", "--json")[0] == 1
    for arguments in ([path, "--headroom", "15"], [path, "--headroom", "x"], [path, "--device", "h1000"], ["/no/file"]):
        code, out, said = call(*arguments)
        assert (code, out) == (2, "") and said, arguments
    empty = write(tmp_path / "empty.jsonl", [torch(0)])
    code, _, said = call(empty)
    assert code == 1 and "no framework held anything" in said
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(Path(path).read_bytes() + b"{}\n")
    assert call(str(damaged))[0] == 2
    code, _, said = call(path, "-o", str(tmp_path / "no" / "b.yaml"))
    assert code == 2 and "cannot be written" in said


@pytest.mark.parametrize("wrong", ["300%", "100.01%", "-5%", "-0.1 %"])
def test_the_headroom_says_its_true_range(tmp_path: Path, wrong: str) -> None:
    path = write(tmp_path / "a.jsonl", [torch(GIB)])
    code, out, said = call(path, "--headroom", wrong)
    assert (code, out) == (2, "") and f"it must be from 0% to 100%, found '{wrong}'" in unwrapped(said)
    assert "0% to 100%" in unwrapped(call("--help")[1])
    for right, factor in (("0%", 1), ("0.00 %", 1), ("0", 1), ("100%", 2), ("+50%", 1.5)):
        assert limits_of(call(path, "--headroom", right)[1]) == {"torch": factor * GIB}, right


def test_a_timeline_that_is_read_is_never_overwritten(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "run.jsonl", [torch(GIB)]))
    older = path.with_suffix(".1.jsonl")  # a part of it, which is read with it
    older.write_bytes(path.read_bytes())
    (tmp_path / "link.yaml").symlink_to(path)
    before = path.read_bytes()
    for target in (path, tmp_path / "link.yaml", older):
        code, out, said = call(str(path), "-o", str(target), "--force")
        assert (code, out) == (2, "") and "it is the timeline that is read\n    fix: " in said, target
    assert path.read_bytes() == older.read_bytes() == before


def test_what_it_is_told_to_write_is_written_as_a_report_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [torch(GIB)])
    (tmp_path / "old").write_text("old")
    for name, code, why in (
        ("", 2, "the name of an output is empty"),
        (str(tmp_path), 2, "it is a folder\n    fix: "),
        (str(tmp_path / "old"), 2, "it exists already\n    fix: "),
        (str(tmp_path / "no" / "b.yaml"), 2, "cannot be written: No such file or directory\n    fix: "),
    ):
        found, out, said = call(path, "-o", name)
        assert (found, out) == (code, "") and why in said, name
    assert call(path, "-o", "-") == call(path), "standard output"
    assert sorted(os.listdir(tmp_path)) == sorted(["old", os.path.basename(path)])


def test_the_example_of_the_document_is_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    (example,) = re.findall(r"```json\n(.*?)```", (docs / "timeline.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "run-4711-0.jsonl").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(
        r"```console\n\$ memguard (.*?)```", (docs / "suggest.md").read_text(encoding="utf-8"), re.DOTALL
    )
    line, _, printed = shown.partition("\n")
    assert line == "suggest run-4711-0.jsonl" and call("run-4711-0.jsonl") == (0, printed, "")
