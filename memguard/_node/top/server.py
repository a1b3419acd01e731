"""A process lets others of its user watch it, and ask it to trim or to change a cap: `serve`.

One message asks, one answers (`_node.suspend.sockets`); a snapshot is longer than a message, and comes in pieces:

    {"memguard": 1, "op": "snapshot"}    {"memguard": 1, "done": true, "text": "{…", "left": 2}
    {"memguard": 1, "op": "more"}        {"memguard": 1, "done": true, "text": "…", "left": 1}
    {"memguard": 1, "op": "trim", "framework": "torch"}                  {"memguard": 1, "done": true, "number": 3}
    {"memguard": 1, "op": "resize", "framework": "torch", "bytes": 4096} {"memguard": 1, "done": false, "text": "…"}

A snapshot is read on the listener's thread. What is asked waits for `Served.checkpoint`, on a thread of the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event
from memguard._base.undo import Undo
from memguard._base.units import format_size, is_whole
from memguard._devices import contexts, suspension
from memguard._ledger.types import DeviceLedger, Row
from memguard._node.identity import folder, this_process
from memguard._node.suspend import sockets
from memguard._node.top.requests import Requests
from memguard._node.top.snapshot import Gpu, Part, Share, Target
from memguard._node.top.state import Story
from memguard._runtime.callbacks import Watch
from memguard._runtime.extensions import Extension
from memguard._runtime.session import event_callbacks, on_monitor
from memguard.errors import MemguardError
from memguard.exchange.ipc import wire

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._guard.guard import Guard
    from memguard._runtime.extensions import SessionContext

VERSION = 1
KIND = "top"
"""How the socket's name begins."""
PIECE = 6000
"""Characters of a snapshot in one message: with every quote escaped it still fits (`wire.LIMIT`)."""
_TEXT, _PART = 1000, 800
"""Characters of a refusal, and of its reason and fix: in JSON each takes up to 6 bytes of a message's 16 KiB."""


class Served:
    """A guard that others may watch, until `end`.

    `whole`: it is served from the budget's beginning, so that a framework of whose pressure nothing was told is `ok`.
    `asked` is called, on a thread of the listener's, whenever something waits for `checkpoint`.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        whole: bool = False,
        where: str | None = None,
        asked: Callable[[], object] = lambda: None,
    ) -> None:
        self._guard, self._process, self._pid = guard, this_process(), os.getpid()
        self._story = Story(guard.plan, whole=whole and guard.budget.monitor is not None)
        self._watch = Watch(self._story.add, event_callbacks)
        self._requests, self._undo, self._wake = Requests(), Undo(), asked
        self._name = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        self._live: float | None = time.time()
        """When it came to be live, as far as it was looked at; None while it was last seen suspended."""
        self.path = sockets.path_of(KIND, self._process, where or folder())

    def begin(self) -> None:
        """Raises OSError."""
        listening = sockets.Listening(self._serve, self.path, "memguard-top")
        try:
            self._undo.add("the events for memguard top", self._watch.remove)
            event_callbacks.append(self._watch)
            self._undo.add("the socket that was to be the one for memguard top", self._forget_new)
            self._undo.add("the listener for memguard top", listening.end)
            listening.begin()
        except BaseException:
            self._undo.run()
            raise

    def end(self) -> None:
        """Nobody is served from now on. May be called again, and in a forked child."""
        self._undo.run()

    def _forget_new(self) -> None:
        """What `Listening.begin` leaves if it is interrupted before its socket has its name."""
        if os.getpid() == self._pid:
            where, name = os.path.split(self.path)
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(where, f"new-{name}"))

    @property
    def waiting(self) -> bool:
        """Whether others have asked for something that is not done."""
        return self._requests.waiting

    def checkpoint(self) -> None:
        """Do what others have asked for, on this thread: not on the monitor's, and not while the process is suspended.

        It costs next to nothing while nobody has asked.
        """
        if self._requests.waiting and suspension.now is None and not on_monitor():
            self._requests.perform()

    # the listener's threads

    def _serve(self, connection: socket.socket, pid: int) -> None:
        message = sockets.received(connection)
        op = _op(message)
        if op == "more":
            raise wire.BadMessage("there is no snapshot of which there could be more")
        if op != "snapshot":
            _send(connection, self._asked(op, message, pid))
            return
        try:
            text = self._snapshot()
        except MemguardError as error:
            _send(connection, _refusal(error))
            return
        while True:
            piece, text = text[:PIECE], text[PIECE:]
            _send(connection, {"done": True, "text": piece, "left": -(-len(text) // PIECE)})
            if not text:
                return
            if _op(sockets.received(connection)) != "more":
                raise wire.BadMessage("there is more of the snapshot")

    def _snapshot(self) -> str:
        if suspension.now is None:  # else the guard answers from its last reading, and asks no driver
            contexts.relax()
        target, gpus = self.target()
        return json.dumps({"target": asdict(target), "gpus": [asdict(gpu) for gpu in gpus]})

    def target(self) -> tuple[Target, tuple[Gpu, ...]]:
        """What it tells of itself now. Raises MemguardError."""
        ledger, now = self._guard.ledger(), time.time()
        off = suspension.now
        away = any(part.suspended is not None for part in ledger.devices)
        self._live = None if away else self._live or now
        target = Target(
            key=f"{self._process.pid}-{self._process.start}",
            name=self._name,
            pid=self._process.pid,
            state="suspended" if away else "live",
            read=ledger.time,
            since=off.since if away and off is not None else self._live or now,
            simulated=ledger.simulated,
            shares=tuple(self._share(part, now) for part in ledger.devices),
            events=tuple(self._story.events.copy()),
            requests=self._requests.seen(),
            notes=ledger.notes,
        )
        return target, tuple(_gpu(part) for part in ledger.devices)

    def _share(self, part: DeviceLedger, now: float) -> Share:
        uuid, story = part.device.uuid, self._story
        frameworks = tuple(_part(row, story.level(uuid, row.name)) for row in part.rows if row.kind == "framework")
        return Share(
            uuid, part.process, part.limit, _sum(part, "overhead"), _sum(part, "unaccounted"), frameworks,
            story.level(uuid, None), story.forecast_on(uuid, now), part.suspended,
        )  # fmt: skip

    def _asked(self, op: str, message: Mapping[str, Any], pid: int) -> dict[str, Any]:
        framework = message["framework"]
        try:
            if framework is not None and framework not in self._guard.frameworks:
                raise MemguardError(f"{framework!r} is not in the budget of process {self._process.pid}")
            if op == "trim":
                what = f"trim {framework or 'all frameworks'}"
                number = self._requests.add(what, lambda: self._trim(framework, pid))
            else:
                if any(framework in part.elastic for part in self._guard.plan.devices):  # as `ElasticCaps.resize`
                    raise MemguardError(
                        f"{framework}'s cap cannot be changed: its share is elastic, and moves between min and max",
                        fix=f"change frameworks.{framework}.min or .max in the budget",
                    )
                cap = message["bytes"]
                what = f"cap of {framework} to {format_size(cap)}"
                number = self._requests.add(what, lambda: self._resize(framework, cap, pid))
        except MemguardError as error:
            return _refusal(error)
        self._wake()
        _log.info("process %d asks: %s; it is done at the next checkpoint", pid, what)
        return {"done": True, "number": number}

    # the program's threads

    def _trim(self, framework: str | None, pid: int) -> str:
        returned = self._guard.trim(cast("CacheName | None", framework))
        text = f"{format_size(returned)} went back to the driver"
        self._tell(
            "trim", f"trimmed {framework or 'all frameworks'}, as process {pid} asked: {text}", framework, returned
        )
        return text

    def _resize(self, framework: str, cap: int, pid: int) -> str:
        self._guard.resize(cast("FrameworkName", framework), cap)
        text = f"its cap is {format_size(cap)}"
        self._tell("note", f"{framework}: {text}, as process {pid} asked", framework, cap)
        return text

    def _tell(self, kind: str, text: str, framework: str | None, size: int) -> None:
        _log.info("%s", text)
        self._guard.caps.announce(Event(time.time(), kind, text, framework=framework, bytes=size))


class Top(Extension):
    """A budget that `memguard top` may watch: what it asks for is done at the program's checkpoints."""

    before_monitor = True
    _served: Served | None = None

    def start(self, session: SessionContext) -> None:
        self._served = of_budget(session.guard, session.undo, session.wake)

    def checkpoint(self) -> None:
        if self._served is not None:
            self._served.checkpoint()

    @property
    def waiting(self) -> bool:
        return self._served is not None and self._served.waiting

    def forked(self) -> None:
        if self._served is not None:
            self._served.end()

    at_exit = forked


def serve(guard: Guard, *, whole: bool = False, where: str | None = None) -> Served:
    """Let other processes of this user watch the guard, and ask it to trim and to change caps.

    Raises OSError; MemguardError if the user's folder is not safe. Call `checkpoint` of what it returns wherever the
    program may trim, and `end` at the budget's end and in a forked child.
    """
    served = Served(guard, whole=whole, where=where)
    served.begin()
    return served


def of_budget(guard: Guard, undo: Undo, asked: Callable[[], object]) -> Served | None:
    """Let `memguard top` watch a budget that begins here, and `undo` it. What prevents that is only logged.

    `asked` as for `Served`.
    """
    try:
        served = Served(guard, whole=True, asked=asked)
        undo.add("the socket for memguard top", served.end)
        served.begin()
    except (OSError, MemguardError) as error:
        _log.warning("memguard top cannot watch this process: %s", text_of(error))
        return None
    return served


def _refusal(error: MemguardError) -> dict[str, Any]:
    """`text` is for peers that do not know its parts."""
    reason, fix = error.advice.reason[:_PART], error.advice.fix[:_PART]
    return {"done": False, "text": str(error)[:_TEXT], "reason": reason, "fix": fix}


def _send(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.settimeout(sockets.REQUEST)
    wire.send(connection, {"memguard": VERSION, **answer})


def _op(message: Mapping[str, Any]) -> str:
    """Raises BadMessage for what is no request."""
    op, framework = message.get("op"), message.get("framework")
    fields = {"snapshot": set[str](), "more": set[str](), "trim": {"framework"}, "resize": {"framework", "bytes"}}
    known = isinstance(op, str) and op in fields and set(message) == {"memguard", "op", *fields[op]}
    named = isinstance(framework, str) and len(framework) <= 100
    if not known or message.get("memguard") != VERSION or not (named or (framework is None and op != "resize")):
        raise wire.BadMessage("it is not a request")
    if op == "resize" and not is_whole(message["bytes"]):
        raise wire.BadMessage("its size is malformed")
    return str(op)


def _part(row: Row, level: str | None) -> Part:
    held = None if row.at_least is not None else row.bytes
    return Part(row.name, held, row.in_use, row.reclaimable, row.cap, row.at_least, level, row.enforcement or None)


def _sum(part: DeviceLedger, kind: str) -> int | None:
    sizes = [row.bytes for row in part.rows if row.kind == kind]
    return sum(size or 0 for size in sizes) if any(size is not None for size in sizes) else None


def _gpu(part: DeviceLedger) -> Gpu:
    device, sizes = part.device, {row.kind: row.bytes for row in part.rows}
    free, others = sizes.get("free"), sizes.get("other processes")
    used = None if others is None or part.process is None else others + part.process
    return Gpu(
        device.uuid, device.index, device.name, device.total, used, free, others, sizes.get("driver reserve"),
        device.unified, device.simulated,
    )  # fmt: skip
