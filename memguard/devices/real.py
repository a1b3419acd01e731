"""The GPUs of this machine: NVML's figures joined with CUDA's numbering, by UUID and never by index."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace

from memguard.devices import cuda
from memguard.devices.nvml import Nvml
from memguard.errors import DeviceError
from memguard.model import Device, MemoryInfo

_log = logging.getLogger("memguard")


class RealHost:
    """`Host` over NVML and, where `cuda-bindings` is installed, libcuda."""

    simulated = False

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise DeviceError(
                f"memguard budgets NVIDIA GPUs on Linux; this is {sys.platform}\n"
                "    fix: run on Linux, or try a budget with memguard.init(..., simulate='h200')"
            )
        self._nvml = Nvml()
        self._lock = threading.Lock()
        self._cuda: tuple[cuda.CudaDevice, ...] | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        all_of_them = self._nvml.devices()
        if not all_of_them:
            raise DeviceError("NVML sees no GPU\n    fix: check `nvidia-smi -L`; in a container pass --gpus all")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = self._visible(all_of_them, hidden, ordinals)
        for device in found:
            if self._nvml.mig(device.uuid):
                raise DeviceError(
                    f"{device.name} ({device.uuid}) has MIG enabled, which this version does not support\n"
                    "    fix: choose another GPU with CUDA_VISIBLE_DEVICES, or disable MIG on this one"
                )
        return found

    def _visible(self, all_of_them: tuple[Device, ...], hidden: str | None, ordinals: bool) -> tuple[Device, ...]:
        asked = self._ask(child=hidden is not None or (ordinals and len(all_of_them) > 1))
        if asked is None:
            if hidden is not None:
                _log.warning(
                    "CUDA_VISIBLE_DEVICES=%s, but CUDA could not be asked which GPUs that means: budgeting all %d. "
                    "fix: pip install 'memguard[cuda]'",
                    hidden,
                    len(all_of_them),
                )
            return all_of_them if len(all_of_them) > 1 else (replace(all_of_them[0], ordinal=0),)
        by_uuid = {device.uuid: device for device in all_of_them}
        shown = [replace(by_uuid[c.uuid], ordinal=c.ordinal) for c in asked if c.uuid in by_uuid]
        if not shown:
            raise DeviceError(
                f"CUDA shows this process no GPU (CUDA_VISIBLE_DEVICES={hidden!r}); NVML sees {len(all_of_them)}\n"
                "    fix: unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists"
            )
        return tuple(shown)

    def memory(self, device: Device) -> MemoryInfo:
        return self._nvml.memory(device.uuid)

    def processes(self, device: Device) -> Mapping[int, int | None]:
        return self._nvml.processes(device.uuid)

    def context_active(self, device: Device) -> bool | None:
        asked = self._ask(child=False)
        if asked is None:  # CUDA is initialised and cuda-bindings missing, or nothing has initialised it
            return None if cuda.initialised() else False
        ordinal = next((c.ordinal for c in asked if c.uuid == device.uuid), None)
        return None if ordinal is None else cuda.context_active(ordinal)

    def multiprocessors(self, uuid: str) -> int | None:
        """The driver's own count, to check what a framework believes; None where CUDA cannot be asked."""
        return next((c.multiprocessors for c in self._ask(child=False) or () if c.uuid == uuid), None)

    def close(self) -> None:
        self._nvml.close()

    def _ask(self, *, child: bool) -> tuple[cuda.CudaDevice, ...] | None:
        with self._lock:
            if self._cuda is None:  # what CUDA shows cannot change once it was initialised
                self._cuda = cuda.visible(ask_child=child)
            return self._cuda
