"""memguard's fork hooks and exit hooks, one list of each, run in the order of `HookOrder`.

Only this module calls `os.register_at_fork` and `atexit.register`, except `_memguard_environment`, which runs before
memguard can be imported. This module is in `_base` because every subpackage adds hooks. A module adds a hook when it
first has state to renew after a fork or to end at exit.

`atexit` runs its functions, including those of frameworks, in reverse order of registration. So each added exit hook
registers a new `_Exit`, which then runs before the exit functions of every framework imported so far. The exit
function of a framework that is imported later runs before memguard's, and shuts down the framework's backend.
Functions of `at_main_thread_end` run before all `atexit` functions, while other threads may still run. They also run
in `multiprocessing` workers, which run no `atexit` functions.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of

Call = Callable[[], object]


class HookOrder(IntEnum):
    """The order of hooks: ascending in parent and child after a fork, descending before a fork and at exit."""

    CUDA = 1
    """The list of CUDA contexts (`_devices.contexts`)."""
    PYCUDA = 2
    """Pops the CUDA contexts that `exchange.pycuda_context` pushed, after the hooks below have run."""
    EXPORTS = 3
    """Arrays shared with other processes."""
    LEASES = 4
    """The database of leases (GPU memory reserved by processes). A fork waits up to 0.1 s for this database's lock, and
    for no other lock."""
    RECORDER = 5
    """The recording of `memguard suggest` in a process without a budget."""
    BUDGET = 6
    """The budget in effect: the guard that applies it, the monitor, the timeline and extensions."""
    METRICS = 7
    ENDPOINTS = 8
    """The sockets through which other processes read this process's memory use and send requests."""
    IDLE_WATCHER = 9
    """The watcher that suspends the process while it is idle."""
    NOTEBOOK = 10
    """The state of notebook cells, which a forked child must not use."""
    SUSPENSION = 11
    """Resumes a suspended process at exit, before all other hooks run."""


class _ForkHook(NamedTuple):
    order: HookOrder
    before: Call | None = None
    parent: Call | None = None
    child: Call | None = None


class _ExitHook(NamedTuple):
    order: HookOrder
    call: Call


forks: list[_ForkHook] = []
exits: list[_ExitHook] = []
"""Exit hooks in the order in which they were added. `atexit` cannot list its functions."""
main_thread_ends: list[Call] = []


def at_fork(
    order: HookOrder, *, before: Call | None = None, parent: Call | None = None, child: Call | None = None
) -> None:
    """Add hooks for every later fork, including forks of a forked child: `before` runs before the fork, `parent` and
    `child` run after it in the parent and in the child."""
    forks.append(_ForkHook(order, before, parent, child))


def at_exit(order: HookOrder, call: Call) -> None:
    """Run `call` once at exit. A forked child inherits the hook, so `call` must be harmless in it."""
    global _registered
    exits.append(_ExitHook(order, call))
    before, _registered = _registered, _Exit()
    atexit.register(_registered)  # before unregistering the old one, so that an interruption cannot leave none
    if before is not None:
        atexit.unregister(before)


def not_at_exit(call: Call) -> None:
    """Remove the exit hook `call`. Does nothing if `call` was not added."""
    for one in [*exits]:
        if one.call == call:
            exits.remove(one)


def at_main_thread_end(call: Call) -> None:
    """Run `call` at the end of the main thread. `call` must be harmless in a forked child."""
    main_thread_ends.append(call)
    _register(os.getpid())


def not_at_main_thread_end(call: Call) -> None:
    while call in main_thread_ends:
        main_thread_ends.remove(call)


@functools.cache
def _register(pid: int) -> None:
    """Register `_main_thread_end` once per process. `threading._register_atexit` is private; if Python lacks it, only
    `atexit` hooks run."""
    register: Callable[[Call], None] | None = getattr(threading, "_register_atexit", None)
    if register is None:
        return
    try:
        register(_main_thread_end)
    except RuntimeError:  # the main thread has already ended
        return


def _main_thread_end() -> None:
    for call in list(main_thread_ends):
        try:
            call()
        except Exception as error:
            _log.debug("at the program's end: %s", text_of(error))


class _Exit:
    """The exit function. Each registration uses a new object, so that `atexit.unregister` removes only the old one."""

    def __call__(self) -> None:
        _run(iter(_next, None))


def _next() -> Call | None:
    """Remove and return the next exit hook; None if none is left. A running hook may add hooks."""
    if not exits:
        return None
    last = max(exits, key=attrgetter("order"))
    exits.remove(last)
    return last.call


def _before() -> None:
    _run([hook.before for hook in reversed(_in_order())])


def _in_parent() -> None:
    _run([hook.parent for hook in _in_order()])


def _in_child() -> None:
    _run([hook.child for hook in _in_order()])


def _in_order() -> list[_ForkHook]:
    return sorted(forks, key=attrgetter("order"))


def _run(calls: Iterable[Call | None]) -> None:
    """Run all hooks, even if some raise. Then print their exceptions to stderr, except the last, which is raised so
    that Python prints it."""
    failed: list[BaseException] = []
    for call in calls:
        try:
            if call is not None:
                call()
        except BaseException as error:
            failed.append(error)
    for one in failed[:-1]:
        sys.excepthook(type(one), one, one.__traceback__)
    if failed:
        raise failed[-1]


_registered: _Exit | None = None
if hasattr(os, "register_at_fork"):  # at import, before any thread can hold a lock
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
