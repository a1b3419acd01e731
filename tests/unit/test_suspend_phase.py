"""The phases of a suspension: their table, its drawing, and that every interruption ends in RUNNING, OFF or LOST."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suspending import FakeWay, forget, way_of

import memguard
from memguard._base.units import GIB
from memguard._devices import suspension
from memguard._devices.phase import SETTLED, TRANSITIONS, IllegalTransition, Phase
from memguard._node.suspend import self_suspend
from memguard._runtime import runtime
from memguard.errors import CannotResume, CannotSuspend, Suspended

PAGE = Path(__file__).parents[2] / "docs" / "suspend.md"


def drawing() -> str:
    """The table as text: the block of docs/suspend.md."""
    lines, last = [], None
    for (before, after), cause in TRANSITIONS.items():
        lines.append(f"{'' if before is last else before.name:<10}──▶ {after.name:<10} {cause}")
        last = before
    return "\n".join(["```text", *lines, "```\n"])


def test_the_drawing_in_the_docs_is_the_table() -> None:
    assert drawing() in PAGE.read_text(encoding="utf-8"), f"docs/suspend.md needs this block:\n{drawing()}"


@contextlib.contextmanager
def started() -> Iterator[None]:
    suspension.now = None
    try:
        yield
    finally:
        suspension.now = None


@given(st.lists(st.sampled_from(Phase), max_size=30))
def test_no_illegal_transition_is_possible(wanted: list[Phase]) -> None:
    with started():
        for new in wanted:
            before = suspension.phase()
            if new is before or (before, new) in TRANSITIONS:
                suspension.enter(new, {"GPU-0": GIB} if new is Phase.LEAVING else None)
                assert suspension.phase() is new
                assert suspension.now is None or suspension.now.bytes == {"GPU-0": GIB}
            else:
                kept = suspension.now
                with pytest.raises(IllegalTransition, match=f"from {before.name} to {new.name}"):
                    suspension.enter(new)
                assert suspension.now is kept
            assert isinstance(runtime.this.state, runtime.Suspended) == (suspension.phase() is not Phase.RUNNING)


def test_every_phase_is_reached_and_only_the_lost_process_stays_where_it_is() -> None:
    assert {after for _, after in TRANSITIONS} == set(Phase)
    assert set(Phase) - {before for before, _ in TRANSITIONS} == {Phase.LOST}
    for moving in set(Phase) - SETTLED:
        assert {after for before, after in TRANSITIONS if before is moving} == SETTLED


# what a suspension does


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, Phase]]:
    """Each change of the phase."""
    changes: list[tuple[Phase, Phase]] = []
    enter = suspension.enter

    def noted(new: Phase, sizes: dict[str, int] | None = None) -> None:
        before = suspension.phase()
        enter(new, sizes)
        if before is not new:
            changes.append((before, new))

    monkeypatch.setattr(suspension, "enter", noted)
    return changes


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWay]:
    with way_of(monkeypatch, {"GPU-0": 3 * GIB}) as found:
        yield found


FAILURES: dict[str, Callable[[], Exception]] = {
    "refused": lambda: CannotSuspend([("driver", "no", "try again")]),
    "whole": lambda: CannotResume("there is no room"),
    "lost": lambda: CannotResume("the driver destroyed it", lost=True),
    "nobody knows": lambda: OSError("the helper is gone"),
    "a bug": ZeroDivisionError,
}


def interrupt(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.08)  # the main thread takes it, and tells the flow


@pytest.mark.parametrize("what", [*FAILURES, "Ctrl-C", "two Ctrl-C"])
@pytest.mark.parametrize("step", ["checks", "lock", "checkpoint", "room", "restore"])
def test_every_interruption_ends_on_the_gpus_off_them_or_lost(
    way: FakeWay, seen: list[tuple[Phase, Phase]], step: str, what: str
) -> None:
    def at(now: str) -> None:
        if now == step and what in FAILURES:
            raise FAILURES[what]()
        if now == step:
            interrupt(2 if what == "two Ctrl-C" else 1)

    way.at = at
    for call in (memguard.suspend, lambda: memguard.resume(timeout=5)):
        with contextlib.suppress(Exception, KeyboardInterrupt):
            call()
        assert suspension.phase() in SETTLED
        assert (suspension.phase() is Phase.RUNNING) == (self_suspend.current() is None)
    assert {*seen} <= TRANSITIONS.keys()
    assert all(first[1] is then[0] for first, then in itertools.pairwise(seen))
    if suspension.phase() is Phase.LOST:  # the end of the fixture would resume it
        forget()
    way.running = way.running or suspension.phase() is Phase.RUNNING  # a fake that refuses late does not roll back


def test_a_lost_process_says_so_and_the_driver_is_not_asked_again(way: FakeWay) -> None:
    def at(step: str) -> None:
        if step == "restore":
            raise CannotResume("the driver destroyed it", fix="end it", lost=True)

    memguard.suspend()
    way.at = at
    for _ in range(2):
        with pytest.raises(CannotResume, match="destroyed it\n    fix: end it") as error:
            memguard.resume()
        assert error.value.lost and way.steps.count("restore") == 1
    assert suspension.phase() is Phase.LOST and str(suspension.now).startswith("lost: ")
    with pytest.raises(Suspended, match=r"lost: .*\n    fix: end it and start it again"):
        memguard.suspend()
    forget()
    way.running = True


def test_a_suspension_of_which_nobody_knows_the_end_is_not_under_way_for_ever(way: FakeWay) -> None:
    def at(step: str) -> None:
        if step == "checkpoint":
            raise OSError("the helper is gone")

    way.at = at
    with pytest.raises(OSError, match="the helper is gone"):
        memguard.suspend()
    assert suspension.now is not None and not suspension.now.moving
