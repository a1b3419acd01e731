"""A process goes off its GPUs and comes back, over the simulated driver: whatever fails, what is said of it is true."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from memguard._base.advice import Advice
from memguard._base.units import GIB, MIB
from memguard._devices.checkpoint import State
from memguard._devices.simulated_checkpoint import Fault, SimulatedCheckpoint, Target
from memguard._node.identity import Process, anonymous_bytes, lives, process_of, start_of, this_process
from memguard._node.suspend.course import bytes_left, flow, settling
from memguard._node.suspend.course.flow import Outcome
from memguard._node.suspend.course.steps import End
from memguard._node.suspend.driver.channel import Answer, Card, CheckpointChannel
from memguard._node.suspend.driver.simulated import Direct

A, B = "GPU-a", "GPU-b"
ME = Process(7, 9)
CALLS = ("state", "lock", "checkpoint", "restore", "unlock")


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the test run if it came out."""


def simulated(**changes: Any) -> tuple[SimulatedCheckpoint, Direct, Target]:
    driver = SimulatedCheckpoint({A: 16 * GIB, B: 8 * GIB})
    target = driver.targets[7] = Target({A: 4 * GIB, B: GIB}, **changes)
    return driver, Direct(driver), target


@contextmanager
def held(
    process: Process, needs: flow.Needs, client: CheckpointChannel, cancel: threading.Event | None
) -> Iterator[Advice | None]:
    """Room that a placeholder keeps."""
    answer = client.hold({uuid: size + MIB for uuid, size in (needs or {}).items()})
    try:
        yield Advice(answer.text, answer.fix) if answer.code is None else None
    finally:
        client.release()


def test_off_and_back() -> None:
    driver, client, target = simulated()
    steps: list[str] = []
    off = flow.take_off(ME, client=client, settle=0, on_step=steps.append)
    assert (off.end, off.text, off.bytes) == (End.SUSPENDED, "", {A: 4 * GIB, B: GIB})
    assert driver.used(A) == driver.used(B) == 0
    assert steps == ["state", "lock", "settle", "checkpoint", "state"] and set(off.parts) == set(steps)
    steps.clear()
    back = flow.bring_back(ME, client=client, needs=off.bytes, room=held, on_step=steps.append)
    assert (back.end, back.text) == (End.RUNNING, "")
    assert steps == ["state", "room", "restore", "unlock", "state"] and set(back.parts) == set(steps)
    assert driver.used(A) == 4 * GIB and target.state is State.RUNNING and driver.held[A] == 0


def test_every_thread_gets_its_turn_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`settling` decides; here one thread gets no processor for a while."""
    _, client, _ = simulated()
    looks = iter([False, False, False, True])
    monkeypatch.setattr(settling, "threads", lambda pid: {1: settling.Thread(next(looks), 0)})
    assert flow.take_off(ME, client=client, settle=0).end is End.SUSPENDED
    assert next(looks, None) is None


def test_without_room_it_stays_suspended_and_is_not_restored() -> None:
    driver, client, target = simulated()
    off = flow.take_off(ME, client=client, settle=0)
    driver.others[A] = 12 * GIB + 1
    back = flow.bring_back(ME, client=client, needs=off.bytes)
    assert back.end is End.SUSPENDED and "GPU-a has" in back.text and "stays suspended and whole" in back.text
    assert "restore" not in target.calls and target.whole
    driver.others[A] = 0
    assert flow.bring_back(ME, client=client, needs=off.bytes).end is End.RUNNING


@pytest.mark.parametrize(
    ("changes", "end", "says"),
    [
        ({"managed": True}, End.RUNNING, "managed memory"),
        ({"cuda": False}, End.UNTOUCHED, "has not used CUDA"),
        ({"state": State.CHECKPOINTED}, End.UNTOUCHED, "another program"),
    ],
)
def test_what_cannot_go_is_left_as_it_was(changes: dict[str, Any], end: End, says: str) -> None:
    _, client, target = simulated(**changes)
    before = target.state
    off = flow.take_off(ME, client=client, settle=0)
    assert off.end is end and says in off.text and target.state is before and target.whole


def test_one_that_has_ended_is_never_called() -> None:
    driver, _, target = simulated()
    client = Direct(driver, lives=lambda process: process != ME)
    assert flow.take_off(ME, client=client).end is End.ENDED
    assert flow.bring_back(ME, client=client).end is End.ENDED
    assert target.calls == []


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("raises", [False, True])
def test_cancelled_at_each_step_it_runs_on(step: int, raises: bool) -> None:
    """And what `on_step` raises is given to the caller, when the process is safe."""
    _, client, target = simulated()
    cancel, count = threading.Event(), iter(range(100))

    def on_step(name: str) -> None:
        if next(count) == step:
            if raises:
                raise Interrupted
            cancel.set()

    off = flow.take_off(ME, client=client, settle=0, on_step=on_step, cancel=cancel, room=held)
    assert target.state is State.RUNNING and off.end in (End.RUNNING, End.UNTOUCHED)
    assert "interrupted" in off.text and isinstance(off.interruption, Interrupted) is raises
    assert (off.end is End.UNTOUCHED) == (target.calls == [])


class Newer(Direct):
    """A driver that answers while an operation is in progress: with these states, before those of the simulated one."""

    def __init__(self, driver: SimulatedCheckpoint, after: str, *states: State) -> None:
        super().__init__(driver)
        self.after, self.states = after, [*states]

    def state(self, process: Process, limit: float = 10.0) -> Answer:
        if self.states and (not self.after or self.after in self.driver.targets[7].calls):
            return Answer(0, self.states.pop(0))
        return super().state(process, limit)


def test_an_operation_that_the_driver_says_is_in_progress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_AGAIN", 0.0)
    driver, _, target = simulated()
    going = [State.CHECKPOINTING] * 5
    off = flow.take_off(ME, client=Newer(driver, "checkpoint", *going), settle=0)
    assert (off.end, off.text) == (End.SUSPENDED, "")
    target.state = State.RUNNING  # another process has begun to bring it back
    back = flow.bring_back(ME, client=Newer(driver, "", *[State.RESTORING] * 5), needs=off.bytes)
    assert (back.end, back.text) == (End.RUNNING, "") and "restore" not in target.calls


def test_one_that_another_takes_off_just_now_is_left_to_it() -> None:
    driver, _, target = simulated()
    found = flow.take_off(ME, client=Newer(driver, "", State.CHECKPOINTING), settle=0)
    assert found.end is End.UNTOUCHED and "another program" in found.text and target.calls == []


def test_an_operation_that_does_not_end_counts_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_AGAIN", 0.0)
    driver, _, _ = simulated()
    client = Newer(driver, "checkpoint", *[State.CHECKPOINTING] * 1_000_000)
    found = flow.take_off(ME, client=client, settle=0, limits=flow.Limits(state=0.01, copy=0.01, unknown=0.01))
    assert found.end is End.UNKNOWN and "did not answer in time" in found.text


def test_cancelled_twice_it_stays_suspended() -> None:
    _, client, target = simulated()
    cancel, give_up = threading.Event(), threading.Event()

    @contextmanager
    def waits(
        process: Process, needs: flow.Needs, client: CheckpointChannel, cancel: threading.Event | None
    ) -> Iterator[Advice | None]:
        assert cancel is not None and not cancel.is_set() and needs == {A: 4 * GIB, B: GIB}
        give_up.set()
        assert cancel.wait(5)
        yield Advice("interrupted")

    def on_step(name: str) -> None:
        if name == "checkpoint":
            cancel.set()

    off = flow.take_off(ME, client=client, settle=0, on_step=on_step, cancel=cancel, room=waits, give_up=give_up)
    assert off.end is End.SUSPENDED and "`memguard resume 7`" in off.text
    assert target.state is State.CHECKPOINTED and off.bytes == {A: 4 * GIB, B: GIB}


def test_a_restore_that_was_begun_is_ended() -> None:
    _, client, target = simulated()
    off = flow.take_off(ME, client=client, settle=0)
    cancel = threading.Event()

    def on_step(name: str) -> None:
        if name == "restore":
            cancel.set()

    back = flow.bring_back(ME, client=client, needs=off.bytes, on_step=on_step, cancel=cancel)
    assert back.end is End.RUNNING and target.state is State.RUNNING


@pytest.mark.parametrize("needs", [None, {}])
def test_without_a_record_each_gpu_must_have_what_it_has_in_host_memory(needs: flow.Needs) -> None:
    driver, client, target = simulated()
    me = this_process()
    driver.targets = {me.pid: target}
    target.state = State.CHECKPOINTED
    driver.others[B] = 8 * GIB - MIB
    back = flow.bring_back(me, client=client, needs=needs)
    assert back.end is End.SUSPENDED and "GPU-b has 1.0 MiB free" in back.text
    driver.others[B] = 0
    assert flow.bring_back(me, client=client, needs=needs).end is End.RUNNING
    other = flow.bring_back(Process(1 << 22, 1), client=client, needs=needs)
    assert other.end is End.UNTOUCHED, "nobody has that PID"


def test_brought_back_by_another_while_it_waits_for_room() -> None:
    """The room would never come: the process itself has it."""
    driver, client, target = simulated()
    off = flow.take_off(ME, client=client, settle=0)

    @contextmanager
    def never(
        process: Process, needs: flow.Needs, client: CheckpointChannel, cancel: threading.Event | None
    ) -> Iterator[Advice | None]:
        assert driver.restore(7) == driver.unlock(7) == 0
        assert cancel is not None and cancel.wait(10)
        yield Advice("there is no room")

    back = flow.bring_back(ME, client=client, needs=off.bytes, room=never)
    assert (back.end, back.text) == (End.RUNNING, "") and target.calls.count("restore") == 1


def test_a_placeholder_that_has_gone_with_its_helper_is_made_again() -> None:
    driver, client, target = simulated()
    off = flow.take_off(ME, client=client, settle=0)
    rooms = []

    @contextmanager
    def lost(*given: Any) -> Iterator[Advice | None]:
        with held(*given) as lacking:
            rooms.append(lacking)
            if len(rooms) == 1:
                driver.held = dict.fromkeys(driver.cards, 0)  # the helper was killed here
            yield lacking

    assert flow.bring_back(ME, client=client, needs=off.bytes, room=lost).end is End.RUNNING
    assert rooms == [None, None] and target.calls.count("restore") == 1


class Interruptible(Direct):
    """Raises after the call of that number is done, counted down from when it was set."""

    interrupt: int | None = None
    other: tuple[int, str] | None = None
    """Before the call of that number, another program makes one of its own."""
    acted = False

    def state(self, process: Process, limit: float = 10.0) -> Answer:
        self.another()
        return self.count(super().state(process, limit))

    def _call(self, call: Callable[[int], int], process: Process) -> Answer:
        self.another()
        return self.count(super()._call(call, process))

    def another(self) -> None:
        if self.other is not None:
            number, call = self.other
            self.other = (number - 1, call) if number else None
            target = self.driver.targets[7]
            if not number and (call != "restore" or all(self.driver.free(u) >= n for u, n in target.bytes.items())):
                waiting, self.driver.faults = self.driver.faults, {}
                self.acted = {"lock": lambda pid: self.driver.lock(pid, 1)}.get(call, getattr(self.driver, call))(
                    7
                ) == 0
                self.driver.faults = waiting

    def count(self, answer: Answer) -> Answer:
        if self.interrupt is not None:
            self.interrupt = self.interrupt - 1 if self.interrupt else None
            if self.interrupt is None:
                raise Interrupted
        return answer


def test_interrupted_within_the_restore_it_comes_back() -> None:
    driver, _, target = simulated()
    client = Interruptible(driver)
    off = flow.take_off(ME, client=client, settle=0)
    client.interrupt = 1
    back = flow.bring_back(ME, client=client, needs=off.bytes, room=held)
    assert back.end is End.RUNNING and target.state is State.RUNNING and isinstance(back.interruption, Interrupted)


faults = st.one_of(
    st.builds(Fault, st.just("code"), st.sampled_from((1, 2, 3, 46, 304, 401, 600, 801, 999))),
    st.builds(Fault, st.sampled_from(("hang", "die")), st.just(0), st.booleans()),
)


seldom = st.sampled_from((False,) * 5 + (True,))
moments = st.sampled_from((None,) * 12 + tuple(range(8)))


class Suspended(RuleBasedStateMachine):
    """Off and back, in any order, with calls that fail, hang or end the helper, and strangers on the card."""

    @initialize(managed=seldom, importer=seldom)
    def begin(self, managed: bool, importer: bool) -> None:
        self.driver, _, self.target = simulated(managed=managed, importer=importer)
        self.client = Interruptible(self.driver)
        self.needs = dict(self.target.bytes)
        self.breaks = importer
        """Whether a restore may destroy the process for another reason than a lack of room."""

    @rule(call=st.sampled_from(CALLS), fault=faults)
    def goes_wrong(self, call: str, fault: Fault) -> None:
        self.driver.fail(call, fault)
        self.breaks = self.breaks or (call == "restore" and fault.code in (1, 2))

    @rule(uuid=st.sampled_from((A, B)), spare=st.sampled_from((-GIB, -1, 0, MIB, 4 * MIB - 1, 4 * MIB, 4 * GIB)))
    def stranger(self, uuid: str, spare: int) -> None:
        """Another process leaves that much more free than this one needs."""
        self.driver.others[uuid] = 0
        self.driver.others[uuid] = max(self.driver.free(uuid) - self.needs[uuid] - spare, 0)

    @rule(number=st.integers(0, 8))
    def interrupted_within(self, number: int) -> None:
        """A Ctrl-C comes into the wait for the answer of one of the next calls, which is done all the same."""
        self.client.interrupt = number

    @rule(number=st.integers(0, 6), call=st.sampled_from(CALLS[1:]))
    def another_program(self, number: int, call: str) -> None:
        if not self.target.importer:
            self.client.other = number, call

    @rule(at=moments, raises=st.booleans(), twice=st.booleans())
    def take_off(self, at: int | None, raises: bool, twice: bool) -> None:
        before, (cancel, on_step), give_up = self.target.state, self.cancelling(at, raises), threading.Event()
        if twice:
            give_up.set()
        self.judge(
            flow.take_off(ME, client=self.client, settle=0, on_step=on_step, cancel=cancel, room=held, give_up=give_up),
            before,
        )

    @rule(at=moments, raises=st.booleans(), room=st.sampled_from((held, flow.free_now)))
    def bring_back(self, at: int | None, raises: bool, room: flow.Room) -> None:
        before, (cancel, on_step) = self.target.state, self.cancelling(at, raises)
        back = flow.bring_back(ME, client=self.client, needs=self.needs, room=room, on_step=on_step, cancel=cancel)
        self.judge(back, before)

    @rule()
    def resumed(self) -> None:
        """What `memguard resume PID` does once nothing fails and there is room: always back."""
        self.driver.faults.clear()
        self.client.interrupt = self.client.other = None
        others, self.driver.others = self.driver.others, dict.fromkeys(self.driver.cards, 0)
        before, breaks = self.target.state, self.target.importer
        back = flow.bring_back(ME, client=self.client, needs=self.needs, room=held)
        assert back.end is End.RUNNING or (breaks and before is State.CHECKPOINTED and back.end is End.LOST)
        self.driver.others = {uuid: min(size, self.driver.free(uuid)) for uuid, size in others.items()}
        self.judge(back, before)

    @staticmethod
    def cancelling(at: int | None, raises: bool) -> tuple[threading.Event, flow.OnStep]:
        event, count = threading.Event(), iter(range(1000))

        def on_step(name: str) -> None:
            if next(count) == at:
                if raises:
                    raise Interrupted
                event.set()

        return event, on_step

    def judge(self, outcome: Outcome, before: State) -> None:
        target, end = self.target, outcome.end
        if end is End.SUSPENDED:
            assert target.state is State.CHECKPOINTED and target.whole
        elif end is End.RUNNING:
            assert target.state is State.RUNNING and target.whole
        elif end is End.UNTOUCHED:
            assert target.whole and (target.state is before or self.client.acted)
        elif end is End.LOST:
            assert not target.whole
        else:
            assert end is End.UNKNOWN
        self.client.acted = False
        assert not any(self.driver.held.values()), "a placeholder is left"
        assert target.whole or self.breaks, "a restore was begun without room"
        if not target.whole:
            self.begin(False, False)


TestSuspended = Suspended.TestCase
TestSuspended.settings = settings(max_examples=150, stateful_step_count=30)


# how many bytes left


def card(used: int | None, **processes: int | None) -> Card:
    return Card(16 * GIB, 0, used, {int(pid[1:]): size for pid, size in processes.items()})


def test_bytes_are_what_used_fell_by() -> None:
    """A process has a little more than NVML lists for it; what others gave back meanwhile is not its own."""
    before = {A: card(5 * GIB, p7=4 * GIB, p8=GIB - MIB), B: card(GIB, p8=GIB)}
    assert bytes_left.left(7, before, {A: card(GIB - 2 * MIB, p8=GIB - MIB), B: card(GIB, p8=GIB)}) == {
        A: 4 * GIB + 2 * MIB
    }
    assert bytes_left.left(7, before, {A: card(MIB), B: card(0)}) == {A: 4 * GIB}
    assert bytes_left.left(7, before, {A: card(3 * GIB, p8=GIB - MIB), B: card(GIB)}) == {A: 4 * GIB}, "never less"
    assert bytes_left.left(7, before, None) == {A: 4 * GIB}
    assert bytes_left.left(7, None, before) is None


def test_bytes_where_nvml_does_not_list_the_process() -> None:
    before = {A: card(5 * GIB, p7=None), B: card(GIB)}
    assert bytes_left.left(7, before, {A: card(GIB), B: card(GIB)}) == {A: 4 * GIB}
    assert bytes_left.left(7, before, None) is None
    unseen = {A: card(5 * GIB), B: card(GIB)}
    assert bytes_left.left(7, unseen, {A: card(GIB), B: card(GIB - MIB)}) == {A: 4 * GIB}


# which process


def test_a_process_is_known_by_its_start() -> None:
    me = this_process()
    assert me == process_of(me.pid) and lives(me) and not lives(Process(me.pid, me.start + 1))
    assert start_of(1 << 22) is None and (anonymous_bytes(me) or 0) > MIB
