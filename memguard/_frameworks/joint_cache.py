"""What idles in the shared pool, as a sibling of the frameworks outside it: it gives back as they do.

A framework of the pool gives back nothing by itself, as its cache is everybody's. What came back is what NVML says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memguard._base.types import Device, Usage
from memguard._frameworks.base import Framework
from memguard._frameworks.joint_pool import JointPool


class SharedCache:
    """The cache of the pool. `frameworks` are those of the budget by name, in the pool or not."""

    def __init__(self, joint: JointPool, frameworks: Callable[[], Mapping[str, Framework]]) -> None:
        self._joint, self._frameworks = joint, frameworks

    def usage(self, device: Device) -> Usage | None:
        """What idles there; None if there is no pool yet."""
        found = self._joint.figures(device.uuid)
        return None if found is None else self._joint.usage(device, found[1], True)

    def give_back(self, device: Device, needed: int) -> None:
        """At least so many bytes, if they idle, in whole pieces: first what is idle now, which waits for nothing.

        Memory whose free was only queued behind work is in use for the driver until that work has run. So if it does
        not suffice, each framework of the pool waits as it does before a trim of its own.
        """
        if self._joint.give_back(device.uuid, needed) < needed:
            self.trim(device)

    def trim(self, device: Device) -> None:
        """All that idles, once the frees of the pool's frameworks have run."""
        for framework in self._frameworks().values():
            if framework.pooled and framework.usage(device) is not None:
                framework.trim(device)
        self._joint.trim(device.uuid)  # TensorFlow and JAX have nothing that could be called
