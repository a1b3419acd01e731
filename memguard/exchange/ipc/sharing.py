"""Shares GPU arrays between processes of one user: one process exports, others attach on the same GPU.

    handle = memguard.exchange.export(x)              # in one process; str(handle) goes through a pipe
    y = memguard.exchange.attach(handle, "cupy")      # in another

By default `export` copies the array into its own allocation, because a driver's IPC handle exposes the whole allocation
around the array. Guide: docs/exchange-processes.md.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memguard._base.units import MIB, format_size
from memguard._devices import shared_memory, streams, suspension
from memguard._devices.shared_memory import Allocation, Mapping
from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.base import Arrays
from memguard._frameworks.arrays.compatibility import MOST_DIMENSIONS
from memguard._frameworks.arrays.lifetimes import Offer
from memguard._frameworks.arrays.view import DTYPES, View, row_major
from memguard.errors import CannotShare
from memguard.exchange import arguments, transfer
from memguard.exchange.adapters import registry
from memguard.exchange.adapters.attached import NAME, Attached
from memguard.exchange.ipc import server, wire
from memguard.exchange.ipc.server import Export, charge
from memguard.exchange.ipc.wire import BLOCK, FILE, NOTHING, Description

if TYPE_CHECKING:
    from memguard._base.framework_spec import ArraysName

ANSWER_TIMEOUT = 10.0
"""Seconds that an exporter has to answer."""
_SPARE = 256
"""Bytes. A smaller gap after an array cannot contain another array, because the smallest chunks of all frameworks
(TensorFlow's) have this size."""
_TEXT = re.compile(
    rf"memguard-export:1:(?P<token>{wire.TOKEN}):(?P<uuid>{wire.UUID}):(?P<dtype>[a-z0-9_]{{1,30}}):"
    rf"(?P<shape>(\d{{1,19}}(x\d{{1,19}}){{0,{MOST_DIMENSIONS - 1}}})?):(?P<path>/[^\0\n]{{1,200}})",
    re.ASCII,
)


@dataclass(frozen=True)
class Handle:
    """Locates an export for other processes of the same user. Pass it pickled, or as text: `Handle.parse(str(handle))`.

    `shape`, `dtype` and `uuid` (the GPU's) are for information. Any process of the user with this text can attach.
    `close` works only in the exporting process, also for a pickled handle; elsewhere it does nothing.
    """

    path: str
    token: str = field(repr=False)
    uuid: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        shape = "x".join(str(extent) for extent in self.shape)
        return f"memguard-export:1:{self.token}:{self.uuid}:{self.dtype}:{shape}:{self.path}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Parse the text `str(handle)`, with or without a newline. Raises ValueError."""
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or found["dtype"] not in DTYPES:
            raise ValueError(
                "this is not a handle of an exported array\n    fix: pass on str(memguard.exchange.export(x)) as it is"
            )
        shape = tuple(int(extent) for extent in found["shape"].split("x") if extent)
        return cls(found["path"], found["token"], found["uuid"], shape, found["dtype"])

    def __reduce__(self) -> tuple[object, ...]:
        return Handle.parse, (str(self),)

    @property
    def nbytes(self) -> int:
        """Bytes of the array's elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1] // 8

    @property
    def attached(self) -> int | None:
        """The number of processes attached now. None in other processes than the exporter, and after the export has
        ended."""
        export = server.current().find(self.token)
        return None if export is None else server.current().attached(export)

    def close(self) -> None:
        """End the export: no process can attach any more, and this process releases the memory. With `copy=True`,
        attached processes keep the memory.

        With `copy=False`, the array lives until the last attached process has released it. A second call does nothing.
        """
        export = server.current().find(self.token)
        if export is not None:
            server.current().close(export)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export(x: Any, *, copy: bool = True) -> Handle:
    """Offer the GPU array `x`, of any framework, to other processes of this user until the handle is closed.

    `copy=True` copies the array on the GPU into a new allocation (a multiple of 2 MiB), which all attached processes
    share. `copy=False` shares the array's own memory, which requires that the driver's block contains no other array.
    The host waits for work on the array. Raises CannotShare; ValueError and DeviceError as `to` does.
    """
    suspension.check("memguard.exchange.export")
    producer = registry.of(x)
    offer = producer.offer(x)
    if offer.view.device is None:
        raise CannotShare(
            offer.producer, NAME, "it lies in host memory", "multiprocessing.shared_memory, or put it on a GPU first"
        )
    uuid = shared_memory.uuid(offer.view.device)
    if uuid is None:
        raise CannotShare(
            offer.producer, NAME, f"CUDA does not say which GPU cuda:{offer.view.device} is", "memguard doctor"
        )
    try:
        if not offer.view.size:
            made = _empty(offer.view, uuid)
        else:
            made = _copied(x, producer, offer, uuid) if copy else _own_memory(x, producer, offer, uuid)
    except streams.Captured as error:
        raise CannotShare(offer.producer, NAME, str(error), "export arrays before the capture begins") from error
    try:
        path = server.current().add(made)
    except BaseException as error:
        made.release()
        if isinstance(error, OSError):
            remedy = "set TMPDIR to a writable directory with a short name"
            raise CannotShare(offer.producer, NAME, f"no socket can be opened: {error}", remedy) from error
        raise
    return Handle(path, made.token, uuid, made.description.shape, made.description.dtype)


def attach(handle: Handle | str, framework: ArraysName, *, copy: bool | None = None, stream: Any = None) -> Any:
    """Return an array of `framework` in the memory that another process exported. A write by one attached process is
    visible to all attached processes.

    `handle` may be its text. `copy` and `stream` are as in `to`; `copy=True` makes a copy in this process's own memory.
    The memory stays mapped as long as any view of it lives, even after the exporter has closed the handle or ended.
    Initialises CUDA if needed. Raises CannotShare; DeviceError if there is no driver; ValueError if `handle` is
    invalid.
    """
    suspension.check("memguard.exchange.attach")
    arguments.check(copy, None, registry.by_name(framework))
    handle = handle if isinstance(handle, Handle) else Handle.parse(handle)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
        found, fd = _request(connection, handle, framework)
        if fd is not None:
            undo.callback(os.close, fd)
        if (found.kind == FILE) != (fd is not None):
            raise _bad_answer(framework, "the memory did not come with it")
        ordinal = shared_memory.ordinal(found.uuid)
        if ordinal is None:
            reason = f"it lies on {found.uuid}, which CUDA does not show this process"
            raise CannotShare(NAME, framework, reason, "start this process with that GPU in CUDA_VISIBLE_DEVICES")
        mapping = _mapped(found, fd, ordinal)
        attachment = _Attachment(mapping, ordinal, found.size)
        try:
            server.current().watch(connection, attachment.exporter_gone)
        except BaseException:
            attachment.undo()
            raise
        if fd is not None:
            os.close(fd)
        undo.pop_all()
    view = found.view(0 if mapping is None else mapping.address, ordinal)
    x = Attached(view, functools.partial(server.current().detach, connection, attachment.undo))
    return transfer.to(x, framework, copy=copy, stream=stream)


class _Attachment:
    """An exporter's memory, mapped here. After the exporter has released the memory, its bytes count as this process's.
    Used on the server's thread."""

    def __init__(self, mapping: Mapping | None, ordinal: int, size: int) -> None:
        self._mapping, self._ordinal, self._size, self._charged = mapping, ordinal, size, 0

    def exporter_gone(self) -> None:
        """Count the memory as this process's, as the driver does after the exporter has released the memory or ended
        (measured)."""
        self._charged = self._size
        charge(self._ordinal, self._charged)

    def undo(self) -> None:
        charge(self._ordinal, -self._charged)
        if self._mapping is not None:
            self._mapping.close()


def _empty(view: View, uuid: str) -> Export:
    """The export of an array without elements."""
    return Export(Description(NOTHING, uuid, view.shape, row_major(view.shape), view.dtype), None, True, lambda: None)


def _copied(x: Any, producer: Arrays, offer: Offer, uuid: str) -> Export:
    if not offer.view.compact:
        producer, x, offer = transfer.compacted(x, producer, offer)
    view, device = offer.view, offer.view.device or 0
    producer.ready(offer, None)
    try:
        allocation = shared_memory.duplicate(device, view.address, view.nbytes, offer.context)
    except shared_memory.NoRoom as error:
        free = "unknown" if error.free is None else format_size(error.free)
        reason = f"there is no room for a copy of it on cuda:{device}: {format_size(error.nbytes)} needed, {free} free"
        raise CannotShare(offer.producer, NAME, reason, "free memory on this GPU: memguard.trim()") from error
    charge(device, allocation.size)
    # Not read-only, even for a read-only array: attached processes may write to the copy.
    description = Description(FILE, uuid, view.shape, row_major(view.shape), view.dtype, size=allocation.size)
    return Export(description, allocation.fd, True, functools.partial(_freed, device, allocation))


def _freed(device: int, allocation: Allocation) -> None:
    charge(device, -allocation.size)
    allocation.close()


def _own_memory(x: Any, producer: Arrays, offer: Offer, uuid: str) -> Export:
    """Export the array's own memory. Raises CannotShare if the driver's block contains other arrays."""
    view, obstacle = offer.view, producer.obstacle(x)
    if obstacle is not None:
        raise CannotShare(offer.producer, NAME, obstacle.reason, obstacle.remedy)
    first, end = view.extent
    start, size, handle = shared_memory.block_handle(first, offer.context, view.device or 0)
    reason = ""
    if handle is None:
        reason = "the driver gives no IPC handle for its memory, which comes from a pool or is mapped in pieces"
    elif start != first or size - (end - first) >= _SPARE:
        reason = f"it lies in a block of {format_size(size)} with other arrays; an IPC handle would expose them"
    elif size <= MIB or start % shared_memory.PAGE:
        reason = f"its block of {format_size(size)} shares a page with others; an IPC handle would expose them"
    if handle is None or reason:
        raise CannotShare(offer.producer, NAME, reason, "copy=True")
    producer.ready(offer, None)
    lifetime = lifetimes.begin(offer, NAME, None, releases_when_done=True)
    description = Description(
        BLOCK, uuid, view.shape, view.strides, view.dtype, view.readonly, view.address - start, size, handle.hex()
    )
    return Export(description, None, False, lifetime.end)


def _request(connection: socket.socket, handle: Handle, framework: str) -> tuple[Description, int | None]:
    """Request an export. Returns the array's description, and the memory's file descriptor, which the caller must
    close."""
    connection.settimeout(ANSWER_TIMEOUT)
    with _socket_errors_as_cannot_share(framework):
        _connect(connection, handle.path)
        process = wire.peer(connection)
        if not wire.same_user(process):
            raise PermissionError(f"user {process.uid}")
        if process.pid == os.getpid():
            remedy = f"memguard.exchange.to(x, {framework!r})"
            raise CannotShare("this process", framework, "it was exported by this very process", remedy)
        wire.send(connection, wire.request(handle.token))
        message, fd = wire.receive(connection, ANSWER_TIMEOUT)
        try:
            if (refusal := wire.refusal(message)) is not None:
                raise _too_many_connections(framework, refusal)
            return wire.description(message), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise


def _connect(connection: socket.socket, path: str) -> None:
    """Connect, with retries, because a Unix socket fails immediately while the exporter's listen queue is full, as when
    many processes connect together."""
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.005)


@contextlib.contextmanager
def _socket_errors_as_cannot_share(framework: str) -> Iterator[None]:
    """Convert errors of the socket to CannotShare."""
    try:
        yield
    except wire.BadMessage as error:
        raise _bad_answer(framework, str(error)) from error
    except PermissionError as error:
        reason, remedy = f"its socket belongs to another user ({error})", "attach as the user who exported it"
        raise CannotShare(NAME, framework, reason, remedy) from error
    except TimeoutError as error:
        reason = f"the process that exported it did not answer within {ANSWER_TIMEOUT:g} s"
        remedy = "check whether it is stopped, or in a call that holds the GIL"
        raise CannotShare(NAME, framework, reason, remedy) from error
    except (OSError, EOFError) as error:
        reason = "the export is gone: its process ended or closed it"
        remedy = "export it again, and keep the handle open until it is attached"
        raise CannotShare(NAME, framework, reason, remedy) from error


def _mapped(found: Description, fd: int | None, ordinal: int) -> Mapping | None:
    if found.kind == FILE and fd is not None:
        return shared_memory.map_file(ordinal, fd, found.size)
    return shared_memory.map_block(ordinal, bytes.fromhex(found.handle), found.size) if found.kind == BLOCK else None


def _too_many_connections(framework: str, refusal: wire.Refusal) -> CannotShare:
    limit, release = refusal.limit, "delete the arrays that processes have attached and no longer need"
    if refusal.full == wire.EXPORT:
        reason = f"{limit} connections hold this export already, the most that one may have"
        return CannotShare(
            NAME, framework, reason, f"{release}, or export the array once more: each export has its own"
        )
    reason = f"{limit} connections hold exports of that process already, a quarter of the files that it may open"
    return CannotShare(NAME, framework, reason, f"{release}, or raise `ulimit -n` where that process is started")


def _bad_answer(framework: str, what: str) -> CannotShare:
    return CannotShare(
        NAME, framework, f"the exporter's answer is not valid: {what}", "use the same memguard in both processes"
    )
