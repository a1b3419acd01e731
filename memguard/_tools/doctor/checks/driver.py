"""The driver: whether it is installed, in one version, new enough, and accessible to this process."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memguard._base.units import format_size
from memguard._tools.doctor.derived import blocked_by, computes, device_files, has_capability, same_gpu
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import (
    capabilities_command,
    container_command,
    driver_errors,
    driver_evidence,
    listing,
    severity_if_init_fails,
    survey_failure,
    variable,
)

_CAUSES = {
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the GPUs are connected by NVSwitches, and the Fabric Manager has not set these up (error 802)",
        "sudo systemctl start nvidia-fabricmanager  # its version must be the driver's",
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "another process uses the GPU, or its compute mode allows none (error 46)",
        "nvidia-smi -q -d COMPUTE,PIDS  # mode and processes; sudo nvidia-smi -c DEFAULT allows several",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        "a call to the operating system failed (error 304), for example in opening a device file or locking memory",
        "sudo dmesg | grep -i nvrm  # says which; then check ulimit -l and the container's permissions",
    ),
    "CUDA_ERROR_UNKNOWN": (
        "the driver does not say why (error 999); usual reasons are a kernel module nvidia_uvm that lost its state "
        "while the machine slept, and an update of the driver without a reboot",
        "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm  # while no process uses the GPU; else reboot",
    ),
    "CUDA_ERROR_NO_DEVICE": (
        "the driver finds no GPU that it can use (error 100)",
        "nvidia-smi -L; sudo dmesg | grep -i -E 'nvrm|xid'  # whether the GPU is there, and what happened to it",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        "the stub for linking programs was loaded instead of the driver's libcuda (error 34)",
        "take the folder .../stubs out of LD_LIBRARY_PATH",
    ),
    "CUDA_ERROR_ECC_UNCORRECTABLE": (
        "the GPU's memory has an error that ECC cannot correct (error 214)",
        "sudo nvidia-smi --gpu-reset  # or reboot; a GPU that repeats it has to be replaced",
    ),
    "CUDA_ERROR_DEVICE_NOT_LICENSED": (
        "the virtual GPU has no licence (error 102)",
        "nvidia-smi -q | grep -i license  # then the guest's /etc/nvidia/gridd.conf",
    ),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": (
        "CUDA is set to use MPS, and the MPS control daemon does not answer (error 805)",
        "nvidia-cuda-mps-control -d  # as the same user; or unset CUDA_MPS_PIPE_DIRECTORY",
    ),
    "CUDA_ERROR_MPS_SERVER_NOT_READY": (
        "the MPS server is starting, or recovering from an error (error 807)",
        "echo quit | nvidia-cuda-mps-control; nvidia-cuda-mps-control -d  # if it stays so",
    ),
}

_NVML = {
    "NVMLError_LibraryNotFound": "install the package of the driver's version that has libnvidia-ml.so.1 (Ubuntu: "
    "libnvidia-compute-...), or put its folder into LD_LIBRARY_PATH; in a container set "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "NVMLError_NoPermission": "run as a user who may open /dev/nvidiactl and every /dev/nvidia0, 1, ...",
    "NVMLError_DriverNotLoaded": "make /dev/nvidiactl accessible: NVML opens it by that name",
    "NVMLError_GpuIsLost": "sudo dmesg | grep -i xid  # why it fell off the bus; then reset it or reboot",
    "NVMLError_ResetRequired": "sudo nvidia-smi --gpu-reset  # with no process on it; or reboot",
    "NVMLError_Unknown": "restart the container: this is the error if its devices were removed while it ran (systemctl "
    "daemon-reload does that); outside a container run nvidia-smi",
}


@check("driver-absent", order=105)
def driver_absent(facts: Facts) -> Iterator[Found]:
    """The driver's kernel module, its libraries or both are missing."""
    if blocked_by(facts) != "driver-absent":
        return
    driver = facts.driver
    module, library = driver.module is not None, driver.cuda.error is None
    gpus = listing(driver.pci) if driver.pci else ""
    if facts.system.wsl:
        cause = "the Windows driver's libcuda.so.1 is not in /usr/lib/wsl/lib"
        remedy = "install the NVIDIA driver on Windows, then run: wsl --update; wsl --shutdown"
    elif module:
        cause = f"the driver's kernel module {driver.module} is loaded and its libraries (libcuda.so.1) are not found"
        remedy = (
            f"on a host with the NVIDIA Container Toolkit: {capabilities_command(facts.system.container)}"
            if facts.system.container
            else f"sudo apt install libnvidia-compute-{_branch(driver.module)}  # or your system's package; if they "
            "are installed, add their folder to /etc/ld.so.conf.d and run sudo ldconfig"
        )
    elif library:
        cause = "the driver's libraries are installed and its kernel module is not loaded"
        remedy = (
            "on the host: sudo modprobe nvidia"
            if facts.system.container
            else "sudo modprobe nvidia  # if it fails, sudo dmesg says why: a new kernel needs it rebuilt, "
            "Secure Boot needs it signed, nouveau must be off"
        )
    elif gpus:
        cause = f"an NVIDIA GPU is on the bus ({gpus}), and the NVIDIA driver is not installed"
        start = container_command(facts.system.container)
        remedy = f"install the NVIDIA driver on the host, and start the container with: {start}"
        if not facts.system.container:
            remedy = "sudo ubuntu-drivers install  # or your system's package of the NVIDIA driver; then reboot"
    else:
        cause = "this machine has no NVIDIA GPU and no NVIDIA driver"
        remedy = "run on a machine with an NVIDIA GPU; memguard.init(..., simulate='h200') tries a budget without one"
    yield Found(cause, driver_evidence(facts), remedy)


@check("container-without-gpu", "container-capabilities", order=110)
def container(facts: Facts) -> Iterator[Found]:
    """A container was started without a GPU, or without a part of the driver."""
    given = facts.environment.get("NVIDIA_DRIVER_CAPABILITIES", "")
    shown = facts.environment.get("NVIDIA_VISIBLE_DEVICES")
    blocked = blocked_by(facts)
    if blocked == "container-without-gpu":
        kind = facts.system.container
        cause = f"the host has an NVIDIA driver, and this container ({kind}) was started without a GPU"
        evidence = [*driver_evidence(facts)]
        if facts.system.wsl:
            cause = f"this container ({kind}) was started without a GPU: it has no /dev/dxg of WSL"
            evidence.append(f"/dev/dxg: {facts.driver.files.get('/dev/dxg', 'not there')}")
        if kind == "apptainer":
            cause = f"the host has an NVIDIA driver, and this container ({kind}) was started without its libraries"
        elif shown in ("", "void", "none"):
            cause += f": NVIDIA_VISIBLE_DEVICES={shown} excludes all"
        if shown is not None:
            evidence.append(variable(facts, "NVIDIA_VISIBLE_DEVICES"))
        elif kind != "apptainer":  # Apptainer does not read it
            evidence.append("NVIDIA_VISIBLE_DEVICES is not set")
        yield Found(cause, evidence, container_command(kind))
    compute = blocked == "container-capabilities"
    utility = blocked is None and facts.driver.nvml.error == "NVMLError_LibraryNotFound" and _lacks_utility(facts)
    if compute or utility:
        lacks, what = ("compute", "CUDA (libcuda.so.1)") if compute else ("utility", "NVML (libnvidia-ml.so.1)")
        yield Found(
            f"the container was started without the driver capability {lacks!r} and has no {what}"
            + ("" if compute else ", so memory cannot be read and memguard.init fails"),
            (
                f"NVIDIA_DRIVER_CAPABILITIES={given} (environment)",
                f"libcuda: {facts.driver.cuda.error}" if compute else f"NVML: {facts.driver.nvml.error}",
            ),
            capabilities_command(facts.system.container),
            severity=Severity.ERROR if compute else severity_if_init_fails(facts),
            name="container-capabilities",
        )


@check("device-files", order=115)
def device_files_unusable(facts: Facts) -> Iterator[Found]:
    """Device files of the driver are missing or cannot be opened."""
    if blocked_by(facts) != "device-files":
        return
    found = device_files(facts)
    bad = {path: state for path, state in sorted(found.items()) if state != "ok"}
    denied = [
        path for path, state in bad.items() if state in ("denied", "EPERM")
    ]  # EPERM: the device rules of a container
    broken = [path for path in bad if path not in denied]
    if denied:
        cause = f"this user may not open {listing(denied)}"
        remedy = (
            f"{container_command(facts.system.container)}  # mounting the files alone does not give access"
            if facts.system.container
            else "sudo usermod -aG video $USER  # the group that ls -l /dev/nvidia* shows; then log in again"
        )
    elif broken:
        cause = f"opening {listing(broken)} fails with {listing(bad[path] for path in broken)}"
        remedy = (
            "sudo dmesg | grep -i -E 'nvrm|xid'  # what happened to the GPU; then nvidia-smi --gpu-reset, or reboot"
        )
    else:
        needed = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
        absent = [path for path in needed if path not in found]
        if not any(re.search(r"\d$", path) for path in found):
            absent.insert(0, "/dev/nvidia0")
        are = "files {} are" if len(absent) > 1 else "file {} is"
        cause = f"the kernel module is loaded, and the device {are.format(listing(absent))} missing"
        remedy = (
            container_command(facts.system.container)
            if facts.system.container
            else "sudo nvidia-modprobe -c 0 && sudo nvidia-modprobe -u -c 0  # nvidia-persistenced does this at boot"
        )
    yield Found(
        cause,
        (*(f"{path}: {state}" for path, state in sorted(found.items())), *driver_errors(facts)),
        remedy,
        next(iter(denied or broken), ""),
    )


@check("cuda-init-failed", order=130)
def cuda_init_failed(facts: Facts) -> Iterator[Found]:
    """cuInit fails for a reason that no other check reports, or libcuda exists and cannot be loaded."""
    if blocked_by(facts) != "cuda-init-failed":
        return
    cuda, broken = facts.driver.cuda, survey_failure(facts)
    if cuda.error is not None:
        cause = "the driver's library libcuda.so.1 exists and cannot be loaded"
        remedy = "reinstall the NVIDIA driver: its libraries are damaged, or for another architecture"
    elif broken is not None:
        cause = f"the driver could not be queried: the process that does it {broken}"
        remedy = "sudo dmesg | grep -i -E 'nvrm|xid'  # what happened to the GPU or the driver; then reboot"
        if "exit code" in broken:
            remedy = "its last line is above: repair the Python that runs memguard"
    elif cuda.init is None:
        cause = "CUDA cannot be initialised: cuInit does not return"
        remedy = "sudo dmesg | grep -i -E 'nvrm|xid'  # what happened to the GPU or the driver; then reboot"
    else:
        init = "CUDA_ERROR_NO_DEVICE" if cuda.init == "CUDA_SUCCESS" else cuda.init
        if "/stubs/" in (cuda.path or ""):
            init = "CUDA_ERROR_STUB_LIBRARY"  # a stub returns numbers instead of error names
        why, remedy = _CAUSES.get(
            init, (f"the driver returns {init}", "nvidia-smi; sudo dmesg | grep -i nvrm  # tell more; then reboot")
        )
        cause = f"CUDA cannot be initialised: {why}"
    read = cuda.path or facts.driver.module is not None or facts.driver.files
    evidence = (
        *(driver_evidence(facts) if read or broken is None else driver_errors(facts)),
        variable(facts, "CUDA_VISIBLE_DEVICES"),
    )
    # Only the doctor's own query failed if a framework computes.
    works = broken is not None and any(computes(framework) for framework in facts.frameworks.values())
    yield Found(
        cause,
        evidence,
        remedy,
        severity=Severity.WARNING if works else Severity.ERROR,
    )


@check("nvml-blocked", order=145)
def nvml_blocked(facts: Facts) -> Iterator[Found]:
    """CUDA works and NVML does not: frameworks run, but memory by process cannot be read."""
    read = facts.driver.nvml
    missing = read.error == "NVMLError_LibraryNotFound" and _lacks_utility(facts)
    elsewhere = missing or read.error == "NVMLError_LibRmVersionMismatch"
    if blocked_by(facts) is not None or not facts.driver.cuda.devices:
        return
    if read.error is not None and not elsewhere:
        yield Found(
            f"CUDA works and NVML does not ({read.error}), so memory cannot be read and memguard.init fails",
            (
                f"NVML: {read.error}{f': {read.text}' if read.text else ''}",
                f"library: {read.path}" if read.path else "",
                f"cuInit: {facts.driver.cuda.init}, GPUs shown: {len(facts.driver.cuda.devices)}",
            ),
            _NVML.get(read.error, "nvidia-smi  # uses NVML too and tells more"),
            severity=severity_if_init_fails(facts),
        )
    yield from _cards(facts)


def _cards(facts: Facts) -> Iterator[Found]:
    """GPUs that NVML counts without giving a handle. GPUs of other jobs are harmless: CUDA does not show them."""
    refused = [card for card in facts.driver.nvml.devices if card.error is not None]
    known = [card.uuid for card in facts.driver.nvml.devices if card.error is None]
    shown = [device.uuid for device in facts.driver.cuda.devices if not device.uuid.startswith("MIG-")]
    unlisted = [uuid for uuid in shown if not any(same_gpu(uuid, other) for other in known)]
    nodes = {card.index: facts.driver.files.get(f"/dev/nvidia{card.index}", "ok") for card in refused}
    foreign = [
        card
        for card in refused
        if card.error == "NVMLError_NoPermission" and (not unlisted or nodes[card.index] != "ok")
    ]
    for card in (card for card in refused if card not in foreign):
        yield Found(
            f"NVML counts GPU {card.index} and refuses access to it ({card.error})",
            (f"NVML, GPU {card.index}: {card.error}", *(f"CUDA shows {uuid}, and NVML does not" for uuid in unlisted)),
            _NVML.get(card.error or "", f"nvidia-smi -i {card.index}  # uses NVML too and tells more"),
            card.uuid or f"GPU {card.index}",
            severity=severity_if_init_fails(facts) if unlisted else Severity.WARNING,
        )
    if foreign:
        count = len(facts.driver.nvml.devices)
        yield Found(
            f"this process may not use {len(foreign)} of the {count} GPUs that NVML counts, as when a scheduler or a "
            "container gives a job some of them",
            tuple(
                f"NVML, GPU {card.index}: {card.error}"
                + ("" if nodes[card.index] == "ok" else f", /dev/nvidia{card.index}: {nodes[card.index]}")
                for card in foreign
            ),
            "nothing to do",
            severity=Severity.INFO,
        )


@check("wsl", order=150)
def wsl(facts: Facts) -> Iterator[Found]:
    """WSL: NVML reports no memory by process, and a Linux driver may hide the Windows driver."""
    if not facts.system.wsl:
        return
    cuda = facts.driver.cuda
    if blocked_by(facts) == "wsl":
        yield Found(
            "under WSL the GPU is used through the Windows driver, and a Linux driver's libcuda hides it",
            (
                f"libcuda: {cuda.path}",
                *(f"also found: {path}" for path in cuda.candidates if path != cuda.path),
                *driver_errors(facts),
            ),
            "sudo apt purge 'libnvidia-compute-*' 'nvidia-driver-*' && sudo ldconfig  # and /usr/lib/wsl/lib first in "
            "LD_LIBRARY_PATH",
            cuda.path or "",
            severity=Severity.ERROR,
        )
    elif blocked_by(facts) is None:
        yield Found(
            "under WSL NVML does not say which process holds how much, so the ledger shows that as unknown",
            (f"kernel: {facts.system.kernel}", f"libcuda: {cuda.path}"),
            "nothing to do; the budget's caps hold",
        )


@check("sysmem-fallback", order=155)
def sysmem_fallback(facts: Facts) -> Iterator[Found]:
    """WSL: if the GPU is full, allocations come from host memory without an error."""
    cards = facts.driver.cuda.devices
    if not facts.system.wsl or blocked_by(facts) is not None or not cards:
        return
    yield Found(
        "under WSL an allocation for which the GPU has no room may be served from the machine's memory: no "
        "out-of-memory error comes, and everything gets slow",
        (f"kernel: {facts.system.kernel}", *(f"CUDA: {card.name}, {format_size(card.total)}" for card in cards)),
        "cap every framework that the program uses, and keep device.limit below what Windows leaves free on the GPU",
    )


def _lacks_utility(facts: Facts) -> bool:
    return facts.system.container is not None and not has_capability(facts, "utility")


def _branch(module: str | None) -> str:
    return (module or "").partition(".")[0] or "..."
