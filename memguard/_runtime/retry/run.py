"""Controls the runs of one call: decides after each failure whether to retry, and prepares the retry."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.text import visible
from memguard._oom import hooks
from memguard._runtime.retry import frames, ranks, room, sizes, words
from memguard._runtime.retry.recognised import recognised
from memguard._runtime.retry.types import Done, Failure

Ranks = Literal["refuse", "independent"]


@dataclass(frozen=True)
class Policy:
    """The arguments of `memguard.retry`. `times` None means one retry, or as many as the size can shrink."""

    times: int | None = None
    floor: int = 1
    multiple: int = 1
    ranks: Ranks = "refuse"

    def __post_init__(self) -> None:
        if callable(self.times):
            raise TypeError("memguard.retry is called before it decorates\n    fix: write @memguard.retry()")
        for name in ("times", "floor", "multiple"):
            value = getattr(self, name)
            if value is None and name == "times":
                continue
            if type(value) is not int:
                raise TypeError(f"{name} is a whole number, found {value!r}")
            if value < 1:
                raise ValueError(f"{name} is at least 1, found {value}")
        if self.ranks not in get_args(Ranks):
            raise ValueError(f"ranks is 'refuse' or 'independent', found {self.ranks!r}")


class Run:
    """One call, from its first run to its last. Never keeps an exception, a traceback or a frame.

    `size`: the size for the next run; None without a shrinking argument. `name`: the name of that argument.
    """

    def __init__(self, policy: Policy, size: int | None = None, name: str = "size") -> None:
        self.policy, self.size, self.name = policy, size, name
        self._runs: list[str] = []
        self._failure: Failure | None = None
        self._outer: int | None = None
        once = 1 if size is None else sizes.steps(size, policy.floor, policy.multiple)
        self.most = once if policy.times is None else policy.times if size is None else min(policy.times, once)

    def begin(self) -> None:
        """Called before each run: remember the id of the exception that is already being handled, if any."""
        outer = sys.exc_info()[1]
        self._outer = None if outer is None else id(outer)  # valid: the exception lives while it is handled

    def again(self, error: BaseException) -> bool:
        """Whether to retry. If so, clears the error's frames; if not, may add a note to the error."""
        try:
            return self._again(error)
        except Exception as failure:  # an error in memguard must not replace the user's error
            _log.debug("an error could not be examined for another run: %s", text_of(failure))
            return False

    def _again(self, error: BaseException) -> bool:
        failure = recognised(error, self._outer)
        if failure is None:
            if self._runs:
                self._note(error, words.history(self._runs, "It failed in another way."))
            return False
        why = self._forbidden()
        if why is not None:
            text = words.not_again(why)
            self._note(error, words.history(self._runs, text) if self._runs else text)
            return False
        if len(self._runs) >= self.most:
            self._note(error, self._over())
            return False
        self._failure = room.with_figures(failure)
        frames.clear(error, self._outer)
        return True

    def prepare(self) -> None:
        """Prepare a retry once the error is gone: collect garbage, make room, shrink the size, and log it."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        gc.collect()
        done = Done()
        try:
            done = room.make(failure)
        except Exception as problem:
            _log.debug("no room was made for another run: %s", text_of(problem))
        smaller = ""
        before = "" if self.size is None else f"{self.name}={self.size}: "
        if self.size is not None:
            self.size = sizes.smaller(self.size, self.policy.floor, self.policy.multiple)
            smaller = f"{self.name}={self.size}"
        text = words.line(failure, done, len(self._runs) + 1, self.most, smaller)
        self._runs.append(f"{before}{failure.words}\n    then {words.done(done, failure.who)}")
        _log.warning("%s", text)
        try:
            room.announce(failure, done, text)
        except Exception as problem:
            _log.debug("a retry was not announced: %s", text_of(problem))

    def _forbidden(self) -> str | None:
        if room.capturing():
            return words.CAPTURING
        why = ranks.several(ranks.signs()) if self.policy.ranks == "refuse" else None
        return None if why is None else words.several(why)

    def _over(self) -> str:
        """The note on the last out-of-memory error, after which there is no retry."""
        if self.size is None:
            return words.history(self._runs, "Each time a GPU ran out of memory.")
        if sizes.smaller(self.size, self.policy.floor, self.policy.multiple) is not None:
            return words.history(self._runs, f"The last one had {self.name}={self.size}.")
        least = sizes.lowest(self.policy.floor, self.policy.multiple)
        end = f"{self.name}={self.size} is as small as it may get (the floor is {least})"
        return words.history(self._runs, f"{end}.") if self._runs else words.not_again(end)

    def _note(self, error: BaseException, text: str) -> None:
        hooks.add_note(error, visible(text))
