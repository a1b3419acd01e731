"""The GPUs: which CUDA shows, in which order, which frameworks have code for them, and which processes use them."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._base.units import format_size
from memguard._tools.doctor import visible_devices
from memguard._tools.doctor.derived import (
    blocked_by,
    busy,
    computes,
    exclusive,
    failed_stage,
    filled_by_caller,
    filled_by_others,
    has_context,
    held_by_caller,
    held_by_others,
    oldest,
    out_of_memory,
    readable_cards,
    same_gpu,
    visible,
    without_code,
)
from memguard._tools.doctor.facts import CudaDevice, Facts, NvmlDevice
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import error_line, full_name, listing, valid_uuids, variable

_ORDER = "CUDA_DEVICE_ORDER"
_IN_A_SHELL = "end this process and run `memguard doctor` in a shell: beside this process they cannot be tried"


@check("visible-devices-none", "visible-devices-unknown", "visible-devices-mixed", order=205)
def hidden(facts: Facts) -> Iterator[Found]:
    """CUDA_VISIBLE_DEVICES leaves CUDA no GPU, or fewer than it lists."""
    seen, blocked = visible(facts), blocked_by(facts)
    # NVML does not list MIG instances: only CUDA shows whether one exists.
    gone = seen is not None and seen.kind == "MIG-" and blocked == "visible-devices-unknown"
    if seen is None or (not seen.why and seen.entries and not gone) or (blocked is None and seen.only_ended):
        return
    name: str
    named = sum(bool(entry.strip()) for entry in seen.value.split(","))
    if blocked in ("visible-devices-none", "visible-devices-unknown"):
        name, left = blocked, "no framework sees a GPU"
    elif blocked is None and len(facts.driver.cuda.devices) == len(seen.entries) < named:
        count = len(seen.entries)
        name = "visible-devices-mixed" if seen.why == "mixed" else "visible-devices-unknown"
        left = f"CUDA shows {count} GPU{'' if count == 1 else 's'} of the {named} that it names"
    else:
        return
    cards = readable_cards(facts)
    has = f"the GPUs here are {listing(_index_and_uuid(card) for card in cards)}" if cards else ""
    why = {
        "empty": "is empty" if not seen.value.strip() else "has an empty entry, which ends the list",
        "negative": f"has {seen.stopped_at}, which ends the list",
        "word": f"has {seen.stopped_at!r}, which is neither an index nor a UUID and ends the list",
        "repeated": f"names {seen.stopped_at} twice, which CUDA treats as an empty list",
        "absent": f"names {seen.stopped_at}, which does not exist here and ends the list",
        "ambiguous": f"names {seen.stopped_at}, with which more than one UUID begins, and which ends the list",
        "mixed": f"mixes indices and UUIDs, and CUDA stops at {seen.stopped_at}, the first of another kind",
    }[seen.why or "empty"]
    if gone:
        why = f"names {listing(seen.entries)}, and CUDA shows no such instance of a GPU"
    # CUDA's indices skip the GPUs that NVML does not let this process use.
    places = range(len(cards)) if len(cards) < len(facts.driver.nvml.devices) else [card.index for card in cards]
    indices = ",".join(str(place) for place in places) or "0"
    remedy = f"name existing GPUs, each once, all by index or all by UUID: export CUDA_VISIBLE_DEVICES={indices}"
    if seen.why in ("empty", "negative") and not seen.entries:
        remedy = "unset CUDA_VISIBLE_DEVICES"
    if gone:
        remedy = "nvidia-smi -L  # lists the instances with their UUIDs: export CUDA_VISIBLE_DEVICES=MIG-..."
    yield Found(
        f"CUDA_VISIBLE_DEVICES {why}, so {left}",
        (
            variable(facts, visible_devices.VARIABLE),
            has,
            f"cuInit: {facts.driver.cuda.init}, GPUs shown: {len(facts.driver.cuda.devices)}",
        ),
        remedy,
        severity=Severity.ERROR if blocked is not None else Severity.WARNING,
        name=name,
    )


@check("device-order", order=210)
def device_order(facts: Facts) -> Iterator[Found]:
    """CUDA numbers the GPUs differently from nvidia-smi."""
    shown, cards = facts.driver.cuda.devices, facts.driver.nvml.devices
    indices = [next((card.index for card in cards if same_gpu(card.uuid, device.uuid)), -1) for device in shown]
    if len(cards) < 2 or not indices or -1 in indices:
        return
    asked = _expected_indices(facts, len(shown))
    evidence = [
        f"cuda:{device.ordinal} is GPU {index} of nvidia-smi: {device.name or device.uuid}"
        for device, index in zip(shown, indices, strict=True)
    ]
    evidence.append(variable(facts, visible_devices.VARIABLE))
    first = f"cuda:0 is GPU {indices[0]} of nvidia-smi"
    if asked is not None and asked != indices:
        wrong = next(place for place, pair in enumerate(zip(asked, indices, strict=True)) if pair[0] != pair[1])
        yield Found(
            f"CUDA numbers the GPUs fastest first and nvidia-smi by their place on the bus: cuda:{wrong} is GPU "
            f"{indices[wrong]} of nvidia-smi and not GPU {asked[wrong]}",
            [*evidence, variable(facts, _ORDER) if facts.environment.get(_ORDER) else f"{_ORDER} is not set"],
            f"export {_ORDER}=PCI_BUS_ID",
        )
    elif evidence[-1] and indices != sorted(indices):
        yield Found(
            f"CUDA_VISIBLE_DEVICES orders the GPUs differently from nvidia-smi: {first}",
            evidence,
            "nothing to do if this is meant; in a budget name GPUs by their UUIDs",
            severity=Severity.INFO,
        )


@check("compute-capability", order=215)
def compute_capability(facts: Facts) -> Iterator[Found]:
    """A framework has no code for a GPU."""
    if blocked_by(facts) is not None:
        return
    for name, framework in facts.frameworks.items():
        lacking = without_code(facts, framework)
        if not lacking or framework.gpu is False:
            continue
        works = computes(framework)
        listed = ", ".join(framework.architectures)
        versions = listing(f"{device.capability[0]}.{device.capability[1]}" for device in lacking)
        evidence = [
            *(
                f"cuda:{device.ordinal} ({device.name}) has compute capability {_capability(device)}"
                for device in lacking
            ),
            f"{full_name(facts, name)} has code for {listed}" if listed else "",
            error_line(facts, name) if failed_stage(framework) is not None else "",
        ]
        others = [device for device in facts.driver.cuda.devices if device not in lacking]
        remedy = f"install a build of {name} that has code for compute capability {versions}"
        if listed:
            older = min(device.capability for device in lacking) < oldest(framework.architectures)
            remedy += ": an older release, as new ones drop old GPUs" if older else ", usually a newer release"
        if works and others:
            remedy += f"; or leave the GPU out: CUDA_VISIBLE_DEVICES={valid_uuids(device.uuid for device in others)}"
        yield Found(
            f"{full_name(facts, name)} has no code for {listing(_name(device) for device in lacking)} (compute "
            f"capability {versions})",
            evidence,
            remedy,
            name,
            severity=Severity.WARNING if works else Severity.ERROR,
        )


@check("mig", order=220)
def mig(facts: Facts) -> Iterator[Found]:
    """A GPU is divided by MIG: CUDA shows a process one instance, or none."""
    divided = [card for card in facts.driver.nvml.devices if card.mig]
    blocked, shown = blocked_by(facts), facts.driver.cuda.devices
    if blocked is None and not any(device.uuid.startswith("MIG-") for device in shown):
        divided = [card for card in divided if any(same_gpu(card.uuid, device.uuid) for device in shown)]
    if not divided or blocked not in (None, "mig"):
        return
    names = listing(f"GPU {card.index} ({card.name})" for card in divided)
    one = len(divided) == 1
    # Switching MIG off ends all instances: advise it only outside containers and if no process uses the GPU.
    alone = not facts.system.container and not any(card.processes for card in divided)
    off = f"sudo nvidia-smi -i {','.join(str(card.index) for card in divided)} -mig 0  # with nothing running on it"
    cause = f"{names} {'is' if one else 'are'} divided by MIG: CUDA shows one instance, and memguard.init refuses it"
    remedy = "run on a whole GPU (another one by CUDA_VISIBLE_DEVICES), or without a budget"
    if alone:
        remedy += f"; or without MIG: {off}"
    if blocked == "mig":
        cause = f"{names} {'has' if one else 'have'} MIG enabled and no instance that this process may use"
        remedy = "nvidia-smi -L  # lists the instances; on the host sudo nvidia-smi mig -cgi PROFILE -C makes one"
        if alone:
            remedy += f"; without MIG: {off}"
    yield Found(
        cause,
        (
            *(f"NVML: GPU {card.index} ({card.uuid}) has MIG enabled" for card in divided),
            *(f"cuda:{device.ordinal} is {device.uuid} ({device.name})" for device in shown),
            f"cuInit: {facts.driver.cuda.init}",
        ),
        remedy,
        divided[0].uuid if one else "",
        severity=Severity.INFO if blocked is None and facts.budget is None else Severity.ERROR,
    )


@check("compute-mode", order=225)
def compute_mode(facts: Facts) -> Iterator[Found]:
    """The compute mode of a GPU allows one process at a time, or none."""
    if blocked_by(facts) is not None:
        return
    refused = [name for name, framework in facts.frameworks.items() if busy(framework)]
    for card in exclusive(facts):
        prohibited = card.mode == "Prohibited"
        evidence = [f"NVML: GPU {card.index} ({card.name}) has compute mode {card.mode}"]
        evidence += [f"process {pid} uses it" for pid in card.processes]
        own = has_context(facts, card) and not prohibited
        if own:
            evidence.append("the process that called the doctor has a context on it")
        evidence += [error_line(facts, name) for name in refused]
        if prohibited:
            cause = f"GPU {card.index} ({card.name}) is in compute mode Prohibited, in which no process may use it"
        elif own and refused:
            cause = (
                f"this process uses GPU {card.index} ({card.name}), which allows one process at a time (compute mode "
                f"{card.mode}), so {listing(refused)} could not be tried"
            )
        elif card.processes and refused:
            cause = (
                f"GPU {card.index} ({card.name}) allows one process at a time (compute mode {card.mode}), and process "
                f"{listing(card.processes)} uses it"
            )
        else:
            cause = f"GPU {card.index} ({card.name}) allows one process at a time (compute mode {card.mode})"
        yield Found(
            cause,
            evidence,
            _IN_A_SHELL
            if own and refused
            else f"sudo nvidia-smi -i {card.index} -c DEFAULT"
            if prohibited or refused
            else f"nothing to do for one process; for several: sudo nvidia-smi -i {card.index} -c DEFAULT",
            card.uuid,
            severity=Severity.INFO if not (prohibited or refused) else Severity.WARNING if own else Severity.ERROR,
        )


@check("peer-access", order=230)
def peer_access(facts: Facts) -> Iterator[Found]:
    """GPUs that cannot read each other's memory."""
    shown = facts.driver.cuda.devices
    if any(device.uuid.startswith("MIG-") for device in shown):
        return
    apart = [
        (one.ordinal, other.ordinal)
        for place, one in enumerate(shown)
        for other in shown[place + 1 :]
        if other.ordinal not in one.peers or one.ordinal not in other.peers
    ]
    if apart:
        pairs = len(shown) * (len(shown) - 1) // 2
        which = "no two GPUs can" if len(apart) == pairs else f"{len(apart)} of {pairs} pairs of GPUs cannot"
        named = listing(f"cuda:{one} and cuda:{other}" for one, other in apart[:4])
        yield Found(
            f"{which} reach each other's memory, so copies between them go through host memory",
            (
                f"cuDeviceCanAccessPeer: no for {named}{f' and {len(apart) - 4} more' if len(apart) > 4 else ''}",
                *(f"cuda:{device.ordinal}: {device.name}" for device in shown),
            ),
            "nvidia-smi topo -p2p r  # says why: different GPUs, a virtual machine, or a bus that does not allow it",
        )


@check("card-filled", order=235)
def card_filled_by_others(facts: Facts) -> Iterator[Found]:
    """Other processes leave little or no memory on a GPU."""
    if blocked_by(facts) is not None:
        return
    cards = filled_by_others(facts)
    for card in cards:
        victims = [name for name, framework in facts.frameworks.items() if out_of_memory(failed_stage(framework))]
        if len(cards) > 1 and not same_gpu(card.uuid, facts.driver.cuda.devices[0].uuid):
            victims = []  # the probes ran out of memory on GPU 0, which is full too
        others = held_by_others(facts, card)
        holders = sorted(card.processes.items(), key=lambda pair: -(pair[1] or 0))
        most = "which process holds it is not visible here"
        if holders:
            named = listing(f"process {pid} ({format_size(size)})" for pid, size in holders[:3])
            most = f"{named} {'hold' if len(holders) > 1 else 'holds'} it"
        evidence = [
            f"NVML: {format_size(card.free)} free of {format_size(card.total)}, {format_size(others)} held by others",
            *(f"process {pid}: {format_size(size)}" for pid, size in holders[:8]),
        ]
        evidence += [error_line(facts, name) for name in victims]
        end = "nvidia-smi on the host shows who; "
        if holders and not facts.system.container:  # inside a container NVML's PIDs are those of the host
            end = f"end process {holders[0][0]}, "
        yield Found(
            f"other processes have filled GPU {card.index} ({card.name}): {format_size(card.free)} of "
            f"{format_size(card.total)} are free, {most}"
            + (f", and {listing(victims)} ran out of memory" if victims else ""),
            evidence,
            f"{end}use another GPU (CUDA_VISIBLE_DEVICES=...), or wait",
            card.uuid,
            severity=Severity.ERROR if victims else Severity.WARNING,
        )


@check("card-filled", order=240)
def card_filled_by_caller(facts: Facts) -> Iterator[Found]:
    """The process that called the doctor leaves too little memory for the probes."""
    if blocked_by(facts) is not None:
        return
    for card in filled_by_caller(facts):
        victims = [name for name, framework in facts.frameworks.items() if out_of_memory(failed_stage(framework))]
        own = held_by_caller(facts, card)
        called = f"GPU {card.index} ({card.name})"
        holds = f"this process holds {format_size(own)} of {called}" if own else f"this process is on {called}"
        lines = [f"NVML: {format_size(card.free)} free of {format_size(card.total)}"]
        lines.append(f"NVML: {format_size(own)} held by this process" if own else "NVML does not say what it holds")
        lines += [error_line(facts, name) for name in victims]
        yield Found(
            f"{holds}, {format_size(card.free)} are free, and "
            + (
                f"{listing(victims)} ran out of memory in the probe"
                if victims
                else "several frameworks at once ran out of memory"
            ),
            lines,
            _IN_A_SHELL,
            card.uuid,
            severity=Severity.WARNING,
        )


def _expected_indices(facts: Facts, count: int) -> list[int] | None:
    """NVML's indices in the order that the user expects; None if the user lists UUIDs, or if unknown."""
    seen = visible(facts)
    if any(card.error is not None for card in facts.driver.nvml.devices):
        return None  # a scheduler hides GPUs: CUDA numbers only those of the job
    if facts.environment.get(_ORDER) == "PCI_BUS_ID":
        return None
    if seen is None:
        every = sorted(card.index for card in facts.driver.nvml.devices)
        return every if len(every) == count else None
    if seen.kind != "index" or len(seen.entries) != count:
        return None
    return [visible_devices.index_of(entry) for entry in seen.entries]


def _index_and_uuid(card: NvmlDevice) -> str:
    return f"{card.index} ({card.uuid})"


def _name(device: CudaDevice) -> str:
    return device.name or f"cuda:{device.ordinal}"


def _capability(device: CudaDevice) -> str:
    return f"{device.capability[0]}.{device.capability[1]}"
