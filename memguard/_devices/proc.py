"""Reads /proc: processes' state, descendants, mappings, access rights and names, and the machine's memory. Detects WSL.

Every reader takes the root of the file system, `/` except in tests. A reader returns None if it
cannot read the file: another user's process, an ended process, or a /proc that is not mounted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memguard._base.text import visible
from memguard._base.units import GIB, format_size

_UVM = "/dev/nvidia-uvm"
_GPU = re.compile(r"/dev/nvidia\d+$|/dev/nvidiactl$|/dev/nvidia-uvm$")
_DRIVER = re.compile(r"/libcuda\.so[^/]*$")
_NCCL = "/dev/shm/nccl-"
_SYS_PTRACE = 1 << 19  # CAP_SYS_PTRACE (linux/capability.h)
_MOST = 64 << 20
"""The most bytes to read of one file: a process may have any number of mappings."""
INJECTION = "CUDA_INJECTION64_PATH"
"""The variable that names a library for CUDA to load at its initialisation (CUPTI's documentation)."""
TOOLS = {
    "libToolsInjection": "Nsight Systems (nsys)",
    "libcuda-injection.so": "Nsight Compute (ncu)",
    "libTreeLauncherTargetInjection.so": "a tool of Nsight",
    "libsanitizer-collection.so": "Compute Sanitizer",
    "libInterceptorInjectionTarget.so": "a tool of Nsight",
    "libcudadebugger.so": "a debugger of CUDA (cuda-gdb)",
}
"""Libraries that a profiler or debugger loads into the process it observes, by the beginning of the file's name."""
_LONGEST = 60
"""Characters of a shortened command line, whose beginning identifies the program."""
UNLISTED = "processes that are not listed here (another container, the driver)"
_DRIVER_USES = GIB
"""Bytes that the driver itself may use on each GPU. `unlisted` attributes fewer bytes to the driver."""


class Stat(NamedTuple):
    """`state`: T is stopped, t stopped by a debugger, Z ended. `start`: clock ticks from the machine's start to the
    process's. `ran`: CPU time in clock ticks."""

    name: str
    state: str
    parent: int
    start: int
    ran: int = 0


class Status(NamedTuple):
    """`user` is the effective user; `users` are the real, effective, saved and file-system users. `tracer` is the PID
    of an attached debugger; 0 for none."""

    users: tuple[int, ...]
    tracer: int | None
    capable: bool | None

    @property
    def user(self) -> int | None:
        return self.users[1] if len(self.users) > 1 else None


class Maps(NamedTuple):
    """The CUDA mappings of a process.

    `uvm` counts the mappings of /dev/nvidia-uvm; `gpu` has the addresses of all mappings of the driver's device files;
    `driver` is the start address of libcuda; `tools` names the mapped libraries of `TOOLS`; `nccl` is true if the
    shared memory of an NCCL communicator is mapped.
    """

    uvm: int
    gpu: frozenset[str]
    driver: str | None
    tools: tuple[str, ...]
    nccl: bool


def text(path: str) -> str | None:
    """A file's text; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST).decode("utf-8", "replace")
    except (OSError, ValueError):  # a path with a null byte raises ValueError
        return None


def path_of(root: str, pid: int, name: str) -> str:
    """The path of one of a process's files in /proc."""
    return os.path.join(root, "proc", str(pid), name)


def stat(root: str, pid: int) -> Stat | None:
    return parse_stat(text(path_of(root, pid, "stat")) or "")


def parse_stat(content: str) -> Stat | None:
    """Parse the text of `/proc/PID/stat`. The process's name is in parentheses and may itself contain parentheses."""
    head, _, tail = content.rpartition(")")
    fields = tail.split()
    parent, user, system, start = (_number(fields[place]) if len(fields) > place else None for place in (1, 11, 12, 19))
    if not fields or len(fields[0]) != 1 or parent is None or start is None:
        return None
    return Stat(head.partition("(")[2], fields[0], parent, start, (user or 0) + (system or 0))


def status(root: str, pid: int) -> Status | None:
    content = text(path_of(root, pid, "status"))
    return None if content is None else parse_status(content)


def parse_status(content: str) -> Status:
    """Parse the text of `/proc/PID/status`."""
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in content.splitlines())}
    users = tuple(number for field in fields.get("Uid", ()) if (number := _number(field)) is not None)
    tracer = next((_number(field) for field in fields.get("TracerPid", ())), None)
    capabilities = "".join(fields.get("CapEff", ()))
    capable = bool(int(capabilities, 16) & _SYS_PTRACE) if re.fullmatch("[0-9a-fA-F]{1,32}", capabilities) else None
    return Status(users, tracer, capable)


def maps(root: str, pid: int) -> Maps | None:
    content = text(path_of(root, pid, "maps"))
    return None if content is None else parse_maps(content)


def parse_maps(content: str) -> Maps:
    """Parse the text of `/proc/PID/maps`. The path of a removed file ends in ` (deleted)`."""
    uvm, gpu, driver, tools, nccl = 0, set[str](), None, dict[str, None](), False
    for line in content.splitlines():
        parts = line.split(None, 5)
        if len(parts) < 6 or not parts[5].startswith("/"):
            continue
        path = parts[5].removesuffix(" (deleted)")
        if _GPU.match(path):
            uvm += path == _UVM
            gpu.add(f"{parts[0]} {path}")
        elif _DRIVER.search(path):
            driver = driver or parts[0].partition("-")[0]
        elif path.startswith(_NCCL):
            nccl = True
        else:
            name = path.rpartition("/")[2]
            tools.update(dict.fromkeys(tool for begin, tool in TOOLS.items() if name.startswith(begin)))
    return Maps(uvm, frozenset(gpu), driver, tuple(tools), nccl)


def threads(root: str, pid: int) -> tuple[str, ...] | None:
    """The names of a process's threads."""
    folder = path_of(root, pid, "task")
    try:
        ids = os.listdir(folder)
    except OSError:
        return None
    return tuple(name.strip() for one in ids if (name := text(os.path.join(folder, one, "comm"))) is not None)


def descendants(root: str, pid: int) -> dict[int, Stat] | None:
    """The descendants of a process that are still running, by PID."""
    try:
        pids = [int(name) for name in os.listdir(os.path.join(root, "proc")) if name.isascii() and name.isdecimal()]
    except OSError:
        return None
    known = {one: found for one in pids if (found := stat(root, one)) is not None and found.state not in "ZX"}
    children: dict[int, list[int]] = {}
    for one, found in known.items():
        children.setdefault(found.parent, []).append(one)
    return dict(_below(pid, children, known))


def _below(pid: int, children: dict[int, list[int]], known: dict[int, Stat]) -> Iterator[tuple[int, Stat]]:
    waiting, seen = [pid], {pid}
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in seen:  # a PID reused during the listing could form a cycle
                seen.add(child)
                waiting.append(child)
                yield child, known[child]


def same_namespace(root: str, pid: int) -> bool | None:
    """Whether this process and `pid` share a PID namespace, and so the numbering of PIDs. A container has its own."""
    try:
        return os.readlink(path_of(root, pid, "ns/pid")) == os.readlink(os.path.join(root, "proc", "self", "ns", "pid"))
    except OSError:
        return None


def dumpable(root: str, pid: int, user: int | None) -> bool | None:
    """True if other processes of the user may inspect the process. Otherwise root owns the process's /proc files
    (proc(5))."""
    try:
        owner = os.stat(path_of(root, pid, "stat")).st_uid
    except OSError:
        return None
    return True if user == 0 or user is None else owner != 0


def injected(root: str, pid: int) -> bool | None:
    """Whether the process was started with a library that CUDA loads into itself (`INJECTION`)."""
    content = text(path_of(root, pid, "environ"))
    return None if content is None else any(re.match(f"{INJECTION}=.", one) for one in content.split("\0"))


def _number(field: str) -> int | None:
    return int(field) if field.isascii() and field.isdecimal() and len(field) < 20 else None


def holders(processes: Mapping[int, int | None], used: int | None) -> tuple[str, ...]:
    """Describe each process that holds GPU memory in one line, the largest first. `used` is the GPU's used bytes.

    Bytes that belong to no listed process get their own line, because NVML omits the processes of other containers.
    """
    sizes = sorted(processes.items(), key=lambda entry: (-(entry[1] or 0), entry[0]))
    lines = [f"{format_size(size)}  {described(pid)}" for pid, size in sizes]
    rest = unlisted(processes, used)
    return (*lines, f"{format_size(rest)}  {UNLISTED}") if rest else tuple(lines)


def unlisted(processes: Mapping[int, int | None], used: int | None) -> int:
    """Bytes that belong to no listed process; 0 if less than `_DRIVER_USES`, or if NVML reports no bytes by process."""
    if used is None or None in processes.values():
        return 0
    rest = used - sum(size or 0 for size in processes.values())
    return rest if rest >= _DRIVER_USES else 0


def described(pid: int) -> str:
    """Describe the process, as `python train.py (PID 41, alice)`. Omits values that cannot be read."""
    user = owner(pid)
    return f"{command(pid) or 'a process'} (PID {pid}{', ' + user if user else ''})"


def command(pid: int) -> str:
    """The process's command line, shortened and printable; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read(4096).split(b"\0") if word]
    except OSError:
        return ""
    if not words:
        return ""
    line = visible(" ".join([os.path.basename(words[0]), *words[1:]])).replace("\n", " ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def user_of(pid: int, root: str = "/") -> int | None:
    """The ID of the process's effective user; None if there is no such process, or it cannot be read."""
    found = status(root, pid)
    return None if found is None else found.user


def owner(pid: int) -> str:
    """The name of the process's user, or the user's ID if the user has no name; empty if there is no such process."""
    user = user_of(pid)
    if user is None:
        try:
            user = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return ""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def available_memory(root: str = "/") -> int | None:
    """Bytes that the kernel can allocate without swapping, its reclaimable file cache included; None if unknown.

    `MemAvailable` of /proc/meminfo. The value is host-wide, even in a container.
    """
    return parse_meminfo(text(os.path.join(root, "proc/meminfo")) or "")


def grantable_memory(root: str = "/") -> int | None:
    """Bytes that processes can still commit if the kernel forbids overcommit (`vm.overcommit_memory` is 2).

    Returns None if the kernel allows overcommit (0 or 1, the usual values), or if the setting is unknown.
    """
    if (text(os.path.join(root, "proc/sys/vm/overcommit_memory")) or "").strip() != "2":
        return None
    found = text(os.path.join(root, "proc/meminfo")) or ""
    limit, granted = parse_meminfo(found, "CommitLimit:"), parse_meminfo(found, "Committed_AS:")
    return None if limit is None or granted is None else max(limit - granted, 0)


def parse_meminfo(content: str, field: str = "MemAvailable:") -> int | None:
    """A field in bytes from the text of /proc/meminfo; None if the field is missing or not a number."""
    for line in content.splitlines():
        name, *rest = line.split()[:3] or [""]
        if name == field and len(rest) == 2 and rest[0].isascii() and rest[0].isdecimal() and rest[1] == "kB":
            return int(rest[0]) << 10
    return None


def is_wsl(kernel: str, root: str = "/") -> bool:
    """Whether this Linux runs in WSL, judged by the kernel's release or version, or by the device of its GPU driver."""
    return "microsoft" in kernel.lower() or os.path.exists(os.path.join(root, "dev/dxg"))
