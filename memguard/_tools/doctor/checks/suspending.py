"""Whether processes can be suspended on this machine (docs/suspend.md). Checked for budgets with `suspend`."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._node.suspend.checks import refusals
from memguard._tools.doctor.derived import same_gpu
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, check


@check("suspend-impossible", order=705)
def suspend_impossible(facts: Facts) -> Iterator[Found]:
    """The driver, the system or the kind of GPU makes suspension impossible for every process."""
    budget, shown = facts.budget, facts.driver.cuda.devices
    if budget is None or not budget.suspend or not shown:
        return  # other findings report the missing GPU
    version = facts.driver.module or facts.driver.nvml.driver
    cards = [
        (device, card)
        for device in shown
        for card in facts.driver.nvml.devices
        if card.error is None and same_gpu(card.uuid, device.uuid)
    ]
    parts = tuple(device.uuid for device in shown if device.uuid.startswith("MIG-"))
    found = refusals.machine(
        driver=version,
        calls=facts.driver.cuda.checkpoint,
        wsl=facts.system.wsl,
        mig=parts + tuple(card.uuid for _, card in cards if card.mig),
        vgpu=tuple(card.uuid for _, card in cards if card.vgpu),
        unified=tuple(card.uuid for device, card in cards if device.total and not card.total and not card.mig),
        architecture=facts.system.machine,
    )
    if not found:
        return
    read = [
        f"{budget.source} has a section suspend",
        f"kernel: {facts.system.kernel or 'unknown'} ({facts.system.machine})",
        f"driver: {version or 'unknown'}",
        *(f"NVML: GPU {card.index} ({card.name}) is {card.uuid}" for _, card in cards[:4]),
    ]
    yield Found(
        f"no process can be suspended here, so that section does nothing: {found[0].reason}",
        (*read, *(f"also: {reason.reason}" for reason in found[1:])),
        found[0].remedy,
        budget.source,
    )
