"""The levels, the forecast and the leak, from made-up samples: what must be said in time, and what must not be said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.types import (
    Device,
    DevicePlan,
    DeviceSample,
    Event,
    FrameworkSample,
    Pressure,
    Sample,
    WorkloadReport,
)
from memguard._base.units import GIB, MIB
from memguard._budget import MonitorConfig
from memguard._runtime import leaks
from memguard._runtime.leaks import Workloads, leak
from memguard._runtime.pressure import BLOCKS, START, Action, PressureState, Settings, decide, needed

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

BEGIN = 1_700_000_000.0
TOTAL = 140 * GIB
UUID = "GPU-00000000-0000-4000-8000-000000000000"
Level = Callable[[float], float]
"""Bytes in use by the seconds since the beginning."""


def sample(time: float, *, cap: int = 40 * GIB, limit: int | None = None, **usages: FrameworkSample) -> Sample:
    """One GPU on which nobody else is; overhead 1 GiB, and a limit that is far."""
    held = sum(usage.held or usage.in_use or 0 for usage in usages.values()) + GIB
    limit = limit or 2 * cap
    device = DeviceSample(UUID, TOTAL, held, TOTAL - held, held, limit, GIB, 0, usages)
    return Sample(BEGIN + time, (device,))


def torch(in_use: float, held: float | None = None, cap: int = 40 * GIB) -> FrameworkSample:
    held = in_use if held is None else held
    return FrameworkSample(int(held), int(in_use), int(held) - int(in_use), cap)


def run(samples: Iterable[Sample], to: Settings | None = None, state: PressureState = START) -> list[Action]:
    actions = []
    for one in samples:
        state, new = decide(to or Settings(), one, state)
        actions += new
    return actions


def events(actions: Iterable[Action], kind: str | None = None, framework: str | None = "torch") -> list[Event]:
    said = [action.event for action in actions if action.kind in ("warn", "log")]
    return [event for event in said if kind in (None, event.kind) and event.framework == framework]


def at(*levels: float, to: Settings | None = None, step: float = 0.5) -> list[Action]:
    """What comes of these fractions of torch's cap, one after the other."""
    return run((sample(n * step, torch=torch(level * 40 * GIB)) for n, level in enumerate(levels)), to)


def times(seconds: float, interval: float, rng: random.Random | None = None) -> Iterator[float]:
    time = 0.0
    while time < seconds:
        yield time
        time += interval * (rng.uniform(0.9, 1.1) if rng else 1)


# Levels


def test_a_level_goes_up_at_once_and_down_only_below_its_threshold_less_the_hysteresis() -> None:
    said = events(at(0.5, 0.85, 0.81, 0.84, 0.79, 0.96, 0.91, 0.89, 0.81, 0.2))
    assert [event.level for event in said] == [
        Pressure.WARN, Pressure.OK, Pressure.CRITICAL, Pressure.WARN, Pressure.OK,
    ]  # fmt: skip
    assert [event.time - BEGIN for event in said] == [0.5, 2.0, 2.5, 3.5, 4.5]
    assert said[0].text == f"pressure warn: torch needs 34.00 GiB of 40.00 GiB (85%) of its cap on {UUID}"
    assert (said[0].uuid, said[0].bytes) == (UUID, 34 * GIB)


def gpus(*ordinals: int | None) -> list[Device]:
    return [
        Device(UUID if not n else f"GPU-{n}", "NVIDIA H200", n + 3, TOTAL, None, "hopper", ordinal)
        for n, ordinal in enumerate(ordinals)
    ]


@pytest.mark.parametrize(
    ("devices", "end"),
    [
        (gpus(0), ""), (gpus(None), ""), (gpus(1, 0), " on cuda:1 (NVIDIA H200)"),
        (gpus(None, None), " on GPU 3 (NVIDIA H200)"), ([], f" on {UUID}"), (gpus(5, 6, 7)[1:], f" on {UUID}"),
    ],
)  # fmt: skip
def test_texts_name_the_gpu_where_there_are_several(devices: list[Device], end: str) -> None:
    to = Settings.of(MonitorConfig(), [], devices)
    (said,) = events(at(0.9, to=to))
    assert said.text == f"pressure warn: torch needs 36.00 GiB of 40.00 GiB (90%) of its cap{end}"
    assert said.uuid == UUID
    (said,) = events(run([sample(0, limit=41 * GIB, torch=torch(39 * GIB, cap=99 * GIB))], to), framework=None)
    assert said.text.endswith(f" of its limit{end}")
    rising = (sample(t, torch=torch((31 + t / 2) * GIB, cap=40 * GIB)) for t in times(12, 0.5))
    (said,) = events(run(rising, to), "forecast")
    assert said.text.endswith(f" s{end}")
    shared = DeviceSample(UUID, TOTAL, 0, GIB, 2 * GIB, 40 * GIB, GIB, 0, {})
    (said,) = events(run([Sample(BEGIN, (shared,))], to), framework=None)
    assert f" of the limit of 40.00 GiB{end}: other processes" in said.text


@pytest.mark.parametrize("threshold", [0.85, 0.95])
def test_a_level_that_flaps_around_a_threshold_speaks_once(threshold: float) -> None:
    flapping = [threshold + (0.002 if n % 2 else -0.045) for n in range(1000)]
    said = [event for event in events(at(0.5, *flapping)) if event.level is not Pressure.WARN or threshold < 0.9]
    assert len(said) == 1


def test_each_rise_is_a_warning_but_the_same_only_once_in_a_minute() -> None:
    actions = at(*[0.9, 0.5] * 200)  # a rise every second
    warnings = [a.event.time - BEGIN for a in actions if a.kind == "warn" and a.event.framework]
    assert warnings == [0, 60, 120, 180]
    assert len(events(actions)) == 400
    assert sum(a.kind == "callback" and a.event.framework == "torch" for a in actions) == 400


def test_what_a_trim_would_return_is_no_pressure() -> None:
    assert not run([sample(0, torch=torch(10 * GIB, held=40 * GIB))])


@pytest.mark.parametrize(
    ("name", "usage", "need"),
    [
        ("torch", FrameworkSample(10, 5, 3, 20), 7),
        ("cupy", FrameworkSample(10, 5, None, 20), 5),
        ("cupy", FrameworkSample(10, None, 3, 20), 7),
        ("cupy", FrameworkSample(10, None, None, 20), 10),
        ("torch", FrameworkSample(3, 3, 5, 20), 0),  # two readings that do not fit
        ("tensorflow", FrameworkSample(None, 5, 0, 20), 5),  # with growth
        ("tensorflow", FrameworkSample(20, 5, 0, 20), 5),  # without: it holds its cap from the first operation on
        ("jax", FrameworkSample(10, 5, 0, 20), 5),  # its pool gives nothing back, and serves it again
        ("jax", FrameworkSample(None, None, None, 20), None),
    ],
)
def test_what_a_framework_needs(name: str, usage: FrameworkSample, need: int | None) -> None:
    assert needed(name, usage) == need


def test_a_pool_that_gives_nothing_back_is_pressure_on_nobody() -> None:
    """TensorFlow, which does not say what it holds, has filled its cap and uses little of it."""
    usage = FrameworkSample(None, GIB, 0, 20 * GIB)
    device = DeviceSample(UUID, TOTAL, 0, 100 * GIB, 39 * GIB, 40 * GIB, GIB, 0, {"tensorflow": usage})
    assert not run([Sample(BEGIN, (device,))])
    nearly = device._replace(total=41 * GIB, free=2 * GIB)  # no other process has anything of the limit
    assert not run([Sample(BEGIN, (nearly,))])


def test_a_framework_without_a_cap_counts_on_the_device_only() -> None:
    actions = run([sample(0, limit=40 * GIB, cupy=FrameworkSample(38 * GIB, 38 * GIB, 0, None))])
    assert [(e.framework, e.level) for e in events(actions, framework=None)] == [(None, Pressure.CRITICAL)]
    assert not events(actions, framework="cupy")
    (event,) = events(actions, framework=None)
    assert event.text == f"pressure critical: this process needs 39.00 GiB of 40.00 GiB (98%) of its limit on {UUID}"


def other(process: int | None, free: int, limit: int | None = 40 * GIB, **usages: FrameworkSample) -> Sample:
    return Sample(BEGIN, (DeviceSample(UUID, 80 * GIB, 0, free, process, limit, GIB, None, usages),))


def test_others_that_fill_the_card_are_pressure() -> None:
    (event,) = events(run([other(10 * GIB, GIB, torch=torch(9 * GIB))]), framework=None)
    assert event.level is Pressure.CRITICAL
    assert event.text == (
        f"pressure critical: 1.00 GiB is left of the limit of 40.00 GiB on {UUID}: "
        "other processes hold the rest of the card"
    )
    assert not run([other(10 * GIB, GIB, torch=torch(GIB, held=9 * GIB))])  # 8 GiB of its own cache are left too
    assert not run([other(10 * GIB, 30 * GIB, torch=torch(9 * GIB))])
    assert not run([other(10 * GIB, GIB, None, torch=torch(9 * GIB))])  # no limit, no pressure


def test_where_nvml_does_not_name_this_process_its_frameworks_are_added_up() -> None:
    assert not run([other(None, 40 * GIB, torch=torch(20 * GIB))])
    (event,) = events(run([other(None, 40 * GIB, torch=torch(35 * GIB, cap=80 * GIB))]), framework=None)
    assert event.bytes == 36 * GIB


def test_every_gpu_and_framework_has_a_level_of_its_own() -> None:
    def two(first: float, second: float) -> Sample:
        one = sample(0, torch=torch(first * 40 * GIB), cupy=torch(4 * GIB)).devices[0]
        return Sample(BEGIN, (one, sample(0, torch=torch(second * 40 * GIB)).devices[0]._replace(uuid="GPU-1")))

    state, actions = decide(Settings(), two(0.5, 0.9), START)
    assert [(e.uuid, e.framework) for e in events(actions)] == [("GPU-1", "torch")]
    assert state.level("GPU-1", "torch") is Pressure.WARN
    assert state.level("GPU-1") is state.level(UUID, "torch") is state.level(UUID, "cupy") is Pressure.OK
    assert state.level("GPU-2") is Pressure.OK
    state, actions = decide(Settings(), two(0.9, 0.9), state)
    assert [(e.uuid, e.framework) for e in events(actions)] == [(UUID, "torch")]
    state, _ = decide(Settings(), Sample(BEGIN, ()), state)
    assert state == START  # what is not seen any more is forgotten


def test_a_cap_that_is_lowered_is_pressure_at_once() -> None:
    _, actions = decide(Settings(), sample(1, torch=torch(8 * GIB, cap=8 * GIB)), START)
    assert [event.level for event in events(actions)] == [Pressure.CRITICAL]


def test_trim_and_raise_come_where_the_budget_says_so_and_the_level_becomes_critical() -> None:
    both = Settings(on_pressure=("trim", "raise"), forecast=0)
    actions = [a for a in at(0.9, 0.96, 0.99, 0.91, 0.5, to=both) if a.event.framework]
    assert [a.kind for a in actions] == ["warn", "callback", "warn", "trim", "callback", "raise", "log", "callback"]
    assert {a.event.level for a in actions if a.kind in ("trim", "raise")} == {Pressure.CRITICAL}
    assert "raise" not in {a.kind for a in at(0.99, to=Settings(on_pressure=("trim",)))}
    assert {a.kind for a in at(0.99)} == {"warn", "callback"}


def test_settings_of_the_budget() -> None:
    own = Settings(warn=0.5, critical=0.6, hysteresis=0.2)
    assert [e.level for e in events(at(0.5, 0.31, 0.6, 0.41, 0.39, 0.29, to=own))] == [
        Pressure.WARN, Pressure.CRITICAL, Pressure.WARN, Pressure.OK,
    ]  # fmt: skip
    low = Settings(warn=0.04, critical=0.5)  # less than the hysteresis: half of it ends it
    assert [e.level for e in events(at(0.041, 0.021, 0.019, to=low))] == [Pressure.WARN, Pressure.OK]


# Forecast


def leaking(
    rate: float, below: float, cap: int, interval: float, *, steady: float = 5.0, seed: int = 0, step: int = 1,
    noise: int = 0, tooth: int = 0, to: Settings | None = None,
) -> tuple[list[float], float]:  # fmt: skip
    """How long before torch's cap each forecast came, and what the first one said, in seconds."""
    rng = random.Random(seed)
    end = steady + below / rate
    samples = []
    for time in times(end, interval, rng):
        level = cap - below + max(time - steady, 0) * rate
        level = level // step * step + rng.random() * noise - tooth * (1 - time % 1)
        samples.append(sample(time, cap=cap, torch=torch(max(level, 0), cap=cap)))
    found = events(run(samples, to), "forecast")
    assert all(event.seconds is not None and event.text for event in found)
    return [BEGIN + end - event.time for event in found], (found[0].seconds or 0.0) if found else -1.0


@pytest.mark.parametrize("interval", [0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("cap", [26, 30, 40, 64, 120])
def test_a_leak_of_1_gib_per_second_from_20_gib_below_the_cap_is_announced_5_s_before(
    interval: float, cap: int
) -> None:
    for seed, (step, noise, tooth) in enumerate(
        [(1, 0, 0), (2 * MIB, 0, 0), (20 * MIB, 0, 0), (512 * MIB, 0, 0), (1, 64 * MIB, 0), (1, 0, 256 * MIB)]
    ):
        before, said = leaking(GIB, 20 * GIB, cap * GIB, interval, seed=seed, step=step, noise=noise, tooth=tooth)
        assert len(before) == 1, "once in a rise"
        assert 5 <= before[0] <= 20
        assert said == pytest.approx(before[0], abs=0.35 * before[0] + 1)


@pytest.mark.parametrize("interval", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 2.0, 4.0])
def test_other_leaks_are_announced_5_s_before_where_a_quarter_of_the_cap_lasts_so_long(
    rate: float, interval: float
) -> None:
    before, _ = leaking(rate * GIB, 60 * GIB if rate > 1 else 15 * GIB, 120 * GIB, interval)
    assert len(before) == 1
    assert 5 <= before[0] <= 20
    assert leaking(rate * GIB, 15 * GIB, 60 * GIB, interval, to=Settings(forecast=0))[0] == []


def test_a_forecast_says_what_grows_how_fast_and_when_it_ends() -> None:
    (event, *_) = [
        a.event
        for a in run(sample(t, torch=torch(20 * GIB + t * GIB)) for t in times(20, 0.5))
        if a.event.kind == "forecast" and a.kind == "warn"
    ]
    assert event.text == f"torch grows by 1.00 GiB/s: its cap of 40.00 GiB is reached in about 10 s on {UUID}"
    assert (event.seconds, event.bytes) == (pytest.approx(9.5), int(9.5 * GIB))


def test_the_device_is_forecast_too() -> None:
    """Two frameworks grow, each far from its own cap."""
    samples = (
        sample(t, limit=40 * GIB, torch=torch(t * GIB / 2, cap=80 * GIB), cupy=torch(t * GIB / 2, cap=80 * GIB))
        for t in times(39, 0.5)
    )
    actions = run(samples)
    assert not events(actions, "forecast", "torch")
    (event,) = events(actions, "forecast", None)
    assert event.text.startswith("this process grows by 1.00 GiB/s: the limit of 40.00 GiB is reached in about ")


def test_others_that_take_the_card_are_forecast() -> None:
    samples = [
        other(10 * GIB, int((30 - t) * GIB), torch=torch(9 * GIB))._replace(time=BEGIN + t) for t in times(29, 0.5)
    ]
    (event,) = events(run(samples), "forecast", None)
    assert event.text.startswith("what is available shrinks by 1.00 GiB/s: the limit of 40.00 GiB is reached in about ")


def test_a_second_rise_is_announced_again_and_a_pause_in_one_is_not() -> None:
    def level(time: float) -> float:
        if time < 100:
            return 30 + min(time, 4) + max(min(time - 20, 4), 0)  # a pause of 16 s
        return 20 if time < 500 else 30 + (time - 500)

    found = events(run(sample(t, torch=torch(level(t) * GIB)) for t in times(508, 0.25)), "forecast")
    assert [round(event.time - BEGIN) for event in found] == [pytest.approx(3, abs=1), pytest.approx(504, abs=1)]


def test_a_step_is_no_rise_and_neither_is_a_fall() -> None:
    for slow in (0, MIB, 20 * MIB):
        for interval in (0.05, 0.25, 0.5, 1.0):
            levels = (sample(t, torch=torch((31 if t > 5 else 2) * GIB + t * slow)) for t in times(60, interval))
            assert not events(run(levels))
    assert not events(run(sample(t, torch=torch(33 * GIB - t * GIB / 2)) for t in times(60, 0.25)))


def test_a_clock_that_is_set_back_forgets_what_was_before() -> None:
    rising = [sample(t, torch=torch(31 * GIB + t * GIB / 2)) for t in times(2.5, 0.5)]
    again = [sample(t - 3600, torch=torch(32 * GIB + t * GIB / 2)) for t in times(2.5, 0.5)]
    assert not run([*rising, *again])
    state = START
    for one in [sample(t, torch=torch(36 * GIB)) for t in times(60, 0.5)]:
        state, _ = decide(Settings(), one, state)
    state, _ = decide(Settings(), again[0], state)
    (track,) = (track for key, track in state._tracks.items() if key[1] == "torch")
    assert len(track.blocks) == 1 and not track.peaks
    assert track.level is Pressure.WARN  # 32 GiB are the 80% below which it ends: the level stays


@pytest.mark.parametrize("interval", [0.05, 0.5])
@pytest.mark.parametrize(("rate", "tooth", "period"), [(0.5, 4, 0.33), (0.5, 4, 1.0), (0.5, 2, 2.0), (0.25, 4, 2.0)])
def test_a_leak_beneath_a_sawtooth_is_announced_once(rate: float, tooth: int, period: float, interval: float) -> None:
    def level(time: float) -> float:
        return 20 * GIB + max(time - 5, 0) * rate * GIB - tooth * GIB * (1 - time / period % 1)

    end = 5 + 20 / rate
    found = events(run(sample(t, torch=torch(level(t))) for t in times(end, interval)), "forecast")
    assert len(found) == 1
    assert end - (found[0].time - BEGIN) >= 10


def test_what_rises_and_falls_is_no_steady_rise() -> None:
    unsteady = [31, 31.8, 32.5, 32.1, 31.7, 32.4, 33.2]  # 16 of 21 pairs rise
    assert not at(*(level / 40 for level in unsteady))
    assert at(*(level / 40 for level in sorted(unsteady)))


def test_what_follows_a_long_pause_is_another_rise() -> None:
    def level(time: float) -> float:
        return 31 + min(time, 4) / 2 + max(min(time - 100, 4), 0) / 2

    found = events(run(sample(t, torch=torch(level(t) * GIB)) for t in times(120, 0.25)), "forecast")
    assert [event.time - BEGIN for event in found] == [pytest.approx(3, abs=1), pytest.approx(103, abs=1)]


def test_noise_is_no_rise() -> None:
    """In its first ten seconds, while nothing is known, chance may look like one: rarely."""
    early = 0
    for seed in range(40):
        rng = random.Random(seed)
        interval = (0.1, 0.25, 0.5, 1.0)[seed % 4]
        noisy = (sample(t, torch=torch(rng.uniform(0.77, 0.84) * 40 * GIB)) for t in times(300, interval))
        found = events(run(noisy))
        early += len(found)
        assert all(event.time - BEGIN < 12 for event in found)
    assert early <= 3


def test_the_state_does_not_grow() -> None:
    state = START
    for time in times(7200, 0.5):
        state, _ = decide(Settings(), sample(time, torch=torch(random.Random(time).random() * 30 * GIB)), state)
    for track in state._tracks.values():
        assert len(track.blocks) == BLOCKS
        assert len(track.peaks) <= 12


# Ten minutes of sawtooth


def shape(name: str, period: float, rng: random.Random) -> Level:
    """Levels from 0 to 1."""
    sizes: dict[int, float] = {}

    def level(time: float) -> float:
        number, part = int(time / period), time / period % 1
        if name == "saw":
            return part
        if name == "triangle":
            return 1 - abs(2 * part - 1)
        if name == "square":
            return 1.0 if part < 0.5 else 0.1
        size = sizes.setdefault(number, rng.random())  # batches of random sizes
        return size * min(1, 2 * part) if part < 0.9 else 0.0

    return level


KINDS: dict[str, Callable[[int, int], FrameworkSample]] = {
    "torch": lambda in_use, peak: FrameworkSample(peak, in_use, peak - in_use, 40 * GIB),
    "cupy": lambda in_use, peak: FrameworkSample(peak, in_use, None, 40 * GIB),
    "jax": lambda in_use, peak: FrameworkSample(peak, in_use, 0, 40 * GIB),
    "tensorflow": lambda in_use, peak: FrameworkSample(None, in_use, 0, 40 * GIB),
    "numba": lambda in_use, peak: FrameworkSample(in_use, in_use, 0, 40 * GIB),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["saw", "triangle", "square", "random"])
def test_ten_minutes_of_sawtooth_up_to_three_quarters_of_the_cap_say_nothing(name: str, kind: str) -> None:
    """With caches that keep `held` at its peak while `in_use` falls."""
    for seed, (period, interval) in enumerate(
        [(0.5, 0.5), (0.7, 0.25), (1.0, 0.5), (2.3, 1.0), (4.0, 0.5), (8.0, 0.3), (12.0, 0.5), (20.0, 1.0), (30.0, 0.5)]
    ):
        rng = random.Random(seed)
        level = shape(name, period, rng)
        peak, samples = 0, []
        for time in times(600, interval, rng):
            in_use = int(0.75 * 40 * GIB * level(time + 7.3 * seed))
            peak = max(peak, in_use)
            samples.append(sample(time, limit=41 * GIB, **{kind: KINDS[kind](in_use, peak)}))
        assert not run(samples), (period, interval)


def test_after_a_first_tooth_no_other_is_a_rise_however_near_the_cap_it_comes() -> None:
    """The first triangle to 84% may be taken for a leak; those after it are known."""
    level = shape("triangle", 20.0, random.Random(0))
    actions = run(sample(t, torch=torch(0.84 * 40 * GIB * level(t))) for t in times(600, 0.5))
    assert len(events(actions)) <= 1
    tops = [0.84, 0.835, 0.844, 0.839, 0.847]
    little_by_little = (
        sample(t, torch=torch(tops[int(t / 30) % 5] * 40 * GIB * level(t * 2 / 3))) for t in times(600, 0.5)
    )
    assert len(events(run(little_by_little))) <= 1


# Any samples

SIZES = st.integers(0, 60).map(lambda gib: gib * GIB) | st.none()
USAGES = st.builds(FrameworkSample, SIZES, SIZES, SIZES, SIZES)
DEVICES = st.builds(
    DeviceSample,
    st.sampled_from(["GPU-1", "GPU-2"]), st.just(TOTAL), st.integers(0, TOTAL), st.integers(0, TOTAL), SIZES, SIZES,
    st.integers(0, 4 * GIB), st.none() | st.integers(-GIB, GIB),
    st.dictionaries(st.sampled_from(["torch", "tensorflow", "jax", "cupy"]), USAGES, max_size=3),
)  # fmt: skip
SAMPLES = st.lists(
    st.builds(
        Sample,
        st.floats(0, 100).map(lambda t: BEGIN + t),
        st.lists(DEVICES, max_size=2, unique_by=lambda d: d.uuid).map(tuple),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(SAMPLES, st.booleans())
def test_any_samples(samples: list[Sample], in_order: bool) -> None:
    to = Settings(on_pressure=("trim", "raise"))
    state = START
    for one in sorted(samples, key=lambda one: one.time) if in_order else samples:
        kept = state
        before = dict(state._tracks)
        state, actions = decide(to, one, state)
        assert decide(to, one, kept) == (state, actions)  # a function of what it is given
        assert kept._tracks == before
        assert not START._tracks
        said = [a.event for a in actions if a.kind in ("warn", "log")]
        assert said == [a.event for a in actions if a.kind == "callback"]  # each event once
        for action in actions:
            assert action.kind in ("log", "warn", "trim", "callback", "raise")
            assert action.event.time == one.time and action.event.text.isprintable()
            assert action.event.kind in ("pressure", "forecast")
            assert action.kind not in ("trim", "raise") or action.event.level is Pressure.CRITICAL
        for device in one.devices:
            for name, usage in device.frameworks.items():
                need = needed(name, usage)
                if usage.cap and need is not None:
                    level = state.level(device.uuid, name)
                    assert level.rank >= (need >= 0.85 * usage.cap) + (need >= 0.95 * usage.cap)
                    assert level.rank <= (need >= 0.80 * usage.cap) + (need >= 0.90 * usage.cap)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 0.75), min_size=1, max_size=80), st.sampled_from([0.05, 0.3, 0.5, 1.0, 5.0]))
def test_nothing_is_said_below_three_quarters(levels: list[float], interval: float) -> None:
    assert not at(*levels, step=interval)


# Leak of a workload


@pytest.mark.parametrize(
    ("afters", "each"),
    [
        ([0, 10, 20, 30, 40], 10),
        ([0, 10, 20, 30], None),  # four are too few
        ([900, 10, 20, 30, 40], 10),  # the first warms up
        ([0, 100, 110, 120, 130, 140], 10),
        ([0, 10, 10, 10, 10, 10, 10], None),
        ([0, 10, 20, 20, 20, 20, 20, 20], None),  # a cache that fills
        ([0, 100, 150, 175, 188, 194, 197], None),
        ([int(1000 * (1 - 0.9**n)) for n in range(40)], None),
        ([40, 30, 20, 10, 0], None),
        ([0, 10, 20, 30, 40, 40, 40, 40, 40, 40, 40, 40, 40], None),  # it is over
        ([0, 10, 20, 30, 40, 0, 10, 20, 30, 40, 0, 10, 20, 30, 40], None),  # given back every fifth time
        ([], None),
        ([5], None),
    ],
)
def test_a_leak_is_growth_that_goes_on(afters: list[int], each: int | None) -> None:
    assert leak([after * MIB for after in afters]) == (each * MIB if each is not None else None)


@pytest.mark.parametrize(("noise", "most"), [(0.1, 5), (0.5, 8), (1.0, 12), (2.0, 20)])
def test_a_leak_is_found_under_noise(noise: float, most: int) -> None:
    """Noise as a part of what leaks; after `most` repetitions it is found."""
    for seed in range(50):
        rng = random.Random(seed)
        afters = [int((n + noise * rng.random()) * 100 * MIB) for n in range(100)]
        found = next(n for n in itertools.count(1) if leak(afters[:n]) is not None)
        assert found <= most
        assert leak(afters) == pytest.approx(100 * MIB, rel=0.15)


def test_one_odd_repetition_hides_no_leak() -> None:
    afters = [n * MIB for n in range(30)]
    afters[17] += 400 * MIB
    assert leak(afters) == MIB


@pytest.mark.parametrize("kind", ["random", "two sizes", "normal"])
def test_what_changes_from_one_to_the_next_is_no_leak(kind: str) -> None:
    """Batches of random sizes, of which the last stays. Asked after each of 60 repetitions."""
    found = 0
    for seed in range(150):
        rng = random.Random(seed)
        made = {
            "random": rng.random,
            "two sizes": lambda r=rng: r.choice([0.0, 1.0]),
            "normal": lambda r=rng: r.gauss(5, 1),
        }
        afters = [int(made[kind]() * GIB) for _ in range(60)]
        found += any(leak(afters[:n]) is not None for n in range(60))
    assert found <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), max_size=40))
def test_any_leak_is_a_positive_number(afters: list[int]) -> None:
    found = leak(afters)
    assert found is None or found > 0
    assert leak([after + GIB for after in afters]) == found
    assert leak(sorted(afters, reverse=True)) is None


@pytest.mark.parametrize("kind", ["random", "rising", "nearly rising", "steps"])
def test_the_pairs_that_rise_are_counted_as_if_each_was_looked_at(kind: str) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        made = {
            "random": lambda n, r=rng: r.randrange(50),
            "rising": lambda n, _=rng: n,
            "nearly rising": lambda n, r=rng: n + r.randrange(4),
            "steps": lambda n, r=rng: n // r.randrange(1, 9),
        }
        values = [made[kind](n) for n in range(rng.randrange(100))]
        assert leaks._score(values) == sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("kind", ["the same", "noise", "others take more", "given back between two"])
def test_a_workload_that_leaves_nothing_costs_no_slopes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slopes between all pairs of a hundred repetitions take a millisecond, on the program's own thread."""
    rng, slopes = random.Random(3), []
    monkeypatch.setattr(leaks, "_theil_sen", lambda values: slopes.append(values) or 0.0)
    ends = {
        "the same": lambda n: (GIB, GIB),
        "noise": lambda n: (rng.randrange(GIB), rng.randrange(GIB)),
        "others take more": lambda n: (n * MIB, n * MIB),
        "given back between two": lambda n: (GIB, GIB + 5 * MIB),
    }
    workloads = Workloads()
    for number in range(400):
        before, after = ends[kind](number)
        assert workloads.leaked(WorkloadReport("step", "torch", before, after)) is None
    assert not slopes


# Elastic caps

CARD = Device(UUID, "NVIDIA H200", 0, TOTAL, 0, "hopper", simulated=True)
PART = DevicePlan(
    CARD, 42 * GIB, 2 * GIB, {"torch": 30 * GIB, "cupy": 5 * GIB, "jax": 5 * GIB}, 0,
    elastic={"torch": (10 * GIB, 30 * GIB), "cupy": (5 * GIB, 20 * GIB)},
)  # fmt: skip
ELASTIC = Settings.of(MonitorConfig(), ["trim"], [CARD], [PART])


def moving(time: float, **gib: tuple[float, float]) -> Sample:
    """What each framework needs and its cap of now, in GiB."""
    usages = {name: torch(need * GIB, cap=int(cap * GIB)) for name, (need, cap) in gib.items()}
    return sample(time, limit=TOTAL, **usages)


def levels(*samples: Sample) -> list[tuple[str | None, str]]:
    return [(e.framework, str(e.level)) for a in run(samples, ELASTIC) if a.kind in ("warn", "log") for e in [a.event]]


def test_an_elastic_cap_that_can_rise_is_no_pressure() -> None:
    """Its cap of now is what it holds: it rises by what is asked for. Only the most that it can rise to counts."""
    assert levels(moving(0, cupy=(5, 5), torch=(1, 30), jax=(1, 5))) == []
    assert levels(moving(0, cupy=(16.9, 17), torch=(1, 18), jax=(1, 5))) == []
    (warned,) = run([moving(0, cupy=(17.2, 18), torch=(1, 17), jax=(1, 5))], ELASTIC)[:1]
    said = "pressure warn: cupy needs 17.20 GiB of 20.00 GiB (86%) of what its cap can rise to"
    assert warned.event.text == said
    assert levels(moving(0, jax=(4.9, 5))) == [("jax", "critical")], "a cap that stays is compared with itself"


def test_what_another_elastic_framework_needs_lowers_what_a_cap_can_rise_to() -> None:
    before = moving(0, cupy=(8, 10), torch=(10, 25), jax=(1, 5))
    later = moving(0.1, cupy=(8, 10), torch=(26, 26), jax=(1, 5))
    assert levels(before) == []
    assert levels(before, later) == [("cupy", "warn"), ("torch", "critical")]


def test_a_min_is_there_whatever_others_hold() -> None:
    assert levels(moving(0, cupy=(4.5, 5), torch=(38, 30), jax=(1, 5))) == [("cupy", "warn"), ("torch", "critical")]


def test_a_fixed_cap_that_was_resized_counts_as_it_is_now() -> None:
    assert levels(moving(0, cupy=(13, 14), torch=(1, 10), jax=(1, 5))) == []
    assert levels(moving(0, cupy=(13, 14), torch=(1, 10), jax=(1, 15))) == [("cupy", "warn")]


def test_a_forecast_of_an_elastic_cap_names_the_most_that_it_can_rise_to() -> None:
    samples = [moving(n / 2, cupy=(10 + n / 4, 12 + n / 4), torch=(1, 10), jax=(1, 5)) for n in range(30)]
    told = [a.event.text for a in run(samples, ELASTIC) if a.kind == "warn" and a.event.kind == "forecast"]
    assert len(told) == 1 and "/s: the most that its cap can rise to, 20.00 GiB, is reached in about" in told[0]


def test_a_budget_without_elastic_shares_has_no_bounds() -> None:
    assert Settings.of(MonitorConfig(), [], [CARD], [replace(PART, elastic={})]).bounds == {}
