"""The names of the doctor's findings. They are public: `doctor: {ignore: [...]}` in a budget uses them.

Each finding has a page, `docs/doctor/<name>.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from memguard._base.advice import MemguardError

Name = Literal[
    # the driver (checks/driver.py, checks/versions.py)
    "driver-absent",
    "driver-mismatch",
    "driver-too-old",
    "driver-minor-version",
    "forward-compatibility",
    "cuda-init-failed",
    "nvml-blocked",
    "container-capabilities",
    "container-without-gpu",
    "device-files",
    "wsl",
    "sysmem-fallback",
    # libraries of CUDA (checks/libraries.py)
    "library-missing",
    "library-wrong-major",
    "library-twice",
    "cuda-majors-mixed",
    "cudnn-older",
    "import-order",
    # GPUs (checks/devices.py)
    "visible-devices-none",
    "visible-devices-unknown",
    "visible-devices-mixed",
    "device-order",
    "compute-capability",
    "mig",
    "compute-mode",
    "peer-access",
    "card-filled",
    # memory (checks/memory.py, checks/mps.py)
    "async-allocator",
    "xla-fractions",
    "second-context",
    "preallocation",
    "allocator-swap",
    "budget-too-large",
    "unified-memory",
    "mps-limit",
    # suspending (checks/suspending.py)
    "suspend-impossible",
    # how frameworks were built and installed (checks/build.py, checks/failures.py)
    "nvcc-missing",
    "compiler-missing",
    "numpy-abi",
    "unexpected-path",
    "two-distributions",
    "cpu-build",
    "framework-fails",
    "probe-crashed",
    "probe-hung",
    # messages that look like errors (checks/noise.py)
    "harmless-message",
]

NAMES: tuple[str, ...] = get_args(Name)


def nearest(name: str) -> str | None:
    """The known name closest to a misspelt one."""
    import difflib

    return next(iter(difflib.get_close_matches(name, NAMES, 1)), None)


def known(names: Iterable[str]) -> frozenset[str]:
    """The names, validated. Raises MemguardError for an unknown name."""
    for name in names:
        if name not in NAMES:
            meant = nearest(name)
            fix = f"write {meant}" if meant else "memguard doctor --list prints them"
            raise MemguardError(f"no finding has the name {name!r}", fix=fix)
    return frozenset(names)
