"""What `memguard top` knows at one moment, as plain data. Sizes are bytes, times Unix time; None is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from memguard._frameworks.specs import NEVER_GIVE_BACK

SCHEMA = 1
EVENTS = 50
"""Events that are kept of each target."""
TOGETHER = 5.0
"""Seconds between readings of one GPU that are still taken for one moment's."""
State = Literal["live", "silent", "ended", "missing", "suspended", "unreadable"]
"""live: it tells of itself now. silent: it lives, and says nothing. missing: there is no such file yet."""


@dataclass(frozen=True)
class Part:
    """One framework of a process on one GPU.

    `at_least` is a bound of `held` where that is unknown. `level` is its pressure.
    """

    name: str
    held: int | None
    in_use: int | None = None
    reclaimable: int | None = None
    cap: int | None = None
    at_least: int | None = None
    level: str | None = None
    enforcement: str | None = None

    @property
    def cached(self) -> int | None:
        return None if self.held is None or self.in_use is None else max(self.held - self.in_use, 0)

    @property
    def returnable(self) -> int | None:
        """What a trim would return: `reclaimable`, but 0 of a pool that returns nothing while its process lives."""
        return 0 if self.name in NEVER_GIVE_BACK else self.reclaimable


@dataclass(frozen=True)
class Forecast:
    """What reaches its cap, or the process its limit (no framework), and when."""

    framework: str | None
    at: float


@dataclass(frozen=True)
class Share:
    """What one process has on one GPU. `suspended`: the bytes that it has in host memory instead."""

    uuid: str
    process: int | None
    limit: int | None
    overhead: int | None
    unaccounted: int | None
    frameworks: tuple[Part, ...] = ()
    level: str | None = None
    forecasts: tuple[Forecast, ...] = ()
    suspended: int | None = None


@dataclass(frozen=True)
class Said:
    """One event of a process."""

    time: float
    kind: str
    text: str
    level: str | None = None


@dataclass(frozen=True)
class Request:
    """What somebody asked of a process through `top`: waiting, done or failed. `answer` is the process's."""

    number: int
    what: str
    state: Literal["waiting", "done", "failed"]
    answer: str = ""


@dataclass(frozen=True)
class Target:
    """A process that tells of itself: by its timeline (`file`), or because `top` asks it.

    `key` tells it apart from the others. `since` is the time from which `state` holds, `read` that of its figures.
    """

    key: str
    name: str
    pid: int | None
    state: State
    read: float | None = None
    since: float | None = None
    file: str | None = None
    simulated: bool = False
    shares: tuple[Share, ...] = ()
    events: tuple[Said, ...] = ()
    requests: tuple[Request, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU by NVML, or as the newest reading of a target has it. `others`: what none of the targets holds."""

    uuid: str
    index: int | None
    name: str
    total: int
    used: int | None
    free: int | None
    others: int | None = None
    reserved: int | None = None
    unified: bool = False
    simulated: bool = False


@dataclass(frozen=True)
class Listed:
    """One process as `memguard ps` lists it. `bytes` by GPU: on it, or what it needs to come back."""

    pid: int
    user: str | None
    command: str | None
    state: str
    bytes: dict[str, int | None] = field(default_factory=dict)
    budget: str | None = None
    since: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """All of it. `machine`: whether it is about this machine's GPUs, and not only about timelines."""

    time: float
    machine: bool
    gpus: tuple[Gpu, ...] = ()
    targets: tuple[Target, ...] = ()
    processes: tuple[Listed, ...] = ()
    notes: tuple[str, ...] = ()

    def target(self, key: str) -> Target | None:
        return next((one for one in self.targets if one.key == key), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data. The keys are stable within `memguard_top` 1."""
        return {"memguard_top": SCHEMA, **asdict(self)}


def off(target: Target, share: Share) -> bool:
    """Whether the process is suspended: off the GPU. A timeline does not say of each of several GPUs how much it has in
    host memory."""
    return share.suspended is not None or target.state == "suspended"


def present(uuid: str, targets: Iterable[Target], now: float | None = None) -> list[tuple[Target, Share]]:
    """Who was on the GPU when it was read last: at `now`, or when one of them last did.

    One that had ended by then is left out: its last figures are of another time, and must not be added to later ones.
    """
    here = [(target, share) for target in targets for share in target.shares if share.uuid == uuid]
    newest = max((target.read or 0.0 for target, _ in here), default=0.0)
    return [
        (target, share)
        for target, share in here
        if target.state != "ended" or (now is None and (target.read or 0.0) >= newest - TOGETHER)
    ]
