"""Ctrl-C at any point of an adapter's `apply` or of its undo: running the undo steps takes back what is left."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import test_cupy_model
import test_numba_model
import test_pycuda_model
import test_rmm_model

from memguard._base.undo import Undo
from memguard._frameworks.rmm import resource

_spec = importlib.util.spec_from_file_location("interruptions", Path(__file__).parents[1] / "unit" / "interruptions.py")
assert _spec is not None and _spec.loader is not None
interruptions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(interruptions)
pycuda_model, numba_model, cupy_model = test_pycuda_model.model, test_numba_model.model, test_cupy_model.model
rmm_model = test_rmm_model.model


@pytest.fixture
def gpus() -> int:
    """Of the model of CuPy."""
    return 2


def pycuda_state() -> tuple[object, ...]:
    drv, tools = sys.modules["pycuda.driver"], importlib.import_module("pycuda.tools")
    arrays: Any = importlib.import_module("pycuda.gpuarray")
    values = [*vars(arrays).values(), *vars(arrays.GPUArray).values()]
    defaults = [one.__defaults__ for one in values if isinstance(one, FunctionType)]
    return drv.mem_alloc, drv.mem_alloc_pitch, drv.Device.make_context, tools.DeviceMemoryPool, defaults


def numba_state() -> object:
    return sys.modules["numba.cuda.cudadrv.driver"]._memory_manager


def cupy_state() -> object:
    cupy: Any = sys.modules["cupy"]
    return cupy.cuda.get_allocator()


def rmm_state() -> tuple[object, ...]:
    cupy, mr = sys.modules["cupy"], importlib.import_module("rmm").mr
    resources = [mr.get_per_device_resource(ordinal) for ordinal in (0, 1)]
    return resources, dict(resource._limits), cupy.cuda.get_allocator(), cupy.cuda.set_allocator


def attempts(make: Callable[[], Any], state: Callable[[], object], caps: int) -> int:
    """Interrupt `apply`, and then the undo, at each point."""

    def apply(setting: Any, undo: Undo) -> None:
        setting.framework.apply({gpu.uuid: caps for gpu in setting.host.devices()}, {}, undo)

    before = state()
    undo = Undo()
    apply(make(), undo)  # what is done once only
    undo.run()
    setting = make()
    counted = interruptions.Points()
    counted.run(lambda: apply(setting, undo))
    assert state() != before
    undone = interruptions.Points()
    undone.run(undo.run)
    assert state() == before and undo.done
    for at in range(1, counted.count + 1):
        setting, points = make(), interruptions.Points(at)
        with pytest.raises(KeyboardInterrupt):
            points.run(lambda setting=setting: apply(setting, undo))
        undo.run()
        assert state() == before and undo.done, f"apply, {points.place}"
    for at in range(1, undone.count + 1):
        setting, points = make(), interruptions.Points(at)
        apply(setting, undo)
        with pytest.raises(KeyboardInterrupt):
            points.run(undo.run)
        undo.run()
        assert state() == before and undo.done, f"undo, {points.place}"
    return int(counted.count + undone.count)


def test_pycuda(pycuda_model: Callable[..., Any]) -> None:
    importlib.import_module("pycuda.driver")
    assert attempts(pycuda_model, pycuda_state, 1 << 26) > 20


def test_numba(numba_model: Callable[..., Any]) -> None:
    importlib.import_module("numba.cuda.cudadrv.driver")
    assert attempts(numba_model, numba_state, 1 << 26) > 5


def test_cupy(cupy_model: Callable[..., Any]) -> None:
    importlib.import_module("cupy")
    assert attempts(cupy_model, cupy_state, 1 << 26) > 10


def test_rmm(rmm_model: Callable[..., Any]) -> None:
    """Both GPUs are limited through RMM, which is CuPy's allocator: no GPU stays limited."""
    rmm_model()
    assert attempts(rmm_model, rmm_state, 1 << 26) > 20
