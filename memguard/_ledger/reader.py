"""Reads NVML and the frameworks for the ledger and the monitor, and keeps each GPU's overhead between readings.

Overhead is memory outside all frameworks that is attributed (charged) to CUDA contexts, modules and libraries; the
module `overhead` decides how many bytes to charge. `LedgerReader._usages` reads the frameworks. `reading` reads NVML
before and after `_usages`, and repeats both if NVML's figures changed; `sample` and `read_unlocked` read NVML once. The
module `rows` builds the ledger's rows and the sample.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from memguard._base.framework_spec import KERNELS, SECOND_CONTEXT
from memguard._base.locks import LockedRunner, LockOrder, interrupting
from memguard._base.types import (
    POOL,
    Device,
    DevicePlan,
    DeviceSample,
    Enforcement,
    Usage,
)
from memguard._base.units import GRANULE, MIB, format_size
from memguard._budget.policy import modules
from memguard._devices import contexts
from memguard._devices.host import Host
from memguard._frameworks import driver_pages, registry, second_contexts
from memguard._frameworks.base import Framework
from memguard._frameworks.specs import setting
from memguard._ledger.overhead import Overhead, held_by, own_bytes, same_held
from memguard._ledger.rows import Reading, device_ledger, reading_of, sample_of_reading
from memguard._ledger.types import EXCHANGE, DeviceLedger, Lent
from memguard.errors import DeviceError, MemguardError

if TYPE_CHECKING:
    from memguard._frameworks.shared_pool import SharedPool

_Read = TypeVar("_Read")
_ATTEMPTS = 3
_LOCK_TIMEOUT = 5.0
"""Seconds that a thread waits for another thread's reading to end."""
_LOANS = "memguard._frameworks.arrays.lifetimes"
"""The module that records arrays shared between frameworks. If it is not loaded, no array is shared."""
_CONTEXT, _NOTHING, _UNKNOWN = frozenset({"context"}), Overhead(), Usage(None, None)
_NONE: frozenset[str] = frozenset()
_NO_LOANS: Mapping[str, Lent] = MappingProxyType({})
_NOT_READ: tuple[int | None, int | None, int] = (None, None, 0)
_MAX_REUSES = 10
"""The most consecutive samples that reuse the last value of this process's bytes, while the GPU's used bytes do not
change."""
_DEFAULTS = {"libraries": Framework.libraries, "contexts": Framework.contexts, "uncounted": Framework.uncounted}
"""Methods that few frameworks override, and their default implementations."""
_NamedFrameworks = tuple[tuple[str, Framework], ...]
_Overriding = tuple[_NamedFrameworks, ...]
_SEARCH_INTERVAL = 1.0
"""Least seconds between two searches for the cause of growth. During a leak every reading finds growth."""
_ENTRIES_MAX_AGE = 0.1
"""Seconds for which a reading without growth reuses the observed library entries."""


class LedgerReader:
    """Reads this process's GPUs and frameworks.

    `unnamed`: the frameworks that the budget does not name. `warn` logs a sentence.
    """

    def __init__(self, host: Host, unnamed: Sequence[str], warn: Callable[[str], None]) -> None:
        self.host, self._unnamed, self._warn = host, unnamed, warn
        self.shared_pool: SharedPool | None = None
        self._locked = LockedRunner(order=LockOrder.READER)
        self._created: dict[str, Framework] = {}
        self._overhead: dict[str, Overhead] = {}
        self._latest: dict[str, Mapping[str, Usage | None]] = {}  # the usages of the last reading of each GPU
        self._warned: set[str] = set()
        self._unaccounted: dict[str, int] = {}
        self._inconsistent: set[str] = set()  # GPUs whose figures changed during the last reading
        self._own_bytes: dict[str, tuple[int | None, int | None, int]] = {}
        self._ordinals: dict[str, int] = {}
        self._searched_in_vain = -math.inf  # time of the last search that found no new library
        self._entries_read_at = (
            math.inf
        )  # time of the last reading of library entries; infinite before an owner appears
        self._overrides: tuple[Mapping[str, Framework], int, _Overriding] | None = None
        self._contexts_known: dict[str, dict[int, str]] = {}  # by UUID: handle and creator of each non-primary context

    def clear(self) -> None:
        """Clear the overhead and cached figures of all GPUs before another budget is applied."""
        self._overhead.clear()
        self._latest.clear()
        self._warned.clear()
        self._unaccounted.clear()
        self._inconsistent.clear()
        self._own_bytes.clear()
        self._contexts_known.clear()

    def forked(self) -> None:
        """In a forked child, replace the lock: a thread of the parent may have held it during the fork."""
        self._locked = LockedRunner(order=LockOrder.READER)

    def wait(self, seconds: float) -> bool:
        """Wait for a reading in progress on another thread. Returns True if the reading ends within `seconds`."""
        return self._locked.run(bool, seconds) is not None

    def unnamed(self) -> Mapping[str, Framework]:
        """Adapters of the imported frameworks that the budget does not name. Creates and imports no other adapter."""
        for name in self._unnamed:
            if name in sys.modules and name not in self._created:
                self._created[name] = registry.create(name, self.host)
        return self._created

    def ledger(
        self,
        device_plan: DevicePlan,
        frameworks: Mapping[str, Framework],
        enforcements: Mapping[str, str],
        refusals: Mapping[str, tuple[int, float | None]] | None = None,
    ) -> DeviceLedger:
        """Read one GPU and build its ledger. `refusals` is passed to `device_ledger`.

        Raises MemguardError if another thread's reading does not end in time, so that a hanging driver call does not
        block every caller.
        """
        return self.ledger_of(self.reading(device_plan, frameworks), device_plan, enforcements, refusals)

    def reading(self, device_plan: DevicePlan, frameworks: Mapping[str, Framework]) -> Reading:
        """Read one GPU without building rows. Raises MemguardError like `ledger`."""
        read = self._locked.run(self._read, 0, device_plan, frameworks, True)
        return read[0] if read is not None else self._read_in_turn(self._read, device_plan, frameworks)

    def ledger_of(
        self,
        reading: Reading,
        device_plan: DevicePlan,
        enforcements: Mapping[str, str],
        refusals: Mapping[str, tuple[int, float | None]] | None = None,
    ) -> DeviceLedger:
        """The ledger of a reading. Its rows are built on first access, so the arguments must not change afterwards."""
        watched = dict.fromkeys([*self._created, EXCHANGE], Enforcement.WATCHED.value)
        watched[POOL] = ""
        return device_ledger(reading, device_plan, {**watched, **enforcements}, refusals)

    def read_unlocked(
        self, device_plan: DevicePlan, frameworks: Mapping[str, Framework]
    ) -> tuple[Reading, Mapping[int, int | None]]:
        """Read one GPU and its processes once, for a refused request. Takes no lock and stores no overhead.

        Called within an allocation, where a wait for another thread's lock could deadlock. Reads neither non-primary
        contexts nor shared arrays.
        """
        device = device_plan.device
        usages = self._usages(device, frameworks, within_allocation=True)
        memory, processes = self.host.memory(device), self.host.processes(device)
        own = own_bytes(processes, self.host.pid, True)
        held, state = held_by(usages), self._state(device.uuid)
        gap = None if own is None else own - held.bytes - state.slabs
        if gap is not None:  # not stored: the next call of `reading` computes and stores the overhead
            entries = self.host.entries(mark=False) if gap > state.last_gap else state.entries
            appeared = state.appeared.union(held.live, _CONTEXT)
            now = time.monotonic()
            state = state.after(gap, appeared, held.exact, state.loaded, now, entries, held.at_least)
        return Reading(device, memory, own, usages, state), processes

    def peaks(self) -> dict[str, dict[str, int]]:
        """The allocators' peaks of bytes in use, by UUID and framework, from each GPU's last reading. Reads no
        allocator."""
        return {
            uuid: {name: usage.peak for name, usage in usages.items() if usage is not None and usage.peak is not None}
            for uuid, usages in [*self._latest.items()]
        }

    def sample(self, device_plan: DevicePlan, frameworks: Mapping[str, Framework]) -> DeviceSample:
        """Read one GPU for the monitor, each figure once, which is cheap enough for several samples a second.

        If the unaccounted memory has changed, `sample` calls `_read`, which updates the overhead.
        """
        read = self._locked.run(self._sample, 0, device_plan, frameworks, True)
        return read[0] if read is not None else self._read_in_turn(self._sample, device_plan, frameworks)

    def _read_in_turn(
        self,
        read: Callable[[DevicePlan, Mapping[str, Framework], bool], _Read],
        device_plan: DevicePlan,
        frameworks: Mapping[str, Framework],
    ) -> _Read:
        """Call `read` after another thread's reading has ended, because only one reading at a time may update the
        overhead. Returns the result of `read`.

        A signal handler must not wait, because the other thread may be waiting for a framework's lock that the
        interrupted code holds. In a signal handler `read` runs immediately, with `charge` False.
        """
        if interrupting():
            return read(device_plan, frameworks, False)
        found = self._locked.run(read, _LOCK_TIMEOUT, device_plan, frameworks, True)
        if found is not None:
            return found[0]
        raise MemguardError(
            f"another thread has waited {_LOCK_TIMEOUT:.0f} s for the driver", fix="run nvidia-smi to see if it hangs"
        )

    def _read(
        self,
        device_plan: DevicePlan,
        frameworks: Mapping[str, Framework],
        charge: bool,
        earlier: Mapping[str, Usage | None] | None = None,
    ) -> Reading:
        """Read NVML before and after the frameworks, and read everything again if NVML's figures changed in between.

        The overhead may change only if each framework reports the same bytes before and after NVML is read. `earlier`:
        the frameworks' figures just before this call. If `earlier` is None or differs, and the overhead would change,
        the frameworks are read once more. `charge` False stores no overhead.
        """
        device, host = device_plan.device, self.host
        pid, uuid = host.pid, device.uuid
        for _ in range(_ATTEMPTS):
            memory_before, before = host.memory(device), host.processes(device).get(pid)
            usages = self._usages(device, frameworks)
            processes = host.processes(device)
            memory, now = host.memory(device), processes.get(pid)
            moved = memory != memory_before or now != before
            if not moved:
                break
        (known, live, exact, at_least), state = held_by(usages), self._state(uuid)
        with_libraries, with_contexts, with_uncounted = self._overriding(frameworks)
        active = True if now else host.context_active(device)  # a process with memory on the GPU has a context
        own = own_bytes(processes, pid, bool(active) or bool(live and active is None))
        found = [libraries for name, one in with_libraries if name in live and (libraries := one.libraries())]
        appeared = live.union(*found, _CONTEXT if active or own else ())
        # `gap` is None if this process's bytes changed in every attempt, because another thread allocates.
        gap = None if own is None or now != before else own - known - state.slabs
        owners = self._second_contexts(device, with_contexts, 0 if gap is None else state.last_gap - gap)
        if gap is not None:
            if owners:
                appeared |= {SECOND_CONTEXT + (f" {n}" if n > 1 else "") for n in range(1, len(owners) + 1)}
            loaded, entries = self._loaded(state, gap, appeared, charge)
            after = state.after(gap, appeared, exact, loaded, time.monotonic(), entries, at_least)
            uncharged = after is state or after.lasting == state.lasting
            consistent = uncharged or self._unchanged_while_read(device, frameworks, usages, earlier)
            state, moved = (after, moved) if consistent else (state, True)
            if charge:
                self._overhead[uuid] = state
                (self._inconsistent.discard if consistent else self._inconsistent.add)(uuid)
        elif charge and own is not None:
            self._inconsistent.add(uuid)
        if state.charged + state.slabs > device_plan.reserve:
            self._warn_of_overhead(state, device_plan)
        lent = self._lent(device) if _LOANS in sys.modules else _NO_LOANS
        uncounted = tuple([what for name, one in with_uncounted if name in live and (what := one.uncounted())])
        return reading_of((device, memory, own, usages, state, moved, owners, lent, uncounted))

    def _unchanged_while_read(
        self,
        device: Device,
        frameworks: Mapping[str, Framework],
        usages: Mapping[str, Usage | None],
        earlier: Mapping[str, Usage | None] | None,
    ) -> bool:
        """True if each framework holds the same bytes in `usages` and in `earlier`, or in a new reading of the
        frameworks."""
        pooled = [name for name, one in frameworks.items() if one.pooled]
        if earlier is not None and same_held(earlier, usages, pooled):
            return True
        return same_held(usages, self._usages(device, frameworks), pooled)

    def _sample(self, device_plan: DevicePlan, frameworks: Mapping[str, Framework], charge: bool) -> DeviceSample:
        device = device_plan.device
        uuid, usages = device.uuid, self._usages(device, frameworks)
        memory = self.host.memory(device)
        used, (before, own, age) = memory.used, self._own_bytes.get(uuid, _NOT_READ)
        if used is None or used != before or age >= _MAX_REUSES:
            own, age = self._read_own_bytes(device, usages), 0
        self._own_bytes[uuid] = used, own, age + 1
        reading = reading_of((device, memory, own, usages, self._state(uuid), False, (), _NO_LOANS, ()))
        sample = sample_of_reading(reading, device_plan)
        unaccounted = sample.unaccounted
        if unaccounted is not None and (
            uuid in self._inconsistent or abs(unaccounted - self._unaccounted.get(uuid, 0)) >= GRANULE
        ):
            sample = sample_of_reading(self._read(device_plan, frameworks, charge, usages), device_plan)
            self._unaccounted[uuid] = sample.unaccounted or 0
        elif charge and time.monotonic() - self._entries_read_at >= _SEARCH_INTERVAL:
            self._read_entries()
        return sample

    def _usages(
        self, device: Device, frameworks: Mapping[str, Framework], within_allocation: bool = False
    ) -> dict[str, Usage | None]:
        """Read the figures of each row of kind `framework` once: the budget's frameworks, other imported frameworks
        that use the GPU, the pool that frameworks share, and the memory that `memguard.exchange` holds for other
        processes.

        `within_allocation`: create no adapter, skip the exchange (it may query the driver for ordinals), and return
        unknown figures for a framework whose reading fails.
        """
        usages: dict[str, Usage | None] = {}
        others = self._created if within_allocation or not self._unnamed else self.unnamed()
        for name, one in {**frameworks, **others}.items() if others else frameworks.items():
            try:
                usage = one.usage(device)
            except Exception:
                if not within_allocation:
                    raise
                usage = _UNKNOWN
            if usage is not None or name in frameworks:
                usages[name] = usage
        if self.shared_pool is not None:
            usages.update(self._shared_pool_usage(device, frameworks, usages))
        if within_allocation:
            return usages
        if _LOANS in sys.modules:
            usages.update(self._exchange_usage(device))
        self._latest[device.uuid] = usages
        return usages

    def _state(self, uuid: str) -> Overhead:
        """The stored overhead of a GPU, with the current bytes of the driver's slabs that no framework counts."""
        state, slabs = self._overhead.get(uuid, _NOTHING), driver_pages.slabs[uuid].gaps
        return state if slabs == state.slabs else state.with_slabs(slabs)

    def _loaded(
        self, state: Overhead, gap: int, appeared: frozenset[str], mark: bool
    ) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
        """The loaded libraries, and the observed calls (entries) of libraries, as returned by `Host.entries`.

        Reading the operating system's list of loaded libraries takes milliseconds. So it is read only if an owner (a
        context, framework or communicator) is new, or if kernels were loaded and the growth of the gap fits a library's
        first use. If entries cannot be observed, a search that found no new library is not repeated for a second.
        """
        new = appeared - state.appeared
        if not mark:  # a signal handler must return soon, so the next reading searches instead
            return state.loaded, self.host.entries(mark=False)
        if new:
            return self.host.libraries(), self._read_entries(new)
        now = time.monotonic()
        if gap <= state.last_gap and now - self._entries_read_at < _ENTRIES_MAX_AGE:
            return state.loaded, state.entries
        entries = self._read_entries()
        observed = any(name == KERNELS for name, _ in entries)
        due = (
            KERNELS in state.with_entries(entries, now).entered
            if observed
            else now - self._searched_in_vain >= _SEARCH_INTERVAL
        )
        if not due or not state.may_be_a_library(gap):
            return state.loaded, entries
        loaded = self.host.libraries()
        if loaded <= state.loaded:
            self._searched_in_vain = now
            return loaded, entries
        return loaded, self._read_entries()

    def _read_entries(self, new: frozenset[str] = _NONE) -> frozenset[tuple[str, int]]:
        """Read the observed calls (entries) of libraries. An entry does not show which GPU the library used, so the
        overhead of each GPU counts the entry. `new`: owners that have just appeared."""
        entries, self._entries_read_at = self.host.entries(), time.monotonic()
        for uuid, state in self._overhead.items():
            self._overhead[uuid] = state.with_entries(entries, self._entries_read_at, new)
        return entries

    def _overriding(self, frameworks: Mapping[str, Framework]) -> _Overriding:
        """For each of `libraries`, `contexts` and `uncounted`, the frameworks that override it."""
        if (
            self._overrides is not None
            and self._overrides[0] is frameworks
            and self._overrides[1] == len(self._created)
        ):
            return self._overrides[2]
        known = sorted({**self._created, **frameworks}.items())
        found = tuple(
            tuple((name, one) for name, one in known if getattr(getattr(one, what), "__func__", None) is not default)
            for what, default in _DEFAULTS.items()
        )
        self._overrides = frameworks, len(self._created), found
        return found

    def _read_own_bytes(self, device: Device, usages: Mapping[str, Usage | None]) -> int | None:
        """This process's bytes, from NVML's process list; None if unknown.

        Reading the list is the slowest call of a sample. So `_sample` calls this method only if the GPU's used bytes
        have changed, and at every tenth sample, because one process may have freed as many bytes as another allocated.
        On unified memory NVML reports no used bytes, so each sample calls this method.
        """
        processes, pid = self.host.processes(device), self.host.pid
        live = pid not in processes and (
            any(usage is not None for usage in usages.values()) or bool(self.host.context_active(device))
        )
        return own_bytes(processes, pid, live)

    def _ordinal(self, device: Device) -> int | None:
        """The GPU's CUDA ordinal, by which `memguard.exchange` counts shared arrays; None if unknown. The
        ordinal never changes within a process."""
        if self.host.simulated:
            return None
        if device.ordinal is not None:
            return device.ordinal
        if device.uuid not in self._ordinals:
            try:
                self._ordinals.update(contexts.ordinals())
            except DeviceError:
                return None
        return self._ordinals.get(device.uuid)

    def _exchange_usage(self, device: Device) -> dict[str, Usage]:
        """The row of memory that `memguard.exchange` holds for other processes; empty if it holds none."""
        loans = sys.modules.get(_LOANS)
        held: Mapping[int, int] | None = getattr(loans, "held_for_processes", None)
        size = held.get(ordinal, 0) if held and (ordinal := self._ordinal(device)) is not None else 0
        return {EXCHANGE: Usage(size, size, 0)} if size else {}

    def _shared_pool_usage(
        self, device: Device, frameworks: Mapping[str, Framework], read: Mapping[str, Usage | None]
    ) -> dict[str, Usage]:
        """The row of the pool's idle memory; empty before the pool exists. `read` has the rows of the frameworks that
        allocate from the pool. Their rows and the row of idle memory add up to the pool's size, to the byte."""
        if self.shared_pool is None:
            return {}
        members = [(one, usage) for name, one in frameworks.items() if one.pooled and (usage := read.get(name))]
        counted = sum([usage.held or 0 for _, usage in members])
        found = self.shared_pool.cache(device, counted, any(one.spec.remainder for one, _ in members))
        return {} if found is None else {POOL: found}

    def _lent(self, device: Device) -> dict[str, Lent]:
        """By framework, its memory that other frameworks have views of. The ledger counts that memory for the
        framework that allocated it."""
        loans = sys.modules.get(_LOANS)
        ordinal = self._ordinal(device) if loans is not None and hasattr(loans, "lent_by") else None
        if loans is None or ordinal is None:
            return {}
        lent = {n: Lent(loans.lent_by(n, ordinal), to) for n, to in loans.lent().get(ordinal, {}).items()}
        return {name: loan for name, loan in lent.items() if loan.bytes}

    def _second_contexts(self, device: Device, frameworks: _NamedFrameworks, decrease: int) -> tuple[str, ...]:
        """The creator of each non-primary context. `decrease`: the bytes by which the unaccounted memory decreased.

        A context that is current on another thread may not be found. So a known context counts as destroyed only if
        unaccounted memory also decreased by about the size of a context.
        """
        if self.host.simulated:  # a simulated GPU has no contexts
            return ()
        ordinal = device.ordinal if device.ordinal is not None else self._ordinal(device)
        pools = [handle for _, one in frameworks for handle in one.contexts(device)]
        found = second_contexts.find(ordinal, pools) if ordinal is not None else {}
        if not found and not self._contexts_known.get(device.uuid):
            return ()
        known = {**self._contexts_known.get(device.uuid, {})}
        cost = modules(SECOND_CONTEXT)
        unseen = [handle for handle in known if handle not in found]
        for handle in unseen[: max((decrease + cost // 2) // cost, 0)]:
            del known[handle]
        for handle, owner in found.items():
            known[handle] = owner if owner != "unknown" else known.get(handle, owner)
        self._contexts_known[device.uuid] = known
        return tuple(known.values())

    def _warn_of_overhead(self, state: Overhead, device_plan: DevicePlan) -> None:
        """Warn, once for each GPU, that the overhead exceeds the reserve in the budget."""
        if device_plan.device.uuid in self._warned:
            return
        self._warned.add(device_plan.device.uuid)
        fix = f"device: {{reserve: {-(-state.total // MIB)}MiB}}"
        communicators = sum(1 for name in state.appeared if name.startswith("nccl "))
        if device_plan.reserve_source == "auto" and communicators:
            fix = f"{setting('nccl')}: {communicators} in the budget"
        elif device_plan.reserve_source == "auto" and state.second_contexts:
            fix = f"avoid the {SECOND_CONTEXT} (memguard.ledger() shows what made it); or {fix}"
        self._warn(
            f"{device_plan.device.name}: overhead is {format_size(state.total)}, more than the reserve of "
            f"{format_size(device_plan.reserve)}; fix: {fix}"
        )
