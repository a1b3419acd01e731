"""What the monitor's samples mean: how close a framework is to its cap, the process to its limit, and until when.

Pure: no clock, thread, environment or GPU; the time is that of the samples. `decide` is a function of the settings, a
sample and the state before it. A level goes up at once and comes down only below its threshold less the hysteresis.

A forecast needs a steady rise of at least 3 s and 6 blocks above everything seen in the five minutes before it, and
three quarters of the cap in use: below that a rise is as likely a model being loaded, or the first batch. So a leak is
announced when a quarter of the cap is left, at the earliest. A leak that is small beside what a workload takes and
gives back over several seconds is seen late; `leaks` sees it between repetitions.

What is unaccounted has no cap that it could reach, and no framework that would give it back. So a steady rise of it is
said as a leak, wherever it is: after 3 s if it is fast, after some minutes if it is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from memguard._base.specs import NEVER_GIVE_BACK
from memguard._base.types import Device, DevicePlan, DeviceSample, Event, FrameworkSample, Pressure, Sample
from memguard._base.units import MIB, format_size
from memguard._runtime.leaks import leak

if TYPE_CHECKING:
    from memguard._budget import MonitorConfig

BLOCK = 0.5
"""Seconds. The lowest level of each block counts for the slope, so that what is given back within it adds none."""
BLOCKS = 20
"""Blocks that are kept: ten seconds, or more if samples are taken less often."""
EVIDENCE = 3.0, 6
"""The seconds and blocks that a rise must have lasted."""
RISING = 6 / 7, 3 / 4
"""The share of pairs of blocks that go up in a steady rise, of fewer than ten blocks and of more: more than chance or
one step explains, and less than without noise."""
FLOOR = 0.755
"""The share of a cap that must be in use before a forecast is made."""
MEMORY = 300.0
"""Seconds for which the highest level is remembered, in ten parts."""
AGAIN = 60.0
"""Seconds in which the same warning is not repeated, and after which a rise that went no further is over."""
LEAKED = 32 * MIB
"""Bytes by which unaccounted memory must have risen before that is said."""
STEPS = 4
"""The blocks in which it must have risen."""
UNACCOUNTED = "unaccounted"
"""What stands in the place of a framework's name where unaccounted memory is followed."""


class Bounds(NamedTuple):
    """How far elastic caps can move on one GPU, in bytes.

    `room` is limit − reserve. `least` is what each framework has for good, `most` the max of those that are elastic.
    """

    room: int
    least: Mapping[str, int]
    most: Mapping[str, int]


def _bounds(part: DevicePlan) -> Bounds:
    least = {name: part.elastic.get(name, (cap, cap))[0] for name, cap in part.caps.items()}
    return Bounds(part.limit - part.reserve, least, {name: most for name, (_, most) in part.elastic.items()})


class Settings(NamedTuple):
    """Seconds and fractions. `hysteresis` is of the cap; `forecast` 0 makes none; `cpu` is a share of one core.

    `names`: what texts call a GPU, by UUID. An empty name is left out; a GPU without one is called by its UUID.
    """

    interval: float = 0.5
    warn: float = 0.85
    critical: float = 0.95
    hysteresis: float = 0.05
    forecast: float = 20.0
    cpu: float = 0.01
    on_pressure: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})
    bounds: Mapping[str, Bounds] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        monitor: MonitorConfig,
        on_pressure: Sequence[str],
        devices: Sequence[Device] = (),
        parts: Sequence[DevicePlan] = (),
    ) -> Settings:
        """The settings of a budget file, for these GPUs and what it plans for them."""
        return cls(
            interval=monitor.interval,
            warn=float(monitor.warn),
            critical=float(monitor.critical),
            forecast=monitor.forecast,
            on_pressure=tuple(on_pressure),
            names=_names(devices),
            bounds={part.device.uuid: _bounds(part) for part in parts if part.elastic},
        )

    def on(self, uuid: str | None) -> str:
        """` on cuda:0 (NVIDIA H200)`, for the end of a sentence."""
        name = self.names.get(uuid or "", uuid)
        return f" on {name}" if name else ""


def _names(devices: Sequence[Device]) -> dict[str, str]:
    """By CUDA's number, or NVML's if CUDA was not asked. A single GPU needs no name."""
    if len(devices) == 1:
        return {devices[0].uuid: ""}
    numbers = {d.uuid: f"GPU {d.index}" if d.ordinal is None else f"cuda:{d.ordinal}" for d in devices}
    return {device.uuid: f"{numbers[device.uuid]} ({device.name})" for device in devices}


class Action(NamedTuple):
    """Something to do. kind: log (info), warn (a warning), callback (each event once), and, if the budget says so, trim
    and raise (at the next checkpoint, never asynchronously)."""

    kind: str
    event: Event


class _Block(NamedTuple):
    """The lowest and highest level of half a second, in bytes, and when it was lowest."""

    number: int
    time: float
    low: int
    high: int


class _Track(NamedTuple):
    """What `decide` remembers of one framework on one GPU, or of one GPU."""

    level: Pressure = Pressure.OK
    blocks: tuple[_Block, ...] = ()
    peaks: tuple[tuple[int, int], ...] = ()  # before the blocks: a number of thirty seconds, and its highest level
    announced: int | None = None  # the highest level of the rise that a forecast was made for
    rose: float = 0.0  # when that was reached
    warned: tuple[tuple[Pressure, float], ...] = ()


_NEW = _Track()
_NONE: Mapping[str, FrameworkSample] = MappingProxyType({})


class _Level(NamedTuple):
    """How much of `top` is needed, in bytes. No framework can give back `base`, a part of both.

    `others`: who holds what is missing, if that is not this process.
    """

    used: int
    top: int
    base: int
    others: str = ""
    rises: bool = False  # `top` is what an elastic cap can rise to


@dataclass(frozen=True)
class PressureState:
    """What `decide` remembers. Opaque but for `level`."""

    _tracks: Mapping[tuple[str | None, str | None], _Track] = field(default_factory=dict)
    _block: int | None = field(default=None, compare=False)
    _devices: tuple[DeviceSample, ...] = field(default=(), compare=False)

    def level(self, uuid: str | None, framework: str | None = None) -> Pressure:
        """The pressure on one GPU: of a framework, or of the process."""
        track = self._tracks.get((uuid, framework))
        return track.level if track is not None else Pressure.OK


START = PressureState()


def decide(settings: Settings, sample: Sample, state: PressureState) -> tuple[PressureState, list[Action]]:
    """The state after a sample, and what to do. Every event has one log or warn, and one callback."""
    block = int(sample.time // BLOCK)
    if block == state._block and sample.devices == state._devices:
        return state, []  # nothing has moved, and the half second is not over
    tracks: dict[tuple[str | None, str | None], _Track] = {}
    actions: list[Action] = []
    before = {device.uuid: device.frameworks for device in state._devices} if block == state._block else {}
    for device in sample.devices:
        known = before.get(device.uuid, _NONE)
        bounds = settings.bounds.get(device.uuid)
        for framework, level in _levels(device, bounds):
            key = device.uuid, framework
            track = state._tracks.get(key, _NEW)
            if (
                framework is not None
                and track.blocks
                and track.announced is None
                and known.get(framework) == device.frameworks[framework]
                and not level.rises  # how far depends on the others
            ):
                tracks[key] = track  # it is as it was, and so is all that follows from it
                continue
            track = _seen(track, sample.time, level.used)
            if track.level is not Pressure.OK or level.used >= settings.warn * level.top:
                track = _pressure(settings, sample.time, key, level, track, actions)
            if settings.forecast > 0 and (level.used > FLOOR * level.top or track.announced is not None):
                track = _forecast(settings, sample.time, key, level, track, actions)
            tracks[key] = track
        if device.unaccounted is not None:
            key = device.uuid, UNACCOUNTED
            track = _seen(state._tracks.get(key, _NEW), sample.time, device.unaccounted)
            tracks[key] = _leak(settings, sample.time, device.uuid, device.unaccounted, track, actions)
    return PressureState(tracks, block, sample.devices), actions


def needed(name: str, usage: FrameworkSample) -> int | None:
    """The bytes of a framework that a trim would not return; None if it reports nothing.

    Held less reclaimable. In use, if that is unknown, or if idle memory never leaves the framework.
    """
    held, in_use, reclaimable, _ = usage
    if held is not None and reclaimable is not None and (in_use is None or name not in NEVER_GIVE_BACK):
        return max(held - reclaimable, 0)
    return in_use if in_use is not None else held


def _levels(device: DeviceSample, bounds: Bounds | None = None) -> Iterator[tuple[str | None, _Level]]:
    """Of each framework with a cap, and of the process (None) if it has a limit."""
    tops = _tops(device, bounds) if bounds is not None else _FIXED
    need = idle = reclaimable = held = 0
    silent = False
    for name, usage in device.frameworks.items():
        taken, _, free, cap = usage
        part = needed(name, usage)
        if part is None:
            silent = True
            continue
        need += part
        reclaimable += free or 0
        if taken is None:
            silent = True  # `process` contains what it holds beyond its need, and that is unknown
        else:
            idle += taken - part
            held += taken
        if cap:
            yield name, _Level(part, tops[name], 0, "", True) if name in tops else _Level(part, cap, 0)
    if not device.limit:
        return
    process = device.process if device.process is not None else held + device.overhead
    used = need + device.overhead if silent or device.process is None else max(process - idle, 0)
    left = device.free + reclaimable
    squeezed = process + device.free < device.limit and device.limit - left > used
    if squeezed:  # other processes or the driver hold a part of what the limit promises
        used = device.limit - left
    others = "other processes hold the rest of the card"
    if device.used is None:  # unified memory
        others = "the machine's memory, which this GPU uses, is taken"
    yield None, _Level(used, device.limit, min(device.overhead, device.limit), others if squeezed else "")


_FIXED: Mapping[str, int] = MappingProxyType({})


def _tops(device: DeviceSample, bounds: Bounds) -> dict[str, int]:
    """What each elastic cap can rise to, beside what the others have for good and what they need beyond that."""
    taken = {}
    for name, least in bounds.least.items():
        usage = device.frameworks.get(name)
        if usage is None:
            taken[name] = least
        elif name in bounds.most:
            taken[name] = max(least, needed(name, usage) or 0)
        else:
            taken[name] = usage.cap or least  # it may have been resized
    free = bounds.room - sum(taken.values())
    return {name: max(min(most, free + taken[name]), bounds.least[name]) for name, most in bounds.most.items()}


def _seen(track: _Track, time: float, used: int) -> _Track:
    """The blocks with one more sample."""
    level, blocks, peaks, announced, rose, warned = track  # without `_replace`, which takes four times as long
    number = int(time // BLOCK)
    if not blocks:
        return _Track(level, (_Block(number, time, used, used),), peaks, announced, rose, warned)
    last = blocks[-1]
    if number == last.number:
        if last.low <= used <= last.high:
            return track
        when, low = (time, used) if used < last.low else (last.time, last.low)
        blocks = (*blocks[:-1], _Block(number, when, low, max(used, last.high)))
    elif number > last.number:
        if len(blocks) == BLOCKS:
            peaks = _remembered(peaks, blocks[0], time)
            blocks = blocks[1:]
        blocks = (*blocks, _Block(number, time, used, used))
    else:  # the clock was set back: nothing before can be compared
        return _Track(level, (_Block(number, time, used, used),))
    return _Track(level, blocks, peaks, announced, rose, warned)


def _remembered(peaks: tuple[tuple[int, int], ...], block: _Block, now: float) -> tuple[tuple[int, int], ...]:
    """The peaks with a block that leaves; those too old are forgotten."""
    part = int(block.time // (MEMORY / 10))
    if peaks and peaks[-1][0] == part:
        if block.high <= peaks[-1][1]:
            return peaks
        return (*peaks[:-1], (part, block.high))
    oldest = (now - MEMORY) // (MEMORY / 10)
    return (*(peak for peak in peaks if peak[0] >= oldest), (part, block.high))


def _pressure(
    settings: Settings, now: float, key: tuple[str, str | None], level: _Level, track: _Track, actions: list[Action]
) -> _Track:
    ratio = level.used / level.top
    pressure = Pressure.OK
    if ratio >= _threshold(settings, settings.critical, track.level is Pressure.CRITICAL):
        pressure = Pressure.CRITICAL
    elif ratio >= _threshold(settings, settings.warn, track.level is not Pressure.OK):
        pressure = Pressure.WARN
    if pressure is track.level:
        return track
    rises = pressure.rank > track.level.rank
    event = Event(
        now, "pressure", _sentence(settings, key, level, pressure), pressure, key[0], key[1], None, level.used
    )
    warned = dict(track.warned)
    loud = rises and now - warned.get(pressure, now - AGAIN) >= AGAIN
    actions.append(Action("warn" if loud else "log", event))
    if loud:
        warned[pressure] = now
    grave = rises and pressure is Pressure.CRITICAL
    if grave and "trim" in settings.on_pressure:
        actions.append(Action("trim", event))
    actions.append(Action("callback", event))
    if grave and "raise" in settings.on_pressure:
        actions.append(Action("raise", event))
    return track._replace(level=pressure, warned=tuple(warned.items()))


def _threshold(settings: Settings, threshold: float, reached: bool) -> float:
    """The ratio at which a level begins or, once it was reached, ends."""
    return max(threshold - settings.hysteresis, threshold / 2) if reached else threshold


def _sentence(settings: Settings, key: tuple[str, str | None], level: _Level, pressure: Pressure) -> str:
    on, framework = settings.on(key[0]), key[1]
    sizes = f"{format_size(level.used)} of {format_size(level.top)} ({level.used / level.top:.0%})"
    if framework is not None:
        cap = "what its cap can rise to" if level.rises else "its cap"
        return f"pressure {pressure.value}: {framework} needs {sizes} of {cap}{on}"
    if level.others:
        left, limit = format_size(max(level.top - level.used, 0)), format_size(level.top)
        remaining = f"{left} is left of the limit of {limit}{on}"
        return f"pressure {pressure.value}: {remaining}: {level.others}"
    return f"pressure {pressure.value}: this process needs {sizes} of its limit{on}"


def _forecast(
    settings: Settings, now: float, key: tuple[str, str | None], level: _Level, track: _Track, actions: list[Action]
) -> _Track:
    if track.announced is not None:
        if level.used > track.announced:
            return track._replace(announced=level.used, rose=now)
        high = max(block.high for block in track.blocks[-EVIDENCE[1] :])
        over = high < track.announced - settings.hysteresis * level.top or now - track.rose >= AGAIN
        return track._replace(announced=None) if over else track
    rise = _rise(level, track)
    if rise is None or rise[1] >= settings.forecast:
        return track
    slope, seconds = rise
    what = f"{key[1]} grows by" if key[1] is not None else "this process grows by"
    if level.others:
        what = "what is available shrinks by"
    cap = "the most that its cap can rise to," if level.rises else "its cap of"
    end = f"{cap if key[1] is not None else 'the limit of'} {format_size(level.top)}"
    end += "," if level.rises else ""
    text = f"{what} {format_size(int(slope))}/s: {end} is reached in about {max(seconds, 0):.0f} s{settings.on(key[0])}"
    left = max(level.top - level.used, 0)
    event = Event(now, "forecast", text, track.level, key[0], key[1], max(seconds, 0.0), left)
    actions += [Action("warn", event), Action("callback", event)]
    return track._replace(announced=level.used, rose=now)


def _leak(settings: Settings, now: float, uuid: str, unaccounted: int, track: _Track, actions: list[Action]) -> _Track:
    """A leak of memory that is no framework's is said once, and again each time that it has doubled."""
    if track.announced is not None:
        if unaccounted < track.announced // 2:
            return track._replace(announced=None)
        if unaccounted < 2 * track.announced:
            return track
    speed = _speed(track)
    if speed is None:
        return track
    text = (
        f"unaccounted memory grows by {format_size(round(speed))}/s and is {format_size(unaccounted)}"
        f"{settings.on(uuid)}: no framework says that it holds it. Does a library or an extension allocate by itself?"
    )
    event = Event(now, "leak", text, uuid=uuid, bytes=unaccounted)
    actions += [Action("warn", event), Action("callback", event)]
    return track._replace(announced=max(unaccounted, LEAKED))


def _speed(track: _Track) -> float | None:
    """Bytes per second of a steady rise by `LEAKED` or more, within seconds or minutes. None if there is none."""
    climb = _climb(track)
    steps = [b.low - a.low for a, b in pairwise(track.blocks)]
    # Without the largest step, which may be something else; with so many, as a few libraries' first uses are no leak.
    if climb is not None and sum(steps) - max(steps) >= LEAKED and sum(step > 0 for step in steps) >= STEPS:
        return climb.slope
    peaks = [peak for _, peak in track.peaks]
    if not peaks or peaks[-1] - peaks[0] < LEAKED:
        return None
    each = leak(peaks)
    return each / (MEMORY / 10) if each is not None else None


def _rise(level: _Level, track: _Track) -> tuple[float, float] | None:
    """A steady rise: bytes per second, and seconds until it is at the top. None if there is none."""
    floor = level.top - (1 - FLOOR) * (level.top - level.base)
    climb = _climb(track) if track.blocks[-1].high > floor else None
    return (climb.slope, (level.top - climb.high) / climb.slope) if climb is not None else None


class _Climb(NamedTuple):
    """A steady rise to above all that was seen before: bytes per second, and the top so far."""

    slope: float
    high: int


def _climb(track: _Track) -> _Climb | None:
    blocks = track.blocks
    highest = max((peak for _, peak in track.peaks), default=0)
    if blocks[-1].high <= highest:
        return None
    first = _beginning(blocks)
    if first is None:
        return None
    high = max(block.high for block in blocks[first:])
    if high <= max((block.high for block in blocks[:first]), default=0):
        return None
    for part in (blocks[first:], blocks[first // 2 :], blocks, _threes(blocks)):
        slope = _slope(part)
        # Above everything seen before by two seconds of the rise: else it is a batch like those before.
        if slope > 0 and high > highest + 2 * slope:
            return _Climb(slope, high)
    return None


def _beginning(blocks: Sequence[_Block]) -> int | None:
    """Where the last blocks begin that are enough evidence; None if there are not so many."""
    last = range(len(blocks) - EVIDENCE[1], -1, -1)
    return next((n for n in last if blocks[-1].time - blocks[n].time >= EVIDENCE[0]), None)


def _threes(blocks: Sequence[_Block]) -> list[_Block]:
    """The lowest of each three: what a workload takes and gives back within a second and a half has no slope then."""
    return [min(blocks[end - 3 : end], key=lambda block: block.low) for end in range(len(blocks), 2, -3)][::-1]


def _slope(blocks: Sequence[_Block]) -> float:
    """Theil-Sen: the median of the slopes between all pairs; 0 if too few of them rise, or it was one step."""
    if len(blocks) < EVIDENCE[1]:
        return 0.0
    if 2 * max(b.low - a.low for a, b in pairwise(blocks)) > blocks[-1].low - blocks[0].low:
        return 0.0
    from statistics import median  # loads a dozen modules, which a budget without a rise does not need

    slopes = [(b.low - a.low) / (b.time - a.time) for a, b in combinations(blocks, 2)]
    rising = sum(slope > 0 for slope in slopes)
    return median(slopes) if rising >= RISING[len(blocks) >= 10] * len(slopes) - 1e-9 else 0.0
