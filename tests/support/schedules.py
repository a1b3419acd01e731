"""Seeded schedules of six frameworks that share one GPU under elastic caps, for real and for simulated frameworks.

`terms` and `schedule` generate a budget and its steps from a seed; `play` runs them on a `Runner` and logs the
results; `oracle.judge` classifies the refusals afterwards. Nothing here calls memguard. Sizes are bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, Protocol

from support.oracle import FIXED, PAGE, Books, Entry, Refused, Terms

MIB = 1 << 20
FRAMEWORKS = ("torch", "cupy", "pycuda", "numba", "tensorflow", "jax")
THREADS = 3
LENGTH = 60


class Step(NamedTuple):
    """One step, on one of the program's threads. allocate: `sizes` has one size, and `block` is the array's number.
    free: the array `block`, if it is live. peak: allocate all `sizes`, then free them: a cache remains. idle: no
    request, and a monitor tick."""

    op: Literal["allocate", "free", "peak", "idle"]
    thread: int
    framework: str = ""
    block: int = -1
    sizes: tuple[int, ...] = ()


class Runner(Protocol):
    """The backend of a schedule. Calls come one at a time, from several threads. `allocate` behaves like the program:
    for a framework that cannot make room within an allocation, it calls `guard.make_room` or `memguard.retry`, and
    retries. It fills each array with its own value."""

    def allocate(self, framework: str, size: int) -> object | Refused:
        """Allocate an array of this many bytes, or return the refusal."""

    def free(self, framework: str, array: Any) -> bool:
        """Free it. Return whether its values were still right."""

    def idle(self) -> None:
        """Run a monitor tick, if there is a monitor."""

    def held(self) -> Mapping[str, int | None]:
        """Each framework's memory from the driver; None if the framework does not report it."""

    def held_by_process(self) -> int:
        """The process's memory by the driver, including the context."""

    def trimmed(self) -> Mapping[str, int | None]:
        """`held` after each framework freed all its idle memory, called directly and not through memguard."""


def terms(seed: int, limit: int, reserve: int) -> Terms:
    """A budget for a GPU: each framework's min and max. The maxima add up to twice the limit. TensorFlow and JAX keep
    their initial caps: they only ever have their min."""
    rng = random.Random(f"terms {seed}")
    room = limit - reserve
    least = {name: _pages(room * rng.uniform(0.02, 0.08)) for name in FRAMEWORKS}
    least |= {name: _pages(room * rng.uniform(0.06, 0.12)) for name in FIXED}
    weights = {name: rng.uniform(0.6, 1.4) for name in FRAMEWORKS}
    most: dict[str, int] = {}
    left, weight = 2 * limit, sum(weights.values())
    for name in sorted(
        weights, key=lambda one: -weights[one]
    ):  # no framework can have more than the room: the others get the rest
        most[name] = max(min(_pages(left * weights[name] / weight), _pages(room)), least[name])
        left, weight = left - most[name], weight - weights[name]
    return Terms(limit, reserve, {name: (least[name], most[name]) for name in FRAMEWORKS})


def budget(agreed: Terms) -> dict[str, Any]:
    """The budget file of these terms."""
    shares = {name: {"min": least, "max": most} for name, (least, most) in agreed.shares.items()}
    return {"version": 1, "device": {"limit": agreed.limit, "reserve": agreed.reserve}, "frameworks": shares}


def schedule(seed: int, agreed: Terms, length: int = LENGTH) -> list[Step]:
    """The steps of this seed, assuming that every feasible request is served."""
    rng = random.Random(f"steps {seed}")
    books, arrays = Books(agreed), dict[int, tuple[str, int]]()
    steps: list[Step] = []
    for block in range(length):
        name, thread = rng.choice(FRAMEWORKS), rng.randrange(THREADS)
        full = sum(books.live(one) for one in FRAMEWORKS) / agreed.room
        op = rng.choices(("allocate", "free", "peak", "idle"), (45, 10 + 40 * full, 20, 5))[0]
        if op == "allocate":
            size = _size(rng, books, name)
            if books.fits(name, size):
                books.add(name, size)
                arrays[block] = name, size
            steps.append(Step("allocate", thread, name, block, (size,)))
        elif op == "free" and arrays:
            gone = rng.choice(list(arrays))
            books.remove(*arrays[gone])
            steps.append(Step("free", thread, arrays.pop(gone)[0], gone))
        elif op == "peak":
            steps.append(Step("peak", thread, name, sizes=_peak(rng, books, name)))
        else:
            steps.append(Step("idle", thread))
    return steps


def play(steps: Sequence[Step], runner: Runner, agreed: Terms) -> list[Entry]:
    """Run the steps in order, each on its thread. Free the live arrays at the end."""
    return list(_Play(runner, agreed).all(steps))


class _Play:
    def __init__(self, runner: Runner, agreed: Terms) -> None:
        self.runner, self.books = runner, Books(agreed)
        self.arrays: dict[int, tuple[str, int, object]] = {}
        self.inner = 0

    def all(self, steps: Sequence[Step]) -> Iterator[Entry]:
        with ExitStack() as stack:
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(THREADS)]
            for number, step in enumerate(steps):
                yield from threads[step.thread].submit(self.step, number, step).result()
            yield from threads[0].submit(self.end, len(steps)).result()

    def end(self, number: int) -> list[Entry]:
        return [self.free(number, block) for block in list(self.arrays)]

    def step(self, number: int, step: Step) -> list[Entry]:
        return list(self._step(number, step))

    def _step(self, number: int, step: Step) -> Iterator[Entry]:
        if step.op == "allocate":
            yield self.allocate(number, step.framework, step.block, step.sizes[0])
        elif step.op == "free" and step.block in self.arrays:
            yield self.free(number, step.block)
        elif step.op == "peak":
            blocks = []
            for size in step.sizes:
                self.inner -= 1
                blocks.append(self.inner)
                yield self.allocate(number, step.framework, self.inner, size)
            for block in blocks:
                if block in self.arrays:
                    yield self.free(number, block)
        elif step.op == "idle":
            self.runner.idle()
            yield self.entry(number, "idle")

    def allocate(self, number: int, name: str, block: int, size: int) -> Entry:
        found = self.runner.allocate(name, size)
        if not isinstance(found, Refused):
            self.books.add(name, size)
            self.arrays[block] = name, size, found
            return self.entry(number, "allocate", name, block, size)
        entry = self.entry(number, "allocate", name, block, size, refused=found)
        if self.books.fits(name, size):  # otherwise fragmentation does not matter
            entry = entry._replace(trimmed=self.runner.trimmed())
        return entry

    def free(self, number: int, block: int) -> Entry:
        name, size, array = self.arrays.pop(block)
        right = self.runner.free(name, array)
        self.books.remove(name, size)
        return self.entry(number, "free", name, block, size)._replace(right=right)

    def entry(
        self, number: int, op: str, name: str = "", block: int = 0, size: int = 0, refused: Refused | None = None
    ) -> Entry:
        runner = self.runner
        return Entry(number, op, name, block, size, refused, runner.held_by_process(), runner.held())


def _size(rng: random.Random, books: Books, name: str) -> int:
    """From small to large blocks; one in six takes all, or nearly all, of the framework's available memory."""
    left = max(books.most(name) - books.live(name), PAGE)
    kind = rng.random()
    if kind < 0.05:
        return left
    if kind < 0.17:
        return max(int(left * rng.uniform(0.6, 1.03)), 1)
    if kind < 0.45:
        return max(min(int(rng.lognormvariate(math.log(96 << 10), 1.5)), MIB), 1)
    largest = min(books.terms.room // 3, books.terms.most(name))
    return max(min(int(rng.lognormvariate(math.log(books.terms.room / 60), 1.2)), largest), MIB + 1)


def _peak(rng: random.Random, books: Books, name: str) -> tuple[int, ...]:
    left = max(books.most(name) - books.live(name), PAGE)
    total, pieces = left * rng.choice((0.3, 0.6, 0.9, 1.0, 1.05)), rng.randint(1, 8)
    return tuple(max(int(total / pieces * rng.uniform(0.8, 1.0)), 1) for _ in range(pieces))


def _pages(size: float) -> int:
    return int(size) // PAGE * PAGE
