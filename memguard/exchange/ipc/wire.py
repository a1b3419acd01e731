"""What two processes say to each other over a socket: short JSON, counted, and never believed unread.

The one that attaches sends `{"memguard": 1, "token": …}`; the exporter answers with what the array is, and with the
file descriptor of its memory. The connection then stays open, silent: it is the reference.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import socket
import struct
import time
from typing import Any, NamedTuple

from memguard._devices.shared_memory import HANDLE_BYTES
from memguard.exchange.view import DTYPES, View

VERSION = 1
LIMIT = 16 * 1024
"""Bytes of a message at most."""
_HEAD = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_DIMENSIONS, _MOST = 64, 1 << 62
_UUID = re.compile(r"[A-Za-z0-9./-]{1,100}", re.ASCII)
TOKEN = re.compile(r"[0-9a-f]{32}", re.ASCII)
FILE, BLOCK, NOTHING = "file", "block", "nothing"
"""How memory comes: as a file descriptor, as the handle of a block, or not at all (an array without elements)."""


class Garbage(ValueError):
    """A message that none of ours would send."""


class Peer(NamedTuple):
    """Who is at the other end, by the kernel's word (`SO_PEERCRED`)."""

    pid: int
    uid: int


class Description(NamedTuple):
    """An exported array: what it is, and where in its memory of `size` bytes it begins. Strides count elements."""

    kind: str
    uuid: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    readonly: bool = False
    offset: int = 0
    size: int = 0
    handle: str = ""

    def view(self, address: int, device: int | None) -> View:
        """The array, where its memory begins at `address`."""
        return View(address + self.offset, self.shape, self.strides, self.dtype, device, self.readonly)

    def message(self) -> dict[str, Any]:
        return {"memguard": VERSION, **self._asdict()}


def described(message: dict[str, Any]) -> Description:
    """The answer of an exporter. Raises Garbage where it is none, or its array would not lie within its memory."""
    fields = {name: message.get(name) for name in Description._fields}
    if message.get("memguard") != VERSION or set(message) != {"memguard", *Description._fields}:
        raise Garbage("it is no description of an array")
    kind, uuid, dtype, handle = (fields[name] for name in ("kind", "uuid", "dtype", "handle"))
    shape, strides = _numbers(fields["shape"], 0), _numbers(fields["strides"], -_MOST)
    offset, size = _numbers([fields["offset"], fields["size"]], 0)
    if kind not in (FILE, BLOCK, NOTHING) or not isinstance(fields["readonly"], bool):
        raise Garbage("its memory is of no kind that is known")
    if not isinstance(uuid, str) or not _UUID.fullmatch(uuid):
        raise Garbage("it names no GPU")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Garbage("its dtype is not known")
    if not isinstance(handle, str) or not re.fullmatch(rf"([0-9a-f]{{{2 * HANDLE_BYTES}}})?", handle, re.ASCII):
        raise Garbage("its handle is none")
    if len(shape) != len(strides) or (kind == BLOCK) != bool(handle):
        raise Garbage("it contradicts itself")
    found = Description(kind, uuid, shape, strides, dtype, fields["readonly"], offset, size, handle)
    view = found.view(0, None)
    first, behind = view.extent
    if view.nbytes > _MOST or (kind == NOTHING) != (view.size == 0):
        raise Garbage("its size contradicts its memory")
    if view.size and (first < 0 or behind > size or offset % view.itemsize):
        raise Garbage(f"bytes {first} to {behind} do not lie in memory of {size} bytes")
    return found


def _numbers(values: Any, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _DIMENSIONS:
        raise Garbage("a list of numbers is missing")
    if not all(type(value) is int and least <= value <= _MOST for value in values):
        raise Garbage("a number is none, or out of range")
    return tuple(values)


def asked(message: dict[str, Any]) -> str:
    """The token in what an importer says first. Raises Garbage."""
    token = message.get("token")
    if message.get("memguard") != VERSION or not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise Garbage("it asks for nothing")
    return token


def asking(token: str) -> dict[str, Any]:
    return {"memguard": VERSION, "token": token}


def packed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > LIMIT:
        raise Garbage(f"a message of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def unpacked(data: bytes) -> dict[str, Any] | None:
    """The one message in `data`; None where it is not all there yet. Raises Garbage."""
    if len(data) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack_from(data)
    if length > LIMIT or len(data) > _HEAD.size + length:
        raise Garbage(f"a message of {length} bytes, {len(data)} came")
    if len(data) < _HEAD.size + length:
        return None
    try:
        message = json.loads(data[_HEAD.size :].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Garbage(str(error)) from None
    if not isinstance(message, dict):
        raise Garbage("it is no object")
    return message


def peer(connection: socket.socket) -> Peer:
    """Who opened the other end, or listens there. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def same_user(who: Peer) -> bool:
    return who.uid == os.geteuid()


def send(connection: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """A whole message, with a file descriptor or without. Raises OSError where it does not go out at once."""
    data = packed(message)
    with_it = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        sent = connection.sendmsg([data], with_it, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        sent = 0
    if sent != len(data):
        raise ConnectionError("the other end does not read")


def receive(connection: socket.socket, seconds: float) -> tuple[dict[str, Any], int | None]:
    """A whole message, and the file descriptor that came with it: the caller's, to close.

    Raises Garbage; EOFError where the other end closed; TimeoutError where it is not all there in time; OSError.
    """
    data, fds, deadline = b"", array.array("i"), time.monotonic() + seconds
    with contextlib.ExitStack() as undo:
        while (message := unpacked(data)) is None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part, ancillary, flags, _ = connection.recvmsg(
                LIMIT + _HEAD.size, socket.CMSG_SPACE(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    came = array.array("i", raw[: len(raw) - len(raw) % fds.itemsize])
                    fds.extend(came)
                    for fd in came:
                        undo.callback(os.close, fd)
            if flags & socket.MSG_CTRUNC and not fds:
                raise Garbage("this process has no file descriptor left for it (ulimit -n)")
            if flags & socket.MSG_CTRUNC or len(fds) > 1:
                raise Garbage("more file descriptors than one")
            if not part:
                raise EOFError("the other end closed")
            data += part
        undo.pop_all()
    return message, fds[0] if fds else None
