"""Arrays that run backwards or repeat their elements, against NumPy."""

from __future__ import annotations

import itertools

import numpy
import pytest

from memguard._frameworks.arrays import compatibility
from memguard._frameworks.arrays.view import View
from memguard.exchange.adapters import registry

STEPS = [slice(None), slice(None, None, -1), slice(None, None, 2), slice(None, None, -2), slice(2, 3)]


def view(array: numpy.ndarray) -> View:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return View(array.ctypes.data, array.shape, strides, str(array.dtype), None)


@pytest.mark.parametrize("steps", list(itertools.product(STEPS, repeat=2)))
def test_without_negative_strides_it_is_the_same_array_flipped(steps: tuple[slice, slice]) -> None:
    array = numpy.arange(35, dtype="float32").reshape(5, 7)[steps]
    forwards, axes = view(array).forwards()
    assert forwards == view(numpy.flip(array, axes)) and not forwards.backwards
    assert forwards.extent == view(array).extent


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_only_a_broadcast_dimension_repeats(shape: tuple[int, int]) -> None:
    row = numpy.broadcast_to(numpy.arange(shape[1], dtype="float32"), shape)
    assert view(row).repeats is (shape[0] > 1)
    assert not view(row.copy()).repeats


def test_numba_gets_no_array_that_it_misreads() -> None:
    row = view(numpy.broadcast_to(numpy.arange(4, dtype="float32"), (3, 4)))._replace(device=0)
    found = {
        name: compatibility.obstacle(row, registry.by_name(name).traits, 0)
        for name in ("torch", "cupy", "pycuda", "numba")
    }
    assert {name for name, obstacle in found.items() if obstacle is not None} == {"numba"}
    assert found["numba"] is not None and found["numba"].copied
