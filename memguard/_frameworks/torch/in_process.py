"""Reads PyTorch's state in the running process, for the doctor, suspension and retries."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._devices import streams
from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question, count

_PROFILE = "torch.autograd.profiler"


def _shares(modules: Modules, _: Objects) -> Iterator[str]:
    """Yield how many tensors are shared with other processes, according to PyTorch's cache of shared storages.

    The cache's key is (handle, offset) for another process's memory that this process has opened, the handle for memory
    that this process has exported, and a file name for host memory.
    """
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
        yield f"torch.multiprocessing: {count(given, 'tensor')} given to other processes"
    if opened:
        yield f"torch.multiprocessing: {count(opened, 'tensor')} of other processes opened"


def _groups(modules: Modules, _: Objects) -> Iterator[str]:
    """Yield how many NCCL process groups exist. Each group, even if unused, has a thread that polls CUDA events."""
    distributed = modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    world = distributed._world
    names = [f"{kind} {world.pg_backend_config.get(group, '')}" for group, (kind, _) in list(world.pg_map.items())]
    groups = sum("nccl" in name.lower() for name in names)
    if groups:
        yield f"torch.distributed: {count(groups, 'process group')} of NCCL"


def _captures(modules: Modules, _: Objects) -> Iterator[str]:
    torch = modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    usual = torch.cuda.graph.default_capture_stream  # all threads share this stream
    if torch.cuda.is_current_stream_capturing() or (
        usual is not None and streams.capturing(usual.device_index, usual.cuda_stream)
    ):
        yield "torch: a capture is under way"


def _capturing(modules: Modules) -> bool:
    cuda = getattr(modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _profilers(modules: Modules, objects: Objects) -> Iterator[str]:
    """Report profilers that are recording or warming up, because CUPTI is active in both phases."""
    profiler, monitor = modules.get(_PROFILE), modules.get("torch.profiler._cupti_monitor")
    warming = any(one.enabled and one.entered and one.kineto_results is None for one in objects.get(_PROFILE, ()))
    if warming or (profiler is not None and profiler._is_profiler_enabled):
        yield "torch.profiler runs"
    if monitor is not None and monitor.get_monitor() is not None:
        yield "torch's CUPTI monitor runs"


def _free_workspaces(modules: Modules) -> None:
    """Free PyTorch's cuBLAS workspaces, as PyTorch's own tests do before they search for leaks.

    Does nothing if a CUDA graph has a private pool, because the graph may use a workspace from before its capture.
    """
    torch = modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if all(tuple(segment["segment_pool_id"]) == (0, 0) for segment in torch.cuda.memory_snapshot()):
        torch._C._cuda_clearCublasWorkspaces()


def _ranks(modules: Modules) -> int | None:
    module = modules.get("torch.distributed")
    ready = getattr(module, "is_initialized", None)
    return int(module.get_world_size()) if module is not None and ready is not None and ready() else None


def _swapped(modules: Modules) -> str | None:
    memory = modules.get("torch.cuda.memory")
    if memory is None or not hasattr(modules["torch"]._C, "_cuda_getAllocatorBackend"):
        return None
    backend = str(memory.get_allocator_backend())
    return None if backend == "native" else backend


IN_PROCESS = InProcess(
    modules=("torch",),
    held=((_PROFILE, "profile"),),
    shares=(Question("what torch.multiprocessing shares", _shares),),
    communicators=(Question("torch's process groups", _groups),),
    captures=(Question("whether torch captures a CUDA graph", _captures),),
    profilers=(Question("whether torch's profiler runs", _profilers),),
    capturing=_capturing,
    free_caches=_free_workspaces,
    ranks=("torch.distributed", _ranks),
    swapped=_swapped,
)
