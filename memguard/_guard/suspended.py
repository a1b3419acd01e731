"""The guard of a suspended process: returns the last reading, and raises Suspended for every call to a GPU.

A `Host` (NVML and driver access) whose methods raise Suspended replaces the guard's host, so that even code that does
not check for a suspension cannot call a GPU.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from memguard._base.types import MemoryInfo
from memguard._devices import suspension
from memguard._devices.host import Host
from memguard._devices.phase import Phase
from memguard._devices.suspension import Off
from memguard._ledger.types import DeviceLedger, Ledger, Row
from memguard.errors import NotActive

SUSPENDED = "suspended"
"""The enforcement that a suspended process's ledger shows for every cap, as the process cannot allocate GPU memory."""
Figures = Callable[[str], "MemoryInfo | None"]
"""Reads a GPU's memory (by UUID) through another process, because NVML would block in the suspended process. None if
unknown."""


class SuspendedGpus:
    """Answers calls to a guard while its process is suspended. `reading`: the last ledger before the suspension. `off`:
    the time of the suspension and the bytes that it moved off each GPU.

    `figures` reads the current memory of the GPUs through another process. `host` is the `Host` that the guard used
    before the suspension.
    """

    def __init__(self, reading: Ledger, figures: Figures, off: Off, host: Host) -> None:
        self.host = host
        self._reading, self._figures, self._off = reading, figures, off
        self._pid = os.getpid()

    def ledger(self) -> Ledger:
        """The last reading with one more row, which subtracts this process's bytes because they are no longer on the
        GPU."""
        self._check_pid()
        return ledger_of(self._reading, suspension.now or self._off, time.time(), self._figures)

    def notes(self) -> list[str]:
        """One note, with the time of the suspension and the call that ends the suspension, or with a remedy if the GPU
        memory is lost. Empty if the process is not suspended."""
        return _note(suspension.now)

    def refuse(self, what: str) -> NoReturn:
        """Raise Suspended; in a forked child NotActive. `what` names the call."""
        self._check_pid()
        raise suspension.refused(what)

    def _check_pid(self) -> None:
        if self._pid != os.getpid():
            raise NotActive("no budget is active here: this is a forked child", fix="call memguard.init('budget.yaml')")


class _RefusingHost:
    """A host whose methods raise Suspended. Other attributes, such as the PID, come from the wrapped host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._host, name)
        return functools.partial(_refuse, name) if callable(found) else found


def refusing(host: Host) -> Host:
    """Wrap `host` so that each method raises Suspended."""
    return cast("Host", _RefusingHost(host))


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise suspension.refused(f"a look at the GPUs ({name})")


def ledger_of(reading: Ledger, off: Off, when: float, figures: Figures) -> Ledger:
    """The ledger of a suspended process, made from its last reading."""
    devices = tuple(_device(gpu, off, figures(gpu.device.uuid)) for gpu in reading.devices)
    return Ledger(when, devices, reading.simulated, (*reading.notes, *_note(off)))


def _note(off: Off | None) -> list[str]:
    if off is None:
        return []
    since = time.strftime("%H:%M:%S", time.localtime(off.since))
    if off.phase is Phase.LOST:
        return [f"{off}, which it left at {since}; {suspension.LOST_FIX}"]
    return [f"{off} since {since}; memguard.resume() brings it back"]


def _device(gpu: DeviceLedger, off: Off, memory: MemoryInfo | None) -> DeviceLedger:
    own = sum(row.bytes or 0 for row in gpu.own_rows)
    size = off.bytes.get(gpu.device.uuid, own)
    rows = [_with_suspended_caps(row) if row.kind == "framework" else row for row in gpu.own_rows]
    name = "destroyed" if off.phase is Phase.LOST else "in host memory"
    rows.append(Row("suspended", name, -own, note=str(Off({gpu.device.uuid: size}, off.since, off.phase))))
    reserved = next((row.bytes for row in gpu.rows if row.kind == "driver reserve"), None)
    if memory is None or memory.used is None:
        unknown = "unknown: this process cannot ask NVML while it is suspended"
        rows.append(Row("other processes", "other processes", None, note=unknown))
        rows.append(Row("driver reserve", "driver reserve", reserved))
        rows.append(Row("free", "free", None))
    else:
        rows.append(Row("other processes", "other processes", memory.used))
        # None with NVML's v1 memory query, whose `used` includes the reserve.
        rows.append(Row("driver reserve", "driver reserve", gpu.device.total - memory.used - memory.free or None))
        rows.append(Row("free", "free", memory.free))
    return DeviceLedger(gpu.device, tuple(rows), 0, gpu.limit, False, size)


def _with_suspended_caps(row: Row) -> Row:
    fields: Mapping[str, Any] = {**vars(row), "enforcement": SUSPENDED}
    return Row(**fields)
