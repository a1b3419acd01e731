"""Reads from CUDA which GPUs this process can use, and their order.

Only CUDA knows the exact rules of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. This module never runs `cuInit` in this
process: that takes 215 ms on an H200 and makes CUDA unusable in forked children. While CUDA is not initialised, a short
child process reads the order.
"""

from __future__ import annotations

import os
import sys

from memguard._base.logs import log as _log
from memguard._devices import contexts, libcuda
from memguard._devices.contexts import VisibleDevice
from memguard.errors import DeviceError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CHILD_TIMEOUT = 60.0


def hides_all(visible_devices: str | None) -> bool:
    """True if this CUDA_VISIBLE_DEVICES excludes every GPU on any machine. Only CUDA can interpret the other values."""
    return visible_devices in ("", "-1", "NoDevFiles")


def visible(*, ask_child: bool = True) -> tuple[VisibleDevice, ...] | None:
    """The GPUs that this process can use, by CUDA's ordinal; None if CUDA could not be read.

    Runs a child process only if CUDA is not initialised in this process and `ask_child` is True.
    """
    if contexts.initialised():
        return contexts.visible()
    return _ask_child() if ask_child else None


def _ask_child() -> tuple[VisibleDevice, ...] | None:
    import json
    import subprocess

    code = "from memguard._devices import cuda_order; cuda_order._answer_parent()"
    path = importable()
    try:
        answer = subprocess.run(
            # -S skips `site`, which may read many files; `path` already has the entries that `site` would add
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return tuple(VisibleDevice(*fields) for fields in json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        _log.debug("CUDA could not be asked: %s", reason.splitlines()[-1] if reason else type(error).__name__)
        return None


def importable() -> list[str]:
    """`sys.path` for a child that imports memguard: without the current directory, whose json.py
    could shadow the standard library's."""
    path = [entry for entry in sys.path if isinstance(entry, str) and entry]
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return path if own in path else [*path, own]


def _answer_parent() -> None:
    """In the child: print the GPUs as JSON, or the reason on stderr."""
    import json

    try:
        print(json.dumps(_initialise()))
    except (OSError, DeviceError) as error:
        raise SystemExit(error.advice.reason if isinstance(error, DeviceError) else str(error)) from None


def _initialise() -> tuple[VisibleDevice, ...]:
    code = libcuda.load().cuInit(0)
    if code == _NO_DEVICE:  # CUDA_VISIBLE_DEVICES hides every GPU
        return ()
    libcuda.check("cuInit", code)
    return contexts.visible() or ()
