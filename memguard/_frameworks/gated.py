"""What a framework's table of gates says: which of its functions wait while the process is off its GPUs.

While a process is suspended, a call into CUDA ends it (SIGSEGV), fails, or waits in the driver until it is resumed
(driver 580.159, H200). One that waits there with Python's interpreter lock (GIL) stops every thread of the process.
Which of these a function would do is its `harm`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

Harm = Literal["crash", "fail", "hold", "wait"]
"""Ungated, the call ends the process; fails; waits in the driver and holds the GIL; waits there without it."""
Touches = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""Whether a call with these arguments needs a GPU."""


class Entry(NamedTuple):
    """A function: `module:name`, or `module:Class.name`. The last part may be a pattern, as `cu*`.

    `why` names the driver's function that it ends in. `optional`: not every version or build has it. With `touches`
    only calls that need a GPU wait; the others go on as if there were no gate. `but` are names that a pattern leaves
    out: what the driver answers at once.
    """

    name: str
    harm: Harm
    why: str
    optional: bool = False
    touches: Touches | None = None
    but: tuple[str, ...] = ()


class Kind(NamedTuple):
    """A type, `module:Class`, whose objects are kept alive; `which` says of one whether it has to be."""

    name: str
    why: str
    which: Callable[[Any], bool] | None = None


class Native(NamedTuple):
    """A thread of the framework's own, in C++, that asks the driver again and again (`_node/suspend/native.py`).

    `library`: how the name of the file begins in which it keeps the driver's addresses. `asks`: the driver's function,
    whose answer CUDA_SUCCESS must be true of a process without work on its GPUs, and must end nobody's wait. `every`:
    seconds between two questions. `thread`: a text that is in the library if it has the thread. `live`: whether the
    framework has begun to use its GPUs.
    """

    library: str
    asks: str
    every: float
    thread: bytes
    live: Callable[[], bool]


class Gates(NamedTuple):
    """A framework's table.

    `hook` is the module that is in `sys.modules` once the framework is imported. `waits` are the functions that wait.
    `later` are functions that finalizers call: they do nothing now, and are called once the gate has opened. `kept` are
    types whose destructors call the driver: their objects stay alive until then, and so does what `holds` returns.
    `imports` are further modules whose import calls the driver. `left` are sentences on what no gate reaches.
    `refuses` makes a block in which what no name reaches (operators) calls its argument first, with a name for people:
    on the thread that entered the block only. `natives` are threads that no function of Python's stands before.
    """

    hook: str
    waits: tuple[Entry, ...]
    later: tuple[Entry, ...] = ()
    kept: tuple[Kind, ...] = ()
    holds: Callable[[], object] | None = None
    imports: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    refuses: Callable[[Callable[[str], None]], AbstractContextManager[object]] | None = None
    natives: tuple[Native, ...] = ()


def entries(
    module: str,
    harm: Harm,
    why: str,
    names: str,
    *,
    optional: bool = False,
    touches: Touches | None = None,
    but: tuple[str, ...] = (),
) -> tuple[Entry, ...]:
    """A row for each of the names, which have blanks between them."""
    return tuple(Entry(f"{module}:{name}", harm, why, optional, touches, but) for name in names.split())


def kinds(module: str, why: str, names: str, which: Callable[[Any], bool] | None = None) -> tuple[Kind, ...]:
    """A row for each of the types, which have blanks between them."""
    return tuple(Kind(f"{module}:{name}", why, which) for name in names.split())
