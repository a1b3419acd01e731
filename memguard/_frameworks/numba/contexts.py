"""Finds Numba's contexts, their memory managers and their GPUs, without creating a context."""

from __future__ import annotations

import sys
from typing import Any

from memguard._devices import contexts

DRIVER = "numba.cuda.cudadrv.driver"
ARRAYS = "numba.cuda.cudadrv.devicearray"


def numba_contexts() -> list[Any]:
    """Numba's context objects for the primary contexts that exist."""
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

    `context.device` is Numba's own device object, or the object that the creator of the context passed (cuda-python's
    `CUdevice`, a ctypes integer or a plain integer). Each of these contains CUDA's ordinal.
    """
    device = context.device
    try:
        known = getattr(device, "uuid", None)
        if known:
            return _as_nvml(known)
        ordinal = int(getattr(device, "value", getattr(device, "id", device)))
    except (AttributeError, ReferenceError, TypeError, ValueError):  # destroyed object, or unknown type
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
                here = context.device.uuid == uuid  # fast path: `device` is usually Numba's own object
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
    if type(uuid) is str and uuid[:4] == "GPU-":  # fast path: Numba returns this form
        return uuid
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
