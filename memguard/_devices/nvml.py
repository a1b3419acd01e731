"""Reads NVML for all of memguard except the doctor's survey. Creates no context and does not initialise CUDA.

Quirks handled here, each documented or measured: NVML must be initialised again after a fork, and after other code in
this process shut it down; NVML's device count includes GPUs that it cannot open; `NVMLLibraryMismatchError` is no
`NVMLError`; `usedGpuMemory` is None under WSL and some MIG and vGPU set-ups; drivers 535.43 to 535.85 swap fields of
the process list, so memguard ignores the bytes that they report.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import Structure, byref, c_char, c_uint, c_ulonglong
from struct import Struct
from typing import Any, NamedTuple, TypeVar

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._base.types import Device, MemoryInfo, memory_info_of
from memguard._base.units import MAX_SIZE, is_whole, short
from memguard._devices import suspension
from memguard.errors import DeviceError

T = TypeVar("T")

_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
}
_FIXES = {
    "NVMLError_DriverNotLoaded": "load the NVIDIA kernel module (`nvidia-smi` must work first); "
    "in a container start it with --gpus all",
    "NVMLError_LibRmVersionMismatch": "the driver was updated while loaded: reboot, or reload the kernel module",
    "NVMLLibraryMismatchError": "update the NVIDIA driver, or install an nvidia-ml-py that matches it",
    "NVMLError_NoPermission": "run as a user who may open /dev/nvidia*",
    "NVMLError_GpuIsLost": "the GPU fell off the bus: reset it or reboot the machine (`dmesg | grep Xid` says why)",
    "NVMLError_ResetRequired": "reset the GPU (`nvidia-smi --gpu-reset`), or reboot the machine",
    "NVMLError_NotSupported": "this GPU does not report it: choose another one with CUDA_VISIBLE_DEVICES",
    "NVMLError_Unknown": "run `nvidia-smi`; a container in which it worked before has lost its devices: restart it",
}
_FIND = "_nvmlGetFunctionPointer"
"""nvidia-ml-py's function that looks up NVML's functions."""
_SLOW = 1.0
"""Seconds. NVML starts in 20 ms and reads in 8 µs to 40 µs (H200); without persistence mode it starts in seconds."""
_LIBRARY, _NOT_LOADED = "NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"
_WITHIN = Advice(
    "NVML is just being asked on this thread, and a signal handler or a finalizer asked it again within that",
    "ask again after it",
)
_BRIEFLY = 0.2
"""Seconds to wait for pynvml's lock. Other threads hold the lock for microseconds, so after this time this thread
itself must hold the lock."""


def without_library(*, control: bool, module: bool, wsl: bool, amd: str | None, tegra: bool = False) -> str:
    """The fix if NVML's library cannot be loaded, judged by the machine's devices and drivers.

    `control`: /dev/nvidiactl exists. `module`: the kernel module is loaded. `amd`: the AMD hardware or software found,
    as text. `tegra`: the machine is a Jetson.
    """
    if tegra:
        return "this is a Jetson without NVML: install the package nvidia-l4t-nvml (JetPack 6 and later)"
    if control:
        return (
            "the driver is there (/dev/nvidiactl), but its library libnvidia-ml.so.1 is missing: start the container "
            "with --gpus all and NVIDIA_DRIVER_CAPABILITIES=utility,compute; outside a container install the driver's "
            "libraries"
        )
    if module:
        return "the machine has an NVIDIA driver and this container no GPU: start it with --gpus all"
    if wsl:
        return "install the NVIDIA driver on Windows; WSL then has libnvidia-ml.so.1 in /usr/lib/wsl/lib"
    if amd:
        return (
            f"there is {amd} here, and memguard budgets NVIDIA GPUs only: run without it, or try a budget with "
            "memguard.init(..., simulate='h200'); if there is an NVIDIA GPU too, install its driver"
        )
    return "install the NVIDIA driver; in a container start it with --gpus all"


def _without_library() -> str:
    return without_library(
        control=_exists("/dev/nvidiactl"),
        module=_exists("/proc/driver/nvidia/version"),
        wsl=_exists("/dev/dxg"),
        amd=_amd(),
        tegra=_tegra(),
    )


def _missing(error: str) -> bool:
    """True if this error means that the machine has no GPU, and not that a GPU is broken."""
    from memguard._devices import survey

    return no_gpu(
        error,
        control=_exists("/dev/nvidiactl") or _tegra(),
        module=_exists("/proc/driver/nvidia/version"),
        pci=error == _NOT_LOADED and bool(survey.pci()),
    )


def no_gpu(error: str, *, control: bool, module: bool, pci: bool) -> bool:
    """Whether NVML's error means that this process has no GPU, judged by the machine's devices and drivers.

    `control`, `module`: as for `without_library`; a Jetson counts as `control`, because its GPU needs no NVML. `pci`:
    an NVIDIA GPU is on the PCI bus. A GPU whose installed driver fails does not count as missing, because a program
    that continued would use the GPU without a cap, or silently run without the GPU.
    """
    if control:
        return False
    return error == _LIBRARY or (error == _NOT_LOADED and (module or not pci))


def _exists(path: str) -> bool:
    return os.path.exists(path)


def _tegra() -> bool:
    return any(map(_exists, ("/etc/nv_tegra_release", "/dev/nvhost-ctrl-gpu", "/dev/nvhost-gpu", "/dev/nvgpu")))


def _amd() -> str | None:
    if _exists("/sys/class/kfd"):
        return "an AMD GPU (ROCm)"
    version = sys.modules.get("torch.version")  # only if imported already
    return "a PyTorch built for ROCm (AMD GPUs)" if getattr(version, "hip", None) else None


# nvidia-ml-py's own structures run Python code for each access to a field; plain ctypes structures do not.
class _Memory(Structure):
    """`nvmlMemory_v2_t` of nvml.h."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class _Process(Structure):
    """`nvmlProcessInfo_t` of nvml.h, as `nvmlDeviceGetComputeRunningProcesses_v3` fills it in."""

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


_RECENT = 5.0
"""Seconds of utilisation samples to read. NVML's samples are up to a second apart."""
_ROOM, _MOST_ROOM = 32, 1 << 16
"""Capacity of the process list: initial and maximal."""
_FIGURES, _ENTRY = Struct("@I4Q"), Struct("@IQII")
"""Unpack all fields of `_Memory` and `_Process` in one call, which takes no longer than reading one ctypes field."""
_Room: Any = c_char * (_ROOM * _ENTRY.size)


class _Ready(NamedTuple):
    """The result of `Nvml._prepare`. `listed` is NVML's function for the process list; None if NVML lacks it.

    `figures` and `lists` contain output buffers for NVML, with pointers to them; `lists` also NVML's last output and
    its decoded value. A caller removes a buffer from the list while using it.
    """

    n: Any
    find: Any
    handle: Any
    ask: Callable[..., int]
    version: int
    listed: Callable[..., int] | None
    figures: list[tuple[_Memory, Any]]
    lists: list[tuple[c_uint, Any, Any, bytes | None, Mapping[int, int | None]]]


_all: weakref.WeakSet[Nvml] = weakref.WeakSet()


def forget_prepared() -> None:
    """Called at a suspension of this process, so that the next readings go through `Nvml._call`, which raises
    Suspended.

    A prepared reading does not check for a suspension.
    """
    for one in list(_all):
        one.forget_prepared()


class _PerThread(threading.local):
    """Per-thread state."""

    calls = 0
    """The number of pynvml calls in progress on this thread, by all `Nvml` objects."""


_here = _PerThread()


def _may_call(n: Any) -> bool:
    """True if this thread may call pynvml. False if the call would deadlock on pynvml's process-wide lock.

    A signal handler or finalizer may have interrupted a call of this thread that holds the lock.
    """
    lock = getattr(n, "libLoadLock", None)
    if not _here.calls or lock is None:
        return True
    patience = time.monotonic() + _BRIEFLY
    while lock.locked():
        if time.monotonic() > patience:
            return False
        time.sleep(0.001)
    return True


class Nvml:
    """NVML for one process. Thread-safe. Every failure is a DeviceError that names the cause and the fix."""

    _slow_warned = False  # one warning per process, not per instance

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self._restarting = False
        """Whether an nvmlInit or nvmlShutdown call is in progress."""
        self._pid: int | None = None
        self._handles: dict[str, Any] = {}
        self._indices: dict[str, int] = {}
        self._refused: dict[int, Advice] = {}
        self._v2: dict[str, bool] = {}
        self._totals: dict[str, int] = {}
        self._ready: dict[str, _Ready] = {}
        """The results of `_prepare` by UUID: they reduce a reading to little more than one NVML call."""
        self._bytes_trusted = True
        self._here = threading.local()  # `doing` names this thread's current reading in error messages
        _all.add(self)

    def devices(self) -> tuple[Device, ...]:
        """The GPUs of the machine in NVML's order, regardless of CUDA_VISIBLE_DEVICES. Omits the GPUs in `refused`.

        A GPU whose memory NVML does not report, as with unified memory, is `unified` and has a total of 0 here.
        """
        return self._call("", self._devices, "")

    @property
    def refused(self) -> tuple[Advice, ...]:
        """Reason and fix for each GPU missing from `devices`: NVML counts GPUs that it cannot open."""
        return tuple(why for _, why in sorted(self._refused.items(), key=lambda item: item[0]))

    def memory(self, uuid: str) -> MemoryInfo:
        """Read `nvmlDeviceGetMemoryInfo_v2`, or v1 (no `reserved`) if the driver lacks v2. Takes 8 µs on an H200."""
        ready = self._ready.get(uuid)
        # The prepared call skips pynvml's lock. It is used only while pynvml is unchanged since `_prepare`.
        if ready is not None and self._pid == os.getpid() and getattr(ready.n, _FIND, None) is ready.find:
            try:
                found, out = ready.figures.pop()
            except IndexError:  # another thread is reading, or this call interrupted a reading
                found = _Memory(ready.version)
                out = byref(found)
            started = time.monotonic()
            code = ready.ask(ready.handle, out)
            if time.monotonic() - started >= _SLOW:
                self._warn_slow(f"memory of {uuid}", time.monotonic() - started)
            _, total, reserved, free, used = _FIGURES.unpack(found)
            if not code and used <= total and free <= total and reserved <= total and 0 < total <= MAX_SIZE:
                ready.figures.append((found, out))
                return memory_info_of((total, reserved, used, free, None))
            answers = [(code, found)]  # the error is made from this answer, without another NVML call

            def work(n: Any, uuid: str) -> MemoryInfo:
                if not answers:
                    return self._memory(n, uuid)
                code, found = answers.pop()
                if code:
                    raise n.NVMLError(code)
                return self._checked(n, uuid, found.total, found.reserved, found.used, found.free)

            return self._call("memory of", work, uuid)
        reading = self._call("memory of", self._memory, uuid)
        self._prepare(uuid)
        return reading

    def processes(self, uuid: str) -> Mapping[int, int | None]:
        """Bytes of every compute process by PID; None if NVML reports no bytes, empty if NVML has no list (Jetson).

        Takes 40 µs on an H200 with the two calls of nvidia-ml-py.
        """
        ready = self._ready.get(uuid)
        if (
            ready is not None
            and ready.listed is not None
            and self._pid == os.getpid()
            and getattr(ready.n, _FIND, None) is ready.find
        ):
            try:
                count, number, room, before, found = ready.lists.pop()
            except IndexError:
                count, room, before, found = c_uint(), _Room(), None, {}
                number = byref(count)
            count.value = _ROOM
            started = time.monotonic()
            code = ready.listed(ready.handle, number, room)
            if time.monotonic() - started >= _SLOW:
                self._warn_slow(f"processes of {uuid}", time.monotonic() - started)
            if not code:
                answer = room[: _ENTRY.size * count.value]
                if answer != before:
                    found = self._summed(uuid, _ENTRY.iter_unpack(answer))
                ready.lists.append((count, number, room, answer, found))
                return found
            answers = [(code, max(2 * count.value, 2 * _ROOM))]

            def work(n: Any, uuid: str) -> Mapping[int, int | None]:
                return self._processes(n, uuid, *(answers.pop() if answers else ()))

            return self._call("processes of", work, uuid)
        return self._call("processes of", self._processes, uuid)

    def utilisation(self, uuid: str) -> Mapping[int, int] | None:
        """The percentage of the last few seconds in which each process kept the GPU busy, by PID.

        Reads `nvmlDeviceGetProcessUtilization`. Idle processes are missing. None if NVML fails, or sampled no process.
        """
        return self._call("utilisation of", self._utilisation, uuid)

    def forget_prepared(self) -> None:
        """Make the next reading of each GPU use `_call` instead of a prepared call."""
        self._ready = {}

    def _prepare(self, uuid: str) -> None:
        """Cache NVML's functions and the handle, once a reading with them has succeeded."""
        n = sys.modules.get("pynvml")
        find, handle = getattr(n, _FIND, None), self._handles.get(uuid)
        if n is None or find is None or handle is None or not self._v2.get(uuid) or _here.calls:
            return
        try:
            ask = find("nvmlDeviceGetMemoryInfo_v2")
        except n.NVMLError:
            return
        try:
            listed = find("nvmlDeviceGetComputeRunningProcesses_v3")
        except n.NVMLError:
            listed = None
        ready = self._ready
        ready[uuid] = _Ready(n, find, handle, ask, n.nvmlMemory_v2, listed, [], [])
        if suspension.now is not None:  # the suspension began during the reading
            ready.pop(uuid, None)

    def mig(self, uuid: str) -> bool:
        """Whether MIG divides the GPU. This version of memguard does not support MIG instances."""
        return self._call("MIG mode of", lambda n, uuid: self._mig(n, self._handle(n, uuid)), uuid)

    def driver(self) -> str:
        """The driver's version, such as 580.159.04."""
        return self._call("driver version", lambda n, _: str(n.nvmlSystemGetDriverVersion()), "")

    def mps(self, uuid: str) -> frozenset[int]:
        """The PIDs that use the GPU through the Multi-Process Service, the MPS server included."""
        return self._call("MPS processes of", lambda n, uuid: self._mps(n, self._handle(n, uuid)), uuid)

    def vgpu(self, uuid: str) -> bool:
        """True if the GPU is a vGPU of this virtual machine. A whole card that is passed through is not a vGPU."""
        return self._call("virtualization mode of", lambda n, uuid: self._vgpu(n, self._handle(n, uuid)), uuid)

    def used_since(self, uuid: str, pid: int, stamp: int) -> tuple[bool | None, int]:
        """Returns whether a process has used the GPU since `stamp` (None if NVML fails), and NVML's newest stamp.

        A stamp is NVML's time in microseconds, returned by an earlier call; 0 covers the few seconds that NVML
        remembers. Work of much less than a percent of a sampling period (a sixth of a second to one second) may not be
        visible.
        """
        return self._call("utilization of", lambda n, uuid: self._used_since(n, uuid, pid, stamp), uuid)

    def close(self) -> None:
        """Shut NVML down (nvmlShutdown). The next call initialises it again."""
        with self._lock:
            pid, self._pid = self._pid, None  # first, because a second nvmlShutdown would affect other users of NVML
            # While the process is suspended, NVML would block until the resume.
            if pid == os.getpid() and not self._restarting and suspension.now is None:
                import pynvml

                if _may_call(pynvml):
                    self._shut_down(pynvml)
            self._handles, self._ready = {}, {}

    def _shut_down(self, n: Any) -> None:
        self._restarting = True
        _here.calls += 1
        try:
            with contextlib.suppress(n.NVMLError):  # the driver was unloaded: nothing remains to shut down
                n.nvmlShutdown()
        finally:
            _here.calls -= 1
            self._restarting = False

    def _call(self, what: str, work: Callable[[Any, str], T], uuid: str) -> T:
        """Run `work` on the GPU. `what` names the reading in an error's text."""
        if suspension.now is not None:  # NVML would block until the process is resumed
            raise suspension.refused("NVML")
        n = self._pynvml()  # not timed, because the import may read a slow disk
        here = _here
        if here.calls and not _may_call(n):
            raise DeviceError(_WITHIN)
        started = time.monotonic()
        here.calls += 1
        try:
            if self._pid == os.getpid():  # without memguard's lock: NVML itself is thread-safe
                try:
                    return self._read(n, what, work, uuid)
                except n.NVMLError_Uninitialized:  # other code in this process shut NVML down
                    pass
            with self._lock:
                started = time.monotonic()  # the wait for the lock is not timed
                return self._initialise_and_read(n, what, work, uuid)
        finally:
            here.calls -= 1
            spent = time.monotonic() - started
            if spent >= _SLOW:
                # called without the lock, because a log handler may call memguard
                self._warn_slow(f"{what} {uuid}".strip(), spent)

    def _pynvml(self) -> Any:
        found = sys.modules.get("pynvml") if self._pid is not None else None
        if found is not None:
            return found
        try:
            import pynvml
        except ImportError as error:
            raise DeviceError(f"NVML: {error}", fix="pip install nvidia-ml-py") from None
        return pynvml

    def _initialise_and_read(self, n: Any, what: str, work: Callable[[Any, str], T], uuid: str) -> T:
        """Initialise NVML if needed, then run `_read`. Callers hold the lock."""
        if self._restarting:
            raise DeviceError(_WITHIN)
        try:
            if self._pid != os.getpid():  # first use, or after a fork: the parent's handles are invalid here
                self._start(n)
            try:
                return self._read(n, what, work, uuid)
            except n.NVMLError_Uninitialized:  # other code in this process shut NVML down
                self._start(n)
            return self._read(n, what, work, uuid)
        except (n.NVMLError, n.NVMLLibraryMismatchError) as error:
            raise DeviceError(self._text(error), missing=_missing(type(error).__name__)) from None

    def _read(self, n: Any, what: str, work: Callable[[Any, str], T], uuid: str) -> T:
        """Run `work`. Re-raises NVMLError_Uninitialized; raises every other error as a DeviceError."""
        self._here.doing = what, uuid
        try:
            return work(n, uuid)
        except n.NVMLError_Uninitialized:
            raise
        except (n.NVMLError, n.NVMLLibraryMismatchError) as error:
            raise DeviceError(self._text(error), missing=_missing(type(error).__name__)) from None

    @property
    def _doing(self) -> str:
        """The name of this thread's current reading, for an error's text."""
        return " ".join(filter(None, getattr(self._here, "doing", ())))

    @_doing.setter
    def _doing(self, what: str) -> None:
        self._here.doing = (what,)

    def _text(self, error: Exception) -> Advice:
        name = type(error).__name__
        if name == _LIBRARY:
            return Advice(f"no usable NVIDIA driver here: {error}", _without_library())
        fix = _FIXES.get(name, "run `nvidia-smi` to see what the driver says")
        return Advice(f"NVML: {error}{f' ({self._doing})' if self._doing else ''}", fix)

    def _warn_slow(self, what: str, seconds: float) -> None:
        if seconds < _SLOW or self._slow_warned:
            return
        Nvml._slow_warned = True
        _log.warning(
            "NVML is slow: %.1f s for one call (%s); fix: if `nvidia-smi` is slow too, turn persistence mode on "
            "(`nvidia-smi -pm 1`: without it each start wakes the GPUs) and check `dmesg | grep Xid`",
            seconds,
            what or "list of GPUs",
        )

    def _start(self, n: Any) -> None:
        self._pid, self._doing, self._restarting = None, "", True
        try:
            n.nvmlInit()
            try:
                self._probe(n)
            except BaseException:
                self._shut_down(n)
                raise
            self._pid = os.getpid()  # last, so that after a failure the next call initialises NVML again
        finally:
            self._restarting = False

    def _probe(self, n: Any) -> None:
        handles: dict[str, Any] = {}  # assigned to `self` only when complete, because other threads read it
        refused: dict[int, Advice] = {}
        indices = dict(self._indices)
        for index in range(n.nvmlDeviceGetCount()):
            self._doing = f"GPU {index}"
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                uuid = n.nvmlDeviceGetUUID(handle)
            except n.NVMLError_NoPermission as error:  # NVML counts other users' GPUs too (SLURM, containers)
                refused[index] = self._text(error)
                continue
            handles[uuid], indices[uuid] = handle, index
        self._ready = {}
        self._handles, self._indices, self._refused = handles, indices, refused
        self._doing = "driver version"
        version = tuple(int(part) for part in n.nvmlSystemGetDriverVersion().split(".")[:2] if part.isdigit())
        self._bytes_trusted = not (535, 43) <= version <= (535, 85)

    def _handle(self, n: Any, uuid: str) -> Any:
        handle = self._handles.get(uuid)
        if handle is None:
            with self._lock:
                pid, self._pid = self._pid, None  # the next call initialises NVML again: the GPU may have recovered
                if pid == os.getpid():
                    self._shut_down(n)
            gone = Advice(f"NVML sees no GPU {uuid} any more", "check `nvidia-smi -L`")
            raise DeviceError(self._refused.get(self._indices.get(uuid, -1), gone))
        return handle

    def _devices(self, n: Any, _: str) -> tuple[Device, ...]:
        found = []
        for uuid, handle in [*self._handles.items()]:
            self._doing = uuid
            name = n.nvmlDeviceGetName(handle)
            try:
                info = self._memory(n, uuid)
            except n.NVMLError_NoPermission:
                if not self._mig(n, handle):
                    raise
                # with MIG, only root may read the GPU's memory
                self._refused[self._indices[uuid]] = mig_advice(name, uuid)
                continue
            except n.NVMLError_NotSupported:
                info = MemoryInfo(0, None, None, 0)
            index, architecture = self._indices[uuid], self._architecture(n, handle)
            unified = not info.total
            found.append(Device(uuid, name, index, info.total, info.reserved, architecture, unified=unified))
        return tuple(found)

    def _memory(self, n: Any, uuid: str) -> MemoryInfo:
        handle = self._handle(n, uuid)
        if self._v2.get(uuid, True):
            try:
                info = _memory_v2(n, handle)
                self._v2[uuid] = True
                return self._checked(n, uuid, info.total, info.reserved, info.used, info.free)
            except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError):
                if uuid in self._v2:  # v2 worked before, and v1's figures would not match the plan's
                    raise
                self._v2[uuid] = False
        info = n.nvmlDeviceGetMemoryInfo(handle)
        return self._checked(n, uuid, info.total, None, info.used, info.free)

    def _checked(self, n: Any, uuid: str, total: int, reserved: int | None, used: int, free: int) -> MemoryInfo:
        """Return the reading. Raises DeviceError for impossible figures: a failing driver returns 2⁶⁴-1. Figures that
        are all zero count as not supported."""
        if not (0 <= used <= total and 0 <= free <= total and 0 <= (reserved or 0) <= total and 0 < total <= MAX_SIZE):
            if not (total or reserved or used or free):
                raise n.NVMLError(n.NVML_ERROR_NOT_SUPPORTED)
            raise DeviceError(
                f"NVML: {uuid} says total {short(total)}, reserved {short(reserved)}, used {short(used)}, free "
                f"{short(free)} bytes, which cannot be",
                fix="run `nvidia-smi`, and check `dmesg | grep Xid`",
            )
        self._totals[uuid] = total
        return MemoryInfo(total, reserved, used, free)

    def _processes(self, n: Any, uuid: str, code: int = 0, room: int = _ROOM) -> dict[int, int | None]:
        """`code`: the result of an earlier NVML call. If the list was too small, calls NVML again for `room`
        processes."""
        try:
            if code not in (n.NVML_SUCCESS, n.NVML_ERROR_INSUFFICIENT_SIZE):
                raise n.NVMLError(code)
            processes = _listed(n, self._handle(n, uuid), room)
        except n.NVMLError_NotSupported:
            return {}
        return self._summed(uuid, [(process.pid, process.usedGpuMemory) for process in processes])

    def _utilisation(self, n: Any, uuid: str) -> dict[int, int] | None:
        since = int((time.time() - _RECENT) * 1e6)
        try:
            samples = n.nvmlDeviceGetProcessUtilization(self._handle(n, uuid), since)
        except n.NVMLError_Uninitialized:
            raise
        except (n.NVMLError, n.NVMLLibraryMismatchError, AttributeError):  # NVML also raises if there is no sample
            return None
        found: dict[int, int] = {}
        for sample in samples:
            if 0 <= sample.smUtil <= 100:  # some drivers report impossible figures
                found[sample.pid] = max(found.get(sample.pid, 0), sample.smUtil)
        return found or None

    def _summed(self, uuid: str, processes: Iterable[tuple[Any, ...]]) -> dict[int, int | None]:
        """The sum of bytes by PID, because NVML may list a PID more than once. An entry begins with PID and bytes."""
        found: dict[int, int | None] = {}
        total, trusted = self._totals.get(uuid, MAX_SIZE), self._bytes_trusted
        for entry in processes:
            pid, size = entry[0], entry[1] if trusted else None
            if pid not in found:
                found[pid] = size if type(size) is int and 0 <= size <= total else None
                continue
            before = found[pid]
            together = None if before is None or not is_whole(size) else before + size
            found[pid] = together if together is None or together <= total else None
        return found

    def _used_since(self, n: Any, uuid: str, pid: int, stamp: int) -> tuple[bool | None, int]:
        try:
            samples = n.nvmlDeviceGetProcessUtilization(self._handle(n, uuid), stamp)
        except n.NVMLError_NotFound:  # no sample after `stamp`
            return False, stamp
        except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound, n.NVMLError_NoPermission):
            return None, stamp
        except n.NVMLError as error:
            if error.value == n.NVML_SUCCESS:  # nvidia-ml-py's error for an empty list
                return False, stamp
            raise
        fresh = [
            sample
            for sample in samples
            # Samples of ended processes may contain arbitrary values.
            if sample.timeStamp > stamp and max(_parts(sample)) <= 100
        ]
        used = any(sample.pid == pid and any(_parts(sample)) for sample in fresh)
        return used, max((sample.timeStamp for sample in fresh), default=stamp)

    @staticmethod
    def _architecture(n: Any, handle: Any) -> str:
        try:
            return _ARCHITECTURES.get(n.nvmlDeviceGetArchitecture(handle), "unknown")
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError, AttributeError):
            return "unknown"

    @staticmethod
    def _mig(n: Any, handle: Any) -> bool:
        try:
            return bool(n.nvmlDeviceGetMigMode(handle)[0])
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError):
            return False

    @staticmethod
    def _mps(n: Any, handle: Any) -> frozenset[int]:
        try:
            return frozenset(process.pid for process in n.nvmlDeviceGetMPSComputeRunningProcesses(handle))
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError):
            return frozenset()

    @staticmethod
    def _vgpu(n: Any, handle: Any) -> bool:
        try:
            return bool(n.nvmlDeviceGetVirtualizationMode(handle) == n.NVML_GPU_VIRTUALIZATION_MODE_VGPU)
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported, n.NVMLLibraryMismatchError):
            return False


def _parts(sample: Any) -> tuple[int, ...]:
    """The utilisation of each engine in percent."""
    return sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil


def _function(n: Any, name: str) -> Callable[..., int] | None:
    """NVML's function, found by nvidia-ml-py's lookup; None if nvidia-ml-py lacks the lookup.
    Raises NVMLError_FunctionNotFound if NVML lacks the function."""
    find = getattr(n, _FIND, None)
    return find(name) if find is not None else None


def _memory_v2(n: Any, handle: Any) -> Any:
    """Total, reserved, free and used memory of a GPU in bytes. Raises every NVML error as it is."""
    call = _function(n, "nvmlDeviceGetMemoryInfo_v2")
    if call is None:
        return n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
    found = _Memory(n.nvmlMemory_v2)
    if code := call(handle, byref(found)):
        raise n.NVMLError(code)
    return found


def _listed(n: Any, handle: Any, room: int = _ROOM) -> Sequence[Any]:
    """The compute processes in one NVML call. nvidia-ml-py makes two calls: the first reads their number.

    NVML reports unknown bytes as 2⁶⁴-1. If NVML lacks the function, or nvidia-ml-py the lookup, uses nvidia-ml-py's own
    function.
    """
    try:
        call = _function(n, "nvmlDeviceGetComputeRunningProcesses_v3")
    except n.NVMLError_FunctionNotFound:
        call = None
    while call is not None and room <= _MOST_ROOM:
        count, found = c_uint(room), (_Process * room)()
        code = call(handle, byref(count), found)
        if code == n.NVML_SUCCESS:
            return found[: count.value]
        if code != n.NVML_ERROR_INSUFFICIENT_SIZE:
            raise n.NVMLError(code)
        room = max(2 * count.value, 2 * room)  # more processes may start before the next call
    listed: Sequence[Any] = n.nvmlDeviceGetComputeRunningProcesses(handle)
    return listed


def mig_advice(name: str, uuid: str) -> Advice:
    """The reason why memguard cannot budget a GPU that MIG divides."""
    return Advice(
        f"{name} ({uuid}) has MIG enabled, which this version does not support",
        "choose another GPU with CUDA_VISIBLE_DEVICES, or disable MIG on this one",
    )
