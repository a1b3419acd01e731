"""`with` blocks around the user's code, which leave the exception that comes out of it as it is.

Not `contextlib.contextmanager`: since Python 3.11 it assigns `__traceback__` of the exception that passes, which a
frozen dataclass refuses. Then `FrozenInstanceError` would come out of the block in place of the user's exception.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
End = Callable[["BaseException | None"], None]
"""Ends a block; it is given the exception that leaves the block, or None. It must raise only if it is given None."""


class Block(Generic[T]):
    """One `with` block; as a decorator, one block for each call. `begin` returns the block's value and its end."""

    def __init__(self, begin: Callable[[], tuple[T, End]]) -> None:
        self.begin = begin
        self._end: End | None = None

    def __enter__(self) -> T:
        if self._end is not None:
            raise RuntimeError("this block has begun and is not over\n    fix: make another one for each `with`")
        value, self._end = self.begin()
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with Block(self.begin):
                return function(*args, **kwargs)

        return inside
