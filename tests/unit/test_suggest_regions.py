"""Budgets for a pool that grows by regions which it neither joins nor gives back, as JAX's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import START, plan_of, sample_of

from memguard._base.types import Event, FrameworkSample, Plan, Sample
from memguard._base.units import GIB, GRANULE, MIB
from memguard._frameworks.jax.adapter import _fraction
from memguard._timeline import Oom
from memguard._tools.suggest import decide, text
from memguard._tools.suggest.evidence import PEAK, Run, observe

PLAN = plan_of(jax="24GiB")
UUID = PLAN.devices[0].device.uuid
TOTAL = PLAN.devices[0].device.usable
DEFAULT = decide.HEADROOM


class Refused(Exception):
    """No region has room, and no region of that size can be had."""


@dataclass
class Pool:
    """A model of XLA's allocator: best fit in regions of 2 MiB, 4 MiB, …; the last is cut to what the limit leaves."""

    limit: int
    step: int = GRANULE
    held: int = 0
    peak: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)  # address and size
    live: list[tuple[int, int]] = field(default_factory=list)

    @property
    def in_use(self) -> int:
        return sum(size for _, size in self.live)

    def allocate(self, size: int) -> None:
        size = -(-size // 256) * 256
        fits = [piece for piece in self.free if piece[1] >= size] or [self._grow(size)]
        address, room = min(fits, key=lambda piece: (piece[1], piece[0]))
        self.free.remove((address, room))
        if room > size:
            self.free.append((address + size, room - size))
        self.live.append((address, size))
        self.peak = max(self.peak, self.in_use)

    def _grow(self, size: int) -> tuple[int, int]:
        left = (self.limit - self.held) // 256 * 256
        if size > left:
            raise Refused(size)
        doubled = False
        while size > self.step:
            self.step, doubled = self.step * 2, True
        got = min(self.step, left)
        if not doubled:
            self.step *= 2
        place = (len(self.live) + len(self.free) + self.held) << 44  # regions never touch
        self.held += got
        self.free.append((place, got))
        return place, got

    def release(self, at: int) -> None:
        address, size = self.live.pop(at)
        for piece in list(self.free):
            if piece[0] + piece[1] == address or address + size == piece[0]:
                self.free.remove(piece)
                address, size = min(address, piece[0]), size + piece[1]
        self.free.append((address, size))


def ran(limit: int, steps: Sequence[int]) -> tuple[list[Sample], Pool]:
    """Positive steps ask for bytes, others free one of the live arrays. The samples, one for each, and the pool."""
    pool, samples = Pool(limit), []
    for at, step in enumerate(steps):
        if step > 0:
            pool.allocate(step)
        elif pool.live:
            pool.release(-step % len(pool.live))
        usage = FrameworkSample(pool.held, pool.in_use, 0, 24 * GIB)
        samples.append(sample_of(PLAN, START + at, jax=usage))
    return samples, pool


def run_of(records: Sequence[object], plan: Plan = PLAN) -> Run:
    return observe(records, plan, file="run.jsonl", run="run.jsonl")


def suggested(records: Sequence[object], headroom: Fraction = DEFAULT, plan: Plan = PLAN) -> decide.Suggestion:
    found = decide.suggest([run_of(records, plan)], headroom)
    assert found is not None
    return found


def limit_of(found: decide.Suggestion) -> int:
    (figure,) = found.figures
    return figure.limit


def seen(time: float, held: int, in_use: int, cap: int = 24 * GIB) -> Sample:
    return sample_of(PLAN, START + time, jax=FrameworkSample(held, in_use, 0, cap))


def test_a_large_array_that_fits_into_none_of_the_regions_passes_under_the_budget() -> None:
    """As on an H200: 496 MiB came and went in a region of 512, then 736 MiB were asked for in one piece."""
    steps = [1 * MIB, 320 * MIB, 160 * MIB, 0, 0, 0, 160 * MIB, 160 * MIB, 736 * MIB]
    samples, pool = ran(24 * GIB, steps)
    assert (pool.held, pool.peak) == (1538 * MIB, 1056 * MIB)
    peak = Event(START + 9, PEAK, "", uuid=UUID, framework="jax", bytes=pool.peak)
    found = suggested([*samples, peak])
    with pytest.raises(Refused):
        ran(1216 * MIB, steps)  # its peak in use and 15 %
    assert limit_of(found) == 1540 * MIB
    ran(limit_of(found), steps)
    written = text.as_yaml(found)
    assert "regions that it neither joins nor" in written and "Judged by what was in use" not in written


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.integers(1, 600 * MIB) | st.integers(0, 9).map(lambda bits: MIB << bits) | st.integers(-8, 0),
        min_size=4, max_size=40,
    ),
    st.sampled_from([Fraction(0), DEFAULT]),
)  # fmt: skip
def test_what_was_recorded_passes_under_its_budget(steps: Sequence[int], headroom: Fraction) -> None:
    """Also with JAX's own limit, which is some bytes below the cap. Two sizes of the pool show that it grew."""
    samples, _ = ran(24 * GIB, steps)
    if len({sample.devices[0].frameworks["jax"].held for sample in samples} - {0}) < 2:
        return
    ran(int(_fraction(limit_of(suggested(samples, headroom)), TOTAL) * TOTAL), steps)


def test_a_pool_that_was_taken_at_once_is_judged_by_what_was_in_use() -> None:
    found = suggested([seen(0, 20 * GIB, GIB), seen(1, 20 * GIB, 2 * GIB)], Fraction(0))
    assert limit_of(found) == 2 * GIB and "Judged by what was in use" in text.as_yaml(found)


def test_a_cap_that_the_pool_filled_is_not_raised_each_time() -> None:
    plan = plan_of(jax="4GiB")
    records = [seen(0, 2 * GIB, GIB, 4 * GIB), seen(1, 4 * GIB, 3 * GIB, 4 * GIB)]
    assert limit_of(suggested(records, Fraction(0), plan)) == 4 * GIB


@pytest.mark.parametrize(("held", "needed"), [(514 * MIB, 1250 * MIB), (1216 * MIB, 1218 * MIB)])
def test_what_was_refused_needs_a_region_of_its_own(held: int, needed: int) -> None:
    """A pool as large as its cap may have been taken at once: there it is what was in use."""
    plan = plan_of(jax="1216MiB")
    moment = {"source": "error", "requested": 736 * MIB, "held": held, "in_use": 320 * MIB, "cap": 1216 * MIB}
    report = {"requester": "jax", "uuid": UUID, "requested": 736 * MIB, "moment": moment}
    found = suggested([seen(0, held, 320 * MIB, 1216 * MIB), Oom(START + 1, report)], Fraction(0), plan)
    assert limit_of(found) == needed
