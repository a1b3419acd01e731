"""Allocates the GPU memory that a restore needs, and frees it as the restore begins; runs in the helper process.

The driver allocates a restored process's bytes in the first 30 ms of the restore (H200, driver 580.159), and destroys
the process if they are not free. Reading the free bytes reserves nothing: another process may allocate them meanwhile.
Memory that the helper has allocated stays available.

For that the helper needs its own context (about 0.5 GiB on an H200). If the GPU has room for both the context and the
process, the context stays, and `release` frees only the blocks, in milliseconds. If it has not, the context counts
towards the wanted bytes, and `release` also releases the context.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass, field

from memguard._base.units import GRANULE, MIB, format_size, round_down, round_up
from memguard._devices import libcuda
from memguard.errors import DeviceError

MARGIN = 4 * MIB
"""Bytes added to the process's. With 1.5 MiB to spare a restore worked, with 0.4 MiB too little it failed (H200)."""
_LEAST = GRANULE
_OUT_OF_MEMORY = 2


def pieces(wanted: int, free: int, context: int) -> tuple[int, bool] | None:
    """Bytes to allocate so that `wanted` are free after `release`, and whether the context stays.

    `free`: the GPU's free bytes with the context of `context` bytes in place. None: too few. Pure.
    """
    if free >= wanted:
        return round_up(wanted), True
    rest = wanted - context
    if free >= rest:
        return max(0, round_up(rest)), False
    return None


@dataclass
class _Held:
    device: int
    context: c_void_p
    keeps: bool = True
    """The context stays when `release` frees the blocks."""
    blocks: list[int] = field(default_factory=list)


class Holder:
    """GPU memory that this process holds, by GPU (UUID). For one thread at a time."""

    def __init__(self) -> None:
        self._cuda = libcuda.load()
        libcuda.check("cuInit", self._cuda.cuInit(0))
        self._held: dict[str, _Held] = {}

    def hold(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Allocate these bytes on each GPU, on all or none.

        Returns the bytes that `release` will free, including contexts that will not stay. Raises DeviceError if a GPU
        has too little free memory, or is not visible here.
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
        entry = _Held(self._device(uuid), c_void_p())
        code = cuda.cuDevicePrimaryCtxRetain(entry.context, entry.device)
        if code == _OUT_OF_MEMORY:
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

    def _allocate(self, entry: _Held, size: int, uuid: str, wanted: int) -> None:
        """Allocate `size` bytes in as few blocks as possible: each block takes time to free."""
        piece, address = size, c_uint64()
        while size > 0:
            piece = min(piece, size)
            code = self._cuda.cuMemAlloc_v2(address, piece)
            if code == _OUT_OF_MEMORY and piece > _LEAST:
                piece = max(_LEAST, round_down(piece // 2))
                continue
            if code == _OUT_OF_MEMORY:
                raise DeviceError(_lacking(uuid, wanted, wanted - size))
            libcuda.check("cuMemAlloc", code)
            entry.blocks.append(address.value)
            size -= piece

    def release(self, *, all_of_it: bool = False) -> None:
        """Free the blocks, and the contexts that do not stay. `all_of_it`: every context."""
        for uuid, entry in list(self._held.items()):
            with self._current(entry):
                while entry.blocks:
                    self._cuda.cuMemFree_v2(entry.blocks.pop())
            if all_of_it or not entry.keeps:
                self._cuda.cuDevicePrimaryCtxRelease_v2(entry.device)
                del self._held[uuid]

    @contextlib.contextmanager
    def _current(self, entry: _Held) -> Iterator[None]:
        """Make the context current in a block. Each request runs on its own thread, which has no current context."""
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
