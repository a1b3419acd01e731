"""The guard of a process that is off its GPUs: it answers from the last reading, or refuses.

The active guard becomes one of these (`__class__`), and is itself again afterwards. So nothing is asked while the
process is on its GPUs, and no reading or request is slower for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from memguard._base.blocks import End
from memguard._base.types import (
    Device,
    MemoryInfo,
    NoHelp,
    RefusedRequest,
    Room,
    Sample,
    Shortage,
    WhyNoHelp,
    WorkloadReport,
)
from memguard._devices import suspension
from memguard._devices.suspension import Off
from memguard._guard.guard import Guard
from memguard._ledger.types import DeviceLedger, Ledger, Row
from memguard.errors import NotActive

SUSPENDED = "suspended"
"""What the ledger says of how a cap holds: nothing can be allocated."""
Figures = Callable[[str], "MemoryInfo | None"]
"""NVML's figures of a GPU (UUID), from another process, as this one would wait for NVML; None if unknown."""


class SuspendedGuard(Guard):
    """A guard of a budget while the process is off its GPUs. It is never made, only become."""

    reading: Ledger
    """The last one before the process left."""
    figures: Figures

    def ledger(self) -> Ledger:
        """The last reading, with every framework's row as it was, and none of it on the GPU."""
        self._here()
        off = suspension.now
        if off is None:  # it has just come back
            return Guard.ledger(self)
        return ledger_of(self.reading, off, time.time(), self.figures)

    def sample(self) -> Sample:
        self._refuse("a sample of the GPUs")

    def peaks(self) -> dict[str, dict[str, int]]:
        return {}

    def require(self, framework: str, size: int | str, device: Device | None = None) -> None:
        self._refuse("memguard.require")

    def make_room(self, framework: str, needed: int, device: Device | None = None) -> Room:
        self._refuse("making room")

    def reclaimable(self) -> NoReturn:
        self._refuse("memguard.reclaimable")

    def resize(self, framework: str, size: int | str) -> None:
        self._refuse("memguard.resize")

    def trim(self, framework: str | None = None) -> int:
        self._refuse("memguard.trim")

    def set_cap(self, name: str, uuid: str, cap: int) -> None:
        self._refuse("a change of a cap")

    def busy(self) -> NoReturn:
        self._refuse("a look at the GPUs' other processes")

    def stop(self) -> list[str]:
        self._refuse("the end of the budget")

    def settle(self, sample: Sample) -> Sample:
        return sample

    def _begin_workload(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        self._refuse(f"workload {name!r}")

    async def _begin_workload_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        self._refuse(f"workload {name!r}")

    def _serve(self, shortage: Shortage, device: Device) -> WhyNoHelp | None:
        return WhyNoHelp(NoHelp.NOT_ASKED, "the process is off its GPUs")

    def _refused(self, request: RefusedRequest) -> str | None:
        return None

    def _capturing(self) -> bool:
        return False  # a process that captures is not taken off its GPUs

    def _frozen(self) -> WhyNoHelp | None:
        return None  # nor one whose communicators live

    def _find_drift(self, only: str | None = None) -> None:
        pass

    def _imported(self, name: str) -> None:
        """A framework was imported meanwhile: its cap is set when the process is back."""
        suspension.put_off(lambda: self._imported(name))

    def _check_active(self) -> None:
        self._here()
        self._refuse("the budget")

    def _all_notes(self) -> list[str]:
        return [*Guard._all_notes(self), *_note(suspension.now)]

    def _here(self) -> None:
        """Raise NotActive in a forked child."""
        if self._pid != os.getpid():
            raise NotActive("no budget is active here: this is a forked child", fix="call memguard.init('budget.yaml')")

    def _refuse(self, what: str) -> NoReturn:
        self._here()
        raise suspension.refused(what)


def become(guard: Guard, reading: Ledger, figures: Figures) -> None:
    """From now on it answers from `reading`."""
    vars(guard).update(reading=reading, figures=figures)
    guard.__class__ = SuspendedGuard


def again(guard: Guard) -> None:
    """It is itself again. Nothing happens if it was before."""
    if type(guard) is SuspendedGuard:
        guard.__class__ = Guard  # type: ignore[assignment]
    vars(guard).pop("reading", None)
    vars(guard).pop("figures", None)


def ledger_of(reading: Ledger, off: Off, when: float, figures: Figures) -> Ledger:
    """What the ledger says of a suspended process whose last reading was this."""
    devices = tuple(_device(part, off, figures(part.device.uuid)) for part in reading.devices)
    return Ledger(when, devices, reading.simulated, (*reading.notes, *_note(off)))


def _note(off: Off | None) -> list[str]:
    if off is None:
        return []
    return [f"{off} since {time.strftime('%H:%M:%S', time.localtime(off.since))}; memguard.resume() brings it back"]


def _device(part: DeviceLedger, off: Off, memory: MemoryInfo | None) -> DeviceLedger:
    own = sum(row.bytes or 0 for row in part.own_rows)
    size = off.bytes.get(part.device.uuid, own)
    rows = [_as_it_was(row) if row.kind == "framework" else row for row in part.own_rows]
    rows.append(Row("suspended", "in host memory", -own, note=str(Off({part.device.uuid: size}, off.since))))
    reserved = next((row.bytes for row in part.rows if row.kind == "driver reserve"), None)
    if memory is None or memory.used is None:
        unknown = "unknown: this process cannot ask NVML while it is suspended"
        rows.append(Row("other processes", "other processes", None, note=unknown))
        rows.append(Row("driver reserve", "driver reserve", reserved))
        rows.append(Row("free", "free", None))
    else:
        rows.append(Row("other processes", "other processes", memory.used))
        # Counted under other processes on drivers that do not tell (NVML v1).
        rows.append(Row("driver reserve", "driver reserve", part.device.total - memory.used - memory.free or None))
        rows.append(Row("free", "free", memory.free))
    return DeviceLedger(part.device, tuple(rows), 0, part.limit, False, size)


def _as_it_was(row: Row) -> Row:
    given: Mapping[str, Any] = {**vars(row), "enforcement": SUSPENDED}
    return Row(**given)
