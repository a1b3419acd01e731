"""Reads Numba's state in the running process, for `memguard doctor`, suspension and OOM retries."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question, count

_DRIVER = "numba.cuda.cudadrv.driver"


def _shares(_: Modules, objects: Objects) -> Iterator[str]:
    handles = objects.get(_DRIVER, ())
    opened = sum(handle._impl is not None for handle in handles)
    if opened:
        yield f"numba: {count(opened, 'IPC handle')} of other processes opened"
    if len(handles) > opened:
        yield f"numba: {count(len(handles) - opened, 'IPC handle')} made"


def _swapped(modules: Modules) -> str | None:
    driver = modules.get(_DRIVER)
    manager = getattr(driver, "_memory_manager", None)
    if manager is None or manager is getattr(driver, "NumbaCUDAMemoryManager", None):
        return None
    cls = manager if isinstance(manager, type) else type(manager)
    return None if cls.__module__.startswith("memguard.") else f"{cls.__module__}.{cls.__qualname__}"


IN_PROCESS = InProcess(
    modules=("numba", "numba.cuda"),
    held=((_DRIVER, "IpcHandle"),),
    shares=(Question("what Numba shares", _shares),),
    swapped=_swapped,
)
