"""How frameworks were built and installed: compilers, paths, distributions, builds without CUDA."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from memguard._base.distribution import NAME
from memguard._tools.doctor.cuda_libraries import major
from memguard._tools.doctor.derived import (
    NO_COMPILER,
    NO_NVCC,
    did_not_finish,
    explained,
    failed_stage,
    imported_from_elsewhere,
    messages,
    no_gpu,
    wants_cuda,
    without_cuda,
)
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import exactly, full_name, install_with_cuda, last_line, listing, variable

_COMPILERS = ("gcc", "g++", "cc")
# Names of distributions that install the same module into the same folder.
_SAME_MODULE = {
    "tensorflow": re.compile(r"(tensorflow|tf[-_]nightly)([-_](cpu|gpu|rocm))?"),
    "torch": re.compile(r"torch([-_](nightly|cpu))?"),
    "cupy": re.compile(r"cupy([-_](cuda\d+x?|rocm[-_\d]+))?"),
    "pycuda": re.compile(r"pycuda([-_]cuda\w+)?"),
}


def _tool_missing(facts: Facts, *names: str) -> bool:
    """Whether the facts list all of these tools as not found. Tools that were not looked for do not count."""
    return all(name in facts.tools and not facts.tools[name] for name in names)


@check("nvcc-missing", order=405)
def nvcc_missing(facts: Facts) -> Iterator[Found]:
    """PyCUDA's SourceModule cannot find the `nvcc` that it compiles kernels with."""
    found = facts.frameworks.get("pycuda")
    if found is None or no_gpu(facts):
        return
    errors = [text for text in messages(found.probe) if NO_NVCC.search(text)]
    if errors or _tool_missing(facts, "nvcc"):
        off_the_path = facts.tools.get("nvcc off the PATH")
        yield Found(
            f"{full_name(facts, 'pycuda')} compiles kernels (SourceModule) with nvcc, which is not on the PATH",
            (
                *(f"pycuda: {last_line(text)}" for text in errors),
                "nvcc: not on the PATH" if _tool_missing(facts, "nvcc") else "",
                variable(facts, "CUDA_HOME") if facts.environment.get("CUDA_HOME") else "",
                f"found {off_the_path}" if off_the_path else "",
            ),
            f"export PATH={off_the_path.rpartition('/')[0]}:$PATH"
            if off_the_path
            else "install CUDA's toolkit (images nvidia/cuda:…-devel have it) and put its bin folder on the PATH",
            "pycuda",
        )


@check("compiler-missing", order=410)
def compiler_missing(facts: Facts) -> Iterator[Found]:
    """No C compiler for nvcc, or for Triton, which compiles its kernel launcher."""
    if no_gpu(facts):
        return
    errors = {
        name: text
        for name, found in facts.frameworks.items()
        for text in messages(found.probe)
        if NO_COMPILER.search(text)
    }
    absent = _tool_missing(facts, *_COMPILERS)
    pycuda = "pycuda" in facts.frameworks and bool(facts.tools.get("nvcc"))
    named = facts.environment.get("CC")  # Triton reads CC; nvcc does not
    torch = "triton" in facts.packages and facts.frameworks.get("torch") is not None and not named
    who = list(errors) or [name for name, needs in (("pycuda", pycuda), ("torch", torch)) if needs and absent]
    if not who:
        return
    need = "needs" if len(who) == 1 else "need"
    use = {"pycuda": "PyCUDA's SourceModule (nvcc)", "torch": "torch.compile (Triton)"}
    yield Found(
        f"{listing(use.get(name, name) for name in who)} {need} a C compiler, and there is none on the PATH",
        (
            *(f"{name}: {last_line(text)}" for name, text in errors.items()),
            *(f"{tool}: not on the PATH" for tool in _COMPILERS if absent),
        )
        or ("no compiler was found",),
        "apt-get install g++, or name one in CC (Triton) and in nvcc's -ccbin",
        ", ".join(who),
        severity=Severity.WARNING if errors or "pycuda" in who else Severity.INFO,
    )


@check("unexpected-path", order=420)
def unexpected_path(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        if not imported_from_elsewhere(found) or found.path is None:
            continue
        folders = [folder for folder in facts.environment.get("PYTHONPATH", "").split(":") if folder]
        from_path = [folder for folder in folders if found.path.startswith(folder.rstrip("/") + "/")]
        yield Found(
            f"`import {name}` finds {found.path}, while the package is installed in {found.folder}",
            (
                f"{name}.__file__ is {found.path}",
                *(f"{dist} {release} is installed in {found.folder}" for dist, release in found.distributions.items()),
                *(f"PYTHONPATH names {folder}" for folder in from_path),
            ),
            f"take {listing(from_path)} out of PYTHONPATH"
            if from_path
            else f"rename or remove {found.path} if it is not meant, or start Python from another folder",
            name,
            severity=Severity.ERROR
            if did_not_finish(found.probe) or found.path.endswith(f"/{name}.py")
            else Severity.WARNING,
        )


@check("two-distributions", order=425)
def two_distributions(facts: Facts) -> Iterator[Found]:
    for name, pattern in _SAME_MODULE.items():
        found = facts.frameworks.get(name)
        if found is None:
            continue
        several = {dist: release for dist, release in found.distributions.items() if pattern.fullmatch(dist.lower())}
        if len(several) < 2:
            continue
        keep = _distribution_to_keep(facts, several)
        yield Found(
            f"{listing(several)} install the same module {name} into one folder, each over the files of the other",
            tuple(f"{dist} {release} is installed" for dist, release in several.items()),
            f"pip uninstall -y {' '.join(several)} && pip install {_requirement(keep, several[keep])}",
            name,
            severity=Severity.ERROR if did_not_finish(found.probe) else Severity.WARNING,
        )


@check("two-distributions", order=430)
def other_memguard(facts: Facts) -> Iterator[Found]:
    """Another project has installed a package `memguard`, alone or in addition to this one."""
    found = facts.namesakes
    others = [dist for dist in found.distributions if dist != NAME] if found is not None else []
    if found is None or not others:
        return
    both = NAME in found.distributions
    if not found.own:
        cause = f"`import memguard` finds the package of {listing(others)}, which is another project"
        cause += f", and not that of {NAME}" if both else ""
    elif both:
        cause = (
            f"{listing(found.distributions)} install the same package memguard, each over the files of the other; "
            f"`import memguard` finds that of {NAME}"
        )
    else:
        cause = f"{listing(others)} installs a package memguard too and is another project"
    origin = f" from {found.origin}" if found.origin else ""
    lines = [f"{dist} {release} is installed" for dist, release in found.distributions.items()]
    yield Found(
        cause,
        (
            *(line + (origin if line.startswith(NAME) else "") for line in lines),
            f"memguard.__file__ is {found.path}" if found.path else "",
        ),
        f"`pip uninstall -y {' '.join(found.distributions)}`"
        + (f", then install {NAME} again{' from where it came' if origin else ''}" if both else ""),
        "memguard",
        severity=Severity.WARNING if found.own else Severity.ERROR,
    )


def _requirement(dist: str, release: str) -> str:
    pinned = exactly(release.partition("+")[0])
    return shlex.quote(f"tensorflow[and-cuda]{pinned}" if dist == "tensorflow" else f"{dist}{pinned}")


def _distribution_to_keep(facts: Facts, several: Iterable[str]) -> str:
    """The distribution to keep: for the newest CUDA that the driver supports, rather no CPU or nightly build."""
    driver = major(str(facts.driver.cuda.version)) if facts.driver.cuda.version else None

    def rank(dist: str) -> tuple[bool, int, bool]:
        number = re.search(r"cuda(\d\d)", dist)
        cuda = int(number.group(1)) if number else 0
        return (driver is None or cuda <= driver, cuda, not dist.endswith(("cpu", "nightly")))

    return max(sorted(several), key=rank)


@check("cpu-build", order=435)
def cpu_build(facts: Facts) -> Iterator[Found]:
    """A CPU build on a machine with a GPU."""
    if no_gpu(facts) or not (facts.driver.cuda.devices or facts.driver.nvml.devices):
        return
    for name, found in facts.frameworks.items():
        if not without_cuda(facts, name) or explained(facts, name):
            continue
        failed = failed_stage(found)
        errors = [text for text in messages(found.probe) if "is not installed" in text] or (
            [failed.error] if failed and failed.error else []
        )
        built = [f"{dist} {release} is installed" for dist, release in found.distributions.items()]
        cause = "is a build without CUDA, so it does not use the GPU of this machine"
        if name == "numba":
            cause = "has no numba-cuda, so it compiles only for CPUs"
        yield Found(
            f"{full_name(facts, name)} {cause}",
            (
                *built,
                f"{name} counts {found.gpus} GPUs" if found.gpus is not None else "",
                *(f"{name}: {last_line(text)}" for text in errors),
            ),
            install_with_cuda(facts, name),
            name,
            severity=Severity.WARNING if wants_cuda(facts, name) else Severity.INFO,
        )
