"""A suspended process: the guard answers from the last reading, and all that would ask a GPU raises Suspended.

Closed by default: a call that nobody thought of reaches the refusing host, which is there in place of the real one.
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
from memguard._devices.suspension import Off
from memguard._ledger.types import DeviceLedger, Ledger, Row
from memguard.errors import NotActive

SUSPENDED = "suspended"
"""What the ledger says of how a cap holds: nothing can be allocated."""
Figures = Callable[[str], "MemoryInfo | None"]
"""NVML's figures of a GPU (UUID), from another process, as this one would wait for NVML; None if unknown."""


class OffGpu:
    """What a guard has instead of its GPUs: `reading`, the last one before the process left, as `off` says.

    `figures` are asked for what the GPUs have now. `host` is the real one.
    """

    def __init__(self, reading: Ledger, figures: Figures, off: Off, host: Host) -> None:
        self.host = host
        self._reading, self._figures, self._off = reading, figures, off
        self._pid = os.getpid()

    def ledger(self) -> Ledger:
        """The last reading, with every framework's row as it was, and none of it on the GPU."""
        self._here()
        return ledger_of(self._reading, suspension.now or self._off, time.time(), self._figures)

    def notes(self) -> list[str]:
        """Since when, and how it comes back."""
        return _note(suspension.now)

    def refuse(self, what: str) -> NoReturn:
        """Raise Suspended; in a forked child NotActive. `what` names the call."""
        self._here()
        raise suspension.refused(what)

    def _here(self) -> None:
        if self._pid != os.getpid():
            raise NotActive("no budget is active here: this is a forked child", fix="call memguard.init('budget.yaml')")


class _RefusingHost:
    """A host whose calls raise Suspended. What is no call, as its PID, is the real one's."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._host, name)
        return functools.partial(_refuse, name) if callable(found) else found


def refusing(host: Host) -> Host:
    """What stands in for that host while the process is off its GPUs."""
    return cast("Host", _RefusingHost(host))


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise suspension.refused(f"a look at the GPUs ({name})")


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
