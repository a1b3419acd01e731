"""Waits until a suspended process fits on its GPUs again, and keeps the room until its restore begins.

First come, first served among the user's own processes (`tickets`), but for those that are stopped (Ctrl-Z): they keep
their places, and nobody waiting. Others are not asked: what a stranger takes between two looks is waited for again, and
what is held (`holder`) nobody can take. Once it is let go, the driver takes it for
the restored process within milliseconds; docs/suspend.md says what was measured of that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from memguard._base.advice import Advice
from memguard._base.units import format_size
from memguard._devices import proc
from memguard._devices.checkpoint import MARGIN
from memguard._node.identity import Process, anonymous_bytes, stopped
from memguard._node.suspend.driver.channel import Card, CheckpointChannel
from memguard._node.suspend.store.tickets import Turn
from memguard._node.suspend.types import Progress, Wait
from memguard.errors import MemguardError

_EVERY = 0.25
"""Seconds between two looks at what is free."""
_TURN = 0.05
"""As long, where there is room and only others of the user come first: they take tenths of a second."""
_IN_VAIN = 20
"""How often in a row what NVML calls free may not be had: then it is not for a stranger that is faster."""


def short(needs: Mapping[str, int], cards: Mapping[str, Card]) -> dict[str, int]:
    """How many bytes each GPU (UUID) lacks for `needs`; without those that have enough. Pure."""
    lacking = {}
    for uuid, size in needs.items():
        free = cards[uuid].free if uuid in cards else 0
        if free < size + MARGIN:
            lacking[uuid] = size + MARGIN - free
    return lacking


def bytes_of(process: Process, cards: Mapping[str, Card]) -> dict[str, int] | None:
    """Where nobody recorded it: each GPU must have what the process holds in host memory. None: unknown."""
    most = anonymous_bytes(process)
    return None if most is None else dict.fromkeys(cards, most)


class Waiting:
    """A `flow.Room`. It waits `timeout` seconds at most (None: without end), and tells `progress` how it stands."""

    def __init__(
        self,
        timeout: float | None = None,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        where: str | None = None,
    ) -> None:
        self._timeout, self._progress, self._clock, self._where = timeout, progress, clock, where

    @contextlib.contextmanager
    def __call__(
        self,
        process: Process,
        needs: Mapping[str, int] | None,
        client: CheckpointChannel,
        cancel: threading.Event | None,
    ) -> Iterator[Advice | None]:
        if needs is None:
            cards = client.usage()
            needs = None if cards is None else bytes_of(process, cards)
            if needs is None:
                yield Advice("nobody knows how many bytes it needs, and neither NVML nor /proc says")
                return
        try:
            turn = Turn(needs, self._where).__enter__()
        except (OSError, MemguardError) as error:
            why = error.advice if isinstance(error, MemguardError) else Advice(str(error))
            yield why.within("it cannot take its turn")
            return
        try:
            yield self._until(needs, client, cancel or threading.Event(), turn, process.pid)
        finally:
            client.release()
            turn.__exit__()

    def _until(
        self, needs: Mapping[str, int], client: CheckpointChannel, cancel: threading.Event, turn: Turn, pid: int
    ) -> Advice | None:
        """Hold the room. Returns None once it is held, else why not."""
        started, in_vain = self._clock(), 0
        while True:
            cards = client.usage()
            lacking, pause = Advice("NVML does not say what is free"), _EVERY
            if cards is not None:
                missing, ahead = short(needs, cards), _at_work(turn.ahead())
                unknown = next((uuid for uuid in needs if uuid not in cards), None)
                if unknown is not None:
                    return Advice(f"GPU {unknown}, on which it was, is not here any more")
                if not missing and not ahead:
                    held = client.hold(needs)
                    if not held.trouble:
                        return None
                    failed, in_vain = Advice(held.text, held.fix), in_vain + 1
                else:
                    failed, in_vain = None, 0
                waits = _waits(needs, cards, ahead, self._clock() - started)
                lacking = _words(waits, missing, failed, pid, ahead)
                pause = _EVERY if missing or failed else _TURN
                if self._progress is not None:
                    for wait in waits:
                        self._progress(wait)
            if in_vain >= _IN_VAIN or (self._timeout is not None and self._clock() - started >= self._timeout):
                return lacking
            if cancel.wait(pause):
                return lacking


def _at_work(ahead: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Without those who are stopped. The room itself is safe from both: it is held by a placeholder."""
    going = {uuid: tuple(pid for pid in pids if not stopped(Process(pid, 0))) for uuid, pids in ahead.items()}
    return {uuid: pids for uuid, pids in going.items() if pids}


def _waits(
    needs: Mapping[str, int], cards: Mapping[str, Card], ahead: Mapping[str, tuple[int, ...]], seconds: float
) -> list[Wait]:
    found = []
    for uuid, size in needs.items():
        card = cards[uuid]
        holders = proc.holders(card.processes, card.used)
        found.append(Wait(uuid, size + MARGIN, card.free, len(ahead.get(uuid, ())), holders, seconds))
    return found


def _words(
    waits: list[Wait], missing: Mapping[str, int], failed: Advice | None, pid: int, ahead: Mapping[str, tuple[int, ...]]
) -> Advice:
    """Why there is no room for process `pid`, what to do, and who holds it.

    `failed`: why the room could not be held, although it was free a moment before. `ahead`: who came before, by GPU.
    """
    if failed is not None:
        return failed
    reasons, held = list[str](), list[str]()
    for wait in waits:
        if wait.uuid in missing:
            reasons.append(f"{wait.uuid} has {format_size(wait.free)} free, and it needs {format_size(wait.needs)}")
            if wait.holders:
                held += [f"    {wait.uuid} is held by", *(f"        {line}" for line in wait.holders)]
        elif wait.ahead:
            reasons.append(f"{wait.uuid}: {_before(ahead.get(wait.uuid, ()))}")
    longer = f"wait longer (`memguard resume {pid} --wait 1h`; without --wait, until there is room)"
    fix = f"end or suspend one of those below, or {longer}" if held else longer
    first = next((pids[0] for pids in ahead.values()), None)
    if first is not None:
        fix += f"; if {_name(first)} stands still, all behind it wait until it is ended"
    return Advice("; ".join(reasons), "\n".join([fix, *held]))


def _before(pids: tuple[int, ...]) -> str:
    """Who comes first: the first of them keeps all others waiting."""
    if len(pids) == 1:
        return f"{_name(pids[0])} came before it and waits for its turn"
    shown = ", ".join(map(str, pids[:4])) + (" ..." if len(pids) > 4 else "")
    return f"{len(pids)} came before it and wait for their turns (processes {shown})"


def _name(pid: int) -> str:
    return f"process {pid}" if pid else "a process of another container"
