"""What only the process itself can tell before it is suspended.

Frameworks, shared memory, communicators, captures, profilers. Asks frameworks that are imported and nothing else;
imports, initialises and changes nothing. Each answer is a line for people. What a version keeps elsewhere is unknown,
and said to be.

Not seen, as nobody keeps a list of it: IPC handles that CuPy's and PyCUDA's own calls or an extension opened, what
torch still holds for a process that took a tensor already deleted here, communicators that were made with
`cupy.cuda.nccl.NcclCommunicator` or by an extension, captures of other threads on non-blocking streams other than
torch's usual one, and a CUPTI subscriber that belongs to no profiler below.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from memguard._devices import contexts, streams
from memguard._frameworks import specs
from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question, count
from memguard._node.suspend.gates import native_threads, tables


class Inside(NamedTuple):
    """Lines for people. `natives`: see `native_threads.unheld`. `unseen`: what could not be asked."""

    ipc: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    profilers: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    natives: tuple[str, ...] = ()


def look(modules: Modules | None = None) -> Inside:
    """What there is now. Takes 50 ns for each object of the process, as Python's collector is asked for them.

    In the first seconds of a framework that has a thread of its own it waits for that (`native_threads.unheld`).
    """
    modules = dict(sys.modules) if modules is None else modules
    tellers: list[InProcess] = [module.IN_PROCESS for module in specs.modules("in_process")]
    objects, unseen = held(modules, chain.from_iterable(one.held for one in tellers)), list[str]()

    def asked(questions: Iterable[Question]) -> tuple[str, ...]:
        lines: list[str] = []
        for what, ask in questions:
            try:
                lines += ask(modules, objects)
            except Exception as error:  # another version keeps it elsewhere
                unseen.append(f"{what} could not be read ({type(error).__name__})")
        return tuple(lines)

    natives = asked([Question("whether a framework's own threads can be held", _unheld)])
    return Inside(
        asked([Question("what memguard.exchange shares", _exchange), *chain.from_iterable(t.shares for t in tellers)]),
        asked(chain.from_iterable(one.communicators for one in tellers)),
        asked(
            [
                *chain.from_iterable(one.captures for one in tellers),
                Question("whether a CUDA graph is being captured", _any_captures),
            ]
        ),
        asked(chain.from_iterable(one.profilers for one in tellers)),
        tuple(unseen),
        natives,
    )


def held(modules: Modules, types: Iterable[tuple[str, str]]) -> Objects:
    """The objects of these types (module and name), by the type's module."""
    known = [(module, getattr(modules[module], name, None)) for module, name in types if module in modules]
    kinds = {id(kind): module for module, kind in known if kind is not None}
    found: dict[str, list[Any]] = {}
    for one in gc.get_objects() if kinds else ():
        module = kinds.get(id(type(one)))  # not the type itself: its metaclass may have a `__hash__` of its own
        if module is not None:
            found.setdefault(module, []).append(one)
    return found


def _unheld(_: Modules, __: Objects) -> Iterator[str]:
    return native_threads.unheld(tables.tables())


def _exchange(modules: Modules, _: Objects) -> Iterator[str]:
    server = modules.get("memguard.exchange.ipc.server")
    if server is None:
        return
    offered, attached = server.current().counts()
    if offered:
        yield f"memguard.exchange: {count(offered, 'array')} exported"
    if attached:
        yield f"memguard.exchange: {count(attached, 'array')} of other processes attached"


def _any_captures(_: Modules, __: Objects) -> Iterator[str]:
    """Of any thread, on a stream that the legacy default stream waits for. Asking disturbs none."""
    known = {contexts.current_handle(), *map(contexts.primary, contexts.ordinals().values())} - {None}
    if any(streams.awaits_capture(context) for context in known if context):
        yield "a capture is under way on a blocking stream"
