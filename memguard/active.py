"""The one budget that is active in this process, and memguard's public functions over it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Union

from memguard.conductor import Guard, WorkloadReport
from memguard.errors import AlreadyActive, DeviceError, MemguardError, NotActive

if TYPE_CHECKING:
    from memguard.accounts import Ledger
    from memguard.config import Budget
    from memguard.devices.host import Host

_log = logging.getLogger("memguard")

BudgetLike = Union["str | os.PathLike[str] | Mapping[str, Any] | Budget"]

_active: Guard | None = None
_lock = threading.RLock()
_fork_hook = False


def init(budget: BudgetLike, *, replace: bool = False, simulate: str | Sequence[str] | None = None) -> Guard:
    """Apply a budget to this process: a file's path, a mapping, or a `Budget`.

    Call it first; frameworks may be imported before or after. The same budget again does nothing; another one
    needs `replace=True`. `simulate="h200"` (or several names) runs it on simulated GPUs instead of real ones.
    Raises ConfigError, PlanError, DeviceError, CapNotApplied or AlreadyActive, and then nothing stays applied.
    """
    global _active
    loaded = _load(budget)
    with _lock:
        if _active is not None and _active.active:
            if _active.budget == loaded and _simulated_names(_active.host) == _names(simulate):
                return _active
            if not replace:
                raise AlreadyActive(
                    "another budget is active in this process\n"
                    "    fix: memguard.shutdown() first, or memguard.init(..., replace=True)"
                )
        host = _host(simulate)
        try:
            guard = Guard(loaded, host)  # before anything is undone: a budget that does not fit changes nothing
        except BaseException:
            host.close()
            raise
        before = _active
        if before is not None and before.active:
            before.stop()
        _after_fork()
        _active = guard  # before start: an import in another thread may call back at once
        try:
            guard.start()
        except BaseException:
            _active = None
            if before is not None:
                _active = _again(before)
            raise
        return guard


def _again(before: Guard) -> Guard | None:
    """The budget that was active before a replacement failed, applied anew."""
    guard = Guard(before.budget, before.host)
    try:
        guard.start()
    except MemguardError as error:
        _log.warning("no budget is active any more: the one before could not be applied again: %s", error)
        return None
    return guard


@contextmanager
def guard(budget: BudgetLike, *, replace: bool = False, simulate: str | Sequence[str] | None = None) -> Iterator[Guard]:
    """A budget for a block; undone at its end, whatever happens in it. What cannot be undone is logged.

    Where the same budget is active already, the block leaves it active. With `replace=True` the one that was
    active before is not brought back at the end.
    """
    before = _active
    active = init(budget, replace=replace, simulate=simulate)
    try:
        yield active
    finally:
        if _active is active and active is not before:
            shutdown()


def shutdown() -> list[str]:
    """Undo the active budget. Returns what stays, as sentences; an empty list where nothing does, or none is active."""
    global _active
    with _lock:
        current, _active = _active, None
        return current.stop() if current is not None and current.active else []


def ledger() -> Ledger:
    """Who holds what on each GPU of the budget, adding up to what the driver says."""
    return current().ledger()


def require(framework: str, size: int | str) -> None:
    """Raise BudgetExceeded *before* an allocation of `size` (bytes or `"4GiB"`) by `framework` would fail."""
    current().require(framework, size)


@contextmanager
def workload(name: str, *, framework: str, needs: int | str | None = None) -> Iterator[WorkloadReport]:
    """Admission before a block (`needs`), its peak and what it left behind after it."""
    with current().workload(name, framework=framework, needs=needs) as report:
        yield report


def resize(framework: str, size: int | str) -> None:
    """Change a framework's cap at run time. Raises CapNotApplied where it cannot change, as TensorFlow's."""
    current().resize(framework, size)


def trim(framework: str | None = None) -> int:
    """Give idle caches back to the driver, of one framework or all. Returns the bytes returned."""
    return current().trim(framework)


def current() -> Guard:
    """The active guard. Raises NotActive where none is."""
    if _active is None:
        raise NotActive("no budget is active in this process\n    fix: call memguard.init('budget.yaml') first")
    return _active


def _load(budget: BudgetLike) -> Budget:
    from memguard import config

    if isinstance(budget, config.Budget):
        return budget
    if isinstance(budget, Mapping):
        return config.from_mapping(budget)
    return config.load(budget)


def _names(simulate: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if simulate is None:
        return None
    names: Sequence[object] = simulate if isinstance(simulate, (list, tuple)) else [simulate]
    for name in names:
        if not isinstance(name, str):
            text = f"simulate names GPUs as text, found {name!r}"
            raise DeviceError(f"{text}\n    fix: simulate='h200', or a list of names")
    return tuple(str(name).strip().lower() for name in names)


def _simulated_names(host: Host) -> tuple[str, ...] | None:
    return getattr(host, "names", ()) if host.simulated else None


def _host(simulate: str | Sequence[str] | None) -> Host:
    names = _names(simulate)
    if names is not None:
        from memguard.devices.simulated import SimulatedHost

        return SimulatedHost(names)
    from memguard.devices.real import RealHost

    return RealHost()


def _after_fork() -> None:
    """Once per process: a forked child starts inert, with locks of its own (the parent's may be held for ever)."""
    global _fork_hook
    if _fork_hook or not hasattr(os, "register_at_fork"):
        return
    _fork_hook = True

    def inert() -> None:
        global _active, _lock
        if _active is not None:
            _active.forked()
            _log.debug("forked: memguard is inert in the child; call memguard.init there for a budget of its own")
        _active, _lock = None, threading.RLock()

    os.register_at_fork(after_in_child=inert)
