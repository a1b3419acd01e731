"""Files that a command is told to write: `-` is standard output, what exists stays unless `--force`, all or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterable

import click

from memguard.cli.support import printing, signals
from memguard.cli.support.exit_codes import InputError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""What a file system says that has no hard links."""


def check(paths: Iterable[str], inputs: Iterable[str], force: bool) -> None:
    """Raise InputError or UsageError, before any work, if these files cannot be written as they are asked for."""
    sources = {os.path.realpath(path) for path in inputs}
    seen: set[str] = set()
    for path in paths:
        if not path:
            raise click.UsageError("the name of an output is empty: give a file, or - for standard output")
        real = path if path == "-" else os.path.realpath(path)
        if real in seen:
            raise click.UsageError(f"two outputs go to {_name(path)}: give each a file of its own")
        seen.add(real)
        if path == "-":
            continue
        if real in sources:
            raise InputError(f"{path}: it is the timeline that is read", fix="give another name for the output")
        if _special(path):
            continue
        if os.path.isdir(real) or path.endswith(os.sep):
            raise InputError(f"{path}: it is a folder", fix="give a file in it")
        if os.path.lexists(real) and not force:
            raise InputError(f"{path}: it exists already", fix="give another name, or --force to replace it")
        if why := _no_new_file(os.path.dirname(real)):
            raise _unwritable(path, why)


def write(path: str, parts: Iterable[str], force: bool) -> None:
    """Write the parts as UTF-8. A file appears whole or not at all, with the mode of any new file.

    Raises InputError if it cannot be written. A device or a FIFO is written to, and never replaced.
    """
    if path == "-":
        _to_stdout(parts)
        return
    real = os.path.realpath(path)
    try:
        if _special(path):
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.writelines(parts)
            return
        with signals.unwinding():  # the temporary file is removed also after SIGTERM and SIGHUP
            _whole(real, parts, force)
    except FileExistsError:
        raise InputError(f"{path}: it exists already", fix="give another name, or --force to replace it") from None
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None


def _unwritable(path: str, why: str) -> InputError:
    fix = "give a file in a folder that exists and that you may write to"
    return InputError(f"{path}: cannot be written: {why}", fix=fix)


def _no_new_file(folder: str) -> str:
    """Why no file can be created in this folder; empty if nothing speaks against it."""
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            return os.strerror(errno.ENOTDIR)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def _whole(real: str, parts: Iterable[str], force: bool) -> None:
    folder, name = os.path.split(real)
    number, beside = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
    try:
        with open(number, "w", encoding="utf-8", newline="") as file:
            file.writelines(parts)
        mode = os.umask(0)
        os.umask(mode)
        os.chmod(beside, 0o666 & ~mode)
        if force:
            os.replace(beside, real)
            return
        try:
            os.link(beside, real)  # fails if it has come to exist meanwhile
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(real):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            os.replace(beside, real)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def _to_stdout(parts: Iterable[str]) -> None:
    """The bytes as a file would have them, whatever the encoding of standard output is."""
    try:
        sys.stdout.flush()
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # no real file, as in a test
        for part in parts:
            sys.stdout.write(part)
        return
    try:
        with open(number, "wb", closefd=False) as file:
            for part in parts:
                file.write(part.encode())
    except OSError as error:
        raise printing.Unwritable(error) from None


def _special(path: str) -> bool:
    """Whether it is there and neither a file nor a folder.

    `path` is as it was given: /dev/stdout and /dev/fd/63 may be pipes, whose real path (/proc/PID/fd/pipe:[N]) names
    nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _name(path: str) -> str:
    return "standard output" if path == "-" else path
