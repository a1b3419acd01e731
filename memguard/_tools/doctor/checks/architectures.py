"""Which GPUs a framework has code for."""

from __future__ import annotations

import re

from memguard._tools.doctor.checks.probe_outcomes import computes, failed_stage
from memguard._tools.doctor.facts import CudaDevice, Facts, FrameworkFacts

_NO_KERNEL = re.compile(r"no kernel image is available|NO_BINARY_FOR_GPU|NO_KERNEL_IMAGE|NoKernelImage", re.IGNORECASE)
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code of these architectures runs on a GPU of this capability.

    Machine code (sm_) runs within its major from its minor upwards, PTX (compute_) from its capability upwards. With an
    `a` code runs on exactly its capability; with an `f` PTX too only within its major.
    """
    for found in filter(None, map(_ARCHITECTURE.fullmatch, architectures)):
        major, minor = int(found[2]), int(found[3])
        if found[4] == "a":
            fits = capability == (major, minor)
        elif found[1] == "sm" or found[4] == "f":
            fits = capability[0] == major and capability[1] >= minor
        else:
            fits = capability >= (major, minor)
        if fits:
            return True
    return False


def oldest(architectures: tuple[str, ...]) -> tuple[int, int]:
    """The lowest capability among these architectures."""
    parsed = filter(None, map(_ARCHITECTURE.fullmatch, architectures))
    return min(((int(found[2]), int(found[3])) for found in parsed), default=(0, 0))


def without_code(facts: Facts, framework: FrameworkFacts) -> tuple[CudaDevice, ...]:
    """The visible GPUs that it has no code for, by its list of architectures, or by its probe's error."""
    stage = failed_stage(framework)
    if not framework.architectures:
        refused = stage is not None and _NO_KERNEL.search(stage.error or "") is not None
        return facts.driver.cuda.devices[:1] if refused else ()
    proven = 1 if computes(framework) else 0  # a probe computes on GPU 0: if that worked, the list is wrong
    return tuple(
        device
        for device in facts.driver.cuda.devices[proven:]
        if not runs_on(framework.architectures, device.capability)
    )
