"""Which finding already explains why a framework has no GPU or failed: other checks then stay silent."""

from __future__ import annotations

import re

from memguard._base.findings import Name
from memguard._tools.doctor.checks import visible_devices
from memguard._tools.doctor.checks.architectures import without_code
from memguard._tools.doctor.checks.gpu_memory import exclusive, filled_by_itself, filled_by_others
from memguard._tools.doctor.checks.probe_outcomes import (
    busy,
    computes,
    failed_stage,
    fails_at,
    out_of_memory,
    too_old,
    unsupported_ptx,
)
from memguard._tools.doctor.checks.version_numbers import compat, libcuda_version, numbers
from memguard._tools.doctor.checks.visible_devices import Visible
from memguard._tools.doctor.facts import Facts, NvmlDevice

_NODE = re.compile(r"/dev/nvidia\d+")
_CONTROL, _UVM, _DXG = "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg"
_VAGUE = (
    "CUDA_SUCCESS",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_NOT_PERMITTED",
)
"""What cuInit returns for many reasons; success counts if it shows no GPU."""


def blocked_by(facts: Facts) -> Name | None:
    """The finding that says why no framework can use a GPU; None if CUDA shows one, or was not asked.

    It is the first cause in this order: libcuda, kernel module, device files, versions, then what hides the GPUs.
    """
    cuda, files = facts.driver.cuda, device_files(facts)
    if cuda.error is None and cuda.init is None:
        # libcuda was loaded and cuInit did not return, or the process that queries the driver ended in NVML.
        return "cuda-init-failed" if cuda.path or facts.driver.nvml.error is not None else None
    if cuda.error is None and cuda.init == "CUDA_SUCCESS" and cuda.devices:
        return None
    if facts.system.wsl and facts.system.container and cuda.error is None and _DXG not in facts.driver.files:
        return "container-without-gpu"
    if facts.system.wsl and cuda.error is None and "/wsl/" not in (cuda.path or "/wsl/"):
        return "wsl"
    if cuda.error is not None:
        return _not_loaded(facts, cuda.error)
    init = cuda.init or ""
    if init == "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE":
        return "forward-compatibility"
    if init == "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH":
        return "forward-compatibility" if compat(facts) else "driver-mismatch"
    if init not in _VAGUE:
        return "cuda-init-failed"
    return (None if facts.system.wsl else _without_module(facts, files)) or _hidden(facts, init) or "cuda-init-failed"


def _not_loaded(facts: Facts, error: str) -> Name:
    """The cause if libcuda could not be loaded."""
    if "cannot open shared object file" not in error:
        return "cuda-init-failed"  # it exists and is damaged
    if facts.system.container and (facts.system.wsl or facts.driver.module is not None):
        # Apptainer always mounts the host's /dev; the libraries come with --nv.
        if facts.system.container == "apptainer" or (_DXG if facts.system.wsl else _CONTROL) not in facts.driver.files:
            return "container-without-gpu"
        if not capable(facts, "compute"):
            return "container-capabilities"
    return "driver-absent"


def _without_module(facts: Facts, files: dict[str, str]) -> Name | None:
    """The cause if the kernel module is missing, not accessible, or of another version."""
    nodes = [path for path in files if _NODE.fullmatch(path)]
    if facts.driver.module is None and _CONTROL not in files:
        return "driver-absent"
    if not nodes or _CONTROL not in files:
        return "container-without-gpu" if facts.system.container else "device-files"
    if _versions_differ(facts):
        return "forward-compatibility" if compat(facts) else "driver-mismatch"
    if all(files[path] != "ok" for path in nodes) or any(files.get(path) != "ok" for path in (_CONTROL, _UVM)):
        return "device-files"
    return None


def _hidden(facts: Facts, init: str) -> Name | None:
    """The cause if the driver works and shows no GPU."""
    if init == "CUDA_ERROR_UNKNOWN":
        return None
    seen = visible(facts)
    if seen is not None and not seen.entries:
        return "visible-devices-unknown" if seen.why in ("absent", "ambiguous") else "visible-devices-none"
    if seen is not None and seen.kind == "MIG-":
        return "visible-devices-unknown"  # MIG instances come and go: the one that is named no longer exists
    cards = facts.driver.nvml.devices
    return "mig" if cards and all(card.mig for card in cards) else None


def _versions_differ(facts: Facts) -> bool:
    """Whether the kernel module and the libraries are of different drivers."""
    if facts.driver.nvml.error == "NVMLError_LibRmVersionMismatch":
        return True
    module, library = numbers(facts.driver.module), libcuda_version(facts)
    return bool(module and library) and module != library


def no_gpu(facts: Facts) -> bool:
    """Whether a finding about the driver or the devices says why no framework can use a GPU."""
    return blocked_by(facts) is not None


def device_files(facts: Facts) -> dict[str, str]:
    """The device files that CUDA needs, each with the result of opening it."""
    return {
        path: state for path, state in facts.driver.files.items() if path in (_CONTROL, _UVM) or _NODE.fullmatch(path)
    }


def readable(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The GPUs that NVML shows. Others that it counts are lost or another job's, and CUDA shows none of those."""
    return tuple(card for card in facts.driver.nvml.devices if card.error is None)


def visible(facts: Facts) -> Visible | None:
    """CUDA_VISIBLE_DEVICES applied to the GPUs that NVML shows; None if it is not set."""
    value = facts.environment.get(visible_devices.VARIABLE)
    if value is None:
        return None
    cards = readable(facts) if facts.driver.nvml.error is None else ()
    uuids = [card.uuid for card in cards] if cards and all(card.uuid for card in cards) else None
    nodes = sum(_NODE.fullmatch(path) is not None for path in facts.driver.files)
    return visible_devices.read(value, len(cards) or nodes or None, uuids)


def capable(facts: Facts, capability: str) -> bool:
    """Whether NVIDIA_DRIVER_CAPABILITIES gives a container this capability; true if the variable is not set."""
    given = facts.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    return not given or not {capability, "all"}.isdisjoint(part.strip() for part in given.split(","))


def both_xla_fractions(facts: Facts) -> tuple[str, ...]:
    """The two variables that keep JAX off the GPU if both are set, as NAME=value; empty if JAX has a GPU."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    found = tuple(f"{name}={facts.environment[name]}" for name in names if facts.environment.get(name))
    jax = facts.frameworks.get("jax")
    return found if len(found) == len(names) and jax is not None and jax.gpu is not False and not jax.gpus else ()


def explained(facts: Facts, name: str) -> bool:
    """Whether a finding about driver, devices or memory already says why this framework failed in its probe."""
    framework = facts.frameworks.get(name)
    if framework is None:
        return False
    return bool(
        no_gpu(facts)
        or too_old(facts, framework)
        or unsupported_ptx(framework)
        or (without_code(facts, framework) and not computes(framework))
        or ((filled_by_others(facts) or filled_by_itself(facts)) and out_of_memory(failed_stage(framework)))
        or (exclusive(facts) and busy(framework))
        or (name == "jax" and both_xla_fractions(facts) and not fails_at(framework, "import"))
    )
