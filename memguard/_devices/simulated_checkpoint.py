"""Simulates the driver's checkpoint calls. Each call returns the code that an H200 with driver 580.159 returned.

Used by guards of simulated GPUs (a guard applies a budget), and by tests that make calls fail or hang, or kill the
helper process that makes the calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memguard._devices import checkpoint as driver
from memguard._devices.checkpoint import State


class Fault(NamedTuple):
    """A fault to simulate in one call.

    code   the call returns `code` and does nothing; a restore that returns 1 or 2 has destroyed the process
    hang   the call does not return in time (HelperHangs); `done`: the driver completes the operation nevertheless
    die    the helper is killed (HelperDied); `done` as for `hang`
    """

    what: Literal["code", "hang", "die"]
    code: int = 0
    done: bool = True


class HelperHangs(Exception):
    """The simulated call does not return."""


class HelperDied(Exception):
    """The simulated helper was killed during the call."""


@dataclass
class Target:
    """A simulated process: its state, and its bytes by GPU (UUID), on the GPU or in host memory."""

    bytes: dict[str, int]
    state: State = State.RUNNING
    cuda: bool = True
    managed: bool = False
    importer: bool = False
    destroyed: bool = False
    stuck: dict[str, int] = field(default_factory=dict)
    """The bytes by GPU that a failed restore allocated before it failed."""
    calls: list[str] = field(default_factory=list)

    @property
    def on_card(self) -> Mapping[str, int]:
        if self.destroyed:
            return self.stuck
        return {} if self.state is State.CHECKPOINTED else self.bytes

    @property
    def whole(self) -> bool:
        return not self.destroyed


class SimulatedCheckpoint:
    """`Checkpoint` over simulated processes. `cards`: bytes of each GPU (UUID) available to processes. Thread-safe."""

    def __init__(self, cards: Mapping[str, int]) -> None:
        self.cards = dict(cards)
        self.targets: dict[int, Target] = {}
        self.others: dict[str, int] = dict.fromkeys(cards, 0)
        """Bytes of processes that cannot be suspended."""
        self.held: dict[str, int] = dict.fromkeys(cards, 0)
        """Bytes that the helper's `MemoryPlaceholder` holds."""
        self.faults: dict[str, deque[Fault]] = {}
        self._lock = threading.RLock()

    def fail(self, call: str, *faults: Fault) -> None:
        """Queue faults for the next calls of this name (`state`, `lock`, …), one fault a call."""
        self.faults.setdefault(call, deque()).extend(faults)

    def used(self, uuid: str) -> int:
        return self.others[uuid] + self.held[uuid] + sum(t.on_card.get(uuid, 0) for t in self.targets.values())

    def free(self, uuid: str) -> int:
        return self.cards[uuid] - self.used(uuid)

    def state(self, pid: int) -> tuple[int, State | None]:
        with self._lock:
            fault = self._fault("state")
            if fault is not None:
                _raise(fault)
                return fault.code, None
            target = self.targets.get(pid)
            if target is None:
                return driver.OPERATING_SYSTEM, None
            return (driver.SUCCESS, target.state) if target.cuda else (driver.NOT_INITIALIZED, None)

    def lock(self, pid: int, timeout_ms: int) -> int:
        return self._do("lock", pid, State.RUNNING, State.LOCKED)

    def checkpoint(self, pid: int) -> int:
        return self._do("checkpoint", pid, State.LOCKED, State.CHECKPOINTED)

    def restore(self, pid: int) -> int:
        return self._do("restore", pid, State.CHECKPOINTED, State.LOCKED)

    def unlock(self, pid: int) -> int:
        return self._do("unlock", pid, State.LOCKED, State.RUNNING)

    def _fault(self, call: str) -> Fault | None:
        faults = self.faults.get(call)
        return faults.popleft() if faults else None

    def _do(self, call: str, pid: int, before: State, after: State) -> int:
        with self._lock:
            fault = self._fault(call)
            target = self.targets.get(pid)
            if target is None:
                return driver.OPERATING_SYSTEM
            target.calls.append(call)
            if fault is not None and fault.what == "code":
                if call == "restore" and fault.code in (driver.INVALID_VALUE, driver.OUT_OF_MEMORY):
                    target.destroyed = target.destroyed or target.state is before
                return fault.code
            code = self._done(call, target, before, after) if fault is None or fault.done else 0
            if fault is not None:
                _raise(fault)
            return code

    def _done(self, call: str, target: Target, before: State, after: State) -> int:
        if not target.cuda:
            return driver.NOT_INITIALIZED
        if target.destroyed:
            return driver.OPERATING_SYSTEM if call == "restore" else driver.ILLEGAL_STATE
        if target.state is not before:
            return driver.ILLEGAL_STATE
        if call == "checkpoint" and target.managed:
            return driver.NOT_SUPPORTED
        if call == "restore":
            if target.importer:
                target.destroyed = True
                return driver.INVALID_VALUE
            free = {uuid: max(self.free(uuid), 0) for uuid in target.bytes}
            if any(size > free[uuid] for uuid, size in target.bytes.items()):
                target.destroyed = True
                target.stuck = {uuid: min(size, free[uuid]) for uuid, size in target.bytes.items()}
                return driver.OUT_OF_MEMORY
        target.state = after
        return driver.SUCCESS


def _raise(fault: Fault) -> None:
    if fault.what == "hang":
        raise HelperHangs
    if fault.what == "die":
        raise HelperDied
