"""What of the facts may get into a command that users copy into a shell. Names are checked by `facts.Name`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_VERSION = re.compile(r"[A-Za-z0-9][\w.+!-]{0,60}", re.ASCII)
_UUID = re.compile(r"(GPU|MIG)-[\w-]+", re.ASCII)


def release(version: str | None) -> str:
    """`==2.11.0`; empty if there is no version, or an invalid one."""
    return f"=={version}" if version and _VERSION.fullmatch(version) else ""


def requirement(text: str) -> str:
    """One argument of pip, quoted."""
    return shlex.quote(text)


def uuids(values: Iterable[str]) -> str:
    """The valid UUIDs of GPUs and MIG instances, for CUDA_VISIBLE_DEVICES."""
    return ",".join(value for value in values if _UUID.fullmatch(value))
