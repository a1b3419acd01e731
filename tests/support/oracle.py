"""Judge a played schedule: whether each refusal was necessary, from the live arrays alone.

The judge reads the terms and the log. Only memory held after a trim comes from the adapters, because nothing else can
report it on a real GPU. Sizes are bytes.

A request is *infeasible* if the live arrays leave no room for it. Live arrays have a minimum size in their
allocators: pages of 2 MiB for each array above 1 MiB and for smaller ones together (CuPy, PyCUDA by its bins, Numba),
2 MiB for all small and for all large ones of torch, and 256 bytes each for TensorFlow and JAX. A framework below its
min always has room; above it, it can use only other frameworks' unused memory beyond their min. So there is no room
if live + request exceeds its max, or room − Σ max(min, live) of the others.

It is *blocked by fragments* if there was enough room, but in blocks that also contain live arrays, which no allocator
can free: after every framework has freed its idle memory, they hold more than the live arrays need. The judge names
these frameworks. It also names the requester if its own fragments, or its allocator's rounding, are too large.

Every other refusal was *avoidable*.

If other processes hold part of the GPU, the room may be unavailable. The judge then repeats the test for the whole GPU,
with the contexts and modules in the log, and with the memory of the pools that never shrink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MIB = 1 << 20
PAGE = 2 * MIB  # The driver allocates in pages of this size, and caps are multiples of it.
SMALL = MIB  # The driver packs allocations of up to this size into pages.
FIXED = ("tensorflow", "jax")  # Their pools never shrink and their caps never change: they have only their min.


class Terms(NamedTuple):
    """A budget's terms on one GPU: each framework's min and max. `card` is this process's available GPU memory, if
    other processes reduce it below the limit. `kept` is memory that an allocator never frees once initialised: a small
    block of PyCUDA's real pool."""

    limit: int
    reserve: int
    shares: Mapping[str, tuple[int, int]]
    card: int | None = None
    kept: Mapping[str, int] = MappingProxyType({})

    @property
    def room(self) -> int:
        return self.limit - self.reserve

    def least(self, name: str) -> int:
        return self.shares[name][0]

    def most(self, name: str) -> int:
        return self.shares[name][0 if name in FIXED else 1]


class Refused(NamedTuple):
    """A refused request: the error's text, and whether it says that the GPU is full (None: unknown)."""

    text: str
    full: bool | None = None


class Entry(NamedTuple):
    """One logged event. `held` and `process` were read right after it. `trimmed` is each framework's memory after a
    refusal, once all have freed their idle memory; None where not needed. `right`: a freed array still had the values
    that were written to it."""

    step: int
    op: str
    framework: str
    block: int
    size: int
    refused: Refused | None
    process: int
    held: Mapping[str, int | None]
    trimmed: Mapping[str, int | None] | None = None
    right: bool = True


class Fault(NamedTuple):
    """A violation: the index of the log entry, and a description."""

    entry: int
    what: str


class Verdicts(NamedTuple):
    """The outcomes of the requests, and the violations. `fragments` counts refusals by the blocking framework."""

    requests: int
    infeasible: int
    fragments: Mapping[str, int]
    blocked: int
    avoidable: Sequence[Fault]
    above_limit: Sequence[Fault]
    minima: Sequence[Fault]
    wrong: Sequence[Fault]

    @property
    def faults(self) -> list[Fault]:
        return [*self.avoidable, *self.above_limit, *self.minima, *self.wrong]


class Books:
    """The live arrays, and the minimum that the allocators must hold for them."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._small = dict.fromkeys(terms.shares, 0)
        self._large = dict.fromkeys(terms.shares, 0)
        self._arrays = {name: [0, 0] for name in terms.shares}

    def add(self, name: str, size: int, times: int = 1) -> None:
        (self._small if size <= SMALL else self._large)[name] += times * rounded(name, size)
        self._arrays[name][size <= SMALL] += times

    def remove(self, name: str, size: int) -> None:
        self.add(name, size, -1)

    def live(self, name: str) -> int:
        """The minimum size of its live arrays."""
        small, large = self._small[name], self._large[name]
        return small + large if name in FIXED else up(small) + up(large)

    def large(self, name: str) -> int:
        return self._large[name]

    def arrays(self, name: str) -> int:
        return sum(self._arrays[name])

    def small_arrays(self, name: str) -> int:
        return self._arrays[name][True]

    def most(self, name: str) -> int:
        """Its maximum while the others have their current live arrays."""
        return self.allowed(name, {other: self.live(other) for other in self.terms.shares})

    def allowed(self, name: str, held: Mapping[str, int]) -> int:
        """Its maximum while the others hold this much: they borrow any memory above their min."""
        terms = self.terms
        others = sum(max(terms.least(other), up(held[other])) for other in terms.shares if other != name)
        return min(terms.most(name), max(terms.room - others, terms.least(name)))

    def fits(self, name: str, size: int) -> bool:
        """Whether the live arrays leave room for one more array."""
        self.add(name, size)
        needed = self.live(name)
        self.remove(name, size)
        return needed <= self.most(name)


def rounded(name: str, size: int) -> int:
    """The minimum size of an array in its allocator."""
    if name in FIXED:
        return up(size, 256)
    if name == "torch":
        return up(size, 512)
    if name == "pycuda":  # a bin: all sizes that share the leading bit and the four bits after it
        step = 1 << max(size.bit_length() - 5, 0)
        size = max((size // step + 1) * step - 1, size)
    return up(size) if size > SMALL else up(size, 512)


def footprint(name: str, size: int) -> int:
    """The size that its allocator requests from the driver for one more array, without a block that fits."""
    if name in FIXED:
        return up(size, 256)
    if name == "torch":
        return PAGE if size <= SMALL else 20 * MIB if size < 10 * MIB else up(size)
    return up(rounded(name, size))


def judge(log: Iterable[Entry], terms: Terms) -> Verdicts:
    """Classify the refusals, and collect the violations."""
    books, named = Books(terms), dict[str, int]()
    requests = infeasible = blocked = 0
    avoidable, above, minima, wrong = list[Fault](), list[Fault](), list[Fault](), list[Fault]()
    for at, entry in enumerate(log):
        name, size = entry.framework, entry.size
        requests += entry.op == "allocate"
        if entry.refused is not None:
            if not books.fits(name, size) or _card_is_full(books, entry):
                infeasible += 1
            elif who := in_the_way(books, entry):
                blocked += 1
                for one in who:
                    named[one] = named.get(one, 0) + 1
            else:
                avoidable.append(Fault(at, _why(books, entry)))
        elif entry.op == "allocate":
            books.add(name, size)
        elif entry.op == "free":
            books.remove(name, size)
        if entry.process > terms.limit:
            above.append(Fault(at, f"the process holds {entry.process}, its limit is {terms.limit}"))
        if promised := _overdrawn(terms, entry.held):
            minima.append(Fault(at, promised))
        if not entry.right:
            wrong.append(Fault(at, f"{name}: array {entry.block} had other values than were written into it"))
    return Verdicts(requests, infeasible, named, blocked, avoidable, above, minima, wrong)


def in_the_way(books: Books, entry: Entry) -> list[str]:
    """The frameworks that block a request for which there would be room; empty if none does. Others block it only if
    what they hold keeps the requester below its max."""
    terms, name = books.terms, entry.framework
    assert entry.trimmed is not None, "the runner looks at what stays held wherever the request would fit"
    held = {one: _pinned(books, one, size) for one, size in entry.trimmed.items()}
    allowed = books.allowed(name, held)
    needed = held[name] + footprint(name, entry.size) + (0 if held[name] else terms.kept.get(name, 0))
    if needed <= allowed:
        return _in_the_way_on_the_card(books, entry, held)
    stuck = [one for one in held if one != name and up(held[one]) > max(terms.least(one), books.live(one))]
    own = needed > books.live(name) + rounded(name, entry.size)
    return [*(stuck if allowed < terms.most(name) else ()), *([name] if own else ())]


def _card_is_full(books: Books, entry: Entry) -> bool:
    """Whether the live arrays leave no room on the GPU, regardless of the caps."""
    if books.terms.card is None:
        return False
    books.add(entry.framework, entry.size)
    live = sum(books.live(name) for name in books.terms.shares)
    books.remove(entry.framework, entry.size)
    return live + _outside(entry) > books.terms.card


def _in_the_way_on_the_card(books: Books, entry: Entry, held: Mapping[str, int]) -> list[str]:
    """Like `in_the_way`, if the caps leave room: the frameworks whose fragments, or pools that never shrink, fill the
    GPU. TensorFlow's and XLA's allocator requests a region of its own choice from the driver, up to its remaining
    limit. At its first failure it retries with smaller regions, and at later ones it does not: it then fails if less
    than one region is free."""
    terms, name = books.terms, entry.framework
    if terms.card is None:
        return []
    left = terms.card - sum(up(size) for size in held.values()) - _outside(entry)
    if footprint(name, entry.size) > left:
        return [one for one, size in held.items() if size > books.live(one)] or [name]
    return [name] if name in FIXED and terms.most(name) - held[name] > left else []


def _outside(entry: Entry) -> int:
    """The process's memory outside its frameworks' pools: contexts, modules, and gaps in slabs."""
    return entry.process - sum(size or 0 for size in entry.held.values())


def _pinned(books: Books, name: str, held: int | None) -> int:
    """The maximum that its live arrays can pin after a trim. PyCUDA's and Numba's blocks contain one array each, so
    only fragments of slabs exceed the arrays."""
    if held is None:
        return books.terms.most(name)
    if name in FIXED:
        return held
    if name in ("pycuda", "numba"):
        return min(held, books.large(name) + PAGE * books.small_arrays(name) + books.terms.kept.get(name, 0))
    return held if books.arrays(name) else 0


def _overdrawn(terms: Terms, held: Mapping[str, int | None]) -> str:
    """Report a violation if the frameworks' memory leaves another one less than its min."""
    known = {name: terms.least(name) if size is None else size for name, size in held.items()}
    total = sum(max(terms.least(name), size) for name, size in known.items())
    if total > terms.room:
        return f"the minima and what is held above them are {total} of {terms.room}"
    return "; ".join(
        f"{name} holds {size} of at most {terms.most(name)}" for name, size in known.items() if size > terms.most(name)
    )


def _why(books: Books, entry: Entry) -> str:
    name, terms = entry.framework, books.terms
    needed = books.live(name) + footprint(name, entry.size)
    within = " within its min" if needed <= terms.least(name) else ""
    text = entry.refused.text if entry.refused is not None else ""
    return (
        f"step {entry.step}: {name} was refused {entry.size}{within}: live {books.live(name)}, allowed "
        f"{books.most(name)}, held by all after a trim {dict(entry.trimmed or {})}: {text}"
    )


def up(size: int, unit: int = PAGE) -> int:
    return -(-size // unit) * unit
