"""Admission: whether memory can be had beside what is reserved, and workloads, which reserve it until they end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.blocks import End
from memguard._base.logs import log as _log
from memguard._base.types import Device, DevicePlan, MemoryInfo, Room, Usage, WorkloadReport
from memguard._base.units import format_size, parse_duration, parse_size
from memguard._budget import joint, policy
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
"""Seconds between two looks of one that waits: they double from the first to the last. What ends wakes it at once."""
_LOOKS = 4
"""Looks within one try: others may begin, end and allocate between two readings."""


_TRIES = 1000
"""Looks at room that others take before it is reserved, until that counts as a refusal. Each changes something."""


class _Work(NamedTuple):
    """What one workload asks for. `deadline` is as `time.monotonic()`."""

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
    """Admission control for one budget. `find_drift` checks whether the cap of a framework still holds."""

    def __init__(
        self, caps: CapTable, elastic: ElasticCaps, callbacks: Callbacks, find_drift: Callable[[str], None]
    ) -> None:
        self._caps, self._elastic, self._callbacks, self._find_drift = caps, elastic, callbacks, find_drift
        self.queue = ReservationQueue()

    @property
    def working(self) -> bool:
        """Whether a workload that has reserved memory is under way."""
        return bool(self.queue.settled().active)

    def not_taken_now(self, framework: str, uuid: str) -> int:
        """Bytes that its workloads have reserved there and not taken yet. Also within an allocation: no lock."""
        return 0 if self.queue.current is EMPTY else self.not_taken(framework, uuid, self._in_use(framework).get(uuid))

    def not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """The same, by what the framework has in use there; None: unknown."""
        if self.queue.current is EMPTY:
            return 0
        book = self.queue.view()
        if (framework, uuid) not in book.bases:
            return 0
        return reservations.reserved_not_taken(book, framework, uuid, in_use)

    # require

    def fits(self, framework: str, needed: int, device: Device) -> bool:
        """Whether there is room on that GPU now, beside what is reserved. Nothing is trimmed."""
        return self._look(framework, needed, device, queue.within()).fits

    def require(self, framework: str, needed: int, device: Device) -> None:
        """Raise BudgetExceeded if there is no room, after others gave back what they could. With the guard's lock."""
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
            before = look.book, look.in_use  # others may just be allocating: it is refused if it stays so

    def _make_room(self, framework: str, needed: int, look: Look, again: Callable[..., Look]) -> Room:
        """Have its cap raised and others give back what they can, beside what is reserved. With the guard's lock."""
        caps, elastic, device = self._caps, self._elastic, look.part.device
        if why := elastic.why_trim_forbidden():
            _log.info("%s: nothing is trimmed", why.text)
            return Room({}, None, 0, {})
        footprint = caps.framework(framework).footprint(needed)
        if framework in look.part.joined:  # the cap is that of the pool; who is not in it may have a cache of its own
            return elastic.reclaimer.make_room(device, framework, footprint, capped=False)
        if again(cap=refusals.most(look.part, framework)).verdict.refusal is not None:
            return Room({}, None, 0, {})  # it would not suffice, beside what others have reserved
        room = elastic.reclaimer.make_room(device, framework, footprint + look.verdict.beside)
        if look.book is not EMPTY and (still := again().verdict.trim):  # what others reserved has to be free too
            elastic.trim_idle(still, device)
        return room

    # workloads

    def begin(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Begin a workload: admission, and a reservation until its end. Waits on this thread if it is to."""
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
        """As `begin`, and what waits does not block the event loop."""
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
        """What the workload asks for, after a checkpoint; None if it reserves nothing."""
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
        """Try until it is admitted. Yields the seconds to wait before the next try; raises BudgetExceeded."""
        pause, waits = _FIRST, False
        while True:
            if suspension.now is not None:  # since it began to wait: nobody has room or takes any until it is back
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
                continue  # what ended meanwhile woke nobody
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
        """Reserve it, if that is possible now. Else the error, and whether it is of no use to wait.

        Other threads may change the reservations, or a cap, between each look and the reservation: not without end.
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
            before = short.book, short.in_use  # others may just be allocating: it is refused if it stays so

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
        """Put it into the reservations that were looked at. False if somebody was faster."""
        in_use = {look.part.device.uuid: look.in_use.get(work.framework) for look in looks}
        covered = all(look.verdict.covered for look in looks)
        entry = work.entry._replace(since=time.monotonic(), size=0 if covered else work.needed)
        queue.enter(work.ticket, work.mine)
        book = looks[-1].book
        if not self.queue.replace(book, reservations.begun(book, entry, in_use)):
            return False
        # From here on no cap is lowered below what is reserved. One may have been, since the look.
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
                    ticket.over = True  # if that was interrupted, the next one that looks ends it
        if (told := self._callbacks.workload) is not None:
            told(report, seconds, None if error is None else type(error).__name__)

    def _figures(
        self, report: WorkloadReport, earlier: int | None, error: BaseException | None
    ) -> dict[str, int | None] | None:
        """What is in use at the end, into the report; by UUID too, None if that cannot be read."""
        try:
            self._caps.check_active()
            usages = self._usages_of(report.framework)
            report.after, peak = totals(usages)
            report.peak = peak if peak is not None and peak > (earlier or 0) else None
            if report.reserved is None:
                return None
            devices = [part.device.uuid for part in self._caps.plan.devices]
            return {uuid: policy.in_use(usage) for uuid, usage in zip(devices, usages, strict=True)}
        except Exception as failure:  # shut down in the block, or a GPU is lost: the user's own error goes first
            if error is None and not isinstance(failure, MemguardError):
                raise
            text = str(failure)  # the object would keep the block's frames alive in a log that keeps its records
            _log.debug("workload %s: no figures at its end: %s", report.name, text)
            return None

    def _leave(self, framework: str, ticket: Ticket | None) -> None:
        """Before it has begun: an error, or an interruption."""
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
        """One reading and what it means. `number`: of the ticket that is to reserve it; None: nothing is reserved.
        `cap`: as if that were its cap.

        First those are asked who matter in any case, unless `everyone` is; the others if it does not fit.
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
        usages = {name: frameworks[name].usage(device) for name in first if name in frameworks}
        if everyone:
            usages.update(self._elastic.reclaimer.beside(device, framework))
        memory = self._caps.host.memory(device)  # after the usages: what is taken between them counts twice
        verdict = self._admit(book, asked, part, usages, memory)
        if verdict.refusal is not None and not everyone:
            usages = {name: one.usage(device) for name, one in frameworks.items()}
            usages.update(self._elastic.reclaimer.beside(device, framework))
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
        """The verdict. One that draws from the shared pool is looked at as if it were alone there, beside what the
        others have reserved."""
        name = asked.framework
        if asked.before and self._within_min(asked, part, usages.get(name)):
            asked = asked._replace(before=tuple(one for one in asked.before if one.framework == name))
        if name not in part.joined:
            return reservations.admit(book, asked, usages, memory)
        usages = {**usages, name: usages.get(name)}
        left = self._caps.alone(name, part, usages)
        others = sum(self.not_taken_now(other, part.device.uuid) for other in part.joined if other != name)
        verdict = reservations.admit(book, asked._replace(cap=max(left - others, 0)), usages, memory)
        if not isinstance(verdict.refusal, (policy.OverCap, policy.NoneFree)):
            return verdict
        return verdict._replace(refusal=replace(verdict.refusal, pool=joint.shared_cap(name, part, left)))

    def _within_min(self, asked: Asked, part: DevicePlan, own: Usage | None) -> bool:
        """Whether it asks for no more than is its own for good, whatever other frameworks hold or wait for."""
        least = part.elastic.get(asked.framework, (part.caps[asked.framework], 0))[0]
        taken = policy.in_use(own) or 0
        return taken + self.not_taken_now(asked.framework, asked.uuid) + asked.footprint <= least

    def _question(self, framework: str, needed: int, part: DevicePlan, mine: frozenset[int]) -> Asked:
        footprint = self._caps.framework(framework).footprint(needed)
        return Asked(framework, part.device.uuid, needed, footprint, part.caps[framework], mine)

    def _usages_of(self, framework: str) -> list[Usage | None]:
        one = self._caps.frameworks.get(framework) or self._caps.framework(framework)
        return [one.usage(part.device) for part in self._caps.plan.devices]

    def _in_use(self, framework: str) -> dict[str, int | None]:
        """What its arrays occupy, by UUID; empty if that cannot be read."""
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
    """What to say of an elastic framework: why not even the most that its cap may be would do, if that is so."""
    if framework not in look.part.elastic:
        return look
    most = again(cap=refusals.most(look.part, framework))
    return look if most.verdict.refusal is None else most


def _contended(work: _Work, look: Look) -> BudgetExceeded:
    """The error where there was room at each look, and it was never reserved before others changed something."""
    said = (
        f"{work.framework} needs {format_size(work.needed)}, and other threads changed reservations or caps {_TRIES} "
        "times while this one tried to reserve it"
    )
    fix = "ask again, or begin fewer workloads at the same time"
    return BudgetExceeded(work.framework, work.needed, look.verdict.available, Advice(said, fix))
