"""CUDA's primary contexts on the calling thread: without libcuda nothing happens, with it everything is put back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from memguard._devices import contexts, cuda_order, libcuda
from memguard._tools.doctor.collect import this_process
from memguard.errors import DeviceError


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "_library", None)
    monkeypatch.setattr(contexts, "_initialised", None)
    monkeypatch.setattr(contexts, "unusable_after_fork", False)
    monkeypatch.setattr(contexts, "_primaries", {})
    monkeypatch.setattr(contexts, "_handles", {})


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The calls of a loader that finds no library."""
    asked: list[tuple[str, int]] = []

    def load(name: str, mode: int = 0) -> Any:
        asked.append((name, mode))
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


def test_without_libcuda_nothing_is_done(no_library: list[tuple[str, int]]) -> None:
    assert contexts.current() is None and contexts.initialised() is False and contexts.current_handle() is None
    with contexts.pushed(0) as there:
        assert there is False
    ran = []
    with contexts.capture_safe():
        ran.append("inside")
    assert ran == ["inside"] and set(no_library) == {("libcuda.so.1", os.RTLD_NOLOAD)}, (
        "the library is looked for, and never loaded"
    )


def test_an_error_in_a_block_comes_out_unchanged(no_library: list[tuple[str, int]]) -> None:
    for block in (lambda: contexts.pushed(0), contexts.capture_safe):
        with pytest.raises(ZeroDivisionError), block():
            raise ZeroDivisionError


class LibCUDA:
    """libcuda as a ctypes.CDLL, with two GPUs; `done` lists what was called. `fails` names a call that fails."""

    def __init__(self, *, active: int = 1, fails: str = "", initialised: bool = True) -> None:
        self.active, self.fails, self.initialised = active, fails, initialised
        self.done: list[str] = []
        self.looked = 0
        self.mode = 0  # global
        self.here: int | None = 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuDeviceGetCount":
                self.looked += 1
                arguments[0].value = 2
                return 0 if self.initialised else 3
            if name == self.fails:
                return 1
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return call

    def _cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        name.value = b"CUDA_ERROR_INVALID_VALUE" if code == 1 else None
        return int(code != 1)

    def _cuCtxGetDevice(self, ordinal: Any) -> int:  # noqa: N802
        if self.here is None:
            return 201
        ordinal.value = self.here
        return 0

    def _cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context.value = None if self.here is None else 100 + self.here
        return 0

    def _cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device.value = ordinal
        return 0 if ordinal < 2 else 101

    def _cuDeviceGetUuid_v2(self, raw: Any, device: int) -> None:  # noqa: N802
        raw[:] = bytes([device, 0, *range(2, 16)])

    def _cuDeviceGetAttribute(self, number: Any, attribute: int, device: int) -> None:  # noqa: N802
        assert attribute in (16, 18), "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _INTEGRATED"
        number.value = 100 + device if attribute == 16 else device

    def _cuDeviceTotalMem_v2(self, size: Any, device: int) -> None:  # noqa: N802
        size.value = (device + 1) << 30

    def _cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> None:  # noqa: N802
        active.value = self.active

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> None:  # noqa: N802
        context.value = 100 + device
        self.done.append(f"retain {device}")

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self.done.append(f"push {context}")

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self.done.append("pop")

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:  # noqa: N802
        self.done.append(f"release {device}")

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
        mode.value, self.mode = self.mode, mode.value
        self.done.append(f"mode {self.mode}")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LibCUDA]:
    def load(**settings: Any) -> LibCUDA:
        made = LibCUDA(**settings)
        monkeypatch.setattr(ctypes, "CDLL", lambda name, mode=0: made)
        return made

    return load


def test_the_current_gpu(library: Callable[..., LibCUDA]) -> None:
    driver = library()
    assert contexts.current() == 1 and contexts.current_handle() == 101
    driver.here = None
    assert contexts.current() is None and contexts.current_handle() is None


def test_a_primary_context_is_remembered_until_it_is_asked_for_again(library: Callable[..., LibCUDA]) -> None:
    driver = library()
    assert [contexts.primary(1), contexts.primary(1)] == [101, 101]
    assert driver.done == ["retain 1", "release 1"], "asking keeps no reference"
    assert contexts.primary_now(1) == 101 and len(driver.done) == 4
    driver.active = 0
    assert contexts.primary(1) == 101 and contexts.primary_now(1) is None and contexts.primary(1) is None


def test_ordinals_are_found_by_uuid_whatever_bytes_it_has(library: Callable[..., LibCUDA]) -> None:
    """CuPy's own figure ends at a byte that is zero, which one GPU in sixteen has: it went uncapped."""
    driver = library(initialised=False)
    assert contexts.ordinals() == {}
    driver.initialised = True
    rest = "0203-0405-0607-0809-0a0b0c0d0e0f"
    assert contexts.ordinals() == {f"GPU-0000{rest}": 0, f"GPU-0100{rest}": 1}


def test_an_initialised_cuda_is_asked_here_and_not_in_a_child(
    library: Callable[..., LibCUDA], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child takes 0.4 s, which the monitor's thread would spend in its first sample after CUDA's start."""
    driver = library(initialised=False)
    assert contexts.visible() is None and cuda_order.visible(ask_child=False) is None
    driver.initialised = True
    monkeypatch.setattr(subprocess, "run", None)
    found = cuda_order.visible()
    assert found == contexts.visible() and found is not None
    assert [(gpu.ordinal, gpu.multiprocessors) for gpu in found] == [(0, 100), (1, 101)]
    assert {gpu.uuid: gpu.ordinal for gpu in found} == contexts.ordinals()


@pytest.mark.parametrize("call", ["cuDeviceGet", "cuDeviceGetUuid_v2", "cuDeviceGetAttribute"])
def test_a_gpu_that_cuda_does_not_describe_is_an_error(library: Callable[..., LibCUDA], call: str) -> None:
    library(fails=call)
    with pytest.raises(DeviceError, match=rf"CUDA: {call}: CUDA_ERROR_INVALID_VALUE \(error 1\)\n    fix: "):
        contexts.visible()


@pytest.mark.parametrize(
    ("settings", "is_active"),
    [
        ({}, True),
        ({"active": 0}, False),
        ({"initialised": False}, False),
        ({"fails": "cuDeviceGet"}, None),
        ({"fails": "cuDevicePrimaryCtxGetState"}, None),
    ],
)
def test_asking_for_a_context_makes_none(
    library: Callable[..., LibCUDA], settings: dict[str, Any], is_active: bool | None
) -> None:
    driver = library(**settings)
    assert contexts.active(0) is is_active and driver.done == []


def test_a_library_that_is_not_initialised_is_asked_again_until_it_is(library: Callable[..., LibCUDA]) -> None:
    driver = library(initialised=False)
    for _ in range(3):
        assert contexts.current() is None and contexts.initialised() is False
    assert driver.looked == 6
    driver.initialised = True
    for _ in range(3):
        assert contexts.initialised() is True and contexts.current() == 1
    assert driver.looked == 7, "it stays initialised"


@pytest.mark.parametrize("raises", [False, True])
def test_a_context_is_pushed_for_the_block_and_released(library: Callable[..., LibCUDA], raises: bool) -> None:
    driver = library()
    try:
        with contexts.pushed(0) as there:
            assert there is True and driver.done == ["retain 0", "push 100"]
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert raises
    assert driver.done == ["retain 0", "push 100", "pop", "release 0"]


def test_a_current_context_is_not_pushed_again(library: Callable[..., LibCUDA]) -> None:
    driver = library()
    with contexts.pushed(1) as there:
        assert there is True
    assert driver.done == []


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"initialised": False}, []),
        ({"active": 0}, []),  # retaining it would make it
        ({"fails": "cuDeviceGet"}, []),
        ({"fails": "cuDevicePrimaryCtxGetState"}, []),
        ({"fails": "cuDevicePrimaryCtxRetain"}, []),
        ({"fails": "cuCtxPushCurrent_v2"}, ["retain 0", "release 0"]),
    ],
)
def test_a_context_that_does_not_exist_is_not_made(
    library: Callable[..., LibCUDA], settings: dict[str, Any], done: list[str]
) -> None:
    driver = library(**settings)
    with contexts.pushed(0) as there:
        assert there is False
    assert driver.done == done


@pytest.mark.parametrize(
    ("call", "done"),
    [
        ("cuDeviceGet", []),
        ("cuDevicePrimaryCtxGetState", []),
        ("cuDevicePrimaryCtxRetain", ["retain 0", "release 0"]),
        ("cuCtxPushCurrent_v2", ["retain 0", "push 100", "pop", "release 0"]),
        ("cuCtxPopCurrent_v2", ["retain 0", "push 100", "pop", "release 0"]),
    ],
)
def test_a_ctrl_c_right_after_a_call_leaves_no_context_behind(
    library: Callable[..., LibCUDA], monkeypatch: pytest.MonkeyPatch, call: str, done: list[str]
) -> None:
    driver = library()
    original = getattr(driver, f"_{call}")

    def interrupted(*arguments: Any) -> int:
        original(*arguments)
        if call == "cuCtxPushCurrent_v2":
            driver.here = 0
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, f"_{call}", interrupted)
    with pytest.raises(KeyboardInterrupt), contexts.pushed(0):
        pass
    assert driver.done == done


def test_an_ordinal_without_a_gpu(library: Callable[..., LibCUDA]) -> None:
    driver = library()
    with contexts.pushed(7) as there:
        assert there is False
    assert driver.done == []


@pytest.mark.parametrize(
    ("made", "current", "foreign"),
    [(None, 1, False), (101, 1, False), (100, None, False), (999, 1, True), (999, None, True), (None, None, None)],
)
def test_the_doctor_tells_a_foreign_context_from_a_primary_one(
    library: Callable[..., LibCUDA],
    monkeypatch: pytest.MonkeyPatch,
    made: int | None,
    current: int | None,
    foreign: bool | None,
) -> None:
    """`made` is the context of `pycuda.autoinit`; the primary ones are 100 and 101."""
    driver = library()
    driver.here = current
    monkeypatch.setitem(sys.modules, "pycuda.driver", types.ModuleType("pycuda.driver"))
    autoinit = types.SimpleNamespace(context=types.SimpleNamespace(handle=made))
    monkeypatch.setitem(sys.modules, "pycuda.autoinit", autoinit)
    assert this_process._foreign_context() is foreign
    driver.initialised = False
    monkeypatch.setattr(contexts, "_initialised", None)
    assert this_process._foreign_context() is None, "nothing has initialised CUDA"


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_captures_of_other_threads_are_left_alone_for_the_block(
    library: Callable[..., LibCUDA], before: int, raises: bool
) -> None:
    driver = library()
    driver.mode = before
    try:
        with contexts.capture_safe():
            assert driver.mode == 2, "relaxed"
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert raises
    assert driver.mode == before and len(driver.done) == 2


@pytest.mark.parametrize("settings", [{"initialised": False}, {"fails": "cuThreadExchangeStreamCaptureMode"}])
def test_an_unchanged_capture_mode_is_not_put_back(library: Callable[..., LibCUDA], settings: dict[str, Any]) -> None:
    driver = library(**settings)
    with contexts.capture_safe():
        driver.fails = ""
    assert driver.done == [] and driver.mode == 0


@pytest.mark.parametrize("seen", [True, False])
def test_a_forked_child_forgets_what_its_parent_found(library: Callable[..., LibCUDA], seen: bool) -> None:
    """A child cannot use CUDA if its parent has initialised it before the fork."""
    driver = library(initialised=seen)
    assert contexts.initialised() is seen
    pid = os.fork()
    if pid == 0:
        driver.initialised = True
        found = (contexts.initialised(), contexts.current())
        os._exit(0 if found == ((False, None) if seen else (True, 1)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert contexts.initialised() is seen, "the parent's stays"
