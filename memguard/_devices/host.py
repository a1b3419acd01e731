"""The one shape in which everything above sees GPUs: real ones (`real.py`) or simulated ones (`simulated.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memguard._types import Device, MemoryInfo


class Host(Protocol):
    """A machine with GPUs, as one process sees it. No call creates a context or initialises CUDA here.

    Every call raises DeviceError, and nothing else, where it cannot answer.
    """

    simulated: bool

    @property
    def pid(self) -> int:
        """This process, as the process list of `processes` names it."""
        ...

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        """The GPUs that CUDA shows this process, in its order where CUDA could be asked, else in NVML's.

        `ordinals` asks for CUDA's numbering even where that costs a child process.
        """
        ...

    def memory(self, device: Device) -> MemoryInfo:
        """The device's memory now (NVML `nvmlDeviceGetMemoryInfo`, v2 where the driver has it)."""
        ...

    def processes(self, device: Device) -> Mapping[int, int | None]:
        """Bytes each process holds on the device (NVML compute processes); None where NVML will not say."""
        ...

    def context_active(self, device: Device) -> bool | None:
        """Whether this process's primary context exists on the device; None where that cannot be known."""
        ...

    def multiprocessors(self, uuid: str) -> int | None:
        """The driver's count of multiprocessors, to check what a framework believes; None where unknown."""
        ...

    def close(self) -> None:
        """Give the doors back. A later call opens them again."""
        ...
