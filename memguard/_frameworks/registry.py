"""The adapters by name. A class is loaded when a budget names its framework."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

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
    framework: Framework = _class_of(SPECS[name].adapter)(host)
    return framework


def joined(name: str, host: Host, joint: JointPool) -> Framework:
    """The named framework, which draws from the shared pool. Its row says that it can."""
    framework: Framework = _class_of(SPECS[name].joint)(host, joint)
    return framework


def cures(names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Have the libraries of these frameworks keep out of each other's way in one process, where their rows say how.

    Of each cure that was needed: whose it is, the other framework, and a sentence on what was done. It is permanent.
    """
    for name in names:
        for other, cure in SPECS[name].cures:
            done = _class_of(cure)() if other in names else None
            if done is not None:
                yield name, other, done


def _class_of(adapter: str) -> Any:
    module, _, name = adapter.partition(":")
    return getattr(importlib.import_module(module), name)
