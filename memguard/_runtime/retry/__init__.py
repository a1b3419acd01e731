"""Retries a function or block after a GPU out-of-memory error: `memguard.retry`.

Before a retry memguard clears the frames of the failed run, which keep tensors alive, and frees GPU memory. The module
`run` controls one call. `failure` classifies errors and clears frames, `room` frees memory by trimming caches and
moving elastic caps, `ranks` detects distributed jobs.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from memguard._runtime.retry.run import Policy, Ranks, Run

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

__all__ = ["Retry", "retry"]


class Same(Protocol):
    """A decorator that preserves the signature."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


class Shrinking(Protocol[P, R_co]):
    """A function with retries that remembers the last size that succeeded."""

    def forget(self) -> None:
        """Forget the remembered size: the next call starts with its own argument."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Shrinking[P, R_co]: ...
    @overload
    def __get__(
        self: Shrinking[Concatenate[S, Q], R_co], instance: S, owner: type[Any] | None = None
    ) -> Shrinking[Q, R_co]: ...


class Shrinks(Protocol):
    """A decorator that preserves the signature and adds the method `forget`."""

    def __call__(self, function: Callable[P, R], /) -> Shrinking[P, R]: ...


class Retry:
    """Run the function again if it fails because a GPU ran out of memory: `@memguard.retry()`. **It runs twice.**

    Before a retry memguard clears the frames of the failed run (they hold tensors), collects garbage, trims the idle
    caches of the budget's frameworks, raises an elastic cap, and logs the result. The last error is raised unchanged,
    with a note. Other errors are raised at once. For functions, methods and `async def`.

    times     the most retries; by default one; with `shrink`, as many as it takes to reach the floor
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
        return lambda function: _retried(function, policy, shrink)

    @staticmethod
    def call(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and retry once if a GPU ran out of memory, as `memguard.retry()` does."""
        return _retried(function, Policy(), None)(*args, **kwargs)

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


def _check(function: Callable[..., Any]) -> None:
    """Raise TypeError for an object that memguard cannot retry: not callable, a generator function, or a descriptor."""
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        raise TypeError(f"a {kind} was given to memguard.retry\n    fix: write @{kind} above @memguard.retry()")
    if not callable(function):
        raise TypeError(f"memguard.retry takes a function, found {function!r}")
    inner = _code(function)
    for kind, is_one in (
        ("a generator", inspect.isgeneratorfunction),
        ("an async generator", inspect.isasyncgenfunction),
    ):
        if is_one(inner):
            raise TypeError(
                f"{_name(function)} is {kind}: when it fails, its caller has taken a part of what it yields, and "
                "another run would yield that again\n"
                "    fix: put @memguard.retry() on the function that makes one item, or "
                "`for attempt in memguard.retry.attempts():` into the generator, around that step"
            )


def _code(function: Callable[..., Any]) -> Any:
    """The function that a call of `function` runs: for an instance, its class's `__call__`."""
    plain = inspect.isroutine(function) or isinstance(function, (type, functools.partial))
    return function if plain else type(function).__call__


class _LastSize:
    """The last size that succeeded after shrinking, shared by all calls of one function."""

    def __init__(self) -> None:
        self.size: int | None = None

    def first(self, given: int) -> int:
        """The size for the first run of a call: the remembered size, but at most the argument `given`."""
        size = self.size
        return given if size is None else min(given, size)

    def learn(self, given: int, size: int) -> None:
        if size < given:
            self.size = size

    def forget(self) -> None:
        self.size = None


class _SizeArgument:
    """Reads the argument that `shrink` names from the arguments of each call, and replaces it by a smaller size."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name, self.fitted = name, _LastSize()
        self._signature = inspect.signature(function)
        self._within = ""
        parameters = self._signature.parameters
        kind = parameters[name].kind if name in parameters else None
        if kind is None or kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            self._within = next((n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
            if not self._within:
                known = ", ".join(parameters) or "none"
                raise TypeError(f"shrink={name!r}: {_name(function)} has no such argument; it has: {known}")

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The size argument of a call. None if the argument is missing, or if the arguments do not match the signature,
        so that the call itself raises TypeError."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        where = bound.arguments[self._within] if self._within else bound.arguments
        if self.name not in where:
            return None
        value = where[self.name]
        try:
            if isinstance(value, bool):
                raise TypeError
            return operator.index(value)
        except TypeError:
            raise TypeError(f"shrink={self.name!r}: that is a whole number, found {value!r}") from None

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if self._within:
            bound.arguments[self._within] = {**bound.arguments[self._within], self.name: size}
        else:
            bound.arguments[self.name] = size
        return bound.args, bound.kwargs


class _Call:
    """One call of a decorated function, with its retries."""

    def __init__(
        self, policy: Policy, sized: _SizeArgument | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._sized, self.args, self.kwargs = sized, args, kwargs
        self._given = given = None if sized is None else sized.of(args, kwargs)
        first = None if sized is None or given is None else sized.fitted.first(given)
        self.run = Run(policy, first, sized.name if sized is not None else "size")
        self._placed = given

    def begin(self) -> None:
        size = self.run.size
        if self._sized is not None and size is not None and size != self._placed:
            self.args, self.kwargs = self._sized.put(self.args, self.kwargs, size)
            self._placed = size
        self.run.begin()

    def fits(self) -> None:
        if self._sized is not None and self._given is not None and self.run.size is not None:
            self._sized.fitted.learn(self._given, self.run.size)


def _retried(function: Callable[P, R], policy: Policy, shrink: str | None) -> Callable[P, R]:
    """Wrap the function with retries. With `shrink` the wrapper has the method `forget`."""
    _check(function)
    sized = None if shrink is None else _SizeArgument(function, shrink)
    wrap = _awaited if inspect.iscoroutinefunction(_code(function)) else _called
    made: Any = wrap(function, policy, sized)
    if sized is not None:
        made.forget = sized.fitted.forget
    return cast("Callable[P, R]", made)


def _called(function: Callable[..., Any], policy: Policy, sized: _SizeArgument | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def runs(*args: Any, **kwargs: Any) -> Any:
        call = _Call(policy, sized, args, kwargs)
        while True:
            call.begin()
            try:
                result = function(*call.args, **call.kwargs)
            except Exception as error:
                if not call.run.again(error):
                    raise
            else:
                call.fits()
                return result
            call.run.prepare()  # outside `except`, so that nothing keeps the error and its frames alive

    return runs


def _awaited(function: Callable[..., Any], policy: Policy, sized: _SizeArgument | None) -> Callable[..., Any]:
    @functools.wraps(function)
    async def runs(*args: Any, **kwargs: Any) -> Any:
        call = _Call(policy, sized, args, kwargs)
        while True:
            call.begin()
            try:
                result = await function(*call.args, **call.kwargs)
            except Exception as error:
                if not call.run.again(error):
                    raise
            else:
                call.fits()
                return result
            call.run.prepare()

    return runs


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


class Attempt:
    """One run of the block. `number` counts from 1; `size` is None without the argument `size` of `attempts`."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self.number, self.size = run, number, run.size
        self.state: Literal["new", "begun", "over", "failed"] = "new"

    def __enter__(self) -> Attempt:
        if self.state != "new":
            raise RuntimeError("this attempt has begun already\n    fix: one `with attempt:` for each turn of the loop")
        self.state = "begun"
        self._run.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Return True, which suppresses the error, if the block should run again. The loop prepares the retry after
        Python has released the error."""
        self.state = "over"
        if error is None or not issubclass(type(error), Exception) or not self._run.again(error):
            return False
        self.state = "failed"
        return True


class Attempts:
    """The iterator that `attempts` returns. The iteration ends after the first successful attempt."""

    def __init__(self, policy: Policy, size: int | None) -> None:
        self._run = Run(policy, size)
        self._last: Attempt | None = None

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> Attempt:
        last, number = self._last, 1
        if last is not None:
            if last.state == "over":
                raise StopIteration
            if last.state != "failed":
                raise RuntimeError(
                    "this attempt had no block\n"
                    "    fix: for attempt in memguard.retry.attempts():\n        with attempt: ..."
                )
            self._run.prepare()
            number = last.number + 1
        self._last = Attempt(self._run, number)
        return self._last


retry = Retry()
