"""The interface through which the rooms above see GPUs: real ones (`real.py`) or simulated ones (`simulated.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memguard._base.types import Device, MemoryInfo


class Host(Protocol):
    """A machine with GPUs, as one process sees it. No call creates a context or initialises CUDA here.

    A call that cannot answer raises DeviceError and nothing else.
    """

    simulated: bool
    spills: bool
    """Whether the driver may serve allocations beyond a GPU's memory from the machine's, as under WSL."""

    @property
    def pid(self) -> int:
        """This process's PID in `processes`."""
        ...

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        """The GPUs that CUDA shows this process, in CUDA's order if CUDA could be asked, else in NVML's.

        `ordinals` asks for CUDA's numbering even if that takes a child process.
        """
        ...

    def memory(self, device: Device) -> MemoryInfo:
        """The device's memory now (NVML `nvmlDeviceGetMemoryInfo`, v2 if the driver has it).

        Of a device with unified memory: what CUDA and the machine say.
        """
        ...

    def processes(self, device: Device) -> Mapping[int, int | None]:
        """Bytes each process holds on the device (NVML compute processes); None if NVML gives none."""
        ...

    def context_active(self, device: Device) -> bool | None:
        """Whether this process's primary context exists on the device; None if unknown."""
        ...

    def libraries(self) -> frozenset[str]:
        """Those of `LIBRARIES` that this process has loaded; all of them if that cannot be read."""
        ...

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        """How many looks have found each of `DOORS` entered, with its name; without those of which nothing tells.

        Only what `libraries` has seen is known. Not `mark`: the next look is to find what this one has found.
        """
        ...

    def multiprocessors(self, uuid: str) -> int | None:
        """The driver's count of multiprocessors, to check what a framework believes; None if unknown."""
        ...

    def close(self) -> None:
        """Release NVML. A later call opens it again."""
        ...
