"""The runs of one call: decides after each failure whether there is another, and gets ready for it."""

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
    """What the user asked for, as `memguard.retry` says. `times`: None is once, or as often as the size can shrink."""

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
    """One call, from its first run to its last. It never keeps an exception, a traceback or a frame.

    `size` is what the next run gets, or None where nothing shrinks; `name` is what that is called.
    """

    def __init__(self, policy: Policy, size: int | None = None, name: str = "size") -> None:
        self.policy, self.size, self.name = policy, size, name
        self._runs: list[str] = []
        self._failure: Failure | None = None
        self._outer: int | None = None
        once = 1 if size is None else sizes.steps(size, policy.floor, policy.multiple)
        self.most = once if policy.times is None else policy.times if size is None else min(policy.times, once)

    def begin(self) -> None:
        """Before each run: know the exception that is being handled already, if there is one."""
        outer = sys.exc_info()[1]
        self._outer = None if outer is None else id(outer)  # it lives as long as it is being handled

    def again(self, error: BaseException) -> bool:
        """Whether to run again: then the error's frames are cleared. Else the error may have got a note."""
        try:
            return self._again(error)
        except Exception as failure:  # nothing that goes wrong here may come in the place of the user's error
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
        """Before another run, once the error is gone: collect, make room, shrink, and say so."""
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
        """The note on the last error of its kind."""
        if self.size is None:
            return words.history(self._runs, "Each time a GPU ran out of memory.")
        if sizes.smaller(self.size, self.policy.floor, self.policy.multiple) is not None:
            return words.history(self._runs, f"The last one had {self.name}={self.size}.")
        least = sizes.lowest(self.policy.floor, self.policy.multiple)
        end = f"{self.name}={self.size} is as small as it may get (the floor is {least})"
        return words.history(self._runs, f"{end}.") if self._runs else words.not_again(end)

    def _note(self, error: BaseException, text: str) -> None:
        hooks.add_note(error, visible(text))
