"""What facts may put into a command that is copied into a shell. Names are bounded by `facts.Name`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_VERSION = re.compile(r"[A-Za-z0-9][\w.+!-]{0,60}", re.ASCII)
_UUID = re.compile(r"(GPU|MIG)-[\w-]+", re.ASCII)


def release(version: str | None) -> str:
    """`==2.11.0`; empty where there is no version, or it is none."""
    return f"=={version}" if version and _VERSION.fullmatch(version) else ""


def requirement(text: str) -> str:
    """As one argument of pip."""
    return shlex.quote(text)


def uuids(values: Iterable[str]) -> str:
    """For CUDA_VISIBLE_DEVICES, those that are UUIDs of GPUs or of parts of one."""
    return ",".join(value for value in values if _UUID.fullmatch(value))
