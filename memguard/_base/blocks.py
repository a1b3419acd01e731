"""`with` blocks around user code that do not modify the exception that leaves the block.

Not `contextlib.contextmanager`: since Python 3.11 it assigns `__traceback__` of that exception. An exception that is a
frozen dataclass refuses the assignment, and `FrozenInstanceError` would replace the user's exception.
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
"""Ends a block. Its argument is the exception that leaves the block, or None; it may raise only for None."""
WITHIN: ContextVar[frozenset[int]] = ContextVar("memguard_blocks", default=frozenset())
"""The ids of the enclosing numbered blocks. A new thread starts with none; an asyncio task inherits its creator's."""
_TWICE = "this block has begun and is not over\n    fix: make another one for each `with`"


class Block(Generic[T]):
    """One `with` or `async with` block. `begin` returns the block's value and its end; `begin_in_loop` is a coroutine
    that does the same without blocking the event loop.

    As a decorator it makes one block for each run of the function's body. The block of a coroutine or generator begins
    at its first step and ends when the body returns, raises or is closed.
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
                        except GeneratorExit:  # the caller closes this generator; the body is closed below
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
    """Switches the context of a generator's body: inside the block while the body runs, outside while it is suspended
    at a yield."""

    def __init__(self) -> None:
        self._around = self._within = WITHIN.get()

    def leave(self) -> None:
        """Leave the block's context at a yield."""
        self._within = WITHIN.get() - self._around
        WITHIN.set(self._around)

    def enter(self) -> None:
        """Enter the block's context on resumption, perhaps on another thread or task."""
        self._around = WITHIN.get()
        WITHIN.set(self._around | self._within)
