"""The driver's checkpoint of a whole process: lock it, copy its GPU memory to the host, and restore it.

`cuCheckpointProcess*` of the CUDA driver API, driver 570 and later. Each call may take as long as the copy, or hang (a
stopped target). Only the helper process (`_node/suspend/driver/helper.py`) makes these calls.
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

# CUresult values, with their meaning as observed on an H200 with driver 580.159.
SUCCESS = 0
INVALID_VALUE = 1
"""Restore: the process has opened another process's CUDA IPC handle. The driver destroys it."""
OUT_OF_MEMORY = 2
"""Restore: too little free GPU memory. The driver destroys the process."""
NOT_INITIALIZED = 3
"""The process has not initialised CUDA."""
OPERATING_SYSTEM = 304
"""No such process, or another user's process. Also returned by a restore after a failed restore."""
ILLEGAL_STATE = 401
"""The call does not fit the state: a second lock, or a checkpoint without a lock. Harmless."""
NOT_READY = 600
"""Lock: the timeout ended before the GPU's work did. The process continues to run."""
NOT_SUPPORTED = 801
"""Checkpoint: the process has managed memory. It stays locked, and can be unlocked."""


class State(IntEnum):
    """`CUprocessState` of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    """The process's CUDA calls block."""
    CHECKPOINTED = 2
    """The process's GPU memory is copied to the host, and the process uses no GPU."""
    FAILED = 3
    """The process cannot be restored."""


class Checkpoint(Protocol):
    """The driver's five calls. Each returns a CUresult, 0 for success."""

    def state(self, pid: int) -> tuple[int, State | None]:
        """A CUresult and the state of the process, None if the call failed. Blocks while another operation runs."""

    def lock(self, pid: int, timeout_ms: int) -> int:
        """RUNNING to LOCKED, once the GPU's work is done. Returns 600 after the timeout; 0 waits without limit."""

    def checkpoint(self, pid: int) -> int:
        """LOCKED to CHECKPOINTED."""

    def restore(self, pid: int) -> int:
        """CHECKPOINTED to LOCKED. Without free memory for all its bytes, the driver destroys the process."""

    def unlock(self, pid: int) -> int:
        """LOCKED to RUNNING."""


class Driver:
    """The driver's own calls. DeviceError if libcuda cannot be loaded or initialised here, or is too old."""

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
