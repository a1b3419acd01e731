"""The guard of a suspended process: returns the last reading, and raises Suspended for every call to a GPU.

A host that raises Suspended replaces the real one, so that even a call that forgets to check cannot reach a GPU.
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
"""The enforcement of every cap in the ledger: nothing can be allocated."""
Figures = Callable[[str], "MemoryInfo | None"]
"""Reads a GPU's memory (by UUID) from NVML in another process, because NVML would block in this one. None if
unknown."""


class SuspendedGpus:
    """Replaces a guard's GPUs during a suspension. `reading`: the last ledger before the suspension. `off`: the time of
    the suspension and the bytes that it moved.

    `figures` reads the current memory of the GPUs from another process. `host` is the guard's host outside a
    suspension.
    """

    def __init__(self, reading: Ledger, figures: Figures, off: Off, host: Host) -> None:
        self.host = host
        self._reading, self._figures, self._off = reading, figures, off
        self._pid = os.getpid()

    def ledger(self) -> Ledger:
        """The last reading with one more row, which subtracts this process's bytes: they are off the GPU."""
        self._check_pid()
        return ledger_of(self._reading, suspension.now or self._off, time.time(), self._figures)

    def notes(self) -> list[str]:
        """A note with the time of the suspension and the call that ends it, or that nothing does."""
        return _note(suspension.now)

    def refuse(self, what: str) -> NoReturn:
        """Raise Suspended; in a forked child NotActive. `what` names the call."""
        self._check_pid()
        raise suspension.refused(what)

    def _check_pid(self) -> None:
        if self._pid != os.getpid():
            raise NotActive("no budget is active here: this is a forked child", fix="call memguard.init('budget.yaml')")


class _RefusingHost:
    """A host whose methods raise Suspended. Other attributes, such as the PID, come from the real host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._host, name)
        return functools.partial(_refuse, name) if callable(found) else found


def refusing(host: Host) -> Host:
    """The host during a suspension: each method raises Suspended."""
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
        # Drivers that do not report the reserve (NVML v1) count it under other processes.
        rows.append(Row("driver reserve", "driver reserve", gpu.device.total - memory.used - memory.free or None))
        rows.append(Row("free", "free", memory.free))
    return DeviceLedger(gpu.device, tuple(rows), 0, gpu.limit, False, size)


def _with_suspended_caps(row: Row) -> Row:
    fields: Mapping[str, Any] = {**vars(row), "enforcement": SUSPENDED}
    return Row(**fields)
