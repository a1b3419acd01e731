"""Asks another process what it holds, or to trim and change a cap (`server`). What it answers is checked.

Every method raises SilentError if the process does not answer in time, and MemguardError if it refuses.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from memguard._base.logs import text_of
from memguard._base.units import MAX_SIZE, is_whole
from memguard._node.identity import Process
from memguard._node.suspend import sockets
from memguard._node.suspend.requests import SilentError
from memguard._node.suspend.store import records
from memguard._node.top.server import KIND, VERSION
from memguard._node.top.snapshot import EVENTS, Forecast, Gpu, Part, Request, Said, Share, State, Target
from memguard.errors import MemguardError
from memguard.exchange.ipc import wire

PATIENCE = 1.0
"""Seconds in which an answer must come: a reading takes milliseconds, and the screen waits for it."""
MOST = 1 << 20
"""Characters of a snapshot at most."""
_NAME = re.compile(KIND + r"-([0-9]{1,10})-([0-9]{1,19})", re.ASCII)
_LONGEST = 1000
"""Characters of a text."""


def listening(where: str | None = None) -> list[Process]:
    """The processes of this user that have a socket for it; some may have ended."""
    found = dict[Process, None]()
    for place in [where] if where is not None else records.folders():
        for name in sorted(os.listdir(place)):
            if (match := _NAME.fullmatch(name)) is not None:
                found[Process(int(match[1]), int(match[2]))] = None
    return list(found)


def snapshot(process: Process, where: str | None = None) -> tuple[Target, tuple[Gpu, ...]]:
    try:
        with sockets.connected(KIND, process, where) as connection:
            text, left, op = "", 1, "snapshot"
            while left:
                wire.send(connection, {"memguard": VERSION, "op": op})
                answer = _answer(sockets.received(connection, PATIENCE), {"text", "left"})
                if not isinstance(answer["text"], str) or not is_whole(answer["left"]) or not answer["text"]:
                    raise wire.BadMessage("a piece is malformed")
                text, left, op = text + answer["text"], answer["left"], "more"
                if len(text) > MOST:
                    raise wire.BadMessage("it is too long")
        return _read(text, process)
    except (OSError, EOFError, wire.BadMessage) as error:
        raise _silent(process, error) from None


def trim(process: Process, framework: str | None, where: str | None = None) -> int:
    """The number of the request: the answer comes in a later snapshot."""
    return _ask(process, {"op": "trim", "framework": framework}, where)


def resize(process: Process, framework: str, cap: int, where: str | None = None) -> int:
    """As `trim`; `cap` in bytes."""
    return _ask(process, {"op": "resize", "framework": framework, "bytes": cap}, where)


def _ask(process: Process, message: Mapping[str, Any], where: str | None) -> int:
    try:
        with sockets.connected(KIND, process, where) as connection:
            wire.send(connection, {"memguard": VERSION, **message})
            answer = _answer(sockets.received(connection, PATIENCE), {"number"})
        if not is_whole(answer["number"]):
            raise wire.BadMessage("its number is malformed")
        return int(answer["number"])
    except (OSError, EOFError, wire.BadMessage) as error:
        raise _silent(process, error) from None


def _silent(process: Process, error: BaseException) -> SilentError:
    return SilentError(f"process {process.pid} does not answer: {text_of(error)}")


def _answer(message: Mapping[str, Any], fields: set[str]) -> Mapping[str, Any]:
    if message.get("memguard") == VERSION and message.get("done") is False and isinstance(message.get("text"), str):
        reason, fix = message.get("reason"), message.get("fix")
        if isinstance(reason, str) and isinstance(fix, str):
            raise MemguardError(reason[:_LONGEST], fix=fix[:_LONGEST])
        raise MemguardError(message["text"][:_LONGEST])
    if message.get("memguard") != VERSION or message.get("done") is not True or not fields <= set(message):
        raise wire.BadMessage("it is not an answer")
    return message


# The snapshot, checked: every figure a whole number or null, every text short.


def _read(text: str, process: Process) -> tuple[Target, tuple[Gpu, ...]]:
    try:
        said = json.loads(text)
        return _target(said["target"], process), tuple(_gpu(one) for one in said["gpus"][:64])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wire.BadMessage(f"its snapshot is malformed: {text_of(error)}") from None


def _target(said: Mapping[str, Any], process: Process) -> Target:
    if said["state"] not in get_args(State):
        raise ValueError("its state is unknown")
    return Target(
        key=f"{process.pid}-{process.start}",
        name=_words(said["name"]),
        pid=process.pid,  # as the kernel says, and not the peer
        state=said["state"],
        read=_maybe(_time, said["read"]),
        since=_maybe(_time, said["since"]),
        simulated=said["simulated"] is True,
        shares=tuple(_share(one) for one in said["shares"][:64]),
        events=tuple(
            Said(_time(one["time"]), _words(one["kind"]), _words(one["text"]), _maybe(_words, one["level"]))
            for one in said["events"][-EVENTS:]
        ),
        requests=tuple(_request(one) for one in said["requests"][-64:]),
        notes=tuple(_words(one) for one in said["notes"][:20]),
    )


def _share(said: Mapping[str, Any]) -> Share:
    return Share(
        _words(said["uuid"]),
        _size(said["process"]),
        _size(said["limit"]),
        _size(said["overhead"]),
        _size(said["unaccounted"]),
        frameworks=tuple(_part(one) for one in said["frameworks"][:64]),
        level=_maybe(_words, said["level"]),
        forecasts=tuple(Forecast(_maybe(_words, one["framework"]), _time(one["at"])) for one in said["forecasts"][:64]),
        suspended=_size(said["suspended"]),
    )


def _part(said: Mapping[str, Any]) -> Part:
    sizes = {key: _size(said[key]) for key in ("held", "in_use", "reclaimable", "cap", "at_least")}
    level, enforcement = _maybe(_words, said["level"]), _maybe(_words, said["enforcement"])
    return Part(_words(said["name"]), level=level, enforcement=enforcement, **sizes)


def _request(said: Mapping[str, Any]) -> Request:
    if said["state"] not in ("waiting", "done", "failed") or not is_whole(said["number"]):
        raise ValueError("a request is malformed")
    return Request(said["number"], _words(said["what"]), said["state"], _words(said["answer"]))


def _gpu(said: Mapping[str, Any]) -> Gpu:
    total, index = _size(said["total"]), _size(said["index"])
    if total is None:
        raise ValueError("a GPU without a total")
    sizes = {key: _size(said[key]) for key in ("used", "free", "others", "reserved")}
    return Gpu(
        _words(said["uuid"]),
        index,
        _words(said["name"]),
        total,
        sizes["used"],
        sizes["free"],
        sizes["others"],
        sizes["reserved"],
        said["unified"] is True,
        said["simulated"] is True,
    )


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is missing")
    return value[:_LONGEST]


def _size(value: object) -> int | None:
    """`unaccounted` may be negative."""
    if value is None:
        return None
    if type(value) is not int or abs(value) > MAX_SIZE:
        raise ValueError("a size is malformed")
    return value


def _time(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e11:  # type: ignore[arg-type, operator]
        raise ValueError("a time is malformed")
    return float(value)  # type: ignore[arg-type]


def _maybe(read: Callable[[object], Any], value: object) -> Any:
    return None if value is None else read(value)
