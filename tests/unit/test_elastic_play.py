"""What plays schedules on a GPU, without one: arrays are read back where they were written, and the oracle objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support import elastic_play, oracle, schedules

from bench.programs import patterned

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run

MIB, GIB = 1 << 20, 1 << 30
SEEDS, REQUESTS = range(1, 21), 400
"""The schedules of tests/gpu, and how many requests they make together at least."""


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 1024, 8193, 64 * MIB + 4])
@pytest.mark.parametrize("name", ["torch", "cupy", "pycuda", "numba"])
def test_an_array_is_read_back_where_it_was_written(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(size)

    class Host:
        def fill(self, at: int, count: int, word: int) -> None:
            pattern = word.to_bytes(4, "little")
            memory[:] = (pattern * (count // 4 + 1))[: count // 4 * 4] + pattern[:1] * (count % 4)

        def read(self, at: int, count: int) -> bytes:
            assert at >= 0 and at + count <= size
            return bytes(memory[at : at + count])

    monkeypatch.setattr(patterned, "address", lambda name, array: 0)
    one = patterned.Arrays(name)
    one._memory = Host()
    one.write(None, size, 7)
    assert one.right(None, size, 7) and not one.right(None, size, 8)
    memory[0] ^= 1
    assert not one.right(None, size, 7)


# Schedules


LIMIT, RESERVE = 17 * GIB, GIB


class Simulated:
    """`Arrays` of a simulated framework. They have no values; `wrong` of them are told to have others."""

    def __init__(self, framework: Any) -> None:
        self.framework, self.name, self.wrong = framework, framework.name, 0

    def take(self, size: int, seed: int = 1) -> Any:
        framework, number = self.framework, self.framework.allocate(size)

        class Held:
            def __del__(self) -> None:
                framework.free(number)

        return Held()

    def write(self, array: Any, size: int, seed: int) -> None: ...

    def right(self, array: Any, size: int, seed: int) -> bool:
        self.wrong -= 1
        return self.wrong < 0


def schedule(seed: int, monkeypatch: pytest.MonkeyPatch, lends: bool = True, wrong: int = 0) -> Any:
    """One schedule over the simulated frameworks of an elastic budget, through the runner of the real ones."""
    import memguard
    from memguard._budget import from_mapping
    from memguard._devices.catalog import Model
    from memguard._devices.simulated import SimulatedHost
    from memguard._guard.guard import Guard

    def call(take: Any, *arguments: Any) -> Any:
        try:
            return take(*arguments)
        except Exception:
            guard.make_room(take.__self__.name, take.__self__.framework.footprint(arguments[0]))
            return take(*arguments)

    terms = schedules.terms(seed, LIMIT, RESERVE)
    steps = elastic_play.eased(schedules.schedule(seed, terms), terms)
    budget = schedules.budget(terms) if lends else elastic_play.fixed(terms)
    guard = Guard(from_mapping(budget), SimulatedHost([Model("card", "hopper", 20 * GIB)]))
    monkeypatch.setattr(type(memguard.retry), "call", staticmethod(call))
    monkeypatch.setattr(elastic_play, "TICK", 0)
    guard.start()
    try:
        frameworks = {name: Simulated(one) for name, one in guard.frameworks.items()}
        frameworks["cupy"].wrong = wrong
        device = guard.plan.devices[0].device
        own = SimpleNamespace(own=lambda: guard.host.processes(device).get(guard.host.pid) or 0)
        log = schedules.play(steps, elastic_play.Runner(guard, frameworks, own, lends), terms)
        return oracle.judge(log, terms)
    finally:
        guard.stop()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_schedule_is_played_and_judged_and_its_control_finds_what_could_have_been_served(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = schedule(seed, monkeypatch)
    assert found.faults == [] and found.requests >= REQUESTS / len(SEEDS)
    assert schedule(seed, monkeypatch, lends=False).avoidable
    assert len(schedule(seed, monkeypatch, wrong=3).wrong) == 3


def test_all_but_a_few_requests_without_room_are_dropped() -> None:
    """Each would take ten seconds. Everything else of a schedule stays, in its order."""
    dropped = 0
    for seed in SEEDS:
        terms = schedules.terms(seed, LIMIT, RESERVE)
        steps = schedules.schedule(seed, terms)
        kept = elastic_play.eased(steps, terms)
        dropped += sum(len(step.sizes) for step in steps) - sum(len(step.sizes) for step in kept)
        others = [[step for step in of if step.framework not in oracle.FIXED] for of in (steps, kept)]
        assert others[0] == others[1]
        books, refused = oracle.Books(terms), 0
        arrays: dict[int, Any] = {}
        for step in kept:
            if step.op == "free" and step.block in arrays:
                books.remove(*arrays.pop(step.block))
            inner = []
            for size in step.sizes:
                if books.fits(step.framework, size):
                    books.add(step.framework, size)
                    inner.append((step.framework, size))
                else:
                    refused += step.framework in oracle.FIXED
            if step.op == "allocate" and inner:
                arrays[step.block] = inner[0]
            elif step.op == "peak":
                for one in inner:
                    books.remove(*one)
        assert refused <= 2 * elastic_play.WAITS
    assert dropped > 0
