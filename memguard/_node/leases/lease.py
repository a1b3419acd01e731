"""A lease: claimed, waited for, held, given back.

A lease is made first and takes nothing. `take` claims, and waits by looking again: so a Ctrl-C ends the wait, and
nobody has to be alive for another's turn. What has interrupted it, `close` takes back, and may be called again.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._devices import proc
from memguard._node.identity import machine, this_process
from memguard._node.leases import decide, locks, said, store
from memguard._node.leases.decide import Want
from memguard._node.leases.folders import folder
from memguard._node.leases.locks import File
from memguard._node.leases.store import BusyDatabaseError, Store, UnusableDatabaseError
from memguard._node.leases.types import Claim, Part, State, parts_of
from memguard._node.leases.wakeups import WakeupFifo
from memguard.errors import LeaseRefused, MemguardError, NotActive

if TYPE_CHECKING:
    from sqlite3 import Connection

    from memguard._base.types import Plan

LOOK = (0.05, 0.2)
"""The least and the most seconds between two polls of the first waiting claim; random, so that processes do not poll at
once. The others are woken (`wakeups`), and poll the more seldom the more claims are before theirs."""
AGAIN = 30.0
"""Seconds after which it is said again who holds what."""
_END = 2.0
"""Seconds in which the database must be had at the end. Without its byte a claim counts no more anyway."""
_LONGEST = 200
"""Characters of a command or a budget's name."""
Say = Callable[[str], object]
Look = Callable[[list[Claim]], object]
"""Told what was claimed by whom at the last poll, after each poll and about twice a second in between."""


def of_plan(plan: Plan, source: str, before: Lease | None = None, leaves: float | None = None) -> Lease:
    """The lease of a budget in that file: its limit of each GPU. Nothing is claimed yet."""
    return BudgetLease(parts_of(plan), os.path.basename(source) or "budget", before, leaves)


class Claimer(NamedTuple):
    """Who claims, as others read it."""

    pid: int
    start: int
    machine: str
    command: str
    budget: str
    leaves: float | None = None


def claimer(budget: str, leaves: float | None = None) -> Claimer:
    process = this_process()
    command = proc.command(process.pid)[:_LONGEST]
    return Claimer(process.pid, process.start, machine(), command, budget[:_LONGEST], leaves)


class Lease:
    """What this process claims of its GPUs, by GPU. `before` is the lease of this process whose place it takes.

    That one goes on to be held beside this one, for nothing in addition, until it is closed.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        budget: str = "",
        before: Lease | None = None,
        leaves: float | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.store = Store(folder())
        self._who, self._before = claimer(budget, leaves), before
        self._returning = 0
        """How many threads wait in `back`."""
        self._count = threading.Lock()
        self._pid = os.getpid()
        self.number: int | None = None
        """The claim's, once there is one."""
        self.held = False
        self.kept = False
        """Whether it outlives the budget that it was claimed for: another one takes its place."""
        self._over = False
        """Whether it was given back for good: who waits in `back` claims nothing any more."""
        self._seen: list[Claim] = []

    def take(
        self,
        wait: float = 0.0,
        say: Say | None = None,
        unwanted: Callable[[], bool] | None = None,
        look: Look | None = None,
    ) -> bool:
        """Claim it, and wait up to that many seconds: whether it had to. `say` hears who holds what, at once and every
        AGAIN seconds. If it is `unwanted` meanwhile, NotActive is raised.

        Raises LeaseRefused if it cannot be had in time, or MemguardError if there can be no leases here; then nothing
        of the claim is left.
        """
        for part in self.parts.values():
            if part.bytes > part.total:
                raise LeaseRefused(said.too_large(part))
        try:
            began, self._over = time.monotonic(), False
            self._change(lambda connection, file: self._enter(connection, file, wait > 0))
            waited = not self.held
            self._until(began, wait, say, unwanted, look)
        except BaseException:
            self.close()
            raise
        return waited

    def _until(
        self,
        began: float,
        wait: float,
        say: Say | None,
        unwanted: Callable[[], bool] | None,
        look: Look | None,
        hurry: bool = False,
    ) -> None:
        heard, due, last, busy = None, float("-inf"), False, False
        wakeup = WakeupFifo(self.store.folder)
        try:
            while not self.held:
                now = time.monotonic()
                if unwanted is not None and unwanted():
                    raise NotActive("this budget was shut down while it waited for its lease")
                if self._over or self._state == "off":
                    raise NotActive("its lease was given back while it waited for it")
                over = now - began >= wait
                if over and (last or wait <= 0):
                    raise self._refused(wait if wait > 0 else None)
                if say is not None and (heard is None or now - heard >= AGAIN):
                    heard = now
                    say(self._waiting())
                number = self.number
                if number is not None and wakeup.open_for(number):
                    due = now
                if now < due and not over:
                    if wakeup.wait(min(due, began + wait) - now):
                        due = now
                    elif look is not None:  # also between two polls: NVML remembers what others did for seconds only
                        look(self._seen)
                    continue
                last = over
                try:
                    if self._read(hurry) is not False:
                        self._change(self._look, hurry)
                except BusyDatabaseError:
                    if not hurry or busy:
                        raise
                    # One poll may meet a writer. Two in a row, a second in all, mean that another program holds the
                    # database, which must not keep a process off its GPUs.
                    busy = True
                    self.store.patient_again()
                    continue
                busy = False
                if look is not None:
                    look(self._seen)
                due = time.monotonic() + self._pause(wakeup)
        finally:
            wakeup.close()

    def _pause(self, wakeup: WakeupFifo) -> float:
        """Seconds until this claim polls the database again."""
        _, ahead = self._others()
        return min(random.uniform(*LOOK) * (1 + ahead) ** 2, AGAIN if wakeup.is_open else 10 * LOOK[1])

    def _read(self, hurry: bool) -> bool | None:
        return self.store.read_soon(self._glance) if hurry else self.store.read(self._glance)

    def _change(self, work: Callable[[Connection, File], None], hurry: bool = False) -> None:
        """In the database. What is seen in there to be held is not, if it cannot be written: its disk may be full."""
        before: list[bool] = []

        def tracked(connection: Connection, file: File) -> None:
            if not before:
                before.append(self.held)
            work(connection, file)

        try:
            if hurry:
                self.store.change_soon(tracked)
            else:
                self.store.change(tracked)
        except BaseException:
            self.held = before[0] if before else self.held
            raise

    # of a process that leaves its GPUs and comes back

    def leave(self) -> None:
        """Its process is off its GPUs: others may have them until `back`. It waits for it no more either."""
        number = self.number
        if number is not None and self._pid == os.getpid():
            self._change(lambda connection, _: self._see(store.leave(connection, number)))

    def back(
        self,
        wait: float = math.inf,
        say: Say | None = None,
        unwanted: Callable[[], bool] | None = None,
        look: Look | None = None,
        hurry: bool = False,
    ) -> None:
        """Claim it again, after all who wait already. Several threads may: they share one place in the queue. In a
        `hurry` no access to the database waits longer than `Store.read_soon` does. Once the claim is in the queue, two
        accesses in a row must fail: then MemguardError is raised.

        Raises as `take`; then it is as `leave` left it, unless another thread still waits. NotActive too if it is given
        back meanwhile.
        """
        if self.held or self.number is None or self._over:
            return
        began = time.monotonic()
        try:
            try:
                with self._count:
                    self._returning += 1
                self._change(self._again, hurry)
                self._until(began, wait, say, unwanted, look, hurry)
            finally:
                with self._count:  # not for the change: one in a hurry does not wait for another's database
                    self._returning -= 1
                if self._returning == 0 and not self.held:
                    try:
                        self._change(self._give_up, hurry)
                    except MemguardError as error:  # what ended the wait is raised, not this
                        _log.warning("its claim may still wait, although nobody waits for it: %s", text_of(error))
        except LeaseRefused:
            if not self.held:  # else its turn came with the end of the time
                raise

    def _again(self, connection: Connection, file: File) -> None:
        """Claim it, unless another thread has done that and waits."""
        self._see(store.serve(connection))
        if self._state in (None, "off") and not self._over:
            self._enter(connection, file, True)

    def _give_up(self, connection: Connection, file: File) -> None:
        self._see(store.serve(connection))
        if not self.held and self.number is not None and self._returning == 0:
            self._see(store.leave(connection, self.number))

    def _enter(self, connection: Connection, file: File, waits: bool) -> None:
        """Claim, and hold it if there is room. Without room, and if it does not wait, nothing is claimed."""
        if self.number is not None:  # of an attempt before this one, or from before its process left its GPUs
            store.remove(connection, self.number)
            file.drop(self.number)
        replaces = self._before.number if self._before is not None else None
        while True:
            self.number = store.add(connection, self._who, replaces, self.parts)
            if file.take(self.number):
                break
            store.remove(connection, self.number)  # a process of a database that was removed has that byte
        self._see(store.serve(connection))
        if not self.held and not waits:
            store.remove(connection, self.number)

    def _glance(self, connection: Connection, file: File) -> bool:
        """Look, without a lock for writing. Whether something has to be changed."""
        claims = store.claims_of(connection, file)
        self._see(claims)
        return not self.held and (bool(store.due(claims)) or not self._there)

    def _look(self, connection: Connection, file: File) -> None:
        self._see(store.serve(connection))
        if not self._there and not self._over:  # the database was removed
            self._enter(connection, file, True)

    def _see(self, claims: list[Claim]) -> None:
        self._seen = claims
        self.held = any(claim.id == self.number and claim.state == "held" for claim in claims)

    @property
    def _state(self) -> State | None:
        return next((claim.state for claim in self._seen if claim.id == self.number), None)

    @property
    def _there(self) -> bool:
        return self._state is not None

    def _others(self) -> tuple[list[Claim], int]:
        """Who holds, and how many came before."""
        by_number = {claim.id: claim for claim in self._seen}
        own = Want(self.number or 0, False, {gpu: one.bytes for gpu, one in self.parts.items()}, self._replaced())
        held, ahead = decide.before(own, store.wants(self._seen))
        return [by_number[one.id] for one in held], len(ahead)

    def _replaced(self) -> int | None:
        return self._before.number if self._before is not None else None

    def _waiting(self) -> str:
        held, ahead = self._others()
        return said.waiting([*self.parts.values()], held, ahead, machine(), time.time())

    def _refused(self, waited: float | None) -> LeaseRefused:
        held, ahead = self._others()
        text = said.refused([*self.parts.values()], held, ahead, machine(), time.time(), waited)
        return LeaseRefused(text, [_holder(claim, self.parts) for claim in held])

    def close(self) -> None:
        """Give it back; nothing happens if there is none, or in a forked child, whose parent has it."""
        if self._pid != os.getpid() or self.kept:
            return
        self._over = True  # before its number is read: from now on no thread makes it another one
        if self.number is None:
            return
        locks.locked.run(self._let_go, store.PATIENCE)  # first: without it the claim counts no more
        try:
            self.store.change(self._end, _END)
        except MemguardError as error:
            _log.debug("the lease is given back; its row stays until the next claim: %s", text_of(error))
        self.number, self.held = None, False

    def _let_go(self) -> None:
        if self.number is not None:
            locks.let_go(self.number)

    def _end(self, connection: Connection, file: File) -> None:
        if self.number is not None:
            store.remove(connection, self.number)
        store.serve(connection)


class BudgetLease(Lease):
    """The lease of a budget. Without a database that can be used, its program starts without a lease."""

    def take(
        self,
        wait: float = 0.0,
        say: Say | None = None,
        unwanted: Callable[[], bool] | None = None,
        look: Look | None = None,
    ) -> bool:
        try:
            return super().take(wait, say, unwanted, look)
        except UnusableDatabaseError as error:
            (say or _log.warning)(f"this program runs without its lease, and others may claim the same bytes: {error}")
            return False


def _holder(claim: Claim, wanted: Mapping[str, Part]) -> dict[str, object]:
    sizes = {part.uuid: part.bytes for gpu, part in claim.parts.items() if gpu in wanted}
    here = claim.machine == machine()
    return {
        "pid": claim.pid if here else None, "command": claim.command, "budget": claim.budget, "bytes": sizes,
        "since": claim.since,
    }  # fmt: skip
