"""What comes next on the way off the GPUs and back: each answer of the driver's, and any sequence of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.advice import Advice
from memguard._devices.checkpoint import State
from memguard._node.identity import Process
from memguard._node.suspend.course import messages
from memguard._node.suspend.course.steps import Course, Do, End, Goal
from memguard._node.suspend.driver.channel import Answer

OK = Answer(0)
RUNNING, LOCKED, OFF, FAILED, LEAVING, RETURNING = (Answer(0, state) for state in State)
DIED, HANGS = Answer(None, trouble="died"), Answer(None, trouble="timeout")
PROCESS = Process(7, 9)


def _text(advice: Advice | None) -> str:
    return "" if advice is None else str(advice)


def end(goal: Goal, *answers: Answer) -> tuple[list[str], End, str]:
    """The steps taken with these answers, the end, and what is said of it."""
    course, steps = Course(goal), []
    for answer in answers:
        assert isinstance(course.next, Do), f"ended early: {course}"
        steps.append(course.next.value)
        course = course.after(answer)
    assert isinstance(course.next, End), f"not at an end: {course}"
    return steps, course.next, _text(messages.advice(goal, course.next, course.why, PROCESS, course.state))


@pytest.mark.parametrize(
    ("answers", "steps", "ended", "says"),
    [
        ([RUNNING, OK, OK, OK, OFF], "state lock settle checkpoint state", End.SUSPENDED, ""),
        ([RUNNING, Answer(600), RUNNING], "state lock state", End.UNTOUCHED, "did not end within"),
        ([RUNNING, Answer(401), LOCKED], "state lock state", End.UNTOUCHED, "another program has locked it"),
        ([RUNNING, OK, OK, Answer(801), LOCKED, OK, RUNNING], "state lock settle checkpoint state unlock state",
         End.RUNNING, "managed memory"),
        ([RUNNING, OK, OK, Answer(2), LOCKED, OK, RUNNING], "state lock settle checkpoint state unlock state",
         End.RUNNING, "checkpoint returned error 2"),
        ([RUNNING, OK, OK, Answer(401), RUNNING], "state lock settle checkpoint state", End.RUNNING,
         "it was unlocked before the copy"),
        ([RUNNING, OK, OK, DIED, OFF], "state lock settle checkpoint state", End.SUSPENDED, ""),
        ([RUNNING, OK, OK, DIED, LOCKED, OK, RUNNING], "state lock settle checkpoint state unlock state",
         End.RUNNING, "was ended during `checkpoint`"),
        ([RUNNING, DIED, LOCKED, OK, RUNNING], "state lock state unlock state", End.RUNNING, "during `lock`"),
        ([RUNNING, HANGS, HANGS, HANGS], "state lock state state", End.UNKNOWN, "did not answer in time"),
        ([Answer(3)], "state", End.UNTOUCHED, "has not used CUDA"),
        ([Answer(304)], "state", End.UNTOUCHED, "may not control it"),
        ([HANGS], "state", End.UNTOUCHED, "did not answer in time"),
        ([LOCKED], "state", End.UNTOUCHED, "another program"),
        ([OFF], "state", End.UNTOUCHED, "another program"),
        ([LEAVING], "state", End.UNTOUCHED, "another program"),
        ([RETURNING], "state", End.UNTOUCHED, "another program"),
        ([RUNNING, OK, OK, DIED, LEAVING, LEAVING], "state lock settle checkpoint state state", End.UNKNOWN,
         "was ended during `checkpoint`"),
        ([FAILED], "state", End.LOST, "lost"),
        ([RUNNING, Answer(None, trouble="ended")], "state lock", End.ENDED, "process 7 has ended"),
        ([RUNNING, Answer(None, trouble="start", text="no disk", fix="buy one")], "state lock", End.UNTOUCHED,
         "no disk; nothing was changed\n    fix: buy one"),
    ],
)  # fmt: skip
def test_off(answers: list[Answer], steps: str, ended: End, says: str) -> None:
    taken, found, text = end(Goal.OFF, *answers)
    assert (" ".join(taken), found) == (steps, ended)
    assert says in text and bool(says) == bool(text)


@pytest.mark.parametrize(
    ("answers", "steps", "ended", "says"),
    [
        ([OFF, OK, OK, RUNNING], "state restore unlock state", End.RUNNING, ""),
        ([RUNNING], "state", End.RUNNING, ""),
        ([LOCKED, OK, RUNNING], "state unlock state", End.RUNNING, ""),
        ([OFF, DIED, LOCKED, OK, RUNNING], "state restore state unlock state", End.RUNNING, ""),
        ([OFF, DIED, OFF, OK, OK, RUNNING], "state restore state restore unlock state", End.RUNNING, ""),
        ([OFF, OK, DIED, LOCKED, OK, RUNNING], "state restore unlock state unlock state", End.RUNNING, ""),
        ([OFF, Answer(2), OFF], "state restore state", End.LOST, "too little room"),
        ([OFF, Answer(1), OFF], "state restore state", End.LOST, "IPC"),
        ([OFF, Answer(304), OFF], "state restore state", End.UNKNOWN, "was off its GPUs when"),
        ([OFF, Answer(401), RUNNING], "state restore state", End.RUNNING, ""),
        ([OFF, Answer(None, trouble="room", text="pid 8 has it"), OFF], "state restore state", End.SUSPENDED,
         "pid 8 has it"),
        ([OFF, Answer(None, trouble="room", text="none"), RUNNING], "state restore state", End.RUNNING, ""),
        ([OFF, Answer(None, trouble="room", text="none"), HANGS, HANGS], "state restore state state", End.UNKNOWN,
         "was off its GPUs when"),
        ([OFF, DIED, OFF, Answer(None, trouble="room", text="none"), OFF], "state restore state restore state",
         End.UNKNOWN, "during `restore`"),
        ([OFF, Answer(None, trouble="unheld"), OK, OK, RUNNING], "state restore restore unlock state", End.RUNNING, ""),
        ([LOCKED, Answer(999), LOCKED, Answer(999), LOCKED, Answer(999), LOCKED],
         "state unlock state unlock state unlock state", End.UNKNOWN, "it is locked"),
        ([HANGS], "state", End.UNTOUCHED, "did not answer"),
        ([OFF, DIED, DIED, DIED, DIED], "state restore state state state", End.UNKNOWN, "`memguard resume 7`"),
    ],
)  # fmt: skip
def test_on(answers: list[Answer], steps: str, ended: End, says: str) -> None:
    taken, found, text = end(Goal.ON, *answers)
    assert (" ".join(taken), found) == (steps, ended)
    assert says in text and bool(says) == bool(text)


def test_cancelled() -> None:
    begun = Course(Goal.OFF).after(RUNNING)
    assert begun.cancel().next is End.UNTOUCHED
    settled = begun.after(OK).after(OK)
    assert settled.next is Do.CHECKPOINT and settled.cancel().next is Do.UNLOCK
    assert settled.cancel().after(OK).after(RUNNING).next is End.RUNNING
    asked = settled.after(OK)
    assert asked.next is Do.ASK and asked.cancel() is asked, "first it must be known where it is"
    back = Course(Goal.ON).after(OFF)
    assert back.next is Do.RESTORE and back.cancel().after(OFF).next is End.SUSPENDED
    assert back.cancel().after(RUNNING).next is End.RUNNING, "somebody else has brought it back"
    restored = back.after(OK)
    assert restored.next is Do.UNLOCK and restored.cancel() is restored, "a restore that was begun is ended"


def test_who_waits_in_vain_reads_first_that_the_process_is_whole_and_last_who_holds_the_room() -> None:
    room, held = "GPU-a has 3 GiB free, and it needs 4 GiB", "wait longer\n    GPU-a is held by\n        13 GiB  x"
    _, _, text = end(Goal.ON, OFF, Answer(None, trouble="room", text=room, fix=held), OFF)
    assert text == f"process 7: it stays suspended and whole: {room}\n    fix: {held}"
    _, _, text = end(Goal.ON, OFF, Answer(None, trouble="room", text="NVML does not say what is free"), OFF)
    assert text.splitlines()[0] == "process 7: it stays suspended and whole: NVML does not say what is free"
    assert "`nvidia-smi`" in text and text.endswith("then `memguard resume 7`")
    _, _, text = end(Goal.ON, OFF, Answer(None, trouble="cancelled"), OFF)
    assert text.splitlines()[1] == "    fix: `memguard resume 7` brings it back"


def test_where_nobody_knows_how_it_is_who_holds_the_room_is_left_out() -> None:
    room = Answer(None, None, "room", "GPU-a has 3 GiB free", "wait longer\n    GPU-a is held by\n        13 GiB  x")
    _, ended, text = end(Goal.ON, OFF, DIED, OFF, room, OFF)
    assert ended is End.UNKNOWN and len(text.splitlines()) == 2 and text.endswith("fix: `memguard resume 7`")


def test_a_stopped_process_is_said_to_be() -> None:
    why = Course(Goal.OFF).after(HANGS).why
    text = _text(messages.advice(Goal.OFF, End.UNTOUCHED, why, PROCESS, stopped=True))
    assert "it is stopped" in text and "`kill -CONT 7`" in text


answers = st.one_of(
    st.builds(Answer, st.sampled_from((0, 1, 2, 3, 304, 401, 600, 801, 999)), st.none() | st.sampled_from(State)),
    st.builds(
        lambda trouble: Answer(None, trouble=trouble),
        st.sampled_from(("timeout", "died", "start", "ended", "room", "unheld", "interrupted")),
    ),
)


@given(goal=st.sampled_from(Goal), given=st.lists(answers, min_size=40, max_size=40), cancel=st.integers(0, 40))
def test_whatever_is_answered_it_ends_and_says_so(goal: Goal, given: list[Answer], cancel: int) -> None:
    """Within 40 steps. It never checkpoints without a lock of its own, nor restores what is not known to be off."""
    course = Course(goal)
    known: State | None = None
    for number, answer in enumerate(given):
        if number >= cancel:
            course = course.cancel()
        if isinstance(course.next, End):
            break
        if course.next is Do.CHECKPOINT:
            assert course.locked and goal is Goal.OFF
        if course.next is Do.RESTORE:
            assert goal is Goal.ON and known is State.CHECKPOINTED
        if course.next is Do.ASK and answer.code == 0 and answer.state is not None:
            known = answer.state
        course = course.after(answer)
    assert isinstance(course.next, End)
    text = _text(messages.advice(goal, course.next, course.why, PROCESS, course.state))
    assert bool(text) == (course.next is not (End.SUSPENDED if goal is Goal.OFF else End.RUNNING))
    assert not text or course.next is End.ENDED or "    fix: " in text
