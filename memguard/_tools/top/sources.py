"""Where `memguard top` looks: timelines that are named, or this machine. `read` gives one snapshot after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from memguard._node.top.snapshot import Gpu, Snapshot, Target, present
from memguard._tools.top.follow import Follower
from memguard.errors import MemguardError


class Source(Protocol):
    """Gives snapshots. `read` may take its time, and is called on one thread. It raises nothing."""

    def read(self) -> Snapshot: ...

    def close(self) -> None: ...

    def check(self, key: str) -> None:
        """Raise MemguardError if nothing can be asked of that target, with the remedy."""

    def trim(self, key: str, framework: str | None) -> str:
        """Ask the target's process to trim. A sentence that says what was asked. Raises MemguardError."""

    def resize(self, key: str, framework: str, cap: int) -> str:
        """As `trim`; `cap` in bytes."""


class Timelines:
    """The timelines of one or several processes, which are written by them meanwhile, or were."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._followers = [Follower(path, clock) for path in dict.fromkeys(paths)]

    def read(self) -> Snapshot:
        for follower in self._followers:
            follower.read()
        targets = tuple(follower.target() for follower in self._followers)
        gpus = merged([(target, follower.gpus()) for target, follower in zip(targets, self._followers, strict=True)])
        return Snapshot(self._clock(), False, gpus, targets)

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

    def check(self, key: str) -> None:
        raise followed()

    def trim(self, key: str, framework: str | None) -> str:
        raise followed()

    def resize(self, key: str, framework: str, cap: int) -> str:
        raise followed()


def followed() -> MemguardError:
    return MemguardError(
        "a timeline is only read: nothing can be asked of the process that writes it",
        fix="`memguard top` without a file, on the machine where the process runs",
    )


def merged(read: Sequence[tuple[Target, Sequence[Gpu]]]) -> tuple[Gpu, ...]:
    """Each GPU once, as the target says that read it last. `others` is what none of those `present` then holds."""
    newest: dict[str, tuple[float, Target, Gpu]] = {}
    for target, gpus in read:
        for gpu in gpus:
            when = target.read or 0.0
            if gpu.uuid not in newest or newest[gpu.uuid][0] <= when:
                newest[gpu.uuid] = when, target, gpu
    found = []
    for uuid, (_, reader, gpu) in newest.items():
        here = present(uuid, [target for target, _ in read])
        own = [0 if share.suspended is not None else share.process for _, share in here]
        known = [size for size in own if size is not None]
        others = None if gpu.used is None or len(known) < len(own) else max(gpu.used - sum(known), 0)
        alone = all(target is reader for target, _ in here)  # its own reading says it
        found.append(gpu if alone else replace(gpu, others=others))
    return tuple(sorted(found, key=lambda gpu: (gpu.index is None, gpu.index, gpu.uuid)))
