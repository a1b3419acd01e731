"""The GPUs of this machine: joins NVML's figures with CUDA's ordinals, by UUID and never by index."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._base.types import Device, MemoryInfo
from memguard._devices import contexts, cuda_order, proc
from memguard._devices.nvml import Nvml, mig_advice
from memguard.errors import DeviceError

_ELSEWHERE = {
    "darwin": ("this is macOS (darwin), which has no CUDA", "run on Linux"),
    "win32": ("this is Windows (win32)", "run on Linux, or in WSL 2, which is Linux to memguard"),
}


class RealHost:
    """`Host` over NVML and CUDA. A child process reads CUDA's order if CUDA is not initialised here."""

    simulated = False

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            here, fix = _ELSEWHERE.get(sys.platform, (f"this is {sys.platform}", "run on Linux"))
            raise DeviceError(
                f"memguard budgets NVIDIA GPUs on Linux, and {here}",
                fix=f"{fix}; or try a budget with memguard.init(..., simulate='h200')",
                missing=True,
            )
        if not getattr(sys, "_is_gil_enabled", lambda: True)():  # Python 3.13
            raise DeviceError(
                "this Python runs without the GIL (a free-threaded one), and the frameworks' memory was never capped "
                "under such a one",
                fix="set PYTHON_GIL=1 before Python starts, or use an ordinary Python; "
                "or try a budget with memguard.init(..., simulate='h200')",
            )
        self._nvml = Nvml()
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self.spills = proc.is_wsl(os.uname().release)
        self._cuda: tuple[contexts.VisibleDevice, ...] | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        all_of_them = self._nvml.devices()
        refused = self._nvml.refused
        if not all_of_them:
            nothing = Advice("NVML sees no GPU", "check `nvidia-smi -L`; in a container pass --gpus all")
            raise DeviceError(refused[0] if refused else nothing, missing=not refused)
        found = self._visible(all_of_them, ordinals)
        for device in found:
            if self._nvml.mig(device.uuid):
                raise DeviceError(mig_advice(device.name, device.uuid))
        return found

    def _visible(self, all_of_them: tuple[Device, ...], ordinals: bool) -> tuple[Device, ...]:
        hidden, refused = os.environ.get("CUDA_VISIBLE_DEVICES"), self._nvml.refused
        # CUDA reads the variable only at its initialisation
        if cuda_order.hides_all(hidden) and not contexts.initialised():
            raise DeviceError(_shows_none(hidden, len(all_of_them)), missing=True)
        alone = len(all_of_them) == 1 and not refused
        silent = next((device for device in all_of_them if device.unified), None)
        visible = self._ask(child=hidden is not None or silent is not None or (ordinals and not alone))
        if visible is None and silent is not None:
            raise DeviceError(
                f"NVML does not report the memory of {silent.name} ({silent.uuid}), and CUDA could not be asked",
                fix="run `memguard doctor` to see why CUDA does not start",
            )
        if visible is None:
            if hidden is not None:
                _log.warning(
                    "CUDA_VISIBLE_DEVICES=%s, but CUDA could not be asked which GPUs that means: budgeting all %d. "
                    "fix: run `memguard doctor` to see why CUDA does not start",
                    hidden,
                    len(all_of_them),
                )
            return (replace(all_of_them[0], ordinal=0),) if alone else all_of_them
        if not visible:
            # With the variable unset, CUDA fails to use an existing GPU, which is not a missing GPU.
            raise DeviceError(_shows_none(hidden, len(all_of_them)), missing=hidden is not None)
        by_uuid = {device.uuid: device for device in all_of_them}
        for gpu in visible:
            if gpu.uuid not in by_uuid:  # a MIG instance, or a GPU that NVML omits: memguard cannot cap it
                parted = (mig_advice(device.name, device.uuid) for device in all_of_them if self._nvml.mig(device.uuid))
                unlisted = Advice(f"CUDA shows {gpu.uuid}, and NVML does not", "compare with `nvidia-smi -L`")
                raise DeviceError(next(parted, refused[0] if refused else unlisted))
        return tuple(_joined(by_uuid[gpu.uuid], gpu) for gpu in visible)

    def memory(self, device: Device) -> MemoryInfo:
        if not device.unified:
            return self._nvml.memory(device.uuid)
        by_cuda = None if device.ordinal is None else contexts.free_memory(device.ordinal)
        known = [size for size in (proc.available_memory(), by_cuda) if size is not None]
        if not known:
            raise DeviceError(
                f"{device.name} uses the machine's memory, and /proc/meminfo does not say how much is available",
                fix="mount /proc where this process runs",
            )
        return MemoryInfo(device.total, None, None, min(max(known), device.total), by_cuda)

    def processes(self, device: Device) -> Mapping[int, int | None]:
        return self._nvml.processes(device.uuid)

    def context_active(self, device: Device) -> bool | None:
        visible = self._cuda or self._ask(child=False)  # constant once known, so read without the lock
        if visible is None:  # nothing has initialised CUDA
            return False
        for gpu in visible:
            if gpu.uuid == device.uuid:
                return contexts.active(gpu.ordinal)
        return None

    def libraries(self) -> frozenset[str]:
        from memguard._devices import loaded_libraries  # imported by the first reading, so that init stays fast

        return loaded_libraries.entry_detector.libraries()

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        from memguard._devices import loaded_libraries

        return loaded_libraries.entry_detector.entries(mark)

    def multiprocessors(self, uuid: str) -> int | None:
        """The driver's count of multiprocessors, to check a framework's count; None if CUDA cannot be read."""
        return next((c.multiprocessors for c in self._ask(child=False) or () if c.uuid == uuid), None)

    def close(self) -> None:
        self._nvml.close()

    def _ask(self, *, child: bool) -> tuple[contexts.VisibleDevice, ...] | None:
        with self._lock:
            if self._cuda is None:  # after cuInit, the visible GPUs cannot change
                self._cuda = cuda_order.visible(ask_child=child)
            return self._cuda


def _joined(device: Device, gpu: contexts.VisibleDevice) -> Device:
    """NVML's device with CUDA's ordinal, and with CUDA's total for unified memory."""
    if not device.unified:
        return replace(device, ordinal=gpu.ordinal)
    if not gpu.integrated or not gpu.total:
        raise DeviceError(
            f"NVML does not report the memory of {device.name} ({device.uuid}), and CUDA does not say that it uses the "
            "machine's",
            fix="run `nvidia-smi` and check the driver, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )
    return replace(device, ordinal=gpu.ordinal, total=gpu.total)


def _shows_none(visible_devices: str | None, count: int) -> Advice:
    return Advice(
        f"CUDA shows this process no GPU (CUDA_VISIBLE_DEVICES={visible_devices!r}); NVML sees {count}",
        "unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists",
    )
