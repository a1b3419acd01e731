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
from memguard._guard import queue, refusals
from memguard._guard.caps import Callbacks, CapTable
from memguard._guard.elastic import ElasticCaps
from memguard._guard.queue import ReservationQueue, Ticket
from memguard._guard.refusals import Snapshot, Waiting
from memguard._guard.reservations import (
    EMPTY,
    AdmissionResult,
    Request,
    Reservation,
    Reservations,
    admit,
    begun,
    ended,
    frameworks_to_read,
    queued,
    reserved_not_taken,
    served_before,
    why_waiting_is_useless,
    with_lower_bases,
)
from memguard._ledger.overhead import totals
from memguard._oom import hooks
from memguard.errors import BudgetExceeded, MemguardError

_FIRST_PAUSE, _LAST_PAUSE = 0.05, 0.5
"""Seconds that a waiting workload pauses between two attempts. The pause doubles from `_FIRST_PAUSE` up to
`_LAST_PAUSE`. The end of another workload starts an attempt immediately."""
_MAX_READINGS = 4
"""Maximum number of GPU readings in one attempt. An attempt reads again because workloads may begin, end or allocate
between two readings."""


_MAX_ATTEMPTS = 1000
"""Maximum number of attempts to reserve free memory by compare-and-swap. If all fail, the workload is refused."""


class _Work(NamedTuple):
    """The reservation request of one workload. `began` and `deadline` are times of `time.monotonic()`."""

    ticket: Ticket
    name: str
    framework: str
    needed: int
    devices: Sequence[Device]
    enclosing: frozenset[int]
    began: float
    deadline: float

    @property
    def reservation(self) -> Reservation:
        uuids = tuple(device.uuid for device in self.devices)
        return Reservation(
            self.ticket.number,
            self.name,
            self.framework,
            self.needed,
            uuids,
            self.began,
            queue.owner_name(),
            self.enclosing,
        )


class Admission:
    """Admission control for one budget. The callback `find_drift` checks whether other code has changed a framework's
    cap, and records the change."""

    def __init__(
        self, caps: CapTable, elastic: ElasticCaps, callbacks: Callbacks, find_drift: Callable[[str], None]
    ) -> None:
        self._caps, self._elastic, self._callbacks, self._find_drift = caps, elastic, callbacks, find_drift
        self.queue = ReservationQueue()

    @property
    def working(self) -> bool:
        """True while a workload that holds a reservation is running."""
        return bool(self.queue.prune().active)

    def read_reserved_not_taken(self, framework: str, uuid: str) -> int:
        """Like `reserved_not_taken`, but reads `in_use` from the framework. Takes no lock, because an allocation may
        call this method."""
        return (
            0
            if self.queue.current is EMPTY
            else self.reserved_not_taken(framework, uuid, self._in_use(framework).get(uuid))
        )

    def reserved_not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that the framework's workloads have reserved on a GPU and not yet allocated. `in_use` is None if
        unknown."""
        if self.queue.current is EMPTY:
            return 0
        reservations = self.queue.pruned()
        if (framework, uuid) not in reservations.bases:
            return 0
        return reserved_not_taken(reservations, framework, uuid, in_use)

    # require

    def fits(self, framework: str, needed: int, device: Device) -> bool:
        """True if `framework` can allocate `needed` more bytes on `device` in addition to all reservations. Trims no
        cache."""
        return self._read_snapshot(framework, needed, device, queue.enclosing_tickets()).fits

    def require(self, framework: str, needed: int, device: Device) -> None:
        """Trim caches if necessary. Raise BudgetExceeded if `needed` bytes are still not available. Callers hold the
        guard's lock."""
        before: object = None
        room: Room | None = None
        again = functools.partial(
            self._read_snapshot, framework, needed, device, queue.enclosing_tickets(), all_frameworks=True
        )
        for number in range(1, _MAX_READINGS + 1):
            snapshot = again()
            if snapshot.fits:
                return
            if room is None and (room := refusals.no_room(framework, snapshot)) is None:
                room = self._make_room(framework, needed, snapshot, again)
            elif snapshot.result.refusal is None:
                raise refusals.trim_failed(framework, needed, snapshot)
            elif (
                not snapshot.result.reserved
                or before == (snapshot.reservations, snapshot.in_use)
                or number == _MAX_READINGS
            ):
                raise refusals.refused(framework, needed, _at_most(framework, snapshot, again), room, time.monotonic())
            before = (
                snapshot.reservations,
                snapshot.in_use,
            )  # retry while these values change, because another thread may be allocating

    def _make_room(self, framework: str, needed: int, snapshot: Snapshot, again: Callable[..., Snapshot]) -> Room:
        """Raise the framework's cap and trim other frameworks' caches, leaving reserved memory available. Returns
        the changes as a `Room`. Callers hold the guard's lock."""
        caps, elastic, device = self._caps, self._elastic, snapshot.device_plan.device
        if why := elastic.why_trim_forbidden():
            _log.info("%s: nothing is trimmed", why.text)
            return Room({}, None, 0, {})
        footprint = caps.framework(framework).footprint(needed)
        if again(cap=refusals.highest_cap(snapshot.device_plan, framework)).result.refusal is not None:
            return Room({}, None, 0, {})  # reclaim is useless: even the highest possible cap refuses the request
        room = elastic.reclaimer.make_room(device, framework, footprint + snapshot.result.reserved_under_cap)
        if snapshot.reservations is not EMPTY and (still := again().result.trim):  # trims that the reservations need
            elastic.trim_idle(still, device)
        return room

    # workloads

    def begin(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Begin a workload that reserves `needs` until its end. Blocks the calling thread for at most `wait`. Returns
        the report, and the function to call at the workload's end."""
        report, ticket = WorkloadReport(name, framework), None
        work = self._workload_request(report, needs, wait)
        if work is None:
            return self._begun(report, None)
        try:
            ticket = work.ticket
            for seconds in self._attempts(work, report):
                ticket.pause(seconds)
            return self._begun(report, ticket)
        except BaseException:
            self._leave(framework, ticket)
            raise

    async def begin_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Like `begin`, but does not block the event loop during the wait."""
        report, ticket = WorkloadReport(name, framework), None
        work = self._workload_request(report, needs, wait)
        if work is None:
            return self._begun(report, None)
        try:
            ticket = work.ticket
            for seconds in self._attempts(work, report):
                await ticket.pause_in_loop(seconds)
            return self._begun(report, ticket)
        except BaseException:
            self._leave(framework, ticket)
            raise

    def _workload_request(
        self, report: WorkloadReport, needs: int | str | None, wait: float | str | None
    ) -> _Work | None:
        """Call the `checkpoint` callback and return the workload's request; None if the workload reserves no memory."""
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
        now, devices = time.monotonic(), [device_plan.device for device_plan in caps.used_by(report.framework)]
        enclosing = queue.enclosing_tickets() & self.queue.prune().ids
        return _Work(
            self.queue.ticket(), report.name, report.framework, needed, devices, enclosing, now, now + patience
        )

    def _attempts(self, work: _Work, report: WorkloadReport) -> Iterator[float]:
        """Generator that tries to reserve the memory until the workload is admitted. Yields the seconds to wait before
        each further attempt. Raises BudgetExceeded at the deadline, or as soon as waiting cannot succeed."""
        pause, waits = _FIRST_PAUSE, False
        while True:
            if suspension.now is not None:  # no memory can be reserved before `resume`
                if time.monotonic() >= work.deadline:
                    raise suspension.refused(f"workload {work.name!r}")
                yield min(_LAST_PAUSE, work.deadline - time.monotonic())
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
                continue  # retry without a pause, because a workload that ended before `_queue` did not wake this one
            yield min(pause, work.deadline - now)
            pause = min(2 * pause, _LAST_PAUSE)
        report.waited = time.monotonic() - work.began if waits else 0.0
        report.reserved = work.needed

    def _queue(self, work: _Work) -> bool:
        while True:
            reservations = self.queue.prune()
            if self.queue.replace(reservations, queued(reservations, work.reservation._replace(size=work.needed))):
                return True

    def _try(self, work: _Work) -> tuple[BudgetExceeded, bool] | None:
        """Reserve the memory and return None. On failure, return the error, and whether waiting cannot succeed. Retries
        at most `_MAX_ATTEMPTS` times if another thread changed reservations or caps between the reading and the
        compare-and-swap.
        """
        rooms: dict[str, Room] = {}
        before: object = None
        number = 0
        while True:
            number += 1
            self._caps.check_active()
            snapshots: list[Snapshot] = []
            for device in work.devices:
                snapshots.append(self._snapshot_for(work, device, snapshots[-1].reservations if snapshots else None))
            short = next((snapshot for snapshot in snapshots if not snapshot.fits), None)
            if short is None:
                if self._reserve(work, snapshots):
                    return None
                if number >= _MAX_ATTEMPTS:
                    return _contended(work, snapshots[0]), False
                continue
            uuid, result = short.device_plan.device.uuid, short.result
            if uuid not in rooms:
                rooms[uuid] = self._room_for(work, short)
            elif result.refusal is None:
                return refusals.trim_failed(work.framework, work.needed, short), False
            elif not result.reserved or number >= _MAX_READINGS or before == (short.reservations, short.in_use):
                return self._refused(work, short, rooms[uuid])
            before = short.reservations, short.in_use  # retry while these values change

    def _snapshot_for(
        self, work: _Work, device: Device, reservations: Reservations | None = None, cap: int | None = None
    ) -> Snapshot:
        return self._read_snapshot(
            work.framework, work.needed, device, work.enclosing, work.ticket.number, reservations, cap=cap
        )

    def _room_for(self, work: _Work, snapshot: Snapshot) -> Room:
        if (none := refusals.no_room(work.framework, snapshot)) is not None:
            return none
        with self._caps.lock:
            self._caps.check_active()
            return self._make_room(
                work.framework,
                work.needed,
                snapshot,
                functools.partial(self._snapshot_for, work, snapshot.device_plan.device),
            )

    def _reserve(self, work: _Work, snapshots: Sequence[Snapshot]) -> bool:
        """Add the reservation by compare-and-swap. Returns False if reservations or caps have changed since `snapshots`
        were read."""
        in_use = {snapshot.device_plan.device.uuid: snapshot.in_use.get(work.framework) for snapshot in snapshots}
        covered = all(snapshot.result.covered for snapshot in snapshots)
        reservation = work.reservation._replace(since=time.monotonic(), size=0 if covered else work.needed)
        queue.enter(work.ticket, work.enclosing)
        reservations = snapshots[-1].reservations
        if not self.queue.replace(reservations, begun(reservations, reservation, in_use)):
            return False
        # From here on no cap is lowered below the reserved bytes. But a cap may have been lowered after `snapshots`
        # were read.
        caps = [
            (self._caps.device_plan(snapshot.device_plan.device.uuid).caps, snapshot.device_plan.caps)
            for snapshot in snapshots
        ]
        if all(now[work.framework] >= then[work.framework] for now, then in caps):
            return True
        while True:
            reservations = self.queue.prune()
            if self.queue.replace(reservations, ended(reservations, reservation.id, in_use)):
                return False

    def _refused(self, work: _Work, snapshot: Snapshot, room: Room) -> tuple[BudgetExceeded, bool]:
        device_plan, most = snapshot.device_plan, refusals.highest_cap(snapshot.device_plan, work.framework)
        waiting = Waiting(work.ticket.number, work.began, work.deadline)
        shown = _at_most(work.framework, snapshot, functools.partial(self._snapshot_for, work, device_plan.device))
        error = refusals.refused(work.framework, work.needed, shown, room, time.monotonic(), waiting)
        request = self._request(work.framework, work.needed, device_plan, self.queue.created_here(work.enclosing))
        rest = device_plan.limit - device_plan.reserve
        why = None if snapshot.result.covered else why_waiting_is_useless(snapshot.reservations, request, rest, most)
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
        reservations = EMPTY if ticket is None else self.queue.prune()
        in_use: dict[str, int | None] | None = None
        try:
            try:
                if error is not None:
                    hooks.report_error(error)
            finally:
                in_use = self._figures(report, earlier, error)
        finally:
            if ticket is not None:
                try:
                    self.queue.leave(ticket, functools.partial(self._in_use, report.framework), reservations, in_use)
                finally:
                    ticket.ended = True  # if `leave` was interrupted, the next `prune` removes the reservation
        if (callback := self._callbacks.workload) is not None:
            callback(report, seconds, None if error is None else type(error).__name__)

    def _figures(
        self, report: WorkloadReport, earlier: int | None, error: BaseException | None
    ) -> dict[str, int | None] | None:
        """Store the framework's bytes in use at the workload's end in `report`. Returns these bytes by GPU UUID; None
        if unknown."""
        try:
            self._caps.check_active()
            usages = self._usages_of(report.framework)
            report.after, peak = totals(usages)
            report.peak = peak if peak is not None and peak > (earlier or 0) else None
            if report.reserved is None:
                return None
            devices = [device_plan.device.uuid for device_plan in self._caps.plan.devices]
            return {uuid: policy.in_use(usage) for uuid, usage in zip(devices, usages, strict=True)}
        except Exception as failure:  # a failed reading (shutdown, lost GPU) must not replace the user's error
            if error is None and not isinstance(failure, MemguardError):
                raise
            text = str(failure)  # a log handler that stores records would keep the exception's frames alive
            _log.debug("workload %s: no figures at its end: %s", report.name, text)
            return None

    def _leave(self, framework: str, ticket: Ticket | None) -> None:
        """Remove the ticket and the reservation of a workload that an error or interruption stopped before it began."""
        if ticket is None:
            return
        try:
            self.queue.leave(ticket, functools.partial(self._in_use, framework))
        finally:
            ticket.ended = True

    # readings

    def _read_snapshot(
        self,
        framework: str,
        needed: int,
        device: Device,
        enclosing: frozenset[int],
        number: int | None = None,
        reservations: Reservations | None = None,
        all_frameworks: bool = False,
        cap: int | None = None,
    ) -> Snapshot:
        """Read one GPU and decide whether `framework` can allocate `needed` more bytes there.

        `number`: the ticket number of a workload that will reserve the bytes; None for a check. `cap` replaces the
        framework's cap. First reads only the frameworks that the decision needs, and all frameworks if the bytes do not
        fit. With `all_frameworks` the first reading includes all frameworks.
        """
        reservations = self.queue.prune() if reservations is None else reservations
        device_plan = self._caps.device_plan(device.uuid)
        request = self._request(framework, needed, device_plan, enclosing)
        if cap is not None:
            request = request._replace(cap=cap)
        if number is not None:
            request = request._replace(before=served_before(reservations, number, enclosing), reserves=True)
        frameworks = self._caps.frameworks
        first = frameworks if all_frameworks else frameworks_to_read(reservations, request)
        usages = self._usages(first, device_plan)
        memory = self._caps.host.memory(device)  # read last, so that new bytes count twice rather than not at all
        result = self._admit(reservations, request, device_plan, usages, memory)
        if result.refusal is not None and not all_frameworks:
            usages = self._usages(frameworks, device_plan)
            memory = self._caps.host.memory(device)
            result = self._admit(reservations, request, device_plan, usages, memory)
        in_use = {name: policy.in_use(usage) for name, usage in usages.items()}
        for name, size in in_use.items():
            lower = with_lower_bases(reservations, name, {device.uuid: size})
            if lower is not reservations and self.queue.replace(reservations, lower):
                reservations = lower
        return Snapshot(reservations, device_plan, memory, result, in_use)

    def _admit(
        self,
        reservations: Reservations,
        request: Request,
        device_plan: DevicePlan,
        usages: Mapping[str, Usage | None],
        memory: MemoryInfo,
    ) -> AdmissionResult:
        """Call `admit` and return its result. If several frameworks share the allocator, convert the refusal to the
        requesting framework's figures."""
        name, allocator = request.framework, shared_pool.allocator_of(device_plan, request.framework)
        if request.before and self._within_min(request, device_plan, usages.get(allocator)):
            sharers = shared_pool.clients(device_plan, allocator)
            request = request._replace(before=tuple(one for one in request.before if one.framework in sharers))
        result = admit(reservations, request, usages, memory)
        if not isinstance(result.refusal, (policy.OverCap, policy.NoneFree)):
            return result
        in_use = policy.in_use(usages.get(name)) or 0
        others = max((policy.in_use(usages.get(allocator)) or 0) - in_use, 0)
        return result._replace(
            refusal=result.refusal.for_client(others, shared_pool.note_on(device_plan, name, others))
        )

    def _within_min(self, request: Request, device_plan: DevicePlan, own: Usage | None) -> bool:
        """True if the request keeps the allocator within its guaranteed bytes (the min of an elastic cap, or the whole
        fixed cap)."""
        least = device_plan.elastic.get(request.framework, (device_plan.caps[request.framework], 0))[0]
        sharers = shared_pool.clients(device_plan, shared_pool.allocator_of(device_plan, request.framework))
        taken = (policy.in_use(own) or 0) + sum(self.read_reserved_not_taken(name, request.uuid) for name in sharers)
        return taken + request.footprint <= least

    def _usages(self, names: Iterable[str], device_plan: DevicePlan) -> dict[str, Usage | None]:
        """The memory usage, by name, of the frameworks `names` and of the allocators that serve these frameworks."""
        frameworks, allocators = self._caps.frameworks, self._caps.allocators
        found = {name: frameworks[name].usage(device_plan.device) for name in names if name in frameworks}
        for name in {shared_pool.allocator_of(device_plan, name) for name in found} - {*found}:
            found[name] = allocators[name].usage(device_plan.device)
        return found

    def _request(self, framework: str, needed: int, device_plan: DevicePlan, enclosing: frozenset[int]) -> Request:
        footprint = self._caps.framework(framework).footprint(needed)
        shared = {
            name: other for name in device_plan.caps if (other := shared_pool.allocator_of(device_plan, name)) != name
        }
        return Request(
            framework, device_plan.device.uuid, needed, footprint, device_plan.caps[framework], enclosing, shared=shared
        )

    def _usages_of(self, framework: str) -> list[Usage | None]:
        one = self._caps.frameworks.get(framework) or self._caps.framework(framework)
        return [one.usage(device_plan.device) for device_plan in self._caps.plan.devices]

    def _in_use(self, framework: str) -> dict[str, int | None]:
        """The framework's bytes in use by GPU UUID. Omits GPUs whose reading fails."""
        one = self._caps.frameworks.get(framework) if suspension.now is None else None
        found: dict[str, int | None] = {}
        for device_plan in self._caps.plan.devices if one is not None else ():
            assert one is not None
            try:
                found[device_plan.device.uuid] = policy.in_use(one.usage(device_plan.device))
            except Exception as error:
                _log.debug("%s: what it has in use cannot be read: %s", framework, str(error))
        return found


def _at_most(framework: str, snapshot: Snapshot, again: Callable[..., Snapshot]) -> Snapshot:
    """The snapshot that the error reports. If even an elastic framework's highest possible cap refuses the request,
    returns a new reading with the highest possible cap; otherwise `snapshot`."""
    if framework not in snapshot.device_plan.elastic:
        return snapshot
    most = again(cap=refusals.highest_cap(snapshot.device_plan, framework))
    return snapshot if most.result.refusal is None else most


def _contended(work: _Work, snapshot: Snapshot) -> BudgetExceeded:
    """The error for a workload that found enough free memory at each attempt, but whose compare-and-swap always failed
    because other threads had changed reservations or caps."""
    reason = (
        f"{work.framework} needs {format_size(work.needed)}, and other threads changed reservations or caps "
        f"{_MAX_ATTEMPTS} times while this one tried to reserve it"
    )
    fix = "ask again, or begin fewer workloads at the same time"
    return BudgetExceeded(work.framework, work.needed, snapshot.result.available, Advice(reason, fix))
