"""The driver refuses in the middle of sharing memory: nothing stays mapped, allocated, open or counted."""

# ruff: noqa: N802 (the driver's own names)

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memguard._devices import contexts, libcuda, shared_memory, streams
from memguard._frameworks.arrays import lifetimes
from memguard.errors import CannotShare, DeviceError
from memguard.exchange.ipc import server, sharing

MIB = 1 << 20
UUID = "GPU-00000000-0000-0000-0000-000000000000"


class Driver:
    """In the place of libcuda. `held` has what was given out; the `fails`-th call that can fail does so with `code`."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {"handle": [], "address": [], "map": [], "context": [], "block": []}
        self.fails, self.code, self.calls = 0, 999, [""]
        self.block = 4 * MIB
        self.current: list[int] = []

    def _may(self, name: str) -> int:
        self.calls.append(name)
        return self.code if len(self.calls) - 1 == self.fails else 0

    def nothing_held(self) -> bool:
        return not any(self.held.values()) and not self.current

    def cuCtxGetCurrent(self, found: Any) -> int:
        found.value = self.current[-1] if self.current else None
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        if code := self._may("cuCtxPushCurrent"):
            return code
        self.current.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, found: Any) -> int:
        self.current.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device.value = ordinal
        return self._may("cuDeviceGet")

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:
        active.value = 1
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        if code := self._may("cuDevicePrimaryCtxRetain"):
            return code
        context.value = 77
        self.held["context"].append(77)
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.held["context"].remove(77)
        return 0

    def cuMemGetAllocationGranularity(self, size: Any, kind: Any, option: int) -> int:
        assert (kind.type, kind.requestedHandleTypes, kind.location.type) == (1, 1, 1)
        size.value = 2 * MIB
        return self._may("cuMemGetAllocationGranularity")

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free.value, total.value = 3 * MIB, 100 * MIB
        return 0

    def cuMemCreate(self, handle: Any, size: Any, kind: Any, flags: Any) -> int:
        if code := self._may("cuMemCreate"):
            return code
        handle.value = 500
        self.held["handle"].append(500)
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> int:
        if code := self._may("cuMemImportFromShareableHandle"):
            return code
        handle.value = 500
        self.held["handle"].append(500)
        return 0

    def cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: int, flags: Any) -> int:
        if code := self._may("cuMemExportToShareableHandle"):
            return code
        fd.value = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(fd.value, True)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.held["handle"].remove(handle)
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> int:
        if code := self._may("cuMemAddressReserve"):
            return code
        address.value = 1 << 32
        self.held["address"].append(1 << 32)
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert not self.held["map"]
        self.held["address"].remove(address)
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert handle in self.held["handle"]
        if code := self._may("cuMemMap"):
            return code
        self.held["map"].append(address)
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        self.held["map"].remove(address)
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        assert (access.flags, access.location.type, count) == (3, 1, 1)
        return self._may("cuMemSetAccess")

    def cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> int:
        self.cleared = (address, size)
        return self._may("cuMemsetD8")

    def cuMemcpy(self, to: Any, source: Any, size: Any) -> int:
        assert to in self.held["map"]
        self.copied = (to, source, size)
        return self._may("cuMemcpy")

    def cuStreamSynchronize(self, stream: Any) -> int:
        return self._may("cuStreamSynchronize")

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        assert bytes(handle.reserved) == b"h" * 64 and flags == 1
        if code := self._may("cuIpcOpenMemHandle"):
            return code
        address.value = 1 << 33
        self.held["block"].append(1 << 33)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        assert self.current
        self.held["block"].remove(address)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        if code := self._may("cuIpcGetMemHandle"):
            return code
        handle.reserved[:] = b"h" * 64
        return 0

    def cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:
        start.value, size.value = address // MIB * MIB, self.block
        return self._may("cuMemGetAddressRange")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(contexts, "_initialised", driver)
    monkeypatch.setattr(contexts, "unusable_after_fork", False)
    monkeypatch.setattr(contexts, "_primaries", {0: 77})
    monkeypatch.setattr(shared_memory, "_retained", {})
    lifetimes.held_for_processes.clear()
    before = len(os.listdir("/proc/self/fd"))
    yield driver
    assert len(os.listdir("/proc/self/fd")) == before and not lifetimes.held_for_processes


def failing(cuda: Driver, work: Callable[[], Any]) -> list[str]:
    """Runs `work` again and again; each time the next of its calls fails. The names of these calls."""
    done = []
    while True:
        cuda.calls, cuda.fails = [""], len(done) + 1
        try:
            made = work()
        except (DeviceError, CannotShare) as error:
            assert "fix:" in str(error)
            assert cuda.nothing_held(), f"left by a failing {cuda.calls[-1]}: {cuda.held}"
            done.append(cuda.calls[cuda.fails])
        else:
            cuda.fails = 0
            made.close()
            return done


def test_a_copy_that_fails_anywhere_leaves_nothing(cuda: Driver) -> None:
    done = failing(cuda, lambda: shared_memory.duplicate(0, 4096, 3 * MIB))
    assert done == [
        "cuCtxPushCurrent", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemAddressReserve", "cuMemMap",
        "cuMemSetAccess", "cuMemsetD8", "cuMemcpy", "cuStreamSynchronize", "cuMemExportToShareableHandle",
    ]  # fmt: skip
    assert cuda.nothing_held()


def test_a_file_descriptor_that_stays_inheritable_is_closed(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(shared_memory.os, "set_inheritable", lambda fd, yes: refused() if not yes else None)
        with pytest.raises(OSError, match="not now"):
            shared_memory.duplicate(0, 4096, 3 * MIB)
    assert cuda.nothing_held()


def test_a_copy_is_of_whole_pieces_and_the_rest_of_the_last_is_cleared(cuda: Driver) -> None:
    made = shared_memory.duplicate(0, 4096, 3 * MIB)
    assert made.size == 4 * MIB and not os.get_inheritable(made.fd)
    assert cuda.copied == (1 << 32, 4096, 3 * MIB) and cuda.cleared == ((1 << 32) + 3 * MIB, MIB)
    assert cuda.held["handle"] == [500] and not cuda.held["map"], "it is held, and mapped nowhere"
    made.close()
    made.close()
    assert cuda.nothing_held()


def test_a_full_gpu_is_an_error_with_its_free_bytes(cuda: Driver) -> None:
    cuda.code, cuda.fails = 2, 3
    with pytest.raises(shared_memory.NoRoom, match=r"no room for 4\.0 MiB: 3\.0 MiB free") as caught:
        shared_memory.duplicate(0, 4096, 3 * MIB)
    assert (caught.value.nbytes, caught.value.free) == (4 * MIB, 3 * MIB) and cuda.nothing_held()


def test_a_mapping_that_fails_anywhere_leaves_nothing_not_even_a_context(cuda: Driver) -> None:
    def work() -> shared_memory.Mapping:
        cuda.held["context"].clear()
        shared_memory._retained.clear()
        return shared_memory.map_file(0, 9, 4 * MIB)

    assert failing(cuda, work) == [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemImportFromShareableHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    ]  # fmt: skip
    shared_memory.map_file(0, 9, 4 * MIB).close()
    assert cuda.held.pop("context") == [77], "retained once, for what is mapped next too"
    assert cuda.nothing_held()


def test_a_block_that_cannot_be_opened_leaves_nothing(cuda: Driver) -> None:
    def work() -> shared_memory.Mapping:
        cuda.held["context"].clear()
        shared_memory._retained.clear()
        return shared_memory.map_block(0, b"h" * 64, 4 * MIB)

    assert failing(cuda, work) == [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuIpcOpenMemHandle", "cuMemGetAddressRange",
    ]  # fmt: skip
    assert cuda.held["context"] == [77] and not cuda.held["block"]


def test_a_block_smaller_than_was_promised_is_closed_again(cuda: Driver) -> None:
    cuda.block = 2 * MIB
    with pytest.raises(DeviceError, match="the handle says 4194304"):
        shared_memory.map_block(0, b"h" * 64, 4 * MIB)
    assert cuda.nothing_held()


def test_the_handle_of_a_block_is_asked_for_at_its_start(cuda: Driver) -> None:
    assert shared_memory.block_handle(5 * MIB + 256, None, 0) == (5 * MIB, 4 * MIB, b"h" * 64)
    cuda.calls, cuda.fails = [""], 3
    assert shared_memory.block_handle(5 * MIB, None, 0) == (5 * MIB, 4 * MIB, None), "of a pool"
    cuda.calls, cuda.fails = [""], 2
    assert shared_memory.block_handle(5 * MIB, None, 0) == (0, 0, None), "unknown"
    assert not cuda.current


def test_a_driver_that_cannot_share_memory_is_refused(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, "cuMemCreate")
    with pytest.raises(DeviceError, match="too old"):
        shared_memory.duplicate(0, 4096, 3 * MIB)


def test_attaching_without_a_driver_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(contexts, "_initialised", None)
    monkeypatch.setattr(libcuda, "_library", None)
    monkeypatch.setattr(ctypes, "CDLL", nothing)
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        shared_memory.ordinal(UUID)


def test_a_fork_of_a_process_with_cuda_cannot_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forked:
        def cuInit(self, flags: int) -> int:
            return 3

    monkeypatch.setattr(contexts, "_initialised", None)
    monkeypatch.setattr(contexts, "unusable_after_fork", True)
    monkeypatch.setattr(libcuda, "_library", Forked())
    with pytest.raises(DeviceError, match="forked"):
        shared_memory.ordinal(UUID)


class Holder:
    """An array of 3 MiB with the CUDA array interface."""

    def __init__(self) -> None:
        data = (8 * MIB, False)
        self.__cuda_array_interface__ = {"shape": (3 * MIB,), "typestr": "|u1", "data": data, "version": 3}


@pytest.fixture
def exporting(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(streams, "place", lambda address: (0, None))
    monkeypatch.setattr(streams, "follow", lambda *_: None)
    monkeypatch.setattr(shared_memory, "uuid", lambda ordinal: UUID)
    return cuda


def test_an_export_that_fails_anywhere_leaves_nothing(exporting: Driver) -> None:
    with_gpu = failing(exporting, lambda: sharing.export(Holder()))
    assert len(with_gpu) == 10
    wait_for_the_thread()


def test_an_export_without_a_socket_or_a_thread_leaves_nothing(
    exporting: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise OSError("no space left")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(server.tempfile, "mkdtemp", refused)
        with pytest.raises(CannotShare, match="no socket can be opened"):
            sharing.export(Holder())
    assert exporting.nothing_held() and not lifetimes.held_for_processes
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            sharing.export(Holder())
    assert exporting.nothing_held() and not lifetimes.held_for_processes and not list(tmp_path.iterdir())
    sharing.export(Holder()).close()
    wait_for_the_thread()
    assert not list(tmp_path.iterdir())


def wait_for_the_thread() -> None:
    deadline = time.monotonic() + 5
    while any(thread.name == "memguard-sharing" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
