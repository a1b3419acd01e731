"""Reads the driver's state for the doctor, in a process of its own.

A broken driver's libraries may crash or hang that process. `survey` reports each reading immediately, with the fields
of `memguard._tools.doctor.facts.Driver`. Unlike the other modules of `_devices` it initialises CUDA, and reports
failures as results.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_int, c_size_t, create_string_buffer
from typing import Any

from memguard._devices import libcuda
from memguard.errors import DeviceError

_CAPABILITY, _MULTIPROCESSORS = (75, 76), 16  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/wsl/lib")
_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/dxg")
_SWAPPED = ((535, 43), (535, 85))
"""Driver versions that swap fields of NVML's process list."""


def main(fd: int, without: Iterable[int] = ()) -> None:
    """Write a line of JSON for each reading to the pipe `fd`. Omits the PIDs in `without`, the doctor's own."""
    with os.fdopen(fd, "w", encoding="utf-8", buffering=1) as pipe:
        survey(lambda part: print(json.dumps(part), file=pipe, flush=True), frozenset(without))


def survey(report: Callable[[dict[str, Any]], None], without: frozenset[int]) -> None:
    report({"module": module(), "pci": pci(), "files": files()})
    report({"nvml": nvml(without)})
    for cuda in driver():
        report({"cuda": cuda})


def module(root: str = "/") -> str | None:
    """The kernel module's version; "" for a loaded module without a version, None if the module is not loaded."""
    with contextlib.suppress(OSError), open(os.path.join(root, "proc/driver/nvidia/version"), encoding="utf-8") as file:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", file.read())
        return found[1] if found else ""
    folder = os.path.join(root, "sys/module/nvidia")
    with contextlib.suppress(OSError), open(os.path.join(folder, "version"), encoding="utf-8") as file:
        return file.read().strip()
    return "" if os.path.isdir(folder) else None


def pci(root: str = "/") -> list[str]:
    """PCI addresses of NVIDIA's display controllers."""
    found = []
    for folder in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*"))):
        with contextlib.suppress(OSError):
            if _read(folder, "vendor") == "0x10de" and _read(folder, "class").startswith("0x03"):
                found.append(os.path.basename(folder))
    return found


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read().strip()


def files(patterns: Iterable[str] = _FILES) -> dict[str, str]:
    """Open each device file to test access, because no file shows a container's device rules. Returns `ok`, `denied` or
    the errno's name, by path."""
    found = {}
    for path in sorted(path for pattern in patterns for path in glob.glob(pattern)):
        try:
            if not stat.S_ISCHR(os.stat(path).st_mode):
                continue
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            found[path] = "ok"
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            found[path] = "denied" if error.errno == errno.EACCES else name
    return found


def nvml(without: frozenset[int]) -> dict[str, Any]:
    """NVML's state, with the fields of `memguard._tools.doctor.facts.Nvml`. Omits the processes in `without`."""
    try:
        import pynvml as n
    except ImportError as error:
        return {"error": type(error).__name__, "text": str(error)}
    failures = (n.NVMLError, n.NVMLLibraryMismatchError)
    try:
        n.nvmlInit()
    except failures as error:
        return {"error": type(error).__name__, "text": str(error), "path": mapped("libnvidia-ml")}
    found: dict[str, Any] = {"path": mapped("libnvidia-ml"), "devices": []}
    with contextlib.suppress(*failures):
        found["driver"] = n.nvmlSystemGetDriverVersion()
    with contextlib.suppress(*failures):
        found["cuda"] = n.nvmlSystemGetCudaDriverVersion_v2()
    try:
        count = n.nvmlDeviceGetCount()
    except failures as error:
        return {**found, "error": type(error).__name__, "text": str(error)}
    version = tuple(int(part) for part in str(found.get("driver", "")).split(".")[:2] if part.isdigit())
    trusted = not _SWAPPED[0] <= version <= _SWAPPED[1]
    for index in range(count):
        found["devices"].append({"index": index, **_gpu(n, failures, index, without, trusted)})
    with contextlib.suppress(*failures):
        n.nvmlShutdown()
    return found


def _gpu(
    n: Any, failures: tuple[type[Exception], ...], index: int, without: frozenset[int], trusted: bool
) -> dict[str, Any]:
    try:
        handle = n.nvmlDeviceGetHandleByIndex(index)
        found: dict[str, Any] = {"uuid": n.nvmlDeviceGetUUID(handle)}
    except failures as error:
        return {"error": type(error).__name__}
    unavailable = (*failures, AttributeError)  # older versions of nvidia-ml-py lack some calls
    with contextlib.suppress(*unavailable):
        found["name"] = n.nvmlDeviceGetName(handle)
    with contextlib.suppress(*unavailable):
        found["capability"] = list(n.nvmlDeviceGetCudaComputeCapability(handle))
    with contextlib.suppress(*unavailable):
        found["mig"] = bool(n.nvmlDeviceGetMigMode(handle)[0])
    with contextlib.suppress(*unavailable):
        found["vgpu"] = n.nvmlDeviceGetVirtualizationMode(handle) == n.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    with contextlib.suppress(*unavailable):
        found["mode"] = _MODES.get(n.nvmlDeviceGetComputeMode(handle))
    with contextlib.suppress(*unavailable):
        found.update(_memory(n, unavailable, handle))
    with contextlib.suppress(*unavailable):
        processes: dict[str, int | None] = {}
        for process in n.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid not in without:
                size = process.usedGpuMemory if trusted else None
                before = processes.get(str(process.pid), 0)
                processes[str(process.pid)] = None if size is None or before is None else before + size
        found["processes"] = processes
    return found


def _memory(n: Any, unavailable: tuple[type[Exception], ...], handle: Any) -> dict[str, int]:
    try:
        info = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
    except unavailable:  # the driver lacks v2; v1's `used` includes the driver's reserve
        info = n.nvmlDeviceGetMemoryInfo(handle)
    return {"total": info.total, "used": info.used, "free": info.free}


def driver() -> Iterator[dict[str, Any]]:
    """libcuda's state, with the fields of `memguard._tools.doctor.facts.Cuda`. Yields the state after each step,
    because the next step may hang."""
    found: dict[str, Any] = {"candidates": candidates(os.environ.get("LD_LIBRARY_PATH", ""), _cache())}
    try:
        cuda = libcuda.load()
    except OSError as error:
        yield {**found, "error": str(error)}
        return
    found["path"] = mapped("libcuda")
    number = c_int()
    with contextlib.suppress(AttributeError):  # another vendor's library of that name lacks the function
        if cuda.cuDriverGetVersion(number) == 0:
            found["version"] = number.value
    found["checkpoint"] = libcuda.exports(*libcuda.CHECKPOINT)
    yield dict(found)
    try:
        code = cuda.cuInit(0)
    except AttributeError as error:
        yield {**found, "error": str(error)}
        return
    found["init"] = libcuda.error_name(code) or f"error {code}"
    yield dict(found)
    if code == 0:
        yield {**found, "devices": list(_devices(cuda))}


def _devices(cuda: libcuda.DriverAPI) -> Iterator[dict[str, Any]]:
    count, device, other, number = c_int(), c_int(), c_int(), c_int()
    name, size = create_string_buffer(100), c_size_t()
    cuda.cuDeviceGetCount(count)
    for ordinal in range(count.value):

        def attribute(which: int) -> int:
            return number.value if cuda.cuDeviceGetAttribute(number, which, device.value) == 0 else 0

        if cuda.cuDeviceGet(device, ordinal):
            continue
        try:
            uuid = libcuda.device_uuid(cuda, device.value)
        except DeviceError:
            continue
        peers = []
        for peer in range(count.value):
            if peer != ordinal and cuda.cuDeviceGet(other, peer) == 0:
                number.value = 0
                if cuda.cuDeviceCanAccessPeer(number, device.value, other.value) == 0 and number.value:
                    peers.append(peer)
        called = name.value.decode(errors="replace") if cuda.cuDeviceGetName(name, len(name), device.value) == 0 else ""
        yield {
            "ordinal": ordinal,
            "uuid": uuid.replace("GPU-", "MIG-", 1) if " MIG " in called else uuid,
            "name": called,
            "capability": [attribute(which) for which in _CAPABILITY],
            "multiprocessors": attribute(_MULTIPROCESSORS),
            "total": size.value if cuda.cuDeviceTotalMem_v2(size, device.value) == 0 else None,
            "peers": peers,
        }


def mapped(name: str) -> str | None:
    """The path of the mapped file of a library; None if this process has not mapped the library."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").split(None, 5)[5:]
            if path and re.search(rf"/{re.escape(name)}\.so", path[0]):
                return path[0]
    return None


def candidates(search: str, cache: str, folders: Iterable[str] = _FOLDERS) -> list[str]:
    """Each libcuda.so.1 in the loader's search order: LD_LIBRARY_PATH, the loader's cache, the usual folders."""
    wide = ("x86-64", "AArch64") if sys.maxsize > 1 << 32 else ()
    cached = [
        line.rpartition(" => ")[2].strip()
        for line in cache.splitlines()
        if line.strip().startswith("libcuda.so.1 (") and (not wide or any(word in line for word in wide))
    ]
    paths = [os.path.join(folder, "libcuda.so.1") for folder in search.split(":") if folder]
    paths += [*cached, *(os.path.join(folder, "libcuda.so.1") for folder in folders)]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isfile(path)))


def _cache() -> str:
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                [program, "-p"], capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL
            ).stdout
    return ""
