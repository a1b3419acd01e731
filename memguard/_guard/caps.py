"""The caps of one budget: what they bound, and whether they still hold."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.locks import InterruptSafeLock, Turn
from memguard._base.logs import log as _log
from memguard._base.specs import SPECS
from memguard._base.types import Device, DevicePlan, Enforcement, Event, Plan
from memguard._base.units import parse_size
from memguard._budget import policy
from memguard._frameworks.base import Framework
from memguard._ledger.reader import LedgerReader
from memguard.errors import MemguardError, NotActive

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._budget.ranks import Sharing
    from memguard._devices.host import Host

_ENFORCED = Enforcement.ENFORCED
_NOTING = 1.0
"""Seconds to wait for another thread that notes the drift of a cap."""


class Entry:
    """A framework of the budget, and how its cap holds.

    `drift`: what was changed after the cap was set, so that it no longer holds. `enforcement` is `watched` meanwhile.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.enforcement = Enforcement.PENDING
        self.drift: tuple[str, ...] = ()

    @property
    def drift_reason(self) -> str:
        """The drift in one sentence, without the framework's name in front."""
        return "; ".join(sentence.removeprefix(f"{self.framework.name}: ") for sentence in self.drift)


class Caps:
    """What is capped, by which plan, and how each cap holds."""

    def __init__(self, budget: Budget, host: Host) -> None:
        self.budget = budget
        self.host = host
        self.notes: list[str] = []
        devices = host.devices(ordinals=policy.needs_ordinals(budget))
        self.sharing: Sharing | None = None
        """How the ranks of this node share the GPUs; None for a budget that is for one process."""
        if budget.ranks is not None:  # else `init` loads nothing of it
            from memguard._budget import ranks

            self.sharing = ranks.of_budget(budget, len(devices), os.environ, host.simulated)
        needed = self.sharing is not None and (not self.sharing.even or (budget.device.lease and len(devices) > 1))
        if needed and any(one.ordinal is None for one in devices):
            devices = host.devices(ordinals=True)
        self.plan = policy.plan(budget, devices, self.sharing)
        self._on_event: Callable[[Event], None] | None = None
        """Called when a cap no longer holds, or holds again; on the thread that found it, without the guard's lock."""
        self._lock = InterruptSafeLock()
        self._turn = Turn(self._lock)
        self._noting = Turn()
        """For the drift of the caps. Nobody waits for anything while having it."""
        self._entries: dict[str, Entry] = {}
        self._frameworks: Mapping[str, Framework] = {}
        """Those of `_entries`. Always the same one, which the reader knows again."""
        self._warned: set[str] = set()
        self._resized = 0
        self._over = False
        self._pid = os.getpid()
        # Frameworks that the budget does not name have no cap, but a row once they are live. Real ones only.
        unnamed = () if host.simulated else tuple(name for name in SPECS if name not in budget.frameworks)
        self._reader = LedgerReader(host, unnamed, self._warn)

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget means nothing."""
        return bool(self._entries) and not self._over and self._pid == os.getpid()

    @property
    def frameworks(self) -> Mapping[str, Framework]:
        """The frameworks of the budget by name; with simulated GPUs, their simulated stand-ins."""
        return dict(self._frameworks)

    @property
    def own_plan(self) -> Plan:
        """The plan of the GPUs that this process uses: of a rank that is known to use one of several, of that one."""
        own = None if self.sharing is None else self.sharing.own
        found = tuple(part for part in self.plan.devices if own is not None and part.device.ordinal == own)
        return replace(self.plan, devices=found) if found else self.plan

    def part(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        return next(part for part in self.plan.devices if part.device.uuid == uuid)

    def _planned(self, device: Device) -> DevicePlan:
        """The plan of that GPU. Raises MemguardError if the budget has none for it."""
        for part in self.plan.devices:
            if part.device.uuid == device.uuid:
                return part
        known = ", ".join(f"{part.device.name} ({part.device.uuid})" for part in self.plan.devices)
        raise MemguardError(
            f"{device.name} ({device.uuid}) is not a GPU of the budget, which has: {known}",
            fix="give the device of one of guard.plan.devices, or leave out device=",
        )

    def _find_drift(self, only: str | None = None) -> None:
        """Ask each framework, or `only` this one, whether the cap that was set still holds, and note what changed.

        Frameworks are asked without the lock, as a driver may hang. What they answer during a `resize` is dropped: it
        changes what they compare with.
        """
        entries, resized = self._entries, self._resized
        if self._over or self._pid != os.getpid():
            return
        answers: dict[str, tuple[str, ...]] = {}
        chosen = None if only is None else entries.get(only)
        for name, entry in entries.items() if only is None else () if chosen is None else ((only, chosen),):
            if entry.enforcement is not _ENFORCED and not entry.drift:
                continue  # no cap was set
            try:
                found = entry.framework.drift()
            except Exception as error:
                self._unchecked(name, error)
                continue
            if (found or entry.drift) and (now := tuple(found)) != entry.drift:
                answers[name] = now
        if not answers:  # nothing is to be noted
            return
        events: list[Event] = []

        def note() -> None:
            if self._entries is entries and self._resized == resized and not resized % 2:
                events.extend(e for name, found in answers.items() if (e := self._drifted(name, entries[name], found)))

        if not self._noting.take(note, _NOTING):
            return
        for event in events:
            if self._on_event is not None:
                self._on_event(event)

    def _changed(self) -> None:
        """What adapters call when a setting was changed that a cap depends on."""
        self._find_drift()

    def _drift_of(self, name: str, entry: Entry) -> tuple[str, ...]:
        """What was changed since the cap was set; what is known already if that cannot be checked."""
        if entry.enforcement is not Enforcement.ENFORCED and not entry.drift:
            return ()  # no cap was set
        try:
            return tuple(entry.framework.drift())
        except Exception as error:
            self._unchecked(name, error)
            return entry.drift

    def _unchecked(self, name: str, error: Exception) -> None:
        self._warn_once(f"{name}: whether its cap still holds cannot be checked: {type(error).__name__}: {error}")

    def _drifted(self, name: str, entry: Entry, found: tuple[str, ...]) -> Event | None:
        """Note the drift of one framework. The event, if it is another than before."""
        if found == entry.drift:
            return None
        entry.drift = found
        entry.enforcement = Enforcement.WATCHED if found else Enforcement.ENFORCED
        for sentence in found:
            self._warn_once(sentence)
        text = f"its cap no longer holds: {_cause(entry.drift_reason)}" if found else "its cap holds again"
        return Event(time.time(), "note", f"{name}: {text}", framework=name)

    def _met_the_cap(self, name: str, sentence: str) -> None:
        """A setting that the user made later met the cap of a framework, which has logged it."""
        if self._on_event is not None:
            self._on_event(Event(time.time(), "note", sentence, framework=name))

    def _used_by(self, framework: str) -> Sequence[DevicePlan]:
        """With several GPUs, `require` without a device asks about the ones the framework uses, or the first."""
        parts = self.plan.devices
        if len(parts) == 1:
            return parts
        asked = self._entry(framework).framework
        return [part for part in parts if asked.usage(part.device)] or parts[:1]

    def _framework(self, name: str) -> Framework:
        return self._entry(name).framework

    def _entry(self, framework: str) -> Entry:
        try:
            return self._entries[framework]
        except KeyError:
            if self._over:  # since the call began: by another thread, or by a signal handler
                self._check_active()
            import difflib

            known = ", ".join(self._entries) or "none: it is not active"
            near = difflib.get_close_matches(str(framework), self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MemguardError(f"{framework!r} is not in the budget, which has: {known}{hint}") from None

    @staticmethod
    def _size(size: int | str) -> int:
        try:
            return parse_size(size)
        except ValueError as error:
            raise MemguardError(str(error)) from None

    def _check_active(self) -> None:
        if not self.active:
            applied = "it was shut down" if self._over else "it is just being applied"
            why = "this is a forked child" if self._pid != os.getpid() else applied
            raise NotActive(f"no budget is active here: {why}", fix="call memguard.init('budget.yaml')")

    def _warn(self, note: str) -> None:
        self._note(note, logging.WARNING)

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _log.warning("%s", sentence)

    def _note(self, note: str, level: int = logging.INFO) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.log(level, "%s", note)

    def _all_notes(self) -> list[str]:
        notes = [*self.notes]
        for entry in self._entries.values():
            notes += entry.framework.notes
            notes += entry.drift
        return notes


def _cause(reason: str) -> str:
    """A drift without its own words that the cap does not hold."""
    return re.sub(r": (?:the|its) cap (?:no longer holds|does not hold(?: there)?|will not hold)(?=;|$)", "", reason)
