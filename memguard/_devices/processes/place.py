"""The user's own folder, in which processes of that user find what others have left for them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from memguard.errors import MemguardError


def folder() -> str:
    """Made if need be. MemguardError if it is another's.

    `XDG_RUNTIME_DIR/memguard`, or `memguard-UID` in the folder for temporary files. Processes that are to see each
    other need the same one.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.geteuid()
    own = os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == user
    path = os.path.join(runtime, "memguard") if own else os.path.join(tempfile.gettempdir(), f"memguard-{user}")
    return private(path, "remove it, or set XDG_RUNTIME_DIR to a folder of your own")


def private(path: str, fix: str) -> str:
    """The folder, made if need be: no other user can enter it. MemguardError with that fix if one could."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise MemguardError(f"{path} is not a folder that only this user can enter, so it cannot be trusted", fix=fix)
    return path
