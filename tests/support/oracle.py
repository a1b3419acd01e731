"""Judges a schedule after it was played: whether each refusal was needed, from what was live and nothing else.

It knows the terms and the log. Only what is held after a trim is said by the adapters, where no other can say it on a
real GPU. Sizes are bytes.

A request is *infeasible* if the live arrays leave no room for it. The least that live arrays take is what their
allocators cannot do without: pages of 2 MiB for each array above 1 MiB and for smaller ones together (CuPy, PyCUDA
by its bins, Numba), 2 MiB for all small and for all large ones of torch, and 256 bytes each for TensorFlow and JAX.
Below its min a framework needs nobody; above it only what others have not in use of theirs, and never their min, is to
be had. So no room is left if live + request is above its max, or above room − Σ max(min, live) of the others.

It is *blocked by fragments* if the room was there, but in pieces with live arrays in them, which no allocator can give
back: whatever is held after all gave back what they can is more than what is live. They are named. The requester is
named too if its own pieces, or what its allocator takes for a request, are what does not fit.

All else was *avoidable*.

If other processes hold part of the card, less than the room may be there: then the same is asked once more of the card,
with the contexts and modules that the log shows, and with what the pools that never shrink hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MIB = 1 << 20
PAGE = 2 * MIB  # The page in which the driver hands out memory, and of which caps are multiples.
SMALL = MIB  # The driver packs allocations of up to this size into pages.
FIXED = ("tensorflow", "jax")  # Their pools never shrink, and their caps never change: their min is all that they have.


class Terms(NamedTuple):
    """What a budget promises on one GPU: each framework's least and most. `card` is what this process can have of the
    GPU, if others hold so much that it is less than the limit. `kept` is what an allocator never gives back once it is
    live: a small block of PyCUDA's real pool."""

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
    """A request that failed: the error's text, and whether it says that the GPU is full (None: it does not tell)."""

    text: str
    full: bool | None = None


class Entry(NamedTuple):
    """One thing that happened. `held` and `process` are of right after it. `trimmed` is what each framework held after
    a refusal, once all gave back what they can; None where it was not needed. `right`: the values of a freed array
    were what had been written into it."""

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
    """Something that must not be: at which entry of the log, and what."""

    entry: int
    what: str


class Verdicts(NamedTuple):
    """What became of the requests, and what must not have been. `fragments` counts by the name of who is in the way."""

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
    """What is live, and what the allocators must hold for it at least."""

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
        """The least that its live arrays take."""
        small, large = self._small[name], self._large[name]
        return small + large if name in FIXED else up(small) + up(large)

    def large(self, name: str) -> int:
        return self._large[name]

    def arrays(self, name: str) -> int:
        return sum(self._arrays[name])

    def small_arrays(self, name: str) -> int:
        return self._arrays[name][True]

    def most(self, name: str) -> int:
        """The most that it may hold while the others have live what they have live."""
        return self.allowed(name, {other: self.live(other) for other in self.terms.shares})

    def allowed(self, name: str, held: Mapping[str, int]) -> int:
        """The most that it may hold while the others hold so much: what they hold above their min is lent to them."""
        terms = self.terms
        others = sum(max(terms.least(other), up(held[other])) for other in terms.shares if other != name)
        return min(terms.most(name), max(terms.room - others, terms.least(name)))

    def fits(self, name: str, size: int) -> bool:
        """Whether there is room for one more array, by what is live."""
        self.add(name, size)
        needed = self.live(name)
        self.remove(name, size)
        return needed <= self.most(name)


def rounded(name: str, size: int) -> int:
    """What an array takes in its allocator, at least."""
    if name in FIXED:
        return up(size, 256)
    if name == "torch":
        return up(size, 512)
    if name == "pycuda":  # a bin: all sizes with the same leading bit and four bits after it
        step = 1 << max(size.bit_length() - 5, 0)
        size = max((size // step + 1) * step - 1, size)
    return up(size) if size > SMALL else up(size, 512)


def footprint(name: str, size: int) -> int:
    """What its allocator takes from the driver for one more array, if it has no block that fits."""
    if name in FIXED:
        return up(size, 256)
    if name == "torch":
        return PAGE if size <= SMALL else 20 * MIB if size < 10 * MIB else up(size)
    return up(rounded(name, size))


def judge(log: Iterable[Entry], terms: Terms) -> Verdicts:
    """Sort the refusals, and look for what must not be."""
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
    """Who is in the way of a request for which there would be room; empty if nobody is."""
    terms, name = books.terms, entry.framework
    assert entry.trimmed is not None, "the runner looks at what stays held wherever the request would fit"
    held = {one: _pinned(books, one, size) for one, size in entry.trimmed.items()}
    allowed = books.allowed(name, held)
    needed = held[name] + footprint(name, entry.size) + (0 if held[name] else terms.kept.get(name, 0))
    if needed <= allowed:
        return _in_the_way_on_the_card(books, entry, held)
    stuck = [one for one in held if one != name and up(held[one]) > max(terms.least(one), books.live(one))]
    own = needed > books.live(name) + rounded(name, entry.size)
    return [*(stuck if needed > terms.least(name) else ()), *([name] if own else ())]


def _card_is_full(books: Books, entry: Entry) -> bool:
    """Whether the live arrays leave no room on the card, whatever the caps."""
    if books.terms.card is None:
        return False
    books.add(entry.framework, entry.size)
    live = sum(books.live(name) for name in books.terms.shares)
    books.remove(entry.framework, entry.size)
    return live + _outside(entry) > books.terms.card


def _in_the_way_on_the_card(books: Books, entry: Entry, held: Mapping[str, int]) -> list[str]:
    """As `in_the_way`, where the caps leave room: whose pieces, or pools that never shrink, fill the card.
    TensorFlow's and XLA's allocator asks the driver for a region of its own choice, up to what its limit leaves. Only
    the first failure of its life makes it try smaller ones, so it fails beside less than that."""
    terms, name = books.terms, entry.framework
    if terms.card is None:
        return []
    left = terms.card - sum(up(size) for size in held.values()) - _outside(entry)
    if footprint(name, entry.size) > left:
        return [one for one, size in held.items() if size > books.live(one)] or [name]
    return [name] if name in FIXED and terms.most(name) - held[name] > left else []


def _outside(entry: Entry) -> int:
    """What the process holds beside its frameworks' pools: contexts, modules, and gaps in slabs."""
    return entry.process - sum(size or 0 for size in entry.held.values())


def _pinned(books: Books, name: str, held: int | None) -> int:
    """What its live arrays can keep from the driver at most, of what it holds after a trim. PyCUDA's and Numba's
    blocks hold one array each, so only pieces of slabs keep more than they are."""
    if held is None:
        return books.terms.most(name)
    if name in FIXED:
        return held
    if name in ("pycuda", "numba"):
        return min(held, books.large(name) + PAGE * books.small_arrays(name) + books.terms.kept.get(name, 0))
    return held if books.arrays(name) else 0


def _overdrawn(terms: Terms, held: Mapping[str, int | None]) -> str:
    """Says if what frameworks hold leaves somebody less than its min."""
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
