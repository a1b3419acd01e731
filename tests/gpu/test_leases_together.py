"""Four processes with leases fill one GPU together while a fifth waits; without leases one of five dies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from support.leases_job import JOBS
from support.suspend_children import Broke, Card, Child, apart, end

pytestmark = pytest.mark.whole_card
GIB = 1 << 30


@contextlib.contextmanager
def most_of(pids: dict[int, int]) -> Iterator[None]:
    """Record each process's peak memory on the GPU by NVML, ten times a second."""
    card, over = Card(), threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for pid in list(pids):
                pids[pid] = max(pids[pid], card.of(pid) or 0)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_four_with_leases_fill_the_card_while_a_fifth_waits_and_without_leases_one_of_five_dies() -> None:
    lease = int(Card().total() * 0.243) // GIB * GIB  # four hold all but about 2 %
    with contextlib.ExitStack() as stack:
        stack.enter_context(apart())
        environ = {"MEMGUARD_LEASES": ""}
        jobs = {name: stack.enter_context(Child("leases_job", name, env=environ)) for name in (*JOBS,)}
        fifth = stack.enter_context(Child("leases_job", "torch", env=environ))
        free = [stack.enter_context(Child("leases_job", "torch", env=environ)) for _ in range(5)]
        for one in (*jobs.values(), fifth, *free):
            one.send("load")
        for one in (*jobs.values(), fifth, *free):
            one.answer(180, "load")
        most = dict.fromkeys([one.pid for one in (*jobs.values(), fifth)], 0)
        with most_of(most):
            for one in jobs.values():
                one.must("claim", 60, limit=lease, leased=True)
                one.send("fill")
            filled = [one.answer(180, "fill") for one in jobs.values()]
            assert all(one.get("bytes", 0) > 0.85 * lease for one in filled), filled
            fifth.send("claim", limit=lease, leased=True)
            with pytest.raises(Broke, match="did not come in"):
                fifth.answer(4)
            assert "waiting for" in fifth.stderr() and most[fifth.pid] == 0
            assert all(one.must("check")["right"] for one in jobs.values()), "while all four are full"
            told = time.monotonic()
            end(jobs.pop("torch"))
            gone = time.monotonic()
            has = fifth.answer(60)
            assert "error" not in has and told < has["at"] <= gone + 2 and has["waited"] > 4
            assert fifth.must("fill", 120)["bytes"] > 0.85 * lease
            assert all(one.must("check")["right"] for one in (*jobs.values(), fifth))
        assert all(0 < size <= lease for size in most.values()), "its context included"
        for one in (*jobs.values(), fifth):
            end(one)
        for one in free:
            one.must("claim", limit=lease, leased=False)
            one.send("fill")
        assert any("error" in one.answer(120) for one in free)
