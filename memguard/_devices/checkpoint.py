"""A process as a whole, seen by the driver: locked, copied into its host memory, and brought back.

`cuCheckpointProcess*` of the CUDA driver API, driver 570 and later. Every call may take as long as the copy does, or
hang (a stopped target), so only the helper process (`_node/suspend/helper.py`) makes them.
"""

from __future__ import annotations

from ctypes import c_int
from enum import IntEnum
from typing import Protocol

from memguard._base.advice import Advice
from memguard._devices import libcuda
from memguard.errors import DeviceError

TOO_OLD = Advice(
    "this driver cannot suspend a process (it has no cuCheckpointProcessLock)",
    "update the NVIDIA driver to version 570 or later",
)

# What the calls return (CUresult), as an H200 with driver 580.159 gave it.
SUCCESS = 0
INVALID_VALUE = 1
"""A restore of a process that has opened another's CUDA IPC handle. It is destroyed."""
OUT_OF_MEMORY = 2
"""A restore that found too little free memory. The process is destroyed."""
NOT_INITIALIZED = 3
"""The process has not initialised CUDA."""
OPERATING_SYSTEM = 304
"""No such process, or another user's; also what a restore gives after one that failed."""
ILLEGAL_STATE = 401
"""The call does not fit the state: locked twice, checkpointed without a lock. Harmless."""
NOT_READY = 600
"""The lock's time was over before the GPU's work was. The process runs on."""
NOT_SUPPORTED = 801
"""A checkpoint of a process with managed memory. It stays locked, and can be unlocked."""


class State(IntEnum):
    """`CUprocessState` of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    """Its CUDA calls wait."""
    CHECKPOINTED = 2
    """Its memory lies in host memory, and it has no GPU."""
    FAILED = 3
    """It cannot be brought back."""


class Checkpoint(Protocol):
    """The driver's five calls. Each returns a CUresult, 0 for success."""

    def state(self, pid: int) -> tuple[int, State | None]:
        """With the state of the process; None if the call failed. Waits while an operation is under way."""

    def lock(self, pid: int, timeout_ms: int) -> int:
        """RUNNING to LOCKED, once the GPU's work is done; 600 after that time. 0 waits without a limit."""

    def checkpoint(self, pid: int) -> int:
        """LOCKED to CHECKPOINTED."""

    def restore(self, pid: int) -> int:
        """CHECKPOINTED to LOCKED. Without room for all of it, the process is destroyed."""

    def unlock(self, pid: int) -> int:
        """LOCKED to RUNNING."""


class Driver:
    """The real calls. DeviceError if libcuda cannot be loaded or started here, or is too old."""

    def __init__(self) -> None:
        try:
            self._cuda = libcuda.load()
        except OSError as error:
            raise DeviceError(
                f"CUDA: {error}", fix="install the NVIDIA driver; in a container start it with --gpus all"
            ) from None
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise DeviceError(TOO_OLD)
        libcuda.check("cuInit", self._cuda.cuInit(0))

    def state(self, pid: int) -> tuple[int, State | None]:
        found = c_int(-1)
        code = self._cuda.cuCheckpointProcessGetState(pid, found)
        return code, State(found.value) if not code and found.value in State._value2member_map_ else None

    def lock(self, pid: int, timeout_ms: int) -> int:
        return self._cuda.cuCheckpointProcessLock(pid, libcuda.CUcheckpointLockArgs(timeout_ms))

    def checkpoint(self, pid: int) -> int:
        return self._cuda.cuCheckpointProcessCheckpoint(pid, libcuda.CUcheckpointCheckpointArgs())

    def restore(self, pid: int) -> int:
        return self._cuda.cuCheckpointProcessRestore(pid, libcuda.CUcheckpointRestoreArgs())

    def unlock(self, pid: int) -> int:
        return self._cuda.cuCheckpointProcessUnlock(pid, libcuda.CUcheckpointUnlockArgs())
