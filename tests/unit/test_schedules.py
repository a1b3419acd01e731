"""300 seeded schedules of six simulated frameworks: no refusal that giving back idle memory could have spared.

The oracle, tests/support/oracle.py, knows what was asked for and freed, and nothing of memguard. It can fail: the
controls play the same schedules with what memguard does switched off or broken.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from schedules import LIMIT, RESERVE, guarded, played
from simulated_runner import SimulatedRunner
from support import schedules as _schedules
from support.oracle import FIXED, MIB, PAGE, Books, Entry, Refused, Terms, judge

from memguard._guard import lending, reclaim
from memguard._guard.guard import Guard

SEEDS, AT_ONCE = 300, 50
CONTROLS = range(10)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(AT_ONCE, SEEDS, AT_ONCE))]
)
def test_no_refusal_was_avoidable(first: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        terms, _log, verdicts, peak = played(seed)
        assert verdicts.faults == [], f"seed {seed}: {verdicts.faults[0].what}"
        assert peak <= terms.limit, f"seed {seed}: in between"
        kinds.update(served=verdicts.requests - verdicts.infeasible - verdicts.blocked)
        kinds.update(infeasible=verdicts.infeasible, blocked=verdicts.blocked, **verdicts.fragments)
    assert kinds["infeasible"] > AT_ONCE and kinds["blocked"] > AT_ONCE, "the schedules go to the limit"
    assert kinds["served"] > 5 * (kinds["infeasible"] + kinds["blocked"])


@pytest.mark.long
def test_without_lending_refusals_are_avoidable() -> None:
    """The caps stay what they are at the start: the minima, as if these were plain limits."""
    found = [played(seed, lends=False).verdicts for seed in CONTROLS]
    assert all(verdicts.avoidable for verdicts in found)
    assert not any(verdicts.above_limit or verdicts.minima for verdicts in found)


@pytest.mark.long
def test_without_giving_back_refusals_are_avoidable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused headroom is lent, but nobody gives back a cache."""
    monkeypatch.setattr(reclaim.Reclaimer, "_trim_partly", lambda *_: 0)
    assert sum(len(played(seed).verdicts.avoidable) for seed in CONTROLS) > len(CONTROLS)


@pytest.mark.long
def test_caps_that_may_all_reach_their_max_pass_the_limit() -> None:
    def overbook(guard: Guard) -> None:
        (part,) = guard.plan.devices
        caps = {name: share[1] for name, share in part.elastic.items()}
        guard.plan = replace(guard.plan, devices=(replace(part, caps={**part.caps, **caps}, elastic={}),))

    found = [played(seed, change=overbook).verdicts for seed in CONTROLS]
    assert any(verdicts.above_limit for verdicts in found) and any(verdicts.minima for verdicts in found)


@pytest.mark.long
def test_lending_that_forgets_the_minima_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = lending.plan_raise

    def forgetful(parts: dict[str, lending.CapState], room: int, who: str, wanted: int) -> lending.CapChange:
        return ask({name: part._replace(least=0) for name, part in parts.items()}, room, who, wanted)

    monkeypatch.setattr(lending, "plan_raise", forgetful)
    found = [played(seed).verdicts for seed in range(40)]
    assert sum(len(verdicts.minima) for verdicts in found) > 0
    assert any("within its min" in fault.what for verdicts in found for fault in verdicts.avoidable)


@pytest.mark.long
def test_where_others_use_the_card_too_no_refusal_was_avoidable() -> None:
    """Another process holds part of the room, so the driver refuses before the caps do."""
    blocked = 0
    for seed in range(40):
        agreed = _schedules.terms(seed, LIMIT, RESERVE)
        with guarded(agreed) as guard:
            runner = SimulatedRunner(guard)
            for name in _schedules.FRAMEWORKS:  # contexts and modules come first
                array = runner.allocate(name, 1)
                assert isinstance(array, int) and runner.free(name, array)
            card = runner.held_by_process() + int(agreed.room * random.Random(seed).uniform(0.5, 0.9))
            runner.host.occupy(runner.gpu, 1, runner.gpu.usable - card)
            log = _schedules.play(_schedules.schedule(seed, agreed), runner, agreed)
        verdicts = judge(log, agreed._replace(card=card))
        assert verdicts.faults == [], f"seed {seed}: {verdicts.faults[0].what}"
        blocked += sum(entry.refused is not None and bool(entry.refused.full) for entry in log)
    assert blocked > 40


def test_schedules_come_from_their_seed() -> None:
    ops: Counter[str] = Counter()
    for seed in range(50):
        terms = _schedules.terms(seed, LIMIT, RESERVE)
        steps = _schedules.schedule(seed, terms)
        assert terms == _schedules.terms(seed, LIMIT, RESERVE) and steps == _schedules.schedule(seed, terms)
        assert steps != _schedules.schedule(seed + 1, terms)
        assert sum(most for _, most in terms.shares.values()) == pytest.approx(2 * LIMIT, rel=0.01)
        assert sum(least for least, _ in terms.shares.values()) < terms.room
        assert all(0 < least <= most <= terms.room for least, most in terms.shares.values())
        ops.update(step.op for step in steps)
        ops.update(f"thread {step.thread}" for step in steps)
        ops.update(step.framework for step in steps)
        ops.update("small" if size <= MIB else "large" for step in steps for size in step.sizes)
    assert min(ops.values()) > 30, ops


def test_threads_that_race_for_the_same_bytes_stay_within_the_limit() -> None:
    terms = _schedules.terms(1, LIMIT, RESERVE)
    with guarded(terms) as guard:
        runner = SimulatedRunner(guard)
        served: Counter[str] = Counter()

        def work(number: int) -> None:
            rng, live = random.Random(number), list[tuple[str, int]]()
            for _ in range(150):
                name = rng.choice(_schedules.FRAMEWORKS)
                found = runner.allocate(name, int(rng.lognormvariate(0, 1) * 300 * MIB) + 1)
                served[type(found).__name__] += 1
                if isinstance(found, int):
                    live.append((name, found))
                while len(live) > rng.randint(0, 8):
                    runner.free(*live.pop(rng.randrange(len(live))))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert runner.host.peak(runner.gpu) <= terms.limit
        (part,) = guard.plan.devices
        assert sum(part.caps.values()) <= terms.room
        assert all(part.caps[name] >= terms.least(name) for name in part.caps)
        assert served["int"] > served["Refused"] > 0


# the oracle by itself

SHARES = dict.fromkeys(("torch", "cupy", "tensorflow"), (100 * MIB, 600 * MIB))
AGREED = Terms(1000 * MIB, 0, SHARES)


def served(name: str, size: int, block: int = 0, **held: int) -> Entry:
    return Entry(0, "allocate", name, block, size, None, 0, dict.fromkeys(SHARES, 0) | held)


def refused(name: str, size: int, **held: int) -> Entry:
    holds = dict.fromkeys(SHARES, 0) | held
    return Entry(0, "allocate", name, 0, size, Refused("out of memory"), 0, holds, holds)


def test_a_refusal_with_room_for_it_was_avoidable() -> None:
    verdicts = judge([served("torch", 300 * MIB), refused("cupy", 600 * MIB, torch=300 * MIB)], AGREED)
    assert len(verdicts.avoidable) == 1 and verdicts.requests == 2
    assert verdicts.avoidable[0].what.startswith("step 0: cupy was refused 629145600: live 0, allowed 629145600")


@pytest.mark.parametrize(
    ("before", "name", "size"),
    [
        ([], "cupy", 600 * MIB + 1),  # above its max
        ([("torch", 400 * MIB)], "cupy", 502 * MIB),  # live arrays, and TensorFlow's min, are nobody else's
        ([("torch", 400 * MIB - 1)], "cupy", 502 * MIB),  # as the driver rounds
        ([], "tensorflow", 100 * MIB + 1),  # its max is its min
    ],
)
def test_a_refusal_without_room_was_needed(before: list[tuple[str, int]], name: str, size: int) -> None:
    log = [served(*one) for one in before]
    verdicts = judge([*log, refused(name, size, torch=400 * MIB)], AGREED)
    assert (verdicts.infeasible, verdicts.blocked, verdicts.faults) == (1, 0, [])


def test_who_holds_more_than_is_live_in_pieces_is_named() -> None:
    log = [served("torch", 20 * MIB), refused("cupy", 600 * MIB, torch=500 * MIB)]
    verdicts = judge(log, AGREED)
    assert (verdicts.blocked, verdicts.fragments, verdicts.faults) == (1, {"torch": 1}, [])
    nothing_live = judge(log[1:], AGREED)
    assert len(nothing_live.avoidable) == 1, "without a live array nothing can keep it"


def test_within_its_min_nobody_else_is_in_the_way() -> None:
    verdicts = judge([served("torch", 20 * MIB), refused("cupy", 100 * MIB, torch=950 * MIB)], AGREED)
    assert "within its min" in verdicts.avoidable[0].what
    assert verdicts.minima, "and torch holds what is CuPy's"


def test_pools_that_never_shrink_are_blocked_by_their_own_pieces() -> None:
    log = [served("tensorflow", 20 * MIB), refused("tensorflow", 60 * MIB, tensorflow=90 * MIB)]
    assert judge(log, AGREED).fragments == {"tensorflow": 1}
    log = [served("tensorflow", 20 * MIB), refused("tensorflow", 60 * MIB, tensorflow=40 * MIB)]
    assert judge(log, AGREED).avoidable


def test_nobody_else_is_named_where_the_max_itself_is_too_small() -> None:
    """What others hold in pieces matters only while it keeps a cap below its max: TensorFlow's is always at its max."""
    torch, pieces = served("torch", 20 * MIB), {"torch": 500 * MIB}
    log = [torch, served("tensorflow", 20 * MIB), refused("tensorflow", 60 * MIB, tensorflow=90 * MIB, **pieces)]
    assert judge(log, AGREED).fragments == {"tensorflow": 1}
    log = [torch, served("cupy", 20 * MIB), refused("cupy", 400 * MIB, cupy=202 * MIB, torch=300 * MIB)]
    assert judge(log, AGREED).fragments == {"cupy": 1}
    log[-1] = refused("cupy", 400 * MIB, cupy=200 * MIB, **pieces)
    assert judge(log, AGREED).fragments == {"torch": 1, "cupy": 1}, "CuPy's max would be enough"


def test_what_a_pool_keeps_for_good_is_no_excuse_for_more() -> None:
    agreed = AGREED._replace(shares={**SHARES, "pycuda": (100 * MIB, 600 * MIB)}, kept={"pycuda": PAGE})
    bin_of_496 = 496 * MIB - 1

    def verdict(size: int, **held: int) -> tuple[int, int]:
        entry = refused("torch", size, **held)
        found = judge([entry._replace(held={**entry.held, "pycuda": 0})], agreed)
        return found.blocked, len(found.avoidable)

    assert verdict(600 * MIB, pycuda=PAGE) == (0, 1)
    own = refused("pycuda", bin_of_496, pycuda=0)
    assert judge([own], agreed).avoidable
    tight = agreed._replace(shares={**agreed.shares, "pycuda": (100 * MIB, 496 * MIB)})
    assert judge([own], tight).fragments == {"pycuda": 1}, "its first block brings the one that it keeps"
    assert judge([own], tight._replace(kept={})).avoidable


def test_what_must_never_be_is_seen_in_the_log() -> None:
    entry = served("torch", MIB)
    assert judge([entry._replace(process=1001 * MIB)], AGREED).above_limit
    assert judge([entry._replace(right=False)], AGREED).wrong
    assert judge([entry._replace(held={**entry.held, "tensorflow": 101 * MIB})], AGREED).minima
    assert not judge([entry._replace(process=1000 * MIB)], AGREED).faults


def test_the_books_round_as_the_allocators_do() -> None:
    def lives(name: str, *sizes: int) -> int:
        books = Books(Terms(0, 0, {name: (0, 0)}))
        for size in sizes:
            books.add(name, size)
        found = books.live(name)
        for size in sizes:
            books.remove(name, size)
        assert books.live(name) == 0
        return found

    assert lives("numba", MIB + 1) == lives("cupy", MIB + 1) == PAGE
    assert lives("numba", 1, 512, MIB) == PAGE
    assert lives("torch", 3 * MIB, 3 * MIB) == 3 * PAGE and lives("torch", 1, MIB + 1) == 2 * PAGE
    assert lives("pycuda", 256 * MIB) == 272 * MIB, "271 MiB were managed"
    assert {lives(name, 257) for name in FIXED} == {512}
