"""The cap of a pool that the driver cannot cap, the device's default pool: allocators check it before each request.

Another thread may allocate between the check and the allocation. So each request is registered as a claim before the
check, and counts for the other threads until it is allocated or refused. Requests take a lock only if two of them are
so close to the cap that one alone fits: then the lock makes them run one after the other.
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
    """Bytes that a thread is about to allocate. They count until `end`, or until this object dies.

    So an interruption leaks no claim.
    """

    _claims: dict[tuple[int, int], int] | None = None

    def __init__(self, claims: dict[tuple[int, int], int], size: int) -> None:
        self._key, self._claims = (threading.get_ident(), id(self)), claims
        claims[self._key] = size

    def end(self) -> None:
        """Remove the claim: the bytes are allocated by now, or were refused."""
        if self._claims is not None:
            self._claims.pop(self._key, None)

    def __del__(self) -> None:
        if self._claims is not None:
            self._claims.pop(self._key, None)


class PoolCap:
    """Limits a pool to `most` bytes in use, for allocators that call `take`. Any thread, also within finalizers.

    `used` reads the pool's bytes in use, including those of other allocators.
    """

    def __init__(self, used: Callable[[], int], most: int) -> None:
        self._used, self._most = used, most
        self._claims: dict[tuple[int, int], int] = {}
        self._turn = Turn()

    def take(self, size: int) -> Claim | None:
        """The right to allocate `size` bytes now; None if they exceed the cap. End the claim after the allocation."""
        claim = Claim(self._claims, size)
        # The order matters: another thread's allocation meanwhile is in one of the two figures, or in both.
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
        """Wait for the claims of other threads to end, where only these claims exceed the cap."""
        here, until = threading.get_ident(), time.monotonic() + _PATIENCE
        while True:
            claim = Claim(self._claims, size)
            claimed = sum(self._claims.values())
            used = self._used()
            if used + claimed <= self._most:
                return claim
            claim.end()
            mine = any(thread == here for thread, _ in list(self._claims))  # a finalizer interrupted that claim
            if used + size > self._most or mine or time.monotonic() >= until:
                return None
            time.sleep(_PAUSE)

    def forked(self) -> None:
        """In a forked child, drop the claims: the parent's threads do not exist there."""
        self._claims.clear()
        self._turn = Turn()
