"""The words of findings: phrases, lines of evidence, and commands that users copy into a shell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from memguard._tools.doctor.cuda_libraries import parse
from memguard._tools.doctor.derived import (
    Version,
    device_files,
    driver_cuda,
    failed_stage,
    killed,
    numbers,
)
from memguard._tools.doctor.facts import Facts, FrameworkFacts, Probe
from memguard._tools.doctor.finding import Severity

# phrases


_ENOUGH = 4


def listing(names: Iterable[str]) -> str:
    """Join names: a, b and c."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def shortened(lines: Sequence[str]) -> tuple[str, ...]:
    """The first lines, and the number of further ones."""
    rest = len(lines) - _ENOUGH
    return tuple(lines) if rest <= 0 else (*lines[:_ENOUGH], f"and {rest} more")


def last_line(text: str) -> str:
    """The last line of an error that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def variable(facts: Facts, name: str) -> str:
    """A line of evidence: an environment variable that is set. Empty otherwise."""
    return f"{name}={facts.environment[name]} (environment)" if name in facts.environment else ""


def full_name(facts: Facts, framework: str) -> str:
    """The framework with its version."""
    found = facts.frameworks.get(framework)
    return f"{framework} {found.version}" if found is not None and found.version else framework


def error_line(facts: Facts, framework: str) -> str:
    """A line of evidence: the last line of its probe's error."""
    stage = failed_stage(facts.frameworks[framework])
    return f"{framework}: {last_line((stage.error if stage else None) or '')}"


def built_for(facts: Facts, framework: str) -> str:
    """A line of evidence: the CUDA that it was built for."""
    return f"{full_name(facts, framework)} was built for CUDA {facts.frameworks[framework].cuda}"


def how_it_ended(probe: Probe) -> str:
    if killed(probe):
        return f"was ended from outside ({'SIGKILL' if probe.signal else 'exit code 137'})"
    if probe.signal:
        return f"was ended by {probe.signal}"
    return f"ended {'' if probe.complete else 'early '}with exit code {probe.exit}"


# evidence about the driver


PROC = "/proc/driver/nvidia/version"
START = "docker run --gpus all ..."


def driver_evidence(facts: Facts) -> tuple[str, ...]:
    """Kernel module, bus, device files, libcuda and NVML, one line of evidence each."""
    driver = facts.driver
    found = device_files(facts)
    if facts.system.wsl:
        return driver_errors(facts)
    return (
        f"{PROC}: {'not there' if driver.module is None else driver.module or 'without a version'}",
        f"NVIDIA GPUs on the bus: {', '.join(driver.pci) or 'none seen'}",
        f"device files: {', '.join(sorted(found)) or 'none'}",
        *driver_errors(facts),
    )


def driver_errors(facts: Facts) -> tuple[str, ...]:
    """The errors of libcuda, cuInit and NVML, one line of evidence each."""
    cuda, read = facts.driver.cuda, facts.driver.nvml
    return (
        f"libcuda: {cuda.error}" if cuda.error is not None else "",
        f"cuInit: {cuda.init} ({cuda.path})" if cuda.init is not None else "",
        f"NVML: {read.error}" if read.error is not None else "",
    )


def survey_failure(facts: Facts) -> str | None:
    """How the process that queries the driver ended early; None if it finished."""
    cuda = facts.driver.cuda
    answer = cuda.init if cuda.init is not None or cuda.path else facts.driver.nvml.error
    found = re.match(r"no answer in \d+ s|ended by \w+|ended with exit code -?\d+", answer or "")
    return found[0].replace("no answer", "gave no answer") if found else None


def container_command(kind: str | None) -> str:
    """The command that starts a container of this kind with GPUs."""
    return {
        "podman": "podman run --device nvidia.com/gpu=all ...",
        "kubernetes": "resources: {limits: {nvidia.com/gpu: 1}}   in the container's spec",
        "apptainer": "apptainer exec --nv ...",
        "lxc": "lxc config device add NAME gpu gpu && lxc config set NAME nvidia.runtime=true",
    }.get(kind or "", START)


def capabilities_command(kind: str | None) -> str:
    """The command that starts a container of this kind with the driver's CUDA and NVML."""
    return {
        "podman": "podman run --device nvidia.com/gpu=all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ...",
        "kubernetes": "env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,utility'}]   in the container's spec",
        "apptainer": "apptainer exec --nv ...",
        "lxc": "lxc config set NAME nvidia.driver.capabilities=compute,utility && lxc restart NAME",
    }.get(kind or "", START.replace("...", "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."))


def severity_if_init_fails(facts: Facts) -> Severity:
    """The severity if frameworks work and `memguard.init` fails: an error with a budget."""
    return Severity.ERROR if facts.budget is not None else Severity.WARNING


def digits(version: Version) -> str:
    """Format a version with the zeros of driver names: 580.65.06."""
    return ".".join(str(part) if place < 2 else f"{part:02d}" for place, part in enumerate(version))


# validated parts of commands


_VERSION = re.compile(r"[A-Za-z0-9][\w.+!-]{0,60}", re.ASCII)
_UUID = re.compile(r"(GPU|MIG)-[\w-]+", re.ASCII)


def exactly(version: str | None) -> str:
    """A requirement's version, `==2.11.0`; empty for a missing or invalid version."""
    return f"=={version}" if version and _VERSION.fullmatch(version) else ""


def valid_uuids(values: Iterable[str]) -> str:
    """The valid UUIDs of GPUs and MIG instances, for CUDA_VISIBLE_DEVICES."""
    return ",".join(value for value in values if _UUID.fullmatch(value))


# install commands: by framework, by CUDA, and by the installer in use


_PYTORCH = ((13, 0), (12, 8), (12, 6), (11, 8))
"""CUDA versions of the builds on download.pytorch.org, one for each minimum driver."""
_CONDA = {
    "torch": "pytorch-gpu",
    "tensorflow": "tensorflow-gpu",
    "jax": "jax 'jaxlib=*=*cuda*'",
    "cupy": "cupy",
    "pycuda": "pycuda",
    "numba": "numba-cuda",
}
"""Packages of conda-forge, which depend on CUDA's libraries."""


def install_libraries(facts: Facts, framework: str, wanted: int | None, libraries: Iterable[str] = ()) -> str:
    """The command that installs CUDA's libraries for a framework. `wanted`: the CUDA major of its build."""
    with_pip = _by_pip(facts, framework, wanted, libraries)
    if not may_be_conda(facts, facts.frameworks[framework]):
        return with_pip
    return f"{_by_conda(framework, wanted)}; where pip has installed {framework}: {with_pip}"


def _by_pip(facts: Facts, framework: str, wanted: int | None, libraries: Iterable[str]) -> str:
    found = facts.frameworks[framework]
    release = exactly(found.version)
    if framework == "tensorflow":
        return f"pip install 'tensorflow[and-cuda]{release}'"
    if framework == "jax" and wanted is not None:
        return f"pip install 'jax[cuda{wanted}]{release}'"
    if framework == "cupy" and wanted is not None:
        if finds_packages(found):
            return install_cupy(found, wanted, release)
        toolkit = f"install CUDA's toolkit {wanted} and add its lib64 to LD_LIBRARY_PATH"
        if wanted < 12:  # CuPy 14 has no build for CUDA 11
            return toolkit
        newer = install_cupy(found, wanted, ">=14")
        return f"{newer} (an older CuPy does not look into pip's packages), or {toolkit}"
    packages = pip_packages(libraries, wanted)
    if packages:
        return f"pip install {' '.join(packages)}"
    return (
        install_pytorch(numbers(found.cuda)) if framework == "torch" else f"pip install --force-reinstall {framework}"
    )


def finds_packages(cupy: FrameworkFacts) -> bool:
    """Whether CuPy finds CUDA's libraries in pip packages: from version 14. Older ones need the toolkit."""
    release = numbers(cupy.version)
    return not release or release >= (14,)


def install_cupy(found: FrameworkFacts, cuda: int, release: str = "") -> str:
    """The command for CuPy with CUDA's libraries. Uninstalls wheels for other CUDAs, which use the same folder."""
    wheel = f"cupy-cuda{cuda}x"
    others = [name for name in found.distributions if re.match(r"cupy(-|$)", name) and name != wheel]
    first = f"pip uninstall -y {' '.join(others)} && " if others else ""
    return f"{first}pip install '{wheel}[ctk]{release}'"


def pip_packages(libraries: Iterable[str], wanted: int | None) -> list[str]:
    """The pip packages of these SONAMEs. If a SONAME identifies its CUDA, that counts, else `wanted`."""
    packages: dict[str, None] = {}
    for name in libraries:
        found = parse(name)
        if found is None:
            continue
        of = (
            wanted
            if wanted is not None and (wanted in found.majors or not found.majors)
            else max(found.majors, default=None)
        )
        if of is not None:
            packages[found.library.pip(of)] = None
    return list(packages)


def install_pytorch(cuda: tuple[int, ...]) -> str:
    """The command for PyTorch for this CUDA. Uninstalls it first: pip would keep the installed build."""
    build = _pytorch_build(cuda)
    if build is None and cuda[:1] == (12,):
        build = (12, 6)  # the build for 12.6 runs on every driver for CUDA 12
    if build is None:
        return "pip uninstall -y torch, then the command that https://pytorch.org/get-started gives for your driver"
    index = "".join(map(str, build))
    return f"pip uninstall -y torch && pip install torch --index-url https://download.pytorch.org/whl/cu{index}"


def _pytorch_build(cuda: tuple[int, ...]) -> tuple[int, int] | None:
    """The newest PyTorch build for this CUDA or an older minor of the same major."""
    major = min(cuda[0], 13) if cuda else 0
    return next((known for known in _PYTORCH if known[0] == major and known <= cuda[:2]), None)


def install_with_cuda(facts: Facts, framework: str) -> str:
    """The command that installs the framework's build for the driver's CUDA."""
    driver = driver_cuda(facts)
    known = min(driver[0], 13) if driver and driver[0] >= 12 else 12
    command = {
        "tensorflow": "pip uninstall -y tensorflow-cpu tensorflow && pip install 'tensorflow[and-cuda]'",
        "jax": f"pip install 'jax[cuda{known}]'",
        "numba": f"pip install 'numba-cuda[cu{known}]'",
        "torch": install_pytorch(driver),
        "cupy": install_cupy(facts.frameworks[framework], known),
    }.get(framework, f"pip install --force-reinstall {framework}")
    if not may_be_conda(facts, facts.frameworks[framework]):
        return command
    return f"{_by_conda(framework, known)}; where pip has installed {framework}: {command}"


def _by_conda(framework: str, cuda: int | None) -> str:
    version = f" cuda-version={cuda}" if cuda is not None else ""
    return f"conda install -c conda-forge {_CONDA.get(framework, framework)}{version}"


def may_be_conda(facts: Facts, found: FrameworkFacts) -> bool:
    """Whether the framework is in the active conda environment, without signs of an installation by pip."""
    prefix = facts.environment.get("CONDA_PREFIX", "").rstrip("/")
    if not prefix or not (found.folder or "").startswith(prefix + "/"):
        return False
    names = [*found.distributions, *(name for name in facts.packages if name != "nvidia-ml-py")]
    wheels = any(re.match(r"nvidia-|.*-cuda\d+", name) for name in names)
    return not wheels and re.search(r"\+c(u\d|pu)", found.version or "") is None


def match_driver(facts: Facts, framework: str) -> str | None:
    """How to make the framework compile with the driver's CUDA at run time; None if only a newer driver helps.

    Only CuPy uses the installed NVRTC. Each build of PyTorch contains its own. Numba, JAX and Triton combine parts of
    several packages whose versions must match.
    """
    driver = driver_cuda(facts)
    found = facts.frameworks[framework]
    if framework == "cupy" and finds_packages(found) and len(driver) == 2:
        suffix = f"-cu{driver[0]}" if driver[0] < 13 else ""
        return f"compile with its CUDA: pip install 'nvidia-cuda-nvrtc{suffix}=={driver[0]}.{driver[1]}.*'"
    if framework == "torch" and _pytorch_build(driver) is not None:
        return f"install a build for its CUDA: {install_pytorch(driver)}"
    return None
