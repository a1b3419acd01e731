"""Which frameworks a process uses a GPU with. Asks what is imported and nothing else; starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IMPORTED = {"cupy": "cupy", "pycuda": "pycuda.driver", "numba": "numba.cuda.cudadrv.driver"}
"""Frameworks that count once that module is imported: they keep no mark of having begun."""


def frameworks(modules: Mapping[str, Any]) -> tuple[str, ...]:
    """Their names in alphabetical order. An AttributeError or the like if a version keeps it elsewhere."""
    found = {name for name, module in _IMPORTED.items() if module in modules}
    if (torch := modules.get("torch")) is not None and torch.cuda.is_initialized():
        found.add("torch")
    if (bridge := modules.get("jax._src.xla_bridge")) is not None and "cuda" in bridge._backends:
        found.add("jax")
    if (eager := modules.get("tensorflow.python.eager.context")) is not None:
        context = eager.context_safe()
        if context is not None and context._context_handle is not None:
            found.add("tensorflow")
    return tuple(sorted(found))
