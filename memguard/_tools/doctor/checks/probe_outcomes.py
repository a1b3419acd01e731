"""How a probe went: what it computed, which step raised, how it died, and for which well-known reason."""

from __future__ import annotations

import re

from memguard._oom import classify
from memguard._tools.doctor.checks.version_numbers import cuda_of, cuda_of_driver
from memguard._tools.doctor.facts import Facts, FrameworkFacts, Probe, Stage

_UNSUPPORTED_PTX = re.compile(r"UNSUPPORTED_PTX_VERSION|unsupported toolchain|Unsupported \.version", re.IGNORECASE)
_BUSY = re.compile(r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable", re.IGNORECASE)


def failed_stage(framework: FrameworkFacts) -> Stage | None:
    """The first step of its probe that raised."""
    return framework.probe.failed if framework.probe is not None else None


def fails_at(framework: FrameworkFacts, stage: str) -> bool:
    """Whether that step of its probe is the one that raised."""
    failed = failed_stage(framework)
    return failed is not None and failed.name == stage


def computes(framework: FrameworkFacts) -> bool:
    """Whether its probe computed on a GPU."""
    stages = framework.probe.stages if framework.probe is not None else ()
    return bool(framework.gpus) and any(stage.name == "compute" and stage.error is None for stage in stages)


def too_old(facts: Facts, framework: FrameworkFacts) -> bool:
    """Whether the driver's CUDA major is lower than the framework's and it did not compute."""
    built, driver = cuda_of(framework), cuda_of_driver(facts)
    return bool(built and driver) and built[0] > driver[0] and not computes(framework)


def unsupported_ptx(framework: FrameworkFacts) -> bool:
    """Whether the driver refused code of a newer compiler."""
    stage = failed_stage(framework)
    return stage is not None and _UNSUPPORTED_PTX.search(stage.error or "") is not None


def out_of_memory(stage: Stage | None) -> bool:
    """Whether it failed for lack of GPU memory."""
    if stage is None or stage.error is None:
        return False
    kind = stage.kind or stage.error.partition(":")[0]
    mro = (kind, "builtins.Exception")
    return classify.classify(classify.ErrorFacts(kind, mro, stage.error, {})).memory == "gpu"


def busy(framework: FrameworkFacts) -> bool:
    """Whether its probe got the error that the GPU is busy, as under compute mode Exclusive_Process."""
    stage = failed_stage(framework)
    return stage is not None and _BUSY.search(stage.error or "") is not None


def messages(probe: Probe | None) -> tuple[str, ...]:
    """All its messages: errors of its steps, then lines on stderr."""
    if probe is None:
        return ()
    return (*(stage.error for stage in probe.stages if stage.error is not None), *probe.said)


def did_not_finish(probe: Probe | None) -> bool:
    """Whether it failed, hung or died."""
    return probe is not None and (probe.failed is not None or probe.hung or died(probe))


def died(probe: Probe) -> bool:
    """Whether it died: by a signal, or by an exit that no step explains."""
    early = probe.exit not in (None, 0) or not probe.complete
    return not probe.hung and (probe.signal is not None or (early and probe.failed is None))


def killed(probe: Probe) -> bool:
    """Whether it was killed by SIGKILL, which no library does to itself. A shell in between reports it as 137."""
    return not probe.hung and (probe.signal == "SIGKILL" or (probe.signal is None and probe.exit == 137))
