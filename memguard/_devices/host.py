"""The interface through which memguard accesses GPUs: real ones (`real.py`) or simulated ones (`simulated.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memguard._base.types import Device, MemoryInfo


class Host(Protocol):
    """A machine with GPUs, from the view of one process. No call creates a context or initialises CUDA in this process.

    A failed call raises DeviceError and nothing else.
    """

    simulated: bool
    spills: bool
    """True if the driver may place allocations that exceed a GPU's memory in host memory, as under WSL."""

    @property
    def pid(self) -> int:
        """This process's PID in `processes`."""
        ...

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        """The GPUs that this process can use, in CUDA's order if CUDA could be read, else in NVML's order.

        With `ordinals=True`, CUDA's order is read even if that takes a child process.
        """
        ...

    def memory(self, device: Device) -> MemoryInfo:
        """The device's memory now (NVML `nvmlDeviceGetMemoryInfo`, v2 if the driver has it).

        For unified memory, the figures come from CUDA and /proc/meminfo.
        """
        ...

    def processes(self, device: Device) -> Mapping[int, int | None]:
        """Bytes of each compute process on the device, by PID (NVML); None if NVML reports no bytes."""
        ...

    def context_active(self, device: Device) -> bool | None:
        """Whether this process's primary context exists on the device; None if unknown."""
        ...

    def libraries(self) -> frozenset[str]:
        """The `LIBRARIES` that this process has loaded; all of them if the list cannot be read."""
        ...

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        """Each observable library of `ENTRY_POINTS`, with the number of polls that found it entered.

        A library is entered if a thread ran one of its entry functions since the poll before. Covers only libraries
        that `libraries` has found. With `mark=False`, the next poll counts the same entries again.
        """
        ...

    def multiprocessors(self, uuid: str) -> int | None:
        """The driver's count of multiprocessors, to check a framework's count; None if unknown."""
        ...

    def close(self) -> None:
        """Shut NVML down. A later call of another method initialises NVML again."""
        ...
