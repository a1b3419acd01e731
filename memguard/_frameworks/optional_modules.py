"""Types of the optional modules in a framework's folder, which `specs.modules` finds by name.

`gates.py` defines `GATES`: functions that wait while the process is suspended. During a suspension, a call into CUDA
without a gate crashes the process (SIGSEGV), fails, or waits in the driver until the resume (driver 580.159, H200). A
call that waits with the GIL held blocks every thread of the process. The `harm` of a function is the effect of its call
without a gate.

`in_process.py` defines `IN_PROCESS`: functions that read the framework's state in the running process. Suspension reads
the state that suspending would destroy, the doctor reads replaced allocators, and a retry reads the number of ranks.
memguard calls these functions only for imported frameworks; they import, initialise and change nothing. Another version
of the framework may store the state elsewhere, so a function may raise; the caller then reports that the state could
not be read.

`probe.py` defines `probe(report)`, which the doctor runs in a process of its own (`_tools/doctor/probes/main.py`). The
examined interpreter may lack memguard, so `probe.py` imports only the standard library at run time, and uses the syntax
of Python 3.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

Harm = Literal["crash", "fail", "hold", "wait"]
"""Effect of a call without a gate: the process crashes; the call fails; the call waits in the driver and holds the GIL;
the call waits in the driver without the GIL."""
Touches = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""Takes a call's positional and keyword arguments; returns True if the call needs a GPU."""


class GatedFunction(NamedTuple):
    """A gated function: `module:name`, or `module:Class.name`. The last part may be a pattern, such as `cu*`.

    `why` names the driver function that the gated function calls. `optional`: some versions or builds of the framework
    lack the function. With `touches`, only calls that need a GPU wait, and the gate lets all others pass. `but` are
    names that the pattern excludes, because their driver calls also return while the process is suspended.
    """

    name: str
    harm: Harm
    why: str
    optional: bool = False
    touches: Touches | None = None
    but: tuple[str, ...] = ()


class KeptType(NamedTuple):
    """A type, `module:Class`, whose objects the gate keeps alive during a suspension, because their destructors call
    the driver functions in `why`. `which` returns True for an object to keep alive; None keeps all."""

    name: str
    why: str
    which: Callable[[Any], bool] | None = None


class NativeThread(NamedTuple):
    """A C++ thread of the framework that polls the driver (`_node/suspend/gates/native_threads.py`).

    `library`: prefix of the name of the library file that stores the addresses of driver functions. `polls`: the driver
    function that the thread calls. During a suspension memguard makes this call return CUDA_SUCCESS, which must be the
    correct result for a process without GPU work, and must not signal that GPU work is done. `every`: seconds between
    two calls. `thread`: a string that the library file contains if this version starts the thread. `live`: returns True
    once the framework uses GPUs.
    """

    library: str
    polls: str
    every: float
    thread: bytes
    live: Callable[[], bool]


class Gates(NamedTuple):
    """A framework's gated functions.

    `hook` is the module that is in `sys.modules` once the framework is imported. `waits` are the functions that wait
    while the process is suspended. `later` are functions that finalizers call; their calls are deferred until the
    resume. `kept_alive` are types whose destructors call the driver; their objects, and the result of `holds`, are kept
    alive until the resume. `imports` are further modules whose import calls the driver. `not_gated` are sentences about
    calls that no gate covers. `refuses(enter)` returns a context manager in which operators, which have no Python
    function to gate, first call `enter` with a readable name, on the thread that entered the context only. `natives`
    are C++ threads that call the driver without Python.
    """

    hook: str
    waits: tuple[GatedFunction, ...]
    later: tuple[GatedFunction, ...] = ()
    kept_alive: tuple[KeptType, ...] = ()
    holds: Callable[[], object] | None = None
    imports: tuple[str, ...] = ()
    not_gated: tuple[str, ...] = ()
    refuses: Callable[[Callable[[str], None]], AbstractContextManager[object]] | None = None
    natives: tuple[NativeThread, ...] = ()


def entries(
    module: str,
    harm: Harm,
    why: str,
    names: str,
    *,
    optional: bool = False,
    touches: Touches | None = None,
    but: tuple[str, ...] = (),
) -> tuple[GatedFunction, ...]:
    """Create one `GatedFunction` for each of the space-separated names."""
    return tuple(GatedFunction(f"{module}:{name}", harm, why, optional, touches, but) for name in names.split())


def kinds(module: str, why: str, names: str, which: Callable[[Any], bool] | None = None) -> tuple[KeptType, ...]:
    """Create one `KeptType` for each of the space-separated names."""
    return tuple(KeptType(f"{module}:{name}", why, which) for name in names.split())


Modules = Mapping[str, Any]
"""Modules by name, as `sys.modules`."""
Objects = Mapping[str, list[Any]]
"""The live objects of the types in `InProcess.held`, by the name of the type's module."""


class Question(NamedTuple):
    """`read` yields one line of text for each finding. If `read` raises, the report says that `what` was not read."""

    what: str
    read: Callable[[Modules, Objects], Iterator[str]]


class InProcess(NamedTuple):
    """Functions that read one framework's state in the running process.

    `modules`: the modules that the doctor looks up in `sys.modules`, to show how far the framework is loaded. `held`:
    types whose live objects these functions inspect, as pairs of module and name; `gc` finds the objects. `shares`:
    memory that other processes share. `communicators`, `captures`, `profilers`: the active NCCL communicators, CUDA
    graph captures and profilers. `capturing`: whether this thread captures a CUDA graph. `work_areas`: bytes in use on
    this thread's current GPU that belong to no array of the program. `free_caches`: free memory that the framework
    only caches for its next call; may raise. `ranks`: the name of a library, and a function that reads its number
    of ranks (None: not distributed). `swapped`: the name of the allocator that replaced the framework's own, or None.
    """

    modules: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    shares: tuple[Question, ...] = ()
    communicators: tuple[Question, ...] = ()
    captures: tuple[Question, ...] = ()
    profilers: tuple[Question, ...] = ()
    capturing: Callable[[Modules], bool] | None = None
    work_areas: Callable[[Modules], int | None] | None = None
    free_caches: Callable[[Modules], None] | None = None
    ranks: tuple[str, Callable[[Modules], int | None]] | None = None
    swapped: Callable[[Modules], str | None] | None = None


def count(number: int, noun: str) -> str:
    """Format a number and its noun, as in `2 arrays`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class ProbeReport(Protocol):
    """Sends the probe's findings to the doctor. `_tools.doctor.facts.FrameworkFacts` defines the names of the
    fields."""

    def put(self, **facts: Any) -> None:
        """Send fields of `FrameworkFacts` to the doctor."""

    def stage(self, name: str, quiet: bool = False) -> AbstractContextManager[None]:
        """A context manager for one step of the probe: `import`, `devices` or `compute`. An exception within the step
        is reported to the doctor and ends the probe."""
        ...

    def loaded(self) -> None:
        """Send the version of the loaded cuDNN."""

    @staticmethod
    def cuda_version(number: int) -> str:
        """CUDA's version as text: 13.2 for 13020."""
        ...

    @staticmethod
    def cudnn_version(number: int) -> str:
        """cuDNN's version as text: 9.19.0 for 91900. Before version 9 the encoding differs: 8.9.2 for 8902."""
        ...
