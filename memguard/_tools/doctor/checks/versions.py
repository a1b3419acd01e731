"""The driver's versions: whether its parts match, and whether its CUDA is recent enough for the frameworks."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._tools.doctor.derived import (
    blocked_by,
    computes,
    driver_cuda,
    failed_stage,
    framework_cuda,
    libcuda_version,
    numbers,
    too_old,
    unsupported_ptx,
)
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import (
    PROC,
    built_for,
    digits,
    driver_errors,
    driver_evidence,
    error_line,
    last_line,
    listing,
    match_driver,
    severity_if_init_fails,
)

MINIMUM = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The minimum Linux driver by CUDA major (CUDA toolkit release notes, minor version compatibility)."""


@check("driver-mismatch", order=120)
def driver_mismatch(facts: Facts) -> Iterator[Found]:
    """The kernel module and the libraries have different driver versions."""
    blocked = blocked_by(facts)
    nvml = blocked is None and facts.driver.nvml.error == "NVMLError_LibRmVersionMismatch"
    if blocked != "driver-mismatch" and not nvml:
        return
    module, library = facts.driver.module, digits(libcuda_version(facts))
    versions = f" ({module} and {library})" if module and library and not nvml else ""
    then = ", as after an update without a reboot"
    if nvml:
        then = ": CUDA works and NVML does not, so memguard.init fails"
    yield Found(
        f"the loaded kernel module and the driver's libraries are of different versions{versions}{then}",
        driver_evidence(facts),
        "restart the container, so it gets the libraries of the host's driver; if that does not help, reboot the host"
        if facts.system.container
        else "reboot; or stop everything that uses the GPU and run: "
        "sudo modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia; sudo modprobe nvidia",
        severity=severity_if_init_fails(facts) if nvml else Severity.ERROR,
    )


@check("forward-compatibility", order=125)
def forward_compatibility(facts: Facts) -> Iterator[Found]:
    """The loaded libcuda is not the driver's but one of cuda-compat."""
    blocked, cuda = blocked_by(facts), facts.driver.cuda
    module, library = numbers(facts.driver.module), libcuda_version(facts)
    ours, theirs = digits(library) or "of unknown version", facts.driver.module or "of unknown version"
    remedy = "take the folder of cuda-compat out of LD_LIBRARY_PATH and /etc/ld.so.conf.d (then sudo ldconfig)"
    severity = Severity.ERROR
    if blocked == "forward-compatibility":
        cause = f"cuda-compat's libcuda {ours} is loaded instead of the driver's and does not work with driver {theirs}"
        if cuda.init == "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE":
            cause = (
                f"cuda-compat's libcuda {ours} is loaded instead of that of driver {theirs}, which works only on "
                "data-centre GPUs, and this GPU is not one (error 804)"
            )
            remedy += "; if the framework needs a newer CUDA, update the NVIDIA driver"
    elif blocked is None and older_than_driver(facts):
        names = [name for name, framework in facts.frameworks.items() if too_old(facts, framework)]
        cause = (
            f"libcuda {ours} is older than the driver {theirs} and is loaded instead of its libcuda, so frameworks get "
            f"CUDA {digits(driver_cuda(facts))} at most" + (f", too old for {listing(names)}" if names else "")
        )
        severity = Severity.ERROR if names else Severity.WARNING
    elif blocked is None and module and library > module and _libraries_match(facts):
        cause = f"cuda-compat's libcuda {ours} is loaded instead of that of the older driver {theirs}, and works"
        remedy = "nothing to do; with a newer NVIDIA driver it is not needed"
        severity = Severity.INFO
    else:
        return
    evidence = (f"libcuda: {cuda.path}", f"{PROC}: {facts.driver.module}", *driver_errors(facts))
    yield Found(
        cause,
        evidence,
        remedy,
        cuda.path or "",
        severity=severity,
    )


def older_than_driver(facts: Facts) -> bool:
    """Whether a libcuda older than the driver is loaded, and NVML finds no mismatch."""
    module, library = numbers(facts.driver.module), libcuda_version(facts)
    return bool(module and library) and library < module and _libraries_match(facts)


def _libraries_match(facts: Facts) -> bool:
    """Whether NVML reports no mismatch: then cuda-compat explains the different versions, not an incomplete update."""
    return facts.driver.nvml.error != "NVMLError_LibRmVersionMismatch"


@check("driver-too-old", order=135)
def driver_too_old(facts: Facts) -> Iterator[Found]:
    """Frameworks were built for a newer CUDA major than the driver supports."""
    names = [name for name, framework in facts.frameworks.items() if too_old(facts, framework)]
    if blocked_by(facts) is not None or not names or older_than_driver(facts):
        return
    needed = max(framework_cuda(facts.frameworks[name]) for name in names)
    driver = digits(driver_cuda(facts))
    version = facts.driver.module or facts.driver.nvml.driver or "of this machine"
    oldest = MINIMUM.get(needed[0])
    one = len(names) == 1
    lines = [f"the driver supports CUDA {driver} (cuDriverGetVersion: {facts.driver.cuda.version})"]
    for name in names:
        stage = failed_stage(facts.frameworks[name])
        lines.append(built_for(facts, name) + (f": {last_line(stage.error or '')}" if stage else ""))
    yield Found(
        f"the driver {version} supports CUDA {driver}, and {listing(names)} {'needs' if one else 'need'} CUDA "
        f"{needed[0]}" + (f", for which the driver must be {oldest} or newer" if oldest else ""),
        lines,
        f"update the NVIDIA driver{f' to {oldest} or newer' if oldest else ''}, or install {listing(names)} built "
        f"for CUDA {driver.partition('.')[0]}; on data-centre GPUs "
        f"the package cuda-compat-{'-'.join(map(str, needed))} helps too",
    )


@check("driver-minor-version", order=140)
def driver_minor_version(facts: Facts) -> Iterator[Found]:
    """Frameworks were built for a newer minor of the driver's CUDA: only code compiled at run time may fail."""
    driver = driver_cuda(facts)
    if blocked_by(facts) is not None or len(driver) < 2:
        return
    text = digits(driver)
    gives = f"the driver supports CUDA {text} (cuDriverGetVersion: {facts.driver.cuda.version})"
    for name, framework in facts.frameworks.items():
        if unsupported_ptx(framework):
            other = match_driver(facts, name)
            yield Found(
                f"{name} compiles code at run time with a newer CUDA than the driver's {text}, which refuses it",
                (error_line(facts, name), gives),
                f"update the NVIDIA driver{f', or {other}' if other else ''}",
                name,
                severity=Severity.ERROR,
            )
    newer = [
        name
        for name, framework in facts.frameworks.items()
        if computes(framework) and (built := framework_cuda(framework))[:1] == driver[:1] and built > driver
    ]
    if newer:
        yield Found(
            f"{listing(newer)} {'was' if len(newer) == 1 else 'were'} built for a newer CUDA than the driver's {text}, "
            "which is allowed within one major",
            (*(f"{built_for(facts, name)} and computes" for name in newer), gives),
            "nothing to do; if code that is compiled at run time fails with CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "
            "update the NVIDIA driver",
        )
