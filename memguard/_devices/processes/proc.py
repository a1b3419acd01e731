"""What Linux says of one process in /proc: its state, its family, what it has mapped, and who may touch it.

Every reader takes the root of the file system, `/` but in tests. What cannot be read is None: another user's files, a
process that has just ended, a /proc that is not mounted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

_UVM = "/dev/nvidia-uvm"
_GPU = re.compile(r"/dev/nvidia\d+$|/dev/nvidiactl$|/dev/nvidia-uvm$")
_DRIVER = re.compile(r"/libcuda\.so[^/]*$")
_NCCL = "/dev/shm/nccl-"
_SYS_PTRACE = 1 << 19  # CAP_SYS_PTRACE (linux/capability.h)
_MOST = 64 << 20
"""Bytes of one file that are read: a process may have mapped whatever it likes."""
INJECTION = "CUDA_INJECTION64_PATH"
"""The variable that names a library for CUDA to load when it starts (CUPTI's documentation)."""
TOOLS = {
    "libToolsInjection": "Nsight Systems (nsys)",
    "libcuda-injection.so": "Nsight Compute (ncu)",
    "libTreeLauncherTargetInjection.so": "a tool of Nsight",
    "libsanitizer-collection.so": "Compute Sanitizer",
    "libInterceptorInjectionTarget.so": "a tool of Nsight",
    "libcudadebugger.so": "a debugger of CUDA (cuda-gdb)",
}
"""Libraries that a profiler or debugger puts into the process it watches, by how the file's name begins."""


class Stat(NamedTuple):
    """`state`: T is stopped, t stopped by a debugger, Z ended. `start` is as in `Process`. `ran`: its clock ticks on a
    processor."""

    name: str
    state: str
    parent: int
    start: int
    ran: int = 0


class Status(NamedTuple):
    """`user` is the effective one; `users` are the real, effective, saved and file system's. `tracer` is 0 for none."""

    users: tuple[int, ...]
    tracer: int | None
    capable: bool | None

    @property
    def user(self) -> int | None:
        return self.users[1] if len(self.users) > 1 else None


class Maps(NamedTuple):
    """What of CUDA a process has mapped.

    `uvm` counts the mappings of /dev/nvidia-uvm, `gpu` the places of all of the driver's device files; `driver` is
    where libcuda begins; `tools` are those of `TOOLS`, `nccl` whether a communicator's shared memory is there.
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
    except (OSError, ValueError):  # a path with a null byte is a ValueError
        return None


def of(root: str, pid: int, name: str) -> str:
    """The path of one of a process's files."""
    return os.path.join(root, "proc", str(pid), name)


def stat(root: str, pid: int) -> Stat | None:
    return parse_stat(text(of(root, pid, "stat")) or "")


def parse_stat(said: str) -> Stat | None:
    """`/proc/PID/stat`. The name stands in parentheses and may hold more of them."""
    head, _, tail = said.rpartition(")")
    fields = tail.split()
    parent, user, system, start = (_number(fields[place]) if len(fields) > place else None for place in (1, 11, 12, 19))
    if not fields or len(fields[0]) != 1 or parent is None or start is None:
        return None
    return Stat(head.partition("(")[2], fields[0], parent, start, (user or 0) + (system or 0))


def status(root: str, pid: int) -> Status | None:
    said = text(of(root, pid, "status"))
    return None if said is None else parse_status(said)


def parse_status(said: str) -> Status:
    """`/proc/PID/status`."""
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in said.splitlines())}
    users = tuple(number for field in fields.get("Uid", ()) if (number := _number(field)) is not None)
    tracer = next((_number(field) for field in fields.get("TracerPid", ())), None)
    capabilities = "".join(fields.get("CapEff", ()))
    capable = bool(int(capabilities, 16) & _SYS_PTRACE) if re.fullmatch("[0-9a-fA-F]{1,32}", capabilities) else None
    return Status(users, tracer, capable)


def maps(root: str, pid: int) -> Maps | None:
    said = text(of(root, pid, "maps"))
    return None if said is None else parse_maps(said)


def parse_maps(said: str) -> Maps:
    """`/proc/PID/maps`. A file that was removed since has ` (deleted)` behind its name."""
    uvm, gpu, driver, tools, nccl = 0, set[str](), None, dict[str, None](), False
    for line in said.splitlines():
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
    folder = of(root, pid, "task")
    try:
        ids = os.listdir(folder)
    except OSError:
        return None
    return tuple(name.strip() for one in ids if (name := text(os.path.join(folder, one, "comm"))) is not None)


def family(root: str, pid: int) -> dict[int, Stat] | None:
    """Everything that a process has started, and what those have, by PID, without what has ended."""
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
            if child not in seen:  # a PID that was given again while the list was read could make a ring
                seen.add(child)
                waiting.append(child)
                yield child, known[child]


def same_namespace(root: str, pid: int) -> bool | None:
    """Whether this process numbers processes as that one does: a container's PIDs are others than the host's."""
    try:
        return os.readlink(of(root, pid, "ns/pid")) == os.readlink(os.path.join(root, "proc", "self", "ns", "pid"))
    except OSError:
        return None


def dumpable(root: str, pid: int, user: int | None) -> bool | None:
    """Whether the process lets others of its user look into it: if not, Linux gives its files to root (proc(5))."""
    try:
        owner = os.stat(of(root, pid, "stat")).st_uid
    except OSError:
        return None
    return True if user == 0 or user is None else owner != 0


def injected(root: str, pid: int) -> bool | None:
    """Whether the process was started with a library that CUDA loads into itself (`INJECTION`)."""
    said = text(of(root, pid, "environ"))
    return None if said is None else any(re.match(f"{INJECTION}=.", one) for one in said.split("\0"))


def _number(field: str) -> int | None:
    return int(field) if field.isascii() and field.isdecimal() and len(field) < 20 else None
