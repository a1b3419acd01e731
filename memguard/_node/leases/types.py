"""What is known of a claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from memguard._base.text import visible
from memguard._base.types import Device, Plan

State = Literal["waiting", "held", "off"]
"""`off`: its process is suspended. It counts for nothing, and waits for nothing, until it is claimed again."""
_SIMULATED = "simulated:"


class Part(NamedTuple):
    """What one claim wants of one GPU, in bytes. `total` is what CUDA can give of it, as the claimer reads
    it, and `number` NVML's index.

    `gpu` is its UUID; a simulated one has a mark before it, so that nobody waits for a real GPU because of it.
    """

    gpu: str
    bytes: int
    total: int
    number: int
    name: str

    @property
    def simulated(self) -> bool:
        return self.gpu.startswith(_SIMULATED)

    @property
    def uuid(self) -> str:
        return self.gpu.removeprefix(_SIMULATED)

    def __str__(self) -> str:
        return f"{'simulated ' if self.simulated else ''}GPU {self.number} ({visible(self.name, keep='')})"


class Claim(NamedTuple):
    """One claim of one process. `machine` as in `identity.machine`; `pid` means something only there.

    `asked` and `since` (None while it waits) are Unix time. `replaces`: the claim of the same process whose place it
    takes; until that one is gone the two count as the larger of both. `leaves`: after so many seconds without work it
    leaves its GPUs for one that waits; None: it does not.
    """

    id: int
    pid: int
    start: int
    machine: str
    command: str
    budget: str
    state: State
    asked: float
    since: float | None
    replaces: int | None
    parts: Mapping[str, Part]
    leaves: float | None = None


def key_of(device: Device) -> str:
    return f"{_SIMULATED}{device.uuid}" if device.simulated else device.uuid


def parts_of(plan: Plan) -> dict[str, Part]:
    """What a process with that plan needs of each GPU, its context included: the plan's limit."""
    found: dict[str, Part] = {}
    for part in plan.devices:
        device, key = part.device, key_of(part.device)
        found[key] = Part(key, part.limit, device.usable, device.index, device.name)
    return found
