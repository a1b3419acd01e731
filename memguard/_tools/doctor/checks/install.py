"""Commands that install what is missing: by framework, by CUDA, and by what installed it before."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memguard._tools.doctor.checks import shell
from memguard._tools.doctor.checks.cuda_libraries import parse
from memguard._tools.doctor.checks.version_numbers import cuda_of_driver, numbers
from memguard._tools.doctor.facts import Facts, FrameworkFacts

_PYTORCH = ((13, 0), (12, 8), (12, 6), (11, 8))
"""CUDA versions that download.pytorch.org has builds for, one for each minimum driver."""
_CONDA = {
    "torch": "pytorch-gpu",
    "tensorflow": "tensorflow-gpu",
    "jax": "jax 'jaxlib=*=*cuda*'",
    "cupy": "cupy",
    "pycuda": "pycuda",
    "numba": "numba-cuda",
}
"""conda-forge's packages, which depend on CUDA's libraries."""


def libraries_for(facts: Facts, framework: str, wanted: int | None, libraries: Iterable[str] = ()) -> str:
    """The command that installs CUDA's libraries for it; `wanted`: the major of the CUDA that it was built for."""
    with_pip = _by_pip(facts, framework, wanted, libraries)
    if not maybe_conda(facts, facts.frameworks[framework]):
        return with_pip
    return f"{_by_conda(framework, wanted)}; where pip has installed {framework}: {with_pip}"


def _by_pip(facts: Facts, framework: str, wanted: int | None, libraries: Iterable[str]) -> str:
    found = facts.frameworks[framework]
    release = shell.release(found.version)
    if framework == "tensorflow":
        return f"pip install 'tensorflow[and-cuda]{release}'"
    if framework == "jax" and wanted is not None:
        return f"pip install 'jax[cuda{wanted}]{release}'"
    if framework == "cupy" and wanted is not None:
        if finds_packages(found):
            return cupy_wheel(found, wanted, release)
        toolkit = f"install CUDA's toolkit {wanted} and add its lib64 to LD_LIBRARY_PATH"
        if wanted < 12:  # CuPy 14 has no build for it
            return toolkit
        newer = cupy_wheel(found, wanted, ">=14")
        return f"{newer} (an older CuPy does not look into pip's packages), or {toolkit}"
    packages = pip_packages(libraries, wanted)
    if packages:
        return f"pip install {' '.join(packages)}"
    return pytorch(numbers(found.cuda)) if framework == "torch" else f"pip install --force-reinstall {framework}"


def finds_packages(cupy: FrameworkFacts) -> bool:
    """Whether this CuPy opens CUDA's libraries in pip's packages, as 14 and newer do; older ones need the toolkit."""
    release = numbers(cupy.version)
    return not release or release >= (14,)


def cupy_wheel(found: FrameworkFacts, cuda: int, release: str = "") -> str:
    """CuPy with CUDA's libraries. A wheel for another CUDA is uninstalled first, as it uses the same folder."""
    wheel = f"cupy-cuda{cuda}x"
    others = [name for name in found.distributions if re.match(r"cupy(-|$)", name) and name != wheel]
    first = f"pip uninstall -y {' '.join(others)} && " if others else ""
    return f"{first}pip install '{wheel}[ctk]{release}'"


def pip_packages(libraries: Iterable[str], wanted: int | None) -> list[str]:
    """The pip packages of these SONAMEs. A SONAME that names its CUDA decides, else `wanted`."""
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


def pytorch(cuda: tuple[int, ...]) -> str:
    """PyTorch for this CUDA. It is uninstalled first, else pip keeps the installed build."""
    build = _pytorch_build(cuda)
    if build is None and cuda[:1] == (12,):
        build = (12, 6)  # runs on every driver for CUDA 12
    if build is None:
        return "pip uninstall -y torch, then the command that https://pytorch.org/get-started gives for your driver"
    index = "".join(map(str, build))
    return f"pip uninstall -y torch && pip install torch --index-url https://download.pytorch.org/whl/cu{index}"


def _pytorch_build(cuda: tuple[int, ...]) -> tuple[int, int] | None:
    """The newest build of this CUDA's major that is not for a newer CUDA."""
    major = min(cuda[0], 13) if cuda else 0
    return next((known for known in _PYTORCH if known[0] == major and known <= cuda[:2]), None)


def with_cuda(facts: Facts, framework: str) -> str:
    """The command that installs the build for the driver's CUDA."""
    driver = cuda_of_driver(facts)
    known = min(driver[0], 13) if driver and driver[0] >= 12 else 12
    command = {
        "tensorflow": "pip uninstall -y tensorflow-cpu tensorflow && pip install 'tensorflow[and-cuda]'",
        "jax": f"pip install 'jax[cuda{known}]'",
        "numba": f"pip install 'numba-cuda[cu{known}]'",
        "torch": pytorch(driver),
        "cupy": cupy_wheel(facts.frameworks[framework], known),
    }.get(framework, f"pip install --force-reinstall {framework}")
    if not maybe_conda(facts, facts.frameworks[framework]):
        return command
    return f"{_by_conda(framework, known)}; where pip has installed {framework}: {command}"


def _by_conda(framework: str, cuda: int | None) -> str:
    version = f" cuda-version={cuda}" if cuda is not None else ""
    return f"conda install -c conda-forge {_CONDA.get(framework, framework)}{version}"


def maybe_conda(facts: Facts, found: FrameworkFacts) -> bool:
    """Whether it is in the active conda environment, with no sign that pip installed it."""
    prefix = facts.environment.get("CONDA_PREFIX", "").rstrip("/")
    if not prefix or not (found.folder or "").startswith(prefix + "/"):
        return False
    names = [*found.distributions, *(name for name in facts.packages if name != "nvidia-ml-py")]
    wheels = any(re.match(r"nvidia-|.*-cuda\d+", name) for name in names)
    return not wheels and re.search(r"\+c(u\d|pu)", found.version or "") is None


def built_by_the_driver(facts: Facts, framework: str) -> str | None:
    """What makes it compile with the driver's CUDA at run time; None if only a newer driver helps.

    Only CuPy uses the NVRTC that is installed. Each build of PyTorch contains its own. Numba, JAX and Triton use parts
    of several packages that belong together.
    """
    driver = cuda_of_driver(facts)
    found = facts.frameworks[framework]
    if framework == "cupy" and finds_packages(found) and len(driver) == 2:
        suffix = f"-cu{driver[0]}" if driver[0] < 13 else ""
        return f"compile with its CUDA: pip install 'nvidia-cuda-nvrtc{suffix}=={driver[0]}.{driver[1]}.*'"
    if framework == "torch" and _pytorch_build(driver) is not None:
        return f"install a build for its CUDA: {pytorch(driver)}"
    return None
