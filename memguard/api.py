"""memguard's public functions, over the budget that is active in this process, and the table of extensions."""

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
"""What each section of a budget adds to its session, in the order of `start`. A budget without it imports nothing."""
this.extensions = EXTENSIONS


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
    return this.init(budget, replace, simulate, missing_gpu)[0]


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
        with this.lock:  # if two blocks begin at once, one of them applies the budget, and that one ends it
            idle_before = this.idle
            # Not `this.session`: a signal handler or finalizer may begin another one, which is not this block's to end.
            active, began = this.init(budget, replace, simulate, missing_gpu)

        def end(error: BaseException | None) -> None:
            try:
                if error is not None and active.active:
                    hooks.seen(error)
            finally:
                this.end_of(began, active if idle_before is None else None, error)

        return active, end

    return Block(begin)


def shutdown() -> list[str]:
    """Undo the active budget. Returns what stays, as sentences; an empty list if nothing does, or none is active.

    If it is interrupted (Ctrl-C), the budget is no longer in effect, and the next `shutdown`, `init` or `guard` does
    what is left. Called by a signal handler while `init` runs on that thread, it takes effect at the end of `init`.
    A function of `on_event` that still runs for a budget that is over does not end a later one.
    """
    return this.shutdown()


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
        lambda: current().begin_workload(name, framework, needs, wait),
        lambda: current().begin_workload_in_loop(name, framework, needs, wait),
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
    this.state_for_call().checkpoint()


def on_event(callback: Callable[[Event], object]) -> Watch:
    """Call `callback` with every event, until the returned `Watch` is removed.

    What the monitor notices comes on its thread; out-of-memory errors, leaks and trims on the user's; a cap that no
    longer holds on the thread that found it. The function belongs to the process: it outlives a budget. What it raises
    is logged once.
    """
    if not callable(callback):
        raise TypeError(f"memguard.on_event takes a function, found {callback!r}")
    from memguard._runtime.callbacks import Watch

    event_callbacks.append(watch := Watch(callback, event_callbacks))
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
