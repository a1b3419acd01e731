"""Frameworks that are not there, as packages of a few lines, and probes of them in real processes."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memguard._tools.doctor.collect.gather import PROBES
from memguard._tools.doctor.collect.processes import Ended, watch
from memguard._tools.doctor.probes import main

TORCH = """
__version__ = "2.11.0+cu130"

class version:
    cuda = "13.0"

class _C:
    class _cudnn:
        getCompileVersion = getRuntimeVersion = staticmethod(lambda: (9, 19, 0))

class Tensor(float):
    def __matmul__(self, other): return self
    def sum(self): return self

def ones(*shape, device): return Tensor(1)

class nn:
    class functional:
        conv2d = staticmethod(lambda image, kernel: image)

class cuda:
    init = staticmethod(lambda: None)
    device_count = staticmethod(lambda: 1)
    get_arch_list = staticmethod(lambda: ["sm_90"])
    class get_device_properties:
        multi_processor_count = 132
        def __init__(self, ordinal): pass
"""
"""As much of PyTorch as its probe asks for."""


def write(site: Path, name: str, source: str) -> Path:
    """A package of that name; gives the folder that it is in."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(textwrap.dedent(source))
    return site


def environ(site: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(site), **changes}


def run(
    environ: Mapping[str, str],
    *probes: str,
    timeout: float = 30,
    stop: threading.Event | None = None,
    first: str | None = None,
) -> Ended:
    """The probes in one process of this Python."""
    spec: dict[str, Any] = {**PROBES, "probes": probes, "path": [], "first": first}
    command = (sys.executable, main.__file__)
    return watch(command, spec, environ, timeout, stop or threading.Event())
