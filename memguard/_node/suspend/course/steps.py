"""What to do next on the way off the GPUs or back, and how it ended: pure.

A `Course` says the next step. The caller takes it and says what came of it (`after`), until `next` is an `End`. An
answer that did not come (the helper hung or died) is never taken for a failure: the operation goes on in the target, so
the state is asked. The state that the driver says is believed, whatever the calls returned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from memguard._devices import checkpoint as driver
from memguard._devices.checkpoint import State
from memguard._node.suspend.driver.channel import Answer


class Goal(Enum):
    OFF = "off"
    ON = "on"


class Do(Enum):
    """A step. RESTORE begins with the wait for room: there must be nothing between the two."""

    ASK = "state"
    LOCK = "lock"
    SETTLE = "settle"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


class End(Enum):
    """How it ended. What each says is true of the process, as far as the driver told."""

    SUSPENDED = "suspended"
    """It is off its GPUs, and whole."""
    RUNNING = "running"
    """It runs. For OFF: it was locked, and that was taken back."""
    UNTOUCHED = "untouched"
    """Nothing was done to it."""
    LOST = "lost"
    """The driver has destroyed what it had on its GPUs."""
    UNKNOWN = "unknown"
    """The driver did not say, or did not do it. `memguard resume PID` tries again."""
    ENDED = "ended"
    """The process has ended."""


class Why(NamedTuple):
    """The first thing that went wrong: the step, what it answered."""

    step: Do
    code: int | None
    trouble: str
    text: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Course:
    """Where a process is on its way. `long`: the state may take as long as an operation to answer."""

    goal: Goal
    next: Do | End = Do.ASK
    touched: bool = False
    """A lock of ours was begun, or the process was found locked or off its GPUs on the way back."""
    locked: bool = False
    """It was locked by us, or nobody knows by whom."""
    back: bool = False
    """What was done is being taken back."""
    given_up: bool = False
    """It is left suspended: there is no room, or nobody wants it back any more."""
    doubtful: bool = False
    """A restore gave no answer. It may have failed, which destroys the process, and it would look suspended still."""
    long: bool = False
    why: Why | None = None
    state: State | None = None
    """The last state that the driver said."""
    silent: int = 0
    """How often the state was asked in vain, one after the other."""
    unlocks: int = 0
    restores: int = 0

    def after(self, answer: Answer) -> Course:
        """The course after `next` was done with that answer."""
        assert isinstance(self.next, Do), "it has ended"
        if answer.trouble == "ended":
            return self._because(answer, End.ENDED)
        return _AFTER[self.next](self, answer)

    def cancel(self) -> Course:
        """The course if nobody wants it any more: no change where it is not `cancellable`.

        A lock is taken back. A way back that waits for room leaves the process suspended.
        """
        if not self.cancellable:
            return self
        cancelled = Answer(None, trouble="cancelled")
        if self.goal is Goal.ON:
            return self._give_up(cancelled)
        if self.next in (Do.SETTLE, Do.CHECKPOINT):
            return replace(self._because(cancelled, Do.UNLOCK), back=True)
        return self._because(cancelled, End.UNTOUCHED)

    @property
    def cancellable(self) -> bool:
        if self.goal is Goal.ON:
            return self.next is Do.RESTORE
        return self.next in (Do.LOCK, Do.SETTLE, Do.CHECKPOINT) or (self.next is Do.ASK and not self.touched)

    def _because(self, answer: Answer, then: Do | End) -> Course:
        """Go on with `then`, and remember what went wrong, if it is the first."""
        assert isinstance(self.next, Do)
        why = self.why or Why(self.next, answer.code, answer.trouble, answer.text, answer.fix)
        return replace(self, next=then, why=why)

    def _give_up(self, answer: Answer) -> Course:
        """No restore is begun. The state is asked once more: somebody else may have brought it back meanwhile."""
        return replace(self._because(answer, Do.ASK), given_up=True)

    def _asked(self, answer: Answer) -> Course:
        if answer.state in driver.IN_PROGRESS and self.goal is Goal.OFF and not self.touched:
            return self._because(answer, End.UNTOUCHED)  # another's work
        if answer.code == driver.SUCCESS and answer.state is not None and answer.state not in driver.IN_PROGRESS:
            known = replace(self, silent=0, long=False, state=answer.state)
            return known._known_off(answer.state) if self.goal is Goal.OFF else known._known_on(answer.state)
        if not self.touched:
            # A state that cannot be asked at the beginning: nothing is done.
            retry = answer.trouble in ("died", "interrupted") and self.silent < _MOST
            return replace(self, silent=self.silent + 1) if retry else self._because(answer, End.UNTOUCHED)
        silent = self.silent + 1
        if silent >= (_MOST if answer.trouble in ("died", "interrupted") else 2):
            lost = self.why is not None and self._destroyed()
            return self._because(answer, End.LOST if lost else End.UNKNOWN)
        return replace(self._because(answer, Do.ASK), silent=silent)

    def _known_off(self, state: State) -> Course:
        if state is State.FAILED:
            return replace(self, next=End.LOST)
        if not self.touched:
            if state is State.RUNNING:
                return replace(self, next=Do.LOCK)
            return self._because(Answer(driver.SUCCESS, state), End.UNTOUCHED)  # another's work
        if state is State.CHECKPOINTED:
            return replace(self, next=End.SUSPENDED)
        if state is State.RUNNING:
            return replace(self, next=End.RUNNING if self.locked else End.UNTOUCHED)
        if self.why is not None and self.why.step is Do.LOCK and self.why.code == driver.ILLEGAL_STATE:
            return replace(self, next=End.UNTOUCHED)  # somebody else has locked it since it was asked
        return self._unlock()

    def _known_on(self, state: State) -> Course:
        if state is State.FAILED:
            return replace(self, next=End.LOST)
        if state is State.RUNNING:
            return replace(self, next=End.RUNNING)
        known = replace(self, touched=True)
        if state is State.LOCKED:
            return known._unlock()
        if self._destroyed():
            return replace(known, next=End.LOST)
        if self.given_up:
            return replace(known, next=End.UNKNOWN if self.doubtful else End.SUSPENDED)
        code = self.why.code if self.why is not None and self.why.step is Do.RESTORE else None
        if self.restores >= _MOST or code not in (None, driver.ILLEGAL_STATE):
            return replace(known, next=End.UNKNOWN)
        return replace(known, next=Do.RESTORE)

    def _destroyed(self) -> bool:
        return self.why is not None and self.why.step is Do.RESTORE and self.why.code in _DESTROY

    def _unlock(self) -> Course:
        if self.unlocks >= _MOST:
            return replace(self, next=End.UNKNOWN)
        return replace(self, next=Do.UNLOCK, locked=True, back=self.goal is Goal.OFF, unlocks=self.unlocks + 1)

    def _locked(self, answer: Answer) -> Course:
        if answer.trouble == "start":
            return self._because(answer, End.UNTOUCHED)
        known = replace(self, touched=True, long=answer.code is None)
        if answer.code != driver.SUCCESS:
            return known._because(answer, Do.ASK)
        return replace(known, next=Do.SETTLE, locked=True)

    def _settled(self, answer: Answer) -> Course:
        return replace(self, next=Do.CHECKPOINT)

    def _checkpointed(self, answer: Answer) -> Course:
        known = replace(self, long=answer.code is None)
        return replace(known, next=Do.ASK) if answer.code == driver.SUCCESS else known._because(answer, Do.ASK)

    def _restored(self, answer: Answer) -> Course:
        if answer.trouble in ("room", "cancelled"):
            return self._give_up(answer)
        if answer.trouble == "unheld":
            return replace(self, restores=self.restores + 1) if self.restores < _MOST else self._give_up(answer)
        doubtful = self.doubtful or (answer.code is None and answer.trouble != "start")
        known = replace(self, restores=self.restores + 1, long=answer.code is None, doubtful=doubtful)
        if answer.code == driver.SUCCESS:
            return replace(known, next=Do.UNLOCK, unlocks=self.unlocks + 1)
        if answer.code is not None:  # what it said counts more than an answer that did not come before
            known = replace(known, why=None)
        return known._because(answer, Do.ASK)

    def _unlocked(self, answer: Answer) -> Course:
        known = replace(self, long=answer.code is None)
        return replace(known, next=Do.ASK) if answer.code == driver.SUCCESS else known._because(answer, Do.ASK)


_MOST = 3
"""How often a step is tried at most."""
_DESTROY = (driver.INVALID_VALUE, driver.OUT_OF_MEMORY)
"""What a restore returned that destroyed the process."""
_AFTER = {
    Do.ASK: Course._asked,
    Do.LOCK: Course._locked,
    Do.SETTLE: Course._settled,
    Do.CHECKPOINT: Course._checkpointed,
    Do.RESTORE: Course._restored,
    Do.UNLOCK: Course._unlocked,
}
