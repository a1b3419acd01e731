"""The borders of what is a leak, a rise, a level: each rule once more in plain words, compared where it changes."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from memguard._base.types import DeviceSample, FrameworkSample, Pressure, Sample, WorkloadReport
from memguard._base.units import GIB, MIB
from memguard._runtime import leaks, pressure
from memguard._runtime.leaks import Workloads, leak
from memguard._runtime.pressure import START, Action, PressureState, Settings, decide

pytestmark = pytest.mark.long  # no version of what is installed changes it: all of it is our own code

DOCS = Path(__file__).parents[2] / "docs" / "watching.md"
BEGIN = 1_700_000_100.0


def slopes(points: list[tuple[float, float]]) -> list[float]:
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]


# Workloads


def rule_of_a_leak(afters: list[int]) -> int | None:
    kept = afters[1:]
    kept = kept[len(kept) - 100 :] if len(kept) > 100 else kept
    n = len(kept)
    if n in (0, 1, 2, 3):
        return None
    whole = median(slopes(list(enumerate(kept))))
    half = median(slopes(list(enumerate(kept))[n // 2 - 1 if n in (4, 5) else n // 2 :]))
    if not whole > 0 or not half * 2 >= whole:
        return None
    up = sum(b > a for a, b in combinations(kept, 2))
    down = sum(b < a for a, b in combinations(kept, 2))
    if n <= 11:
        if down or up != n * (n - 1) // 2:
            return None
        line = [after - whole * number for number, after in enumerate(kept)]
        allowed = {4: 0.05, 5: 0.1, 6: 0.15, 7: 0.2}.get(n, 0.25)
        if max(line) - min(line) > whole * (n - 1) * allowed:
            return None
    elif (up - down) ** 2 * 18 < 4.5**2 * n * (n - 1) * (2 * n + 5) or up < down:
        return None
    return round(whole) or None


def series(rng: random.Random) -> list[int]:
    n = rng.choice([*range(14), *range(4, 14), *range(11, 22), 24])
    kind = rng.randrange(5)
    if kind == 0:
        values = [rng.randint(0, 12) for _ in range(n)]
    elif kind == 1:
        step = rng.choice([1, 2, 10, 20, 40])
        values = [step * number + rng.randint(0, max(step // rng.choice([1, 2, 5, 10]), 1)) for number in range(n)]
    elif kind == 2:  # a few that lie at another place
        values = list(range(n))
        for _ in range(rng.randrange(n + 1)):
            a, b = rng.randrange(n), rng.randrange(n)
            values[a], values[b] = values[b], values[a]
    elif kind == 3:  # faster at first
        bend, first, then = rng.randrange(n + 1), rng.randint(1, 6), rng.randint(1, 6)
        values = [min(number, bend) * first + max(number - bend, 0) * then for number in range(n)]
    else:
        values = sorted(rng.choices(range(rng.choice([3, 10, 100])), k=n))
    return [rng.randint(0, 9), *values]


def test_a_leak_is_what_the_rule_says() -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(20_000):
        afters = series(rng)
        assert leak(afters) == rule_of_a_leak(afters), afters
        found += leak(afters) is not None
    assert 4_000 < found < 16_000


def test_a_leak_of_a_byte_is_one_and_of_the_last_hundred_repetitions_each_counts() -> None:
    assert leak(list(range(6))) == 1
    squares = [number * number for number in range(150)]  # the median slope of 50 to 149 is 50 + 149
    assert leak([0, *squares]) == rule_of_a_leak([0, *squares]) == 199


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What `leak` is asked, and answers with None. It is asked of each series."""
    seen: list[list[int]] = []
    monkeypatch.setattr(leaks, "leak", lambda afters: seen.append(afters))
    monkeypatch.setattr(leaks, "_rises", lambda kept: True)
    return seen


def report(name: str, after: int, delta: int) -> WorkloadReport:
    return WorkloadReport(name, "torch", after - delta, after)


def test_a_workload_is_looked_at_after_each_repetition_and_later_after_each_tenth(asked: list[list[int]]) -> None:
    workloads, when = Workloads(), []
    for number in range(1, 131):
        before = len(asked)
        workloads.leaked(report("step", 1000 + number, 3))
        assert len(asked) - before in (0, 2)
        when += [number] if len(asked) > before else []
    assert when == [*range(1, 21), *range(30, 131, 10)]
    assert asked[0] == [1001] and asked[1] == [3], "what is in use, and what the block has left behind so far"
    assert asked[3] == [3, 6]
    assert {len(afters) for afters in asked[-2:]} == {100} and asked[-2][-1] == 1130


def test_so_many_workloads_are_remembered(asked: list[list[int]]) -> None:
    workloads = Workloads()
    for number in range(256):
        workloads.leaked(report(str(number), 0, 0))
    assert len(workloads) == 256
    workloads.leaked(report("0", 1, 1))  # used again: the next to go is another
    workloads.leaked(report("new", 0, 0))
    assert len(workloads) == 256
    workloads.leaked(report("0", 2, 2))
    assert len(asked[-1]) == 3, "still known"
    workloads.leaked(report("1", 0, 0))
    assert len(asked[-1]) == 1, "forgotten"


def test_both_what_is_in_use_and_what_the_block_leaves_must_grow() -> None:
    for after, delta, found in ((10, 10, 10), (10, 0, None), (0, 10, None), (30, 10, 10), (10, 30, 10)):
        workloads = Workloads()
        said = [workloads.leaked(report("step", 1000 + number * after, delta)) for number in range(1, 7)]
        assert [size for size in said if size is not None] == ([found] if found else [])


# Rises


Points = list[tuple[float, int]]


def rule_of_a_slope(points: Points) -> float:
    if len(points) < 6:
        return 0.0
    steps = [b[1] - a[1] for a, b in pairwise(points)]
    if max(steps) > sum(steps) / 2:
        return 0.0
    found = slopes([(time, float(low)) for time, low in points])
    up = sum(slope > 0 for slope in found)
    enough = up * 7 >= len(found) * 6 if len(points) <= 9 else up * 4 >= len(found) * 3
    return median(found) if enough else 0.0


def rule_of_a_climb(points: Points, highs: list[int], peaks: list[int]) -> tuple[float, int] | None:
    n = len(points)
    before = max(peaks, default=0)
    if n < 6 or highs[-1] <= before:
        return None
    start = n - 6
    while start >= 0 and points[-1][0] - points[start][0] < 3.0:
        start -= 1
    if start < 0 or max(highs[start:]) <= max(highs[:start], default=0):
        return None
    threes = []
    for end in range(n, 2, -3):
        threes.insert(0, min(points[end - 3 : end], key=lambda point: point[1]))
    for part in (points[start:], points[start // 2 :], points, threes):
        slope = rule_of_a_slope(part)
        if slope > 0 and max(highs[start:]) - before > 2 * slope:
            return slope, max(highs[start:])
    return None


def test_a_rise_is_what_the_rule_says() -> None:
    rng = random.Random(11)
    rises = falls = 0
    for _ in range(12_000):
        n = rng.choice([*range(4, 21), 6, 7, 8, 9, 10, 11, 18, 19, 20])
        apart = rng.choice([0.5, 0.5, 0.25, 0.75, 1.0])
        start, step, noise = rng.randint(-3, 3), rng.choice([1, 2, 2, 4, 8]), rng.choice([0, 1, 2, 4, 8, 12])
        lows = [start + step * number + rng.randint(0, noise) for number in range(n)]
        if rng.random() < 0.4:  # a step within it
            at, size = rng.randrange(n), rng.choice([n, step * n // 2, step * n])
            lows = [low + size * (number >= at) for number, low in enumerate(lows)]
        if rng.random() < 0.3:
            lows[rng.randrange(n)] -= rng.randint(0, step * 4)
        highs = [low + rng.randint(0, noise) for low in lows]
        if rng.random() < 0.3:
            highs[rng.randrange(n)] += rng.randint(0, step * n)
        points = [(number * apart, low) for number, low in enumerate(lows)]
        peaks = [rng.randint(0, max(max(lows), 0) + 2) for _ in range(rng.choice([0, 0, 1, 3]))]
        blocks = tuple(
            pressure._Block(number, time, low, high)
            for number, ((time, low), high) in enumerate(zip(points, highs, strict=True))
        )
        assert pressure._slope(blocks) == rule_of_a_slope(points), points
        found = pressure._climb(pressure._Track(blocks=blocks, peaks=tuple(enumerate(peaks))))
        assert found == rule_of_a_climb(points, highs, peaks), (points, highs, peaks)
        rises, falls = rises + (found is not None), falls + (found is None)
    assert rises > 2_000 and falls > 2_000


# The levels' borders, and what is remembered


def one(time: float, used: int, *, cap: int = 1000, limit: int | None = None, overhead: int = 0, **more: Any) -> Sample:
    usages = {"torch": FrameworkSample(used, used, 0, cap)}
    device = DeviceSample("GPU-1", 10**6, used, 10**6, used + overhead, limit, overhead, 0, usages)
    return Sample(BEGIN + time, (device._replace(**more),))


def said(samples: list[Sample], settings: Settings | None = None) -> list[Action]:
    state: PressureState = START
    actions: list[Action] = []
    for sample in samples:
        state, new = decide(settings or Settings(), sample, state)
        actions += [action for action in new if action.kind != "callback"]
    return actions


@pytest.mark.parametrize(
    ("levels", "spoken"),
    [
        ([849], ""), ([850], "warn"), ([949], "warn"), ([950], "critical"),
        ([850, 800], "warn"), ([850, 799], "warn ok"),
        ([950, 900], "critical"), ([950, 899], "critical warn"),
    ],
)  # fmt: skip
def test_the_borders_of_the_levels(levels: list[int], spoken: str) -> None:
    actions = said([one(number, level) for number, level in enumerate(levels)], Settings(forecast=0))
    assert " ".join(str(action.event.level) for action in actions) == spoken


def test_a_low_threshold_ends_at_its_half() -> None:
    settings = Settings(warn=0.04, forecast=0)
    assert len(said([one(0, 40), one(1, 20)], settings)) == 1 and len(said([one(0, 40), one(1, 19)], settings)) == 2


def test_the_same_warning_comes_again_after_a_minute() -> None:
    for seconds, kind in ((59.9, "log"), (60.0, "warn")):
        actions = said([one(0, 900), one(1, 0), one(seconds, 900)], Settings(forecast=0))
        assert [action.kind for action in actions] == ["warn", "log", kind]


def test_what_others_hold_of_the_limit() -> None:
    """890 of 1,000 are free: what is missing is none of ours; with one byte less it is."""
    for free, level in ((890, 100), (889, 100), (149, 851), (150, 850), (151, 100)):
        actions = said([one(0, 100, limit=1000, free=free, cap=9999)], Settings(forecast=0))
        assert bool(actions) is (level >= 850), free
    assert said([one(0, 950, cap=9999, limit=1000, free=50)], Settings(forecast=0))[0].event.text.startswith(
        "pressure critical: this process needs"
    ), "nobody else has anything of it"


@pytest.mark.parametrize(
    ("usage", "process", "used"),
    [
        (FrameworkSample(100, 40, 50, 0), 120, 70),
        (FrameworkSample(100, 40, 200, 0), 120, 20),
        (FrameworkSample(100, 200, 0, 0), 5, 5),
        (FrameworkSample(None, 40, 0, 0), 120, 60),
        (FrameworkSample(None, None, None, 0), 120, 20),
        (FrameworkSample(100, 40, 50, 0), None, 70),
        (FrameworkSample(100, 0, 100, 0), 50, 0),  # two readings that do not fit
    ],
)
def test_what_the_process_needs(usage: FrameworkSample, process: int | None, used: int) -> None:
    device = DeviceSample("GPU-1", 10**6, 0, 10**6, process, 5000, 20, 0, {"torch": usage})
    ((name, level),) = pressure._levels(device)
    assert (name, level.used, level.top, level.base, level.others) == (None, used, 5000, 20, "")


def test_what_a_framework_needs_has_no_base() -> None:
    (name, level), *_ = pressure._levels(one(0, 70, limit=5000, overhead=20).devices[0])
    assert (name, level.used, level.top, level.base) == ("torch", 70, 1000, 0)


def test_the_limit_is_squeezed_by_others_from_the_first_byte() -> None:
    """JAX gives nothing back and serves it again: it is no pressure while nobody else has anything of the limit."""
    idle = {"jax": FrameworkSample(900, 100, 0, 0)}
    device = one(0, 0, limit=1000).devices[0]._replace(process=950, frameworks=idle)
    assert said([Sample(BEGIN, (device._replace(free=50),))]) == []
    (action,) = said([Sample(BEGIN, (device._replace(free=49),))])
    assert action.event.bytes == 951 and action.event.text.endswith("other processes hold the rest of the card")
    (action,) = said([Sample(BEGIN, (device._replace(free=0),))])
    assert "0 B is left of the limit" in action.event.text


def track(*levels: tuple[float, int]) -> pressure._Track:
    found = pressure._Track()
    for time, used in levels:
        found = pressure._seen(found, BEGIN + time, used)
    return found


def test_each_half_second_has_its_lowest_and_highest_level() -> None:
    found = track((0.0, 5), (0.1, 7), (0.2, 3), (0.3, 3), (0.49, 4), (0.5, 9), (1.6, 1))
    number = int(BEGIN * 2)
    assert found.blocks == (
        (number, BEGIN + 0.2, 3, 7), (number + 1, BEGIN + 0.5, 9, 9), (number + 3, BEGIN + 1.6, 1, 1),
    )  # fmt: skip
    assert track((0.0, 5), (0.1, 5)).blocks == track((0.0, 5)).blocks
    assert len(track((3.0, 5), (0.0, 5)).blocks) == 1, "the clock was set back"


def test_twenty_half_seconds_and_the_peaks_of_five_minutes_are_kept() -> None:
    found = track(*((number / 2, number) for number in range(20)))
    assert len(found.blocks) == 20 and found.peaks == ()
    found = pressure._seen(found, BEGIN + 10.0, 20)
    first = int(BEGIN // 30)
    assert len(found.blocks) == 20 and found.blocks[0].low == 1 and found.peaks == ((first, 0),)
    found = track(*((number / 2, number) for number in range(20 + 1200)))
    last = int((BEGIN + 599.5) // 30)
    assert [part for part, _ in found.peaks] == list(range(last - 10, last + 1))
    assert found.peaks[-1][1] == 1199, "the highest of each half minute"
    falling = track(*((number / 2, 5000 - number) for number in range(20 + 240)))
    assert falling.peaks[0] == (first, 5000)


def test_a_peak_leaves_when_it_is_more_than_five_minutes_old() -> None:
    block = pressure._Block(0, 3300.0, 0, 7)
    peaks = ((100, 1), (101, 2))
    assert pressure._remembered(peaks, block, 3300.0) == ((100, 1), (101, 2), (110, 7))
    assert pressure._remembered(peaks, block, 3329.9) == ((100, 1), (101, 2), (110, 7))
    assert pressure._remembered(peaks, block, 3330.0) == ((101, 2), (110, 7))
    assert pressure._remembered(((110, 7),), block, 3330.0) == ((110, 7),)
    assert pressure._remembered(((110, 6),), block, 3330.0) == ((110, 7),)


def forecasts(
    levels: list[tuple[float, float]], cap: int = 1_000_000, **settings: Any
) -> list[tuple[float, float | None]]:
    actions = said([one(time, int(used), cap=cap) for time, used in levels], Settings(warn=2, critical=3, **settings))
    return [(round(action.event.time - BEGIN, 2), action.event.seconds) for action in actions]


def rising(start: float, rate: float, seconds: float = 6.0) -> list[tuple[float, float]]:
    return [(number / 4, start + rate * number / 4) for number in range(int(seconds * 4))]


def test_the_borders_of_a_forecast() -> None:
    ((time, seconds),) = forecasts(rising(760_000, 20_000))
    assert time == 3.0 and seconds == pytest.approx(9.0), "after six half seconds, that is three"
    assert forecasts(rising(760_000, 20_000), forecast=9.0)[0][0] > 3.0, "not reached within nine seconds"
    assert forecasts(rising(760_000, 20_000), forecast=9.01)[0][0] == 3.0
    assert forecasts(rising(760_000, 20_000), forecast=0) == []
    assert forecasts([(time, min(used, 755_000)) for time, used in rising(690_000, 20_000)]) == []
    assert forecasts([(time, min(used, 755_001)) for time, used in rising(694_600, 20_100)])[0][0] == pytest.approx(
        3, abs=0.3
    )
    assert forecasts(rising(1_000_001, 20_000))[0][1] == 0.0, "it is over its cap"
    (over,) = said(
        [one(time, int(used), cap=1_000_000) for time, used in rising(1_000_001, 9)], Settings(warn=2, critical=3)
    )
    assert (over.event.seconds, over.event.bytes) == (0.0, 0)
    assert forecasts(rising(1_000_001, 20_000), forecast=0) == [], "none is wanted"
    assert (
        len(forecasts(rising(920_000, 20_000, 3.5), forecast=1.0))
        == 1
        == len(forecasts(rising(935_000, 20_000), forecast=0.5))
    )


def test_of_the_process_three_quarters_of_what_is_left_beside_its_overhead_must_be_in_use() -> None:
    """400,000 of overhead in a limit of 1,000,000: the floor is 853,000."""

    def ends(seconds: float) -> int:
        samples = [
            one(time, int(used) - 400_000, cap=0, limit=1_000_000, overhead=400_000)
            for time, used in rising(760_000, 20_000, seconds)
        ]
        return len(said(samples, Settings(warn=2, critical=3)))

    assert ends(4.75) == 0 and ends(5.0) == 1


def test_a_forecast_is_over_if_the_level_falls_by_the_hysteresis_or_a_minute_goes_by() -> None:
    first = rising(760_000, 20_000, 4.0)
    top = first[-1][1]
    for fallen, again in ((top - 50_000, False), (top - 50_001, True)):
        state = START
        for time, used in [*first, *((4 + number / 4, fallen) for number in range(16))]:
            state, _ = decide(Settings(warn=2, critical=3), one(time, int(used), cap=1_000_000), state)
        assert (state._tracks["GPU-1", "torch"].announced is None) is again
    for seconds, over in ((59.5, False), (60.0, True)):
        state = START
        for time, used in [*first, (first[-1][0] + seconds, top)]:
            state, _ = decide(Settings(warn=2, critical=3), one(time, int(used), cap=1_000_000), state)
        assert (state._tracks["GPU-1", "torch"].announced is None) is over


# Unaccounted memory


def unaccounted(levels: Sequence[float], apart: float = 0.5) -> list[int]:
    """What is said of so many MiB, one after the other: the place of each."""
    state, found = START, []
    for number, level in enumerate(levels):
        state, actions = decide(Settings(), one(number * apart, 0, unaccounted=level * MIB), state)
        found += [number for action in actions if action.kind == "warn"]
    return found


def test_the_borders_of_a_leak_outside_every_framework() -> None:
    assert unaccounted([0, 8, 16, 24, 32, 40]) == [], "not yet three seconds"
    assert unaccounted([0, 8, 16, 24, 32, 40, 48]) == [6]
    assert unaccounted([100 + number * 8 for number in range(7)]) == [6]
    assert unaccounted([0, 6, 12, 18, 24, 30, 36]) == [], "30 MiB without its largest step"
    assert unaccounted([0, 6, 12, 18, 24, 30, 38]) == [], "30 MiB"
    assert unaccounted([0, 6, 12, 18, 24, 32, 40]) == [6], "32 MiB"
    assert unaccounted([0, 8, 16, 24, 32, 39, 39, 39, 39]) == [] and unaccounted([0, 0, 20, 20, 40, 40, 60, 60]) == []
    assert unaccounted([0, 0, 20, 20, 40, 40, 60, 60, 80, 80]) == [8], "the fourth step"
    assert unaccounted([0, 0, 20, 20, 40, 40, 60, 60, 60 + 1 / MIB, 60 + 1 / MIB]) == [8], "even of a byte"


def test_it_is_said_again_when_it_has_doubled_and_anew_when_half_of_it_is_gone() -> None:
    rise = [number * 8 for number in range(7)]  # 48 is said
    assert unaccounted([*rise, *range(56, 96, 8)]) == [6]
    assert unaccounted([*rise, *range(56, 97, 8)]) == [6, 12]
    state = START
    for number, level in enumerate(rise):
        state, _ = decide(Settings(), one(number / 2, 0, unaccounted=level * MIB), state)
    key = "GPU-1", pressure.UNACCOUNTED
    for left, forgotten in ((24 * MIB, False), (24 * MIB - 1, True)):
        later, _ = decide(Settings(), one(4, 0, unaccounted=left), state)
        assert (later._tracks[key].announced is None) is forgotten


def test_a_slow_one_is_said_from_the_peaks_of_half_minutes() -> None:
    per_part = [number * 8 for number in range(30) for _ in range(60)]  # 8 MiB each half minute
    first, *_ = unaccounted(per_part)
    assert first == 260, "when the fifth half minute has begun and is older than ten seconds: it has risen by 32 MiB"
    slower = [number * 3 for number in range(30) for _ in range(60)]
    assert unaccounted(slower) == [], "27 MiB in five minutes"
    blocks = tuple(pressure._Block(number, number / 2, 5 * MIB, 5 * MIB) for number in range(20))
    peaks = tuple((number, number * 8 * MIB) for number in range(5))
    assert pressure._speed(pressure._Track(blocks=blocks, peaks=peaks)) == 8 * MIB / 30
    less = tuple((number, number * 8 * MIB - (number == 4)) for number in range(5))
    assert pressure._speed(pressure._Track(blocks=blocks, peaks=less)) is None


# The documents


def test_the_documented_figures_hold() -> None:
    text = " ".join(DOCS.read_text().split())
    assert (pressure.BLOCK, pressure.EVIDENCE) == (0.5, (3.0, 6)) and "the lowest level of half a second" in text
    assert "last at least 3 s and 6 samples" in text and "in the 5 minutes before it" in text
    assert pressure.MEMORY == 5 * 60 and 0.75 < pressure.FLOOR == 0.755 and "three quarters of the cap" in text
    assert pressure.BLOCKS * pressure.BLOCK == 10 and pressure.AGAIN == 60 and "a warning once a minute" in text
    assert pressure.LEAKED == 32 * MIB and "comes to 32 MiB" in text
    assert pressure.STEPS == 4 and "in at least four half seconds" in text
    defaults = Settings()
    assert (defaults.interval, defaults.warn, defaults.critical, defaults.forecast) == (0.5, 0.85, 0.95, 20.0)
    assert (defaults.hysteresis, defaults.cpu) == (0.05, 0.01)
    assert "5% of the cap below it" in text and "more than 1% of a core" in text
    assert re.search(r"up to a hundred repetitions of each of 256 names", text)
    assert "hundred" in (inspect.getdoc(leak) or "") and Pressure.OK.rank == 0 and GIB == 1024 * MIB
