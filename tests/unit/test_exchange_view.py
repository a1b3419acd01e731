"""Memory as an array, and who may be shown it: held to what its elements' addresses say, one by one."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memguard._frameworks.arrays import compatibility
from memguard._frameworks.arrays.compatibility import Layout, Traits, obstacle
from memguard._frameworks.arrays.lifetimes import covered
from memguard._frameworks.arrays.view import DTYPES, View, dtype_of_code, dtype_of_typestr, row_major
from memguard.exchange.adapters import registry

TRAITS = {name: registry.by_name(name).traits for name in registry.NAMES}


class Limits(NamedTuple):
    """What a framework takes, as its own documentation and the measurements have it: written here once more."""

    order: str = "any"
    gpu: int | None = 1
    host: int | None = None
    read_only: bool = False
    repeats: bool = True
    lacks: str = ""


LIMITS = {
    "torch": Limits(host=1),
    "tensorflow": Limits(order="row-major", gpu=64, host=64, read_only=True, lacks="float8"),
    "cupy": Limits(lacks="float8"),
    "jax": Limits(order="any without gaps", gpu=16, host=64, read_only=True),
    "pycuda": Limits(lacks="float8 bfloat16"),
    "numba": Limits(repeats=False, lacks="float8 bfloat16"),
    "numpy": Limits(gpu=None, host=1, read_only=True, lacks="float8 bfloat16"),
}
"""`gpu`, `host`: what addresses have to be a multiple of there; None where its arrays never lie there."""


def offsets(view: View) -> list[int]:
    """Where each element lies, in elements behind the first one, in the order in which the array counts them."""
    axes = [[i * stride for i in range(n)] for n, stride in zip(view.shape, view.strides, strict=True)]
    return [sum(steps) for steps in itertools.product(*axes)]


@st.composite
def sliced(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a compact array of which some elements are left out, turned round, and reordered."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = list(row_major(shape))
    for axis, extent in enumerate(shape):
        step = draw(st.sampled_from([1, 1, 1, 2, -1, 0]))
        strides[axis] *= step
        shape[axis] = draw(st.integers(0, extent)) if step in (0, 1) else -(-extent // abs(step))
    order = draw(st.permutations(range(len(shape))))
    return tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)


@st.composite
def wild(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return tuple(shape), tuple(draw(st.lists(st.integers(-8, 30), min_size=len(shape), max_size=len(shape))))


layouts = st.one_of(sliced(), wild())
views = st.builds(
    lambda address, layout, dtype, device, readonly: View(address, layout[0], layout[1], dtype, device, readonly),
    st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 14).map(lambda n: n * 64)),
    layouts,
    st.sampled_from(list(DTYPES)),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
)


@given(views)
def test_sizes_and_extent(view: View) -> None:
    at = offsets(view)
    assert view.size == len(at) and view.nbytes == len(at) * view.itemsize
    first, behind = view.extent
    if at:
        assert first == view.address + min(at) * view.itemsize
        assert behind == view.address + (max(at) + 1) * view.itemsize
    else:
        assert first == behind == view.address
    assert view.byte_strides == tuple(stride * view.itemsize for stride in view.strides)


@given(views)
@example(View(0, (1, 3), (77, 1), "int8", None))
@example(View(0, (3, 1), (1, -5), "int8", None))
@example(View(0, (), (), "int8", None))
@example(View(0, (2, 3), (1, 2), "int8", None))
@example(View(0, (2, 3), (3, -1), "int8", None))
@example(View(0, (2, 0), (-1, 9), "int8", None))
def test_order_and_gaps(view: View) -> None:
    at = offsets(view)
    assert view.compact == (at == list(range(len(at))))
    assert view.dense == (sorted(at) == list(range(len(at))))
    if at:
        assert view.backwards == (min(at) < 0), "strides of dimensions of one element mean nothing"


@given(layouts, st.sampled_from(["int8", "float64", "complex64"]))
def test_numpy_agrees(layout: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> None:
    shape, strides = layout
    room: Any = numpy.zeros(2 * 30 * 16 * 4 + 1, dtype)
    middle = room[len(room) // 2 :]
    x = numpy.lib.stride_tricks.as_strided(middle, shape, [stride * room.itemsize for stride in strides])
    view = View(x.ctypes.data, shape, strides, dtype, None)
    assert view.compact == x.flags.c_contiguous and view.itemsize == x.itemsize and view.nbytes == x.nbytes
    assert view.extent == numpy.lib.array_utils.byte_bounds(x) or not x.size
    fastest_last = numpy.argsort([-stride for stride in strides], kind="stable")
    if x.size and 1 not in shape:
        assert view.dense == x.transpose(fastest_last).flags.c_contiguous
    offered = registry.by_name("numpy").offer(x).view
    assert offered.shape == view.shape and offered.extent == view.extent and offered.compact == view.compact


@given(views)
def test_without_negative_strides_the_elements_are_the_same(view: View) -> None:
    turned, axes = view.forwards()
    assert min(turned.strides, default=0) >= 0 and turned.shape == view.shape
    assert set(axes) == {axis for axis, stride in enumerate(view.strides) if stride < 0}
    assert turned._replace(address=0, strides=()) == view._replace(address=0, strides=())
    ranges = [reversed(range(n)) if axis in axes else range(n) for axis, n in enumerate(view.shape)]
    at = [sum(i * s for i, s in zip(index, turned.strides, strict=True)) for index in itertools.product(*ranges)]
    size = view.itemsize
    assert [turned.address + size * i for i in at] == [view.address + size * i for i in offsets(view)]


@given(st.lists(st.integers(0, 5), max_size=5))
def test_row_major_is_compact(shape: list[int]) -> None:
    view = View(64, tuple(shape), row_major(shape), "float32", 0)
    assert view.compact and view.dense and not view.backwards
    assert view.extent == (64, 64 + 4 * math.prod(shape))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8))
def test_overlapping_ranges_are_covered_once(parts: list[tuple[int, int]]) -> None:
    assert covered(parts) == len({byte for first, behind in parts for byte in range(first, behind)})
    assert covered(iter(reversed(parts))) == covered(parts)


# dtypes


def test_each_dtype_is_found_by_its_numbers_and_by_its_typestr() -> None:
    for name, (code, bits, typestr) in DTYPES.items():
        assert dtype_of_code(code, bits) == name
        assert dtype_of_code(code, bits, 2) is None, "packed elements"
        if typestr is not None:
            assert dtype_of_typestr(typestr) == name
            assert int(typestr[2:]) * 8 == bits
    assert len({(code, bits) for code, bits, _ in DTYPES.values()}) == len(DTYPES)


def test_sizes_are_those_of_c() -> None:
    letters = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "f2": "e", "f4": "f", "f8": "d", "b1": "?"}
    for name, (_, _, typestr) in DTYPES.items():
        if typestr is not None and typestr[1:] in letters:
            assert View(0, (), (), name, None).itemsize == struct.calcsize(letters[typestr[1:]]), name
    assert View(0, (3,), (1,), "complex128", None).nbytes == 48


@pytest.mark.parametrize("typestr", ["<b1", ">b1", "|b1", "=u1", ">i1"])
def test_one_byte_has_no_byte_order(typestr: str) -> None:
    assert dtype_of_typestr(typestr) == {"b": "bool", "u": "uint8", "i": "int8"}[typestr[1]]


@pytest.mark.parametrize("typestr", [">f4", ">i8", "|S4", "<U3", "|V8", "|O8", "<M8[ns]", "<f16", "<c32", "", "f"])
def test_unknown_typestrs_give_none(typestr: str) -> None:
    assert dtype_of_typestr(typestr) is None


@pytest.mark.parametrize("numbers", [(0, 4), (3, 64), (2, 128), (4, 32), (6, 1), (17, 4), (99, 8)])
def test_unknown_dlpack_numbers_give_none(numbers: tuple[int, int]) -> None:
    assert dtype_of_code(*numbers) is None


# rules


def allowed(view: View, limits: Limits, device: int | None) -> bool:
    """Whether the limits, read literally, let the memory through."""
    alignment = limits.host if view.device is None else limits.gpu and max(limits.gpu, view.itemsize)
    if view.dtype.startswith(tuple(limits.lacks.split())) or alignment is None or view.device != device:
        return False
    at = offsets(view)
    if not at:
        return True
    orders = {"any": min(at) >= 0, "row-major": at == sorted(at) and at == list(range(len(at)))}
    orders["any without gaps"] = sorted(at) == list(range(len(at)))
    if not limits.repeats and any(n > 1 and not stride for n, stride in zip(view.shape, view.strides, strict=True)):
        return False
    return orders[limits.order] and view.address % alignment == 0 and (not view.readonly or limits.read_only)


def test_every_framework_has_its_limits_here() -> None:
    assert set(LIMITS) == set(registry.NAMES) == set(TRAITS)
    for name, traits in TRAITS.items():
        assert traits.name == name and traits.title
        assert traits.on_gpu == (LIMITS[name].gpu is not None) and traits.on_host == (LIMITS[name].host is not None)
        assert traits.dtypes == {d for d in DTYPES if not d.startswith(tuple(LIMITS[name].lacks.split()))}


@given(views, st.sampled_from(registry.NAMES), st.booleans())
@example(View(8, (2, 2), (2, 1), "float32", 0), "tensorflow", True)
@example(View(64, (2, 2), (1, 2), "float32", 0), "tensorflow", True)
@example(View(64, (2, 2), (1, 2), "float32", 0), "jax", True)
@example(View(64, (4,), (-1,), "float32", 0), "torch", True)
@example(View(1, (0,), (-1,), "float32", 0, True), "torch", True)
@example(View(64, (2,), (0,), "float32", 0), "numba", True)
@example(View(64, (1, 2), (0, 1), "float32", 0), "numba", True)
@example(View(64, (2, 3), (0, 1), "float32", 0), "cupy", True)
def test_only_arrays_within_a_frameworks_limits_are_accepted(view: View, name: str, there: bool) -> None:
    device = view.device if there else 1
    found = obstacle(view, TRAITS[name], device)
    assert (found is None) == allowed(view, LIMITS[name], device)
    if found is not None:
        assert found.reason and found.remedy and "\n" not in found.reason + found.remedy
        assert found.copied == (view.dtype in TRAITS[name].dtypes), "a copy has the same dtype"
        assert ("copy=True" in found.remedy) == found.copied
    assert found == obstacle(view, TRAITS[name], device)


@pytest.mark.parametrize(
    ("view", "traits", "device", "reason", "remedy"),
    [
        (View(0, (2,), (1,), "float8_e5m2", 0), "cupy", 0, "no arrays of dtype float8_e5m2", "cast it to float32"),
        (View(0, (2,), (1,), "bfloat16", 0), "numba", 0, "no arrays of dtype bfloat16", "cast it to float32"),
        (View(0, (2,), (1,), "int8", None), "cupy", 0, "host memory, and CuPy's arrays lie on a GPU", "uploads"),
        (View(0, (2,), (1,), "int8", 0), "numpy", None, "on a GPU, and NumPy never", "downloads"),
        (View(0, (2,), (1,), "int8", 0), "torch", 1, "on cuda:0, not on cuda:1", "copies it there"),
        (View(0, (2,), (1,), "int8", None), "torch", 1, "host", "copies it there"),
        (View(0, (2, 2), (1, 2), "int8", 0), "tensorflow", 0, "only row-major arrays without gaps", "copy=True"),
        (View(0, (2, 2), (4, 1), "int8", 0), "jax", 0, "only arrays without gaps", "copy=True"),
        (View(9, (2,), (-1,), "int8", 0), "cupy", 0, r"negative: \(-1,\)", "copy=True"),
        (View(64, (2, 2), (0, 1), "int8", 0), "numba", 0, "misreads arrays that repeat their elements", "copy=True"),
        (View(68, (2,), (1,), "int8", 0), "tensorflow", 0, "multiples of 64 bytes, this one is 4 past", "copy=True"),
        (View(24, (2,), (1,), "int8", 0), "jax", 0, "multiples of 16 bytes, this one is 8 past", "copy=True"),
        (View(80, (2,), (1,), "int8", None), "jax", None, "multiples of 64 bytes, this one is 16 past", "copy=True"),
        (View(64, (2,), (1,), "int8", 0, True), "numba", 0, "read-only, and Numba could write", "copy=True"),
    ],
)
def test_the_reason_and_the_remedy(view: View, traits: str, device: int | None, reason: str, remedy: str) -> None:
    found = obstacle(view, TRAITS[traits], device)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)
    assert remedy in found.remedy


def test_bool_is_viewed_and_integers_are_cast() -> None:
    nobody = Traits("nobody", frozenset(), title="Nobody")
    remedies = {}
    for dtype in ("bool", "int64", "float64"):
        found = obstacle(View(0, (), (), dtype, 0), nobody, 0)
        assert found is not None and not found.copied
        remedies[dtype] = found.remedy
    assert "uint8" in remedies["bool"] and "float32" in remedies["float64"] and "float32" not in remedies["int64"]


@given(views, st.sampled_from(list(Layout)), st.sampled_from([1, 2, 16, 256]))
def test_a_wider_layout_and_a_smaller_alignment_take_no_less(view: View, layout: Layout, alignment: int) -> None:
    narrow = Traits("t", frozenset(DTYPES), layout, alignment, alignment, on_host=True, title="T")
    wide = Traits("t", frozenset(DTYPES), Layout.FORWARD, 1, 1, writes=False, on_host=True, title="T")
    if compatibility.obstacle(view, narrow, view.device) is None:
        assert compatibility.obstacle(view, wide, view.device) is None
