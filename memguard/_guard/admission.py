"""Admission control: check requests against free memory and reservations, and reserve memory for workloads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.blocks import End
from memguard._base.logs import log as _log
from memguard._base.types import Device, DevicePlan, MemoryInfo, Room, Usage, WorkloadReport
from memguard._base.units import format_size, parse_duration, parse_size
from memguard._budget import policy, shared_pool
from memguard._devices import suspension
from memguard._guard import queue, refusals, reservations
from memguard._guard.caps import Callbacks, CapTable
from memguard._guard.elastic import ElasticCaps
from memguard._guard.queue import ReservationQueue, Ticket
from memguard._guard.refusals import Look, Waiting
from memguard._guard.reservations import EMPTY, Asked, Reservation, Reservations, Verdict
from memguard._ledger.overhead import totals
from memguard._oom import hooks
from memguard.errors import BudgetExceeded, MemguardError

_FIRST, _LAST = 0.05, 0.5
"""Seconds between two attempts of a waiting workload, doubling from the first value to the last. The end of another
workload triggers an attempt at once."""
_LOOKS = 4
"""The most readings in one attempt. Workloads may begin, end and allocate between two readings."""


_TRIES = 1000
"""Failed compare-and-swap attempts to reserve free memory before the workload is refused."""


class _Work(NamedTuple):
    """The request of one workload. `began` and `deadline` are values of `time.monotonic()`."""

    ticket: Ticket
    name: str
    framework: str
    needed: int
    devices: Sequence[Device]
    mine: frozenset[int]
    began: float
    deadline: float

    @property
    def entry(self) -> Reservation:
        uuids = tuple(device.uuid for device in self.devices)
        return Reservation(
            self.ticket.number, self.name, self.framework, self.needed, uuids, self.began, queue.who(), self.mine
        )


class Admission:
    """Admission control for one budget. `find_drift` checks whether a framework's cap still holds."""

    def __init__(
        self, caps: CapTable, elastic: ElasticCaps, callbacks: Callbacks, find_drift: Callable[[str], None]
    ) -> None:
        self._caps, self._elastic, self._callbacks, self._find_drift = caps, elastic, callbacks, find_drift
        self.queue = ReservationQueue()

    @property
    def working(self) -> bool:
        """Whether a workload with a reservation is running."""
        return bool(self.queue.settled().active)

    def not_taken_now(self, framework: str, uuid: str) -> int:
        """As `not_taken`, but read `in_use` from the framework. Takes no lock, so an allocation may call it."""
        return 0 if self.queue.current is EMPTY else self.not_taken(framework, uuid, self._in_use(framework).get(uuid))

    def not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that the framework's workloads have reserved on a GPU and not yet allocated. `in_use` None: unknown."""
        if self.queue.current is EMPTY:
            return 0
        book = self.queue.view()
        if (framework, uuid) not in book.bases:
            return 0
        return reservations.reserved_not_taken(book, framework, uuid, in_use)

    # require

    def fits(self, framework: str, needed: int, device: Device) -> bool:
        """Whether `needed` bytes fit on that GPU now, in addition to all reservations. Trims nothing."""
        return self._look(framework, needed, device, queue.within()).fits

    def require(self, framework: str, needed: int, device: Device) -> None:
        """Raise BudgetExceeded if the memory is not available after trims. Callers hold the guard's lock."""
        before: object = None
        room: Room | None = None
        again = functools.partial(self._look, framework, needed, device, queue.within(), everyone=True)
        for number in range(1, _LOOKS + 1):
            look = again()
            if look.fits:
                return
            if room is None and (room := refusals.no_room(framework, look)) is None:
                room = self._make_room(framework, needed, look, again)
            elif look.verdict.refusal is None:
                raise refusals.stuck(framework, needed, look)
            elif not look.verdict.reserved or before == (look.book, look.in_use) or number == _LOOKS:
                raise refusals.refused(framework, needed, _at_most(framework, look, again), room, time.monotonic())
            before = look.book, look.in_use  # another thread may be allocating: refuse if nothing changes

    def _make_room(self, framework: str, needed: int, look: Look, again: Callable[..., Look]) -> Room:
        """Raise the cap and trim siblings, leaving room for all reservations. Callers hold the guard's lock."""
        caps, elastic, device = self._caps, self._elastic, look.part.device
        if why := elastic.why_trim_forbidden():
            _log.info("%s: nothing is trimmed", why.text)
            return Room({}, None, 0, {})
        footprint = caps.framework(framework).footprint(needed)
        if again(cap=refusals.most(look.part, framework)).verdict.refusal is not None:
            return Room({}, None, 0, {})  # too little even at the highest cap
        room = elastic.reclaimer.make_room(device, framework, footprint + look.verdict.beside)
        if look.book is not EMPTY and (still := again().verdict.trim):  # reserved memory must be free too
            elastic.trim_idle(still, device)
        return room

    # workloads

    def begin(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Begin a workload and reserve its memory until its end. Blocks this thread for at most `wait`."""
        report, ticket = WorkloadReport(name, framework), None
        work = self._asked(report, needs, wait)
        if work is None:
            return self._begun(report, None)
        try:
            ticket = work.ticket
            for seconds in self._turn(work, report):
                ticket.pause(seconds)
            return self._begun(report, ticket)
        except BaseException:
            self._leave(framework, ticket)
            raise

    async def begin_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """As `begin`, but does not block the event loop while it waits."""
        report, ticket = WorkloadReport(name, framework), None
        work = self._asked(report, needs, wait)
        if work is None:
            return self._begun(report, None)
        try:
            ticket = work.ticket
            for seconds in self._turn(work, report):
                await ticket.pause_in_loop(seconds)
            return self._begun(report, ticket)
        except BaseException:
            self._leave(framework, ticket)
            raise

    def _asked(self, report: WorkloadReport, needs: int | str | None, wait: float | str | None) -> _Work | None:
        """Run a checkpoint and return the workload's request; None if it reserves nothing."""
        caps, needed, patience = self._caps, 0, 0.0
        if needs is not None or wait is not None:
            try:
                needed = 0 if needs is None else parse_size(needs)
                patience = 0.0 if wait is None else parse_duration(wait)
            except ValueError as error:
                raise MemguardError(str(error)) from None
            if not needed:
                raise MemguardError(
                    f"workload {report.name!r}: wait= without needs=: there is nothing to wait for",
                    fix='say what it needs, for example needs="4GiB"',
                )
        if self._callbacks.checkpoint is not None:
            self._callbacks.checkpoint()
        if not needed:
            return None
        self._find_drift(report.framework)
        caps.check_active()
        caps.framework(report.framework)
        now, devices = time.monotonic(), [part.device for part in caps.used_by(report.framework)]
        mine = queue.within() & self.queue.settled().ids
        return _Work(self.queue.ticket(), report.name, report.framework, needed, devices, mine, now, now + patience)

    def _turn(self, work: _Work, report: WorkloadReport) -> Iterator[float]:
        """Try to reserve until admitted. Yields the seconds to wait before the next attempt; raises BudgetExceeded."""
        pause, waits = _FIRST, False
        while True:
            if suspension.now is not None:  # suspended while waiting: nothing can be reserved until `resume`
                if time.monotonic() >= work.deadline:
                    raise suspension.refused(f"workload {work.name!r}")
                yield min(_LAST, work.deadline - time.monotonic())
                continue
            if (refused := self._try(work)) is None:
                break
            error, hopeless = refused
            now = time.monotonic()
            if hopeless or now >= work.deadline:
                raise error
            del error, refused
            if not waits:
                waits = self._queue(work)
                continue  # a workload that ended before this did not wake it
            yield min(pause, work.deadline - now)
            pause = min(2 * pause, _LAST)
        report.waited = time.monotonic() - work.began if waits else 0.0
        report.reserved = work.needed

    def _queue(self, work: _Work) -> bool:
        while True:
            book = self.queue.settled()
            if self.queue.replace(book, reservations.queued(book, work.entry._replace(size=work.needed))):
                return True

    def _try(self, work: _Work) -> tuple[BudgetExceeded, bool] | None:
        """Reserve the memory if it is available now. Else return the error, and whether waiting is useless.

        Other threads may change reservations or caps between a reading and the reservation. The loop is bounded.
        """
        rooms: dict[str, Room] = {}
        before: object = None
        number = 0
        while True:
            number += 1
            self._caps.check_active()
            looks: list[Look] = []
            for device in work.devices:
                looks.append(self._look_for(work, device, looks[-1].book if looks else None))
            short = next((look for look in looks if not look.fits), None)
            if short is None:
                if self._reserve(work, looks):
                    return None
                if number >= _TRIES:
                    return _contended(work, looks[0]), False
                continue
            uuid, verdict = short.part.device.uuid, short.verdict
            if uuid not in rooms:
                rooms[uuid] = self._room_for(work, short)
            elif verdict.refusal is None:
                return refusals.stuck(work.framework, work.needed, short), False
            elif not verdict.reserved or number >= _LOOKS or before == (short.book, short.in_use):
                return self._refused(work, short, rooms[uuid])
            before = short.book, short.in_use  # another thread may be allocating: refuse if nothing changes

    def _look_for(self, work: _Work, device: Device, book: Reservations | None = None, cap: int | None = None) -> Look:
        return self._look(work.framework, work.needed, device, work.mine, work.ticket.number, book, cap=cap)

    def _room_for(self, work: _Work, look: Look) -> Room:
        if (none := refusals.no_room(work.framework, look)) is not None:
            return none
        with self._caps.lock:
            self._caps.check_active()
            return self._make_room(
                work.framework, work.needed, look, functools.partial(self._look_for, work, look.part.device)
            )

    def _reserve(self, work: _Work, looks: Sequence[Look]) -> bool:
        """Compare-and-swap: add the reservation to the version that the readings used. False if it was replaced."""
        in_use = {look.part.device.uuid: look.in_use.get(work.framework) for look in looks}
        covered = all(look.verdict.covered for look in looks)
        entry = work.entry._replace(since=time.monotonic(), size=0 if covered else work.needed)
        queue.enter(work.ticket, work.mine)
        book = looks[-1].book
        if not self.queue.replace(book, reservations.begun(book, entry, in_use)):
            return False
        # From here on no cap is lowered below the reserved bytes. A cap may have been lowered since the reading.
        caps = [(self._caps.part(look.part.device.uuid).caps, look.part.caps) for look in looks]
        if all(now[work.framework] >= then[work.framework] for now, then in caps):
            return True
        while True:
            book = self.queue.settled()
            if self.queue.replace(book, reservations.ended(book, entry.id, in_use)):
                return False

    def _refused(self, work: _Work, look: Look, room: Room) -> tuple[BudgetExceeded, bool]:
        part, most = look.part, refusals.most(look.part, work.framework)
        waiting = Waiting(work.ticket.number, work.began, work.deadline)
        shown = _at_most(work.framework, look, functools.partial(self._look_for, work, part.device))
        error = refusals.refused(work.framework, work.needed, shown, room, time.monotonic(), waiting)
        asked = self._question(work.framework, work.needed, part, self.queue.here(work.mine))
        rest = part.limit - part.reserve
        why = None if look.verdict.covered else reservations.never(look.book, asked, rest, most)
        if why is not None:
            error = BudgetExceeded(work.framework, work.needed, error.available, why)
        return error, why is not None or work.needed > most

    def _begun(self, report: WorkloadReport, ticket: Ticket | None) -> tuple[WorkloadReport, End]:
        report.before, earlier = totals(self._usages_of(report.framework))
        return report, functools.partial(self._end, report, earlier, ticket, time.monotonic())

    def _end(
        self,
        report: WorkloadReport,
        earlier: int | None,
        ticket: Ticket | None,
        began: float,
        error: BaseException | None,
    ) -> None:
        seconds = time.monotonic() - began
        book = EMPTY if ticket is None else self.queue.settled()
        in_use: dict[str, int | None] | None = None
        try:
            try:
                if error is not None:
                    hooks.seen(error)
            finally:
                in_use = self._figures(report, earlier, error)
        finally:
            if ticket is not None:
                try:
                    self.queue.leave(ticket, functools.partial(self._in_use, report.framework), book, in_use)
                finally:
                    ticket.over = True  # if `leave` was interrupted, the next `settled` ends it
        if (told := self._callbacks.workload) is not None:
            told(report, seconds, None if error is None else type(error).__name__)

    def _figures(
        self, report: WorkloadReport, earlier: int | None, error: BaseException | None
    ) -> dict[str, int | None] | None:
        """Write the memory in use at the workload's end to the report. Returns it by UUID; None if it is unknown."""
        try:
            self._caps.check_active()
            usages = self._usages_of(report.framework)
            report.after, peak = totals(usages)
            report.peak = peak if peak is not None and peak > (earlier or 0) else None
            if report.reserved is None:
                return None
            devices = [part.device.uuid for part in self._caps.plan.devices]
            return {uuid: policy.in_use(usage) for uuid, usage in zip(devices, usages, strict=True)}
        except Exception as failure:  # shut down in the block, or a GPU is lost: keep the user's error
            if error is None and not isinstance(failure, MemguardError):
                raise
            text = str(failure)  # a log handler that keeps records would keep the exception's frames alive
            _log.debug("workload %s: no figures at its end: %s", report.name, text)
            return None

    def _leave(self, framework: str, ticket: Ticket | None) -> None:
        """Drop the ticket of a workload that an error or interruption stopped before it began."""
        if ticket is None:
            return
        try:
            self.queue.leave(ticket, functools.partial(self._in_use, framework))
        finally:
            ticket.over = True

    # figures

    def _look(
        self,
        framework: str,
        needed: int,
        device: Device,
        mine: frozenset[int],
        number: int | None = None,
        book: Reservations | None = None,
        everyone: bool = False,
        cap: int | None = None,
    ) -> Look:
        """Read one GPU and decide whether `needed` bytes fit.

        `number`: the ticket of a workload that wants to reserve them; None for a check. `cap` replaces the framework's
        cap. Reads only the frameworks that the decision needs, and the others if the bytes do not fit. With `everyone`
        it reads all at once.
        """
        book = self.queue.settled() if book is None else book
        part = self._caps.part(device.uuid)
        asked = self._question(framework, needed, part, mine)
        if cap is not None:
            asked = asked._replace(cap=cap)
        if number is not None:
            asked = asked._replace(before=reservations.ahead(book, number, mine), keeps=True)
        frameworks = self._caps.frameworks
        first = frameworks if everyone else reservations.named(book, asked)
        usages = self._usages(first, part)
        memory = self._caps.host.memory(device)  # after the usages: bytes allocated in between count twice
        verdict = self._admit(book, asked, part, usages, memory)
        if verdict.refusal is not None and not everyone:
            usages = self._usages(frameworks, part)
            memory = self._caps.host.memory(device)
            verdict = self._admit(book, asked, part, usages, memory)
        in_use = {name: policy.in_use(usage) for name, usage in usages.items()}
        for name, size in in_use.items():
            lower = reservations.seen(book, name, {device.uuid: size})
            if lower is not book and self.queue.replace(book, lower):
                book = lower
        return Look(book, part, memory, verdict, in_use)

    def _admit(
        self, book: Reservations, asked: Asked, part: DevicePlan, usages: Mapping[str, Usage | None], memory: MemoryInfo
    ) -> Verdict:
        """The verdict. A refusal has the figures of the framework, not of an allocator that others use too."""
        name, allocator = asked.framework, shared_pool.allocator_of(part, asked.framework)
        if asked.before and self._within_min(asked, part, usages.get(allocator)):
            sharers = shared_pool.clients(part, allocator)
            asked = asked._replace(before=tuple(one for one in asked.before if one.framework in sharers))
        verdict = reservations.admit(book, asked, usages, memory)
        if not isinstance(verdict.refusal, (policy.OverCap, policy.NoneFree)):
            return verdict
        in_use = policy.in_use(usages.get(name)) or 0
        others = max((policy.in_use(usages.get(allocator)) or 0) - in_use, 0)
        return verdict._replace(refusal=verdict.refusal.for_client(others, shared_pool.note_on(part, name, others)))

    def _within_min(self, asked: Asked, part: DevicePlan, own: Usage | None) -> bool:
        """Whether the request stays within the allocator's min, or its cap if fixed: guaranteed against siblings."""
        least = part.elastic.get(asked.framework, (part.caps[asked.framework], 0))[0]
        sharers = shared_pool.clients(part, shared_pool.allocator_of(part, asked.framework))
        taken = (policy.in_use(own) or 0) + sum(self.not_taken_now(name, asked.uuid) for name in sharers)
        return taken + asked.footprint <= least

    def _usages(self, names: Iterable[str], part: DevicePlan) -> dict[str, Usage | None]:
        """The usages of these frameworks, and of the allocators that serve them."""
        frameworks, allocators = self._caps.frameworks, self._caps.allocators
        found = {name: frameworks[name].usage(part.device) for name in names if name in frameworks}
        for name in {shared_pool.allocator_of(part, name) for name in found} - {*found}:
            found[name] = allocators[name].usage(part.device)
        return found

    def _question(self, framework: str, needed: int, part: DevicePlan, mine: frozenset[int]) -> Asked:
        footprint = self._caps.framework(framework).footprint(needed)
        shared = {name: other for name in part.caps if (other := shared_pool.allocator_of(part, name)) != name}
        return Asked(framework, part.device.uuid, needed, footprint, part.caps[framework], mine, shared=shared)

    def _usages_of(self, framework: str) -> list[Usage | None]:
        one = self._caps.frameworks.get(framework) or self._caps.framework(framework)
        return [one.usage(part.device) for part in self._caps.plan.devices]

    def _in_use(self, framework: str) -> dict[str, int | None]:
        """The framework's bytes in use by UUID, without the GPUs where they cannot be read."""
        one = self._caps.frameworks.get(framework) if suspension.now is None else None
        found: dict[str, int | None] = {}
        for part in self._caps.plan.devices if one is not None else ():
            assert one is not None
            try:
                found[part.device.uuid] = policy.in_use(one.usage(part.device))
            except Exception as error:
                _log.debug("%s: what it has in use cannot be read: %s", framework, str(error))
        return found


def _at_most(framework: str, look: Look, again: Callable[..., Look]) -> Look:
    """The reading for an elastic framework's error: at its highest possible cap if even that refuses, else `look`."""
    if framework not in look.part.elastic:
        return look
    most = again(cap=refusals.most(look.part, framework))
    return look if most.verdict.refusal is None else most


def _contended(work: _Work, look: Look) -> BudgetExceeded:
    """The error if memory was free at each attempt, but another thread changed reservations or caps first each time."""
    said = (
        f"{work.framework} needs {format_size(work.needed)}, and other threads changed reservations or caps {_TRIES} "
        "times while this one tried to reserve it"
    )
    fix = "ask again, or begin fewer workloads at the same time"
    return BudgetExceeded(work.framework, work.needed, look.verdict.available, Advice(said, fix))
