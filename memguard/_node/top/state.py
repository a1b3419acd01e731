"""What a timeline's records mean for the screen: the newest figures, levels, forecasts and events. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from memguard._base.types import Device, DeviceSample, Event, Plan, Pressure, Sample
from memguard._node.top.snapshot import EVENTS, Forecast, Gpu, Part, Said, Share
from memguard._timeline import Oom

FORECAST = 60.0
"""Seconds for which a forecast is shown: the monitor says it again after that time, if it is still true."""
_PASSED = 10.0
"""Seconds for which one is shown whose time has come."""
_QUIET = ("peak", "refused", "workload")
"""Kinds of events that only count: each would push the others off the screen."""


@dataclass
class Story:
    """One run, record by record. `whole`: no event is missing, so that what was never told is `ok`."""

    plan: Plan
    whole: bool = True
    sample: Sample | None = None
    time: float | None = None
    suspended: Mapping[str, int | None] | None = None
    events: deque[Said] = field(default_factory=lambda: deque(maxlen=EVENTS))
    levels: dict[tuple[str | None, str | None], Pressure] = field(default_factory=dict)
    forecasts: dict[tuple[str | None, str | None], tuple[float, float]] = field(default_factory=dict)
    """By GPU and framework: when it was said, and when the cap is reached."""

    def add(self, record: Sample | Event | Oom) -> None:
        self.time = record.time if self.time is None else max(self.time, record.time)
        if isinstance(record, Sample):
            if record.devices:
                self.sample, self.suspended = record, None
            return
        if isinstance(record, Oom):
            who, text = record.report.get("requester"), record.report.get("why") or record.report.get("error")
            self.events.append(Said(record.time, "oom", f"out of memory: {who or 'unknown'}: {text or 'unknown'}"))
            return
        self._event(record)

    def _event(self, event: Event) -> None:
        key = event.uuid, event.framework
        if event.kind == "pressure" and event.level is not None:
            self.levels[key] = event.level
            if event.level is Pressure.OK:
                self.forecasts.pop(key, None)
        elif event.kind == "forecast" and event.seconds is not None:
            self.forecasts[key] = event.time, event.time + event.seconds
        elif event.kind == "suspended":
            self.suspended = {part.device.uuid: None for part in self.plan.devices}
            if event.bytes is not None and len(self.plan.devices) == 1:
                self.suspended = {self.plan.devices[0].device.uuid: event.bytes}
            self.forecasts.clear()
        elif event.kind == "resumed":
            self.suspended = None
        if event.kind not in _QUIET:
            level = None if event.level is None else event.level.value
            self.events.append(Said(event.time, event.kind, event.text, level))

    # what is shown

    def shares(self, now: float) -> tuple[Share, ...]:
        if self.sample is None:
            return ()
        return tuple(self._share(part, now) for part in self.sample.devices)

    def _share(self, part: DeviceSample, now: float) -> Share:
        off = None if self.suspended is None else self.suspended.get(part.uuid)
        frameworks = tuple(
            Part(name, one.held, one.in_use, one.reclaimable, one.cap, level=self.level(part.uuid, name))
            for name, one in part.frameworks.items()
        )
        return Share(
            part.uuid, part.process, part.limit, part.overhead, part.unaccounted, frameworks,
            self.level(part.uuid, None), self.forecast_on(part.uuid, now), off,
        )  # fmt: skip

    def forecast_on(self, uuid: str, now: float) -> tuple[Forecast, ...]:
        """Those that still count, the next one first."""
        found = sorted(self.forecasts.copy().items(), key=lambda item: item[1][1])
        return tuple(
            Forecast(framework, at)
            for (on, framework), (said, at) in found
            if on in (uuid, None) and now - said < FORECAST and now - at < _PASSED
        )

    def level(self, uuid: str, framework: str | None) -> str | None:
        """The pressure that was told last."""
        level = self.levels.get((uuid, framework))
        if level is None:
            return Pressure.OK.value if self.whole else None
        return level.value

    def gpus(self) -> tuple[Gpu, ...]:
        """As the newest sample has them; those of the plan before there is one."""
        devices = {part.device.uuid: part.device for part in self.plan.devices}
        if self.sample is None:
            return tuple(_gpu(device, device.total, None) for device in devices.values())
        return tuple(_gpu(devices.get(part.uuid), part.total, part) for part in self.sample.devices)


def _gpu(device: Device | None, total: int, part: DeviceSample | None) -> Gpu:
    used, free = (None, None) if part is None else (part.used, part.free)
    others = None
    if part is not None and part.used is not None and part.process is not None:
        others = part.used - part.process
    if device is None:
        return Gpu("" if part is None else part.uuid, None, "unknown GPU", total, used, free, others)
    return Gpu(
        device.uuid, device.index, device.name, total, used, free, others, device.reserved, device.unified,
        device.simulated,
    )  # fmt: skip
