"""Running a function or block again after a GPU ran out of memory: let go of what failed, make room, say so.

`recognised` knows the errors, `frames` lets go of a failed run, `room` has the budget make room, `ranks` refuses where
other ranks would wait, `sizes` shrinks, `words` says what was done; `run` puts them in order for one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from memguard._runtime.retry.blocks import Attempts
from memguard._runtime.retry.function import again
from memguard._runtime.retry.run import Policy, Ranks

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

__all__ = ["Retry", "retry"]


class Same(Protocol):
    """A decorator that changes no signature."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


class Shrinking(Protocol[P, R_co]):
    """A function that remembers the size that fitted."""

    def forget(self) -> None:
        """Begin the next call with what it is given."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Shrinking[P, R_co]: ...
    @overload
    def __get__(
        self: Shrinking[Concatenate[S, Q], R_co], instance: S, owner: type[Any] | None = None
    ) -> Shrinking[Q, R_co]: ...


class Shrinks(Protocol):
    """A decorator that adds `forget`."""

    def __call__(self, function: Callable[P, R], /) -> Shrinking[P, R]: ...


class Retry:
    """Run the function again if it fails because a GPU ran out of memory: `@memguard.retry()`. **It runs twice.**

    Before that the failed run is let go of (its frames hold tensors), garbage is collected, other frameworks of the
    budget give back what idles, and an elastic cap rises; a line in the log says what was done. The last error
    comes out as it is, with a note. Other errors pass at once. For functions, methods and `async def`.

    times     how often at most; once if not given, or with `shrink` until the floor
    shrink    the name of an argument, a whole number, that is halved each time. What fitted is remembered: the next
              call begins there, or lower if it is given less, until `function.forget()`
    floor     the smallest size; `multiple` rounds each size down to a multiple of it
    ranks     "refuse" does not run it again in a job of several ranks (torch.distributed, MPI, ...), where others
              wait in a collective; "independent" says that the function holds none

    `retry.call` does it for one call, `retry.attempts` for a block. Raises TypeError for a generator, whose caller has
    a part of what it yields. See docs/retry.md.
    """

    @overload
    def __call__(self, times: int | None = None, *, ranks: Ranks = "refuse") -> Same: ...
    @overload
    def __call__(
        self, times: int | None = None, *, shrink: str, floor: int = 1, multiple: int = 1, ranks: Ranks = "refuse"
    ) -> Shrinks: ...
    def __call__(
        self,
        times: int | None = None,
        *,
        shrink: str | None = None,
        floor: int = 1,
        multiple: int = 1,
        ranks: Ranks = "refuse",
    ) -> Any:
        policy = Policy(times, floor, multiple, ranks)
        if shrink is not None and not isinstance(shrink, str):
            raise TypeError(f"shrink is the name of an argument, found {shrink!r}")
        if shrink is None and (floor, multiple) != (1, 1):
            raise TypeError("floor and multiple are for a size\n    fix: name its argument: shrink='batch_size'")
        return lambda function: again(function, policy, shrink)

    @staticmethod
    def call(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and once more if it fails because a GPU ran out of memory: as `memguard.retry()` does."""
        return again(function, Policy(), None)(*args, **kwargs)

    @staticmethod
    def attempts(
        times: int | None = None, *, size: int | None = None, floor: int = 1, multiple: int = 1, ranks: Ranks = "refuse"
    ) -> Attempts:
        """The same for a block: `for attempt in memguard.retry.attempts(): with attempt: ...`, until the first success.

        With `size`, `attempt.size` is halved after each failure, down to `floor`; nothing is remembered. Variables of
        the function around the block stay: what they hold is not let go of. Otherwise as `memguard.retry`.
        """
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"size is a whole number above 0, found {size!r}")
        if size is None and (floor, multiple) != (1, 1):
            raise TypeError("floor and multiple are for a size\n    fix: give the first one: size=64")
        return Attempts(Policy(times, floor, multiple, ranks), size)

    def __repr__(self) -> str:
        return "<memguard.retry>"


retry = Retry()
