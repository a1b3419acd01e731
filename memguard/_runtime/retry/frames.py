"""Lets go of what a failed run held: the frames of a traceback keep each local variable, tensors too, alive."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from types import FrameType, TracebackType
from typing import Any

from memguard._oom import hooks

_WALKED = 100
"""Exceptions of one chain whose frames are cleared."""
_SUSPENDS = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
)  # fmt: skip
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
"""Python's own, whatever an exception's class calls so."""


def clear(error: BaseException, outer: int | None = None) -> None:
    """Clear the frames of the error, its causes and contexts, and the members of groups: those that run no more.

    `outer` is the `id` of an exception that the caller was handling already: it and what hangs on it stay whole.
    """
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(known) < _WALKED:
        one = waiting.pop()
        if one is None or id(one) == outer or id(one) in known:
            continue
        known.add(id(one))
        _clear(_TRACEBACK.__get__(one))
        cause, context, members = hooks.kin(one)
        waiting += [context, cause, *members]


def _clear(trace: TracebackType | None) -> None:
    while trace is not None:
        if _is_over(trace.tb_frame):
            with contextlib.suppress(RuntimeError):  # it runs; from Python 3.13 on also if it is suspended
                trace.tb_frame.clear()
        trace = trace.tb_next


def _is_over(frame: FrameType) -> bool:
    """False for the frame of a generator or coroutine that somebody may resume: until Python 3.12 `clear` ends it."""
    if not frame.f_code.co_flags & _SUSPENDS or sys.version_info >= (3, 13):
        return True
    # A frame has its code and its variables only once its generator let go of it.
    return any(one is frame.f_code for one in gc.get_referents(frame))
