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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from memguard._devices import contexts, streams
from memguard._node.suspend import native, tables

_NUMBA = "numba.cuda.cudadrv.driver"
_PROFILE = "torch.autograd.profiler"
_CUPYX = "cupyx.distributed._nccl_comm"
_HELD = ((_NUMBA, "IpcHandle"), (_PROFILE, "profile"), (_CUPYX, "NCCLBackend"))
"""Types whose objects tell, by module. Python's collector knows all of them."""
_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: the null stream may not be asked during a capture

Modules = Mapping[str, Any]
Objects = Mapping[str, list[Any]]


class Inside(NamedTuple):
    """Lines for people. `natives`: see `native.unheld`. `unseen`: what could not be asked."""

    ipc: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    profilers: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    natives: tuple[str, ...] = ()


def look(modules: Modules | None = None) -> Inside:
    """What there is now. Takes 50 ns for each object of the process, as Python's collector is asked for them.

    In the first seconds of a framework that has a thread of its own it waits for that (`native.unheld`).
    """
    modules = dict(sys.modules) if modules is None else modules
    objects, unseen = held(modules), list[str]()

    def asked(questions: Iterable[tuple[str, Callable[[], Iterator[str]]]]) -> tuple[str, ...]:
        lines: list[str] = []
        for what, question in questions:
            try:
                lines += question()
            except Exception as error:  # another version keeps it elsewhere
                unseen.append(f"{what} could not be read ({type(error).__name__})")
        return tuple(lines)

    natives = asked([("whether a framework's own threads can be held", lambda: native.unheld(tables.tables()))])
    return Inside(
        asked(
            [
                ("what memguard.exchange shares", lambda: _exchange(modules)),
                ("what torch.multiprocessing shares", lambda: _torch_shares(modules)),
                ("what Numba shares", lambda: _numba_shares(objects)),
            ]
        ),
        asked(
            [
                ("torch's process groups", lambda: _torch_groups(modules)),
                ("CuPy's communicators", lambda: _cupy_groups(objects)),
            ]
        ),
        asked(
            [
                ("whether torch captures a CUDA graph", lambda: _torch_captures(modules)),
                ("whether CuPy captures a CUDA graph", lambda: _cupy_captures(modules)),
                ("whether a CUDA graph is being captured", _any_captures),
            ]
        ),
        asked(
            [
                ("whether torch's profiler runs", lambda: _torch_profiler(modules, objects)),
                ("whether JAX's profiler runs", lambda: _jax_profiler(modules)),
                ("whether TensorFlow's profiler runs", lambda: _tensorflow_profiler(modules)),
            ]
        ),
        tuple(unseen),
        natives,
    )


def held(modules: Modules) -> Objects:
    """The objects of `_HELD`'s types, by the type's module."""
    known = [(module, getattr(modules[module], name, None)) for module, name in _HELD if module in modules]
    kinds = {id(kind): module for module, kind in known if kind is not None}
    found: dict[str, list[Any]] = {}
    for one in gc.get_objects() if kinds else ():
        module = kinds.get(id(type(one)))  # not the type itself: its metaclass may have a `__hash__` of its own
        if module is not None:
            found.setdefault(module, []).append(one)
    return found


def _exchange(modules: Modules) -> Iterator[str]:
    server = modules.get("memguard.exchange.ipc.server")
    if server is None:
        return
    offered, attached = server.current().counts()
    if offered:
        yield f"memguard.exchange: {_count(offered, 'array')} exported"
    if attached:
        yield f"memguard.exchange: {_count(attached, 'array')} of other processes attached"


def _torch_shares(modules: Modules) -> Iterator[str]:
    """Its cache has (handle, offset) for what it opened, and the handle for what it gave out; files for host memory."""
    reductions = modules.get("torch.multiprocessing.reductions")
    if reductions is None:
        return
    cache = reductions.shared_cache
    opened = given = 0
    for key, storage in list(dict.items(cache)):
        if isinstance(key, tuple):
            opened += isinstance(key[0], bytes) and not storage.expired()
        elif isinstance(key, bytes) and not key.startswith(b"/torch_"):
            given += not storage.expired()
    if given:
        yield f"torch.multiprocessing: {_count(given, 'tensor')} given to other processes"
    if opened:
        yield f"torch.multiprocessing: {_count(opened, 'tensor')} of other processes opened"


def _numba_shares(objects: Objects) -> Iterator[str]:
    handles = objects.get(_NUMBA, ())
    opened = sum(handle._impl is not None for handle in handles)
    if opened:
        yield f"numba: {_count(opened, 'IPC handle')} of other processes opened"
    if len(handles) > opened:
        yield f"numba: {_count(len(handles) - opened, 'IPC handle')} made"


def _torch_groups(modules: Modules) -> Iterator[str]:
    """Each group of NCCL's has a thread that asks CUDA for events, whether or not it was used."""
    distributed = modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    world = distributed._world
    names = [f"{kind} {world.pg_backend_config.get(group, '')}" for group, (kind, _) in list(world.pg_map.items())]
    count = sum("nccl" in name.lower() for name in names)
    if count:
        yield f"torch.distributed: {_count(count, 'process group')} of NCCL"


def _cupy_groups(objects: Objects) -> Iterator[str]:
    count = sum(getattr(one, "_comm", True) is not None for one in objects.get(_CUPYX, ()))
    if count:
        yield f"cupyx.distributed: {_count(count, 'communicator')}"


def _torch_captures(modules: Modules) -> Iterator[str]:
    torch = modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    usual = torch.cuda.graph.default_capture_stream  # of all threads: torch allows one capture at a time
    if torch.cuda.is_current_stream_capturing() or (
        usual is not None and streams.capturing(usual.device_index, usual.cuda_stream)
    ):
        yield "torch: a capture is under way"


def _cupy_captures(modules: Modules) -> Iterator[str]:
    cupy = modules.get("cupy")
    if cupy is None or contexts.current() is None:
        return
    try:
        captured = cupy.cuda.get_current_stream().is_capturing()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        captured = error.status == _IMPLICIT
    if captured:
        yield "cupy: a capture is under way"


def _any_captures() -> Iterator[str]:
    """Of any thread, on a stream that the legacy default stream waits for. Asking disturbs none."""
    known = {contexts.current_handle(), *map(contexts.primary, contexts.ordinals().values())} - {None}
    if any(streams.awaits_capture(context) for context in known if context):
        yield "a capture is under way on a blocking stream"


def _torch_profiler(modules: Modules, objects: Objects) -> Iterator[str]:
    """While it records, and while it warms up, when CUPTI works already."""
    profiler, monitor = modules.get(_PROFILE), modules.get("torch.profiler._cupti_monitor")
    warming = any(one.enabled and one.entered and one.kineto_results is None for one in objects.get(_PROFILE, ()))
    if warming or (profiler is not None and profiler._is_profiler_enabled):
        yield "torch.profiler runs"
    if monitor is not None and monitor.get_monitor() is not None:
        yield "torch's CUPTI monitor runs"


def _jax_profiler(modules: Modules) -> Iterator[str]:
    profiler = modules.get("jax._src.profiler")
    if profiler is not None and profiler._profile_state.profile_session is not None:
        yield "jax.profiler runs"


def _tensorflow_profiler(modules: Modules) -> Iterator[str]:
    profiler = modules.get("tensorflow.python.profiler.profiler_v2")
    if profiler is not None and profiler._profiler is not None:
        yield "tf.profiler runs"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
