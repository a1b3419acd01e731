"""The calling process of `memguard.doctor()`: modules, contexts, allocators. Initialises nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from memguard._devices import contexts, suspension
from memguard._devices.nvml import Nvml
from memguard._frameworks import specs
from memguard._frameworks.specs import CONTEXT_MAKER
from memguard._tools.doctor.facts import Process
from memguard._tools.doctor.probes.main import libraries
from memguard.errors import DeviceError


def process(uuids: Iterable[str]) -> Process:
    """Facts of this process. `uuids`: the GPUs that NVML lists."""
    from memguard._runtime.runtime import this

    session = this.session
    known = {name for module in specs.modules("in_process") for name in module.IN_PROCESS.modules}
    return Process(
        modules=tuple(name for name in list(sys.modules) if name in known),
        libraries=tuple(libraries()),
        contexts=_context_bytes(uuids),
        foreign_context=_foreign_context(),
        allocators=allocators(sys.modules),
        budget=session is not None and session.active,
    )


def _context_bytes(uuids: Iterable[str]) -> dict[str, int | None]:
    """Bytes by the UUID of each GPU on which this process has a context; None if NVML does not say how many.

    NVML lists the host's PIDs, so a process in a container does not find its own.
    """
    found: dict[str, int | None] = {}
    if suspension.now is not None:  # a suspended process has no context
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


def _foreign_context() -> bool | None:
    """Whether this thread's context, or the one of PyCUDA's autoinit, is not a primary context; None if unknown.

    The current context is not enough: the first call of the CUDA runtime makes the primary context current.
    """
    if suspension.now is not None or CONTEXT_MAKER.hook not in sys.modules or not contexts.initialised():
        return None
    made = getattr(getattr(sys.modules.get(CONTEXT_MAKER.context_module), "context", None), "handle", None)
    known = {made if isinstance(made, int) else None, contexts.current_handle()} - {None}
    with contextlib.suppress(AttributeError, DeviceError):
        if known:
            return not known <= {contexts.primary_now(ordinal) for ordinal in contexts.ordinals().values()}
    return None


def allocators(modules: Mapping[str, Any]) -> dict[str, str]:
    """The allocator that replaces a framework's own, by framework. Reads only imported modules."""
    found: dict[str, str | None] = {}
    for module in specs.modules("in_process"):
        ask, name = module.IN_PROCESS.swapped, module.__name__.split(".")[2]
        try:
            found[name] = ask(modules) if ask is not None else None
        except Exception:  # another version of the framework: unknown
            found[name] = None
    return {name: swapped for name, swapped in found.items() if swapped is not None}
