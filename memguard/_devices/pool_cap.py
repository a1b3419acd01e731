"""The cap of a pool that the driver cannot cap: who allocates there asks first. For the device's default pool.

Between a look at what is in use and the allocation another thread may allocate. So each request is announced before
the look, and counts for the others until it is in use or refused. No lock is taken unless two of them are so close to
the cap that only one fits: then they go one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memguard._base.locks import Turn

_PATIENCE = 2.0
"""Seconds to wait for the allocations of other threads, which take microseconds, before a request is refused."""
_PAUSE = 0.0005


class Claim:
    """Bytes that are about to be allocated. They count until `end`, or until this dies: an interruption loses none."""

    _claims: dict[tuple[int, int], int] | None = None

    def __init__(self, claims: dict[tuple[int, int], int], size: int) -> None:
        self._key, self._claims = (threading.get_ident(), id(self)), claims
        claims[self._key] = size

    def end(self) -> None:
        """It is in use by now, or was refused."""
        if self._claims is not None:
            self._claims.pop(self._key, None)

    def __del__(self) -> None:
        if self._claims is not None:
            self._claims.pop(self._key, None)


class PoolCap:
    """At most `most` bytes in use of one pool, by those who ask. Any thread, also within finalizers.

    `used` reads what is in use, in bytes, whoever uses it.
    """

    def __init__(self, used: Callable[[], int], most: int) -> None:
        self._used, self._most = used, most
        self._claims: dict[tuple[int, int], int] = {}
        self._turn = Turn()

    def take(self, size: int) -> Claim | None:
        """The right to allocate so many bytes now; None if they do not fit. End it after the allocation."""
        claim = Claim(self._claims, size)
        # In this order: what another thread allocates meanwhile is in one of the two figures, or in both.
        claimed = sum(self._claims.values())
        used = self._used()
        if used + claimed <= self._most:
            return claim
        claim.end()
        if used + size > self._most or self._turn.mine:
            return None
        found = self._turn.take(self._after_others, _PATIENCE, size)
        return None if found is None else found[0]

    def _after_others(self, size: int) -> Claim | None:
        """It would fit, but for what other threads are about to allocate: it is seen in a moment whether they do."""
        here, until = threading.get_ident(), time.monotonic() + _PATIENCE
        while True:
            claim = Claim(self._claims, size)
            claimed = sum(self._claims.values())
            used = self._used()
            if used + claimed <= self._most:
                return claim
            claim.end()
            mine = any(thread == here for thread, _ in list(self._claims))  # this is a finalizer within one of them
            if used + size > self._most or mine or time.monotonic() >= until:
                return None
            time.sleep(_PAUSE)

    def forked(self) -> None:
        """In a forked child: no thread of the parent's goes on."""
        self._claims.clear()
        self._turn = Turn()
