"""Controls the runs of one call: decides after each failure whether to retry, and prepares the retry."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.text import visible
from memguard._base.units import format_size
from memguard._oom import hooks
from memguard._runtime.retry import ranks, room
from memguard._runtime.retry.failure import Failure, clear_frames, recognised
from memguard._runtime.retry.room import RoomMade

Ranks = Literal["refuse", "independent"]


@dataclass(frozen=True)
class Policy:
    """The arguments of `memguard.retry`. If `times` is None, there is one retry, or with `shrink` one for each size
    down to `floor`."""

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
    """The state of one call over its runs. Stores no exception, traceback or frame.

    `size`: the size for the next run; None without `shrink`. `name`: the name of the argument that `shrink` names.
    """

    def __init__(self, policy: Policy, size: int | None = None, name: str = "size") -> None:
        self.policy, self.size, self.name = policy, size, name
        self._runs: list[str] = []
        self._failure: Failure | None = None
        self._outer: int | None = None
        once = 1 if size is None else steps(size, policy.floor, policy.multiple)
        self.most = once if policy.times is None else policy.times if size is None else min(policy.times, once)

    def begin(self) -> None:
        """Call before each run: stores the id of the exception that the program is already handling, if any."""
        outer = sys.exc_info()[1]
        self._outer = None if outer is None else id(outer)  # valid: the exception lives while it is handled

    def again(self, error: BaseException) -> bool:
        """Return True to retry after `error`, and clear its frames. Otherwise return False; `error` may get a note."""
        try:
            return self._again(error)
        except Exception as failure:  # an error in memguard must not replace the user's error
            _log.debug("an error could not be examined for another run: %s", text_of(failure))
            return False

    def _again(self, error: BaseException) -> bool:
        failure = recognised(error, self._outer)
        if failure is None:
            if self._runs:
                self._note(error, _history(self._runs, "It failed in another way."))
            return False
        why = self._forbidden()
        if why is not None:
            text = _not_retried(why)
            self._note(error, _history(self._runs, text) if self._runs else text)
            return False
        if len(self._runs) >= self.most:
            self._note(error, self._over())
            return False
        self._failure = room.with_figures(failure)
        clear_frames(error, self._outer)
        return True

    def prepare(self) -> None:
        """Prepare a retry: collect garbage, free GPU memory, reduce the size and log the retry. Call this method
        after the error is released."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        gc.collect()
        done = RoomMade()
        try:
            done = room.make_room(failure)
        except Exception as problem:
            _log.debug("no room was made for another run: %s", text_of(problem))
        made = _room_made(done, failure.requester)
        before = smaller = ""
        if self.size is not None:
            before = f"{self.name}={self.size}: "
            self.size = halved(self.size, self.policy.floor, self.policy.multiple)
            smaller = f" with {self.name}={self.size}"
        text = f"{failure.title}: {made}; running again{smaller} ({len(self._runs) + 1} of {self.most})"
        self._runs.append(f"{before}{failure.error_text}\n    then {made}")
        _log.warning("%s", text)
        try:
            room.announce(failure, done, text)
        except Exception as problem:
            _log.debug("a retry was not announced: %s", text_of(problem))

    def _forbidden(self) -> str | None:
        if room.capturing():
            return _CAPTURING
        why = ranks.several(ranks.signs()) if self.policy.ranks == "refuse" else None
        return None if why is None else _several_ranks(why)

    def _over(self) -> str:
        """The note on the last out-of-memory error, which is raised because no retry is left."""
        if self.size is None:
            return _history(self._runs, "Each time a GPU ran out of memory.")
        if halved(self.size, self.policy.floor, self.policy.multiple) is not None:
            return _history(self._runs, f"The last one had {self.name}={self.size}.")
        least = lowest(self.policy.floor, self.policy.multiple)
        end = f"{self.name}={self.size} is as small as it may get (the floor is {least})"
        return _history(self._runs, f"{end}.") if self._runs else _not_retried(end)

    def _note(self, error: BaseException, text: str) -> None:
        hooks.add_note(error, visible(text))


def lowest(floor: int, multiple: int) -> int:
    """The smallest permitted size: `floor`, rounded up to a multiple of `multiple`."""
    return -(-floor // multiple) * multiple


def halved(size: int, floor: int = 1, multiple: int = 1) -> int | None:
    """Half the size, rounded down to a multiple, but at least `lowest`. None if the result is not below `size`."""
    half = max(size // 2 // multiple * multiple, lowest(floor, multiple))
    return half if half < size else None


def steps(size: int, floor: int = 1, multiple: int = 1) -> int:
    """The number of times that the size can be halved before it reaches `lowest`."""
    count, now = 0, halved(size, floor, multiple)
    while now is not None:
        count, now = count + 1, halved(now, floor, multiple)
    return count


_CAPTURING = "this thread captures a CUDA graph, which another run would spoil\n  fix: put the retry around the capture"


def _several_ranks(why: str) -> str:
    return (
        f"{why}: the healthy ones wait in a collective, and a rank that repeats one misaligns the others\n"
        "  fix: let all ranks stop or skip the step together; of a function that holds no collective say so: "
        "memguard.retry(ranks='independent')"
    )


def _not_retried(why: str) -> str:
    """The note on an error after which nothing was retried. `why`: the reason."""
    return f"memguard did not run it again: {why}"


def _room_made(what: RoomMade, requester: str | None) -> str:
    """A sentence about the freed memory, without a full stop. `requester`: the framework whose request failed."""
    parts = []
    if what.freed:
        parts.append(f"the failed run let go of {format_size(what.freed)}")
    for name, size in what.returned.items():
        idle = "its own cache, " if name == requester else ""
        parts.append(f"{name} gave back {idle}{format_size(size)} by NVML")
    if what.cap is not None:
        before, after = what.cap
        parts.append(f"{requester}'s cap went from {format_size(before)} to {format_size(after)}")
    if what.freed is None:
        parts.append("the failed run was let go of; no budget is active, so no framework was asked for its cache")
    elif not parts:
        parts.append("nothing idle came back")
    parts += [f"{name} holds {format_size(size)} more in live arrays than its min" for name, size in what.live.items()]
    return "; ".join(parts)


def _history(runs: Sequence[str], end: str) -> str:
    """The note on the final error, with a line for each run. `end`: a sentence with the reason for no further run."""
    lines = [f"memguard ran it {len(runs) + 1} times. {end}"]
    lines += [f"  run {number}: {text}" for number, text in enumerate(runs, 1)]
    return "\n".join([*lines, f"  run {len(runs) + 1}: this error"])
