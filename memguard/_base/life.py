"""What memguard does at a fork and at the exit of the program: one list of each, in the order of `Rank`.

Only this module registers with `os.register_at_fork` and `atexit`. It lies in the lowest room because each room has
something to register; what runs is added by its own module, once it has something to renew or to end.

Exit functions of `atexit` run last first, those of frameworks among them. So `_exit` is registered again with each
addition: it runs before the exit functions of every framework that was there by then.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

Call = Callable[[], object]


class Rank(IntEnum):
    """Lower rooms first. A forked child renews what is below before what uses it; an exit ends what is above first."""

    CUDA = 1
    """Which contexts there are (`_devices.contexts`)."""
    PYCUDA = 2
    """The contexts that `exchange.pycuda_context` pushed: popped last."""
    EXPORTS = 3
    """Arrays shared with other processes."""
    LEASES = 4
    """The database of leases: the one lock that a fork waits for."""
    RECORDER = 5
    """`memguard suggest`: a recording without a budget."""
    BUDGET = 6
    """The budget in effect: its guard, monitor, timeline and extensions."""
    METRICS = 7
    TOLD = 8
    """What other processes know of this one, and may ask it."""
    IDLE = 9
    """The watch for idleness."""
    CELLS = 10
    """A notebook's cells."""
    CLAIMS = 11
    """Files that say who suspends whom."""
    SUSPENSION = 12
    """An exit brings the process back on its GPUs before all else ends."""


class _Hook(NamedTuple):
    rank: Rank
    before: Call | None = None
    parent: Call | None = None
    child: Call | None = None


class _Last(NamedTuple):
    rank: Rank
    call: Call


forks: list[_Hook] = []
exits: list[_Last] = []
"""As they were added. `atexit` does not tell what is registered: this does."""


def at_fork(rank: Rank, *, before: Call | None = None, parent: Call | None = None, child: Call | None = None) -> None:
    """At each fork from now on, also of a forked child: before it, after it in the parent, after it in the child."""
    forks.append(_Hook(rank, before, parent, child))


def at_exit(rank: Rank, call: Call) -> None:
    """Once, when the program ends. A forked child inherits it: there `call` must be harmless."""
    global _registered
    exits.append(_Last(rank, call))
    before, _registered = _registered, _Exit()
    atexit.register(_registered)  # first: an interruption leaves two rather than none
    if before is not None:
        atexit.unregister(before)


def not_at_exit(call: Call) -> None:
    """It is over already. Nothing happens if it is not there."""
    for one in [*exits]:
        if one.call == call:
            exits.remove(one)


class _Exit:
    """A new one for each registration, so that the one before can be told from it."""

    def __call__(self) -> None:
        _run(iter(_next, None))


def _next() -> Call | None:
    """The exit function that comes now; None if none is left. One may add another."""
    if not exits:
        return None
    last = max(exits, key=attrgetter("rank"))
    exits.remove(last)
    return last.call


def _before() -> None:
    _run([hook.before for hook in reversed(_in_order())])


def _in_parent() -> None:
    _run([hook.parent for hook in _in_order()])


def _in_child() -> None:
    _run([hook.child for hook in _in_order()])


def _in_order() -> list[_Hook]:
    return sorted(forks, key=attrgetter("rank"))


def _run(calls: Iterable[Call | None]) -> None:
    """All of them. What one raises is written to stderr, by Python if it is the last to fail."""
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
if hasattr(os, "register_at_fork"):  # at import, so that it is registered before anybody holds a lock
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
