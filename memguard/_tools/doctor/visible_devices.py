"""CUDA_VISIBLE_DEVICES as CUDA reads it (CUDA programming guide, "CUDA Environment Variables").

The first entry decides whether the list has indices, UUIDs of GPUs or MIG instances. The list ends before the first
entry of another kind, or without a matching device. A GPU listed twice leaves no GPU at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

VARIABLE = "CUDA_VISIBLE_DEVICES"
Kind = Literal["index", "GPU-", "MIG-"]
Why = Literal["", "empty", "negative", "word", "repeated", "absent", "ambiguous", "mixed"]


@dataclass(frozen=True)
class VisibleDevices:
    """The parsed variable. `entries`: those that CUDA uses; `stopped_at`: the entry that ended the list, and `why`."""

    value: str
    kind: Kind | None
    entries: tuple[str, ...]
    stopped_at: str = ""
    why: Why = ""

    @property
    def only_ended(self) -> bool:
        """Whether the user ended the list on purpose: no device follows, as in `0,` and `0,-1`."""
        left = [entry.strip() for entry in self.value.split(",")][len(self.entries) :]
        return bool(self.entries) and all(not entry or re.fullmatch(r"-\d+", entry) for entry in left)


def kind_of(entry: str) -> Kind | None:
    """The kind of an entry; None for no device. `1gpu` counts as 1, as strtoul reads it."""
    if entry.startswith("GPU-"):
        return "GPU-"
    if entry.startswith("MIG-"):
        return "MIG-"
    return "index" if re.match(r"[+-]?\d", entry) else None


def index_of(entry: str) -> int:
    found = re.match(r"[+-]?\d+", entry)
    return int(found.group()) if found else -1


def parse(value: str, count: int | None, uuids: Sequence[str] | None) -> VisibleDevices:
    """Parse the value as CUDA does. `count` and `uuids`: the machine's GPUs; None if unknown."""
    listed = [entry.strip() for entry in value.split(",")]
    kind = kind_of(listed[0])
    kept: list[str] = []
    for entry in listed:
        why = _why_rejected(entry, kind, count, uuids)
        if not why and _device_key(entry, uuids) in {_device_key(other, uuids) for other in kept}:
            return VisibleDevices(value, kind, (), entry, "repeated")
        if why:
            return VisibleDevices(value, kind, tuple(kept), entry, why)
        kept.append(entry)
    return VisibleDevices(value, kind, tuple(kept))


def _why_rejected(entry: str, kind: Kind | None, count: int | None, uuids: Sequence[str] | None) -> Why:
    own = kind_of(entry)
    if not entry:
        return "empty"
    if own is None:
        return "word"
    if own == "index" and index_of(entry) < 0:
        return "negative"
    if own != kind:
        return "mixed"
    if own == "index":
        return "absent" if count is not None and index_of(entry) >= count else ""
    if own == "MIG-" or uuids is None:
        return ""  # unknown: NVML does not list MIG instances
    matches = sum(uuid.lower().startswith(entry.lower()) for uuid in uuids)
    return "" if matches == 1 else "ambiguous" if matches else "absent"


def _device_key(entry: str, uuids: Sequence[str] | None) -> object:
    """A key for the GPU of an entry: equal for two spellings of one GPU."""
    if kind_of(entry) == "index":
        return index_of(entry)
    return next((uuid for uuid in uuids or () if uuid.lower().startswith(entry.lower())), entry.lower())
