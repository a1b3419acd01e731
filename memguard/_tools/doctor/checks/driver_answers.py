"""How findings about the driver quote what was read."""

from __future__ import annotations

import re

from memguard._tools.doctor.checks.explanations import device_files
from memguard._tools.doctor.checks.version_numbers import Version
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Severity

PROC = "/proc/driver/nvidia/version"
START = "docker run --gpus all ..."


def driver_state(facts: Facts) -> tuple[str, ...]:
    """Kernel module, bus, device files, libcuda and NVML, one line of evidence each."""
    driver = facts.driver
    found = device_files(facts)
    if facts.system.wsl:
        return driver_messages(facts)
    return (
        f"{PROC}: {'not there' if driver.module is None else driver.module or 'without a version'}",
        f"NVIDIA GPUs on the bus: {', '.join(driver.pci) or 'none seen'}",
        f"device files: {', '.join(sorted(found)) or 'none'}",
        *driver_messages(facts),
    )


def driver_messages(facts: Facts) -> tuple[str, ...]:
    """What libcuda and NVML returned."""
    cuda, read = facts.driver.cuda, facts.driver.nvml
    return (
        *([f"libcuda: {cuda.error}"] if cuda.error is not None else []),
        *([f"cuInit: {cuda.init} ({cuda.path})"] if cuda.init is not None else []),
        *([f"NVML: {read.error}"] if read.error is not None else []),
    )


def broken_off(facts: Facts) -> str | None:
    """How the process that queries the driver ended too early; None if it finished."""
    cuda = facts.driver.cuda
    answer = cuda.init if cuda.init is not None or cuda.path else facts.driver.nvml.error
    found = re.match(r"no answer in \d+ s|ended by \w+|ended with exit code -?\d+", answer or "")
    return found[0].replace("no answer", "gave no answer") if found else None


def start(kind: str | None) -> str:
    """The command that starts a container of this kind with GPUs."""
    return {
        "podman": "podman run --device nvidia.com/gpu=all ...",
        "kubernetes": "resources: {limits: {nvidia.com/gpu: 1}}   in the container's spec",
        "apptainer": "apptainer exec --nv ...",
        "lxc": "lxc config device add NAME gpu gpu && lxc config set NAME nvidia.runtime=true",
    }.get(kind or "", START)


def with_capabilities(kind: str | None) -> str:
    """The command that starts a container of this kind with the driver's CUDA and NVML."""
    return {
        "podman": "podman run --device nvidia.com/gpu=all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...",
        "kubernetes": "env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,utility'}]   in the container's spec",
        "apptainer": "apptainer exec --nv ...",
        "lxc": "lxc config set NAME nvidia.driver.capabilities=compute,utility && lxc restart NAME",
    }.get(kind or "", START.replace("...", "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."))


def without_init(facts: Facts) -> Severity:
    """The severity if frameworks work and memguard.init fails: an error if a budget is to be applied."""
    return Severity.ERROR if facts.budget is not None else Severity.WARNING


def digits(version: Version) -> str:
    """The version with the zeros of driver names: 580.65.06."""
    return ".".join(str(part) if place < 2 else f"{part:02d}" for place, part in enumerate(version))
