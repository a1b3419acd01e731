"""What is lent: memory of one framework that another has views of, from hand-over until the last view is gone.

A loan keeps the lender's array alive. Its end comes from a destructor, on any thread, inside any allocation: so
nothing here takes a lock there, and nothing waits. Where the borrower's last work still runs then, the lender's
stream is made to wait for it; a lender without a stream gets its memory back a moment later, from a thread of its
own, and PyCUDA, whose memory must be freed where it was taken, on the thread that handed it over.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from memguard._devices import streams
from memguard._devices.streams import LEGACY, PER_THREAD, Mark
from memguard.errors import DeviceError
from memguard.exchange.view import View

_log = logging.getLogger("memguard")
_PATIENCE = 0.001
"""Seconds between two looks at work that has to end before memory goes back."""


class Offer(NamedTuple):
    """An array as its framework lends it: what it is, and what keeps the memory alive.

    stream   the lender's: memory that goes back is used next on it; None where it has none to tell
    context  that the memory belongs to, where it is not the GPU's primary one
    thread   the only one that may let go of `owner`; None for any
    done     whether its values are there already, so that nobody has to wait for them
    """

    lender: str
    view: View
    owner: Any
    stream: int | None = None
    context: int | None = None
    thread: int | None = None
    done: bool = False


class Loan:
    """One hand-over. `stream` is the borrower's, None where its work may be on any.

    `settles`: the borrower lets go only once its work is done (JAX; measured), so that nobody has to wait.
    `context`: the borrower's, where that is not the GPU's primary one.
    """

    __slots__ = ("borrower", "context", "offer", "settles", "stream")

    def __init__(
        self,
        offer: Offer,
        borrower: str,
        stream: int | None = None,
        settles: bool = False,
        context: int | None = None,
    ) -> None:
        self.offer, self.borrower, self.stream, self.settles = offer, borrower, stream, settles
        self.context = context

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # then this module's names may be gone
            self.end()

    def cancel(self) -> None:
        """Nobody has seen the memory: there is nothing to wait for."""
        _open.pop(id(self), None)

    def end(self) -> None:
        """The last view is gone. Any thread, any moment; a second call does nothing."""
        if _open.pop(id(self), None) is None:
            return
        mark = None
        if self.offer.view.device is not None and not self.settles:
            mark = _under_way(self.offer, self.stream, self.context)
        if mark is None and self.offer.thread in (None, threading.get_ident()):
            return  # the owner goes with the loan
        parked = _Parked(self.offer, mark)
        del self.offer
        _parked.append(parked)
        _sweeper.wake()


class _Parked:
    """Memory that cannot go back yet. Whoever looks at it holds this and not the offer: its owner goes on the thread
    that sets that to None.
    """

    __slots__ = ("mark", "offer", "thread")

    def __init__(self, offer: Offer, mark: Mark | None) -> None:
        self.offer: Offer | None = offer
        self.mark, self.thread = mark, offer.thread


class _Entry(NamedTuple):
    lender: str
    borrower: str
    view: View


kept: Counter[int] = Counter()
"""Bytes by GPU (CUDA's ordinal) that this process holds for other processes: no framework's row has them."""
_open: dict[int, _Entry] = {}
"""What is lent, without what keeps it alive."""
_parked: list[_Parked] = []


def begin(offer: Offer, borrower: str, stream: int | None, settles: bool = False, context: int | None = None) -> Loan:
    """A loan that lasts until its `end`, or until nothing refers to it any more."""
    loan = Loan(offer, borrower, stream, settles, context)
    _open[id(loan)] = _Entry(offer.lender, borrower, offer.view)
    if _parked:
        sweep()
    return loan


def sweep() -> None:
    """Let go of what is over: of this thread's, and of every thread's where that does not matter."""
    here = threading.get_ident()
    for _ in range(len(_parked)):
        try:
            parked = _parked.pop(0)
        except IndexError:  # another thread was faster
            return
        over = False
        try:
            over = parked.thread in (None, here) and (parked.mark is None or _passed(parked.mark))
        finally:
            if over:
                parked.offer = None
            else:
                _parked.append(parked)


def lent() -> dict[int, dict[str, dict[str, int]]]:
    """Bytes lent now by GPU (CUDA's ordinal), lender and borrower. What is lent twice counts once for each borrower."""
    found: dict[int, dict[str, dict[str, list[tuple[int, int]]]]] = {}
    for entry in list(_open.values()):
        view = entry.view
        if view.device is not None and view.size:
            lender = found.setdefault(view.device, {}).setdefault(entry.lender, {})
            lender.setdefault(entry.borrower, []).append(view.extent)
    return {
        device: {lender: {to: covered(parts) for to, parts in borrowers.items()} for lender, borrowers in rows.items()}
        for device, rows in found.items()
    }


def lent_by(lender: str, device: int) -> int:
    """Bytes of the lender's memory that others have views of, each byte once."""
    views = [entry.view for entry in list(_open.values()) if entry.lender == lender]
    return covered(view.extent for view in views if view.device == device and view.size)


def covered(parts: Iterable[tuple[int, int]]) -> int:
    """Bytes that lie in at least one of the ranges."""
    total, reached = 0, 0
    for first, behind in sorted(parts):
        total += max(behind - max(first, reached), 0)
        reached = max(reached, behind)
    return total


def _under_way(offer: Offer, stream: int | None, context: int | None = None) -> Mark | None:
    """What the borrower still does, where the lender has no stream that could be made to wait for it."""
    device = offer.view.device
    if device is None or not offer.view.size:
        return None
    stream = None if stream == PER_THREAD else stream  # another thread than this may have used it
    try:
        if any(known is not None and streams.capturing(device, known) for known in (stream, offer.stream)):
            return None  # neither may wait for the other; who replays the graph keeps what it was captured with
        if stream is not None and offer.stream is not None and (stream or LEGACY) == (offer.stream or LEGACY):
            return None  # what is next done with the memory comes after it anyway
        if offer.stream is None:
            mark = Mark(device, stream, context)
            return None if _passed(mark) else mark
        streams.follow(device, stream, offer.stream, context)
        if (offer.stream or LEGACY) != LEGACY:  # a caching allocator uses it next where it was allocated: mostly there,
            streams.follow(device, stream, LEGACY, context)  # whichever was current at the hand-over
        return None
    except DeviceError as error:
        _log.debug("exchange: %s", error)
    try:  # where nobody can be made to wait, it is looked at until it has passed
        mark = Mark(device, stream, context)
    except DeviceError:
        return None
    return None if _passed(mark) else mark


def _passed(mark: Mark) -> bool:
    """Closed once it is. An error counts as the end: the context is gone, and its memory with it."""
    try:
        if not mark.passed():
            return False
    except DeviceError as error:
        _log.debug("exchange: %s", error)
    mark.close()
    return True


class _Sweeper:
    """A daemon thread while something is parked that any thread may let go of."""

    def __init__(self) -> None:
        self._running = False

    def wake(self) -> None:
        if self._running or not any(parked.thread is None for parked in list(_parked)):
            return
        self._running = True
        try:  # a thread of `threading` takes locks to begin, which may be held where a destructor runs
            _thread.start_new_thread(self._begin, ())
        except RuntimeError:  # the interpreter is ending
            self._running = False

    def _begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="memguard-exchange", daemon=True).start()
        except RuntimeError:
            self._running = False

    def _run(self) -> None:
        try:
            while any(parked.thread is None for parked in list(_parked)):
                time.sleep(_PATIENCE)
                sweep()
        finally:
            self._running = False
        self.wake()  # what came meanwhile


_sweeper = _Sweeper()
