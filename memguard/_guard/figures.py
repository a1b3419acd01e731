"""The reclaimable bytes of each framework, for `memguard.reclaimable()`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from memguard._base.text import shown, visible
from memguard._base.types import POOL, FrameworkSample, Plan, Sample
from memguard._base.units import format_size
from memguard._frameworks.specs import SPECS

How = Literal["memguard.trim", "own thread", "own call", "never"]
_HEAD = ("framework", "held", "cached", "reclaimable", "how")


@dataclass(frozen=True)
class FrameworkReclaimable:
    """The memory that one framework could return to the driver on one GPU, in bytes; None if unknown.

    `reclaimable`: the bytes of `cached` that a trim would return. `how` names the call that returns these bytes:
    "memguard.trim" on any thread; "own thread": `memguard.trim` on the thread whose CUDA context the framework uses;
    "own call": only the framework's own trim function, because the budget does not name the framework; "never": the
    framework's pool returns memory only when the process ends.
    """

    framework: str
    held: int | None
    cached: int | None
    reclaimable: int | None
    how: How


@dataclass(frozen=True)
class DeviceReclaimable:
    """The reclaimable memory of each framework on one GPU."""

    uuid: str
    name: str
    frameworks: tuple[FrameworkReclaimable, ...]

    @property
    def reclaimable(self) -> int:
        """The sum of the known reclaimable bytes."""
        return sum(one.reclaimable or 0 for one in self.frameworks)


@dataclass(frozen=True)
class Reclaimable:
    """The reclaimable memory of each GPU at `time`. `print` shows a table; `as_dict()` returns plain data."""

    time: float
    devices: tuple[DeviceReclaimable, ...]
    simulated: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Sizes are in bytes, None if unknown."""
        return {
            "memguard_reclaimable": 1,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(),
            "simulated": self.simulated,
            "devices": [
                {"uuid": gpu.uuid, "name": gpu.name, "frameworks": [dict(vars(one)) for one in gpu.frameworks]}
                for gpu in self.devices
            ],
        }

    def __repr__(self) -> str:
        """One line for an interactive prompt. `print` shows the table."""
        mark = " (simulated)" if self.simulated else ""
        texts = "; ".join(f"{gpu.name}{mark}: {_total(gpu)} could come back" for gpu in self.devices)
        return shown(f"<Reclaimable {texts or 'of no GPU'}>")

    def __str__(self) -> str:
        texts = []
        for gpu in self.devices:
            mark = " (simulated)" if self.simulated else ""
            rows = [_HEAD, *(_row(one) for one in gpu.frameworks)]
            widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
            lines = [f"{visible(gpu.name)}{mark}  {gpu.uuid}: {_total(gpu)} could come back"]
            for row in rows if gpu.frameworks else ():
                cells = [row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in (1, 2, 3)), row[4]]
                lines.append("  " + "  ".join(cells).rstrip())
            texts.append("\n".join(lines if gpu.frameworks else [*lines, "  no framework is at work on it"]))
        return shown("\n".join(texts) or "no budget is applied: nothing is known of any GPU")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the table in IPython's terminal."""
        printer.text(str(self))


def _total(gpu: DeviceReclaimable) -> str:
    unknown = any(one.reclaimable is None for one in gpu.frameworks)
    return ("at least " if unknown else "") + format_size(gpu.reclaimable)


def of_sample(sample: Sample, plan: Plan, simulated: bool) -> Reclaimable:
    """Build a `Reclaimable` from a sample of the monitor or of a timeline. `plan` supplies the names of the GPUs."""
    names = {gpu.device.uuid: gpu.device.name for gpu in plan.devices}
    devices = [
        DeviceReclaimable(one.uuid, names.get(one.uuid, one.uuid), _of_frameworks(one.frameworks))
        for one in sample.devices
    ]
    return Reclaimable(sample.time, tuple(devices), simulated)


def _of_frameworks(found: Mapping[str, FrameworkSample]) -> tuple[FrameworkReclaimable, ...]:
    """Convert samples to `FrameworkReclaimable`, sorted by reclaimable bytes, largest first. Omits samples that are
    neither of a framework nor of a pool, such as the sample of `memguard.exchange`."""
    asked = {*SPECS, POOL}
    lines = [_of(name, usage) for name, usage in found.items() if name in asked or usage.cap is not None]
    return tuple(sorted(lines, key=lambda one: (one.reclaimable is None, -(one.reclaimable or 0), one.framework)))


def _of(name: str, usage: FrameworkSample) -> FrameworkReclaimable:
    row = SPECS.get(name)
    never = row is not None and row.never_gives_back
    known = usage.held is not None and usage.in_use is not None
    cached = max((usage.held or 0) - (usage.in_use or 0), 0) if known else None
    how: How = "memguard.trim"
    if never:
        how = "never"
    elif usage.cap is None and name != POOL:
        how = "own call"
    elif row is not None and row.trims_on_own_thread:
        how = "own thread"
    return FrameworkReclaimable(name, usage.held, cached, 0 if never else usage.reclaimable, how)


def _row(one: FrameworkReclaimable) -> tuple[str, ...]:
    """The cells of one line of the table."""
    own = SPECS[one.framework].own_trim if one.framework in SPECS else None
    hows = {
        "memguard.trim": "memguard.trim()" if one.framework == POOL else f"memguard.trim({one.framework!r})",
        "own thread": f"memguard.trim({one.framework!r}) on its own thread",
        "own call": own or "its own call: the budget does not name it",
        "never": "never: its pool returns nothing",
    }
    sizes = (format_size(size) for size in (one.held, one.cached, one.reclaimable))
    return (visible(one.framework), *sizes, hows[one.how] if one.cached or one.reclaimable else "")
