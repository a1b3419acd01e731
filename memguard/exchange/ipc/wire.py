"""The socket messages between two processes: a length followed by short JSON. Each message is validated before use.

The attaching process sends `{"memguard": 1, "token": …}`. The exporter answers with the description of the array and
the file descriptor of its memory. The connection then stays open without messages: it counts as a reference to the
memory. If the array has too many connections already, the exporter answers with a refusal and closes the new one.
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
from memguard._frameworks.arrays.compatibility import MOST_DIMENSIONS
from memguard._frameworks.arrays.view import DTYPES, View

VERSION = 1
LIMIT = 16 * 1024
"""The most bytes of a message."""
_HEAD = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MOST = 1 << 62
UUID, TOKEN = r"[A-Za-z0-9./-]{1,100}", r"[0-9a-f]{32}"
"""Regular expressions for a GPU's UUID and an export's token, in ASCII text."""
FILE, BLOCK, NOTHING = "file", "block", "nothing"
"""How the memory is passed: by file descriptor, by the IPC handle of a block, or not at all (no elements)."""

EXPORT, PROCESS = "export", "process"
"""Values of `Refusal.full`: the connections to this export, or to all exports of the process, are at their limit."""
MOST_HOLDERS = 1 << 20
"""The largest limit that a valid refusal contains."""


class BadMessage(ValueError):
    """A message that violates the protocol."""


class Peer(NamedTuple):
    """The process at the other end, as the kernel reports it (`SO_PEERCRED`)."""

    pid: int
    uid: int


class Description(NamedTuple):
    """An exported array, which begins at byte `offset` of an allocation of `size` bytes. Strides count elements."""

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
        """A view of the array in the allocation mapped at `address`."""
        return View(address + self.offset, self.shape, self.strides, self.dtype, device, self.readonly)

    def message(self) -> dict[str, Any]:
        return {"memguard": VERSION, **self._asdict()}


class Refusal(NamedTuple):
    """The reason for a refused request: `limit` connections exist already. `full` is EXPORT or PROCESS."""

    full: str
    limit: int

    def message(self) -> dict[str, Any]:
        return {"memguard": VERSION, **self._asdict()}


def refusal(message: dict[str, Any]) -> Refusal | None:
    """Validate the exporter's refusal; None if the message is not a refusal. Raises BadMessage."""
    if "full" not in message:
        return None
    full, limit = message["full"], message.get("limit")
    if message.get("memguard") != VERSION or set(message) != {"memguard", *Refusal._fields}:
        raise BadMessage("it is not a refusal")
    if full not in (EXPORT, PROCESS) or type(limit) is not int or not 0 < limit <= MOST_HOLDERS:
        raise BadMessage("its refusal is malformed")
    return Refusal(full, limit)


def description(message: dict[str, Any]) -> Description:
    """Validate the exporter's description. Raises BadMessage, also if the array exceeds its allocation."""
    fields = {name: message.get(name) for name in Description._fields}
    if message.get("memguard") != VERSION or set(message) != {"memguard", *Description._fields}:
        raise BadMessage("it is not a description of an array")
    kind, uuid, dtype, handle = (fields[name] for name in ("kind", "uuid", "dtype", "handle"))
    shape, strides = _numbers(fields["shape"], 0), _numbers(fields["strides"], -_MOST)
    offset, size = _numbers([fields["offset"], fields["size"]], 0)
    if kind not in (FILE, BLOCK, NOTHING) or not isinstance(fields["readonly"], bool):
        raise BadMessage("the kind of its memory is unknown")
    if not isinstance(uuid, str) or not re.fullmatch(UUID, uuid, re.ASCII):
        raise BadMessage("it names no GPU")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadMessage("its dtype is unknown")
    if not isinstance(handle, str) or not re.fullmatch(rf"([0-9a-f]{{{2 * HANDLE_BYTES}}})?", handle, re.ASCII):
        raise BadMessage("its handle is malformed")
    if len(shape) != len(strides) or (kind == BLOCK) != bool(handle):
        raise BadMessage("it contradicts itself")
    found = Description(kind, uuid, shape, strides, dtype, fields["readonly"], offset, size, handle)
    view = found.view(0, None)
    first, end = view.extent
    if view.nbytes > _MOST or (kind == NOTHING) != (view.size == 0):
        raise BadMessage("its size contradicts its memory")
    if view.size and (first < 0 or end > size or offset % view.itemsize):
        raise BadMessage(f"bytes {first} to {end} do not lie in memory of {size} bytes")
    return found


def _numbers(values: Any, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        raise BadMessage("a list of numbers is missing")
    if not all(type(value) is int and least <= value <= _MOST for value in values):
        raise BadMessage("a number is missing or out of range")
    return tuple(values)


def requested_token(message: dict[str, Any]) -> str:
    """The token in an attaching process's request. Raises BadMessage."""
    token = message.get("token")
    if message.get("memguard") != VERSION or not isinstance(token, str) or not re.fullmatch(TOKEN, token, re.ASCII):
        raise BadMessage("it is not a request")
    return token


def request(token: str) -> dict[str, Any]:
    return {"memguard": VERSION, "token": token}


def encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > LIMIT:
        raise BadMessage(f"a message of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def decode(data: bytes) -> dict[str, Any] | None:
    """The message in `data`; None if it is incomplete. Raises BadMessage."""
    if len(data) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack_from(data)
    if length > LIMIT or len(data) > _HEAD.size + length:
        raise BadMessage(f"a message of {length} bytes, {len(data)} came")
    if len(data) < _HEAD.size + length:
        return None
    try:
        message = json.loads(data[_HEAD.size :].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise BadMessage(str(error)) from None
    if not isinstance(message, dict):
        raise BadMessage("it is not a JSON object")
    return message


def peer(connection: socket.socket) -> Peer:
    """The process that connected or listens at the other end. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def same_user(process: Peer) -> bool:
    return process.uid == os.geteuid()


def send(connection: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """Send a message and, if given, a file descriptor. Raises OSError if the socket does not accept the whole
    message in one call."""
    data = encode(message)
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        sent = connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        sent = 0
    if sent != len(data):
        raise ConnectionError("the other end does not read")


def receive(connection: socket.socket, seconds: float) -> tuple[dict[str, Any], int | None]:
    """Receive a message and its file descriptor, which the caller must close.

    Raises BadMessage; EOFError if the other end closed; TimeoutError if the message is incomplete after `seconds`;
    OSError.
    """
    data, fds, deadline = b"", array.array("i"), time.monotonic() + seconds
    with contextlib.ExitStack() as undo:
        while (message := decode(data)) is None:
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
                raise BadMessage("this process has no file descriptor left for it (ulimit -n)")
            if flags & socket.MSG_CTRUNC or len(fds) > 1:
                raise BadMessage("more than one file descriptor")
            if not part:
                raise EOFError("the other end closed")
            data += part
        undo.pop_all()
    return message, fds[0] if fds else None
