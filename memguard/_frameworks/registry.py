"""The adapters by name. A class is loaded when a budget names its framework."""

from __future__ import annotations

import importlib

from memguard._devices.host import Host
from memguard._frameworks.base import Framework
from memguard._specs import SPECS


def create(name: str, host: Host) -> Framework:
    """The named framework on this host; on simulated GPUs, its simulated stand-in. KeyError if it has no row."""
    if host.simulated:
        from memguard._devices.simulated import SimulatedHost
        from memguard._frameworks.simulated.adapter import SimulatedFramework

        assert isinstance(host, SimulatedHost)
        return SimulatedFramework(host, name)
    module, _, cls = SPECS[name].adapter.partition(":")
    framework: Framework = getattr(importlib.import_module(module), cls)(host)
    return framework
