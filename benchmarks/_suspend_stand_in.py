"""A card, a driver and six frameworks that are files and host memory: to try `suspend.py` without a GPU.

MEMGUARD_SUSPEND_REHEARSAL names a folder, with one file for each process: what it holds, and whether it is suspended.
Nothing that is measured over it says anything of a GPU.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _suspend_arrays import REHEARSAL, Calls, Library

TOTAL = 1 << 30
CONTEXT = 4 << 20
STEPS = {"off": ("state", "lock", "settle", "checkpoint"), "on": ("state", "room", "restore", "unlock")}
tell: Callable[[str], object] = lambda step: None  # noqa: E731
"""Told before each step, as the flow's `on_step`."""
needs_leave = bool(os.environ.get("MEMGUARD_SUSPEND_NEEDS_LEAVE"))
"""Whether the machine has too little host memory, as it says."""
provoked: set[str] = set()
"""Codes of reasons not to suspend this process."""


class CannotSuspend(Exception):
    def __init__(self, reasons: Sequence[tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"{reason}\n    fix: {remedy}" for _, reason, remedy in reasons))
        self.reasons = tuple(reasons)


class CannotResume(Exception):
    def __init__(self, text: str, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


def _file(pid: int) -> Path:
    return Path(REHEARSAL) / f"{pid}.process"


def read(pid: int) -> dict[str, Any] | None:
    """What a process holds; None if it holds nothing or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        found: dict[str, Any] = json.loads(_file(pid).read_text())
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else found


def write(pid: int, **changes: Any) -> None:
    found = {"bytes": 0, "suspended": False, **(read(pid) or {}), **changes}
    new = _file(pid).with_suffix(f".{threading.get_ident()}")
    new.write_text(json.dumps(found))
    new.replace(_file(pid))


def listed() -> dict[int, int]:
    """What NVML would list: bytes by PID."""
    found = {}
    for path in Path(REHEARSAL).glob("*.process"):
        one = read(int(path.stem))
        if one is not None and not one["suspended"] and one["bytes"]:
            found[int(path.stem)] = one["bytes"]
    return found


def free() -> int:
    return TOTAL - sum(listed().values()) - _placeholders()


def _placeholders() -> int:
    return sum((read(int(path.stem)) or {}).get("placeholder", 0) for path in Path(REHEARSAL).glob("*.process"))


def away() -> bool:
    return bool((read(os.getpid()) or {}).get("suspended"))


def suspend(timeout: Any = 60, host_memory: str | None = None) -> Any:
    if needs_leave and host_memory != "ignore":
        raise CannotSuspend([("host-memory", "the machine has too little", 'host_memory="ignore"')])
    if provoked:
        raise CannotSuspend([(code, "it was provoked", "calm it") for code in sorted(provoked)])
    started = time.time()
    for step in STEPS["off"]:
        tell(step)
        time.sleep(0.01)
    size = (read(os.getpid()) or {"bytes": 0})["bytes"]
    write(os.getpid(), suspended=True)
    return SimpleNamespace(bytes={"GPU": size}, host=size, seconds=time.time() - started, parts={"checkpoint": 0.01})


def resume(timeout: float | None = None, progress: Callable[[Any], object] | None = None) -> None:
    if not away():
        return
    started, needs = time.monotonic(), (read(os.getpid()) or {"bytes": 0})["bytes"]
    for step in STEPS["on"]:
        tell(step)
        while step == "room" and free() < needs:
            holders = tuple(f"{size} (PID {pid})" for pid, size in listed().items())
            if progress is not None:
                progress(SimpleNamespace(free=free(), needs=needs, holders=holders, seconds=0.0))
            if timeout is not None and time.monotonic() - started > timeout:
                raise CannotResume(f"there is no room; it stays suspended and whole {holders}")
            time.sleep(0.02)
        if step == "room":
            write(os.getpid(), placeholder=needs)
        time.sleep(0.01)
        if step == "restore":
            write(os.getpid(), placeholder=0)
            time.sleep(0.03)  # the window
            if free() < needs:
                raise CannotResume("error 2: somebody was faster, and the process is lost", lost=True)
    write(os.getpid(), suspended=False)


def ledger() -> str:
    return "suspended, 1 MiB in host memory" if away() else "on its GPU"


class Stand(Library):
    """A framework whose arrays lie on the host, and whose calls wait while the process is away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._held = CONTEXT

    def _grow(self, size: int) -> None:
        self._held += size
        write(os.getpid(), bytes=(read(os.getpid()) or {"bytes": 0})["bytes"] + size)

    def begin(self) -> None:
        self._grow(CONTEXT)

    def put(self, data: Any) -> Any:
        self._grow(data.nbytes)
        return data.copy()

    def get(self, array: Any) -> Any:
        return array

    def fill(self, size: int, value: int) -> Any:
        self._grow(size)
        return np.full(8192, value, np.uint8)

    def ends(self, array: Any, size: int) -> Any:
        return array

    def computed(self, array: Any) -> int:
        return int(array.sum())

    def trim(self) -> None:
        write(os.getpid(), bytes=CONTEXT)

    def calls(self) -> Calls:
        def waits() -> None:
            while away():
                time.sleep(0.005)

        return {"synchronize": waits, "copy": waits}


class Raw:
    """As `_suspend_arrays.Raw`."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        write(os.getpid(), bytes=CONTEXT)

    def take(self, size: int) -> int | None:
        if free() < size:
            return None
        address = len(self._sizes) + 1
        self._sizes[address] = size
        self._tell()
        return address

    def give(self, address: int) -> None:
        self._sizes[address] = 0
        self._tell()

    def _tell(self) -> None:
        write(os.getpid(), bytes=CONTEXT + sum(self._sizes.values()))
