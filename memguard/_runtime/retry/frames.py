"""Clears the frames of a failed run's traceback, which keep its local variables, tensors included, alive."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from types import FrameType, TracebackType
from typing import Any

from memguard._oom import hooks

_WALKED = 100
"""The most exceptions of one chain whose frames are cleared."""
_SUSPENDS = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
)  # fmt: skip
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
"""Python's descriptor, even if an exception class overrides the attribute."""


def clear(error: BaseException, outer: int | None = None) -> None:
    """Clear the finished frames of the error, its causes, its contexts and the members of groups.

    `outer` is the `id` of an exception that the caller was already handling. Its frames and its chain are not cleared.
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
            with contextlib.suppress(RuntimeError):  # the frame runs, or (Python 3.13 on) is suspended
                trace.tb_frame.clear()
        trace = trace.tb_next


def _is_over(frame: FrameType) -> bool:
    """False for the frame of a resumable generator or coroutine, which `clear` would end up to Python 3.12."""
    if not frame.f_code.co_flags & _SUSPENDS or sys.version_info >= (3, 13):
        return True
    # A frame owns its code and variables only after its generator has finished.
    return any(one is frame.f_code for one in gc.get_referents(frame))
