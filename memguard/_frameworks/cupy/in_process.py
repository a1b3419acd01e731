"""Reads CuPy's state in the running process, for `memguard doctor`, suspension and OOM retries."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from memguard._devices import contexts
from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question, count

_COMMUNICATORS = "cupyx.distributed._nccl_comm"
_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit, which a query of the null stream returns during a capture


def _groups(_: Modules, objects: Objects) -> Iterator[str]:
    groups = sum(getattr(one, "_comm", True) is not None for one in objects.get(_COMMUNICATORS, ()))
    if groups:
        yield f"cupyx.distributed: {count(groups, 'communicator')}"


def _captures(modules: Modules, _: Objects) -> Iterator[str]:
    cupy = modules.get("cupy")
    if cupy is None or contexts.current() is None:
        return
    try:
        captured = cupy.cuda.get_current_stream().is_capturing()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        captured = error.status == _IMPLICIT
    if captured:
        yield "cupy: a capture is under way"


def _capturing(modules: Modules) -> bool:
    cupy = modules.get("cupy")
    return cupy is not None and contexts.current() is not None and bool(cupy.cuda.get_current_stream().is_capturing())


def _work_areas(modules: Modules) -> int | None:
    """Bytes of CuPy's pool that the work areas of this thread's cached FFT plans use on the current GPU.

    CuPy has one plan cache for each thread and GPU. memguard does not clear these caches, because a CUDA graph may
    still use a plan's work area.
    """
    cache = modules.get("cupy.fft._cache")
    return None if cache is None else int(cache.get_plan_cache().get_curr_memsize())


def _ranks(modules: Modules) -> int | None:
    """The number of ranks of the largest `cupyx.distributed` communicator; None if there is none. Searches all Python
    objects, because CuPy keeps no list of communicators."""
    kind = getattr(modules.get(_COMMUNICATORS), "NCCLBackend", None)
    if kind is None:
        return None
    sizes = [int(getattr(one, "_n_devices", 0)) for one in gc.get_objects() if type(one) is kind]
    return max(sizes, default=None)


def _swapped(modules: Modules) -> str | None:
    cupy = modules.get("cupy")
    if cupy is None:
        return None
    allocator = cupy.cuda.get_allocator()
    pool = getattr(allocator, "__self__", None)
    if pool is not None and pool is cupy.get_default_memory_pool():
        return None
    owner = type(pool) if pool is not None else allocator
    name = getattr(owner, "__qualname__", type(allocator).__qualname__)
    module = str(getattr(owner, "__module__", type(allocator).__module__))
    return None if module.startswith("memguard.") else f"{module}.{name}"


IN_PROCESS = InProcess(
    modules=("cupy",),
    held=((_COMMUNICATORS, "NCCLBackend"),),
    communicators=(Question("CuPy's communicators", _groups),),
    captures=(Question("whether CuPy captures a CUDA graph", _captures),),
    capturing=_capturing,
    work_areas=_work_areas,
    ranks=("cupyx.distributed", _ranks),
    swapped=_swapped,
)
