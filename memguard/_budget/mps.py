"""What CUDA's Multi-Process Service (MPS) lets a process have of each GPU: the value that says so. Pure.

Under MPS the driver refuses what a client asks for beyond CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, whichever library asks. The
variable names GPUs as CUDA_VISIBLE_DEVICES does, by ordinal or by UUID, each with a whole number and G or M: `0=8G`,
`GPU-…=34816M`, comma between them (https://docs.nvidia.com/deploy/mps/appendix-environment-variables.html). M is MiB,
and the client's context counts. A limit of the control daemon's own that is lower stays.

An entry that names a GPU which the process does not see takes away every limit, the daemon's among them
(ai-dynamo/dynamo, docs "Per-GPU Compute and Memory Limits with MPS", driver 615). So what is written here names GPUs by
UUID, and only those that the plan has.
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
    """One GPU's part of the variable: how it names the GPU, and bytes."""

    gpu: str
    size: int


def limits(plan: Plan) -> dict[str, int]:
    """What MPS is to let a process have of each GPU, by UUID: the plan's limit, rounded down to whole MiB."""
    return {part.device.uuid: round_down(part.limit, MIB) for part in plan.devices}


def value(sizes: Mapping[str, int]) -> str:
    """The variable's value for these bytes by UUID, never more than they are. Raises ValueError for less than 1 MiB."""
    if any(size < MIB for size in sizes.values()):
        raise ValueError("MPS takes no limit below 1 MiB")
    return ",".join(f"{uuid}={size // MIB}M" for uuid, size in sizes.items())


def parse(text: str) -> list[Entry]:
    """The entries of a value that somebody else wrote. Raises ValueError with a sentence."""
    entries = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part)
        if found is None:
            raise ValueError(f"{short(part)} is not a GPU's ordinal or UUID, '=' and a size such as 8G or 512M")
        entries.append(Entry(found["gpu"], int(found["size"]) * _UNITS[found["unit"].lower()]))
    return entries


def strays(entries: Iterable[Entry], devices: Sequence[Device]) -> list[str]:
    """How the entries name GPUs that this process does not see. Ordinals that CUDA did not tell count as seen."""
    told = all(device.ordinal is not None for device in devices)
    named = [entry.gpu for entry in entries if told or not entry.gpu.isdecimal()]
    return [gpu for gpu in named if not any(_means(gpu, device) for device in devices)]


def given(entries: Iterable[Entry], device: Device) -> int | None:
    """The least that the entries let this process have of a GPU, in bytes; None without an entry that is surely its."""
    return min((entry.size for entry in entries if _means(entry.gpu, device)), default=None)


def _means(gpu: str, device: Device) -> bool:
    if gpu.isdecimal():
        return int(gpu) == device.ordinal
    return device.uuid.lower().startswith(gpu.lower())  # the first characters will do, as in CUDA_VISIBLE_DEVICES


def met(plan: Plan, text: str | None) -> dict[str, int]:
    """`limits`, met with what the variable says already: the stricter of both holds.

    Raises ConflictingSetting for a looser one, for one that cannot be read, and for one that would drop all limits.
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
    if unseen := strays(entries, [part.device for part in plan.devices]):
        raise ConflictingSetting("MPS", setting, f"names {unseen[0]}, {_UNSEEN}", fix)
    for part in plan.devices:
        size = given(entries, part.device)
        if size is None:
            continue
        if size > wanted[part.device.uuid]:
            reason = f"allows {format_size(size)} of {_named(part)}, more than its limit of {format_size(part.limit)}"
            raise ConflictingSetting("MPS", setting, reason, f"{fix}; or raise device.limit")
        wanted[part.device.uuid] = size
    return wanted


def too_old(plan: Plan) -> DevicePlan | None:
    """A GPU before Volta: its MPS has no limits."""
    return next((part for part in plan.devices if part.device.architecture in _TOO_OLD), None)


def shortfalls(plan: Plan, text: str | None) -> Iterator[Advice]:
    """What to warn of in a process that was started with this value: GPUs of which it cannot have its budget's limit,
    and a value that limits nothing. None of it matters to a process that runs without MPS.
    """
    if text is None or not text.strip():
        return
    try:
        entries = parse(text)
    except ValueError as error:
        yield Advice(f"{LIMIT} cannot be read, so what MPS makes of it is unknown: {error}")
        return
    if unseen := strays(entries, [part.device for part in plan.devices]):
        yield Advice(
            f"{LIMIT} names {unseen[0]}, which this process does not see, {_UNSEEN}",
            "name the GPUs that it sees, by UUID",
        )
        return
    for part in plan.devices:
        size = given(entries, part.device)
        if size is not None and size // MIB < part.limit // MIB:
            yield Advice(
                f"under MPS this process may have {format_size(size)} of {_named(part)}, less than its limit of "
                f"{format_size(part.limit)} ({LIMIT})"
            )


def _named(part: DevicePlan) -> str:
    return f"{part.device.name} ({part.device.uuid})"
