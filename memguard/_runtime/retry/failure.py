"""Classifies errors for a retry, and clears the frames of a failed run.

The frames of a traceback keep their local variables alive, tensors included. `Failure` stores only text and numbers, so
that it keeps no exception and no tensor alive.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from memguard._base.types import RefusedRequest
from memguard._base.units import format_size
from memguard._oom import hooks
from memguard._oom.classify import Classification, ErrorFacts, classify

_WALKED = 100
"""The most exceptions of one chain of causes that `recognised` examines and `clear_frames` clears."""
_TEXT, _MOST = 240, 1000
"""Limits in characters for an error's text in the note on a later error. Sentences beyond `_TEXT` are omitted;
a first sentence longer than `_MOST` is truncated."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^\sa-z])|\s*\n\s*")
_SUSPENDS = (
    inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
)  # fmt: skip
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
"""The descriptor `BaseException.__traceback__`, used because an exception class may override the attribute."""


class Failure(NamedTuple):
    """A run that failed for lack of GPU memory. Sizes are bytes; None if unknown.

    requester   the framework or library that requested memory
    requested   the requested bytes
    certain     True if the requester is certain
    request     the refused request, if the allocator reported it to memguard
    error_text  type and text of the error, in one line
    in_use      bytes of each framework's live arrays when the error was caught, by UUID and name
    held        bytes that each framework's allocator held when the error was caught, by UUID and name
    """

    requester: str | None
    requested: int | None
    certain: bool
    request: RefusedRequest | None
    facts: ErrorFacts
    classification: Classification
    error_text: str
    in_use: Mapping[str, Mapping[str, int]] = {}
    held: Mapping[str, Mapping[str, int]] = {}

    @property
    def title(self) -> str:
        size = "" if self.requested is None else f" ({format_size(self.requested)} asked for)"
        possibly = "" if self.certain else "possibly "
        return f"{self.requester or 'an unknown requester'} {possibly}ran out of GPU memory{size}"


def recognised(error: BaseException, outer: int | None = None) -> Failure | None:
    """The `Failure` of an error that is, or was caused by, a GPU out-of-memory error; None for other errors.

    Errors that may be, but need not be, out-of-memory errors are accepted, because a retry may help and the program
    gets the error of the last run. An exception group is accepted only if all its members are, because a retry discards
    their errors. `outer` is the `id` of an exception that the program was already handling before the run; this
    exception is ignored.
    """
    found = _look(error, outer, set())
    if found is None:
        return None
    facts, classification = found
    request = hooks.request_of(facts, classification)
    requested = request.requested if request is not None and request.requested is not None else classification.requested
    own = hooks.facts_of(error)
    error_text = f"{own.type.rpartition('.')[2]}: {first_sentences(own.text)}"
    return Failure(
        classification.requester, requested, classification.certain, request, facts, classification, error_text
    )


def first_sentences(text: str) -> str:
    """The first sentences of the text, in one line. Out-of-memory errors usually give the requested size and the
    memory in use in these sentences, and advice afterwards."""
    found = ""
    sentences = [" ".join(one.split()) for one in _SENTENCE.split(text.strip())]
    for one in sentences:
        if found and len(found) + len(one) >= _TEXT:
            return f"{found} …"
        found = f"{found} {one}".strip()
        if len(found) > _MOST:
            return f"{found[:_MOST].rpartition(' ')[0] or found[:_MOST]} …"
    return found


def _look(error: BaseException, outer: int | None, known: set[int]) -> tuple[ErrorFacts, Classification] | None:
    if id(error) == outer or id(error) in known or len(known) >= _WALKED or not issubclass(type(error), Exception):
        return None
    known.add(id(error))
    cause, context, members = hooks.related(error)
    if members:
        found = [_look(member, outer, known) for member in members]
        return found[0] if all(found) else None
    facts = hooks.facts_of(error)
    classification = classify(facts)
    if classification.memory != "none":
        return (facts, classification) if classification.memory == "gpu" else None
    for one in (cause, None if hooks.context_suppressed(error) else context):
        if one is not None and (deeper := _look(one, outer, known)) is not None:
            return deeper
    return None


def clear_frames(error: BaseException, outer: int | None = None) -> None:
    """Clear the finished frames of the error, its causes, its contexts and the members of exception groups.

    `outer` is the `id` of an exception that the program was already handling before the run. Its frames, causes and
    contexts are not cleared.
    """
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(known) < _WALKED:
        one = waiting.pop()
        if one is None or id(one) == outer or id(one) in known:
            continue
        known.add(id(one))
        _clear_trace(_TRACEBACK.__get__(one))
        cause, context, members = hooks.related(one)
        waiting += [context, cause, *members]


def _clear_trace(trace: TracebackType | None) -> None:
    while trace is not None:
        if _is_over(trace.tb_frame):
            with contextlib.suppress(RuntimeError):  # the frame is running, or (from Python 3.13 on) suspended
                trace.tb_frame.clear()
        trace = trace.tb_next


def _is_over(frame: FrameType) -> bool:
    """False for the frame of a generator or coroutine that may be resumed: up to Python 3.12, `clear` would end it."""
    if not frame.f_code.co_flags & _SUSPENDS or sys.version_info >= (3, 13):
        return True
    # Until a generator has finished, `gc.get_referents` of its frame omits the frame's code and variables.
    return any(one is frame.f_code for one in gc.get_referents(frame))
