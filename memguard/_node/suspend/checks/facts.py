"""What has to be known of a process before it is suspended. `refusals` says what follows from it.

Nothing here touches the process: /proc, the cgroups' files and NVML are read, and in the process itself its frameworks
are asked. Unknown is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from memguard._base.text import visible
from memguard._devices import libcuda, proc, survey
from memguard._devices.nvml import Nvml
from memguard._node.identity import Process
from memguard._node.suspend.checks import cgroups
from memguard._node.suspend.checks import in_process_checks as within
from memguard._node.suspend.checks.cgroups import Limit
from memguard._node.suspend.gates import native_threads, tables
from memguard.errors import DeviceError

T = TypeVar("T")
Given = ParamSpec("Given")

_INJECTED = f"a library that CUDA loads into the process ({proc.INJECTION})"


class Child(NamedTuple):
    """A process that the one to suspend has started, and that has a CUDA context. `bytes`: by NVML, None if unknown."""

    pid: int
    name: str
    bytes: int | None


class Gpu(NamedTuple):
    """One GPU that the process is on. `unified`: it has no memory of its own. None: NVML does not say."""

    uuid: str
    mig: bool | None = None
    vgpu: bool | None = None
    unified: bool | None = None


@dataclass(frozen=True)
class Facts:
    """What was found of one process; None where it is not known.

    The machine. `machine` is `uname -m`; `driver` the kernel module's version; `calls` whether libcuda has
    `libcuda.CHECKPOINT`. `available` is MemAvailable in bytes, `grantable` what the kernel still promises, if it
    promises no more than it has.

    The process. `running`: it is there, and no other has its PID. `state`, `tracer`: as in `/proc/PID/stat` and
    `status`, `tracer` 0 for none. `user` is its effective user, `asker` ours; `capable`: we have CAP_SYS_PTRACE.
    `mps`: it uses a GPU through the Multi-Process Service. `uvm` counts its mappings of /dev/nvidia-uvm. `tools`: what
    profiles or debugs it from a library of its own. `limits`: of its cgroups. `children`: those with contexts, without
    what is suspended together with it.

    Asked inside the process, and None from outside, each a tuple of lines: `ipc`, `captures`, `profilers`. `nccl` is
    known from outside only where there is one. `natives` are libraries with a thread of their own that asks the driver,
    inside only those whose thread cannot be answered. `unseen`: what could not be read although somebody asked.
    """

    process: Process
    inside: bool = False
    bytes: Mapping[str, int] = field(default_factory=dict)
    machine: str | None = None
    driver: str | None = None
    calls: bool | None = None
    wsl: bool | None = None
    gpus: tuple[Gpu, ...] = ()
    available: int | None = None
    grantable: int | None = None
    limits: tuple[Limit, ...] | None = None
    running: bool | None = None
    state: str | None = None
    frozen: bool | None = None
    tracer: int | None = None
    user: int | None = None
    asker: int | None = None
    capable: bool | None = None
    dumpable: bool | None = None
    namespace: bool | None = None
    mps: bool | None = None
    uvm: int | None = None
    tools: tuple[str, ...] | None = None
    children: tuple[Child, ...] | None = None
    natives: tuple[str, ...] | None = None
    ipc: tuple[str, ...] | None = None
    nccl: tuple[str, ...] | None = None
    captures: tuple[str, ...] | None = None
    profilers: tuple[str, ...] | None = None
    unseen: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All bytes that would leave the GPUs."""
        return sum(self.bytes.values())


def collect(
    process: Process,
    *,
    inside: bool,
    bytes: Mapping[str, int],  # noqa: A002 (its name in all of these types)
    together: Collection[int] = (),
    root: str = "/",
) -> Facts:
    """The facts of a process that holds `bytes` of GPUs (UUID).

    Not within a process that is off its GPUs: its NVML calls wait until it is back.

    `inside`: it is this process, whose frameworks can be asked. `together`: PIDs that are suspended with it, and those
    of memguard's own helpers: they are not counted as children. `root` is the file system's, for tests.
    """
    pid = process.pid
    stat, status, maps = proc.stat(root, pid), proc.status(root, pid), proc.maps(root, pid)
    own = proc.parse_status(proc.text(os.path.join(root, "proc", "self", "status")) or "")
    user = status.user if status is not None else None
    here = within.look() if inside else None
    nvml = _Readings(bytes)
    system = os.uname()
    return Facts(
        process,
        inside,
        dict(bytes),
        machine=system.machine,
        driver=survey.module(root) or nvml.driver,
        calls=libcuda.exports(*libcuda.CHECKPOINT),
        wsl=proc.is_wsl(system.release, root),
        gpus=nvml.gpus,
        available=proc.available_memory(root),
        grantable=proc.grantable_memory(root),
        limits=cgroups.limits(root, pid),
        running=_running(root, process, stat),
        state=stat.state if stat is not None else None,
        frozen=False if inside else cgroups.frozen(root, pid),
        tracer=status.tracer if status is not None else None,
        user=user,
        asker=own.user,
        capable=own.capable,
        dumpable=True if inside else proc.dumpable(root, pid, user),
        namespace=True if inside else proc.same_namespace(root, pid),
        mps=pid in nvml.shared if nvml.shared is not None else None,
        uvm=maps.uvm if maps is not None else None,
        tools=_tools(root, pid, maps, inside),
        children=_children(root, pid, maps, nvml.processes, frozenset(together)),
        natives=here.natives if here is not None else native_threads.seen(root, pid, tables.tables()),
        ipc=here.ipc if here is not None else None,
        nccl=_nccl(root, pid, maps, here),
        captures=here.captures if here is not None else None,
        profilers=here.profilers if here is not None else None,
        unseen=here.unseen if here is not None else (),
    )


def paused(process: Process, root: str = "/") -> Facts:
    """Of all facts only those that say whether it runs at all now."""
    stat, status = proc.stat(root, process.pid), proc.status(root, process.pid)
    return Facts(
        process,
        state=stat.state if stat is not None else None,
        frozen=cgroups.frozen(root, process.pid),
        tracer=status.tracer if status is not None else None,
    )


class _Readings:
    """What NVML says: of the GPUs in use, and the bytes of each process on any GPU, None if one GPU does not tell."""

    def __init__(self, uuids: Iterable[str]) -> None:
        nvml = Nvml()
        try:
            self.driver = _asked(nvml.driver)
            devices = _asked(nvml.devices) or ()
            unified = {device.uuid: device.unified for device in devices}
            self.gpus = tuple(
                Gpu(
                    uuid,
                    True if uuid.startswith("MIG-") else _asked(nvml.mig, uuid),
                    _asked(nvml.vgpu, uuid),
                    unified.get(uuid),
                )
                for uuid in uuids
            )
            lists = [_asked(nvml.processes, device.uuid) for device in devices]
            told = [one for one in lists if one is not None]
            whole = bool(devices) and not nvml.refused and len(told) == len(lists)
            self.processes = _summed(told) if whole else None
            clients = [_asked(nvml.mps, device.uuid) for device in devices]
            asked = [one for one in clients if one is not None]
            self.shared = frozenset[int]().union(*asked) if asked else None
        finally:
            nvml.close()


def _asked(call: Callable[Given, T], *given: Given.args, **named: Given.kwargs) -> T | None:
    """The answer; None if NVML has none."""
    try:
        return call(*given, **named)
    except DeviceError:
        return None


def _summed(lists: Iterable[Mapping[int, int | None]]) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for one in lists:
        for pid, size in one.items():
            before = found.get(pid, 0)
            found[pid] = None if size is None or before is None else before + size
    return found


def _running(root: str, process: Process, stat: proc.Stat | None) -> bool | None:
    """Unknown only without a /proc."""
    if stat is not None:
        return stat.start == process.start and stat.state not in "ZX"
    return False if os.path.isdir(os.path.join(root, "proc", "self")) else None


def _tools(root: str, pid: int, maps: proc.Maps | None, inside: bool) -> tuple[str, ...] | None:
    """Profilers and debuggers by their libraries, and by the variable that names one for CUDA to load."""
    named = proc.injected(root, pid) or (inside and bool(os.environ.get(proc.INJECTION)))
    if maps is None:
        return (_INJECTED,) if named else None
    return maps.tools or ((_INJECTED,) if named else ())


def _nccl(root: str, pid: int, maps: proc.Maps | None, here: within.Inside | None) -> tuple[str, ...] | None:
    """NCCL's traces: its shared memory, and the threads with which torch watches it. libnccl alone is none."""
    lines = list(here.nccl) if here is not None else []
    if maps is not None and maps.nccl:
        lines.append("NCCL: memory shared with its other ranks is mapped (/dev/shm/nccl-...)")
    named = sum("nccl" in name.lower() for name in proc.threads(root, pid) or ())
    if named and not (here is not None and here.nccl):
        lines.append(f"NCCL: {named} of its threads {'run' if named > 1 else 'runs'}")
    return tuple(lines) if lines or here is not None else None


def _children(
    root: str,
    pid: int,
    maps: proc.Maps | None,
    listed: Mapping[int, int | None] | None,
    together: frozenset[int],
) -> tuple[Child, ...] | None:
    """By NVML, if it numbers processes as we do: in a container it may not. Else by what they have mapped.

    A child that was only forked has its parent's mappings and no context: then libcuda lies at the same address, which
    a program that was started anew gets only by chance.
    """
    family = proc.descendants(root, pid)
    if family is None:
        return None
    found = []
    for child, stat in family.items():
        if child in together:
            continue
        if listed is not None and pid in listed:
            if child in listed:
                found.append(Child(child, visible(stat.name), listed[child]))
            continue
        own = proc.maps(root, child)
        forked = own is not None and maps is not None and own.driver == maps.driver and own.gpu <= maps.gpu
        if own is not None and own.uvm and not forked:
            found.append(Child(child, visible(stat.name), None))
    return tuple(found)
