"""Where the leases are: a folder of the user's, on a file system of this machine.

Two processes that are to see each other's leases need the same one. Containers get one by a volume that they share, and
the variable MEMGUARD_LEASES.
"""

from __future__ import annotations

import os
import re

from memguard._node import identity
from memguard.errors import MemguardError

VARIABLE = "MEMGUARD_LEASES"
_NETWORK = frozenset({
    "9p", "afp", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "mmfs",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
    "wekafs",
})  # fmt: skip
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.overlayfs"})
"""What rootless containers have their own files on."""


def folder(make: bool = True) -> str:
    """Made if need be, unless not to `make` it. MemguardError, with what to do, where no leases can be kept."""
    given = os.environ.get(VARIABLE, "")
    try:
        if not given:
            path = identity.folder(make)
        elif not os.path.isabs(given):
            raise MemguardError(f"{VARIABLE} is {given!r}, which is no absolute path", fix="begin it with /")
        elif not make and not os.path.lexists(given):
            path = given
        else:
            fix = f"`chmod 700 {given}`, or name another folder, owned by the user who runs this process"
            path = identity.private(given, f"{VARIABLE}: {fix}")
    except OSError as error:
        what = f"{VARIABLE} is {given}, which" if given else "the user's folder for leases"
        raise MemguardError(f"{what} cannot be used: {error.strerror}", fix=_fix(given)) from None
    refuse_network(path)
    return path


def trusted(path: str) -> bool:
    """Whether a folder that another process names may be used here: as strictly as this one's own."""
    try:
        refuse_network(identity.private(path, "", make=False))
    except (OSError, ValueError, MemguardError):
        return False
    return os.path.isabs(path)


def _fix(given: str) -> str:
    return "name a folder whose parent is there" if given else f"set {VARIABLE} to a folder of your own"


def refuse_network(path: str, mounts: str | None = None) -> None:
    """MemguardError if it lies on a network file system; `mounts` is the text of /proc/self/mountinfo."""
    kind = file_system(os.path.realpath(path), _mounts() if mounts is None else mounts)
    if kind is not None and is_network(kind):
        raise MemguardError(
            f"{path} lies on a file system of type {kind}, which other machines may share: locks and the database "
            f"of leases do not work there",
            fix=f"set {VARIABLE} to a folder on a disk of this machine, or in its memory, such as /dev/shm/leases",
        )


def is_network(kind: str) -> bool:
    """Whether locks or shared memory of files may fail there. A file system that a program serves (FUSE) is one."""
    return kind in _NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in _LOCAL_FUSE)


def file_system(path: str, mounts: str) -> str | None:
    """The type of the file system at a real path; None if nothing says so. The last of two at one place counts."""
    found, longest = None, -1
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or not kind:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            found, longest = kind[0], len(point)
    return found


def _mounts() -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
