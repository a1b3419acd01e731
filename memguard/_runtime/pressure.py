"""Computes memory pressure, forecasts and leaks from the monitor's samples.

The pressure level of a framework compares the memory that it needs with its allocator cap; the level of the process
compares its memory with the budget's limit. A forecast predicts when the cap or limit is reached. `decide` is a pure
function of the settings, a sample and the previous state; times come from the samples. A level rises when a threshold
is reached, and falls below the threshold less the hysteresis.

A forecast needs a steady rise over at least 3 s and 6 windows of half a second, above all levels of the previous five
minutes, to more than three quarters of the cap. Below three quarters the rise may be the loading of a model, or the
first batch. So a leak is forecast, at the earliest, when three quarters of the cap are in use. If the memory
in use varies over several seconds by much more than a leak adds, the forecast comes late. The module `leaks` detects
slow leaks from repetitions of a workload.

Unaccounted memory (this process's memory outside frameworks and known overhead) has no cap and cannot be trimmed. So
its steady rise is reported as a leak at any level: after 3 s if it is fast, after some minutes if it is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from memguard._base.types import Device, DevicePlan, DeviceSample, Event, FrameworkSample, Pressure, Sample
from memguard._base.units import MIB, format_size
from memguard._frameworks.specs import NEVER_GIVE_BACK
from memguard._runtime.leaks import leak

if TYPE_CHECKING:
    from memguard._budget import MonitorConfig

BLOCK = 0.5
"""Length of a window (`_Block`) in seconds. The slope is computed from the lowest level of each window, so that memory
which is allocated and freed within one window does not affect it."""
BLOCKS = 20
"""The most windows stored: ten seconds, or more if the sampling interval is longer than a window."""
EVIDENCE = 3.0, 6
"""The least duration of a steady rise, in seconds and in windows."""
RISING = 6 / 7, 3 / 4
"""The least fraction of the pairs of windows that must rise in a steady rise. The first value applies to fewer than ten
windows, the second to ten or more. The threshold excludes chance and a single step, and tolerates noise."""
FLOOR = 0.755
"""The least fraction of a cap that must be in use for a forecast."""
MEMORY = 300.0
"""Seconds for which peak levels are stored, as one peak for each tenth of `MEMORY`."""
AGAIN = 60.0
"""Seconds before the same warning may be repeated, and seconds without a new peak after which a rise has ended."""
LEAKED = 32 * MIB
"""The least rise of unaccounted memory for a leak, in bytes."""
STEPS = 4
"""A fast leak rises from one window to the next at least this many times."""
UNACCOUNTED = "unaccounted"
"""The key of unaccounted memory, used like the name of a framework."""


class Bounds(NamedTuple):
    """The bounds of elastic caps (caps that memguard moves between a min and a max) on one GPU, in bytes.

    `room` is limit − reserve, the memory for all frameworks. `least` is the min of each elastic framework
    and the cap of each other framework. `most` is the max of each elastic framework.
    """

    room: int
    least: Mapping[str, int]
    most: Mapping[str, int]


def _bounds(part: DevicePlan) -> Bounds:
    least = {name: part.elastic.get(name, (cap, cap))[0] for name, cap in part.caps.items()}
    return Bounds(part.limit - part.reserve, least, {name: most for name, (_, most) in part.elastic.items()})


class Settings(NamedTuple):
    """The monitor's settings. `interval` and `forecast` are seconds, the other numbers fractions.

    `warn`, `critical` and `hysteresis` are fractions of the cap or limit, `cpu` of one core. `forecast` is the longest
    time to the cap for which a forecast is made; 0 turns forecasts off. `names` has the GPUs' names in messages, by
    UUID. Messages omit an empty name, and use the UUID of a GPU without a name. `bounds` has the GPUs with elastic
    caps, by UUID.
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
        """Build the settings from a budget's `monitor` and `on_pressure`, its GPUs and their plans."""
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
        """The end of a message that names the GPU, such as ` on cuda:0 (NVIDIA H200)`; empty for a single GPU."""
        name = self.names.get(uuid or "", uuid)
        return f" on {name}" if name else ""


def _names(devices: Sequence[Device]) -> dict[str, str]:
    """The GPUs' names in messages, with CUDA's ordinal, or NVML's index if the ordinal is unknown. A single GPU has
    an empty name."""
    if len(devices) == 1:
        return {devices[0].uuid: ""}
    numbers = {d.uuid: f"GPU {d.index}" if d.ordinal is None else f"cuda:{d.ordinal}" for d in devices}
    return {device.uuid: f"{numbers[device.uuid]} ({device.name})" for device in devices}


class Action(NamedTuple):
    """An action that the session carries out. `kind` is log (at level info), warn (log at level warning), or callback
    (call the `on_event` callbacks). Kinds trim and raise occur if the budget's `on_pressure` lists them; the session
    carries them out at the next `memguard.checkpoint`.
    """

    kind: str
    event: Event


class _Block(NamedTuple):
    """A window of `BLOCK` seconds: its lowest and highest level in bytes, and the time of the lowest level."""

    number: int
    time: float
    low: int
    high: int


class _Track(NamedTuple):
    """The state between samples of one framework, the process or the unaccounted memory on one GPU."""

    level: Pressure = Pressure.OK
    blocks: tuple[_Block, ...] = ()
    peaks: tuple[tuple[int, int], ...] = ()  # older than `blocks`: (number of the half minute, peak level)
    announced: int | None = None  # the highest level of a reported rise; None without a reported rise
    rose: float = 0.0  # the time of the level `announced`
    warned: tuple[tuple[Pressure, float], ...] = ()


_NEW = _Track()
_NONE: Mapping[str, FrameworkSample] = MappingProxyType({})


class _Level(NamedTuple):
    """The bytes `used` that no trim can return, and the cap or limit `top`. `used` and `top` include `base`, this
    process's overhead. `others`: the clause of a message that names other holders of memory within the limit, or empty.
    """

    used: int
    top: int
    base: int
    others: str = ""
    rises: bool = False  # `top` is the highest value to which an elastic cap can be raised now


@dataclass(frozen=True)
class PressureState:
    """The state of `decide` between samples. Other modules read only `level`."""

    _tracks: Mapping[tuple[str | None, str | None], _Track] = field(default_factory=dict)
    _block: int | None = field(default=None, compare=False)
    _devices: tuple[DeviceSample, ...] = field(default=(), compare=False)

    def level(self, uuid: str | None, framework: str | None = None) -> Pressure:
        """The pressure level of a framework on one GPU, or of the process if `framework` is None."""
        track = self._tracks.get((uuid, framework))
        return track.level if track is not None else Pressure.OK


START = PressureState()


def decide(settings: Settings, sample: Sample, state: PressureState) -> tuple[PressureState, list[Action]]:
    """Process a sample. Returns the new state and the actions. Each event has one log or warn action, and one callback
    action."""
    block = int(sample.time // BLOCK)
    if block == state._block and sample.devices == state._devices:
        return state, []  # no figure has changed within this window
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
                and not level.rises  # `top` depends on the other frameworks too
            ):
                tracks[key] = track  # the same figures in the same window do not change the state
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
    """The bytes of a framework that a trim would not return to the driver; None if the framework reports no figures.

    The result is the held bytes less the reclaimable bytes. If either is unknown, or if the framework never returns
    idle memory, the result is the bytes in use.
    """
    held, in_use, reclaimable, _ = usage
    if held is not None and reclaimable is not None and (in_use is None or name not in NEVER_GIVE_BACK):
        return max(held - reclaimable, 0)
    return in_use if in_use is not None else held


def _levels(device: DeviceSample, bounds: Bounds | None = None) -> list[tuple[str | None, _Level]]:
    """The `_Level` of each framework with a cap, and of the process (key None) if it has a limit."""
    needs = {name: needed(name, usage) for name, usage in device.frameworks.items()}
    tops = _tops(device, bounds, needs) if bounds is not None else _FIXED
    levels: list[tuple[str | None, _Level]] = []
    need = idle = reclaimable = held = 0
    silent = False
    for name, usage in device.frameworks.items():
        taken, _, free, cap = usage
        part = needs[name]
        if part is None:
            silent = True
            continue
        need += part
        reclaimable += free or 0
        if taken is None:
            silent = True  # `process` includes idle memory of the framework, of unknown size
        else:
            idle += taken - part
            held += taken
        if cap:
            levels.append((name, _Level(part, tops[name], 0, "", True) if name in tops else _Level(part, cap, 0)))
    if not device.limit:
        return levels
    process = device.process if device.process is not None else held + device.overhead
    used = need + device.overhead if silent or device.process is None else max(process - idle, 0)
    left = device.free + reclaimable
    squeezed = process + device.free < device.limit and device.limit - left > used
    if squeezed:  # other processes or the driver hold memory within the limit
        used = device.limit - left
    others = "other processes hold the rest of the card"
    if device.used is None:  # on unified memory
        others = "the machine's memory, which this GPU uses, is taken"
    process_level = _Level(used, device.limit, min(device.overhead, device.limit), others if squeezed else "")
    return [*levels, (None, process_level)]


_FIXED: Mapping[str, int] = MappingProxyType({})


def _tops(device: DeviceSample, bounds: Bounds, needs: Mapping[str, int | None]) -> dict[str, int]:
    """The highest value to which each elastic cap can be raised now: the other frameworks keep their minima and the
    memory that they need above their minima."""
    taken = {}
    for name, least in bounds.least.items():
        usage = device.frameworks.get(name)
        if usage is None:
            taken[name] = least
        elif name in bounds.most:
            taken[name] = max(least, needs[name] or 0)
        else:
            taken[name] = usage.cap or least  # not the plan's cap, which `memguard.resize` may have changed
    free = bounds.room - sum(taken.values())
    return {name: max(min(most, free + taken[name]), bounds.least[name]) for name, most in bounds.most.items()}


def _seen(track: _Track, time: float, used: int) -> _Track:
    """Add a level of `used` bytes to the windows."""
    level, blocks, peaks, announced, rose, warned = track  # unpacked, because `_replace` takes four times as long
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
    else:  # the clock was set back: discard the windows
        return _Track(level, (_Block(number, time, used, used),))
    return _Track(level, blocks, peaks, announced, rose, warned)


def _remembered(peaks: tuple[tuple[int, int], ...], block: _Block, now: float) -> tuple[tuple[int, int], ...]:
    """Add the highest level of `block`, which is removed from the windows, and drop peaks older than `MEMORY`."""
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
    """The ratio at which a pressure level begins, or, if the level is `reached`, below which it ends."""
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
    """Report a leak of unaccounted memory once, and again each time the unaccounted memory has doubled."""
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
    """The bytes per second of a steady rise by at least `LEAKED` in the windows or in the stored peaks; else None."""
    if (climb := _climb(track)) is not None:
        steps = [b.low - a.low for a, b in pairwise(track.blocks)]
        # Ignore the largest step, which may have another cause. Require `STEPS` steps, because the first uses of a few
        # libraries are no leak.
        if sum(steps) - max(steps) >= LEAKED and sum(step > 0 for step in steps) >= STEPS:
            return climb.slope
    peaks = [peak for _, peak in track.peaks]
    if not peaks or peaks[-1] - peaks[0] < LEAKED:
        return None
    each = leak(peaks)
    return each / (MEMORY / 10) if each is not None else None


def _rise(level: _Level, track: _Track) -> tuple[float, float] | None:
    """The bytes per second of a steady rise, and the seconds until the level reaches `top`; None without a rise."""
    floor = level.top - (1 - FLOOR) * (level.top - level.base)
    climb = _climb(track) if track.blocks[-1].high > floor else None
    return (climb.slope, (level.top - climb.high) / climb.slope) if climb is not None else None


class _Climb(NamedTuple):
    """A steady rise above all earlier levels: its bytes per second, and the highest level."""

    slope: float
    high: int


def _climb(track: _Track) -> _Climb | None:
    blocks = track.blocks
    if len(blocks) < EVIDENCE[1]:
        return None
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
        # Require a rise above earlier peaks by the slope times 2 s. Variation between batches can cause a smaller rise.
        if slope > 0 and high > highest + 2 * slope:
            return _Climb(slope, high)
    return None


def _beginning(blocks: Sequence[_Block]) -> int | None:
    """The index of the first window of the shortest sequence up to the last window that is long enough for `EVIDENCE`;
    None if there is no such sequence."""
    last = range(len(blocks) - EVIDENCE[1], -1, -1)
    return next((n for n in last if blocks[-1].time - blocks[n].time >= EVIDENCE[0]), None)


def _threes(blocks: Sequence[_Block]) -> list[_Block]:
    """Of every three half-second windows keep the window with the lowest level, so that memory which is allocated and
    freed within 1.5 s does not affect the slope."""
    return [min(blocks[end - 3 : end], key=lambda block: block.low) for end in range(len(blocks), 2, -3)][::-1]


def _slope(blocks: Sequence[_Block]) -> float:
    """The Theil-Sen slope: the median slope over all pairs of windows. 0 if too few pairs rise, or if a single
    step is more than half of the rise."""
    if len(blocks) < EVIDENCE[1]:
        return 0.0
    if 2 * max(b.low - a.low for a, b in pairwise(blocks)) > blocks[-1].low - blocks[0].low:
        return 0.0
    from statistics import median  # imports a dozen modules, which a budget without a rise does not need

    slopes = [(b.low - a.low) / (b.time - a.time) for a, b in combinations(blocks, 2)]
    rising = sum(slope > 0 for slope in slopes)
    return median(slopes) if rising >= RISING[len(blocks) >= 10] * len(slopes) - 1e-9 else 0.0
