"""A thread of a framework's own, in C, that asks the driver: it is answered without it while the process is off."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BEGIN = """
import ctypes, sys, time, types
sys.modules["framework"] = types.ModuleType("framework")
library = ctypes.CDLL("./native_thread.so.1")
from memguard._frameworks.optional_modules import Gates, NativeThread
from memguard._node.suspend.gates import gate, native_threads

def table(thread=b"native_thread_of_a_test", live=True, every=0.05):
    row = NativeThread("native_thread.so", "cuStreamQuery", every, thread, lambda: live)
    return Gates(hook="framework", waits=(), natives=(row,))

def asks():
    before, end = library.answered(), time.monotonic() + 10
    while library.answered() < before + 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert library.answered() >= before + 2, "the thread does not ask"
    return library.last_answer()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("native")
    for source, name in (("cuda_stub.c", "libcuda.so.1"), ("native_thread.c", "native_thread.so.1")):
        options = ["-shared", "-fPIC", "-o", str(made / name), str(HERE / source), "-ldl", "-lpthread"]
        subprocess.run(["gcc", *options], check=True)
    return made


def run(folder: Path, code: str, driver: bool = True) -> None:
    found = str(folder) if driver else str(folder / "nowhere")
    environment = {**os.environ, "LD_LIBRARY_PATH": found, "PYTHONPATH": str(HERE.parents[1])}
    program = textwrap.dedent(BEGIN) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_is_answered_while_the_gate_is_closed(folder: Path) -> None:
    run(
        folder,
        """
        library.begin(5)
        assert asks() == 900, "the driver's own answer"
        assert list(native_threads.unheld([table()])) == []
        closed = gate.close(given=[table()])
        assert asks() == 0, "done, and the driver was not asked"
        closed.open()
        assert asks() == 900
        again = gate.close(given=[table()])
        assert asks() == 0
        again.open()
        again.open()
        assert asks() == 900
        """,
    )


def test_what_has_not_asked_yet_is_waited_for(folder: Path) -> None:
    run(
        folder,
        """
        library.begin(700)
        begun = time.monotonic()
        assert list(native_threads.unheld([table(every=0.7)])) == []
        assert 0.3 < time.monotonic() - begun < 5
        closed = gate.close(given=[table()])
        assert asks() == 0
        closed.open()
        assert asks() == 900
        """,
    )


def test_one_whose_place_is_not_found_is_told(folder: Path) -> None:
    """Here its thread has not begun. Real ones may keep the addresses in another way one day."""
    run(
        folder,
        """
        native_threads._SPARE = 0.3
        assert list(native_threads.unheld([table()])) == ["framework: native_thread.so"]
        assert list(native_threads.unheld([table(live=False)])) == [], "it has not begun to use a GPU"
        assert list(native_threads.unheld([table(thread=b"no such thread")])) == [], "this version has none"
        del sys.modules["framework"]
        assert list(native_threads.unheld([table()])) == []
        """,
    )


def test_without_a_c_function_that_answers_nothing_is_held(folder: Path) -> None:
    run(
        folder,
        """
        library.begin(5)
        asks()
        native_threads._DONE = "no_such_function_of_c"
        assert list(native_threads.unheld([table()])) == ["framework: native_thread.so"]
        closed = gate.close(given=[table()])
        assert asks() == 900
        closed.open()
        """,
    )


def test_one_that_begins_between_the_look_and_the_gate_is_told(folder: Path) -> None:
    """Nothing was there to be held when it was asked, and there is a thread now that has not asked yet."""
    run(
        folder,
        """
        assert list(native_threads.unheld([table(live=False)])) == []
        closed = gate.close(given=[table()])
        assert closed.unheld == ("framework: native_thread.so",)
        closed.open()
        library.begin(5)
        asks()
        closed = gate.close(given=[table()])
        assert closed.unheld == ()
        closed.open()
        """,
    )


def test_what_others_put_there_stays(folder: Path) -> None:
    run(
        folder,
        """
        from memguard._devices import c_functions, libcuda
        library.begin(5)
        asks()
        maps = open("/proc/self/maps").read()
        (place,) = native_threads.slots(table().natives[0], c_functions.regions(maps, "native_thread.so"))
        closed = gate.close(given=[table()])
        other = libcuda.of_c("pthread_mutexattr_destroy")
        c_functions.write_pointer(place, other)
        closed.open()
        assert c_functions.read_pointer(place) == other and asks() == 0
        """,
    )


def test_a_forked_child_is_answered_too(folder: Path) -> None:
    """It has no such thread, and no CUDA; its memory is a copy."""
    run(
        folder,
        """
        import os
        library.begin(5)
        asks()
        closed = gate.close(given=[table()])
        if not os.fork():
            os._exit(0)
        assert os.wait()[1] == 0 and asks() == 0
        closed.open()
        assert asks() == 900
        """,
    )


def test_from_outside_the_library_is_seen(folder: Path) -> None:
    run(
        folder,
        """
        import os
        assert native_threads.seen("/", os.getpid(), [table()]) == ("framework: native_thread.so",)
        assert native_threads.seen("/", os.getpid(), [table(b"no such thread")]) == ()
        assert native_threads.seen("/", 1 << 22, [table()]) is None
        other = table()._replace(natives=(table().natives[0]._replace(library="another.so"),))
        assert native_threads.seen("/", os.getpid(), [other]) == ()
        """,
    )


def test_without_a_driver_there_is_nothing_to_hold(folder: Path) -> None:
    run(
        folder,
        """
        native_threads._SPARE = 0.2
        closed = gate.close(given=[table()])
        closed.open()
        assert list(native_threads.unheld([table()])) == ["framework: native_thread.so"]
        """,
        driver=False,
    )
