"""What is charged as overhead: CUDA contexts, modules and library workspaces, outside every framework's cap. Pure.

Overhead is charged when it appears, never as what is left over: the context, a framework's modules and NCCL's
communicators in the first reading after they turn up (what a communicator takes only at its first collective, then); a
library's first use as one step of at most 112 MiB, or two at once in the reading after that; all within what `_policy`
knows of the live frameworks. Growth of another kind, or beyond that, is unaccounted. The gaps in the driver's slabs are
counted by address. A second context is often seen only after it was made: it is charged then, from what was
unaccounted, and has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memguard._policy import modules, workspace
from memguard._specs import CONTEXT, SECOND_CONTEXT, SLACK
from memguard._types import Usage
from memguard._units import MIB

STEP = 112 * MIB
"""Above the largest growth seen at one library's first use on an H200: 98 MiB, cuSOLVER's modules."""


@dataclass(frozen=True)
class Overhead:
    """What has been charged as overhead on one GPU so far, in bytes, and what had appeared by then.

    gap     the largest so far: what goes and comes back, or was counted a moment too early, is not charged twice
    owed    what communicators may still take: one that is made eagerly takes most at its first collective
    last    the gap of the last reading: what appears is charged with the growth since, whatever came and went before
    slabs   what the driver's slabs hold beyond what frameworks count: of this reading, and part of no gap
    fresh   whether something appeared in the last reading
    second  the part of `charged` for contexts beside the primary one
    """

    charged: int = 0
    gap: int = 0
    appeared: frozenset[str] = frozenset()
    owed: int = 0
    last: int = 0
    slabs: int = 0
    fresh: bool = False
    second: int = 0

    @property
    def total(self) -> int:
        return self.charged + self.slabs

    def after(self, gap: int, appeared: frozenset[str], exact: bool = True) -> Overhead:
        """The state after a reading: `gap` is the process's bytes less what frameworks hold.

        Not `exact` if a framework does not report what it holds: part of the gap is then its pool, and no more is
        charged than was measured for what appeared.
        """
        growth, since = gap - self.gap, gap - self.last
        new, gone = appeared - self.appeared, self.appeared - appeared
        expected = expected_overhead(appeared, exact)
        if new:
            growth = max(growth, min(since, expected - expected_overhead(self.appeared, exact)))
        late = sum(map(modules, _second(new)))
        growth = max(growth, min(late, gap - self.charged))
        owed = min(self.owed, _of_libraries(appeared)) + _of_libraries(new)
        step = max(STEP, owed)
        if self.fresh:  # what has just appeared starts working, and two libraries' first uses may come at once
            step = max(step, min(expected_overhead(appeared, exact=False) - self.charged, 2 * STEP))
        charge = max(min(growth, expected - self.charged), 0) if new or growth <= step else 0
        if charge > STEP:
            owed = max(owed - charge, 0)
        shrunk, second = self.charged, self.second
        if ended := _second(gone):
            second -= second * len(ended) // len(_second(self.appeared))
        if "context" not in appeared:
            shrunk = min(shrunk, max(gap, 0))
        elif gone and since < 0:  # NCCL's communicators were destroyed, or a framework let go of the GPU
            shrunk = max(shrunk + max(since, -sum(workspace(name) for name in gone)), 0)
        most = gap if gone else max(gap, self.gap)
        second = min(second + min(charge, late), shrunk + charge)
        return Overhead(shrunk + charge, most, appeared, owed, gap, self.slabs, bool(new), second)


def _of_libraries(names: frozenset[str]) -> int:
    """What the libraries among them may take, which `Framework.libraries` numbers: `nccl 1`."""
    return sum(workspace(name) for name in names - _second(names) if " " in name)


def _second(names: frozenset[str]) -> frozenset[str]:
    """The contexts among them that are not the primary one."""
    return frozenset(name for name in names if name.startswith(SECOND_CONTEXT))


def expected_overhead(appeared: frozenset[str], exact: bool = True) -> int:
    """What overhead may come to with these live: the figures behind `reserve: auto`, or the measured ones."""
    if not appeared:
        return 0
    if not exact:
        return sum(modules(name) for name in appeared | {"context"})
    return CONTEXT + SLACK + sum(workspace(name) for name in appeared - {"context"})


def own_bytes(processes: Mapping[int, int | None], pid: int, active: bool) -> int | None:
    """What this process holds by NVML; None if NVML lists it without bytes, or not at all although it is active.

    The second happens in a container, whose PIDs NVML knows by the host's numbers.
    """
    if pid in processes:
        return processes[pid]
    return None if active else 0


def gap_of(own: int | None, usages: Iterable[Usage | None], slabs: int = 0) -> int | None:
    """This process's bytes less what its frameworks are known to hold and the gaps in the driver's slabs."""
    if own is None:
        return None
    known = [u.held if u.held is not None else u.held_at_least or 0 for u in usages if u is not None]
    return own - sum(known) - slabs


def totals(usages: Iterable[Usage | None]) -> tuple[int | None, int | None]:
    """What one framework has in use on all GPUs together, and its peak; None for what it does not report."""
    known = [usage for usage in usages if usage is not None]
    peaks = [usage.peak for usage in known if usage.peak is not None]
    unknown = any(usage.in_use is None for usage in known)
    return None if unknown else sum(usage.in_use or 0 for usage in known), sum(peaks) if peaks else None
