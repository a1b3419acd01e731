"""Sessions with arenas: one cap, divided among them.

Each session is limited to what it holds and an equal part of what is left of the cap, so together they cannot pass it.
One that is about to refuse gets all that is left, and what the others hold without need. It is divided anew when a
session begins or closes, at a trim and at a resize. A limit that the user gave a session stays, if it is the smaller.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from memguard._frameworks.arenas.spec import SPEC

from memguard._base.types import Applied, Device, Enforcement, Usage
from memguard._base.undo import Undo
from memguard._devices.host import Host
from memguard._frameworks.base import Framework


class Arenas(Framework):
    """Every session of the process, on its first GPU."""

    spec = SPEC

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._own: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        """The open sessions, each with the limit that the user gave it."""
        self._cap = 0

    def _live(self, module: ModuleType) -> bool:
        return bool(self._own)

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        arenas: Any = sys.modules["arenas"]
        kind = arenas.Session
        uuid, self._cap = next(iter(caps.items()))
        begun, ran, closed = kind.__init__, kind.run, kind.close

        @functools.wraps(begun)
        def begin(session: Any, limit: int | None = None) -> None:
            begun(session, limit)
            self._own[session] = limit
            self._divide()

        @functools.wraps(ran)
        def run(session: Any, size: int) -> Any:
            try:
                return ran(session, size)
            except arenas.Full:
                self._give_all(session)
            try:
                return ran(session, size)
            except arenas.Full as error:
                self._report_refusal(error, uuid, size)
                raise

        @functools.wraps(closed)
        def close(session: Any) -> None:
            closed(session)
            session.limit = self._own.pop(session, session.limit)
            self._divide()

        def restore() -> None:
            kind.__init__, kind.run, kind.close = begun, ran, closed
            for session, limit in list(self._own.items()):
                session.limit = limit

        undo.add(self.name, restore)
        kind.__init__, kind.run, kind.close = begin, run, close
        return Applied(Enforcement.ENFORCED)

    def _divide(self) -> None:
        left = max(self._cap - sum(one.held for one in self._own), 0)
        for one in list(self._own):
            self._limit(one, one.held + left // len(self._own))

    def _give_all(self, asking: Any) -> None:
        others = [one for one in self._own if one is not asking]
        for one in others:
            one.shrink()
            self._limit(one, one.held)
        self._limit(asking, max(self._cap - sum(one.held for one in others), asking.held))

    def _limit(self, session: Any, part: int) -> None:
        own = self._own[session]
        session.limit = part if own is None else min(own, part)

    def usage(self, device: Device) -> Usage | None:
        if not self._own:
            return None
        held, used = sum(one.held for one in self._own), sum(one.used for one in self._own)
        return Usage(held, used, held - used)

    def trim(self, device: Device) -> None:
        for one in list(self._own):
            one.shrink()
        self._divide()

    def resize(self, caps: Mapping[str, int]) -> None:
        self._cap = next(iter(caps.values()))
        self._divide()
