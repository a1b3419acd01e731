"""GPU arrays between processes of one user: `export` here, `attach` there, on the same GPU.

    handle = memguard.exchange.export(x)              # in one process; str(handle) goes through a pipe
    y = memguard.exchange.attach(handle, "cupy")      # in another

By default the array is copied into memory of its own: a handle opens all of what it is of. docs/exchange-processes.md.
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
from typing import Any

from memguard._devices import shared_memory, streams
from memguard._devices.shared_memory import Allocation, Mapping
from memguard._units import MIB, format_size
from memguard.errors import CannotShare
from memguard.exchange import arguments, lifetimes, transfer
from memguard.exchange.adapters import registry
from memguard.exchange.adapters.attached import NAME, Attached
from memguard.exchange.adapters.base import Arrays
from memguard.exchange.ipc import wire
from memguard.exchange.ipc.server import Export, charge, hub
from memguard.exchange.ipc.wire import BLOCK, FILE, NOTHING, Description
from memguard.exchange.lifetimes import Offer
from memguard.exchange.view import DTYPES, View, row_major

PATIENCE = 10.0
"""Seconds in which an exporter has to answer."""
_SPARE = 256
"""Bytes behind an array in its block that no allocator hands out: TensorFlow's pieces are the smallest."""
_TEXT = re.compile(
    r"memguard-export:1:(?P<token>[0-9a-f]{32}):(?P<uuid>[A-Za-z0-9./-]{1,100}):(?P<dtype>[a-z0-9_]{1,30}):"
    r"(?P<shape>(\d{1,19}(x\d{1,19}){0,63})?):(?P<path>/[^\0\n]{1,200})",
    re.ASCII,
)


@dataclass(frozen=True)
class Handle:
    """An export, as other processes of the same user find it: pickle it, or `Handle.parse(str(handle))`.

    `shape`, `dtype` and `uuid` (the GPU's) are for information. Any process of the user that has the text can attach.
    Only the one that exported can `close`; elsewhere, for a pickled handle too, that does nothing.
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
        """The handle that `str(handle)` was, with or without the end of its line. Raises ValueError."""
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None or found["dtype"] not in DTYPES:
            raise ValueError(
                "this is no handle of an exported array\n    fix: pass on str(memguard.exchange.export(x)) as it is"
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
        """How many processes hold it now. None where that is not known: elsewhere, and when all is over."""
        export = hub().find(self.token)
        return None if export is None else hub().attached(export)

    def close(self) -> None:
        """Nobody can attach it any more, and this process lets go. Who has attached a copy keeps it.

        Without a copy (`copy=False`) the array stays alive until the last of them is gone. A second call does nothing.
        """
        export = hub().find(self.token)
        if export is not None:
            hub().close(export)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export(x: Any, *, copy: bool = True) -> Handle:
    """Let other processes of this user attach the GPU array `x`, of any framework, until the handle is closed.

    copy=True copies it on the GPU into memory of its own (whole pieces of 2 MiB), which all who attach it share.
    copy=False shares its own memory, and only where nothing else lies in the driver's block. The host waits for work
    on the array. Raises CannotShare; ValueError and DeviceError as `to` does.
    """
    giver = registry.of(x)
    offer = giver.offer(x)
    if offer.view.device is None:
        raise CannotShare(
            offer.lender, NAME, "it lies in host memory", "multiprocessing.shared_memory, or put it on a GPU first"
        )
    uuid = shared_memory.uuid(offer.view.device)
    if uuid is None:
        raise CannotShare(
            offer.lender, NAME, f"CUDA does not say which GPU cuda:{offer.view.device} is", "memguard doctor"
        )
    try:
        if not offer.view.size:
            made = _nothing(offer.view, uuid)
        else:
            made = _copied(x, giver, offer, uuid) if copy else _itself(x, giver, offer, uuid)
    except streams.Captured as error:
        raise CannotShare(offer.lender, NAME, str(error), "export arrays before the capture begins") from error
    try:
        path = hub().add(made)
    except BaseException as error:
        made.release()
        if isinstance(error, OSError):
            remedy = "set TMPDIR to a directory of a short name that can be written"
            raise CannotShare(offer.lender, NAME, f"no socket can be opened: {error}", remedy) from error
        raise
    return Handle(path, made.token, uuid, made.description.shape, made.description.dtype)


def attach(handle: Handle | str, framework: str, *, copy: bool | None = None, stream: Any = None) -> Any:
    """An array of `framework` in the memory that another process exported; it can be written, and all see it.

    `handle` may be its text. `copy` and `stream` are `to`'s: copy=True gives memory of this process's own. The memory
    stays mapped as long as any view of it lives, also when the exporter closes it or ends. CUDA is initialised where
    nothing has. Raises CannotShare; DeviceError where there is no driver; ValueError for what is no handle.
    """
    arguments.check(copy, None, registry.by_name(framework))
    handle = handle if isinstance(handle, Handle) else Handle.parse(handle)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
        found, fd = _ask(connection, handle, framework)
        if fd is not None:
            undo.callback(os.close, fd)
        if (found.kind == FILE) != (fd is not None):
            raise _unreadable(framework, "its memory did not come with it")
        ordinal = shared_memory.ordinal(found.uuid)
        if ordinal is None:
            raise CannotShare(
                NAME,
                framework,
                f"it lies on {found.uuid}, which CUDA does not show this process",
                "start this process with that GPU in CUDA_VISIBLE_DEVICES",
            )
        mapping = _mapped(found, fd, ordinal)
        held = _Held(mapping, ordinal, found.size)
        try:
            hub().watch(connection, held.left)
        except BaseException:
            held.undo()
            raise
        if fd is not None:
            os.close(fd)
        undo.pop_all()
    view = found.view(0 if mapping is None else mapping.address, ordinal)
    x = Attached(view, functools.partial(hub().leave, connection, held.undo))
    return transfer.to(x, framework, copy=copy, stream=stream)


class _Held:
    """Mapped memory, and whether it is this process that holds it: once the exporter is gone. On the hub's thread."""

    def __init__(self, mapping: Mapping | None, ordinal: int, size: int) -> None:
        self._mapping, self._ordinal, self._size, self._charged = mapping, ordinal, size, 0

    def left(self) -> None:
        """The exporter let go of it, or ended: the driver counts it for this process now (measured)."""
        self._charged = self._size
        charge(self._ordinal, self._charged)

    def undo(self) -> None:
        charge(self._ordinal, -self._charged)
        if self._mapping is not None:
            self._mapping.close()


def _nothing(view: View, uuid: str) -> Export:
    """Of an array without elements."""
    return Export(Description(NOTHING, uuid, view.shape, row_major(view.shape), view.dtype), None, True, lambda: None)


def _copied(x: Any, giver: Arrays, offer: Offer, uuid: str) -> Export:
    if not offer.view.compact:
        giver, x, offer = transfer.compacted(x, giver, offer)
    view, device = offer.view, offer.view.device or 0
    giver.ready(offer, None)
    try:
        allocation = shared_memory.duplicate(device, view.address, view.nbytes, offer.context)
    except shared_memory.NoRoom as error:
        free = "unknown" if error.free is None else format_size(error.free)
        reason = f"there is no room for a copy of it on cuda:{device}: {format_size(error.nbytes)} needed, {free} free"
        raise CannotShare(offer.lender, NAME, reason, "free memory on this GPU: memguard.trim()") from error
    charge(device, allocation.size)
    description = Description(
        FILE, uuid, view.shape, row_major(view.shape), view.dtype, size=allocation.size
    )  # an array of its own: whoever attaches it may write
    return Export(description, allocation.fd, True, functools.partial(_freed, device, allocation))


def _freed(device: int, allocation: Allocation) -> None:
    charge(device, -allocation.size)
    allocation.close()


def _itself(x: Any, giver: Arrays, offer: Offer, uuid: str) -> Export:
    """The array's own memory, where the driver's block is all its."""
    view, hindrance = offer.view, giver.reservation(x)
    if hindrance is not None:
        raise CannotShare(offer.lender, NAME, hindrance.reason, hindrance.remedy)
    first, behind = view.extent
    start, size, handle = shared_memory.block_handle(first, offer.context, view.device or 0)
    reason = ""
    if handle is None:
        reason = "the driver gives no IPC handle for its memory, which comes from a pool or is mapped in pieces"
    elif start != first or size - (behind - first) >= _SPARE:
        reason = f"it lies in a block of {format_size(size)} with other arrays; an IPC handle would expose them"
    elif size <= MIB or start % shared_memory.PAGE:
        reason = f"its block of {format_size(size)} shares a page with others; an IPC handle would expose them"
    if handle is None or reason:
        raise CannotShare(offer.lender, NAME, reason, "copy=True")
    giver.ready(offer, None)
    loan = lifetimes.begin(offer, NAME, None, settles=True)
    description = Description(
        BLOCK, uuid, view.shape, view.strides, view.dtype, view.readonly, view.address - start, size, handle.hex()
    )
    return Export(description, None, False, loan.end)


def _ask(connection: socket.socket, handle: Handle, framework: str) -> tuple[Description, int | None]:
    """What the exporter answers, and the file descriptor that came with it: the caller's, to close."""
    connection.settimeout(PATIENCE)
    with _understood(framework):
        _connect(connection, handle.path)
        who = wire.peer(connection)
        if not wire.same_user(who):
            raise PermissionError(f"user {who.uid}")
        if who.pid == os.getpid():
            remedy = f"memguard.exchange.to(x, {framework!r})"
            raise CannotShare("this process", framework, "it was exported by this very process", remedy)
        wire.send(connection, wire.asking(handle.token))
        message, fd = wire.receive(connection, PATIENCE)
        try:
            return wire.described(message), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise


def _connect(connection: socket.socket, path: str) -> None:
    """Where many come at once, the exporter's queue may be full for a moment: Unix sockets do not wait for that."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.005)


@contextlib.contextmanager
def _understood(framework: str) -> Iterator[None]:
    """What can go wrong on the socket, as a refusal."""
    try:
        yield
    except wire.Garbage as error:
        raise _unreadable(framework, str(error)) from error
    except PermissionError as error:
        raise CannotShare(
            NAME, framework, f"its socket belongs to another user ({error})", "attach as the user who exported it"
        ) from error
    except TimeoutError as error:
        raise CannotShare(
            NAME,
            framework,
            f"the process that exported it did not answer within {PATIENCE:g} s",
            "look whether it is stopped, or in a call that lets no other thread run",
        ) from error
    except (OSError, EOFError) as error:
        raise CannotShare(
            NAME,
            framework,
            "the export is gone: its process ended or closed it",
            "export it again, and keep the handle open until it is attached",
        ) from error


def _mapped(found: Description, fd: int | None, ordinal: int) -> Mapping | None:
    if found.kind == FILE and fd is not None:
        return shared_memory.map_file(ordinal, fd, found.size)
    return shared_memory.map_block(ordinal, bytes.fromhex(found.handle), found.size) if found.kind == BLOCK else None


def _unreadable(framework: str, what: str) -> CannotShare:
    return CannotShare(
        NAME, framework, f"the exporter's answer makes no sense: {what}", "use the same memguard in both processes"
    )


__all__ = ["Handle", "attach", "export"]
