"""Reads the settings of torch's allocator from a loaded torch, the environment and the installation."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memguard._base.types import Device
from memguard._base.units import MIB, format_size
from memguard.errors import ConflictingSetting


def refuse(devices: Sequence[Device], caps: Mapping[str, int]) -> None:
    """Raise ConflictingSetting if the environment disables caching, which the cap needs, or sets a fraction above the
    cap."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        raise ConflictingSetting(
            "torch",
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "switches off the caching allocator, and with it every limit",
            "unset it, or leave torch out of the budget",
        )
    name, text = configured()
    match = re.search(r"per_process_memory_fraction\s*:\s*([^\s,]+)", text)
    fraction = 0.0
    with contextlib.suppress(ValueError):  # torch itself reports an invalid value
        fraction = float(match[1]) if match is not None else 0.0
    for device in devices if 0 < fraction <= 1 else ():
        allowed = int(fraction * device.usable)
        if device.uuid in caps and allowed > caps[device.uuid]:
            raise looser(f"{name}={text}", allowed, caps[device.uuid])


def configured() -> tuple[str, str]:
    """The name and text of the environment variable that configures PyTorch's allocator. PYTORCH_ALLOC_CONF takes
    precedence."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if os.environ.get(name):
            return name, os.environ[name]
    return "PYTORCH_ALLOC_CONF", ""


def expandable(torch: Any) -> bool:
    """True if a live torch's allocator uses expandable segments. Reads the environment if torch does not report it."""
    try:
        return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    except (AttributeError, KeyError, RuntimeError):
        return "expandable_segments:true" in configured()[1].replace(" ", "").lower()


def idle_in_private_pools(torch: Any, ordinal: int) -> int:
    """Idle bytes of private pools on this GPU. 0 if torch does not report them, or reports them only together with its
    allocation history. Lists all blocks without a CUDA call, which is fast enough after a refused request and too slow
    for polling.
    """
    try:
        if torch._C._cuda_isHistoryEnabled():
            return 0
        return sum(
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == ordinal and tuple(segment["segment_pool_id"]) != (0, 0)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return 0


def stat(stats: Mapping[str, Any], name: str, kind: str) -> int | None:
    try:
        return int(stats[name]["all"][kind])
    except (KeyError, TypeError):
        return None


def never_held(stats: Mapping[str, Any]) -> bool:
    """True if torch never held memory on this GPU. Also tests the sum of all allocations, because the user can reset
    the peak but not this sum."""
    known = [stat(stats, "reserved_bytes", kind) for kind in ("current", "peak", "allocated")]
    return known[:2] == [0, 0] and not known[2]


def looser(setting: str, allowed: int, cap: int) -> ConflictingSetting:
    return ConflictingSetting(
        "torch",
        setting,
        f"allows {format_size(allowed)}, more than the cap of {format_size(cap)}",
        f"remove it, lower it, or raise frameworks.torch in the budget to at least {-(-allowed // MIB)}MiB",
    )


def cuda_version() -> str | None:
    """The CUDA version that torch was built for (`'13.0'`), read from the text of `version.py`; None without CUDA."""
    match = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([^']+)'", _about(), re.MULTILINE)
    return match[1] if match else None


def version() -> tuple[int, int] | None:
    """torch's major and minor version, read from the text of `version.py`; None if unknown."""
    match = re.search(r"^__version__\s*(?::[^=]*)?=\s*'(\d+)\.(\d+)", _about(), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def _about() -> str:
    """The text of torch's `version.py`; "" if it cannot be read."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a module without a spec, such as a test's stand-in
        return ""
    if spec is None or spec.origin is None:
        return ""
    try:
        return (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
