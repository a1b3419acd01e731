"""Retries a function or block after a GPU out-of-memory error: clears the failed run's frames, makes room, logs it.

`attempts` runs functions and blocks, and `run` controls one call. `failure` classifies errors and clears the failed
run's frames, `room` makes room through the budget, `ranks` detects distributed jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from memguard._runtime.retry.attempts import Attempts, again
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
    """A function that remembers the size that succeeded."""

    def forget(self) -> None:
        """Make the next call start with its own argument again."""

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

    Before a retry memguard clears the frames of the failed run (they hold tensors), collects garbage, trims the idle
    caches of the budget's frameworks, raises an elastic cap, and logs the result. The last error is raised unchanged,
    with a note. Other errors are raised at once. For functions, methods and `async def`.

    times     the most retries; by default one, or with `shrink` as many as reach the floor
    shrink    the name of an integer argument that is halved before each retry. memguard remembers the size that
              succeeded: until `function.forget()`, the next call starts with it, or with its own argument if smaller
    floor     the smallest size; `multiple` rounds each size down to a multiple of it
    ranks     "refuse" does not retry in a job of several ranks (torch.distributed, MPI, ...), where other ranks wait
              in a collective; "independent" declares that the function contains no collective

    `retry.call` retries one call, `retry.attempts` a block. Raises TypeError for a generator function, because its
    caller already has some of the items. See docs/retry.md.
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
        """Call the function, and retry once if a GPU ran out of memory, as `memguard.retry()` does."""
        return again(function, Policy(), None)(*args, **kwargs)

    @staticmethod
    def attempts(
        times: int | None = None, *, size: int | None = None, floor: int = 1, multiple: int = 1, ranks: Ranks = "refuse"
    ) -> Attempts:
        """Retry a block: `for attempt in memguard.retry.attempts(): with attempt: ...`, until the first success.

        With `size`, `attempt.size` is halved after each failure, down to `floor`; no size is remembered. Variables of
        the enclosing function keep their arrays: memguard does not release them. Otherwise as `memguard.retry`.
        """
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"size is a whole number above 0, found {size!r}")
        if size is None and (floor, multiple) != (1, 1):
            raise TypeError("floor and multiple are for a size\n    fix: give the first one: size=64")
        return Attempts(Policy(times, floor, multiple, ranks), size)

    def __repr__(self) -> str:
        return "<memguard.retry>"


retry = Retry()
