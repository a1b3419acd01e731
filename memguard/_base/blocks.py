"""Context managers around user code that never modify an exception that propagates out of the block.

`contextlib.contextmanager` is unsuitable: since Python 3.11 it assigns `__traceback__` of the exception. If the
exception is a frozen dataclass, the assignment raises `FrozenInstanceError`, which would replace the user's exception.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
End = Callable[["BaseException | None"], None]
"""The function that ends a block, called with the exception that propagates out of the block, or None. May raise only
if the argument is None."""
WITHIN: ContextVar[frozenset[int]] = ContextVar("memguard_blocks", default=frozenset())
"""The numbers of the memory reservations that the enclosing blocks hold. A new thread starts with an empty set; an
asyncio task inherits the set of the code that created the task."""
_TWICE = "this block has begun and is not over\n    fix: make another one for each `with`"


class Block(Generic[T]):
    """A context manager for `with` and `async with`. `begin` returns the value for `as` and the function that ends the
    block; `begin_in_loop` is a coroutine function that does the same without blocking the event loop.

    As a decorator, a `Block` enters a new block for each run of the function's body. For a coroutine or generator the
    block begins at the first step of the body, and ends when the body returns, raises or is closed.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[T, End]],
        begin_in_loop: Callable[[], Awaitable[tuple[T, End]]] | None = None,
    ) -> None:
        self.begin, self.begin_in_loop = begin, begin_in_loop
        self._end: End | None = None

    def __enter__(self) -> T:
        if self._end is not None:
            raise RuntimeError(_TWICE)
        value, self._end = self.begin()
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(error)

    async def __aenter__(self) -> T:
        if self._end is not None:
            raise RuntimeError(_TWICE)
        if self.begin_in_loop is None:
            value, self._end = self.begin()
        else:
            value, self._end = await self.begin_in_loop()
        return value

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isasyncgenfunction(function):
            wrapped: Any = self._around_async_generator(function)
        elif inspect.iscoroutinefunction(function):
            wrapped = self._around_coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapped = self._around_generator(function)
        else:
            wrapped = self._around_call(function)
        return cast("Callable[P, R]", functools.wraps(function)(wrapped))

    def _around_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Block(self.begin):
                return function(*args, **kwargs)

        return inside

    def _around_coroutine(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def inside(*args: Any, **kwargs: Any) -> Any:
            async with Block(self.begin, self.begin_in_loop):
                return await function(*args, **kwargs)

        return inside

    def _around_generator(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            place = _Place()
            with Block(self.begin):
                body = function(*args, **kwargs)
                sent: Any = None
                thrown: BaseException | None = None
                try:
                    while True:
                        try:
                            value = body.send(sent) if thrown is None else body.throw(thrown)
                        except StopIteration as done:
                            return done.value
                        finally:
                            thrown = None  # break the reference cycle between the exception and this frame
                        place.leave()
                        try:
                            sent = yield value
                        except GeneratorExit:  # the caller closes this generator; `finally` below closes the body
                            raise
                        except BaseException as error:
                            thrown = error
                        finally:
                            place.enter()
                finally:
                    body.close()

        return inside

    def _around_async_generator(self, function: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
        async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            place = _Place()
            async with Block(self.begin, self.begin_in_loop):
                body = function(*args, **kwargs)
                sent: Any = None
                thrown: BaseException | None = None
                try:
                    while True:
                        try:
                            value = await (body.asend(sent) if thrown is None else body.athrow(thrown))
                        except StopAsyncIteration:
                            return
                        finally:
                            thrown = None
                        place.leave()
                        try:
                            sent = yield value
                        except GeneratorExit:
                            raise
                        except BaseException as error:
                            thrown = error
                        finally:
                            place.enter()
                finally:
                    await body.aclose()

        return inside


class _Place:
    """Keeps the reservation number in `WITHIN` only while the generator's body runs, and not while the generator is
    suspended at a yield."""

    def __init__(self) -> None:
        self._around = self._within = WITHIN.get()

    def leave(self) -> None:
        """At a yield, remove the block's reservation number from `WITHIN`."""
        self._within = WITHIN.get() - self._around
        WITHIN.set(self._around)

    def enter(self) -> None:
        """On resumption, perhaps on another thread or task, add the block's reservation number to `WITHIN`."""
        self._around = WITHIN.get()
        WITHIN.set(self._around | self._within)
