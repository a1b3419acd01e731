"""The adapters by name. A class is loaded when a budget names its framework."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from memguard._base import specs
from memguard._base.specs import SPECS
from memguard._devices.host import Host
from memguard._frameworks.base import Framework

if TYPE_CHECKING:
    from memguard._frameworks.joint_pool import JointPool


def create(name: str, host: Host) -> Framework:
    """The named framework on this host; on simulated GPUs, its simulated stand-in. KeyError if it has no row."""
    if host.simulated:
        from memguard._devices.simulated import SimulatedHost
        from memguard._frameworks.simulated.adapter import SimulatedFramework

        assert isinstance(host, SimulatedHost)
        return SimulatedFramework(host, name)
    framework: Framework = specs.load(name, "adapter", SPECS[name].adapter)(host)
    return framework


def joined(name: str, host: Host, joint: JointPool) -> Framework:
    """The named framework, which draws from the shared pool. Its row says that it can."""
    framework: Framework = specs.load(name, "joint", SPECS[name].joint)(host, joint)
    return framework


def cures(names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Have the libraries of these frameworks keep out of each other's way in one process, where their rows say how.

    Of each cure that was needed: whose it is, the other framework, and a sentence on what was done. It is permanent.
    """
    for name in names:
        for other, cure in SPECS[name].cures:
            module, _, function = cure.partition(":")
            done = specs.load(name, module, function)() if other in names else None
            if done is not None:
                yield name, other, done
