"""The type of a framework's facts in a running process: `IN_PROCESS` in `in_process.py` of its folder.

Suspension reads the state that it would destroy, the doctor the replaced allocators, a retry the other ranks. memguard
calls these functions only for imported frameworks; they import, initialise and change nothing. A version may store a
fact elsewhere, so a function may raise; the caller then reports that the fact could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Modules = Mapping[str, Any]
"""Modules by name, as `sys.modules`."""
Objects = Mapping[str, list[Any]]
"""The live objects of the types that `InProcess.held` names, by the type's module."""


class Question(NamedTuple):
    """`ask` yields lines of text; `what` names the unreadable fact in the report if it raises."""

    what: str
    ask: Callable[[Modules, Objects], Iterator[str]]


class InProcess(NamedTuple):
    """The in-process facts of one framework.

    `modules`: for the doctor, the modules that show how far the framework is loaded. `held`: types whose live objects
    these functions inspect, as pairs of module and name; Python's collector finds the objects. `shares`: memory that
    other processes share. `communicators`, `captures`, `profilers`: the live ones. `capturing`: whether this thread
    captures a CUDA graph. `work_areas`: bytes in use on this thread's current GPU that are no arrays of the program.
    `let_go`: free memory that the framework only caches for its next call; it may raise. `ranks`: the library that
    counts this process's ranks, and their number or None. `swapped`: the replacement of the framework's own allocator.
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
