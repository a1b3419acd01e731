"""The driver calls of the suspend helper: the checkpoint of a whole process, and the GPU memory that its restore needs.

`cuCheckpointProcess*` of the CUDA driver API, driver 570 and later, lock a process, copy its GPU memory to the host,
and restore it. Each call may block as long as the copy takes, or for ever if the target process is stopped (SIGSTOP).
Only the helper process (`_node/suspend/driver/helper.py`) makes these calls.

The driver allocates a restored process's bytes in the first 30 ms of the restore (H200, driver 580.159), and destroys
the process if they are not free. Reading the number of free bytes reserves nothing: another process may allocate them
before the restore. So the helper allocates the bytes itself (`MemoryPlaceholder`), and frees them as the restore
begins.

To allocate, the helper needs a context of its own (about 0.5 GiB on an H200). If the GPU has enough memory for both the
context and the process, the context stays, and `MemoryPlaceholder.release` frees only the blocks, in milliseconds.
Otherwise the context counts towards the wanted bytes, and `release` destroys it too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from memguard._base.advice import Advice
from memguard._base.units import GRANULE, MIB, format_size, round_down, round_up
from memguard._devices import libcuda
from memguard.errors import DeviceError

TOO_OLD = Advice(
    "this driver cannot suspend a process (it has no cuCheckpointProcessLock)",
    "update the NVIDIA driver to version 570 or later",
)

# CUresult values, with their meaning as observed on an H200 with driver 580.159.
SUCCESS = 0
INVALID_VALUE = 1
"""Restore: the process has opened another process's CUDA IPC handle. The driver destroys the process."""
OUT_OF_MEMORY = 2
"""Restore: too little free GPU memory. The driver destroys the process."""
NOT_INITIALIZED = 3
"""The process has not initialised CUDA."""
OPERATING_SYSTEM = 304
"""No such process, or another user's process. Also returned by a restore after a failed restore."""
ILLEGAL_STATE = 401
"""The process's state forbids the call: a second lock, or a checkpoint without a lock. Harmless."""
NOT_READY = 600
"""Lock: the timeout ended before the GPU's work did. The process continues to run."""
NOT_SUPPORTED = 801
"""Checkpoint: the process has managed memory. The process remains locked, and can be unlocked."""
MARGIN = 4 * MIB
"""Free bytes that a restore requires in addition to the process's bytes. A restore succeeded with 1.5 MiB more, and
failed with 0.4 MiB less (H200)."""


class State(IntEnum):
    """`CUprocessState` of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    """The process's CUDA calls block."""
    CHECKPOINTED = 2
    """The process's GPU memory is copied to the host, and the process uses no GPU."""
    FAILED = 3
    """The process cannot be restored."""
    CHECKPOINTING = 4
    """A checkpoint is in progress. CUDA 13.0's header lacks CHECKPOINTING and RESTORING, 13.5's has them. An older
    driver blocks the query until the operation has ended."""
    RESTORING = 5
    """A restore is in progress."""


IN_PROGRESS = (State.CHECKPOINTING, State.RESTORING)
"""The transient states, which end without another call."""


class Checkpoint(Protocol):
    """The driver's five checkpoint calls. Each returns a CUresult, 0 for success."""

    def state(self, pid: int) -> tuple[int, State | None]:
        """A CUresult and the state of the process, None if the call failed. Blocks while another operation runs."""

    def lock(self, pid: int, timeout_ms: int) -> int:
        """Change the state from RUNNING to LOCKED after the process's GPU work is done. Returns NOT_READY after the
        timeout; `timeout_ms` 0 waits without limit."""

    def checkpoint(self, pid: int) -> int:
        """Copy the GPU memory to the host: LOCKED to CHECKPOINTED."""

    def restore(self, pid: int) -> int:
        """Copy the memory back: CHECKPOINTED to LOCKED. If too little GPU memory is free, the driver destroys the
        process."""

    def unlock(self, pid: int) -> int:
        """Let the process's CUDA calls continue: LOCKED to RUNNING."""


class Driver:
    """Makes the driver's calls. Raises DeviceError if libcuda cannot be loaded or initialised, or is too old."""

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


def pieces(wanted: int, free: int, context: int) -> tuple[int, bool] | None:
    """The number of bytes to allocate so that `wanted` bytes are free after `release`, and whether the context stays.

    `free`: the GPU's free bytes while the helper's context of `context` bytes exists. Returns None if `free` is too
    small. Pure.
    """
    if free >= wanted:
        return round_up(wanted), True
    rest = wanted - context
    if free >= rest:
        return max(0, round_up(rest)), False
    return None


@dataclass
class _GpuBlocks:
    device: int
    context: c_void_p
    keeps: bool = True
    """True if `release` frees only the blocks and not the context."""
    blocks: list[int] = field(default_factory=list)


class MemoryPlaceholder:
    """GPU memory that this process allocates to keep it free for a restore, by GPU (UUID). Not thread-safe."""

    def __init__(self) -> None:
        self._cuda = libcuda.load()
        libcuda.check("cuInit", self._cuda.cuInit(0))
        self._held: dict[str, _GpuBlocks] = {}

    def hold(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Allocate the bytes in `wanted`, keyed by GPU UUID, on every GPU or on none.

        Returns the bytes that `release` will free, including contexts that will not stay. Raises DeviceError if a GPU
        has too little free memory, or is not visible to this process.
        """
        self.release()
        held = {}
        try:
            for uuid, size in sorted(wanted.items()):
                held[uuid] = self._hold(uuid, size + MARGIN)
        except BaseException:
            self.release(all_of_it=True)
            raise
        return held

    def _hold(self, uuid: str, wanted: int) -> int:
        from memguard._devices.nvml import Nvml

        cuda, nvml = self._cuda, Nvml()
        entry = _GpuBlocks(self._device(uuid), c_void_p())
        code = cuda.cuDevicePrimaryCtxRetain(entry.context, entry.device)
        if code == OUT_OF_MEMORY:
            raise DeviceError(_lacking(uuid, wanted, nvml.memory(uuid).free))
        libcuda.check("cuDevicePrimaryCtxRetain", code)
        self._held[uuid] = entry
        free = nvml.memory(uuid).free
        own = nvml.processes(uuid).get(os.getpid())
        found = pieces(wanted, free, own or 0)
        if found is None:
            raise DeviceError(_lacking(uuid, wanted, free + (own or 0)))
        size, entry.keeps = found
        with self._current(entry):
            self._allocate(entry, size, uuid, wanted)
        return size + (0 if entry.keeps else own or 0)

    def _allocate(self, entry: _GpuBlocks, size: int, uuid: str, wanted: int) -> None:
        """Allocate `size` bytes in as few blocks as possible, because each block takes time to free."""
        piece, address = size, c_uint64()
        while size > 0:
            piece = min(piece, size)
            code = self._cuda.cuMemAlloc_v2(address, piece)
            if code == OUT_OF_MEMORY and piece > GRANULE:
                piece = max(GRANULE, round_down(piece // 2))
                continue
            if code == OUT_OF_MEMORY:
                raise DeviceError(_lacking(uuid, wanted, wanted - size))
            libcuda.check("cuMemAlloc", code)
            entry.blocks.append(address.value)
            size -= piece

    def release(self, *, all_of_it: bool = False) -> None:
        """Free the blocks, and the contexts that do not stay. With `all_of_it`, free every context."""
        for uuid, entry in list(self._held.items()):
            with self._current(entry):
                while entry.blocks:
                    self._cuda.cuMemFree_v2(entry.blocks.pop())
            if all_of_it or not entry.keeps:
                self._cuda.cuDevicePrimaryCtxRelease_v2(entry.device)
                del self._held[uuid]

    @contextlib.contextmanager
    def _current(self, entry: _GpuBlocks) -> Iterator[None]:
        """Make the context current for a `with` block, because each request runs on a new thread without a current
        context."""
        self._cuda.cuCtxPushCurrent_v2(entry.context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(c_void_p())

    def _device(self, uuid: str) -> int:
        count, device = c_int(), c_int()
        libcuda.check("cuDeviceGetCount", self._cuda.cuDeviceGetCount(count))
        for ordinal in range(count.value):
            if not self._cuda.cuDeviceGet(device, ordinal) and libcuda.device_uuid(self._cuda, device.value) == uuid:
                return device.value
        raise DeviceError(
            f"CUDA shows no GPU {uuid} here", fix="resume where the process ran: in its container, with its GPUs"
        )


def _lacking(uuid: str, wanted: int, free: int) -> str:
    return f"{uuid}: {format_size(wanted)} are needed, and {format_size(max(0, free))} are free"
