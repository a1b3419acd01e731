"""Ctrl-C at any point of an adapter's `apply` or of its undo: running the undo steps takes back what is left."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import test_cupy_model
import test_numba_model
import test_pycuda_model
import test_rmm_model
from support.interrupted import interrupt_at_each_point

from memguard._frameworks.rmm import resource

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


def test_pycuda(pycuda_model: Callable[..., Any]) -> None:
    importlib.import_module("pycuda.driver")
    assert interrupt_at_each_point(lambda: pycuda_model().framework, pycuda_state) > 20


def test_numba(numba_model: Callable[..., Any]) -> None:
    importlib.import_module("numba.cuda.cudadrv.driver")
    assert interrupt_at_each_point(lambda: numba_model().framework, numba_state) > 5


def test_cupy(cupy_model: Callable[..., Any]) -> None:
    importlib.import_module("cupy")
    assert interrupt_at_each_point(lambda: cupy_model().framework, cupy_state) > 10


def test_rmm(rmm_model: Callable[..., Any]) -> None:
    """Both GPUs are limited through RMM, which is CuPy's allocator: no GPU stays limited."""
    rmm_model()
    assert interrupt_at_each_point(lambda: rmm_model().framework, rmm_state) > 20
