"""The frameworks memguard knows, one line each. A class is loaded when a budget names it."""

from __future__ import annotations

import importlib

from memguard.devices.host import Host
from memguard.frameworks.base import Framework

_CLASSES = {
    "tensorflow": "memguard.frameworks.tensorflow:TensorFlow",
    "torch": "memguard.frameworks.torch:Torch",
    "cupy": "memguard.frameworks.cupy:CuPy",
    "jax": "memguard.frameworks.jax:JAX",
    "pycuda": "memguard.frameworks.pycuda:PyCUDA",
    "numba": "memguard.frameworks.numba:Numba",
}

NAMES = tuple(_CLASSES)


def create(name: str, host: Host) -> Framework:
    """The named framework on this host. With simulated GPUs, its simulated stand-in."""
    if host.simulated:
        from memguard.devices.simulated import SimulatedHost
        from memguard.frameworks.simulated import SimulatedFramework

        assert isinstance(host, SimulatedHost)
        return SimulatedFramework(host, name)
    module, _, cls = _CLASSES[name].partition(":")
    framework: Framework = getattr(importlib.import_module(module), cls)(host)
    return framework
