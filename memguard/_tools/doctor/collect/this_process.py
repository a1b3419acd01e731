"""The process that called `memguard.doctor()`: modules, contexts, allocators. Initialises nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from memguard._base.specs import SPECS
from memguard._devices import contexts, suspension
from memguard._devices.nvml import Nvml
from memguard._frameworks.jax.adapter import as_mapping
from memguard._tools.doctor.facts import Process
from memguard._tools.doctor.probes.main import libraries
from memguard.errors import DeviceError

_MODULES = {
    "torch", "tensorflow", "jax", "jaxlib", "cupy", "pycuda", "pycuda.driver", "pycuda.autoinit",
    "pycuda.autoprimaryctx", "pycuda.gl.autoinit", "numba", "numba.cuda", "rmm", "keras",
}  # fmt: skip


def process(uuids: Iterable[str]) -> Process:
    """This process. `uuids`: the GPUs that NVML lists."""
    from memguard._runtime.runtime import this

    session = this.session
    return Process(
        modules=tuple(name for name in list(sys.modules) if name in _MODULES),
        libraries=tuple(libraries()),
        contexts=_bytes(uuids),
        foreign_context=_foreign(),
        allocators=allocators(sys.modules),
        budget=session is not None and session.active,
    )


def _bytes(uuids: Iterable[str]) -> dict[str, int | None]:
    """Bytes by the UUID of each GPU on which this process has a context; None if NVML does not say how many.

    NVML lists the host's PIDs, so a process in a container does not find its own.
    """
    found: dict[str, int | None] = {}
    if suspension.now is not None:  # it has none on any
        return found
    nvml = Nvml()
    try:
        for uuid in uuids:
            with contextlib.suppress(DeviceError):
                processes = nvml.processes(uuid)
                if os.getpid() in processes:
                    found[uuid] = processes[os.getpid()]
    finally:
        nvml.close()
    with contextlib.suppress(DeviceError):
        for uuid, ordinal in contexts.ordinals().items():
            if contexts.active(ordinal) is not False or contexts.current() == ordinal:
                found.setdefault(uuid, None)
    return found


def _foreign() -> bool | None:
    """Whether this thread's context, or the one that `pycuda.autoinit` made, is not a primary one; None if unknown.

    The current context is not enough: the first call of the CUDA runtime, as PyTorch's, makes the primary one current.
    """
    if suspension.now is not None or "pycuda.driver" not in sys.modules or not contexts.initialised():
        return None
    made = getattr(getattr(sys.modules.get("pycuda.autoinit"), "context", None), "handle", None)
    known = {made if isinstance(made, int) else None, contexts.current_handle()} - {None}
    with contextlib.suppress(AttributeError, DeviceError):
        if known:
            return not known <= {contexts.primary_now(ordinal) for ordinal in contexts.ordinals().values()}
    return None


def allocators(modules: Mapping[str, Any]) -> dict[str, str]:
    """What replaces a framework's own allocator, by framework. Asks only frameworks that are imported."""
    found: dict[str, str | None] = {}
    for name, ask in (("torch", _torch), ("cupy", _cupy), ("jax", _jax), ("numba", _numba)):
        try:
            found[name] = ask(modules)
        except Exception:  # another version has it elsewhere: unknown
            found[name] = None
    return {name: swapped for name, swapped in found.items() if swapped is not None}


def _torch(modules: Mapping[str, Any]) -> str | None:
    memory = modules.get("torch.cuda.memory")
    if memory is None or not hasattr(modules["torch"]._C, "_cuda_getAllocatorBackend"):
        return None
    backend = str(memory.get_allocator_backend())
    return None if backend == "native" else backend


def _cupy(modules: Mapping[str, Any]) -> str | None:
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


def _jax(modules: Mapping[str, Any]) -> str | None:
    """The allocator that its client options name, if no cap can be set on it."""
    options = modules["jax"].config.jax_pjrt_client_create_options if "jax" in modules else None
    allocator = str(as_mapping(options).get("allocator", ""))
    return None if SPECS["jax"].allocators.why_uncapped(allocator) is None else allocator


def _numba(modules: Mapping[str, Any]) -> str | None:
    driver = modules.get("numba.cuda.cudadrv.driver")
    manager = getattr(driver, "_memory_manager", None)
    if manager is None or manager is getattr(driver, "NumbaCUDAMemoryManager", None):
        return None
    cls = manager if isinstance(manager, type) else type(manager)
    return None if cls.__module__.startswith("memguard.") else f"{cls.__module__}.{cls.__qualname__}"
