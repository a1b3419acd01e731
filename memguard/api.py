"""memguard's public functions, which act on this process's active budget, and the table of extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memguard._base.blocks import Block, End
from memguard._base.logs import log as _log
from memguard._base.types import Event, Sample, WorkloadReport
from memguard._guard.guard import Guard
from memguard._oom import hooks
from memguard._runtime.runtime import BudgetLike, MissingGpu, this
from memguard._runtime.session import WITHOUT_MONITOR, Session, event_callbacks, sample_callbacks

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._guard.figures import Reclaimable
    from memguard._ledger.types import Ledger
    from memguard._runtime.callbacks import Watch

EXTENSIONS = {
    "device.lease": "memguard._node.leases.extension:Leases",
    "device.on_wait: suspend-idle": "memguard._node.suspend.triggers.making_room:SuspendsIdle",
    "metrics": "memguard._node.metrics:Metrics",
    "monitor.timeline": "memguard._runtime.timeline_extras:Timeline",
    "monitor.top": "memguard._node.top.server:Top",
    "suspend.when_idle": "memguard._node.suspend.triggers.when_idle:WhenIdle",
    "suspend": "memguard._node.suspend.triggers.listener:Reachable",
}
"""The class that implements each optional section of a budget, in the order in which the extensions start. An extension
is imported only if the budget has its section."""
this.extensions = EXTENSIONS


def init(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Guard:
    """Apply a budget to this process: a file's path, a mapping, or a `Budget`.

    Call `init` before the other functions; frameworks may be imported before or after it. A second call with the same
    budget does nothing; a call with another budget needs `replace=True`. `simulate="h200"` (or several names) applies
    the budget to simulated GPUs instead of real ones. Under `memguard run --device`, and with `MEMGUARD_SIMULATE=h200`,
    GPUs are simulated by default.

    Without `simulate`, `MEMGUARD_DISABLE=1` makes `init` apply nothing. `missing_gpu` decides what happens if this
    process has no GPU (no driver, no visible GPU, not Linux). "raise" raises DeviceError. "warn" logs one warning and
    applies nothing. "simulate" simulates one H200 and prints a line about it to stderr. A GPU whose driver is broken is
    not missing, and always raises DeviceError. If nothing is applied, the guard is not active, `ledger()` is empty, and
    `require`, `workload`, `resize`, `trim` and `checkpoint` do nothing.

    Raises ConfigError, PlanError, DeviceError, LeaseRefused, CapNotApplied or AlreadyActive, after which nothing stays
    applied. Raises ValueError for an invalid `missing_gpu`.

    A forked child has no budget. A worker of multiprocessing (`spawn`, `forkserver`) imports the script again; there an
    `init` at the top of the script applies nothing, and returns a guard that is not active. To give each worker its own
    budget, call `init` in the function that the worker runs. Or, with `spawn`, set `MEMGUARD_CHILDREN=1`, so that the
    script's own `init` applies the budget in each worker. In a separately started program (torchrun, subprocess) `init`
    works as usual.
    """
    return this.init(budget, replace, simulate, missing_gpu)[0]


def guard(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Block[Guard]:
    """Apply a budget for a block, and undo the budget when the block ends, even by an exception. Changes that
    cannot be undone are logged.

    If the same budget is already active, it stays active after the block. With `replace=True`, the previously active
    budget is not applied again at the end. `missing_gpu` and environment variables have the same effect as for `init`.
    """

    def begin() -> tuple[Guard, End]:
        with this.lock:  # if two threads begin a block at the same time, the one that applies the budget also ends it
            idle_before = this.idle
            # `end` must not read `this.session`: a signal handler or finalizer may have begun another session.
            active, began = this.init(budget, replace, simulate, missing_gpu)

        def end(error: BaseException | None) -> None:
            try:
                if error is not None and active.active:
                    hooks.report_error(error)
            finally:
                this.end_of(began, active if idle_before is None else None, error)

        return active, end

    return Block(begin)


def shutdown() -> list[str]:
    """Undo the active budget. Returns one sentence for each change that could not be undone; an empty list if there is
    none.

    If `shutdown` is interrupted (Ctrl-C), the budget is no longer in effect, and the next `shutdown`, `init` or `guard`
    completes the undo. If a signal handler calls `shutdown` while `init` runs on the same thread, the budget is undone
    at the end of `init`. An `on_event` callback that still runs for an ended budget cannot end a later budget.
    """
    return this.shutdown()


def ledger() -> Ledger:
    """The memory of each GPU by framework and other holder, in rows that add up to the driver's total."""
    return current().ledger()


def require(framework: FrameworkName, size: int | str) -> None:
    """Raise BudgetExceeded *before* an allocation of `size` (bytes or `"4GiB"`) by `framework` would fail."""
    current().require(framework, size)


def workload(
    name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
) -> Block[WorkloadReport]:
    """A named block of work of one framework. Reserves memory before the block; after the block reports the peak and
    the change of the memory in use.

    `needs` (bytes or `"6GiB"`) is reserved while the block runs, on each GPU that the framework uses, so that no other
    workload and no `require` gets the same bytes. If the bytes are not available, `workload` raises BudgetExceeded,
    which names the holders of the memory: immediately, or after waiting for `wait` (seconds or `"10s"`). Waiting
    workloads are served first come, first served.

    Use it as a `with` block, as an `async with` block, which waits without blocking the event loop, or as a decorator
    of functions, `async def`, generators and async generators. For the last three, the block surrounds the execution of
    the body, not the call.
    """
    return Block(
        lambda: current().begin_workload(name, framework, needs, wait),
        lambda: current().begin_workload_in_loop(name, framework, needs, wait),
    )


def resize(framework: FrameworkName, size: int | str) -> None:
    """Change a framework's cap at run time. Raises CapNotApplied if the cap is fixed, as TensorFlow's is."""
    current().resize(framework, size)


def trim(framework: CacheName | None = None) -> int:
    """Return the idle cache of one framework, or of all frameworks, to the driver. The result is the bytes returned."""
    return current().trim(framework)


def reclaimable() -> Reclaimable:
    """The bytes that each framework could return to the driver now, and the call that returns them. Trims nothing.
    `print` the result for a table; `as_dict()` is plain data. Unknown figures are None.
    """
    return current().reclaimable()


def checkpoint() -> None:
    """Carry out a pending `on_pressure` action of the budget: trim caches, or raise UnderPressure. Call `checkpoint` in
    loops without a `workload`."""
    this.state_for_call().checkpoint()


def on_event(callback: Callable[[Event], object]) -> Watch:
    """Call `callback` with every event, until the returned `Watch` is removed.

    The callback runs on the monitor's thread for events of the monitor, on the user's thread for out-of-memory errors,
    leaks and trims, and for a cap that no longer holds on the thread that detects the change. The callback stays
    registered when a budget ends. The first exception that the callback raises is logged.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_event takes a function, found {callback!r}")
    from memguard._runtime.callbacks import Watch

    event_callbacks.append(watch := Watch(callback, event_callbacks))
    return watch


def on_sample(callback: Callable[[Sample], object]) -> Watch:
    """Call `callback` with every sample of the monitor, on the monitor's thread, until the returned `Watch` is removed.

    A sample has the bytes that each framework holds and uses on each GPU; unknown figures are None. The callback stays
    registered when a budget ends, and is called again under the next budget that has `monitor`. Without `monitor` there
    are no samples. The callback is not called while the process is suspended, after a failed reading, or in a forked
    child. The first exception that the callback raises is logged. The callback should return soon, because the monitor
    waits for it.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_sample takes a function, found {callback!r}")
    from memguard._runtime.callbacks import Watch

    sample_callbacks.append(watch := Watch(callback, sample_callbacks))
    if (found := this.session) is not None and found.active and found.guard.budget.monitor is None:
        _log.warning("%s", WITHOUT_MONITOR)
    return watch


def current() -> Guard:
    """The active guard, or the inactive guard that `init` returned because nothing is applied (disabled, or no GPU).
    Raises NotActive if `init` has not run."""
    return this.state_for_call().guard()


def current_session() -> Session:
    """The session of the active guard. Raises NotActive if no budget is applied."""
    return this.need_session()
