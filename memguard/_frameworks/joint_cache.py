"""The idle memory of the shared pool, as a sibling that other frameworks can reclaim from.

A framework of the pool releases nothing by itself, as the cache belongs to all. NVML shows the bytes released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memguard._base.types import Device, Usage
from memguard._frameworks.base import Framework
from memguard._frameworks.joint_pool import JointPool


class SharedCache:
    """The shared pool's cache. `frameworks` are the budget's frameworks by name, in the pool or not."""

    def __init__(self, joint: JointPool, frameworks: Callable[[], Mapping[str, Framework]]) -> None:
        self._joint, self._frameworks = joint, frameworks

    def usage(self, device: Device) -> Usage | None:
        """The pool's idle memory; None if there is no pool yet."""
        found = self._joint.figures(device.uuid)
        return None if found is None else self._joint.usage(device, found[1], True)

    def give_back(self, device: Device, needed: int) -> None:
        """Release at least `needed` idle bytes in whole pieces: first the memory that is idle now, without waiting.

        To the driver, memory is in use while its free is queued behind work. So if too little is idle, each framework
        of the pool synchronises as before its own trim.
        """
        if self._joint.give_back(device.uuid, needed) < needed:
            self.trim(device)

    def trim(self, device: Device) -> None:
        """Release all idle memory, after the frees of the pool's frameworks have run."""
        for framework in self._frameworks().values():
            if framework.pooled and framework.usage(device) is not None:
                framework.trim(device)
        self._joint.trim(device.uuid)  # TensorFlow and JAX have no function to synchronise
