"""Other processes of this user may ask this one to suspend itself, if its budget says `suspend: {by_others: true}`.

At its socket (`sockets`) one short message is a request (`requests`), one is the answer:

    {"memguard": 1, "op": "suspend"}    {"memguard": 1, "done": true, "bytes": {…}, "seconds": 0.7}
    {"memguard": 1, "op": "leave"}      the same, for one that waits for its lease: only if it has nothing to do
    {"memguard": 1, "op": "state"}      {"memguard": 1, "done": true, "step": "running"}
                                        {"memguard": 1, "done": false, "text": "why not, and what to do"}

The thread that listens makes no call of CUDA or NVML, so it lives on while the process is off its GPUs. It ends with
the budget. A forked child has none of it.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.undo import Undo
from memguard._node.identity import folder, this_process
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend import sockets
from memguard._node.suspend.requests import REASON, TEXT, VERSION, path_of
from memguard._node.suspend.store import records
from memguard._node.suspend.types import TIMEOUT, HostMemory, Suspension
from memguard._runtime.extensions import Extension
from memguard.errors import MemguardError, Suspended
from memguard.exchange.ipc import wire

if TYPE_CHECKING:
    from memguard._runtime.extensions import SessionContext

_OPS = ("suspend", "leave", "state")
_NOT = {
    "suspend": "its budget does not allow it, or its GPUs are simulated, and hold no memory",
    "leave": "its budget does not let it leave its GPUs for those that wait for its lease",
}
_FOR = {"leave": ", as it waits for its lease"}
Ask = Callable[[], Suspension]


class Listener:
    """What this process answers at its socket. `asks` has what it does, by `op`."""

    def __init__(self, asks: Mapping[str, Ask], path: str) -> None:
        self._asks = asks
        self._socket = sockets.Listening(self._serve, path)
        self.begin, self.end = self._socket.begin, self._socket.end

    def _serve(self, connection: socket.socket, pid: int) -> None:
        op = _op(sockets.received(connection))
        if sockets.left(connection):  # while this process was stopped: nobody waits for it any more
            _log.info("process %d asked for `%s` and has gone: nothing is done", pid, op)
            return
        answer = self._answer(op, pid)
        connection.settimeout(sockets.REQUEST)
        wire.send(connection, {"memguard": VERSION, **answer})

    def _answer(self, op: str, pid: int) -> dict[str, Any]:
        if op == "state":
            return {"done": True, "step": _step()}
        ask = self._asks.get(op)
        if ask is None:
            return {"done": False, "text": _NOT[op], "suspended": False}
        _log.info("process %d asks this process to suspend itself%s", pid, _FOR.get(op, ""))
        try:
            found = ask()
        except MemguardError as error:
            already = isinstance(error, Suspended)
            text, reason = str(error)[:TEXT], error.advice.reason[:REASON]
            return {"done": False, "text": text, "reason": reason, "suspended": already}
        except BaseException as error:
            _log.warning("the process could not suspend itself: %s", text_of(error))
            return {"done": False, "text": text_of(error)[:TEXT], "suspended": False}
        return {"done": True, "bytes": dict(found.bytes), "seconds": float(found.seconds)}


def _step() -> str:
    """What this process knows of itself, without asking the driver."""
    from memguard._devices import suspension

    return "running" if suspension.now is None else "suspended"


def _op(message: Mapping[str, Any]) -> str:
    op = message.get("op")
    if message.get("memguard") != VERSION or set(message) != {"memguard", "op"} or op not in _OPS:
        raise wire.BadMessage("it is not a request")
    return str(op)


_active: list[Undo] = []


def start(ask: Ask | None, budget: str = "", simulated: bool = False, leave: Ask | None = None) -> Undo:
    """Let other processes know that this one runs under a budget, called `budget`, and suspend it through `ask`.

    `ask` suspends this process and raises MemguardError if it cannot; it is called on a thread of the listener's. None:
    nobody may. `leave` is the same for one that waits for this one's lease. Returns what ends it. Raises OSError, or
    MemguardError if the user's folder is not safe.
    """
    _prepare()
    undo, process, where = Undo(), this_process(), folder()
    pid = os.getpid()

    def forget() -> None:
        if undo in _active:
            _active.remove(undo)
        if os.getpid() == pid:
            records.remove_budget(process)

    try:
        _active.append(undo)
        undo.add("the note that it runs under a budget", forget)
        asks = {op: do for op, do in (("suspend", ask), ("leave", leave)) if do is not None}
        if asks:
            listener = Listener(asks, path_of(process, where))
            undo.add("the listener for other processes", listener.end)
            listener.begin()
        records.write_budget(Budgeted(process, budget, ask is not None, simulated))
    except BaseException:
        undo.run()
        raise
    return undo


class Reachable(Extension):
    """`memguard ps` shows the budget, and `memguard suspend PID` asks this process, if the budget allows it."""

    def start(self, session: SessionContext) -> None:
        budget, suspend = session.guard.budget, session.guard.budget.suspend
        assert suspend is not None
        leased = session.lease is not None and suspend.on_demand is not None
        if session.guard.host.simulated:
            of_simulated(budget.source, session.undo, leased)
        else:
            of_budget(budget.source, suspend.by_others, suspend.host_memory, session.undo, leased)


def of_budget(source: str, by_others: bool, host_memory: HostMemory, undo: Undo, lease: bool = False) -> None:
    """Tell other processes of a budget that begins here, and `undo` it. What prevents that is only logged.

    `lease`: it has one, and leaves its GPUs for those that wait for it.
    """
    ask = functools.partial(_suspend, host_memory == "ignore") if by_others else None
    try:
        started = start(ask, os.path.basename(source) or "budget", leave=_leave if lease else None)
    except (OSError, MemguardError) as error:
        log = _log.warning if by_others or lease else _log.debug
        log("other processes cannot see this budget, nor suspend this process: %s", text_of(error))
        return
    undo.add("the note for other processes", started.run)


def of_simulated(source: str, undo: Undo, lease: bool = False) -> None:
    """As `of_budget`, on simulated GPUs: others hear that nothing is there to be suspended from outside.

    `lease` as there, on simulated GPUs too.
    """
    try:
        started = start(None, os.path.basename(source) or "budget", True, _leave if lease else None)
        undo.add("the note for other processes", started.run)
    except (OSError, MemguardError) as error:
        _log.debug("other processes cannot see this budget: %s", text_of(error))


def _suspend(ignore_host_memory: bool) -> Suspension:
    from memguard._node.suspend import self_suspend
    from memguard._node.suspend.triggers import notebook_cells

    return self_suspend.suspend(TIMEOUT, "by_others", notebook_cells.owner(), ignore_host_memory)


def _leave() -> Suspension:
    from memguard._node.suspend.triggers import for_lease

    return for_lease.leave()


@functools.cache
def _prepare() -> None:
    life.at_exit(life.HookOrder.ENDPOINTS, _end)
    life.at_fork(life.HookOrder.ENDPOINTS, child=_end)


def _end() -> None:
    """At the exit, and in a forked child, where only the child's copies are closed."""
    for undo in tuple(_active):
        undo.run()
