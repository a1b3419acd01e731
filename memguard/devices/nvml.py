"""NVML, the only door to it. Reading NVML creates no context and initialises no CUDA.

Quirks handled here, each a read or measured fact: NVML must be initialised again after a fork;
`NVMLLibraryMismatchError` is no `NVMLError`; `usedGpuMemory` is None under WSL and some MIG and vGPU
set-ups; drivers 535.43 to 535.85 swap fields of the process list, so their bytes are not believed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from memguard.errors import DeviceError
from memguard.model import Device, MemoryInfo

T = TypeVar("T")

_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
}
_FIXES = {
    "NVMLError_LibraryNotFound": "install the NVIDIA driver; in a container start it with --gpus all",
    "NVMLError_DriverNotLoaded": "load the NVIDIA kernel module (`nvidia-smi` must work first)",
    "NVMLError_LibRmVersionMismatch": "the driver was updated while loaded: reboot, or reload the kernel module",
    "NVMLLibraryMismatchError": "update the NVIDIA driver, or install an nvidia-ml-py that matches it",
    "NVMLError_NoPermission": "run as a user who may open /dev/nvidia*",
    "NVMLError_GpuIsLost": "the GPU fell off the bus: reset it or reboot the machine",
}


class Nvml:
    """NVML for one process. Thread-safe. Every failure is a DeviceError that names the cause and the fix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._handles: dict[str, Any] = {}
        self._v2 = True
        self._bytes_believed = True

    def devices(self) -> tuple[Device, ...]:
        """Every GPU of the machine in NVML's order, whatever CUDA_VISIBLE_DEVICES says."""
        return self._call(self._devices)

    def memory(self, uuid: str) -> MemoryInfo:
        """nvmlDeviceGetMemoryInfo_v2; v1 (no `reserved`) on drivers that lack it. 8 µs on an H200."""
        return self._call(lambda n: self._memory(n, self._handle(uuid)))

    def processes(self, uuid: str) -> dict[int, int | None]:
        """Bytes by PID of every compute process; None where NVML gives no bytes. 40 µs on an H200."""
        return self._call(lambda n: self._processes(n, self._handle(uuid)))

    def mig(self, uuid: str) -> bool:
        """Whether the GPU is divided by MIG, whose parts this version does not know."""
        return self._call(lambda n: self._mig(n, self._handle(uuid)))

    def close(self) -> None:
        """Give NVML back (nvmlShutdown). The next call initialises it again."""
        with self._lock:
            if self._pid == os.getpid():
                import pynvml

                with contextlib.suppress(pynvml.NVMLError):  # the driver went away: nothing is left to give back
                    pynvml.nvmlShutdown()
            self._pid = None
            self._handles.clear()

    def _call(self, work: Callable[[Any], T]) -> T:
        with self._lock:
            try:
                import pynvml
            except ImportError as error:
                raise DeviceError(f"NVML: {error}\n    fix: pip install nvidia-ml-py") from error
            try:
                if self._pid != os.getpid():  # first use, or after a fork: the parent's handles are void here
                    pynvml.nvmlInit()
                    self._handles.clear()
                    self._probe(pynvml)
                    self._pid = os.getpid()  # last: what failed on the way starts anew
                return work(pynvml)
            except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
                name = type(error).__name__
                fix = _FIXES.get(name, "run `nvidia-smi` to see what the driver says")
                raise DeviceError(f"NVML: {error}\n    fix: {fix}") from error

    def _probe(self, n: Any) -> None:
        for index in range(n.nvmlDeviceGetCount()):
            handle = n.nvmlDeviceGetHandleByIndex(index)
            self._handles[n.nvmlDeviceGetUUID(handle)] = handle
        version = tuple(int(part) for part in n.nvmlSystemGetDriverVersion().split(".")[:2] if part.isdigit())
        self._bytes_believed = not (535, 43) <= version <= (535, 85)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            raise DeviceError(f"NVML sees no GPU {uuid} any more\n    fix: check `nvidia-smi -L`")
        return self._handles[uuid]

    def _devices(self, n: Any) -> tuple[Device, ...]:
        found = []
        for index, (uuid, handle) in enumerate(self._handles.items()):
            name = n.nvmlDeviceGetName(handle)
            info = self._memory(n, handle)
            found.append(Device(uuid, name, index, info.total, info.reserved, self._architecture(n, handle)))
        return tuple(found)

    def _memory(self, n: Any, handle: Any) -> MemoryInfo:
        if self._v2:
            try:
                info = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
                return MemoryInfo(info.total, info.reserved, info.used, info.free)
            except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError):
                self._v2 = False
        info = n.nvmlDeviceGetMemoryInfo(handle)
        return MemoryInfo(info.total, None, info.used, info.free)

    def _processes(self, n: Any, handle: Any) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for process in n.nvmlDeviceGetComputeRunningProcesses(handle):
            size = process.usedGpuMemory if self._bytes_believed else None
            before = found.get(process.pid, 0)
            found[process.pid] = None if size is None or before is None else before + size
        return found

    @staticmethod
    def _architecture(n: Any, handle: Any) -> str:
        try:
            return _ARCHITECTURES.get(n.nvmlDeviceGetArchitecture(handle), "unknown")
        except (n.NVMLError, AttributeError):
            return "unknown"

    @staticmethod
    def _mig(n: Any, handle: Any) -> bool:
        try:
            return bool(n.nvmlDeviceGetMigMode(handle)[0])
        except n.NVMLError:
            return False
