"""What a running process can tell of one framework, budget or not: `IN_PROCESS` in `in_process.py` of its folder.

Suspension asks what would not survive it, the doctor what replaced an allocator, a retry whether there are other ranks.
Questions go to frameworks that are imported and nothing else; they import, initialise and change nothing. What a
version keeps elsewhere is unknown: a question may raise, and who asks says that it could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Modules = Mapping[str, Any]
"""Modules by name, as `sys.modules`."""
Objects = Mapping[str, list[Any]]
"""The live objects of the types that `InProcess.held` names, by the type's module."""


class Question(NamedTuple):
    """`ask` yields lines for people; `what` says what could not be read if it raises."""

    what: str
    ask: Callable[[Modules, Objects], Iterator[str]]


class InProcess(NamedTuple):
    """The questions of one framework.

    `modules`: those that tell the doctor how far it is loaded. `held`: types whose objects tell, as pairs of module and
    name; Python's collector knows all of them. `shares`: memory that other processes have or gave. `communicators`,
    `captures`, `profilers`: what of these is there now. `capturing`: whether this thread captures a CUDA graph.
    `work_areas`: bytes in use on this thread's current
    GPU that are no arrays of the program. `let_go`: free what the framework only keeps for its next call; it may raise.
    `ranks`: the library that counts this process's ranks, and their number or None. `swapped`: what replaces the
    framework's own allocator.
    """

    modules: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    shares: tuple[Question, ...] = ()
    communicators: tuple[Question, ...] = ()
    captures: tuple[Question, ...] = ()
    profilers: tuple[Question, ...] = ()
    capturing: Callable[[Modules], bool] | None = None
    work_areas: Callable[[Modules], int | None] | None = None
    let_go: Callable[[Modules], None] | None = None
    ranks: tuple[str, Callable[[Modules], int | None]] | None = None
    swapped: Callable[[Modules], str | None] | None = None


def count(number: int, noun: str) -> str:
    """`2 arrays`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
