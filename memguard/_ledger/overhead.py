"""Charges overhead: CUDA contexts, modules and library workspaces, outside every framework's cap. Pure.

Overhead is charged when its cause is seen, never as the remainder. Causes are

- a new owner: the context, a framework, an NCCL communicator, a second context. Each is charged in the first reading
  after it appeared, up to its reserve in `_budget.policy`. A communicator that is created eagerly allocates most at its
  first collective, and is charged then;
- the first use of a library, by each framework that uses it: charged once, in one reading or two, if the library was
  entered since the last look (`Host.entries`) and the growth is at most the measured size of such first uses;
- kernels that are loaded at their first launch, if a module was loaded: `LAZY` for each live framework in all.

Where entries cannot be observed, every loaded library and every kernel load is a possible cause. Then the growth must
be close to the measured size. Two first uses are charged at once only if a framework, a communicator or a library has
just appeared, and none is charged for repeated growth.

Other growth is unaccounted, as is all growth beyond the reserve of the live frameworks in `_budget.policy`. Memory of a
first use or of kernels that is freed is no longer charged. While a framework does not report what it holds, growth may
be its pool: such a charge is provisional, and is reduced as far as the framework's own figures disprove it. The gaps in
the driver's slabs are counted by address. A second context is often seen only after it was created: it is charged then,
from the unaccounted memory, and has a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from memguard._base.framework_spec import CONTEXT, KERNELS, LAZY, LIBRARIES, SECOND_CONTEXT, SLACK
from memguard._base.types import POOL, Usage
from memguard._base.units import GRANULE
from memguard._budget.policy import modules, workspace
from memguard._frameworks.specs import SPECS
from memguard._ledger.types import EXCHANGE

PAUSE = 2.0
"""Seconds without growth that end a streak."""
LINGER = 1.0
"""Seconds after its entry for which a library may still allocate for its first use."""
AT_ONCE = 0.01
"""`LINGER` for kernels, which allocate at once: the GPUs are read one after the other."""
STREAK = 5
"""The growths in a streak that may be first uses: PyTorch's libraries in one training step. More is a leak."""
TOGETHER = 3
"""The most first uses charged for one growth, of libraries whose entry was observed."""
ANY = frozenset(LIBRARIES)
"""Every library: the possible causes where loaded libraries cannot be observed."""
Use = tuple[str, int]
"""A first use of a library: the framework, and the index in its `first_uses`."""
Charge = tuple[int, frozenset[Use], int]
"""Bytes, the first uses that they cover, and the part of them for kernels."""


@dataclass(frozen=True)
class Overhead:
    """The bytes charged as overhead on one GPU so far, and the owners seen so far.

    gap      the largest so far: memory that is freed and allocated again, or was counted early, is not charged twice
    owed     what communicators may still allocate: one that is created eagerly allocates most at its first collective
    last     the gap of the last reading: a new owner is charged with the growth since then, whatever the earlier gaps
    slabs    the bytes of the driver's slabs that no framework counts, in this reading; part of no gap
    fresh    whether an owner appeared in the last reading
    second   the part of `charged` for contexts other than the primary one
    loaded   the libraries loaded so far
    used     the first uses charged: the framework, and the index in its `first_uses`
    lazy     the part of `charged` for kernels loaded at their first launch
    rest     what the first use charged in the last reading may still allocate, if that was little
    pending  the unexplained growth of the last reading: where entries cannot be observed, a first use may begin with it
    grown    the size of the last two growths of the gap
    at       the time of the last growth, in seconds
    streak   the growths without a pause since an owner appeared
    entries  how often each library was entered; a missing one cannot be observed
    entered  the libraries entered since the last charge for a first use
    seen     the time at which that was last observed, in seconds
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
        """The lasting figures. Only a reading during which no framework's figure changed may change them. Otherwise
        memory that a framework takes after its own reading is mistaken for overhead."""
        return self.charged, self.gap

    def with_slabs(self, slabs: int) -> Overhead:
        """The state with these slabs' bytes. A copy of the attributes, as `replace` takes ten times as long."""
        found = object.__new__(Overhead)
        vars(found).update(vars(self), slabs=slabs)
        return found

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
        """The state after a reading. `gap` is the process's bytes less its frameworks' bytes; `loaded` lists the loaded
        libraries of `LIBRARIES`; `now` is in seconds; `entries` comes from `Host.entries`.

        `exact` is False if a framework does not report what it holds. Part of the gap is then its pool, and at most the
        measured size of a new owner is charged. `least`: such frameworks' lower bound, which the gap excludes.
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
        elif looked.entered:  # independent of earlier gaps, and not for charged memory that is allocated again
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
        elif gone and since < 0:  # NCCL's communicators were destroyed, or a framework released the GPU
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
        """The state without the charges that prove to be a pool's memory.

        When the lower bound of a pool rises, the pool holds that much: all overhead is then within the gap. At other
        times the bound may be too high (TensorFlow returns idle regions), and proves nothing.
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
        """The state after reading the entered libraries. The first reading ignores earlier entries if an owner in `new`
        appeared: they are charged with that owner."""
        known = {name for name, _ in self.entries}
        came = frozenset([name for name, count in entries - self.entries if count and (name in known or not new)])
        since, before = now - self.seen, self.entered
        entered = came | (before if since <= AT_ONCE else before - {KERNELS} if since <= LINGER else frozenset())
        if entries == self.entries and entered == self.entered:
            return self
        return replace(self, entries=entries, entered=entered, seen=now if came else self.seen)

    def may_be_a_library(self, gap: int) -> bool:
        """Whether the gap has grown by enough for the first use of a newly loaded library."""
        growth = gap - self.last + self.pending
        return growth > LAZY and any(
            growth >= size * 5 // 8 for *_, library, size in self._unused() if library not in self.loaded
        )

    def _explained(self, size: int, most: int) -> Overhead | None:
        """The state with a growth of `size` charged to its possible causes; None without one.

        `most`: the number of first uses that may coincide where they cannot be observed; 0 if none.
        """
        observed = {name for name, _ in self.entries}
        if (most or observed) and size <= self.rest:
            return replace(self, rest=0, charges=self._with(size))
        if self.entered - {KERNELS} and (found := self._used(size, self.entered, TOGETHER, observed=True)) is not None:
            return found
        frameworks = sum(1 for name in self.appeared if name in SPECS)
        loads = KERNELS in self.entered if KERNELS in observed else most > 0
        if loads and size <= LAZY and self.lazy + size <= LAZY * frameworks:
            return replace(self, lazy=self.lazy + size, rest=0, charges=self._with(size, lazy=size))
        if most and (found := self._used(size, self.loaded - observed, most, observed=False)) is not None:
            return found
        if self.owed // 8 <= size <= self.owed:
            return replace(self, owed=self.owed - size, rest=0)
        return None

    def _used(self, size: int, libraries: frozenset[str], most: int, observed: bool) -> Overhead | None:
        """The state with a growth of `size` charged to at most `most` first uses of `libraries`; None if none fits."""
        unused = [use for use in self._unused() if use[2] in libraries]
        together = [uses for count in range(1, most + 1) for uses in combinations(unused, count)]
        sizes = [(sum(use[3] for use in uses), uses) for uses in together]
        near = [(abs(measured - size), measured, uses) for measured, uses in sizes if _fits(measured, size, observed)]
        if not near:
            return None
        _, measured, uses = min(near)
        used = frozenset([(name, place) for name, place, *_ in uses])
        rest = _most(measured) - size if size < measured else 0
        return replace(self, used=self.used | used, rest=rest, charges=self._with(size, used), entered=frozenset())

    def _with(self, size: int, used: frozenset[Use] = frozenset(), lazy: int = 0) -> tuple[Charge, ...]:
        """The charges and one more. Charges below the driver's page size appear in no figure by themselves."""
        return (*self.charges, (size, used, lazy)) if size >= GRANULE else self.charges

    def _returned(self, fall: int, missing: int) -> tuple[Overhead, int] | None:
        """The state without the last charge that was freed, and the remaining charge; None if none was freed.

        A charge counts as freed if the gap's `fall` or `missing` (the charged bytes beyond the gap) is about its size.
        If nothing is missing, the freed memory was unaccounted.
        """
        for place in range(len(self.charges) - 1, -1, -1):
            size, used, lazy = self.charges[place]
            if min(abs(size - fall), abs(size - missing)) < GRANULE // 2 and size < 2 * missing:
                charges = self.charges[:place] + self.charges[place + 1 :]
                state = replace(self, used=self.used - used, lazy=self.lazy - lazy, charges=charges)
                return state, max(self.charged - size, 0)
        return None

    def _unused(self) -> Iterator[tuple[str, int, str, int]]:
        """The first uses not yet charged: framework, index in its spec, library, bytes."""
        for name in sorted(self.appeared):
            for place, (library, size) in enumerate(SPECS[name].first_uses if name in SPECS else ()):
                if (name, place) not in self.used:
                    yield name, place, library, size

    def _owed(self, new: frozenset[str], charge: int, appeared: frozenset[str]) -> int:
        """The bytes that communicators may still allocate after a charge for the owners in `new`."""
        came = _communicators(new)
        owed = min(self.owed, sum(map(workspace, _communicators(appeared)))) + sum(map(workspace, came))
        if came:
            owed -= max(charge - sum(map(_at_once, new - came)), 0)
        # Their reserve is slightly above the measured size: a smaller remainder means that nothing more follows.
        return owed if owed > sum(workspace(name) - modules(name) for name in _communicators(appeared)) else 0


def _steady(growth: int, before: tuple[int, int]) -> bool:
    """Whether this is the third growth of about the same size: a leak, and no first use."""
    return min(before) >= growth * 3 // 4 and max(before) <= growth * 4 // 3


def _fits(measured: int, growth: int, observed: bool) -> bool:
    """Whether a first use measured on an H200 may allocate `growth`. cuBLAS takes 66 MiB there, of which 32 are
    workspace; on other GPUs than Hopper the workspace is 8 MiB (cuBLAS documentation, `cublasSetWorkspace`). The lower
    bound is a quarter if its entry was observed (`observed`): cuDNN allocates 8 MiB on an H100, half of its size on an
    H200, and cuFFT 8 instead of 24."""
    return measured * (2 if observed else 5) // 8 <= growth <= _most(measured)


def _most(measured: int) -> int:
    return measured * 5 // 4


def _used_by(new: frozenset[str], charge: int) -> frozenset[Use]:
    """The first uses that a charge for new frameworks contains, beyond their initial memory: the largest first."""
    uses = [(name, place) for name in new & set(SPECS) for place in range(len(SPECS[name].first_uses))]
    return _contained(uses, charge - sum(map(_at_once, new)))


def _contained(uses: Iterable[Use], size: int) -> frozenset[Use]:
    """The first uses that fit into `size` bytes: the largest first."""
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
    """A framework's measured memory before the first use of a library."""
    return modules(name) - sum(size for _, size in (SPECS[name].first_uses if name in SPECS else ()))


def _communicators(names: frozenset[str]) -> frozenset[str]:
    """The communicators among `names`, which `Framework.libraries` numbers: `nccl 1`."""
    return frozenset(name for name in names - _second(names) if " " in name)


def _second(names: frozenset[str]) -> frozenset[str]:
    """The non-primary contexts among `names`."""
    return frozenset(name for name in names if name.startswith(SECOND_CONTEXT))


def expected_overhead(appeared: frozenset[str], exact: bool = True) -> int:
    """The most overhead of these owners: the figures of `reserve: auto` if `exact`, else the measured ones."""
    if not appeared:
        return 0
    if not exact:
        return sum(modules(name) for name in appeared | {"context"})
    return CONTEXT + SLACK + sum(workspace(name) for name in appeared - {"context"})


def own_bytes(processes: Mapping[int, int | None], pid: int, active: bool) -> int | None:
    """This process's memory by NVML; None if NVML lists it without bytes, or not at all although it is active.

    NVML does not list it in a container, because NVML uses the host's PIDs.
    """
    if pid in processes:
        return processes[pid]
    return None if active else 0


class Held(NamedTuple):
    """What all frameworks hold on one GPU together.

    bytes     the known part
    live      the frameworks that use the GPU
    exact     whether each reports what it holds
    at_least  the lower bounds of those that do not, a part of `bytes`
    """

    bytes: int
    live: frozenset[str]
    exact: bool
    at_least: int


def held_by(usages: Mapping[str, Usage | None]) -> Held:
    """The sums of the usages of one reading."""
    known, at_least, exact, live = 0, 0, True, []
    for name, usage in usages.items():
        if usage is not None:
            held, _, _, bound, _, _ = usage
            if held is None:
                held, exact = bound or 0, False
                at_least += held
            known += held
            if name != POOL and name != EXCHANGE:
                live.append(name)
    return tuple.__new__(Held, (known, frozenset(live), exact, at_least))  # in half the time, as `usage_of`


def same_held(before: Mapping[str, Usage | None], after: Mapping[str, Usage | None], pooled: Collection[str]) -> bool:
    """Whether two readings found the same memory held by each framework.

    The `pooled` frameworks and their pool count as one, because the live part of the pool changes all the time.
    """
    return _held_apart(before, pooled) == _held_apart(after, pooled)


def _held_apart(usages: Mapping[str, Usage | None], pooled: Collection[str]) -> dict[str, int]:
    found = {}
    for name, usage in usages.items():
        if usage is not None:
            found[name] = usage.held if usage.held is not None else usage.held_at_least or 0
    found[POOL] = sum([found.pop(name, 0) for name in (*pooled, POOL)])
    return found


def totals(usages: Iterable[Usage | None]) -> tuple[int | None, int | None]:
    """One framework's bytes in use on all GPUs together, and its peak; None if it does not report them."""
    in_use: int | None = 0
    most: int | None = None
    for usage in usages:
        if usage is not None:
            _, used, _, _, _, peak = usage
            in_use = None if in_use is None or used is None else in_use + used
            if peak is not None:
                most = peak if most is None else most + peak
    return in_use, most
