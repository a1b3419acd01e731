"""The budget that is active in this process, and memguard's public functions over it."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

from memguard._base.advice import Advice
from memguard._base.blocks import Block, End
from memguard._base.locks import InterruptSafeLock, free
from memguard._base.logs import log as _log
from memguard._base.types import Event, Sample, WorkloadReport
from memguard._devices import suspension
from memguard._frameworks import real_imports
from memguard._guard.guard import Guard
from memguard._oom import hooks
from memguard._runtime import workers
from memguard._runtime.session import WITHOUT_MONITOR, Session, callbacks, outlived, watches
from memguard._runtime.workers import IdleGuard
from memguard.errors import AlreadyActive, DeviceError, MemguardError, NotActive

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._budget import Budget
    from memguard._devices.host import Host
    from memguard._guard.figures import Reclaimable
    from memguard._ledger.types import Ledger
    from memguard._node.leases.lease import Lease
    from memguard._runtime.watches import Watch


BudgetLike = Union["str | os.PathLike[str] | Mapping[str, Any] | Budget"]
MissingGpu = Literal["raise", "warn", "simulate"]

_NONE = Advice("no budget is active in this process", "call memguard.init('budget.yaml') first")
_FORKED = Advice(
    "no budget is active in this process: it was forked from one that has a budget, and a budget belongs to one "
    "process",
    "call memguard.init here, for a budget of its own",
)
_WITHOUT = 'try it without a GPU: simulate="h200" (`memguard run --simulate h200`)'
_MISSING = (
    'go on without a GPU: missing_gpu="warn" (no budget) or missing_gpu="simulate", or set '
    f"{workers.DISABLE}=1 or {workers.SIMULATE}=h200"
)
_DISABLED = f"no budget is active, and nothing caps this program: {workers.DISABLE} is set"
_STAND_IN = "h200"
"""What `missing_gpu="simulate"` simulates: the card whose figures were measured."""

simulated_by_default: Sequence[str] | None = None
"""The GPUs of `memguard run --simulate`: the program's own `init` uses them too."""
from_environment: Guard | None = None
"""What MEMGUARD_CONFIG applied: the program's own `init` replaces it without `replace=True`."""
_environment: Any = sys.modules.get("_memguard_environment")  # there if that variable was set when Python started
_active: Session | None = None
"""The one place that says which budget is active."""
_idle: IdleGuard | None = None
"""Set while the functions below do nothing: MEMGUARD_DISABLE, or `missing_gpu="warn"` without a GPU."""
_stand_in: Guard | None = None
"""The guard whose GPU is simulated because there was none: `init` with the same budget returns it."""
_starting: Session | None = None
"""The one that `init` is starting."""
_applying = _unwanted = False
"""Whether `init` is at work, and whether a signal handler has called `shutdown` within that."""
_claiming = False
"""Whether `init` waits for a lease: `shutdown` ends that."""
_leases: list[Lease] = []
"""Those that `init` has claimed, or kept of the budget before, until it is known whose they are."""
_why_none = _NONE
_lock = InterruptSafeLock()
_FREED = 3.0
"""Seconds that the driver may take to free what a process that ended had on a GPU: its lease is free before that."""
_PATIENCE = 5.0
"""Seconds that a call waits for an `init` of another thread."""


def init(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Guard:
    """Apply a budget to this process: a file's path, a mapping, or a `Budget`.

    Call it first; frameworks may be imported before or after. The same budget again does nothing; another one
    needs `replace=True`. `simulate="h200"` (or several names) applies it to simulated GPUs instead of real ones; under
    `memguard run --simulate`, and with `MEMGUARD_SIMULATE=h200`, it need not be given again.

    Without `simulate`, `MEMGUARD_DISABLE=1` makes it apply nothing. `missing_gpu` says what happens if this process has
    no GPU (no driver, none visible, not Linux): "raise" DeviceError; "warn" once and apply nothing; "simulate" one, an
    H200, which a line on stderr says. A GPU whose driver is broken is not missing, and always raises DeviceError. Where
    nothing is applied the guard is not active, `ledger()` is empty, and `require`, `workload`, `resize`, `trim` and
    `checkpoint` do nothing.

    Raises ConfigError, PlanError, DeviceError, LeaseRefused, CapNotApplied or AlreadyActive, and then nothing stays
    applied; ValueError for another `missing_gpu`.

    Other processes: a forked child has no budget. A worker of multiprocessing (`spawn`, `forkserver`) imports the
    script again: an `init` at its top then applies nothing, and returns a guard that is not active. To give a worker a
    budget, call `init` in the function that it runs, each with its own part; or, with `spawn`, set
    `MEMGUARD_CHILDREN=1`, and the script's own applies in each. A program that is started by itself (torchrun,
    subprocess) is like any other.
    """
    return _init(budget, replace, simulate, missing_gpu)[0]


def _init(
    budget: BudgetLike, replace: bool, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu
) -> tuple[Guard, Session | None]:
    """`init`, and the session if this call began one."""
    global _applying, _unwanted
    if missing_gpu not in get_args(MissingGpu):
        raise ValueError(f"missing_gpu is 'raise', 'warn' or 'simulate', found {missing_gpu!r}")
    if simulate is None and simulated_by_default is None and workers.disabled(os.environ):
        return _stay_idle(_DISABLED, budget), None
    if not workers.wanted(workers.reimporting(sys.modules), os.environ):
        return _stay_passive(), None
    from memguard import _budget

    loaded = _budget.of(budget)
    simulate = _simulated_by_default() if simulate is None else simulate
    with _lock:
        if not _applying:
            _applying = True
            try:
                return _apply(loaded, simulate, replace, missing_gpu)
            finally:
                _applying = False
                _let_go()
        if _starting is not None and _same(_starting.guard, loaded, simulate):
            _unwanted = False  # wanted again, if a `shutdown` came before this one
            return _starting.guard, None
        raise AlreadyActive(
            "memguard.init is at work on this thread, and was called within that by a signal handler, a log handler or "
            "a finalizer",
            fix="call it once the other call has returned",
        )


def _same(active: Guard, budget: Budget, simulate: str | Sequence[str] | None) -> bool:
    if active.budget != budget:
        return False
    return _simulated_names(active.host) == _names(simulate) or (active is _stand_in and simulate is None)


def _apply(
    loaded: Budget, simulate: str | Sequence[str] | None, replace: bool, missing_gpu: MissingGpu
) -> tuple[Guard, Session | None]:
    """`_init`, with the lock held."""
    global _idle, _why_none, _unwanted, from_environment
    _unwanted = False
    before = _settled()
    if before is not None:
        now = before.guard
        if _same(now, loaded, simulate):
            return now, None
        if outlived(before):
            raise AlreadyActive(
                "another budget became active while this function ran for one that is over",
                fix="memguard.init(..., replace=True) on a thread of the program",
            )
        if not replace and now is not from_environment:
            which = f": that of {now.budget.source}" if now.budget.source else ""
            raise AlreadyActive(
                f"another budget is active in this process{which}",
                fix="memguard.shutdown() first, or memguard.init(..., replace=True)",
            )
    suspension.check("memguard.init")
    why = None
    try:
        session = _planned(loaded, simulate, before)  # first: a budget that does not fit changes nothing
    except DeviceError as error:
        if missing_gpu == "raise" or not error.missing:
            raise
        why = str(error.advice.with_alternatives())
    if why is not None:  # here, so that what this raises has one traceback
        if missing_gpu == "warn":
            return _stay_idle(f"no budget is active, and nothing caps this program: {why}", loaded, loud=True), None
        session = _without_gpu(loaded, before, why)
    kept = before.lease if before is not None else None
    if kept is not None:  # until the new budget is there: if it fails, this one is applied again
        _leases.append(kept)
        kept.kept = True
    if before is not None:
        before.guard.stop()
    try:
        _start(session)
    except BaseException:
        session.guard.stop()
        _settled()
        if before is not None:
            again = _again(before.guard, kept)
            if before.guard is from_environment:
                from_environment = again.guard if again is not None else None
        raise
    _why_none, from_environment, _idle = _NONE, None, None
    if _environment is not None:
        _environment.disarm()
    return session.guard, session


def _planned(budget: Budget, simulate: str | Sequence[str] | None, before: Session | None) -> Session:
    """The budget resolved on its GPUs, and not yet applied."""
    host: Host | None = None
    try:
        host = _host(simulate)
        session = Session(Guard(budget, host))
        session.prepare(before)
        if session.lease is not None:
            _claim(session.lease, session.guard)
    except BaseException as error:
        if host is not None:
            host.close()
        if isinstance(error, DeviceError) and (simulate is None if host is None else not host.simulated):
            more = [_WITHOUT] if host is not None else []  # without a host the text names simulated GPUs itself
            more += [_MISSING] if error.missing else []
            raise DeviceError(error.advice.with_alternatives(*more), missing=error.missing) from None
        raise
    return session


def _claim(lease: Lease, guard: Guard) -> None:
    """Wait for it as long as the budget says. With the lock held: other threads' `init` and `shutdown` wait too."""
    global _claiming
    _leases.append(lease)
    try:
        _claiming = True
        say = _log.warning if _is_heard() else real_imports.say
        look, device = None, guard.budget.device
        if device.on_wait == "suspend-idle":  # by its name: a layer above, which uses this one
            look = importlib.import_module("memguard._node.suspend.making_room").MakingRoom(lease, say).look
        if lease.take(device.wait or 0.0, say, lambda: _unwanted, look):
            until = time.monotonic() + _FREED
            while any(guard.busy()) and time.monotonic() < until and not _unwanted:
                time.sleep(0.05)
    finally:
        _claiming = False


def _let_go() -> None:
    """Give back what `init` claimed for a budget that does not hold, and what it kept of one that is over."""
    own = _active.lease if _active is not None and _active.active else None
    for lease in [*_leases]:
        lease.kept = False
        if lease is not own:
            lease.close()
        if lease in _leases:
            _leases.remove(lease)


def _without_gpu(budget: Budget, before: Session | None, why: str) -> Session:
    """The budget on a simulated GPU, as there is no real one. Says so, once."""
    global _stand_in
    session = _planned(budget, _STAND_IN, before)
    _stand_in = session.guard
    real_imports.said = True
    real_imports.say(f"a simulated {_STAND_IN} stands in for the missing GPU: nothing limits a real one: {why}")
    return session


def _stay_idle(why: str, budget: BudgetLike, *, loud: bool = False) -> Guard:
    """Apply nothing, and let the program run through: the public functions do nothing. An active budget stays."""
    global _idle
    before, found = _idle, _active
    if found is not None and found.active:
        _log.log(
            logging.WARNING if loud else logging.INFO,
            "the budget that was active stays, and this one is not applied: %s",
            why,
        )
        return found.guard
    if before is not None and (before.why, before.given) == (why, budget):
        return before
    _idle = IdleGuard(why, budget)
    if before is None or before.why != why:
        if not loud:
            _log.info("%s", why)
        elif _is_heard():
            _log.warning("%s", why)
        else:
            real_imports.say(why)
    return _idle


def _is_heard() -> bool:
    """Whether somebody set up logging: memguard's own handler discards everything."""
    logger: logging.Logger | None = logging.getLogger("memguard")
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _start(session: Session) -> None:
    """Make it the active one, and start it. Whatever interrupts that, `_settled` finds it. With the lock held."""
    global _active, _starting
    _active = session  # before it starts: an import in another thread may call memguard at once
    try:
        _starting = session
        session.start()
    finally:
        _starting = None
    if _unwanted:  # by a `shutdown` of a signal handler meanwhile
        session.guard.stop()


def _settled() -> Session | None:
    """The budget in effect. What an interrupted call left of another one is undone first. With the lock held."""
    global _active
    if _leases and not _applying:
        _let_go()
    found = _active
    if found is None or found.active:
        return found
    found.guard.stop()
    if _active is found and found.guard.undone:
        _active = None
    return None


def _stay_passive() -> Guard:
    """Apply nothing and touch no GPU: this is a worker of multiprocessing that imports the script again."""
    global _why_none
    if _active is not None and _active.active:
        return _active.guard
    _why_none = workers.WHY
    _log.debug("memguard.init applies nothing while multiprocessing imports the script again in a worker")
    return workers.PassiveGuard()


def _again(before: Guard, lease: Lease | None) -> Session | None:
    """The budget that was active before a replacement failed, applied anew."""
    session: Session | None = None
    try:
        session = Session(Guard(before.budget, before.host))
        session.guard.plan = before.plan  # as `resize` had left it
        if lease is not None:
            session.have(lease)
        _start(session)
    except MemguardError as error:
        if session is not None:
            session.guard.stop()
        _settled()
        # As text: a log that keeps its records would keep the error, its causes, and their frames.
        _log.warning("no budget is active any more: the one before could not be applied again: %s", str(error))
        return None
    return session


def guard(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Block[Guard]:
    """A budget for a block; undone at its end, whatever happens in it. What cannot be undone is logged.

    If the same budget is active already, the block leaves it active. With `replace=True` the one that was active
    before is not applied again at the end. `missing_gpu` and the environment count as for `init`.
    """

    def begin() -> tuple[Guard, End]:
        with _lock:  # if two blocks begin at once, one of them applies the budget, and that one ends it
            idle_before = _idle
            # Not `_active`: a signal handler or finalizer may begin another one, which is not this block's to end.
            active, began = _init(budget, replace, simulate, missing_gpu)

        def end(error: BaseException | None) -> None:
            try:
                if error is not None and active.active:
                    hooks.seen(error)
            finally:
                _end_of(began, active if idle_before is None else None, error)

        return active, end

    return Block(begin)


def _end_of(session: Session | None, idle: Guard | None, error: BaseException | None) -> None:
    """End the session, or the idling, that the block began, if it still counts.

    What fails in that does not replace the block's own error.
    """
    global _idle
    if (session is None or _active is not session) and (idle is None or idle is not _idle):
        return  # without the lock: there is nothing to end
    try:
        with _lock:
            if session is not None and _active is session:
                shutdown()
            if idle is not None and idle is _idle:
                _idle = None
    except Exception as failure:
        if error is None:
            raise
        _log.warning("the budget of a block could not be ended: %s", str(failure))


def shutdown() -> list[str]:
    """Undo the active budget. Returns what stays, as sentences; an empty list if nothing does, or none is active.

    If it is interrupted (Ctrl-C), the budget is no longer in effect, and the next `shutdown`, `init` or `guard` does
    what is left. Called by a signal handler while `init` runs on that thread, it takes effect at the end of `init`.
    A function of `on_event` that still runs for a budget that is over does not end a later one.
    """
    global _active, _idle, _stand_in, _unwanted
    if _claiming:  # another thread's `init`, or one that this call interrupted: it waits no longer
        _unwanted = True
    with _lock:
        if outlived(_active):
            _log.debug("memguard.shutdown of a budget that is over: the one that came after it stays")
            return []
        if _leases and not _applying:
            _let_go()
        if _active is not None:
            suspension.check("memguard.shutdown")  # what was changed is taken back on the GPUs
        _idle = _stand_in = None
        if _environment is not None:
            _environment.disarm()
        _unwanted = True  # for an `init` that a signal handler has interrupted, to call this
        if (found := _active) is None:
            return []
        if found is _starting:  # called by a signal handler, say, within `init`, which is in the middle of it
            return []
        stays = found.guard.stop()  # also what is left of one that was interrupted
        if _active is found and found.guard.undone:
            _active = None
        return stays


def ledger() -> Ledger:
    """Who holds what on each GPU of the budget, adding up to what the driver says."""
    return current().ledger()


def require(framework: FrameworkName, size: int | str) -> None:
    """Raise BudgetExceeded *before* an allocation of `size` (bytes or `"4GiB"`) by `framework` would fail."""
    current().require(framework, size)


def workload(
    name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
) -> Block[WorkloadReport]:
    """A named block of work of one framework: admission before it, its peak and what it left behind after it.

    `needs` (bytes or `"6GiB"`) is reserved from its beginning to its end, on each GPU that the framework uses, so that
    no other workload and no `require` gets the same bytes. If they cannot be had, BudgetExceeded says who holds what:
    at once, or with `wait` (seconds or `"10s"`) after that time. Who waits is served in the order of coming.

    A `with` or `async with` block (which waits without blocking the event loop), or a decorator: of functions, `async
    def`, generators and async generators, where the block is the body, not the call.
    """
    return Block(
        lambda: current()._begin_workload(name, framework, needs, wait),
        lambda: current()._begin_workload_in_loop(name, framework, needs, wait),
    )


def resize(framework: FrameworkName, size: int | str) -> None:
    """Change a framework's cap at run time. Raises CapNotApplied if it cannot change, as TensorFlow's."""
    current().resize(framework, size)


def trim(framework: CacheName | None = None) -> int:
    """Give idle caches back to the driver, of one framework or all. Returns the bytes returned."""
    return current().trim(framework)


def reclaimable() -> Reclaimable:
    """What each framework could give back to the driver now, as figures, and how. Trims nothing.

    `print` it for a table; `as_dict()` is plain data. What is not known is None.
    """
    return current().reclaimable()


def checkpoint() -> None:
    """Do now what `on_pressure` in the budget says: trim, or raise UnderPressure. For loops without a `workload`."""
    if not _is_idle():
        current_session().checkpoint()


def on_event(callback: Callable[[Event], object]) -> Watch:
    """Call `callback` with every event, until the returned `Watch` is removed.

    What the monitor notices comes on its thread; out-of-memory errors, leaks and trims on the user's; a cap that no
    longer holds on the thread that found it. The function belongs to the process: it outlives a budget. What it raises
    is logged once.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_event takes a function, found {callback!r}")
    from memguard._runtime.watches import Watch

    callbacks.append(watch := Watch(callback, callbacks))
    return watch


def on_sample(callback: Callable[[Sample], object]) -> Watch:
    """Call `callback` with every sample of the monitor, on the monitor's thread, until the returned `Watch` is removed.

    A sample says what each framework holds and uses on each GPU, in bytes, with None for what is not known. The
    function belongs to the process: it outlives a budget, and is called again under the next one that has `monitor`;
    without that there are no samples. It is not called while the process is suspended, for a reading that failed, or
    in a forked child. What it raises is logged once. Let it return soon: meanwhile the monitor takes no sample.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_sample takes a function, found {callback!r}")
    from memguard._runtime.watches import Watch

    watches.append(watch := Watch(callback, watches))
    if (found := _active) is not None and found.active and found.guard.budget.monitor is None:
        _log.warning("%s", WITHOUT_MONITOR)
    return watch


def current() -> Guard:
    """The active guard; the idle one while nothing is applied. Raises NotActive if there is none."""
    idle = _is_idle()
    return idle if idle is not None else current_session().guard


def _is_idle() -> IdleGuard | None:
    """The guard that does nothing, while that is the one that counts."""
    if _active is not None:
        return None
    if _idle is None and _environment is not None and workers.disabled(os.environ):
        _stay_idle(
            _DISABLED, os.environ.get("MEMGUARD_CONFIG", "")
        )  # a program that has its budget from MEMGUARD_CONFIG alone
    return _idle


def current_session() -> Session:
    found = _active
    if found is None or found is _starting:
        if _environment is not None:
            _environment.activate()
        if _starting is not None:  # by another thread, which may itself wait for an import of this one: not for ever
            free(_lock, _PATIENCE)
        found = _active
    if found is None:
        why = getattr(_environment, "why", None)
        raise NotActive(Advice(*why) if why else _why_none)
    return found


def _names(simulate: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if simulate is None:
        return None
    names: Sequence[object] = simulate if isinstance(simulate, (list, tuple)) else [simulate]
    for name in names:
        if not isinstance(name, str):
            text = f"simulate names GPUs as text, found {name!r}"
            raise DeviceError(text, fix="simulate='h200', or a list of names")
    from memguard._devices.named import canonical

    return tuple(canonical(str(name)) for name in names)


def _simulated_by_default() -> Sequence[str] | None:
    """The GPUs of `memguard run --simulate`, else those of MEMGUARD_SIMULATE, which a line on stderr then names."""
    if simulated_by_default is not None:
        return simulated_by_default
    names = workers.simulated(os.environ)
    if names is None:
        return None
    from memguard._devices import named

    try:
        for name in names:
            named.models(name)
    except DeviceError as error:  # before anything is said of them
        raise DeviceError(error.advice.within(workers.SIMULATE)) from None
    if not real_imports.said:
        real_imports.said = True
        real_imports.say(f"simulated GPUs ({', '.join(names)}): nothing limits a real one")
    return names


def _simulated_names(host: Host) -> tuple[str, ...] | None:
    return getattr(host, "names", ()) if host.simulated else None


def _host(simulate: str | Sequence[str] | None) -> Host:
    names = _names(simulate)
    if names is not None:
        from memguard._devices.simulated import SimulatedHost

        return SimulatedHost(names)
    from memguard._devices.real import RealHost

    return RealHost()


def _inert() -> None:
    """A forked child starts without a budget, and with a lock of its own: the parent's may be held for ever."""
    global _active, _starting, _applying, _claiming, _lock, _why_none
    _lock, _claiming = InterruptSafeLock(), False
    _leases.clear()
    before, _active, _starting, _applying = _active, None, None, False
    watches.clear()  # what they write to has its threads in the parent
    if before is not None:
        before.forked()
        if workers.from_fork_server(sys.modules, sys.orig_argv):  # the budget was meant for the workers
            _why_none = workers.SERVED
            _log.warning("%s", _why_none)
            return
        _why_none = _FORKED
        _log.debug("forked: memguard is inert in the child; call memguard.init there for a budget of its own")


if hasattr(os, "register_at_fork"):  # at import, so that it is registered before anybody holds the lock
    os.register_at_fork(after_in_child=_inert)
