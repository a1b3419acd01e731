"""memguard's public functions, which act on the active budget of this process, and the table of extensions."""

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
"""The extension of each section of a budget, in the order of `start`. It is imported only if the budget has the
section."""
this.extensions = EXTENSIONS


def init(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Guard:
    """Apply a budget to this process: a file's path, a mapping, or a `Budget`.

    Call it first; frameworks may be imported before or after. The same budget again does nothing; another one needs
    `replace=True`. `simulate="h200"` (or several names) applies it to simulated GPUs instead of real ones; under
    `memguard run --device`, and with `MEMGUARD_SIMULATE=h200`, that is the default.

    Without `simulate`, `MEMGUARD_DISABLE=1` makes it apply nothing. `missing_gpu` decides what happens if this process
    has no GPU (no driver, none visible, not Linux): "raise" DeviceError; "warn" once and apply nothing; "simulate" one,
    an H200, which a line on stderr says. A GPU whose driver is broken is not missing, and always raises DeviceError.
    Where nothing is applied, the guard is not active, `ledger()` is empty, and `require`, `workload`, `resize`, `trim`
    and `checkpoint` do nothing.

    Raises ConfigError, PlanError, DeviceError, LeaseRefused, CapNotApplied or AlreadyActive, and then nothing stays
    applied; ValueError for another `missing_gpu`.

    Other processes: a forked child has no budget. A worker of multiprocessing (`spawn`, `forkserver`) imports the
    script again: an `init` at its top then applies nothing, and returns a guard that is not active. To give each worker
    its own budget, call `init` in the function that the worker runs. Or, with `spawn`, set `MEMGUARD_CHILDREN=1`: then
    the script's own `init` applies in each worker. In a separately started program (torchrun, subprocess) `init` works
    as usual.
    """
    return this.init(budget, replace, simulate, missing_gpu)[0]


def guard(
    budget: BudgetLike,
    *,
    replace: bool = False,
    simulate: str | Sequence[str] | None = None,
    missing_gpu: MissingGpu = "raise",
) -> Block[Guard]:
    """Apply a budget for a block, and undo it when the block ends, also by an error. Changes that cannot be undone are
    logged.

    If the same budget is active already, the block leaves it active. With `replace=True` the one that was active
    before is not applied again at the end. `missing_gpu` and the environment count as for `init`.
    """

    def begin() -> tuple[Guard, End]:
        with this.lock:  # if two blocks begin at once, one of them applies the budget, and the same one ends it
            idle_before = this.idle
            # Not `this.session`: a signal handler or finalizer may begin another session, which this block must not
            # end.
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
    """Undo the active budget. Returns a sentence for each change that could not be undone; an empty list without one.

    If it is interrupted (Ctrl-C), the budget is no longer in effect, and the next `shutdown`, `init` or `guard`
    completes the undo. Called by a signal handler while `init` runs on that thread, it takes effect at the end of
    `init`. An `on_event` callback that still runs for an ended budget cannot end a later budget.
    """
    return this.shutdown()


def ledger() -> Ledger:
    """Each GPU's memory by holder, in rows that add up to the driver's total."""
    return current().ledger()


def require(framework: FrameworkName, size: int | str) -> None:
    """Raise BudgetExceeded *before* an allocation of `size` (bytes or `"4GiB"`) by `framework` would fail."""
    current().require(framework, size)


def workload(
    name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
) -> Block[WorkloadReport]:
    """A named block of work of one framework: admission before it; after it a report of its peak and its remaining
    memory.

    `needs` (bytes or `"6GiB"`) is reserved while the block runs, on each GPU that the framework uses, so that no other
    workload and no `require` gets the same bytes. If the bytes are not available, it raises BudgetExceeded with the
    holders of the memory: at once, or after `wait` (seconds or `"10s"`). Waiting workloads are served first come, first
    served.

    Use it as a `with` block, as an `async with` block, which waits without blocking the event loop, or as a decorator
    of functions, `async def`, generators and async generators. For the last three the block is the body, not the call.
    """
    return Block(
        lambda: current().begin_workload(name, framework, needs, wait),
        lambda: current().begin_workload_in_loop(name, framework, needs, wait),
    )


def resize(framework: FrameworkName, size: int | str) -> None:
    """Change a framework's cap at run time. Raises CapNotApplied if the cap is fixed, as TensorFlow's is."""
    current().resize(framework, size)


def trim(framework: CacheName | None = None) -> int:
    """Return the idle caches of one framework, or of all, to the driver. Returns the bytes returned."""
    return current().trim(framework)


def reclaimable() -> Reclaimable:
    """The bytes that each framework could return to the driver now, and by which call. Trims nothing. `print` it for a
    table; `as_dict()` is plain data. Unknown figures are None.
    """
    return current().reclaimable()


def checkpoint() -> None:
    """Carry out a pending `on_pressure` action of the budget now: trim, or raise UnderPressure. For loops without a
    `workload`."""
    this.state_for_call().checkpoint()


def on_event(callback: Callable[[Event], object]) -> Watch:
    """Call `callback` with every event, until the returned `Watch` is removed.

    Events of the monitor come on its thread; out-of-memory errors, leaks and trims on the user's thread; a cap that no
    longer holds on the thread that detects it. The callback stays registered when a budget ends. The first exception
    that it raises is logged.
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
    are no samples. It is not called while the process is suspended, for a reading that failed, or in a forked child.
    The first exception that it raises is logged. It should return soon: the monitor waits for it.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_sample takes a function, found {callback!r}")
    from memguard._runtime.callbacks import Watch

    sample_callbacks.append(watch := Watch(callback, sample_callbacks))
    if (found := this.session) is not None and found.active and found.guard.budget.monitor is None:
        _log.warning("%s", WITHOUT_MONITOR)
    return watch


def current() -> Guard:
    """The active guard; the idle one while nothing is applied. Raises NotActive if there is none."""
    return this.state_for_call().guard()


def current_session() -> Session:
    """The session of the active guard. Raises NotActive, also while nothing is applied."""
    return this.need_session()
