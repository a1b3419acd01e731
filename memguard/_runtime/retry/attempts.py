"""Runs functions and blocks with retries, and replaces the shrinking argument of a call."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from memguard._runtime.retry.run import Policy, Run

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[..., Any]) -> None:
    """Raise TypeError for an object that cannot be retried as a whole."""
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


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_code(function))


def _code(function: Callable[..., Any]) -> Any:
    """The function that a call runs: for an object, its class's `__call__`."""
    plain = inspect.isroutine(function) or isinstance(function, (type, functools.partial))
    return function if plain else type(function).__call__


class Fitted:
    """The last size that succeeded after shrinking, shared by all calls of one function."""

    def __init__(self) -> None:
        self.size: int | None = None

    def first(self, given: int) -> int:
        """The size of the first run: the remembered size, but at most the caller's argument."""
        size = self.size
        return given if size is None else min(given, size)

    def learn(self, given: int, size: int) -> None:
        if size < given:
            self.size = size

    def forget(self) -> None:
        self.size = None


class Sized:
    """The shrinking argument of a function: reads it from each call and replaces it."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.name, self.fitted = name, Fitted()
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
        """The size that this call passes; None if its arguments do not fit the signature, as the call then raises."""
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
    """One call of a function with its retries."""

    def __init__(self, policy: Policy, sized: Sized | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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


def again(function: Callable[P, R], policy: Policy, shrink: str | None) -> Callable[P, R]:
    """Wrap the function with retries. With `shrink` the wrapper has `forget`."""
    checked(function)
    sized = None if shrink is None else Sized(function, shrink)
    if is_async(function):
        made: Any = _awaited(function, policy, sized)
    else:
        made = _called(function, policy, sized)
    if sized is not None:
        made.forget = sized.fitted.forget
    return cast("Callable[P, R]", made)


def _called(function: Callable[..., Any], policy: Policy, sized: Sized | None) -> Callable[..., Any]:
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
            call.run.prepare()  # outside `except`: nothing references the error any more

    return runs


def _awaited(function: Callable[..., Any], policy: Policy, sized: Sized | None) -> Callable[..., Any]:
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
        """Suppress the error (True) if the block should run again. The loop prepares the run when the error is gone."""
        self.state = "over"
        if error is None or not issubclass(type(error), Exception) or not self._run.again(error):
            return False
        self.state = "failed"
        return True


class Attempts:
    """The attempts of one block. Iteration ends after the first success."""

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
