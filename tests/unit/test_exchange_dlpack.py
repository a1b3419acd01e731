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
from capsules import Taken, name, produced
from hypothesis import given
from hypothesis import strategies as st

from memguard.exchange import dlpack, lifetimes
from memguard.exchange.adapters.array_interface import WithInterface
from memguard.exchange.lifetimes import Lifetime, Offer
from memguard.exchange.view import DTYPES, View, row_major

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


def lend(view: View = HOST, consumer: str = "numpy") -> tuple[Lifetime, weakref.ref[Owner]]:
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
    assert name(capsule) == (b"dltensor" if version is None else b"dltensor_versioned"), "it is still anyone's to take"


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4), (4, 1, 5)])
def test_no_strides_are_row_major(shape: tuple[int, ...]) -> None:
    assert dlpack.read(produced(64, shape, None)).strides == row_major(shape)


def test_no_address_is_that_of_nothing() -> None:
    view = dlpack.read(produced(0, (0, 3), None))
    assert (view.address, view.size) == (0, 0)


def test_other_flags_are_no_read_only() -> None:
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
def test_what_is_no_array_here_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(dlpack.Unreadable, match=reason):
        dlpack.read(produced(64, (2,), None, **changes))


def test_a_capsule_is_read_before_it_is_taken_and_not_after() -> None:
    gone = []
    capsule = produced(64, (2,), None, deleted=lambda: gone.append(1))
    assert dlpack.read(capsule) == dlpack.read(capsule)
    Taken(capsule)
    with pytest.raises(dlpack.Unreadable, match="used before"):
        dlpack.read(capsule)
    assert not gone, "reading takes nothing, so it ends nothing"


@pytest.mark.parametrize("thing", [None, 7, "dltensor", object()])
def test_what_is_no_capsule_is_refused(thing: object) -> None:
    with pytest.raises(dlpack.Unreadable):
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
    lifetime, _ = lend(view)
    capsule = dlpack.capsule(view, lifetime, device=device)
    assert name(capsule) == b"dltensor"
    assert dlpack.read(capsule)._replace(strides=()) == view._replace(strides=())
    taken = Taken(capsule)
    code, bits, _ = DTYPES[dtype]
    assert (taken.address, taken.shape, taken.code, taken.bits, taken.lanes) == (address, view.shape, code, bits, 1)
    assert (taken.kind, taken.device) == ((1, 0) if device is None else (2, device))
    if view.size:
        assert (taken.strides or row_major(view.shape)) == (row_major(view.shape) if view.compact else view.strides)
    opened = id(lifetime)
    del lifetime, capsule
    assert opened in lifetimes._open
    taken.done()
    assert opened not in lifetimes._open


def test_the_deleter_ends_the_loan_on_any_thread() -> None:
    for end in (lambda taken: taken.done(), lambda taken: started(taken.done).join()):
        lifetime, owner = lend()
        taken = Taken(dlpack.capsule(HOST, lifetime, device=None))
        del lifetime
        gc.collect()
        assert owner() is not None, "lent as long as it is taken"
        end(taken)
        assert owner() is None


def started(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_each_capsule_ends_its_own_loan() -> None:
    held, owners = [], []
    for _ in range(20):
        lifetime, owner = lend()
        held.append(Taken(dlpack.capsule(HOST, lifetime, device=None)))
        owners.append(owner)
    del lifetime
    for number, one in enumerate(held, 1):
        one.done()
        assert [owner() is None for owner in owners] == [True] * number + [False] * (20 - number)


def test_a_capsule_that_nobody_took_ends_its_loan() -> None:
    lifetime, owner = lend()
    capsule = dlpack.capsule(HOST, lifetime, device=None)
    del lifetime
    assert owner() is not None
    del capsule
    assert owner() is None


def test_a_loan_that_was_cancelled_asks_nobody() -> None:
    lifetime, owner = lend(HOST._replace(device=0))
    capsule = dlpack.capsule(HOST, lifetime, device=0)
    lifetime.cancel()
    lifetime.cancel()
    assert not lifetimes._open and owner() is not None
    del lifetime, capsule
    assert owner() is None


def test_what_it_points_to_lives_as_long_as_the_loan() -> None:
    view = View(128, (7, 5, 3), (1, 7, 35), "int16", None)
    lifetime, _ = lend(view)
    taken = Taken(dlpack.capsule(view, lifetime, device=None))
    del lifetime
    trash = [bytes(range(256)) * 4 for _ in range(2000)]
    del trash
    gc.collect()
    *_, shape, strides, _ = struct.unpack("=QiiiBBHQQQ", ctypes.string_at(taken.managed, 48))
    assert struct.unpack("=3q", ctypes.string_at(shape, 24)) == (7, 5, 3)
    assert struct.unpack("=3q", ctypes.string_at(strides, 24)) == (1, 7, 35)
    taken.done()


def test_numpy_and_memguard_read_one_another() -> None:
    """The memory's values, through a capsule and back."""
    x: Any = numpy.arange(24, dtype="float32").reshape(2, 3, 4)
    for y in (x, x[:, 1:], x.T, x[::2, :, ::3], x[:, :0], x[0, 0, 0:1], x[1, 2, 3:].reshape(())):
        view = dlpack.read(y.__dlpack__())
        assert view == dlpack.read(y.__dlpack__(max_version=(1, 1)))
        assert view._replace(strides=()) == View(y.ctypes.data, y.shape, (), "float32", None)
        lifetime = lifetimes.begin(Offer("torch", view, y), "numpy", None)
        again = numpy.from_dlpack(dlpack.Exporter(view, lifetime, None, lambda _: None))
        assert (again == y).all() and again.shape == y.shape
        assert again.strides == y.strides or view.compact, "then they mean nothing"
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
def test_an_exporter_makes_the_stream_wait_that_it_is_told(asked: dict[str, Any], waits: list[int]) -> None:
    lifetime, _ = lend()
    told: list[int] = []
    exporter = dlpack.Exporter(HOST, lifetime, None, told.append)
    capsule = exporter.__dlpack__(**asked, max_version=(1, 1), copy=None, dl_device=None)
    assert told == waits and name(capsule) == b"dltensor"
    Taken(capsule).done()
    del lifetime


def test_an_exporter_says_where_it_lies() -> None:
    lifetime, _ = lend()
    assert dlpack.Exporter(HOST, lifetime, None, print).__dlpack_device__() == (1, 0)
    assert dlpack.Exporter(HOST, lifetime, 3, print).__dlpack_device__() == (2, 3)
    lifetime.cancel()


def test_if_waiting_fails_there_is_no_capsule() -> None:
    lifetime, owner = lend()

    def refuses(_: object) -> None:
        raise RuntimeError("the GPU is lost")

    with pytest.raises(RuntimeError, match="lost"):
        dlpack.Exporter(HOST, lifetime, None, refuses).__dlpack__()
    del lifetime
    assert owner() is None


# the array interfaces


def test_a_shown_array_ends_its_loan() -> None:
    view = View(4096, (2, 3), (1, 2), "float32", 0, True)
    lifetime, owner = lend(view)
    shown: Any = WithInterface(view, lifetime)
    assert not hasattr(shown, "__array_interface__"), "NumPy would read the GPU's memory"
    assert shown.__cuda_array_interface__ == {
        "shape": (2, 3), "typestr": "<f4", "data": (4096, True), "strides": (4, 8), "version": 3, "stream": None,
    }  # fmt: skip
    del lifetime
    assert owner() is not None
    del shown
    assert owner() is None


def test_memory_of_the_host_is_shown_to_numpy_only() -> None:
    lifetime, owner = lend()
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
from capsules import Taken
from memguard.exchange import dlpack
from memguard.exchange import lifetimes
from memguard.exchange.adapters.array_interface import WithInterface
from memguard.exchange.lifetimes import Offer
from memguard.exchange.view import View

view = View(4096, (2, 3), (3, 1), "float32", None)

class View_:  # as a library's array, which calls the deleter when it is collected
    def __init__(self, taken):
        self.taken, self.call = taken, taken.done
    def __del__(self):
        self.call()

def lend():
    return lifetimes.begin(Offer("torch", view, object()), "numpy", None)

def taken():
    lifetime = lend()
    return View_(Taken(dlpack.capsule(view, lifetime, device=None)))
"""


@pytest.mark.parametrize(
    "code",
    [
        "kept = taken()",
        "import builtins; builtins.kept = taken()",
        "sys.kept = taken()",
        "sys.modules['zz'] = taken()",
        "kept = taken(); kept.self = kept",
        "kept = WithInterface(view, lend())",
        "sys.kept = WithInterface(view, lend())",
        "kept = dlpack.capsule(view, lend(), device=None)",
        "import threading, time; keep = taken(); t = threading.Thread(target=time.sleep, args=(30,), daemon=True)\n"
        "t.start()",
        "import atexit; kept = [taken()]; atexit.register(kept.clear)",
        "import atexit, gc; kept = taken(); kept.self = kept; gc.disable(); atexit.register(gc.collect)",
        "sys.kept = [taken() for _ in range(100)]\nfor name in list(sys.modules):\n"
        "    if name.startswith('memguard'): del sys.modules[name]",
    ],
)
def test_views_that_live_at_the_interpreters_end(code: str) -> None:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"{textwrap.dedent(LEFT)}\n{code}\nprint('end')"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_loan_does_nothing_once_the_interpreter_ends() -> None:
    lifetime: Any = lend()[0]
    lifetime.__del__(ending=lambda: True)
    assert id(lifetime) in lifetimes._open
    lifetime.__del__()
    assert not lifetimes._open


def test_many_threads_take_and_let_go() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                lifetime, owner = lend()
                taken = Taken(dlpack.capsule(HOST, lifetime, device=None))
                del lifetime
                assert owner() is not None
                taken.done()
                assert owner() is None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
