"""The frameworks memguard knows, one line each. A class is loaded when a budget names it."""

from __future__ import annotations

import importlib

from memguard._devices.host import Host
from memguard._frameworks.base import Framework

_CLASSES = {
    "tensorflow": "memguard._frameworks.tensorflow:TensorFlow",
    "torch": "memguard._frameworks.torch.adapter:Torch",
    "cupy": "memguard._frameworks.cupy.adapter:CuPy",
    "jax": "memguard._frameworks.jax:JAX",
    "pycuda": "memguard._frameworks.pycuda.adapter:PyCUDA",
    "numba": "memguard._frameworks.numba:Numba",
}

NAMES = tuple(_CLASSES)


def create(name: str, host: Host) -> Framework:
    """The named framework on this host. With simulated GPUs, its simulated stand-in."""
    if host.simulated:
        from memguard._devices.simulated import SimulatedHost
        from memguard._frameworks.simulated.adapter import SimulatedFramework

        assert isinstance(host, SimulatedHost)
        return SimulatedFramework(host, name)
    module, _, cls = _CLASSES[name].partition(":")
    framework: Framework = getattr(importlib.import_module(module), cls)(host)
    return framework
