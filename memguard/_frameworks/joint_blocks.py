"""What PyCUDA and Numba have in common in the shared pool: memguard allocates for both, block by block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from memguard._devices import contexts
from memguard._devices.pool_blocks import Held, PoolBlocks
from memguard._frameworks.base import Framework, with_size
from memguard._frameworks.driver_pools import PIECE
from memguard._frameworks.joint_pool import JointPool
from memguard._types import Device, Moment, Shortage, Usage
from memguard._units import format_size, round_up
from memguard.errors import CapNotApplied

_UNIT = 512
_MOST_TIMES = 3


class JointBlocks(Framework):
    """For an adapter of a framework whose allocations memguard makes in the shared pool."""

    pooled = True
    _joint: JointPool
    _joint_caps: Mapping[str, int]

    def usage(self, device: Device) -> Usage | None:
        """What is live; the cache is everybody's. None if it has allocated nothing on the GPU."""
        blocks = self._joint.blocks_on(self.name, device.uuid)
        if blocks is None:
            return None
        in_use = blocks.in_use()
        return Usage(in_use, in_use, 0)

    def trim(self, device: Device) -> None:
        """Give the pool's idle part to the driver, once its frees have run."""
        blocks = self._joint.blocks_on(self.name, device.uuid)
        if blocks is not None and contexts.initialised():
            blocks.wait()
            self._joint.trim(device.uuid)

    def give_back(self, device: Device, needed: int) -> None:
        """The cache is everybody's: all that idles in it."""
        self.trim(device)

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(self.name, "the shared pool has a fixed size", "change the budget file and restart")

    def footprint(self, size: int) -> int:
        """What it takes of the pool, which may have room for it in a piece that it holds."""
        return round_up(size, _UNIT)

    def unseen(self) -> str | None:
        return None

    def about(self) -> dict[str, str]:
        return {"strategy": "pool"} if self._joint_caps else {}

    def _counted_on(self, uuid: str) -> int:
        blocks = self._joint.blocks_on(self.name, uuid)
        return 0 if blocks is None else blocks.in_use()

    def _from_pool(self, blocks: PoolBlocks, size: int, flush: Callable[[], object]) -> Held | None:
        """A block; None if the pool has no room, also after `flush` and with room that others have made."""
        held = blocks.take(size)
        for _ in range(_MOST_TIMES):
            if held is not None:
                break
            flush()
            blocks.wait()
            held = blocks.take(size)
            if held is not None or not self._short(self._shortage(size)):
                break
        return held

    def _here(self) -> str:
        ordinal = contexts.current()
        return next((uuid for uuid, number in contexts.ordinals().items() if number == ordinal), "")

    def _shortage(self, size: int) -> Shortage:
        uuid, needed = self._here(), round_up(size, PIECE)
        held, _ = self._joint.figures(uuid) or (0, 0)
        # If the cap allows it, the GPU is full.
        return Shortage(self.name, uuid, size, needed, held + needed <= self._joint_caps.get(uuid, 0))

    def _no_room(self, size: int) -> str:
        """The end of the sentence of a refusal."""
        uuid = self._here()
        held, used = self._joint.figures(uuid) or (0, 0)
        return (
            f"asked for {format_size(size)}; the shared pool of the memguard budget may hold "
            f"{format_size(self._joint_caps.get(uuid))}, holds {format_size(held)}, and {format_size(used)} are in use"
        )

    def _told(self, error: BaseException, size: int) -> BaseException:
        """The error of a request that is refused, with its size, of which was told."""
        uuid = self._here()
        with_size(error, size)
        if uuid in self._joint_caps:
            here = threading.get_ident()
            self._refused(error, Moment(self.name, "refusal", time.time(), uuid, size, reclaimable=0, thread=here))
        return error
