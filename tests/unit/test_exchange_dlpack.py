"""Capsules read and made, against DLPack's layout byte by byte. NumPy's and PyTorch's own are in tests/native."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from capsules import Consumed, name, produced
from hypothesis import given
from hypothesis import strategies as st

from memguard._frameworks.arrays import dlpack, lifetimes
from memguard._frameworks.arrays.array_interface import WithInterface
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import DTYPES, View, row_major

ROOT = Path(__file__).parents[2]
HOST = View(4096, (2, 3), (3, 1), "float32", None)


class Owner:
    """Somebody's array."""


@pytest.fixture(autouse=True)
def nothing_stays_lent() -> Iterator[None]:
    lifetimes._open.clear()
    yield
    gc.collect()
    assert not lifetimes._open and not lifetimes._parked


def share(view: View = HOST, consumer: str = "numpy") -> tuple[Lifetime, weakref.ref[Owner]]:
    owner = Owner()
    return lifetimes.begin(Offer("torch", view, owner), consumer, None), weakref.ref(owner)


# read


@given(
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 0), (13, 1)]),
    st.integers(0, 300),
    st.sampled_from([None, (1, 0), (1, 1), (1, 9)]),
    st.booleans(),
)
def test_reading_a_capsule(
    shape: list[int],
    dtype: str,
    device: tuple[int, int],
    offset: int,
    version: tuple[int, int] | None,
    readonly: bool,
) -> None:
    code, bits, _ = DTYPES[dtype]
    strides = tuple(range(len(shape), 0, -1))
    capsule = produced(
        1 << 40, tuple(shape), strides, device=device, dtype=(code, bits, 1), offset=offset, version=version,
        flags=int(readonly),
    )  # fmt: skip
    where = device[1] if device[0] in (2, 13) else None
    expected = View((1 << 40) + offset, tuple(shape), strides, dtype, where, readonly and version is not None)
    assert dlpack.read(capsule) == expected
    assert name(capsule) == (b"dltensor" if version is None else b"dltensor_versioned"), "nobody has consumed it yet"


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4), (4, 1, 5)])
def test_without_strides_an_array_is_row_major(shape: tuple[int, ...]) -> None:
    assert dlpack.read(produced(64, shape, None)).strides == row_major(shape)


def test_a_null_address_belongs_to_an_empty_array() -> None:
    view = dlpack.read(produced(0, (0, 3), None))
    assert (view.address, view.size) == (0, 0)


def test_only_the_read_only_flag_makes_an_array_read_only() -> None:
    assert not dlpack.read(produced(64, (2,), None, version=(1, 1), flags=0b110)).readonly
    assert dlpack.read(produced(64, (2,), None, version=(1, 1), flags=0b111)).readonly


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": (2, 0)}, "DLPack 2"),
        ({"version": (0, 8)}, "DLPack 0"),
        ({"device": (10, 0)}, "kind 10, neither the host nor a CUDA GPU"),
        ({"device": (8, 0)}, "kind 8"),
        ({"dtype": (2, 128, 1)}, "code 2, 128 bits, 1 lanes"),
        ({"dtype": (2, 32, 4)}, "4 lanes"),
        ({"dtype": (3, 64, 1)}, "code 3"),
        ({"dtype": (1, 4, 1)}, "4 bits"),
    ],
)
def test_capsules_of_unknown_arrays_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(dlpack.BadCapsule, match=reason):
        dlpack.read(produced(64, (2,), None, **changes))


def test_a_capsule_can_be_read_only_before_it_is_consumed() -> None:
    gone = []
    capsule = produced(64, (2,), None, deleted=lambda: gone.append(1))
    assert dlpack.read(capsule) == dlpack.read(capsule)
    Consumed(capsule)
    with pytest.raises(dlpack.BadCapsule, match="used before"):
        dlpack.read(capsule)
    assert not gone, "reading consumes nothing, so it ends nothing"


@pytest.mark.parametrize("thing", [None, 7, "dltensor", object()])
def test_objects_that_are_no_capsules_are_refused(thing: object) -> None:
    with pytest.raises(dlpack.BadCapsule):
        dlpack.read(thing)


# made


@given(
    st.lists(st.integers(0, 5), max_size=5).flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 99), min_size=len(shape), max_size=len(shape)))
    ),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([None, 0, 3]),
    st.integers(1, 1 << 48),
)
def test_making_a_capsule(layout: tuple[list[int], list[int]], dtype: str, device: int | None, address: int) -> None:
    view = View(address, tuple(layout[0]), tuple(layout[1]), dtype, device)
    lifetime, _ = share(view)
    capsule = dlpack.capsule(view, lifetime, device=device)
    assert name(capsule) == b"dltensor"
    assert dlpack.read(capsule)._replace(strides=()) == view._replace(strides=())
    consumed = Consumed(capsule)
    code, bits, _ = DTYPES[dtype]
    assert (consumed.address, consumed.shape, consumed.code, consumed.bits, consumed.lanes) == (
        address,
        view.shape,
        code,
        bits,
        1,
    )
    assert (consumed.kind, consumed.device) == ((1, 0) if device is None else (2, device))
    if view.size:
        assert (consumed.strides or row_major(view.shape)) == (row_major(view.shape) if view.compact else view.strides)
    opened = id(lifetime)
    del lifetime, capsule
    assert opened in lifetimes._open
    consumed.done()
    assert opened not in lifetimes._open


def test_the_deleter_ends_the_lifetime_on_any_thread() -> None:
    for end in (lambda consumed: consumed.done(), lambda consumed: started(consumed.done).join()):
        lifetime, owner = share()
        consumed = Consumed(dlpack.capsule(HOST, lifetime, device=None))
        del lifetime
        gc.collect()
        assert owner() is not None, "shared until the consumer is done"
        end(consumed)
        assert owner() is None


def started(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_each_capsule_ends_its_own_lifetime() -> None:
    held, owners = [], []
    for _ in range(20):
        lifetime, owner = share()
        held.append(Consumed(dlpack.capsule(HOST, lifetime, device=None)))
        owners.append(owner)
    del lifetime
    for number, one in enumerate(held, 1):
        one.done()
        assert [owner() is None for owner in owners] == [True] * number + [False] * (20 - number)


def test_a_capsule_that_nobody_consumed_ends_its_lifetime() -> None:
    lifetime, owner = share()
    capsule = dlpack.capsule(HOST, lifetime, device=None)
    del lifetime
    assert owner() is not None
    del capsule
    assert owner() is None


def test_a_cancelled_lifetime_waits_for_nothing() -> None:
    lifetime, owner = share(HOST._replace(device=0))
    capsule = dlpack.capsule(HOST, lifetime, device=0)
    lifetime.cancel()
    lifetime.cancel()
    assert not lifetimes._open and owner() is not None
    del lifetime, capsule
    assert owner() is None


def test_shape_and_strides_live_as_long_as_the_capsule() -> None:
    view = View(128, (7, 5, 3), (1, 7, 35), "int16", None)
    lifetime, _ = share(view)
    consumed = Consumed(dlpack.capsule(view, lifetime, device=None))
    del lifetime
    trash = [bytes(range(256)) * 4 for _ in range(2000)]
    del trash
    gc.collect()
    *_, shape, strides, _ = struct.unpack("=QiiiBBHQQQ", ctypes.string_at(consumed.managed, 48))
    assert struct.unpack("=3q", ctypes.string_at(shape, 24)) == (7, 5, 3)
    assert struct.unpack("=3q", ctypes.string_at(strides, 24)) == (1, 7, 35)
    consumed.done()


def test_numpy_and_memguard_read_each_others_capsules() -> None:
    """The memory's values, through a capsule and back."""
    x: Any = numpy.arange(24, dtype="float32").reshape(2, 3, 4)
    for y in (x, x[:, 1:], x.T, x[::2, :, ::3], x[:, :0], x[0, 0, 0:1], x[1, 2, 3:].reshape(())):
        view = dlpack.read(y.__dlpack__())
        assert view == dlpack.read(y.__dlpack__(max_version=(1, 1)))
        assert view._replace(strides=()) == View(y.ctypes.data, y.shape, (), "float32", None)
        lifetime = lifetimes.begin(Offer("torch", view, y), "numpy", None)
        again = numpy.from_dlpack(dlpack.Exporter(view, lifetime, None, lambda _: None))
        assert (again == y).all() and again.shape == y.shape
        assert again.strides == y.strides or view.compact, "strides of a compact array mean nothing"
        del lifetime, again
    readonly = numpy.arange(3)
    readonly.flags.writeable = False
    assert dlpack.read(readonly.__dlpack__(max_version=(1, 1))).readonly
    assert not lifetimes._open


# what from_dlpack functions take


@pytest.mark.parametrize(
    ("asked", "waits"),
    [({}, [1]), ({"stream": None}, [1]), ({"stream": 7}, [7]), ({"stream": -1}, []), ({"stream": 2}, [2])],
)
def test_an_exporter_makes_the_given_stream_wait(asked: dict[str, Any], waits: list[int]) -> None:
    lifetime, _ = share()
    told: list[int] = []
    exporter = dlpack.Exporter(HOST, lifetime, None, told.append)
    capsule = exporter.__dlpack__(**asked, max_version=(1, 1), copy=None, dl_device=None)
    assert told == waits and name(capsule) == b"dltensor"
    Consumed(capsule).done()
    del lifetime


def test_an_exporter_names_its_device() -> None:
    lifetime, _ = share()
    assert dlpack.Exporter(HOST, lifetime, None, print).__dlpack_device__() == (1, 0)
    assert dlpack.Exporter(HOST, lifetime, 3, print).__dlpack_device__() == (2, 3)
    lifetime.cancel()


def test_if_waiting_fails_there_is_no_capsule() -> None:
    lifetime, owner = share()

    def refuses(_: object) -> None:
        raise RuntimeError("the GPU is lost")

    with pytest.raises(RuntimeError, match="lost"):
        dlpack.Exporter(HOST, lifetime, None, refuses).__dlpack__()
    del lifetime
    assert owner() is None


# the array interfaces


def test_an_array_made_through_the_interface_ends_its_lifetime() -> None:
    view = View(4096, (2, 3), (1, 2), "float32", 0, True)
    lifetime, owner = share(view)
    shown: Any = WithInterface(view, lifetime)
    assert not hasattr(shown, "__array_interface__"), "NumPy would read the GPU's memory"
    assert shown.__cuda_array_interface__ == {
        "shape": (2, 3), "typestr": "<f4", "data": (4096, True), "strides": (4, 8), "version": 3, "stream": None,
    }  # fmt: skip
    del lifetime
    assert owner() is not None
    del shown
    assert owner() is None


def test_host_memory_has_only_numpys_interface() -> None:
    lifetime, owner = share()
    shown: Any = WithInterface(HOST, lifetime)
    assert not hasattr(shown, "__cuda_array_interface__")
    assert shown.__array_interface__ == {
        "shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3,
    }  # fmt: skip
    del lifetime, shown
    assert owner() is None


# at the interpreter's end

LEFT = """
import sys
from capsules import Consumed
from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.array_interface import WithInterface
from memguard._frameworks.arrays.lifetimes import Offer
from memguard._frameworks.arrays.view import View

view = View(4096, (2, 3), (3, 1), "float32", None)

class View_:  # as a library's array, which calls the deleter when it is collected
    def __init__(self, consumed):
        self.consumed, self.call = consumed, consumed.done
    def __del__(self):
        self.call()

def share():
    return lifetimes.begin(Offer("torch", view, object()), "numpy", None)

def consumed():
    lifetime = share()
    return View_(Consumed(dlpack.capsule(view, lifetime, device=None)))
"""


@pytest.mark.parametrize(
    "code",
    [
        "kept = consumed()",
        "import builtins; builtins.kept = consumed()",
        "sys.kept = consumed()",
        "sys.modules['zz'] = consumed()",
        "kept = consumed(); kept.self = kept",
        "kept = WithInterface(view, share())",
        "sys.kept = WithInterface(view, share())",
        "kept = dlpack.capsule(view, share(), device=None)",
        "import threading, time; keep = consumed(); t = threading.Thread(target=time.sleep, args=(30,), daemon=True)\n"
        "t.start()",
        "import atexit; kept = [consumed()]; atexit.register(kept.clear)",
        "import atexit, gc; kept = consumed(); kept.self = kept; gc.disable(); atexit.register(gc.collect)",
        "sys.kept = [consumed() for _ in range(100)]\nfor name in list(sys.modules):\n"
        "    if name.startswith('memguard'): del sys.modules[name]",
    ],
)
def test_views_may_outlive_the_interpreter(code: str) -> None:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"{textwrap.dedent(LEFT)}\n{code}\nprint('end')"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_lifetime_does_nothing_while_the_interpreter_shuts_down() -> None:
    lifetime: Any = share()[0]
    lifetime.__del__(ending=lambda: True)
    assert id(lifetime) in lifetimes._open
    lifetime.__del__()
    assert not lifetimes._open


def test_many_threads_consume_and_release_capsules() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                lifetime, owner = share()
                consumed = Consumed(dlpack.capsule(HOST, lifetime, device=None))
                del lifetime
                assert owner() is not None
                consumed.done()
                assert owner() is None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
