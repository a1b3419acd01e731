"""The books: readings of host and frameworks put together into a ledger, and what was charged as overhead so far.

What is charged, and what the rows are, `accounts` decides.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from memguard._devices import contexts
from memguard._devices.host import Host
from memguard._frameworks import driver_pages, registry, second_contexts
from memguard._frameworks.base import Framework
from memguard._ledger import types
from memguard._policy import SECOND_CONTEXT, modules
from memguard._types import Device, DevicePlan, DeviceSample, Enforcement, FrameworkSample, Usage
from memguard._units import GRANULE, MIB, format_size
from memguard.errors import DeviceError, MemguardError

_ATTEMPTS = 3
_PATIENCE = 5.0
"""Seconds that a reading waits for another thread's."""
_LOANS = "memguard.exchange.lifetimes"
"""Nothing is lent where it was never loaded."""
_TRUSTED = 10
"""Samples in a row for which this process's bytes are taken to be what they were, while the card's are."""


class Books:
    """One process's readings. `unnamed` are frameworks that the budget does not name; `warn` takes a sentence."""

    def __init__(self, host: Host, unnamed: Sequence[str], warn: Callable[[str], None]) -> None:
        self._host, self._unnamed, self._warn = host, unnamed, warn
        self._lock = threading.RLock()
        self._created: dict[str, Framework] = {}
        self._overhead: dict[str, types.Overhead] = {}
        self._warned: set[str] = set()
        self._rest: dict[str, int] = {}
        self._owned: dict[str, tuple[int | None, int | None, int]] = {}
        self._ordinals: dict[str, int] = {}
        self._second: dict[str, dict[int, str]] = {}  # by GPU: handle and maker of contexts beside the primary one

    def clear(self) -> None:
        """Forget what was charged: another budget begins."""
        self._overhead.clear()
        self._warned.clear()
        self._rest.clear()
        self._owned.clear()
        self._second.clear()

    def unnamed(self) -> Mapping[str, Framework]:
        """The frameworks that the budget does not name and somebody imported: until then their files stay unread."""
        for name in self._unnamed:
            if name in sys.modules and name not in self._created:
                self._created[name] = registry.create(name, self._host)
        return self._created

    def read(
        self, part: DevicePlan, frameworks: Mapping[str, Framework], enforcements: Mapping[str, str]
    ) -> types.DeviceLedger:
        """One device's rows. NVML is read before and after, and all again if it moved meanwhile.

        MemguardError where another thread's reading does not return: a driver that hangs must not hang whoever asks.
        """
        if not self._lock.acquire(timeout=_PATIENCE):
            raise MemguardError(f"the GPUs have not answered another thread for {_PATIENCE:.0f} s\n    fix: nvidia-smi")
        try:
            return self._read(part, frameworks, enforcements)
        finally:
            self._lock.release()

    def _read(
        self, part: DevicePlan, frameworks: Mapping[str, Framework], enforcements: Mapping[str, str]
    ) -> types.DeviceLedger:
        device = part.device
        for attempt in range(_ATTEMPTS):
            before = self._host.memory(device), self._host.processes(device).get(self._host.pid)
            usages: dict[str, Usage | None] = {name: one.usage(device) for name, one in frameworks.items()}
            processes = self._host.processes(device)
            memory = self._host.memory(device)
            moved = (memory, processes.get(self._host.pid)) != before
            if not moved or attempt == _ATTEMPTS - 1:
                break
        steady = processes.get(self._host.pid) == before[1]  # else another thread allocates: no time to charge anything
        usages.update(_usages(self.unnamed(), device))
        live = frozenset(name for name, usage in usages.items() if usage is not None)
        active = self._host.context_active(device)
        own = types.own_bytes(processes, self._host.pid, bool(active) or bool(live and active is None))
        known = {**self._created, **frameworks}
        appeared = live.union(*(known[name].libraries() for name in live))
        if active or own:
            appeared |= {"context"}
        state = self._overhead.get(device.uuid, types.Overhead())
        slabs = driver_pages.slabs[device.uuid].gaps
        usages.update(self._kept(device))
        gap = types.gap(own, usages.values(), slabs)
        makers = self._makers(device, known.values(), state.last - gap if gap is not None and steady else 0)
        appeared |= {SECOND_CONTEXT + (f" {n}" if n > 1 else "") for n in range(1, len(makers) + 1)}
        if gap is not None and steady:
            exact = all(usage is None or usage.held is not None for usage in usages.values())
            state = self._overhead[device.uuid] = state.after(gap, appeared, exact)
        state = replace(state, slabs=slabs)
        if state.total > part.reserve and device.uuid not in self._warned:
            self._warned.add(device.uuid)
            self._warn(
                f"{device.name}: overhead is {format_size(state.total)}, more than the reserve of "
                f"{format_size(part.reserve)}; fix: {self._remedy(state, part)}"
            )
        stated = {**dict.fromkeys([*self._created, types.EXCHANGE], Enforcement.WATCHED.value), **enforcements}
        lent = self._lent(device)
        return types.device_ledger(device, memory, own, usages, stated, state, part, moved, makers, lent)

    def sample(
        self, part: DevicePlan, frameworks: Mapping[str, Framework], enforcements: Callable[[], Mapping[str, str]]
    ) -> DeviceSample:
        """One device's figures, each asked for once: what the monitor can afford several times a second.

        What has changed and is nobody's yet is looked at with the care of `read`, which charges it where it belongs.
        """
        with self._lock:
            return self._sample(part, frameworks, enforcements)

    def forked(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def _sample(
        self, part: DevicePlan, frameworks: Mapping[str, Framework], enforcements: Callable[[], Mapping[str, str]]
    ) -> DeviceSample:
        device = part.device
        uuid = device.uuid
        usages = _usages(frameworks, device)
        usages.update(_usages(self.unnamed(), device))
        memory = self._host.memory(device)
        own = self._own(device, memory.used, bool(usages))
        usages.update(self._kept(device))
        slabs = driver_pages.slabs[uuid].gaps
        gap = types.gap(own, usages.values(), slabs)
        charged = self._overhead[uuid].charged if uuid in self._overhead else 0
        rest = None if gap is None else gap - charged
        if rest is not None and abs(rest - self._rest.get(uuid, 0)) >= GRANULE:
            self._read(part, frameworks, enforcements())
            charged = self._overhead[uuid].charged if uuid in self._overhead else 0
            rest = self._rest[uuid] = (gap or 0) - charged
        caps = part.caps
        figures = {n: FrameworkSample(u.held, u.in_use, u.reclaimable, caps.get(n)) for n, u in usages.items()}
        overhead = charged + slabs
        return DeviceSample(uuid, device.total, memory.used, memory.free, own, part.limit, overhead, rest, figures)

    def _own(self, device: Device, used: int, live: bool) -> int | None:
        """This process's bytes. NVML's list is the dearest of the probes: asked where the card's figure has changed,
        and every tenth time, for a page that changes hands."""
        before, own, age = self._owned.get(device.uuid, (None, None, 0))
        if used != before or age >= _TRUSTED:
            own, age = types.own_bytes(self._host.processes(device), self._host.pid, live), 0
        self._owned[device.uuid] = used, own, age + 1
        return own

    def _ordinal(self, device: Device) -> int | None:
        """CUDA's number of the GPU: what the exchange counts by. It stays what it is while the process lives."""
        if self._host.simulated:
            return None
        if device.ordinal is not None:
            return device.ordinal
        if device.uuid not in self._ordinals:
            try:
                self._ordinals.update(contexts.ordinals())
            except DeviceError:
                return None
        return self._ordinals.get(device.uuid)

    def _kept(self, device: Device) -> dict[str, Usage]:
        """What the exchange holds for other processes, as the usage of its row; empty where that is nothing."""
        loans = sys.modules.get(_LOANS)
        kept: Mapping[int, int] | None = getattr(loans, "kept", None)
        size = kept.get(ordinal, 0) if kept and (ordinal := self._ordinal(device)) is not None else 0
        return {types.EXCHANGE: Usage(size, size, 0)} if size else {}

    def _lent(self, device: Device) -> dict[str, types.Lent]:
        """What each framework lends to others. Lent memory is charged to the lender, as ever."""
        loans = sys.modules.get(_LOANS)
        ordinal = self._ordinal(device) if loans is not None and hasattr(loans, "lent_by") else None
        if loans is None or ordinal is None:
            return {}
        lent = {n: types.Lent(loans.lent_by(n, ordinal), to) for n, to in loans.lent().get(ordinal, {}).items()}
        return {name: loan for name, loan in lent.items() if loan.bytes}

    def _makers(self, device: Device, frameworks: Iterable[Framework], fell: int) -> tuple[str, ...]:
        """Who made each context beside the primary one. `fell` is by how much less is unnamed than at the last reading.

        One that was seen and is not seen now may be on another thread: it is gone where what it cost is gone.
        """
        ordinal = self._ordinal(device)
        pools = [handle for one in frameworks for handle in one.contexts(device)]
        found = second_contexts.beside(ordinal, pools) if ordinal is not None else {}
        known = self._second.setdefault(device.uuid, {})
        cost = modules(SECOND_CONTEXT)
        unseen = [handle for handle in known if handle not in found]
        for handle in unseen[: max((fell + cost // 2) // cost, 0)]:
            del known[handle]
        for handle, maker in found.items():
            known[handle] = maker if maker != "unknown" else known.get(handle, maker)
        return tuple(known.values())

    @staticmethod
    def _remedy(state: types.Overhead, part: DevicePlan) -> str:
        communicators = sum(1 for name in state.appeared if name.startswith("nccl "))
        if communicators and part.reserve_source == "auto":
            return f"frameworks.torch.nccl: {communicators} in the budget"
        if state.second and part.reserve_source == "auto":
            least = f"device: {{reserve: {-(-state.total // MIB)}MiB}}"
            return f"do without the {SECOND_CONTEXT}, of which memguard.ledger() says who made it; or {least}"
        return f"device: {{reserve: {-(-state.total // MIB)}MiB}}"


def _usages(frameworks: Mapping[str, Framework], device: Device) -> dict[str, Usage]:
    """Of those that hold something there."""
    return {name: usage for name, one in frameworks.items() if (usage := one.usage(device)) is not None}
