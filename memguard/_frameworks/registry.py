"""Creates adapters by framework name; an adapter's module is imported when a budget names the framework."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from memguard._devices.host import Host
from memguard._frameworks import specs
from memguard._frameworks.base import Framework
from memguard._frameworks.specs import SPECS

if TYPE_CHECKING:
    from memguard._frameworks.shared_pool import SharedPool


def create(name: str, host: Host) -> Framework:
    """Create the framework's adapter for this host, or a simulated adapter on simulated GPUs. Raises KeyError if no
    spec has this name."""
    if host.simulated:
        from memguard._devices.simulated import SimulatedHost
        from memguard._frameworks.simulated.adapter import SimulatedFramework

        assert isinstance(host, SimulatedHost)
        return SimulatedFramework(host, name)
    framework: Framework = specs.load(name, "adapter", SPECS[name].adapter)(host)
    return framework


def client(name: str, host: Host, shared_pool: SharedPool) -> Framework:
    """Create the framework's adapter for the shared pool, and add it to the pool's `adapters`. The framework's spec
    must name such an adapter (`pooled`)."""
    framework: Framework = specs.load(name, "pooled", SPECS[name].pooled)(host, shared_pool)
    shared_pool.adapters[name] = framework
    return framework


def cures(names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Apply the fixes in these frameworks' specs (`cures`) for conflicts between their libraries. A fix is permanent in
    the process.

    Yields, for each applied fix, the names of the two frameworks and a sentence about the change.
    """
    for name in names:
        for other, cure in SPECS[name].cures:
            module, _, function = cure.partition(":")
            done = specs.load(name, module, function)() if other in names else None
            if done is not None:
                yield name, other, done
