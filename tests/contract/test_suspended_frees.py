"""Arrays that die while the process is off its GPUs: memguard's allocators give nothing to the driver until it is back.

The driver would keep the thread until then: for ever, on the one that is to bring the process back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_cupy_model import model as cupy_model
from test_cupy_pooled import Joint, joint
from test_numba_model import Setting
from test_numba_model import model as numba_model

from memguard._base.units import MIB
from memguard._devices import suspension
from memguard._devices.suspension import Off

__all__ = ["cupy_model", "joint", "numba_model"]


@pytest.fixture
def gpus() -> int:
    return 1


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("cupy_model")


@pytest.fixture(autouse=True)
def on_the_gpus() -> Iterator[None]:
    yield
    assert suspension.now is None and not suspension._deferred


def off() -> None:
    suspension.now = Off({}, time.time())


def on() -> None:
    suspension.now = None
    suspension.run_deferred()


def test_numba_frees_nothing_until_the_process_is_back(numba_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Setting = numba_model()
    setting.apply(64 * MIB)
    live = [setting.cuda.device_array(2 * MIB) for _ in range(30)]
    calls: list[str] = []
    driver, free = setting.driver.driver, setting.driver.driver.cuMemFree

    def counted(*args: Any) -> Any:
        calls.append("cuMemFree")
        assert suspension.now is None
        return free(*args)

    monkeypatch.setattr(driver, "cuMemFree", counted)
    off()
    try:
        before = setting.taken()
        live.clear()
        gc.collect()
        assert setting.taken() == before and calls == [] and setting.pending() == 30
    finally:
        on()
    kept = setting.cuda.device_array(2 * MIB)
    setting.framework.trim(setting.gpu)
    assert setting.taken() == 2 * MIB and setting.usage().in_use == 2 * MIB and setting.pending() == 0
    del kept


def test_a_stream_of_numba_that_dies_is_not_marked(numba_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._devices import streams
    from memguard._frameworks.numba import watch

    setting: Setting = numba_model()
    setting.apply(64 * MIB)
    kept = setting.cuda.device_array(MIB)
    stream = setting.cuda.stream()
    original = streams.Mark

    def mark(*args: Any) -> Any:
        assert suspension.now is None, "an event was recorded"
        return original(*args)

    monkeypatch.setattr(streams, "Mark", mark)
    off()
    try:
        del stream
        gc.collect()
        assert not watch._unmarked
    finally:
        on()
    del kept


def test_cupy_in_the_shared_pool_frees_nothing_until_the_process_is_back(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    live = [setting.alloc(MIB) for _ in range(4)]
    off()
    try:
        live.clear()
        gc.collect()
        assert joint.gpu.pool_used == 4 * MIB
    finally:
        on()
    gc.collect()
    usage = joint.framework.usage(setting.first)
    assert joint.gpu.pool_used == 0 and usage is not None and usage.in_use == 0
    assert setting.alloc(MIB) is not None
