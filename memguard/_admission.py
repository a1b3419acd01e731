"""Admission: whether memory can be had beside what is reserved, and workloads, which reserve it until they end."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from memguard import _policy
from memguard._blocks import End
from memguard._devices.host import Host
from memguard._frameworks.base import Framework
from memguard._ledger.overhead import totals
from memguard._locks import not_for_ever
from memguard._logs import log as _log
from memguard._oom import hooks
from memguard._reclaim import reservations, turns
from memguard._reclaim.reservations import EMPTY, Asked, Book, Entry, Verdict
from memguard._reclaim.turns import Ticket, Turns
from memguard._types import Device, DevicePlan, Plan, Usage, WorkloadReport
from memguard._units import format_size, parse_duration, parse_size
from memguard.errors import BudgetExceeded, MemguardError

_FIRST, _LAST = 0.05, 0.5
"""Seconds between two looks of one that waits: they double from the first to the last. What ends wakes it at once."""
_LOOKS = 4
"""Looks within one try: others may begin, end and allocate between two readings."""


class Budgeted(Protocol):
    """What the guard gives: what is capped, and what may be trimmed."""

    plan: Plan
    host: Host
    _lock: Any

    @property
    def frameworks(self) -> Mapping[str, Framework]: ...
    def _framework(self, name: str) -> Framework:
        """Raises MemguardError if the budget does not name it."""

    def _used_by(self, framework: str) -> Sequence[DevicePlan]: ...
    def _trim(self, names: Sequence[str], device: Device) -> None: ...
    def _check_active(self) -> None: ...
    def _checkpoint(self) -> None: ...
    def _finished(self, report: WorkloadReport) -> None: ...


class _Work(NamedTuple):
    """What one workload asks for. `deadline` is as `time.monotonic()`."""

    ticket: Ticket
    name: str
    framework: str
    needed: int
    parts: Sequence[DevicePlan]
    mine: frozenset[int]
    began: float
    deadline: float

    @property
    def entry(self) -> Entry:
        uuids = tuple(part.device.uuid for part in self.parts)
        return Entry(
            self.ticket.number, self.name, self.framework, self.needed, uuids, self.began, turns.who(), self.mine
        )


class Admission:
    """That of one budget."""

    def __init__(self, guard: Budgeted) -> None:
        self._guard = guard
        self.turns = Turns()

    def open_bytes(self, framework: str, uuid: str) -> int:
        """Bytes that its workloads have reserved there and not taken yet. Also within an allocation: no lock."""
        if self.turns.book is EMPTY:
            return 0
        book = self.turns.view()
        if (framework, uuid) not in book.bases:
            return 0
        return reservations.open_bytes(book, framework, uuid, self._in_use(framework).get(uuid))

    # require

    def fits(self, framework: str, needed: int, part: DevicePlan) -> bool:
        """Whether there is room on that GPU, beside what is reserved and without a trim."""
        verdict, _ = self._look(self.turns.settled(), framework, needed, part, turns.within())
        return verdict.refusal is None and not verdict.trim

    def require(self, framework: str, needed: int, part: DevicePlan) -> None:
        """Raise BudgetExceeded if there is no room, also after a trim. With the guard's lock held."""
        before: object = None
        trimmed = False
        for look in range(1, _LOOKS + 1):
            book = self.turns.settled()
            verdict, seen = self._look(book, framework, needed, part, turns.within())
            if verdict.refusal is None and not verdict.trim:
                return
            if verdict.refusal is not None and (not verdict.reserved or before == (book, seen) or look == _LOOKS):
                raise self._error(book, framework, needed, part, verdict)
            if verdict.trim and (trimmed or look == _LOOKS):  # the trim did nothing
                raise self._stuck(framework, needed, part, verdict)
            before = book, seen
            if verdict.trim:
                self._guard._trim(verdict.trim, part.device)
                trimmed = True

    # workloads

    def begin(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Begin a workload: admission, and a reservation until its end. Waits on this thread if it is to."""
        report, ticket = WorkloadReport(name, framework), None
        work = self._asked(report, needs, wait)
        try:
            if work is not None:
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
        try:
            if work is not None:
                ticket = work.ticket
                for seconds in self._turn(work, report):
                    await ticket.pause_in_loop(seconds)
            return self._begun(report, ticket)
        except BaseException:
            self._leave(framework, ticket)
            raise

    def _asked(self, report: WorkloadReport, needs: int | str | None, wait: float | str | None) -> _Work | None:
        """What the workload asks for; None if it reserves nothing."""
        guard = self._guard
        try:
            needed = None if needs is None else parse_size(needs)
            patience = 0.0 if wait is None else parse_duration(wait)
        except ValueError as error:
            raise MemguardError(str(error)) from None
        if wait is not None and needed is None:
            raise MemguardError(
                f"workload {report.name!r}: wait= without needs=: there is nothing to wait for\n"
                '    fix: say what it needs, for example needs="4GiB"'
            )
        guard._checkpoint()
        guard._check_active()
        guard._framework(report.framework)
        if needed is None:
            return None
        now, parts = time.monotonic(), guard._used_by(report.framework)
        mine = turns.within() & self.turns.settled().ids
        return _Work(self.turns.ticket(), report.name, report.framework, needed, parts, mine, now, now + patience)

    def _turn(self, work: _Work, report: WorkloadReport) -> Iterator[float]:
        """Try until it is admitted. Yields the seconds to wait before the next try; raises BudgetExceeded."""
        pause, waits = _FIRST, False
        while (refused := self._try(work)) is not None:
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
            book = self.turns.settled()
            if self.turns.replace(book, reservations.queued(book, work.entry._replace(size=work.needed))):
                return True

    def _try(self, work: _Work) -> tuple[BudgetExceeded, bool] | None:
        """Reserve it, if that is possible now. Else the error, and whether it is of no use to wait."""
        framework, needed = work.framework, work.needed
        before: object = None
        looks, trimmed = 0, set[str]()
        while True:
            self._guard._check_active()
            book = self.turns.settled()
            in_use: dict[str, int | None] = {}
            covered, again = [], False
            for part in work.parts:
                verdict, seen = self._look(book, framework, needed, part, work.mine, work.ticket.number)
                in_use[part.device.uuid] = seen.get(framework)
                covered.append(verdict.covered)
                if verdict.refusal is not None:
                    error = self._error(book, framework, needed, part, verdict, work)
                elif not verdict.trim:
                    continue
                elif part.device.uuid not in trimmed:
                    trimmed.add(part.device.uuid)
                    not_for_ever(self._guard._lock)
                    with self._guard._lock:
                        self._guard._check_active()
                        self._guard._trim(verdict.trim, part.device)
                    again = True
                    break
                else:
                    error = self._stuck(framework, needed, part, verdict)
                looks += 1
                if verdict.reserved and before != (book, seen) and looks < _LOOKS:  # others may just be allocating
                    before, again = (book, seen), True
                    break
                why = self._never(book, work, part)
                if why is not None:
                    error = BudgetExceeded(framework, needed, error.available, why)
                return error, why is not None or needed > part.elastic.get(framework, (0, part.caps[framework]))[1]
            if again:
                continue
            entry = work.entry._replace(since=time.monotonic(), size=0 if all(covered) else needed)
            turns.enter(work.ticket)
            if self.turns.replace(book, reservations.begun(book, entry, in_use)):
                return None

    def _never(self, book: Book, work: _Work, part: DevicePlan) -> str | None:
        own_cap = part.elastic.get(work.framework, (0, part.caps[work.framework]))[1]
        mine = self.turns.here(work.mine)
        asked = self._question(work.framework, work.needed, part, mine)
        return reservations.never(book, asked, part.limit - part.reserve, own_cap)

    def _begun(self, report: WorkloadReport, ticket: Ticket | None) -> tuple[WorkloadReport, End]:
        report.before, earlier = totals(self._usages_of(report.framework))
        return report, functools.partial(self._end, report, earlier, ticket)

    def _end(
        self, report: WorkloadReport, earlier: int | None, ticket: Ticket | None, error: BaseException | None
    ) -> None:
        try:
            try:
                if error is not None:
                    hooks.seen(error)
            finally:
                self._figures(report, earlier, error)
        finally:
            self._leave(report.framework, ticket)
        if error is None:
            self._guard._finished(report)

    def _figures(self, report: WorkloadReport, earlier: int | None, error: BaseException | None) -> None:
        try:
            self._guard._check_active()
            report.after, peak = totals(self._usages_of(report.framework))
            report.peak = peak if peak is not None and peak > (earlier or 0) else None
        except Exception as failure:  # shut down in the block, or a GPU is lost: the user's own error goes first
            if error is None and not isinstance(failure, MemguardError):
                raise
            text = str(failure)  # the object would keep the block's frames alive in a log that keeps its records
            _log.debug("workload %s: no figures at its end: %s", report.name, text)

    def _leave(self, framework: str, ticket: Ticket | None) -> None:
        if ticket is None:
            return
        try:
            self.turns.leave(ticket, functools.partial(self._in_use, framework))
        finally:
            ticket.over = True  # if that was interrupted, the next one that looks ends it

    # figures

    def _look(
        self,
        book: Book,
        framework: str,
        needed: int,
        part: DevicePlan,
        mine: frozenset[int],
        number: int | None = 0,
    ) -> tuple[Verdict, dict[str, int | None]]:
        """One reading and what it means; what each framework has in use. `number`: of the ticket; 0: it has none."""
        usages = self._usages(part.device)
        memory = self._guard.host.memory(part.device)  # after the usages: what is taken between them counts twice
        seen = {name: reservations.usage_in_use(usage) for name, usage in usages.items()}
        for name, size in seen.items():
            lower = reservations.seen(book, name, {part.device.uuid: size})
            if lower is not book and self.turns.replace(book, lower):
                book = lower
        asked = self._question(framework, needed, part, mine)
        if number != 0:
            asked = asked._replace(before=reservations.ahead(book, number, mine), keeps=True)
        return reservations.admit(book, asked, usages, memory), seen

    def _question(self, framework: str, needed: int, part: DevicePlan, mine: frozenset[int]) -> Asked:
        footprint = self._guard._framework(framework).footprint(needed)
        return Asked(framework, part.device.uuid, needed, footprint, part.caps[framework], mine)

    def _usages(self, device: Device) -> dict[str, Usage | None]:
        return {name: one.usage(device) for name, one in self._guard.frameworks.items()}

    def _usages_of(self, framework: str) -> list[Usage | None]:
        one = self._guard._framework(framework)
        return [one.usage(part.device) for part in self._guard.plan.devices]

    def _in_use(self, framework: str) -> dict[str, int | None]:
        """What its arrays occupy, by UUID; empty if that cannot be read."""
        one = self._guard.frameworks.get(framework)
        found: dict[str, int | None] = {}
        for part in self._guard.plan.devices if one is not None else ():
            assert one is not None
            try:
                found[part.device.uuid] = reservations.usage_in_use(one.usage(part.device))
            except Exception as error:
                _log.debug("%s: what it has in use cannot be read: %s", framework, str(error))
        return found

    # what refusals say

    def _error(
        self, book: Book, framework: str, needed: int, part: DevicePlan, verdict: Verdict, work: _Work | None = None
    ) -> BudgetExceeded:
        assert verdict.refusal is not None
        in_use = {name: reservations.usage_in_use(usage) for name, usage in self._usages(part.device).items()}
        now = time.monotonic()
        shown = book if work is None else reservations.ended(book, work.ticket.number)
        lines = reservations.who_holds(shown, part.device.uuid, in_use, now)
        said, _, fix = verdict.refusal.partition("\n    fix: ")
        if work is not None and work.deadline > work.began and now >= work.deadline:
            said += f", after {now - work.began:.1f} s in which it waited its turn"
        if verdict.reserved:
            wait = (
                "let it wait longer" if work is not None and work.deadline > work.began else 'wait="60s" waits its turn'
            )
            fix = f"{wait if work is not None else 'ask again once one of them has ended'}, or reserve less"
        text = "\n      ".join([said + (":" if lines else ""), *lines])
        return BudgetExceeded(framework, needed, verdict.available, f"{text}\n    fix: {fix}" if fix else text)

    def _stuck(self, framework: str, needed: int, part: DevicePlan, verdict: Verdict) -> BudgetExceeded:
        names, memory = " and ".join(verdict.trim), self._guard.host.memory(part.device)
        return BudgetExceeded(
            framework,
            needed,
            memory.free,
            f"{framework} needs {format_size(needed)}, {_policy.card(memory)} has {format_size(memory.free)} "
            f"free, and the cache of {names} could not be given back from here (fragmented, another thread's, "
            f"or a CUDA graph is being captured)\n"
            f"    fix: call memguard.trim() on the thread that runs {names}",
        )
