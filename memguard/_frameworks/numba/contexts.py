"""Finds Numba's contexts, their memory managers and their GPUs. Creates no context."""

from __future__ import annotations

import sys
from typing import Any

from memguard._devices import contexts

DRIVER = "numba.cuda.cudadrv.driver"
ARRAYS = "numba.cuda.cudadrv.devicearray"


def numba_contexts() -> list[Any]:
    """Numba's existing primary contexts."""
    module = sys.modules.get(DRIVER)
    devices = getattr(getattr(module, "driver", None), "devices", None) or {}
    return [device.primary_context for device in list(devices.values()) if device.primary_context is not None]


def handle_of(context: Any) -> int:
    """The driver's handle of a Numba context; 0 if it has none."""
    try:
        return int(context.handle)
    except (AttributeError, TypeError, ValueError):
        return 0


def uuid_of(context: Any) -> str:
    """The UUID of a context's GPU; "" if unknown.

    The context's device is Numba's own object, or the device object of the code that created the context: a `CUdevice`
    of cuda-python, a ctypes number or a plain number. Each contains CUDA's ordinal.
    """
    device = context.device
    try:
        known = getattr(device, "uuid", None)
        if known:
            return _as_nvml(known)
        ordinal = int(getattr(device, "value", getattr(device, "id", device)))
    except (AttributeError, ReferenceError, TypeError, ValueError):  # the object was destroyed, or has another type
        return ""
    return _of_ordinal(ordinal)


def managers_on(uuid: str) -> list[Any]:
    """The memory managers of Numba's contexts on a GPU."""
    devices = getattr(getattr(sys.modules.get(DRIVER), "driver", None), "devices", None)
    if not devices:
        return []
    found = []
    for owner in list(devices.values()):
        if (context := owner.primary_context) is not None:
            try:
                here = context.device.uuid == uuid  # fast path for the usual case
            except (AttributeError, ReferenceError):
                here = False
            if here or uuid_of(context) == uuid:
                found.append(context.memory_manager)
    return found


def _of_ordinal(ordinal: int) -> str:
    driver = getattr(sys.modules.get(DRIVER), "driver", None)
    known = getattr((getattr(driver, "devices", None) or {}).get(ordinal), "uuid", None)
    if known:
        return _as_nvml(known)
    return contexts.uuid_of(ordinal)


def current_uuid() -> str:
    """The UUID of the GPU whose context is current on this thread; "" without a context."""
    ordinal = contexts.current()
    return "" if ordinal is None else _of_ordinal(ordinal)


def _as_nvml(uuid: Any) -> str:
    if type(uuid) is str and uuid[:4] == "GPU-":  # the type that Numba returns
        return uuid
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
