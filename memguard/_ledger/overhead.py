"""Decides how many bytes outside all frameworks to attribute to CUDA contexts, modules and libraries (no I/O).

The gap is this process's bytes by NVML less the bytes that all frameworks hold. Charging growth of the gap means
attributing the added bytes to an observed cause, as overhead. Growth without an observed cause stays unaccounted.
Causes are

- a new owner: the primary CUDA context, a framework, an NCCL communicator, or a non-primary (second) context. The
  growth in the first reading after the owner appeared is charged, up to the owner's reserve in `_budget.policy`. An
  eagerly created communicator allocates most of its memory at its first collective; the growth at that time is
  charged too;
- the first use of a library by a framework. It is charged once, in one or two readings, if the program called the
  library since the last reading of `Host.entries` and the growth is at most the measured size of such a first use;
- kernels that CUDA loads at their first launch, if a module load was observed: at most `LAZY` bytes in total for each
  live framework.

Where calls into libraries (entries) cannot be observed, every loaded library and every kernel load is a possible cause.
In that case the growth must be close to the measured size of a first use. Two first uses are charged together only if a
framework, a communicator or a library has just appeared. Repeated growth is not charged.

Growth beyond the reserve of the live frameworks in `_budget.policy` is unaccounted. When the memory of a first use or
of kernels is freed, its charge is removed. While a framework does not report its held bytes, growth may be memory of
its pool. Charges made during that time are provisional: they are reduced if the lower bound of the framework's bytes
later shows that its pool holds the charged bytes. The driver's slabs are regions from which it serves small
allocations; slab bytes that no framework counts are found by address. A second context is often observed only after
its creation. In that case unaccounted memory is charged to the second context, which has a separate row.
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

PAUSE_SECONDS = 2.0
"""Seconds without growth that end a streak of growths."""
FIRST_USE_SECONDS = 1.0
"""Seconds after an observed call of a library during which growth may be the library's first use."""
KERNEL_LOAD_SECONDS = 0.01
"""Seconds after an observed module load during which growth may be loaded kernels. The
time must cover the pause between the readings of two GPUs."""
MAX_STREAK = 5
"""The most growths in a streak that count as first uses, the number of libraries that PyTorch first uses in one
training step. Further growths count as a leak."""
MAX_FIRST_USES = 3
"""The most first uses to which one growth is attributed, if calls of their libraries were observed."""
ANY = frozenset(LIBRARIES)
"""All known libraries, which count as loaded if the loaded libraries cannot be observed."""
Use = tuple[str, int]
"""A first use of a library: the framework's name, and the index into `first_uses` of the framework's spec."""
Charge = tuple[int, frozenset[Use], int]
"""The charged bytes, the first uses that they cover, and how many of the bytes are for kernels."""


@dataclass(frozen=True)
class Overhead:
    """The bytes attributed to overhead on one GPU so far, and the owners observed so far.

    largest_gap         the largest gap so far. Growth is measured from it, so that memory which is freed and allocated
                        again is not charged twice
    communicators_owed  the bytes that communicators may still allocate: an eagerly created communicator allocates most
                        of its memory at its first collective
    last_gap            the gap of the last reading. The growth since that reading is charged to a new owner, even if
                        an earlier gap was larger
    slabs               the bytes of the driver's slabs that no framework counts, in this reading. Every gap excludes
                        these bytes
    owner_appeared      True if an owner or a library was new in the last reading
    second_contexts     the bytes of `charged` for non-primary contexts
    loaded              the libraries loaded so far
    first_uses          the first uses charged so far
    kernels             the bytes of `charged` for kernels loaded at their first launch
    first_use_rest      the bytes that the first use charged in the last reading may still allocate, if the charge was
                        below its measured size
    unexplained         the growth of the last reading that had no observed cause. If entries cannot be observed, it
                        may be the beginning of a first use
    last_growths        the last two growths of the gap, in bytes
    grew_at             the time of the last growth, in seconds
    streak              the number of growths without a pause since an owner appeared
    entries             for each observable library, the number of polls that found it called (see `Host.entries`)
    entered             the libraries called since the last charge for a first use
    entered_at          the time of the last observed entry, in seconds
    charges             the charges for first uses or kernels
    provisional         what was charged while a framework did not report its held bytes, as one charge
    pool_lower_bound    the lower bound of the bytes held by frameworks that do not report them, in the last reading
    """

    charged: int = 0
    largest_gap: int = 0
    appeared: frozenset[str] = frozenset()
    communicators_owed: int = 0
    last_gap: int = 0
    slabs: int = 0
    owner_appeared: bool = False
    second_contexts: int = 0
    loaded: frozenset[str] = frozenset()
    first_uses: frozenset[Use] = frozenset()
    kernels: int = 0
    first_use_rest: int = 0
    unexplained: int = 0
    last_growths: tuple[int, int] = (0, 0)
    grew_at: float = 0.0
    streak: int = 0
    entries: frozenset[tuple[str, int]] = frozenset()
    entered: frozenset[str] = frozenset()
    entered_at: float = -math.inf
    charges: tuple[Charge, ...] = ()
    provisional: Charge = (0, frozenset(), 0)
    pool_lower_bound: int = 0

    @property
    def total(self) -> int:
        return self.charged + self.slabs

    @property
    def lasting(self) -> tuple[int, int]:
        """`charged` and `largest_gap`. Only a consistent reading, during which no framework allocates, may change these
        figures. Otherwise memory that a framework allocates after its figures were read would be charged."""
        return self.charged, self.largest_gap

    def with_slabs(self, slabs: int) -> Overhead:
        """Return a copy with this value of `slabs`, in a tenth of the time of `replace`."""
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
        """The state after a reading. `gap` is the process's bytes less the bytes of all frameworks and `slabs`;
        `appeared` has the owners observed; `loaded` the loaded libraries of `LIBRARIES`; `now` is in seconds; `entries`
        comes from `Host.entries`.

        `exact` is False if a framework does not report its held bytes. The gap then includes memory of that framework's
        pool, so a new owner is charged with at most its measured size. `least`: the lower bound of the bytes that such
        frameworks hold; the gap excludes it.
        """
        quiet = (
            gap == self.last_gap
            and least == self.pool_lower_bound
            and not (self.owner_appeared or self.first_use_rest or self.unexplained)
        )
        if quiet and appeared == self.appeared and loaded == self.loaded and entries == self.entries:
            return self
        growth, since, paused = gap - self.largest_gap, gap - self.last_gap, now - self.grew_at > PAUSE_SECONDS
        new, gone = appeared - self.appeared, self.appeared - appeared
        expected = expected_overhead(appeared, exact)
        allowed = expected - expected_overhead(appeared - new, exact)
        observed = self.with_entries(entries, now, new)
        if new:
            growth = max(growth, min(since, allowed))
        elif observed.entered:
            # Not from `largest_gap`, which may be an old peak. `charged` excludes charged memory allocated again.
            growth = max(growth, gap - max(self.last_gap, self.charged))
        late = sum(map(modules, _second_contexts(new)))
        growth = max(growth, min(late, gap - self.charged))
        room = max(expected - self.charged, 0)
        charge = max(min(growth, allowed, room), 0)
        used = frozenset(use for use in self.first_uses if use[0] in appeared)
        state = replace(
            observed,
            appeared=appeared,
            loaded=loaded,
            first_uses=used | _first_uses_of_new(new, charge),
            communicators_owed=self._communicators_owed(new, charge, appeared),
            first_use_rest=0
            if now - self.grew_at > (FIRST_USE_SECONDS if entries else PAUSE_SECONDS)
            else self.first_use_rest,
            charges=tuple(one for one in self.charges if one[1] <= used),
        )
        fresh, left = bool(new or loaded - self.loaded), max(growth - charge, 0)
        streak = 0 if new or paused else self.streak
        steady = streak >= MAX_STREAK or (streak >= 2 and _steady(left, self.last_growths))
        most = 0 if steady else 2 if fresh or self.owner_appeared else 1
        explained = None
        begun = 0 if paused or entries else self.unexplained
        for size in (left + begun, left) if left else ():
            if size <= room - charge and (explained := state._charge_explained(size, most)):
                state, charge, left = explained, charge + size, 0
                break
        shrunk, second = self.charged, self.second_contexts
        if ended := _second_contexts(gone):
            second -= second * len(ended) // len(_second_contexts(self.appeared))
        returned = (
            state._without_freed_charge(-since, self.charged - gap)
            if since < 0 and exact and not (new or gone)
            else None
        )
        if returned is not None:
            state, shrunk = returned
        if "context" not in appeared:
            shrunk = min(shrunk, max(gap, 0))
        elif gone and since < 0:  # NCCL's communicators were destroyed, or a framework released the GPU
            shrunk = max(shrunk + max(since, -sum(workspace(name) for name in gone)), 0)
        state = replace(
            state,
            charged=shrunk + charge,
            largest_gap=gap if gone or returned is not None else max(gap, self.largest_gap),
            last_gap=gap,
            owner_appeared=fresh,
            second_contexts=min(second + min(charge, late), shrunk + charge),
            first_use_rest=state.first_use_rest if explained else 0,
            unexplained=left,
            last_growths=(self.last_growths[1], growth) if growth > 0 else self.last_growths,
            grew_at=now if growth > 0 else self.grew_at,
            streak=streak + 1 if growth > 0 and not new else streak,
            pool_lower_bound=least,
        )
        return state._without_pool_charges(self, exact)

    def _without_pool_charges(self, before: Overhead, exact: bool) -> Overhead:
        """The state without provisional charges for bytes that turn out to belong to a framework's pool.

        When the lower bound of a pool's bytes rises, the pool holds at least that many bytes, so a charge above the gap
        is wrong. At other times the bound may be too high (TensorFlow returns idle regions), so the bound is ignored.
        """
        size, used, lazy = self.provisional
        if not exact:
            size += max(self.charged - before.charged, 0)
            used |= self.first_uses - before.first_uses
            lazy += max(self.kernels - before.kernels, 0)
        size, used, lazy = min(size, self.charged), used & self.first_uses, min(lazy, self.kernels)
        wrong = min(size, self.charged - self.last_gap) if self.pool_lower_bound > before.pool_lower_bound else 0
        if wrong <= 0:
            return self if (size, used, lazy) == self.provisional else replace(self, provisional=(size, used, lazy))
        taken_for = _largest_that_fit(used, wrong)
        kernels = max(min(lazy, wrong - sum(map(_size_of, taken_for))), 0)
        return replace(
            self,
            charged=self.charged - wrong,
            largest_gap=self.last_gap,
            second_contexts=min(self.second_contexts, self.charged - wrong),
            first_uses=self.first_uses - taken_for,
            kernels=self.kernels - kernels,
            charges=tuple(one for one in self.charges if not (one[1] & taken_for or (kernels and one[2]))),
            provisional=(size - wrong, used - taken_for, lazy - kernels),
        )

    def with_entries(
        self, entries: frozenset[tuple[str, int]], now: float, new: frozenset[str] = frozenset()
    ) -> Overhead:
        """The state with these counts of `Host.entries`. If `new` has owners, calls of libraries that were not observed
        before do not count as entered, because the memory of these libraries is charged to the new owner."""
        known = {name for name, _ in self.entries}
        came = frozenset([name for name, count in entries - self.entries if count and (name in known or not new)])
        since, before = now - self.entered_at, self.entered
        entered = came | (
            before
            if since <= KERNEL_LOAD_SECONDS
            else before - {KERNELS}
            if since <= FIRST_USE_SECONDS
            else frozenset()
        )
        if entries == self.entries and entered == self.entered:
            return self
        return replace(self, entries=entries, entered=entered, entered_at=now if came else self.entered_at)

    def may_be_a_library(self, gap: int) -> bool:
        """True if the gap has grown by enough for the first use of a library that is not in `loaded`."""
        growth = gap - self.last_gap + self.unexplained
        return growth > LAZY and any(
            growth >= size * 5 // 8 for *_, library, size in self._uncharged_first_uses() if library not in self.loaded
        )

    def _charge_explained(self, size: int, most: int) -> Overhead | None:
        """The state with a growth of `size` bytes charged to causes of about that size; None without such causes.

        `most`: the most first uses that may coincide if entries cannot be observed; 0 if no first use is possible.
        """
        observed = {name for name, _ in self.entries}
        if (most or observed) and size <= self.first_use_rest:
            return replace(self, first_use_rest=0, charges=self._with_charge(size))
        if (
            self.entered - {KERNELS}
            and (found := self._charge_first_uses(size, self.entered, MAX_FIRST_USES, observed=True)) is not None
        ):
            return found
        frameworks = sum(1 for name in self.appeared if name in SPECS)
        loads = KERNELS in self.entered if KERNELS in observed else most > 0
        if loads and size <= LAZY and self.kernels + size <= LAZY * frameworks:
            return replace(
                self, kernels=self.kernels + size, first_use_rest=0, charges=self._with_charge(size, kernels=size)
            )
        if most and (found := self._charge_first_uses(size, self.loaded - observed, most, observed=False)) is not None:
            return found
        if self.communicators_owed // 8 <= size <= self.communicators_owed:
            return replace(self, communicators_owed=self.communicators_owed - size, first_use_rest=0)
        return None

    def _charge_first_uses(self, size: int, libraries: frozenset[str], most: int, observed: bool) -> Overhead | None:
        """The state with `size` bytes charged to at most `most` first uses of `libraries`; None if no sizes fit."""
        unused = [use for use in self._uncharged_first_uses() if use[2] in libraries]
        together = [uses for count in range(1, most + 1) for uses in combinations(unused, count)]
        sizes = [(sum(use[3] for use in uses), uses) for uses in together]
        near = [(abs(measured - size), measured, uses) for measured, uses in sizes if _fits(measured, size, observed)]
        if not near:
            return None
        _, measured, uses = min(near)
        used = frozenset([(name, place) for name, place, *_ in uses])
        rest = _upper_bound(measured) - size if size < measured else 0
        return replace(
            self,
            first_uses=self.first_uses | used,
            first_use_rest=rest,
            charges=self._with_charge(size, used),
            entered=frozenset(),
        )

    def _with_charge(self, size: int, used: frozenset[Use] = frozenset(), kernels: int = 0) -> tuple[Charge, ...]:
        """`charges` with this charge appended. A charge below the driver's page size is omitted, because NVML's
        figures do not change when the memory of such a charge is freed."""
        return (*self.charges, (size, used, kernels)) if size >= GRANULE else self.charges

    def _without_freed_charge(self, fall: int, missing: int) -> tuple[Overhead, int] | None:
        """The state without the latest charge whose memory was freed, and the remaining charged bytes; None if no
        charged memory was freed.

        The memory of a charge counts as freed if the gap decreased by about the charge's size (`fall`), or if the
        charged bytes exceed the gap by about that size (`missing`). If `missing` is 0, the freed memory was
        unaccounted.
        """
        for place in range(len(self.charges) - 1, -1, -1):
            size, used, lazy = self.charges[place]
            if min(abs(size - fall), abs(size - missing)) < GRANULE // 2 and size < 2 * missing:
                charges = self.charges[:place] + self.charges[place + 1 :]
                state = replace(self, first_uses=self.first_uses - used, kernels=self.kernels - lazy, charges=charges)
                return state, max(self.charged - size, 0)
        return None

    def _uncharged_first_uses(self) -> Iterator[tuple[str, int, str, int]]:
        """Yield framework, index into the spec's `first_uses`, library and bytes of each first use not yet charged."""
        for name in sorted(self.appeared):
            for place, (library, size) in enumerate(SPECS[name].first_uses if name in SPECS else ()):
                if (name, place) not in self.first_uses:
                    yield name, place, library, size

    def _communicators_owed(self, new: frozenset[str], charge: int, appeared: frozenset[str]) -> int:
        """The bytes that communicators may still allocate after a charge for the owners in `new`."""
        came = _communicators(new)
        owed = min(self.communicators_owed, sum(map(workspace, _communicators(appeared)))) + sum(map(workspace, came))
        if came:
            owed -= max(charge - sum(map(_initial_memory, new - came)), 0)
        # The reserve is slightly above the measured size. A remainder of at most that difference is never allocated.
        return owed if owed > sum(workspace(name) - modules(name) for name in _communicators(appeared)) else 0


def _steady(growth: int, before: tuple[int, int]) -> bool:
    """True if this growth and the two before it have about the same size, which indicates a leak, not a first use."""
    return min(before) >= growth * 3 // 4 and max(before) <= growth * 4 // 3


def _fits(measured: int, growth: int, observed: bool) -> bool:
    """True if a first use that allocates `measured` bytes on an H200 may allocate `growth` bytes on another GPU.

    cuBLAS allocates 66 MiB on an H200, of which 32 are workspace. On GPUs other than Hopper the workspace is 8 MiB
    (cuBLAS documentation, `cublasSetWorkspace`). The lower bound is a quarter of the measured size if a call of the
    library was observed (`observed`): on an H100 cuDNN allocates 8 MiB, half of the size on an H200, and cuFFT 8 MiB
    instead of 24.
    """
    return measured * (2 if observed else 5) // 8 <= growth <= _upper_bound(measured)


def _upper_bound(measured: int) -> int:
    return measured * 5 // 4


def _first_uses_of_new(new: frozenset[str], charge: int) -> frozenset[Use]:
    """The first uses that `charge` bytes for the owners `new` cover in addition to the initial memory of the owners."""
    uses = [(name, place) for name in new & set(SPECS) for place in range(len(SPECS[name].first_uses))]
    return _largest_that_fit(uses, charge - sum(map(_initial_memory, new)))


def _largest_that_fit(uses: Iterable[Use], size: int) -> frozenset[Use]:
    """The first uses that fit into `size` bytes, tried from the largest to the smallest."""
    found = set()
    for use in sorted(uses, key=lambda use: (_size_of(use), use), reverse=True):
        if _size_of(use) * 7 // 8 <= size:
            size -= _size_of(use)
            found.add(use)
    return frozenset(found)


def _size_of(use: Use) -> int:
    name, place = use
    return SPECS[name].first_uses[place][1]


def _initial_memory(name: str) -> int:
    """The measured overhead of a framework before it first uses a library."""
    return modules(name) - sum(size for _, size in (SPECS[name].first_uses if name in SPECS else ()))


def _communicators(names: frozenset[str]) -> frozenset[str]:
    """The communicators among `names`. `Framework.libraries` numbers communicators, for example `nccl 1`."""
    return frozenset(name for name in names - _second_contexts(names) if " " in name)


def _second_contexts(names: frozenset[str]) -> frozenset[str]:
    """The non-primary contexts among `names`."""
    return frozenset(name for name in names if name.startswith(SECOND_CONTEXT))


def expected_overhead(appeared: frozenset[str], exact: bool = True) -> int:
    """The most bytes to charge for these owners. If `exact`, uses the figures of the budget's setting `reserve: auto`,
    else the smaller measured sizes."""
    if not appeared:
        return 0
    if not exact:
        return sum(modules(name) for name in appeared | {"context"})
    return CONTEXT + SLACK + sum(workspace(name) for name in appeared - {"context"})


def own_bytes(processes: Mapping[int, int | None], pid: int, active: bool) -> int | None:
    """This process's bytes by NVML, 0 if NVML does not list the process and the process is not `active`.

    None if NVML lists the process without bytes, or does not list an active process.
    In a container NVML does not list the process, because NVML uses the host's PIDs.
    """
    if pid in processes:
        return processes[pid]
    return None if active else 0


class Held(NamedTuple):
    """The memory that all frameworks hold on one GPU.

    bytes     the sum of the known bytes
    live      the frameworks that use the GPU
    exact     True if each framework reports its held bytes
    at_least  the sum of the lower bounds of frameworks that do not report their held bytes; included in `bytes`
    """

    bytes: int
    live: frozenset[str]
    exact: bool
    at_least: int


def held_by(usages: Mapping[str, Usage | None]) -> Held:
    """Add up the figures that the frameworks report in one reading."""
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
    return tuple.__new__(Held, (known, frozenset(live), exact, at_least))  # takes half the time of the constructor


def same_held(before: Mapping[str, Usage | None], after: Mapping[str, Usage | None], pooled: Collection[str]) -> bool:
    """True if each framework holds the same number of bytes in both readings. The `pooled` frameworks and their pool
    count as one holder, because the pool's bytes move between these frameworks constantly.
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
    """A framework's bytes in use and its allocator's peak, each added up over all GPUs; None if not reported."""
    in_use: int | None = 0
    most: int | None = None
    for usage in usages:
        if usage is not None:
            _, used, _, _, _, peak = usage
            in_use = None if in_use is None or used is None else in_use + used
            if peak is not None:
                most = peak if most is None else most + peak
    return in_use, most
