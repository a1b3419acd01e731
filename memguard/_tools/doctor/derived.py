"""Facts derived from the collected ones, shared by the checks. All functions are pure.

A function with `once` is computed once for each facts object, however many checks call it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memguard._base.units import GIB
from memguard._oom import classify
from memguard._tools.doctor import cuda_libraries, visible_devices
from memguard._tools.doctor.cuda_libraries import Mapped, by_stem, parse
from memguard._tools.doctor.facts import CudaDevice, Facts, FrameworkFacts, NvmlDevice, Probe, Process, Stage, once
from memguard._tools.doctor.visible_devices import VisibleDevices

# versions of driver and CUDA


Version = tuple[int, ...]


def numbers(text: str | None) -> Version:
    """`580.159.04` as numbers; empty if there are none."""
    found = re.match(r"\d+(\.\d+)*", text or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def driver_cuda(facts: Facts) -> Version:
    """The CUDA version of the driver: (13, 0). libcuda's counts before NVML's, as cuda-compat replaces only libcuda."""
    number = facts.driver.cuda.version or facts.driver.nvml.cuda
    return (number // 1000, number % 1000 // 10) if number else ()


def framework_cuda(framework: FrameworkFacts) -> Version:
    """The CUDA version of a framework's build, as two numbers; empty if unknown or built without CUDA."""
    return numbers(framework.cuda)[:2] if framework.gpu is not False else ()


def libcuda_version(facts: Facts) -> Version:
    """The driver's version in the name of libcuda's file; under WSL the name has none."""
    found = re.search(r"libcuda\.so\.(\d{3,}(?:\.\d+)+)$", facts.driver.cuda.path or "")
    return numbers(found.group(1)) if found else ()


def is_compat(facts: Facts) -> bool:
    """Whether the loaded libcuda is from a cuda-compat package."""
    return re.search(r"/compat/|/cuda-compat", facts.driver.cuda.path or "") is not None


# probes


_UNSUPPORTED_PTX = re.compile(r"UNSUPPORTED_PTX_VERSION|unsupported toolchain|Unsupported \.version", re.IGNORECASE)
_BUSY = re.compile(r"DEVICE_UNAVAILABLE|DevicesUnavailable|busy or unavailable", re.IGNORECASE)


def budgeted(facts: Facts) -> tuple[str, ...]:
    """The frameworks that the budget names; none without a budget."""
    return facts.budget.frameworks if facts.budget is not None else ()


def modules(facts: Facts) -> tuple[str, ...]:
    """The imported modules of the calling process; none for the command line."""
    return facts.process.modules if facts.process is not None else ()


@once
def failed_stage(framework: FrameworkFacts) -> Stage | None:
    """The first step of the framework's probe that raised."""
    return framework.probe.failed if framework.probe is not None else None


def fails_at(framework: FrameworkFacts, stage: str) -> bool:
    """Whether this step of the framework's probe raised."""
    failed = failed_stage(framework)
    return failed is not None and failed.name == stage


@once
def computes(framework: FrameworkFacts) -> bool:
    """Whether the framework's probe computed on a GPU."""
    stages = framework.probe.stages if framework.probe is not None else ()
    return bool(framework.gpus) and any(stage.name == "compute" and stage.error is None for stage in stages)


def too_old(facts: Facts, framework: FrameworkFacts) -> bool:
    """Whether the driver's CUDA major is lower than the framework's, and the probe did not compute."""
    built, driver = framework_cuda(framework), driver_cuda(facts)
    return bool(built and driver) and built[0] > driver[0] and not computes(framework)


@once
def unsupported_ptx(framework: FrameworkFacts) -> bool:
    """Whether the driver refused PTX of a newer compiler."""
    stage = failed_stage(framework)
    return stage is not None and _UNSUPPORTED_PTX.search(stage.error or "") is not None


def out_of_memory(stage: Stage | None) -> bool:
    """Whether the step failed for lack of GPU memory."""
    return stage is not None and _out_of_memory(stage)


@once
def _out_of_memory(stage: Stage) -> bool:
    if stage.error is None:
        return False
    kind = stage.kind or stage.error.partition(":")[0]
    mro = (kind, "builtins.Exception")
    return classify.classify(classify.ErrorFacts(kind, mro, stage.error, {})).memory == "gpu"


@once
def busy(framework: FrameworkFacts) -> bool:
    """Whether the probe failed because the GPU is busy, as in compute mode Exclusive_Process."""
    stage = failed_stage(framework)
    return stage is not None and _BUSY.search(stage.error or "") is not None


def messages(probe: Probe | None) -> tuple[str, ...]:
    """All messages of a probe: the errors of its steps, then its lines on stderr."""
    if probe is None:
        return ()
    return (*(stage.error for stage in probe.stages if stage.error is not None), *probe.said)


@once
def mapped(process: Probe | Process) -> tuple[Mapped, ...]:
    """The files of CUDA's libraries that a process has mapped, each once."""
    return tuple(found for found in map(parse, dict.fromkeys(process.libraries)) if found is not None)


@once
def by_library(process: Probe | Process) -> Mapping[str, tuple[Mapped, ...]]:
    """The same files by library."""
    return by_stem(mapped(process))


@once
def not_opened(framework: FrameworkFacts) -> tuple[tuple[str, str], ...]:
    """The libraries that its messages report as not opened: the line, and the library's name."""
    return cuda_libraries.not_opened(messages(framework.probe))


def did_not_finish(probe: Probe | None) -> bool:
    """Whether the probe failed, hung or crashed."""
    return probe is not None and (probe.failed is not None or probe.hung or died(probe))


def died(probe: Probe) -> bool:
    """Whether the probe crashed: by a signal, or by an exit without a failed step."""
    early = probe.exit not in (None, 0) or not probe.complete
    return not probe.hung and (probe.signal is not None or (early and probe.failed is None))


def killed(probe: Probe) -> bool:
    """Whether another process killed the probe: by SIGKILL, or exit code 137 if a shell ran it."""
    return not probe.hung and (probe.signal == "SIGKILL" or (probe.signal is None and probe.exit == 137))


STEPS = ("import", "devices", "compute")


def step(probe: Probe, steps: tuple[str, ...]) -> str:
    """The step in which the probe ended: the first one of `steps` that did not finish."""
    ended_ones = {stage.name for stage in probe.stages}
    following = next((step for step in steps if step not in ended_ones), None)
    return f"in the step {following}" if following is not None else "at its end"


NO_NVCC = re.compile(r"nvcc was not found|No such file or directory: '[^']*nvcc'|error invoking '[^']*nvcc")
NO_COMPILER = re.compile(
    r"Failed to find C compiler|nvcc fatal *: Failed to preprocess host compiler|(?:gcc|g\+\+|cc1plus)['\"]?: "
    r"(?:command )?not found|No such file or directory: '[^']*(?:gcc|g\+\+|cc)'"
)


def imported_from_elsewhere(found: FrameworkFacts) -> bool:
    """Whether `import` loaded the framework from outside its package's folder."""
    if found.path is None or not found.folder:
        return False
    return not found.path.startswith(found.folder.rstrip("/") + "/")


# architectures


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
    """The visible GPUs without code in this framework, by its list of architectures or its probe's error."""
    stage = failed_stage(framework)
    if not framework.architectures:
        refused = stage is not None and _NO_KERNEL.search(stage.error or "") is not None
        return facts.driver.cuda.devices[:1] if refused else ()
    proven = 1 if computes(framework) else 0  # a probe that computed on GPU 0 disproves the list
    return tuple(
        device
        for device in facts.driver.cuda.devices[proven:]
        if not runs_on(framework.architectures, device.capability)
    )


# memory of the GPUs


NO_ROOM = 2 * GIB
"""Bytes. With less free memory a probe may fail: context and workspaces take 0.6 to 1.5 GiB (H200)."""
LITTLE = 0.1
"""A GPU with a lower fraction of free memory counts as full."""


def same_gpu(one: str, other: str) -> bool:
    """Whether two UUIDs identify one GPU; PyTorch's have no prefix."""
    return one.lower().removeprefix("gpu-") == other.lower().removeprefix("gpu-") != ""


@once
def visible_cards(facts: Facts) -> tuple[NvmlDevice, ...]:
    """NVML's devices for the GPUs that CUDA shows, without those divided by MIG."""
    shown = facts.driver.cuda.devices
    return tuple(
        card
        for card in facts.driver.nvml.devices
        if not card.mig and any(same_gpu(card.uuid, device.uuid) for device in shown)
    )


@once
def exclusive(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs whose compute mode allows only one process, or none."""
    return tuple(card for card in visible_cards(facts) if card.mode not in (None, "Default"))


def has_context(facts: Facts, card: NvmlDevice) -> bool:
    """Whether the calling process has a context on the GPU."""
    return facts.process is not None and any(same_gpu(uuid, card.uuid) for uuid in facts.process.contexts)


def held_by_caller(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes that the calling process holds; None if it has a context and NVML does not report its bytes."""
    contexts = facts.process.contexts if facts.process is not None else {}
    total = 0
    for size in (size for uuid, size in contexts.items() if same_gpu(uuid, card.uuid)):
        if size is None:
            return None
        total += size
    return total


def held_by_others(facts: Facts, card: NvmlDevice) -> int | None:
    """Bytes that processes other than the doctor and its caller hold; None if unknown."""
    own = held_by_caller(facts, card)
    return None if card.used is None or own is None else max(0, card.used - own)


@once
def filled_by_others(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs that other processes fill: less than a tenth is free, or a probe ran out of memory."""
    ran_out = _any_out_of_memory(facts)
    return tuple(
        card
        for card in visible_cards(facts)
        if _is_low(card, ran_out) and (held_by_others(facts, card) or 0) > (card.total or 0) / 2
    )


@once
def filled_by_caller(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The visible GPUs on which a probe ran out of memory and the calling process has a context."""
    if not _any_out_of_memory(facts):
        return ()
    others = filled_by_others(facts)
    return tuple(
        card for card in visible_cards(facts) if card not in others and _is_low(card, True) and has_context(facts, card)
    )


@once
def _any_out_of_memory(facts: Facts) -> bool:
    return any(out_of_memory(stage) for _, probe in facts.probes() for stage in probe.stages)


def _is_low(card: NvmlDevice, ran_out: bool) -> bool:
    if card.free is None or not card.total:
        return False
    return card.free < LITTLE * card.total or (ran_out and card.free < NO_ROOM)


# the finding that explains a failure


_NODE = re.compile(r"/dev/nvidia\d+")
_CONTROL, _UVM, _DXG = "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dxg"
_VAGUE = (
    "CUDA_SUCCESS",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_NOT_PERMITTED",
)
"""Results of cuInit with many possible causes; CUDA_SUCCESS if it shows no GPU."""


@once
def blocked_by(facts: Facts) -> str | None:
    """The finding that explains why no framework can use a GPU; None if CUDA shows one, or was not queried.

    Causes in order: libcuda, kernel module, device files, versions, CUDA_VISIBLE_DEVICES, MIG.
    """
    cuda, files = facts.driver.cuda, device_files(facts)
    if cuda.error is None and cuda.init is None:
        # cuInit did not return, or the querying process ended while it read NVML.
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
        return "forward-compatibility" if is_compat(facts) else "driver-mismatch"
    if init not in _VAGUE:
        return "cuda-init-failed"
    return (None if facts.system.wsl else _without_module(facts, files)) or _hidden(facts, init) or "cuda-init-failed"


def _not_loaded(facts: Facts, error: str) -> str:
    """The cause if libcuda could not be loaded."""
    if "cannot open shared object file" not in error:
        return "cuda-init-failed"  # the file exists and is damaged
    if facts.system.container and (facts.system.wsl or facts.driver.module is not None):
        # Apptainer always mounts the host's /dev; the libraries come with --nv.
        if facts.system.container == "apptainer" or (_DXG if facts.system.wsl else _CONTROL) not in facts.driver.files:
            return "container-without-gpu"
        if not has_capability(facts, "compute"):
            return "container-capabilities"
    return "driver-absent"


def _without_module(facts: Facts, files: dict[str, str]) -> str | None:
    """The cause if the kernel module is missing, not accessible, or of another version."""
    nodes = [path for path in files if _NODE.fullmatch(path)]
    if facts.driver.module is None and _CONTROL not in files:
        return "driver-absent"
    if not nodes or _CONTROL not in files:
        return "container-without-gpu" if facts.system.container else "device-files"
    if _versions_differ(facts):
        return "forward-compatibility" if is_compat(facts) else "driver-mismatch"
    if all(files[path] != "ok" for path in nodes) or any(files.get(path) != "ok" for path in (_CONTROL, _UVM)):
        return "device-files"
    return None


def _hidden(facts: Facts, init: str) -> str | None:
    """The cause if the driver works and shows no GPU."""
    if init == "CUDA_ERROR_UNKNOWN":
        return None
    seen = visible(facts)
    if seen is not None and not seen.entries:
        return "visible-devices-unknown" if seen.why in ("absent", "ambiguous") else "visible-devices-none"
    if seen is not None and seen.kind == "MIG-":
        return "visible-devices-unknown"  # the listed MIG instance no longer exists
    cards = facts.driver.nvml.devices
    return "mig" if cards and all(card.mig for card in cards) else None


def _versions_differ(facts: Facts) -> bool:
    """Whether the kernel module and the libraries have different driver versions."""
    if facts.driver.nvml.error == "NVMLError_LibRmVersionMismatch":
        return True
    module, library = numbers(facts.driver.module), libcuda_version(facts)
    return bool(module and library) and module != library


def no_gpu(facts: Facts) -> bool:
    """Whether no framework can use a GPU, for a reason in `blocked_by`."""
    return blocked_by(facts) is not None


@once
def device_files(facts: Facts) -> dict[str, str]:
    """The device files that CUDA needs, with the result of opening each."""
    return {
        path: state for path, state in facts.driver.files.items() if path in (_CONTROL, _UVM) or _NODE.fullmatch(path)
    }


def readable_cards(facts: Facts) -> tuple[NvmlDevice, ...]:
    """The GPUs that NVML gives a handle for. CUDA shows none of the others, which are lost or another job's."""
    return tuple(card for card in facts.driver.nvml.devices if card.error is None)


@once
def visible(facts: Facts) -> VisibleDevices | None:
    """CUDA_VISIBLE_DEVICES applied to the GPUs that NVML shows; None if it is not set."""
    value = facts.environment.get(visible_devices.VARIABLE)
    if value is None:
        return None
    cards = readable_cards(facts) if facts.driver.nvml.error is None else ()
    uuids = [card.uuid for card in cards] if cards and all(card.uuid for card in cards) else None
    nodes = sum(_NODE.fullmatch(path) is not None for path in facts.driver.files)
    return visible_devices.parse(value, len(cards) or nodes or None, uuids)


def has_capability(facts: Facts, capability: str) -> bool:
    """Whether NVIDIA_DRIVER_CAPABILITIES gives a container this capability; true if the variable is not set."""
    given = facts.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    return not given or not {capability, "all"}.isdisjoint(part.strip() for part in given.split(","))


def both_xla_fractions(facts: Facts) -> tuple[str, ...]:
    """Both variables of JAX's memory fraction, as NAME=value, if they disable the GPU; empty otherwise."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    found = tuple(f"{name}={facts.environment[name]}" for name in names if facts.environment.get(name))
    jax = facts.frameworks.get("jax")
    return found if len(found) == len(names) and jax is not None and jax.gpu is not False and not jax.gpus else ()


@once
def explained(facts: Facts, name: str) -> bool:
    """Whether a finding about the driver, the devices or memory explains the failure of this framework's probe."""
    framework = facts.frameworks.get(name)
    if framework is None:
        return False
    return bool(
        no_gpu(facts)
        or too_old(facts, framework)
        or unsupported_ptx(framework)
        or (without_code(facts, framework) and not computes(framework))
        or ((filled_by_others(facts) or filled_by_caller(facts)) and out_of_memory(failed_stage(framework)))
        or (exclusive(facts) and busy(framework))
        or (name == "jax" and both_xla_fractions(facts) and not fails_at(framework, "import"))
    )


# NumPy


_COMPILED = re.compile(
    r"compiled using NumPy 1\.x cannot be run in|_ARRAY_API not found|numpy\.dtype size changed"
    r"|numpy\.ndarray size changed|numpy\.core\.multiarray failed to import|numpy\._core\.multiarray failed to import"
    r"|module compiled against (?:ABI|API) version",
)
NUMBA_NEEDS = re.compile(r"Numba needs NumPy (?P<major>\d+)\.(?P<minor>\d+) or (?P<which>less|greater)")
REMOVED = re.compile(r"module 'numpy' has no attribute '(\w+)'")


@once
def numpy_messages(facts: Facts, framework: str) -> tuple[str, ...]:
    """The lines of a framework's messages that report an unsupported NumPy."""
    patterns = (_COMPILED, NUMBA_NEEDS, REMOVED)
    return tuple(
        line
        for text in messages(facts.frameworks[framework].probe)
        for line in text.splitlines()
        if any(pattern.search(line) for pattern in patterns)
    )


# frameworks that use no GPU


_JAX_WITHOUT_CUDA = "CUDA-enabled jaxlib is not installed"
_NO_NUMBA_CUDA = re.compile(r"No module named 'numba\.cuda'|cannot import name 'cuda' from 'numba'")


@once
def without_cuda(facts: Facts, name: str) -> bool:
    """Whether the framework is built without CUDA."""
    found = facts.frameworks[name]
    if name == "jax" and any(_JAX_WITHOUT_CUDA in text for text in messages(found.probe)):
        return True
    if name == "numba" and "numba-cuda" not in (*found.distributions, *facts.packages):
        return _numba_without_cuda(facts)
    return found.gpu is False


def _numba_without_cuda(facts: Facts) -> bool:
    """Whether Numba lacks numba-cuda. Its built-in CUDA support needs the system's toolkit.

    Most users install Numba as a compiler for CPUs, so an error of the built-in support counts as a CPU build.
    """
    found = facts.frameworks["numba"]
    if found.gpu is False or any(_NO_NUMBA_CUDA.search(text) for text in messages(found.probe)):
        return True
    failed = failed_stage(found)
    return failed is not None and failed.name != "import" and not numpy_messages(facts, "numba")


def wants_cuda(facts: Facts, name: str) -> bool:
    """Whether the user wants this framework on a GPU. Numba is as often used for CPUs; the others are not."""
    if name != "numba":
        return True
    imported = [module for module, _ in facts.script.imports] if facts.script is not None else []
    used = any(f"{module}.".startswith("numba.cuda.") for module in (*imported, *modules(facts)))
    return used or name in budgeted(facts)


def kept_off(facts: Facts, name: str) -> bool:
    """Whether an environment variable disables the GPU for this framework."""
    given = facts.environment
    if name == "jax":
        asked = given.get("JAX_PLATFORMS") or given.get("JAX_PLATFORM_NAME") or ""
        return bool(asked) and not re.search("cuda|gpu", asked)
    return name == "numba" and any(given.get(key) == "1" for key in ("NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"))
