"""Who holds the memory of the visible GPUs, and whether enough is left for a probe."""

from __future__ import annotations

from memguard._base.units import GIB
from memguard._tools.doctor.checks.probe_outcomes import out_of_memory
from memguard._tools.doctor.facts import Facts, NvmlDevice

NO_ROOM = 2 * GIB
"""Bytes. With less free a probe may run out of memory: context and workspaces take 0.6 to 1.5 GiB (H200)."""
LITTLE = 0.1
"""A GPU with less than this part free counts as full."""


def same_gpu(one: str, other: str) -> bool:
    """Whether two UUIDs name one GPU; PyTorch's have no prefix."""
    return one.lower().removeprefix("gpu-") == other.lower().removeprefix("gpu-") != ""


def visible_cards(facts: Facts) -> tuple[NvmlDevice, ...]:
    """NVML's entries for the GPUs that CUDA shows, without those divided by MIG."""
    shown = facts.driver.cuda.devices
    return tuple(
        card
        for card in facts.driver.nvml.devices
        if not card.mig and any(same_gpu(card.uuid, device.uuid) for device in shown)
    )


def exclusive(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs that only one process at a time may use, or no process."""
    return tuple(card for card in visible_cards(facts) if card.mode not in (None, "Default"))


def has_context(facts: Facts, card: NvmlDevice) -> bool:
    """Whether the process that called the doctor has a context on it."""
    return facts.process is not None and any(same_gpu(uuid, card.uuid) for uuid in facts.process.contexts)


def held_by_itself(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes that the process that called the doctor holds; None if it has a context and NVML does not say."""
    contexts = facts.process.contexts if facts.process is not None else {}
    total = 0
    for size in (size for uuid, size in contexts.items() if same_gpu(uuid, card.uuid)):
        if size is None:
            return None
        total += size
    return total


def held_by_others(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes that neither the doctor nor the process that called it holds; None if unknown."""
    own = held_by_itself(facts, card)
    return None if card.used is None or own is None else max(0, card.used - own)


def filled_by_others(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs that other processes fill: less than a tenth is free, or too little for a probe that ran out."""
    ran_out = _ran_out(facts)
    return tuple(
        card
        for card in visible_cards(facts)
        if _little(card, ran_out) and (held_by_others(facts, card) or 0) > (card.total or 0) / 2
    )


def filled_by_itself(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs on which a probe ran out of memory and the process that called the doctor has a share in it."""
    if not _ran_out(facts):
        return ()
    others = filled_by_others(facts)
    return tuple(
        card for card in visible_cards(facts) if card not in others and _little(card, True) and has_context(facts, card)
    )


def _ran_out(facts: Facts) -> bool:
    return any(out_of_memory(stage) for _, probe in facts.probes() for stage in probe.stages)


def _little(card: NvmlDevice, ran_out: bool) -> bool:
    if card.free is None or not card.total:
        return False
    return card.free < LITTLE * card.total or (ran_out and card.free < NO_ROOM)
