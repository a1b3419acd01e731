"""A process steps off its GPUs, every byte and its contexts, and comes back to the same addresses.

    with memguard.suspended():
        work_that_needs_no_gpu()

`self_suspend` is the suspension of this process, by a `backend`; `pause_memguard` keeps memguard from calling CUDA and
NVML meanwhile. `_devices.phase` has the phases that it goes through. `remote_suspend` does it with other processes,
which `processes` lists; `requests` asks one of them over `sockets`.

course/    the steps of a suspension and of a resumption: what is next, its calls, the wait for room, the messages
driver/    the driver's checkpoint calls, through a helper process or simulated
gates/     what keeps the frameworks from calling the driver meanwhile
checks/    whether a process can be suspended, and the reasons why not
store/     files that the processes of one user share: records, locks, places in the queue
triggers/  what starts a suspension or ends it besides the program's own call
"""

from __future__ import annotations

import threading
from typing import get_args

from memguard._base.blocks import Block, End
from memguard._base.logs import log as _log
from memguard._base.units import parse_duration
from memguard._node.suspend.types import TIMEOUT, HostMemory, Progress, Suspension, Why
from memguard.errors import MemguardError

__all__ = ["Suspension", "resume", "suspend", "suspended"]


def suspend(*, timeout: float | str = TIMEOUT, why: Why = "asked", host_memory: HostMemory | None = None) -> Suspension:
    """Take this process off its GPUs: every byte and its contexts, of whatever framework, into its host memory.

    `resume` brings it back to the same addresses. Until then the frameworks' functions that need a GPU wait, on every
    thread, and memguard's raise Suspended; `ledger()` says what lies in host memory. `timeout` (seconds, or `"30s"`) is
    for the work that the GPUs have under way. `host_memory="ignore"` is for a machine that gets more memory when it is
    needed: where it does not, the process is killed. None is what the budget says. No budget is needed.

    In a notebook the next cell brings it back before it runs, and on the thread of the cells what needs a GPU raises
    Suspended until then.

    Raises CannotSuspend with each reason why it is not possible now, and then nothing was changed; Suspended if it is
    suspended already. A Ctrl-C takes back what was done.
    """
    from memguard._node.suspend import self_suspend  # here: the helper process imports this package, and needs no guard
    from memguard._node.suspend.triggers import notebook_cells

    return self_suspend.suspend(_seconds(timeout), why, notebook_cells.owner(), _ignored(host_memory))


def resume(*, timeout: float | str | None = None, progress: Progress | None = None) -> None:
    """Bring this process back on its GPUs, as it was. Nothing happens if it is there.

    It waits until there is room on each GPU, at most `timeout` (seconds, or `"10min"`); `progress` is called with each
    look at that, on this thread. Raises CannotResume: the process stays suspended and whole, and may be resumed again.
    So it does after a Ctrl-C while it waits for room; a Ctrl-C within the restore is raised once that is done.
    """
    from memguard._node.suspend import self_suspend

    self_suspend.resume(None if timeout is None else _seconds(timeout), progress)


def suspended(*, timeout: float | str = TIMEOUT, host_memory: HostMemory | None = None) -> Block[Suspension]:
    """A block of work that needs no GPU: the process is off its GPUs within it, and back after it.

    On this thread a framework's function that needs a GPU raises Suspended in the block, as nobody could end its wait;
    on other threads it waits. The end waits for room as `resume` does. A `with` or `async with` block, or a decorator.
    """
    from memguard._node.suspend import self_suspend

    seconds, ignored = _seconds(timeout), _ignored(host_memory)

    def begin() -> tuple[Suspension, End]:
        found = self_suspend.suspend(seconds, "asked", threading.get_ident(), ignored)
        refusals = self_suspend.refusals()

        def end(error: BaseException | None) -> None:
            refusals.close()
            if self_suspend.current() is not found:  # somebody has brought it back already
                return
            try:
                self_suspend.resume(None, None)
            except Exception as failure:
                if error is None:
                    raise
                _log.warning("the process stays suspended after the block: %s", str(failure))

        return found, end

    return Block(begin)


def _seconds(given: float | str) -> float:
    try:
        return parse_duration(given)
    except ValueError as error:
        raise MemguardError(str(error)) from None


def _ignored(host_memory: HostMemory | None) -> bool:
    if host_memory is None:
        from memguard._node.suspend import self_suspend

        return self_suspend.ignores_host_memory()
    if host_memory not in get_args(HostMemory):
        raise ValueError(f"host_memory is 'check' or 'ignore', found {host_memory!r}")
    return host_memory == "ignore"
