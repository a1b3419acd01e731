"""The watch for idleness of this process: asked for in the budget, by `memguard run --when-idle` or in a notebook."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal

from memguard._base import life
from memguard._base.logs import is_heard
from memguard._base.logs import log as _log
from memguard._devices import proc, suspension
from memguard._frameworks import import_hook
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.specs import SPECS
from memguard._node.suspend.triggers import notebook_cells
from memguard._node.suspend.triggers.idle import Usage, Watcher, simulated
from memguard._node.suspend.triggers.notebook_cells import shell_here
from memguard._runtime.extensions import Extension

if TYPE_CHECKING:
    from memguard._runtime.extensions import SessionContext

Source = Literal["budget", "environment", "notebook"]
"""Who asked. The budget's ends with it; a later one replaces it, except that the budget's gives way to the others'."""
_LOCK = 5.0
"""Seconds for the work on the GPUs to end. There should be none."""
_CHILD = "_memguard_child"
"""The module that applies a budget for `memguard run`."""
_hook = ImportHook()
_watcher: Watcher | None = None
_source: Source | None = None
_lock = threading.Lock()


class WhenIdle(Extension):
    def start(self, session: SessionContext) -> None:
        suspend = session.guard.budget.suspend
        assert suspend is not None and suspend.when_idle is not None
        session.undo.add("the watch for idleness", end_of_budget)
        of_budget(suspend.when_idle)


def of_budget(seconds: float) -> None:
    """The budget has `suspend: {when_idle: ...}`. In a plain script that is a warning: nothing would bring it back.

    Under `memguard run` the budget comes before the program: what that is shows at its first framework.
    """
    if _CHILD in sys.modules and shell_here() is None and not any(spec.hook in sys.modules for spec in SPECS.values()):
        for spec in SPECS.values():
            _hook.watch(spec.hook, functools.partial(_of_budget, seconds))
    else:
        _of_budget(seconds)


def _of_budget(seconds: float) -> None:
    _hook.clear()
    shell = shell_here()
    if shell is None:
        _log.warning(
            "suspend: when_idle has no effect in a program without cells: nothing would bring it back by itself\n"
            "    fix: call memguard.suspend() and memguard.resume() where it may wait, or start a notebook with it "
            "(MEMGUARD_CONFIG=budget.yaml jupyter lab)"
        )
    elif _source in ("environment", "notebook") and alive():
        _log.info("suspend: when_idle of the budget gives way to what was asked for in this process")
    else:
        begin(seconds, shell, "budget")


def end_of_budget() -> None:
    _hook.clear()
    if _source == "budget":
        end()


def of_environment(text: str) -> None:
    """`memguard run --when-idle`, which every Python below it inherits: most have no cells, and nothing happens.

    Raises ValueError for what is no such duration.
    """
    from memguard._budget.values import IDLE, duration

    seconds, shell = duration(text, *IDLE), shell_here()
    if shell is not None and not (_source == "notebook" and alive()):
        begin(seconds, shell, "environment")


def begin(seconds: float, shell: Any, source: Source) -> None:
    """Watch from now on, instead of what watched before."""
    global _watcher, _source
    found = notebook_cells.attach(shell)
    watcher = Watcher(seconds, found.ran, Usage(), functools.partial(_leave, found), _say)
    with _lock:
        if _watcher is not None:
            _watcher.stop()
        _watcher, _source = watcher, source
        _prepare(os.getpid())
        watcher.start()


def end() -> None:
    """Watch no more."""
    global _watcher, _source
    watcher, _watcher, _source = _watcher, None, None
    if watcher is not None:
        watcher.stop()


def let_go(shell: Any) -> None:
    """Detach from the cells of a notebook whose extension is unloaded, unless something else still needs them."""
    if suspension.now is None and not alive():
        notebook_cells.detach(shell)


def alive() -> bool:
    return _watcher is not None and _watcher.alive


def seconds() -> float | None:
    """The time without work after which this process leaves its GPUs; None if it does not."""
    watcher = _watcher
    return watcher.seconds if watcher is not None and watcher.alive else None


def _leave(found: notebook_cells.Cells) -> bool:
    """Take the process off its GPUs, unless a cell runs. On the watcher's thread."""
    from memguard._node.suspend import self_suspend

    with found.none() as free:
        if not free or suspension.now is not None or not has_gpu():
            return False
        self_suspend.suspend(_LOCK, "idle", found.owner, self_suspend.ignores_host_memory(), patience=0)
    return True


def has_gpu(root: str = "/") -> bool:
    """Whether this process may have something on a GPU: else there is nothing to take off it, and nothing to say."""
    found = proc.maps(root, os.getpid())
    return simulated() or found is None or bool(found.uvm or found.gpu)


def _say(text: str) -> None:
    if is_heard():
        _log.warning("%s", text)
    else:
        import_hook.to_stderr(text)


@functools.cache
def _prepare(pid: int) -> None:
    """Once in a process."""
    life.at_exit(life.HookOrder.IDLE_WATCHER, end)
    life.at_fork(life.HookOrder.IDLE_WATCHER, child=_forked)


def _forked() -> None:
    """A forked child has no thread of its parent's, and no shell that runs its cells."""
    global _watcher, _source, _lock
    _watcher, _source, _lock = None, None, threading.Lock()
