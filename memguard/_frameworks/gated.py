"""The types of a framework's table of gates: its functions that wait while the process is off its GPUs.

While a process is suspended, a call into CUDA crashes it (SIGSEGV), fails, or waits in the driver until the resume
(driver 580.159, H200). A call that waits with the GIL held stops every thread of the process. The `harm` of a function
names which of these its ungated call would do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

Harm = Literal["crash", "fail", "hold", "wait"]
"""An ungated call crashes the process; fails; waits in the driver and holds the GIL; waits there without it."""
Touches = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""Whether a call with these arguments needs a GPU."""


class Entry(NamedTuple):
    """A function: `module:name`, or `module:Class.name`. The last part may be a pattern, such as `cu*`.

    `why` names the driver's function behind it. `optional`: some versions or builds lack it. With `touches`, only calls
    that need a GPU wait; the gate passes the others through. `but` are names that a pattern excludes: functions that
    the driver answers at once.
    """

    name: str
    harm: Harm
    why: str
    optional: bool = False
    touches: Touches | None = None
    but: tuple[str, ...] = ()


class Kind(NamedTuple):
    """A type, `module:Class`, whose objects are kept alive; `which` selects the objects to keep."""

    name: str
    why: str
    which: Callable[[Any], bool] | None = None


class Native(NamedTuple):
    """A C++ thread of the framework that polls the driver (`_node/suspend/gates/native_threads.py`).

    `library`: the beginning of the name of the file that stores the driver's addresses. `asks`: the polled driver
    function; its answer CUDA_SUCCESS must be true for a process without work on its GPUs, and must end no wait.
    `every`: seconds between two polls. `thread`: a text that the library's file contains if the library has the thread.
    `live`: whether the framework has begun to use its GPUs.
    """

    library: str
    asks: str
    every: float
    thread: bytes
    live: Callable[[], bool]


class Gates(NamedTuple):
    """A framework's table.

    `hook` is the module that is in `sys.modules` once the framework is imported. `waits` are the functions that wait.
    `later` are functions that finalizers call: the gate defers them until it opens. `kept` are types whose destructors
    call the driver: their objects, and the result of `holds`, stay alive until then. `imports` are further modules
    whose import calls the driver. `left` are sentences on calls that no gate covers. `refuses` makes a block in which
    functions without a Python name (operators) first call its argument with a readable name, on the thread that entered
    the block only. `natives` are threads that no Python function can gate.
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
    """An entry for each of the space-separated names."""
    return tuple(Entry(f"{module}:{name}", harm, why, optional, touches, but) for name in names.split())


def kinds(module: str, why: str, names: str, which: Callable[[Any], bool] | None = None) -> tuple[Kind, ...]:
    """A kind for each of the space-separated types."""
    return tuple(Kind(f"{module}:{name}", why, which) for name in names.split())
