"""Read and write the variable that limits a process's GPU memory under CUDA's Multi-Process Service (MPS).

Under MPS the driver refuses a client's allocations, by any library, beyond CUDA_MPS_PINNED_DEVICE_MEM_LIMIT. The
variable identifies GPUs as CUDA_VISIBLE_DEVICES does, by ordinal or by UUID, each with a whole number and G or M:
`0=8G`, `GPU-…=34816M`, separated by commas
(https://docs.nvidia.com/deploy/mps/appendix-environment-variables.html). M is MiB, and the limit includes the client's
CUDA context. A lower limit of the MPS control daemon stays in effect.

An entry for a GPU that the process does not see disables every limit, the daemon's included (ai-dynamo/dynamo, docs
"Per-GPU Compute and Memory Limits with MPS", driver 615). So memguard writes only entries for the plan's GPUs, by UUID.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import Device, DevicePlan, Plan
from memguard._base.units import GIB, KIB, MIB, format_size, round_down, short
from memguard.errors import ConflictingSetting

LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_UNITS = {"k": KIB, "m": MIB, "g": GIB}
_ENTRY = re.compile(
    r"\s*(?P<gpu>\d{1,4}|(?:GPU|MIG)-[\w/-]+)\s*=\s*(?P<size>\d{1,12})(?P<unit>[kmg])b?\s*",
    re.ASCII | re.IGNORECASE,
)
_TOO_OLD = ("kepler", "maxwell", "pascal")
_UNSEEN = "and MPS drops every memory limit of a process for which an entry names a GPU that it does not see"


class Entry(NamedTuple):
    """One entry of the variable: the GPU's ordinal or UUID, and the limit in bytes."""

    gpu: str
    size: int


def limits(plan: Plan) -> dict[str, int]:
    """The MPS limit of each GPU, by UUID: the plan's limit, rounded down to whole MiB."""
    return {part.device.uuid: round_down(part.limit, MIB) for part in plan.devices}


def value(sizes: Mapping[str, int]) -> str:
    """Format `sizes`, bytes by GPU UUID, as the variable's value in whole MiB. Raises ValueError below 1 MiB."""
    if any(size < MIB for size in sizes.values()):
        raise ValueError("MPS takes no limit below 1 MiB")
    return ",".join(f"{uuid}={size // MIB}M" for uuid, size in sizes.items())


def parse(text: str) -> list[Entry]:
    """Parse a value that was set outside memguard. Raises ValueError with a message for the user."""
    entries = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part)
        if found is None:
            raise ValueError(f"{short(part)} is not a GPU's ordinal or UUID, '=' and a size such as 8G or 512M")
        entries.append(Entry(found["gpu"], int(found["size"]) * _UNITS[found["unit"].lower()]))
    return entries


def unseen_gpus(entries: Iterable[Entry], devices: Sequence[Device]) -> list[str]:
    """The identifiers in `entries` of GPUs that this process does not see. If the ordinal of a device is unknown, every
    ordinal counts as visible."""
    numbered = all(device.ordinal is not None for device in devices)
    named = [entry.gpu for entry in entries if numbered or not entry.gpu.isdecimal()]
    return [gpu for gpu in named if not any(_identifies(gpu, device) for device in devices)]


def limit_of(entries: Iterable[Entry], device: Device) -> int | None:
    """The lowest limit that the entries set for a GPU, in bytes; None if no entry is known to identify it."""
    return min((entry.size for entry in entries if _identifies(entry.gpu, device)), default=None)


def _identifies(gpu: str, device: Device) -> bool:
    if gpu.isdecimal():
        return int(gpu) == device.ordinal
    return device.uuid.lower().startswith(gpu.lower())  # a prefix identifies a GPU, as in CUDA_VISIBLE_DEVICES


def strictest(plan: Plan, text: str | None) -> dict[str, int]:
    """For each GPU, by UUID, the lower of the plan's limit and of the limit already set in the variable.

    Raises ConflictingSetting for a limit above the plan's, and for a value that is malformed or disables all limits.
    """
    wanted = limits(plan)
    if text is None or not text.strip():
        return wanted
    setting = f"{LIMIT}={text}"
    fix = f"unset {LIMIT}: --mps sets it from the budget"
    try:
        entries = parse(text)
    except ValueError as error:
        raise ConflictingSetting("MPS", setting, f"cannot be read: {error}", fix) from None
    if unseen := unseen_gpus(entries, [part.device for part in plan.devices]):
        raise ConflictingSetting("MPS", setting, f"names {unseen[0]}, {_UNSEEN}", fix)
    for part in plan.devices:
        size = limit_of(entries, part.device)
        if size is None:
            continue
        if size > wanted[part.device.uuid]:
            reason = f"allows {format_size(size)} of {_named(part)}, more than its limit of {format_size(part.limit)}"
            raise ConflictingSetting("MPS", setting, reason, f"{fix}; or raise device.limit")
        wanted[part.device.uuid] = size
    return wanted


def too_old(plan: Plan) -> DevicePlan | None:
    """The first GPU of the plan that is older than Volta, whose MPS enforces no limits; None if there is none."""
    return next((part for part in plan.devices if part.device.architecture in _TOO_OLD), None)


def shortfalls(plan: Plan, text: str | None) -> Iterator[Advice]:
    """Warnings for a process started with `text` as the variable's value: GPUs on which the process cannot reach its
    budget's limit, and a value that limits nothing. The warnings do not apply to a process without MPS.
    """
    if text is None or not text.strip():
        return
    try:
        entries = parse(text)
    except ValueError as error:
        yield Advice(f"{LIMIT} cannot be read, so what MPS makes of it is unknown: {error}")
        return
    if unseen := unseen_gpus(entries, [part.device for part in plan.devices]):
        yield Advice(
            f"{LIMIT} names {unseen[0]}, which this process does not see, {_UNSEEN}",
            "name the GPUs that it sees, by UUID",
        )
        return
    for part in plan.devices:
        size = limit_of(entries, part.device)
        if size is not None and size // MIB < part.limit // MIB:
            yield Advice(
                f"under MPS this process may have {format_size(size)} of {_named(part)}, less than its limit of "
                f"{format_size(part.limit)} ({LIMIT})"
            )


def _named(part: DevicePlan) -> str:
    return f"{part.device.name} ({part.device.uuid})"
