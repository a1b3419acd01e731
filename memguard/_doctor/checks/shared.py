"""What several checks ask of the facts: what works, what does not, and which finding already says why."""

from __future__ import annotations

import re

from memguard._doctor.checks import visible_devices
from memguard._doctor.checks.visible_devices import Visible
from memguard._doctor.facts import CudaDevice, Facts, Framework, NvmlDevice, Stage
from memguard._findings import Name
from memguard._oom import classify
from memguard._units import GIB

Version = tuple[int, ...]

NO_ROOM = 2 * GIB
"""With less than this free a probe may run out of memory: context and workspaces take 0.6 to 1.5 GiB (H200)."""
LITTLE = 0.1
"""Less than this part of a card free is little."""

_UNSUPPORTED_PTX = re.compile(r"UNSUPPORTED_PTX_VERSION|unsupported toolchain|Unsupported \.version", re.IGNORECASE)
_NO_KERNEL = re.compile(r"no kernel image is available|NO_BINARY_FOR_GPU|NO_KERNEL_IMAGE|NoKernelImage", re.IGNORECASE)
_BUSY = re.compile(r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable", re.IGNORECASE)
_NODE = re.compile(r"/dev/nvidia\d+")
_CONTROL, _UVM, _DXG = "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg"
_VAGUE = (
    "CUDA_SUCCESS",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_NOT_PERMITTED",
)
"""What cuInit says for many reasons; success counts where it shows no GPU."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


# Versions.


def numbers(text: str | None) -> Version:
    """`580.159.04` as numbers; empty where there are none."""
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def cuda_of_driver(facts: Facts) -> Version:
    """The CUDA that the driver gives: (13, 0). Of libcuda first, which may be another than NVML says (cuda-compat)."""
    number = facts.driver.cuda.version or facts.driver.nvml.cuda
    return (number // 1000, number % 1000 // 10) if number else ()


def cuda_of(framework: Framework) -> Version:
    """The CUDA that it was built for, two numbers; empty where it does not say, or is no build for CUDA."""
    return numbers(framework.cuda)[:2] if framework.gpu is not False else ()


def libcuda_version(facts: Facts) -> Version:
    """The driver's version in the name of libcuda's file; WSL's name has none."""
    found = re.search(r"libcuda\.so\.(\d{3,}(?:\.\d+)+)$", facts.driver.cuda.path or "")
    return numbers(found.group(1)) if found else ()


def compat(facts: Facts) -> bool:
    """Whether the libcuda that was loaded is one of a cuda-compat package."""
    return re.search(r"/compat/|/cuda-compat", facts.driver.cuda.path or "") is not None


# What works.


def failure(framework: Framework) -> Stage | None:
    """The first step of its probe that raised."""
    return framework.probe.failed if framework.probe is not None else None


def fails_at(framework: Framework, stage: str) -> bool:
    """Whether that step of its probe is the one that raised."""
    failed = failure(framework)
    return failed is not None and failed.name == stage


def computes(framework: Framework) -> bool:
    """Its probe has computed on a GPU."""
    stages = framework.probe.stages if framework.probe is not None else ()
    return bool(framework.gpus) and any(stage.name == "compute" and stage.error is None for stage in stages)


def too_old(facts: Facts, framework: Framework) -> bool:
    """The driver's CUDA has a lower major than the framework's, and it has not computed all the same."""
    built, driver = cuda_of(framework), cuda_of_driver(facts)
    return bool(built and driver) and built[0] > driver[0] and not computes(framework)


def unsupported_ptx(framework: Framework) -> bool:
    """The driver refused what a newer compiler made."""
    stage = failure(framework)
    return stage is not None and _UNSUPPORTED_PTX.search(stage.error or "") is not None


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code of these architectures runs there.

    Machine code (sm_) within its major, from its minor upwards; PTX (compute_) from its capability upwards. With an `a`
    it runs on exactly that one, with an `f` as PTX too only within its major.
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
    """The lowest capability among them."""
    parsed = filter(None, map(_ARCHITECTURE.fullmatch, architectures))
    return min(((int(found[2]), int(found[3])) for found in parsed), default=(0, 0))


def without_code(facts: Facts, framework: Framework) -> tuple[CudaDevice, ...]:
    """The visible GPUs that it has no code for: by its list of architectures, or by what its probe ran into."""
    stage = failure(framework)
    if not framework.architectures:
        refused = stage is not None and _NO_KERNEL.search(stage.error or "") is not None
        return facts.driver.cuda.devices[:1] if refused else ()
    proven = 1 if computes(framework) else 0  # a probe computes on GPU 0: what it did there no list refutes
    return tuple(
        device
        for device in facts.driver.cuda.devices[proven:]
        if not runs_on(framework.architectures, device.capability)
    )


# Memory.


def out_of_memory(stage: Stage | None) -> bool:
    """Whether it failed for want of GPU memory."""
    if stage is None or stage.error is None:
        return False
    kind = stage.kind or stage.error.partition(":")[0]
    mro = (kind, "builtins.Exception")
    return classify.classify(classify.ErrorFacts(kind, mro, stage.error, {})).memory == "gpu"


def same(one: str, other: str) -> bool:
    """Whether two UUIDs are one; PyTorch's have no prefix."""
    return one.lower().removeprefix("gpu-") == other.lower().removeprefix("gpu-") != ""


def visible_cards(facts: Facts) -> tuple[NvmlDevice, ...]:
    """NVML's side of the GPUs that CUDA shows here; those that MIG has divided have no side of their own."""
    shown = facts.driver.cuda.devices
    return tuple(
        card
        for card in facts.driver.nvml.devices
        if not card.mig and any(same(card.uuid, device.uuid) for device in shown)
    )


def has_context(facts: Facts, card: NvmlDevice) -> bool:
    """Whether the process that called the doctor is on it."""
    return facts.process is not None and any(same(uuid, card.uuid) for uuid in facts.process.contexts)


def held_by_itself(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes of it that the process that called the doctor holds; None where it has a context and NVML does not say."""
    contexts = facts.process.contexts if facts.process is not None else {}
    total = 0
    for size in (size for uuid, size in contexts.items() if same(uuid, card.uuid)):
        if size is None:
            return None
        total += size
    return total


def held_by_others(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes of it that neither the doctor nor the process that called it holds; None where nobody can say whose."""
    own = held_by_itself(facts, card)
    return None if card.used is None or own is None else max(0, card.used - own)


def filled(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs that others leave little of: less than a tenth, or too little for a probe that ran out of it."""
    ran_out = _ran_out(facts)
    return tuple(
        card
        for card in visible_cards(facts)
        if _little(card, ran_out) and (held_by_others(facts, card) or 0) > (card.total or 0) / 2
    )


def filled_by_itself(facts: Facts) -> tuple[NvmlDevice, ...]:
    """Those others where a probe found no room and the process that called the doctor has its part in it."""
    if not _ran_out(facts):
        return ()
    others = filled(facts)
    return tuple(
        card for card in visible_cards(facts) if card not in others and _little(card, True) and has_context(facts, card)
    )


def _ran_out(facts: Facts) -> bool:
    return any(out_of_memory(stage) for _, probe in facts.probes() for stage in probe.stages)


def _little(card: NvmlDevice, ran_out: bool) -> bool:
    if card.free is None or not card.total:
        return False
    return card.free < LITTLE * card.total or (ran_out and card.free < NO_ROOM)


# What explains what.


def device_files(facts: Facts) -> dict[str, str]:
    """Those that CUDA needs, with what came of opening them."""
    return {
        path: state for path, state in facts.driver.files.items() if path in (_CONTROL, _UVM) or _NODE.fullmatch(path)
    }


def readable(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The GPUs that NVML shows. Those that it counts and refuses are lost or of others, and CUDA has none of them."""
    return tuple(card for card in facts.driver.nvml.devices if card.error is None)


def visible(facts: Facts) -> Visible | None:
    """CUDA_VISIBLE_DEVICES against the GPUs that NVML sees; None where it is not set."""
    value = facts.environment.get(visible_devices.VARIABLE)
    if value is None:
        return None
    cards = readable(facts) if facts.driver.nvml.error is None else ()
    uuids = [card.uuid for card in cards] if cards and all(card.uuid for card in cards) else None
    nodes = sum(_NODE.fullmatch(path) is not None for path in facts.driver.files)
    return visible_devices.read(value, len(cards) or nodes or None, uuids)


def blocked_by(facts: Facts) -> Name | None:
    """The finding that says why no framework can have a GPU here; None where CUDA shows one, or nobody asked it.

    The one cause, from the ground up: libcuda, kernel module, device files, versions, then what hides the GPUs.
    """
    cuda, files = facts.driver.cuda, device_files(facts)
    if cuda.error is None and cuda.init is None:
        # It was loaded and cuInit has not come back; or what asks the driver did not get past NVML.
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
    """Where libcuda could not be loaded."""
    if "cannot open shared object file" not in error:
        return "cuda-init-failed"  # there is one, and it is broken
    if facts.system.container and (facts.system.wsl or facts.driver.module is not None):
        # Apptainer binds the host's /dev, asked for a GPU or not; the libraries come with --nv.
        if facts.system.container == "apptainer" or (_DXG if facts.system.wsl else _CONTROL) not in facts.driver.files:
            return "container-without-gpu"
        if not capable(facts, "compute"):
            return "container-capabilities"
    return "driver-absent"


def _without_module(facts: Facts, files: dict[str, str]) -> Name | None:
    """Where what is under libcuda is not there, not let through, or of another version."""
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
    """Where the driver works and shows none."""
    if init == "CUDA_ERROR_UNKNOWN":
        return None
    seen = visible(facts)
    if seen is not None and not seen.entries:
        return "visible-devices-unknown" if seen.why in ("absent", "ambiguous") else "visible-devices-none"
    if seen is not None and seen.kind == "MIG-":
        return "visible-devices-unknown"  # instances come and go: one that was named is not here any more
    cards = facts.driver.nvml.devices
    return "mig" if cards and all(card.mig for card in cards) else None


def _versions_differ(facts: Facts) -> bool:
    """The kernel module and the libraries are of two drivers."""
    if facts.driver.nvml.error == "NVMLError_LibRmVersionMismatch":
        return True
    module, library = numbers(facts.driver.module), libcuda_version(facts)
    return bool(module and library) and module != library


def capable(facts: Facts, capability: str) -> bool:
    """Whether a container was given it by NVIDIA_DRIVER_CAPABILITIES; true where the variable is not set."""
    given = facts.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    return not given or not {capability, "all"}.isdisjoint(part.strip() for part in given.split(","))


def no_gpu(facts: Facts) -> bool:
    """A finding of the driver or the devices already says why no framework can have a GPU."""
    return blocked_by(facts) is not None


def busy(framework: Framework) -> bool:
    """Its probe was told that the GPU is taken: what compute mode Exclusive_Process does."""
    stage = failure(framework)
    return stage is not None and _BUSY.search(stage.error or "") is not None


def exclusive(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs that only one process at a time may use, or none."""
    return tuple(card for card in visible_cards(facts) if card.mode not in (None, "Default"))


def xla_fractions(facts: Facts) -> tuple[str, ...]:
    """The two variables that keep JAX off the GPU where both are set, as NAME=value; empty where JAX has a GPU."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    found = tuple(f"{name}={facts.environment[name]}" for name in names if facts.environment.get(name))
    jax = facts.frameworks.get("jax")
    return found if len(found) == len(names) and jax is not None and jax.gpu is not False and not jax.gpus else ()


def explained(facts: Facts, name: str) -> bool:
    """Another finding of the driver, the devices or the memory already says why this framework failed in its probe."""
    framework = facts.frameworks.get(name)
    if framework is None:
        return False
    return bool(
        no_gpu(facts)
        or too_old(facts, framework)
        or unsupported_ptx(framework)
        or (without_code(facts, framework) and not computes(framework))
        or ((filled(facts) or filled_by_itself(facts)) and out_of_memory(failure(framework)))
        or (exclusive(facts) and busy(framework))
        or (name == "jax" and xla_fractions(facts) and not fails_at(framework, "import"))
    )
