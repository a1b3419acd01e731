"""Decides which errors are retried, and extracts plain data from them."""

from __future__ import annotations

import re

from memguard._oom import hooks
from memguard._oom.classify import ErrorFacts, Verdict, classify
from memguard._runtime.retry.types import Failure

_WALKED = 100
"""The most exceptions of one chain that are examined."""
_TEXT, _MOST = 240, 1000
"""Characters of an error's text in the note on a later error. Whole sentences are kept up to the first number; the
first sentence is kept up to the second number."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^\sa-z])|\s*\n\s*")


def recognised(error: BaseException, outer: int | None = None) -> Failure | None:
    """The facts of an error that is, or was caused by, a GPU out-of-memory error; else None.

    An error whose type and text leave the cause open counts too: a retry may help, and a second failure reaches the
    program. A group counts only if all its members do, because a retry would discard the other errors. `outer` is the
    `id` of an exception that was being handled when the run began. It does not belong to the run.
    """
    found = _look(error, outer, set())
    if found is None:
        return None
    facts, verdict = found
    request = hooks.request_of(facts, verdict)
    asked = request.requested if request is not None and request.requested is not None else verdict.requested
    return Failure(verdict.requester, asked, verdict.certain, request, facts, verdict, _words(hooks.facts_of(error)))


def _words(facts: ErrorFacts) -> str:
    """The error's type and text in one line."""
    return f"{facts.type.rpartition('.')[2]}: {first_sentences(facts.text)}"


def first_sentences(text: str) -> str:
    """The first sentences of the text, in one line: requested size and holders, without the advice after them."""
    found = ""
    sentences = [" ".join(one.split()) for one in _SENTENCE.split(text.strip())]
    for one in sentences:
        if found and len(found) + len(one) >= _TEXT:
            return f"{found} …"
        found = f"{found} {one}".strip()
        if len(found) > _MOST:
            return f"{found[:_MOST].rpartition(' ')[0] or found[:_MOST]} …"
    return found


def _look(error: BaseException, outer: int | None, known: set[int]) -> tuple[ErrorFacts, Verdict] | None:
    if id(error) == outer or id(error) in known or len(known) >= _WALKED or not issubclass(type(error), Exception):
        return None
    known.add(id(error))
    cause, context, members = hooks.kin(error)
    if members:
        found = [_look(member, outer, known) for member in members]
        return found[0] if all(found) else None
    facts = hooks.facts_of(error)
    verdict = classify(facts)
    if verdict.memory != "none":
        return (facts, verdict) if verdict.memory == "gpu" else None
    for one in (cause, None if hooks.suppressed(error) else context):
        if one is not None and (deeper := _look(one, outer, known)) is not None:
            return deeper
    return None
