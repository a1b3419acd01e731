"""What is charged as overhead: CUDA contexts, modules and library workspaces, outside every framework's cap. Pure.

Overhead is charged when its cause is seen, never as what is left over. Causes are

- what appears: the context, a framework, an NCCL communicator, a second context. Each is charged in the first reading
  after it turned up, up to what `_budget.policy` keeps for it; a communicator that is made eagerly takes most at its
  first collective, and is charged then;
- the first use of a library, by each framework that uses it: charged once, in one reading or two, if the library was
  entered since the last look (`Host.entries`) and the growth is no larger than such first uses were measured;
- kernels that are loaded at their first launch, if a module was loaded: `LAZY` for each live framework in all.

Where nothing tells what was entered, each library that is loaded may have been, and kernels may always have been. Then
the growth must be about as large as it was measured. Two first uses come at once only if a framework, a communicator or
a library has just appeared, and none is charged for what grows again and again.

Other growth is unaccounted, as is all beyond what `_budget.policy` knows of the live frameworks. What was charged for
a first use or for kernels and is given back is charged no more. While a framework does not report what it holds, growth
may be its pool: such a charge is provisional, and taken back as far as the framework's own figures prove it wrong. The
gaps in the driver's slabs are counted by address. A second context is often seen only after it was made: it is charged
then, from what was unaccounted, and has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from memguard._base.framework_spec import CONTEXT, KERNELS, LAZY, LIBRARIES, SECOND_CONTEXT, SLACK
from memguard._base.specs import SPECS
from memguard._base.types import Usage
from memguard._base.units import GRANULE
from memguard._budget.policy import modules, workspace

PAUSE = 2.0
"""Seconds without growth that end a streak of it."""
LINGER = 1.0
"""Seconds for which a library that was entered may still take what its first use needs."""
AT_ONCE = 0.01
"""The same for kernels, which take theirs at once: the GPUs are read one after the other."""
STREAK = 5
"""The growths in a streak that may be first uses: PyTorch's libraries in one training step. What goes on is a leak."""
TOGETHER = 3
"""The first uses that are told from one growth, of libraries that were seen to be entered."""
ANY = frozenset(LIBRARIES)
"""Every library: where nothing tells which ones are loaded, each may be."""
Use = tuple[str, int]
"""A first use of a library: the framework, and the place in its `first_uses`."""
Charge = tuple[int, frozenset[Use], int]
"""Bytes, the first uses that they were charged for, and the part of them for kernels."""


@dataclass(frozen=True)
class Overhead:
    """What has been charged as overhead on one GPU so far, in bytes, and what had appeared by then.

    gap      the largest so far: what goes and comes back, or was counted a moment too early, is not charged twice
    owed     what communicators may still take: one that is made eagerly takes most at its first collective
    last     the gap of the last reading: what appears is charged with the growth since, whatever came and went before
    slabs    what the driver's slabs hold beyond what frameworks count: of this reading, and part of no gap
    fresh    whether something appeared in the last reading
    second   the part of `charged` for contexts beside the primary one
    loaded   the libraries that were loaded by then
    used     the first uses that were charged: the framework, and the place in its `first_uses`
    lazy     the part of `charged` for kernels loaded at their first launch
    rest     what the first use that was charged in the last reading may still take, if that was little
    pending  the growth of the last reading, if nothing explains it: where nothing tells, it may begin a first use
    grown    by how much the gap has grown, the last two times
    at       when it last did, in seconds
    streak   how often it has grown by then without a pause since something appeared
    entries  how often each library was found entered by then; one that is not there cannot be told of
    entered  those that were, if no first use was charged since
    seen     when that was last seen, in seconds
    charges  each charge for first uses or kernels: its bytes, the uses, and its part of `lazy`
    doubtful the part of `charged`, `used` and `lazy` that was charged while a framework did not report what it held
    least    the least that such frameworks must hold, in the last reading
    """

    charged: int = 0
    gap: int = 0
    appeared: frozenset[str] = frozenset()
    owed: int = 0
    last: int = 0
    slabs: int = 0
    fresh: bool = False
    second: int = 0
    loaded: frozenset[str] = frozenset()
    used: frozenset[Use] = frozenset()
    lazy: int = 0
    rest: int = 0
    pending: int = 0
    grown: tuple[int, int] = (0, 0)
    at: float = 0.0
    streak: int = 0
    entries: frozenset[tuple[str, int]] = frozenset()
    entered: frozenset[str] = frozenset()
    seen: float = -math.inf
    charges: tuple[Charge, ...] = ()
    doubtful: Charge = (0, frozenset(), 0)
    least: int = 0

    @property
    def total(self) -> int:
        return self.charged + self.slabs

    @property
    def lasting(self) -> tuple[int, int]:
        """The figures that last: they may change only by a reading during which no framework's figure changed. Else
        memory that a framework takes after it was asked passes for overhead."""
        return self.charged, self.gap

    def after(
        self,
        gap: int,
        appeared: frozenset[str],
        exact: bool = True,
        loaded: frozenset[str] = ANY,
        now: float = 0.0,
        entries: frozenset[tuple[str, int]] = frozenset(),
        least: int = 0,
    ) -> Overhead:
        """The state after a reading: `gap` is the process's bytes less what frameworks hold, `loaded` of `LIBRARIES`,
        `now` in seconds, `entries` as of `Host.entries`.

        Not `exact` if a framework does not report what it holds: part of the gap is then its pool, and no more is
        charged than was measured for what appeared. `least`: what such frameworks must hold, which the gap leaves out.
        """
        quiet = gap == self.last and least == self.least and not (self.fresh or self.rest or self.pending)
        if quiet and appeared == self.appeared and loaded == self.loaded and entries == self.entries:
            return self
        growth, since, paused = gap - self.gap, gap - self.last, now - self.at > PAUSE
        new, gone = appeared - self.appeared, self.appeared - appeared
        expected = expected_overhead(appeared, exact)
        allowed = expected - expected_overhead(appeared - new, exact)
        looked = self.saw(entries, now, new)
        if new:
            growth = max(growth, min(since, allowed))
        elif looked.entered:  # whatever came and went before, and not what comes back of what is charged
            growth = max(growth, gap - max(self.last, self.charged))
        late = sum(map(modules, _second(new)))
        growth = max(growth, min(late, gap - self.charged))
        room = max(expected - self.charged, 0)
        charge = max(min(growth, allowed, room), 0)
        used = frozenset(use for use in self.used if use[0] in appeared)
        state = replace(
            looked,
            appeared=appeared,
            loaded=loaded,
            used=used | _used_by(new, charge),
            owed=self._owed(new, charge, appeared),
            rest=0 if now - self.at > (LINGER if entries else PAUSE) else self.rest,
            charges=tuple(one for one in self.charges if one[1] <= used),
        )
        fresh, left = bool(new or loaded - self.loaded), max(growth - charge, 0)
        streak = 0 if new or paused else self.streak
        steady = streak >= STREAK or (streak >= 2 and _steady(left, self.grown))
        most = 0 if steady else 2 if fresh or self.fresh else 1
        explained = None
        begun = 0 if paused or entries else self.pending
        for size in (left + begun, left) if left else ():
            if size <= room - charge and (explained := state._explained(size, most)):
                state, charge, left = explained, charge + size, 0
                break
        shrunk, second = self.charged, self.second
        if ended := _second(gone):
            second -= second * len(ended) // len(_second(self.appeared))
        returned = state._returned(-since, self.charged - gap) if since < 0 and exact and not (new or gone) else None
        if returned is not None:
            state, shrunk = returned
        if "context" not in appeared:
            shrunk = min(shrunk, max(gap, 0))
        elif gone and since < 0:  # NCCL's communicators were destroyed, or a framework let go of the GPU
            shrunk = max(shrunk + max(since, -sum(workspace(name) for name in gone)), 0)
        state = replace(
            state,
            charged=shrunk + charge,
            gap=gap if gone or returned is not None else max(gap, self.gap),
            last=gap,
            fresh=fresh,
            second=min(second + min(charge, late), shrunk + charge),
            rest=state.rest if explained else 0,
            pending=left,
            grown=(self.grown[1], growth) if growth > 0 else self.grown,
            at=now if growth > 0 else self.at,
            streak=streak + 1 if growth > 0 and not new else streak,
            least=least,
        )
        return state._without_pools(self, exact)

    def _without_pools(self, before: Overhead, exact: bool) -> Overhead:
        """The state without the charges that turn out to be a pool's memory.

        When the least that a pool must hold rises, the pool holds that much: all overhead is then within the gap. At
        other times the least may be too high (TensorFlow gives back idle regions), and proves nothing.
        """
        size, used, lazy = self.doubtful
        if not exact:
            size += max(self.charged - before.charged, 0)
            used |= self.used - before.used
            lazy += max(self.lazy - before.lazy, 0)
        size, used, lazy = min(size, self.charged), used & self.used, min(lazy, self.lazy)
        wrong = min(size, self.charged - self.last) if self.least > before.least else 0
        if wrong <= 0:
            return self if (size, used, lazy) == self.doubtful else replace(self, doubtful=(size, used, lazy))
        taken_for = _contained(used, wrong)
        kernels = max(min(lazy, wrong - sum(map(_size_of, taken_for))), 0)
        return replace(
            self,
            charged=self.charged - wrong,
            gap=self.last,
            second=min(self.second, self.charged - wrong),
            used=self.used - taken_for,
            lazy=self.lazy - kernels,
            charges=tuple(one for one in self.charges if not (one[1] & taken_for or (kernels and one[2]))),
            doubtful=(size - wrong, used - taken_for, lazy - kernels),
        )

    def saw(self, entries: frozenset[tuple[str, int]], now: float, new: frozenset[str] = frozenset()) -> Overhead:
        """The state after a look at what was entered. What was entered before the first look does not count if
        something is `new`: it is charged with that."""
        known = {name for name, _ in self.entries}
        came = frozenset([name for name, count in entries - self.entries if count and (name in known or not new)])
        since, before = now - self.seen, self.entered
        entered = came | (before if since <= AT_ONCE else before - {KERNELS} if since <= LINGER else frozenset())
        if entries == self.entries and entered == self.entered:
            return self
        return replace(self, entries=entries, entered=entered, seen=now if came else self.seen)

    def may_be_a_library(self, gap: int) -> bool:
        """Whether the gap has grown by enough for the first use of a library that was not loaded before."""
        growth = gap - self.last + self.pending
        return growth > LAZY and any(
            growth >= size * 5 // 8 for *_, library, size in self._unused() if library not in self.loaded
        )

    def _explained(self, size: int, most: int) -> Overhead | None:
        """The state with a growth of that size charged to what may have caused it; None if nothing may have.

        `most`: how many libraries' first uses may have come at once where nothing tells of them; 0 if none.
        """
        told = {name for name, _ in self.entries}
        if (most or told) and size <= self.rest:
            return replace(self, rest=0, charges=self._with(size))
        if self.entered - {KERNELS} and (found := self._used(size, self.entered, TOGETHER, told=True)) is not None:
            return found
        frameworks = sum(1 for name in self.appeared if name in SPECS)
        loads = KERNELS in self.entered if KERNELS in told else most > 0
        if loads and size <= LAZY and self.lazy + size <= LAZY * frameworks:
            return replace(self, lazy=self.lazy + size, rest=0, charges=self._with(size, lazy=size))
        if most and (found := self._used(size, self.loaded - told, most, told=False)) is not None:
            return found
        if self.owed // 8 <= size <= self.owed:
            return replace(self, owed=self.owed - size, rest=0)
        return None

    def _used(self, size: int, libraries: frozenset[str], most: int, told: bool) -> Overhead | None:
        """The state with a growth of that size charged to up to `most` first uses of those libraries, if it may be."""
        unused = [use for use in self._unused() if use[2] in libraries]
        together = [uses for count in range(1, most + 1) for uses in combinations(unused, count)]
        sizes = [(sum(use[3] for use in uses), uses) for uses in together]
        near = [(abs(measured - size), measured, uses) for measured, uses in sizes if _fits(measured, size, told)]
        if not near:
            return None
        _, measured, uses = min(near)
        used = frozenset([(name, place) for name, place, *_ in uses])
        rest = _most(measured) - size if size < measured else 0
        return replace(self, used=self.used | used, rest=rest, charges=self._with(size, used), entered=frozenset())

    def _with(self, size: int, used: frozenset[Use] = frozenset(), lazy: int = 0) -> tuple[Charge, ...]:
        """The charges with one more. Those below a page of the driver's are in no figure by themselves."""
        return (*self.charges, (size, used, lazy)) if size >= GRANULE else self.charges

    def _returned(self, fall: int, missing: int) -> tuple[Overhead, int] | None:
        """The state without the last charge that was given back, and what remains charged; None if none was.

        It was if less is there than is charged: if that much is `missing`, or if the gap fell by as much. What falls by
        the same and leaves nothing missing was unaccounted.
        """
        for place in range(len(self.charges) - 1, -1, -1):
            size, used, lazy = self.charges[place]
            if min(abs(size - fall), abs(size - missing)) < GRANULE // 2 and size < 2 * missing:
                charges = self.charges[:place] + self.charges[place + 1 :]
                state = replace(self, used=self.used - used, lazy=self.lazy - lazy, charges=charges)
                return state, max(self.charged - size, 0)
        return None

    def _unused(self) -> Iterator[tuple[str, int, str, int]]:
        """The first uses that were not charged: framework, place in its row, library, bytes."""
        for name in sorted(self.appeared):
            for place, (library, size) in enumerate(SPECS[name].first_uses if name in SPECS else ()):
                if (name, place) not in self.used:
                    yield name, place, library, size

    def _owed(self, new: frozenset[str], charge: int, appeared: frozenset[str]) -> int:
        """What communicators may still take after a charge for what is `new`."""
        came = _communicators(new)
        owed = min(self.owed, sum(map(workspace, _communicators(appeared)))) + sum(map(workspace, came))
        if came:
            owed -= max(charge - sum(map(_at_once, new - came)), 0)
        # What is kept for them is a little more than what was measured: then nothing more is to come.
        return owed if owed > sum(workspace(name) - modules(name) for name in _communicators(appeared)) else 0


def _steady(growth: int, before: tuple[int, int]) -> bool:
    """Whether it is the third growth of about the same size: a leak, and no first use."""
    return min(before) >= growth * 3 // 4 and max(before) <= growth * 4 // 3


def _fits(measured: int, growth: int, told: bool) -> bool:
    """Whether a first use that was measured on an H200 may take so much. Of 66 MiB with cuBLAS 32 are its workspace,
    of which other GPUs than Hopper's have 8 (cuBLAS documentation, `cublasSetWorkspace`). `told`: it was seen; cuDNN's
    takes 8 MiB on an H100, half of what it does on an H200, and cuFFT's 8 instead of 24."""
    return measured * (2 if told else 5) // 8 <= growth <= _most(measured)


def _most(measured: int) -> int:
    return measured * 5 // 4


def _used_by(new: frozenset[str], charge: int) -> frozenset[Use]:
    """The first uses that a charge for new frameworks contains, beyond what they take at once: the largest first."""
    uses = [(name, place) for name in new & set(SPECS) for place in range(len(SPECS[name].first_uses))]
    return _contained(uses, charge - sum(map(_at_once, new)))


def _contained(uses: Iterable[Use], size: int) -> frozenset[Use]:
    """The first uses that so many bytes contain: the largest first."""
    found = set()
    for use in sorted(uses, key=lambda use: (_size_of(use), use), reverse=True):
        if _size_of(use) * 7 // 8 <= size:
            size -= _size_of(use)
            found.add(use)
    return frozenset(found)


def _size_of(use: Use) -> int:
    name, place = use
    return SPECS[name].first_uses[place][1]


def _at_once(name: str) -> int:
    """What was measured of it before the first use of a library."""
    return modules(name) - sum(size for _, size in (SPECS[name].first_uses if name in SPECS else ()))


def _communicators(names: frozenset[str]) -> frozenset[str]:
    """Those among them that `Framework.libraries` numbers: `nccl 1`."""
    return frozenset(name for name in names - _second(names) if " " in name)


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
    for usage in usages:
        if usage is not None:
            held, _, _, at_least, _, _ = usage
            own -= held if held is not None else at_least or 0
    return own - slabs


def totals(usages: Iterable[Usage | None]) -> tuple[int | None, int | None]:
    """What one framework has in use on all GPUs together, and its peak; None for what it does not report."""
    in_use: int | None = 0
    most: int | None = None
    for usage in usages:
        if usage is not None:
            _, used, _, _, _, peak = usage
            in_use = None if in_use is None or used is None else in_use + used
            if peak is not None:
                most = peak if most is None else most + peak
    return in_use, most
