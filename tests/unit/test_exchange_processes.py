"""Arrays between real processes over real sockets; a memfd stands for GPU memory (`sharing_doors`).

Counts and checks are the same as on a GPU, which tests/gpu/test_exchange_processes_gpu.py has.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import sharing_doors
from sharing_doors import CHILD, PIECE, UUID, Array

from memguard import exchange
from memguard._frameworks.arrays import lifetimes
from memguard.errors import CannotShare
from memguard.exchange import Handle, attach, export, transfer
from memguard.exchange.ipc import server, sharing, wire

Start = Callable[..., "Child"]
HOLD = "y = exchange.attach(sys.argv[1], 'cupy')\nsay(y.values.tolist())\n"


SPEAKS = """
def say(x): print(json.dumps(x), flush=True)
def wait(): return sys.stdin.readline()
def unmapped():
    until = time.monotonic() + 20
    while sharing_doors.mapped and time.monotonic() < until: time.sleep(0.01)
"""


class Child:
    """Another process. It says things line by line, and waits for a line where it reads one."""

    def __init__(self, code: str, *args: str, env: dict[str, str] | None = None) -> None:
        tests = Path(__file__).parent
        code = CHILD + SPEAKS + code
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{sharing_doors.ROOT}{os.pathsep}{tests}", **(env or {})},
        )

    def says(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(20)}"
        return json.loads(line)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def done(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(20)


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def begin(*args: str, env: dict[str, str] | None = None) -> Child:
        children.append(Child(*args, env=env))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.done()
        for pipe in (child.process.stdin, child.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def within(seconds: float, true: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what or "it did not happen in time"
        time.sleep(0.005)


def serving() -> bool:
    return any(thread.name == "memguard-sharing" for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def doors(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installs the doors. After each test no thread, file, directory or byte is left.

    The folder's name is short: the path of a Unix socket has at most 107 bytes, and a longer one goes elsewhere.
    """
    sharing_doors.install(monkeypatch.setattr, monkeypatch.setitem)
    runtime = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert not serving()
    gc.collect()  # an earlier test's garbage may hold files
    before = open_files()
    yield runtime
    gc.collect()
    within(10, lambda: not serving(), "the thread stayed")
    assert (
        open_files() == before
        and not list(runtime.iterdir())
        and not lifetimes.held_for_processes
        and not lifetimes.lent()
    )


@pytest.fixture
def x() -> Array:
    return Array(numpy.arange(12, dtype="f4").reshape(3, 4))


def test_another_process_gets_the_values_and_is_counted_while_it_has_them(x: Array, start: Start) -> None:
    with export(x) as handle:
        assert (handle.shape, handle.dtype, handle.uuid, handle.nbytes) == ((3, 4), "float32", UUID, 48)
        assert handle.attached == 0 and lifetimes.held_for_processes == {0: PIECE}
        x.values[:] = 0  # it has a copy
        child = start(HOLD + "wait(); del y; wait()", str(handle))
        assert child.says() == numpy.arange(12).reshape(3, 4).tolist()
        assert handle.attached == 1
        child.go()
        within(10, lambda: handle.attached == 0)
        assert child.process.poll() is None, "it released the array, and lives on"
    assert not lifetimes.held_for_processes and handle.attached is None


def test_all_processes_see_what_one_writes(x: Array, start: Start) -> None:
    write = (
        "import numpy, ctypes\nctypes.memmove(y.consumed.address, numpy.float32(99).tobytes(), 4)\n"
        "say('written')\nwait()"
    )
    with export(x) as handle:
        first = start(HOLD + write, str(handle))
        assert first.says()[0][0] == 0 and first.says() == "written"
        second = start(HOLD + "wait()", str(handle))
        assert second.says()[0][0] == 99
        assert handle.attached == 2 and x.values[0, 0] == 0


def test_a_process_with_two_arrays_counts_once(x: Array, start: Start) -> None:
    with export(x) as handle:
        child = start("a, b = (exchange.attach(sys.argv[1], 'cupy') for _ in 'ab')\nsay(1)\nwait()", str(handle))
        child.says()
        assert handle.attached == 1


def test_a_killed_process_releases_what_it_attached(x: Array, start: Start) -> None:
    with export(x) as handle:
        children = [start(HOLD + "wait()", str(handle)) for _ in range(2)]
        for child in children:
            child.says()
        children[0].kill()
        within(10, lambda: handle.attached == 1)
        children[1].kill()
        within(10, lambda: handle.attached == 0)


AFTERWARDS = """
import gc
from memguard._frameworks.arrays import lifetimes
def held():
    total = y.values.sum().item() if y is not None else None
    return [lifetimes.held_for_processes[0], total, len(sharing_doors.mapped)]
say(held()); wait()
deadline = time.monotonic() + 10
while not lifetimes.held_for_processes[0] and time.monotonic() < deadline: time.sleep(0.005)
say(held()); y = None; gc.collect()
while lifetimes.held_for_processes[0] and time.monotonic() < deadline: time.sleep(0.005)
say(held()); wait()
"""


def test_after_close_the_process_that_attached_keeps_the_memory_and_is_charged(x: Array, start: Start) -> None:
    handle = export(x)
    child = start("y = exchange.attach(sys.argv[1], 'cupy')\n" + AFTERWARDS, str(handle))
    assert child.says() == [0, 66, 1]
    handle.close()
    assert not lifetimes.held_for_processes and handle.attached is None
    handle.close()
    child.go()
    assert child.says() == [PIECE, 66, 1] and child.says() == [0, None, 0]


def test_after_the_exporter_is_killed_the_process_that_attached_keeps_the_memory(start: Start, doors: Path) -> None:
    exporter = start(
        "import numpy\nx = sharing_doors.Array(numpy.arange(12, dtype='f4'))\nh = exchange.export(x)\n"
        "say(str(h)); wait()\n"
    )
    handle = exporter.says()
    child = start("y = exchange.attach(sys.argv[1], 'cupy')\n" + AFTERWARDS, handle)
    assert child.says() == [0, 66, 1]
    exporter.kill()
    child.go()
    assert child.says() == [PIECE, 66, 1] and child.says() == [0, None, 0]
    with pytest.raises(CannotShare, match=r"the export is gone: .*\n    fix: export it again"):
        attach(handle, "cupy")
    for left in doors.iterdir():  # a killed process leaves its socket's directory
        (left / "s").unlink()
        left.rmdir()


def test_a_process_that_ends_removes_its_directory(start: Start, doors: Path) -> None:
    exporter = start(
        "import numpy\nx = sharing_doors.Array(numpy.arange(12, dtype='f4'))\nh = exchange.export(x)\nsay(1); wait()"
    )
    exporter.says()
    (folder,) = doors.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and [p.name for p in folder.iterdir()] == ["s"]
    assert exporter.done() == 0 and not list(doors.iterdir())


def test_a_handle_in_another_process_closes_nothing(x: Array, start: Start) -> None:
    with export(x) as handle:
        text = pickle.dumps(handle).hex()
        child = start(
            "import pickle\nh = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "with h: y = exchange.attach(h, 'cupy')\nh.close(); say([h.attached, h.shape]); wait()",
            text,
        )
        assert child.says() == [None, [3, 4]]
        assert handle.attached == 1 and lifetimes.held_for_processes == {0: PIECE}
        copy = pickle.loads(pickle.dumps(handle))
        assert copy == handle and copy.attached == 1
        del copy
        assert handle.attached == 1


def test_a_handle_is_text_for_a_pipe_or_a_variable(x: Array) -> None:
    scalar, empty = Array(numpy.array(3, "f4")), Array(numpy.zeros((0, 5), "i8"))
    for each in (x, scalar, empty):
        with export(each) as handle:
            text = str(handle)
            assert (
                Handle.parse(text) == Handle.parse(text + "\n") == handle
                and text.isascii()
                and not any(c.isspace() for c in text)
            )
            assert handle.token not in repr(handle) and len(handle.token) == 32
    for wrong in (
        "",
        "x",
        text.replace("int64", "object"),
        text.replace(":1:", ":2:"),
        text[:40],
        text + "\n" + text,
        7,
        None,
    ):
        with pytest.raises(ValueError, match="not a handle of an exported array\n    fix: "):
            Handle.parse(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a handle"):
        attach("/tmp/s", "cupy")


def test_arrays_without_elements_need_no_memory(start: Start) -> None:
    with export(Array(numpy.zeros((0, 5), "i8"))) as handle:
        assert not lifetimes.held_for_processes
        child = start(
            "y = exchange.attach(sys.argv[1], 'cupy')\nsay([y.consumed.shape, sharing_doors.mapped]); wait()",
            str(handle),
        )
        assert child.says() == [[0, 5], []] and handle.attached == 1


def test_an_array_with_gaps_is_copied_without_them(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numpy.arange(12, dtype="f4").reshape(3, 4)

    def compacted(x: Any, producer: Any, offer: Any) -> tuple[Any, Any, Any]:
        made = Array(numpy.ascontiguousarray(x.values))
        return producer, made, producer.offer(made)

    monkeypatch.setattr(transfer, "compacted", compacted)
    with export(Array(whole.T)) as handle:
        child = start(HOLD + "wait()", str(handle))
        assert child.says() == whole.T.tolist()


def test_the_host_waits_for_the_exported_array_and_for_nothing_else(
    x: Array, block: Callable[..., Array], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_doors, "done", done := [])
    with export(x) as handle:
        assert done == ["waited (0, None, None, None)", "copied"]
        child = start("y = exchange.attach(sys.argv[1], 'cupy')\nsay(sharing_doors.done); wait()", str(handle))
        assert child.says() == []
    done.clear()
    export(block(PIECE, PIECE), copy=False).close()
    assert done == ["waited (0, None, None, None)"]


def test_attaching_with_copy_unmaps_the_memory_at_once(x: Array, start: Start) -> None:
    with export(x) as handle:
        child = start(
            "y = exchange.attach(sys.argv[1], 'numpy', copy=True)\nunmapped()\n"
            "say([type(y).__name__, y.sum().item(), sharing_doors.mapped]); wait()",
            str(handle),
        )
        assert child.says() == ["ndarray", 66, []]
        within(10, lambda: handle.attached == 0)


def test_what_cannot_be_exported(x: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotShare, match="host memory\n    fix: multiprocessing"):
        export(numpy.zeros(3, "f4"))
    with pytest.raises(CannotShare, match="not an array of"):
        export([1, 2])
    monkeypatch.setattr(sharing_doors, "free", 1 << 20)
    with pytest.raises(
        CannotShare, match=r"no room for a copy of it on cuda:0: 2\.0 MiB needed, 1\.0 MiB free\n    fix"
    ):
        export(x)
    assert not serving()


def test_what_cannot_be_attached(x: Array, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    with export(x) as handle:
        with pytest.raises(CannotShare, match=r"this very process\n    fix: memguard\.exchange\.to\(x, 'cupy'\)"):
            attach(handle, "cupy")
        with pytest.raises(ValueError, match="did you mean 'cupy'"):
            attach(handle, "cupi")
        other = Handle(handle.path, "0" * 32, UUID, (3, 4), "float32")
        child = start(
            "try: exchange.attach(sys.argv[1], 'cupy')\nexcept exchange.CannotShare as error: say(str(error))",
            str(other),
        )
        assert "the export is gone" in child.says(), "an unknown token"
        elsewhere = start(
            "from memguard._devices import shared_memory\nshared_memory.ordinal = lambda uuid: None\n"
            "try: exchange.attach(sys.argv[1], 'cupy')\nexcept exchange.CannotShare as error: say(str(error))",
            str(handle),
        )
        assert f"it lies on {UUID}, which CUDA does not show this process" in elsewhere.says()
        refused = start(
            "try: exchange.attach(sys.argv[1], 'numpy')\nexcept exchange.CannotShare as error: say(error.remedy)\n"
            "unmapped(); say(sharing_doors.mapped); wait()",
            str(handle),
        )
        assert "copy=True" in refused.says() and refused.says() == []
        within(10, lambda: handle.attached == 0)
    with pytest.raises(CannotShare, match="the export is gone"):
        attach(handle, "cupy")


@pytest.fixture
def connect() -> Iterator[Callable[[Handle], socket.socket]]:
    made: list[socket.socket] = []

    def call(handle: Handle) -> socket.socket:
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        made[-1].settimeout(10)
        made[-1].connect(handle.path)
        return made[-1]

    yield call
    for connection in made:
        connection.close()


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" * 9,
        wire.encode({"memguard": 1, "token": "f" * 32}),
        wire.encode({"memguard": 1, "token": "é"}),
        wire.encode({"memguard": 9}),
        wire.encode({}) + b"more",
        pickle.dumps(Handle("/", "0" * 32, UUID, (), "float32")),
    ],
    ids=["http", "noise", "another token", "no token", "another version", "too much", "pickle"],
)
def test_only_a_peer_that_sends_garbage_is_disconnected(
    data: bytes, x: Array, connect: Callable[[Handle], socket.socket], start: Start
) -> None:
    with export(x) as handle:
        connection = connect(handle)
        connection.sendall(data)
        assert ended(connection) and handle.attached == 0
        assert start(HOLD, str(handle)).says()[0] == [0, 1, 2, 3]


def test_another_user_is_disconnected(
    x: Array, connect: Callable[[Handle], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = wire.peer
    with export(x) as handle:
        monkeypatch.setattr(wire, "peer", lambda connection: true(connection)._replace(uid=os.geteuid() + 1))
        connection = connect(handle)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(wire.encode(wire.request(handle.token)))
        assert ended(connection) and handle.attached == 0


def test_an_exporter_of_another_user_is_not_even_asked(x: Array, start: Start) -> None:
    with export(x) as handle:
        child = start(
            "from memguard.exchange.ipc import wire\ntrue = wire.peer\n"
            "wire.peer = lambda connection: true(connection)._replace(uid=7)\n"
            "wire.send = lambda *_: say('asked')\n"
            "try: exchange.attach(sys.argv[1], 'cupy')\nexcept exchange.CannotShare as error: say(str(error))",
            str(handle),
        )
        assert "its socket belongs to another user (user 7)" in child.says()


def test_silent_and_slow_peers_keep_nobody_waiting(
    x: Array, connect: Callable[[Handle], socket.socket], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 1.0)
    with export(x) as handle:
        silent, slow = connect(handle), connect(handle)
        slow.send(b"\0")
        assert start(HOLD, str(handle)).says()[0] == [0, 1, 2, 3]
        assert ended(silent) and ended(slow), "their time was up"


def test_the_number_of_waiting_peers_is_limited(
    x: Array, connect: Callable[[Handle], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 60.0)
    with export(x) as handle:
        waiting = [connect(handle) for _ in range(server.MOST_WAITING)]
        late = connect(handle)
        late.sendall(wire.encode(wire.request(handle.token)))
        message, fd = wire.receive(late, 10)
        assert ended(waiting[0]), "the one that has waited longest makes room"
        assert len(server.current()._waiting) < server.MOST_WAITING
        assert fd is not None and message["shape"] == [3, 4]
        os.close(fd)
        assert handle.attached == 1
        late.sendall(b"more")
        assert ended(late), "it has its answer"
        within(10, lambda: handle.attached == 0)


def asked(connect: Callable[[Handle], socket.socket], handle: Handle) -> tuple[socket.socket, str]:
    """A connection with the right token, and what it was told: "" if it got the memory, else what is full."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = connect(handle)
            break
        except BlockingIOError:  # the queue of the listener is full
            assert time.monotonic() < deadline
            time.sleep(0.002)
    connection.sendall(wire.encode(wire.request(handle.token)))
    message, fd = wire.receive(connection, 10)
    if fd is not None:
        os.close(fd)
    return connection, message.get("full", "")


def test_whoever_has_the_token_cannot_use_up_the_exporters_files(
    x: Array, connect: Callable[[Handle], socket.socket], start: Start
) -> None:
    """500 connections with a valid token: 128 hold it, the others are told so, and their files are free again."""
    with export(x) as handle:
        before = open_files()
        held = []
        for _ in range(500):
            connection, full = asked(connect, handle)
            assert full in ("", wire.EXPORT) and (full == "") == (len(held) < server.MOST_PEERS)
            if full:
                assert ended(connection), "it is refused"
                connection.close()
            else:
                held.append(connection)
        within(10, lambda: open_files() == before + 2 * server.MOST_PEERS)
        assert len(held) == server.MOST_PEERS == 128
        child = start(
            "for _ in range(2):\n"
            "  try: y = exchange.attach(sys.argv[1], 'cupy'); say('attached')\n"
            "  except exchange.CannotShare as error: say(str(error))\n"
            "  wait()",
            str(handle),
        )
        said = child.says()
        assert "128 connections hold this export already, the most that one may have" in said
        assert "delete the arrays that processes have attached" in said and "export the array once more" in said
        other = export(x)
        assert asked(connect, other)[1] == "", "another export is not full"
        other.close()
        held.pop().close()
        within(10, lambda: len(server.current().find(handle.token).peers) < 128)  # type: ignore[union-attr]
        child.go()
        assert child.says() == "attached", "the place of one that has gone is free"


def test_all_exports_together_leave_the_program_its_files(
    connect: Callable[[Handle], socket.socket], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (90, hard))
    assert server.process_connection_limit() == 22
    handles = [export(Array(numpy.full(5, number, "f4"))) for number in range(5)]
    told = [asked(connect, handles[number % 5])[1] for number in range(60)]
    assert told == [""] * 22 + [wire.PROCESS] * 38
    child = start(
        "try: exchange.attach(sys.argv[1], 'cupy')\nexcept exchange.CannotShare as error: say(str(error))",
        str(handles[0]),
    )
    said = child.says()
    assert "22 connections hold exports of that process already, a quarter of the files that it may open" in said
    assert "raise `ulimit -n` where that process is started" in said
    handles[0].close()  # those who hold it keep the memory, and this process keeps no connection for them
    within(10, lambda: asked(connect, handles[1])[1] == "")
    for handle in handles:
        handle.close()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, hard))
    assert server.process_connection_limit() == wire.MOST_HOLDERS


def test_hundreds_of_half_open_connections_keep_nobody_out_and_go_by_themselves(
    x: Array, connect: Callable[[Handle], socket.socket], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 that send nothing, a byte, or their request byte by byte, while others attach."""
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 2.0)
    with export(x) as handle:
        before = open_files()
        request, taken = wire.encode(wire.request(handle.token)), 0
        half: list[socket.socket] = []
        for number in range(300):
            with contextlib.suppress(BlockingIOError):
                half.append(connect(handle))
                with contextlib.suppress(BrokenPipeError):
                    half[-1].send(request[: number % len(request)] or b"")
            if number % 30 == 0:
                connection, full = asked(connect, handle)
                taken += full == ""
                connection.close()
            assert len(server.current()._waiting) <= server.MOST_WAITING
        assert taken == 10
        assert start(HOLD, str(handle)).says()[0] == [0, 1, 2, 3]
        within(10, lambda: not server.current()._waiting, "their time was up")
        for connection in half:
            connection.close()
        within(10, lambda: handle.attached <= 1 and open_files() <= before + 2)  # type: ignore[operator]


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"shape": [1 << 40, 4]}, "do not lie in memory"),
    ({"offset": PIECE - 16}, "do not lie in memory"),
    ({"strides": [-4, 1]}, "do not lie in memory"),
    ({"kind": "block", "handle": "00" * 64}, "the memory did not come"),
    ({"kind": "nothing"}, "its size contradicts"),
    ({"dtype": "object"}, "its dtype is unknown"),
    ({"memguard": 3}, "not a description"),
    ({"full": "export", "limit": 3}, "it is not a refusal"),
]


@pytest.mark.parametrize(("change", "reason"), HOSTILE, ids=[str(change) for change, _ in HOSTILE])
def test_an_exporters_answer_is_checked(
    change: dict[str, Any], reason: str, doors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = wire.Description("file", UUID, (3, 4), (4, 1), "float32", size=PIECE).message()
    true = wire.peer
    monkeypatch.setattr(wire, "peer", lambda connection: true(connection)._replace(pid=1))
    path = doors / "hostile"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, open(os.memfd_create("gpu"), "wb") as file:
                file.truncate(PIECE)
                connection.recv(1000)
                wire.send(connection, {**good, **change}, file.fileno())

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CannotShare, match=f"is not valid: .*{reason}"):
            attach(Handle(str(path), "0" * 32, UUID, (3, 4), "float32"), "cupy")
        thread.join()
    path.unlink()
    assert not sharing_doors.mapped


def test_attach_gives_up_on_an_exporter_that_does_not_answer(doors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = wire.peer
    monkeypatch.setattr(wire, "peer", lambda connection: true(connection)._replace(pid=1))
    monkeypatch.setattr(sharing, "ANSWER_TIMEOUT", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(doors / "stopped"))
        listener.listen()
        stopped = Handle(str(doors / "stopped"), "0" * 32, UUID, (3, 4), "float32")
        with pytest.raises(CannotShare, match=r"did not answer within 0\.1 s"):
            attach(stopped, "cupy")
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            for connection in waiting:
                connection.setblocking(False)
                connection.connect(stopped.path)
        with pytest.raises(CannotShare, match=r"did not answer within 0\.1 s"):  # its queue is full
            attach(stopped, "cupy")
        for connection in waiting:
            connection.close()
    (doors / "stopped").unlink()


def test_a_forked_child_neither_serves_nor_closes_its_parents_exports(x: Array, start: Start, doors: Path) -> None:
    before = descriptors()
    with export(x) as handle:
        holder = start(HOLD + "wait()", str(handle))
        holder.says()
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reader)
                found = [handle.attached, dict(lifetimes.held_for_processes), descriptors(), serving()]
                handle.close()
                with export(x) as own:
                    found += [own.attached, lifetimes.held_for_processes[0], own.path != handle.path]
                os.write(writer, json.dumps(found).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as pipe:
            found = json.loads(pipe.read())
        os.waitpid(child, 0)
        assert found == [None, {}, before, False, 0, PIECE, True]
        assert handle.attached == 1 and lifetimes.held_for_processes == {0: PIECE} and Path(handle.path).exists()
        assert start(HOLD, str(handle)).says()[0] == [0, 1, 2, 3]


def descriptors() -> list[str]:
    """This process's open sockets and pieces of memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(name for name in found if name.startswith(("socket:", "/memfd:")))


def test_a_fork_of_a_process_that_attached_holds_nothing(x: Array, start: Start) -> None:
    with export(x) as handle:
        child = start(
            HOLD + "import os\npid = os.fork()\nif not pid:\n  del y; time.sleep(30); os._exit(0)\n"
            "say(pid); wait(); y = None; wait()",
            str(handle),
        )
        child.says()
        pid = child.says()
        try:
            time.sleep(0.1)
            assert handle.attached == 1, "the fork released nothing"
            child.kill()
            within(10, lambda: handle.attached == 0, "the fork kept the connection")
        finally:
            os.kill(pid, signal.SIGKILL)


def test_many_exports_and_attachments_leave_nothing(start: Start) -> None:
    child = start(
        "import os, gc\nfor line in sys.stdin:\n"
        "  y = exchange.attach(line.strip(), 'cupy'); total = y.values.sum().item()\n"
        "  y = None; say(total)\n"
        "import threading\ngc.collect(); unmapped(); until = time.monotonic() + 20\n"
        "while threading.active_count() > 1 and time.monotonic() < until: time.sleep(0.01)\n"
        "say([sharing_doors.mapped, [t.name for t in threading.enumerate()], len(os.listdir('/proc/self/fd'))])\n"
        "wait()"
    )
    assert child.process.stdin is not None
    for number in range(100):
        with export(Array(numpy.full(5, number, "f4"))) as handle:
            child.process.stdin.write(f"{handle}\n")
            child.process.stdin.flush()
            assert child.says() == 5 * number
    child.process.stdin.close()
    mapped, threads, files = child.says()
    assert mapped == [] and threads == ["MainThread"] and files <= 4


def test_threads_export_and_close_at_once(start: Start) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                with export(Array(numpy.full(5, number, "f4"))) as handle:
                    assert handle.attached == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_destructor_may_close_a_handle_in_the_middle_of_anything(x: Array) -> None:
    handle = export(x)
    with server.current()._lock:
        handle.close()
    assert not lifetimes.held_for_processes


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Array]]:
    """An array of `nbytes` in a block of `size`, which a file with a path of at most 64 bytes stands for."""
    folder = tempfile.TemporaryDirectory(dir="/tmp")

    def make(nbytes: int, size: int, *, at: int = 0, base: int = 1 << 40, handle: bool = True) -> Array:
        path = Path(folder.name, "b")
        path.write_bytes(b"\0" * size)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        whole = numpy.frombuffer(memory, "u1")
        found = Array(whole[at : at + nbytes].view("f4"))
        start = found.values.ctypes.data - at
        text = str(path).encode().ljust(64, b"\0") if handle else None
        assert text is None or len(text) == 64
        monkeypatch.setattr(sharing_doors, "blocks", [(start, size, text)])
        monkeypatch.setattr(sharing.shared_memory, "PAGE", 4096 if base else 1 << 60)
        return found

    with folder:
        yield make


def test_an_array_that_fills_its_block_is_shared_without_a_copy(start: Start, block: Callable[..., Array]) -> None:
    x: Array | None = block(PIECE - 16, PIECE)
    assert x is not None
    alive = weakref.ref(x)
    x.values[:2] = 5, 7
    handle = export(x, copy=False)
    assert not lifetimes.held_for_processes and lifetimes.lent() == {
        0: {"sharing_doors": {"another process": PIECE - 16}}
    }
    child = start(
        "y = exchange.attach(sys.argv[1], 'cupy')\nsay(y.values[:2].tolist()); wait(); say(y.values[0].item())\nwait()",
        str(handle),
    )
    assert child.says() == [5, 7]
    x.values[0] = 9
    child.go()
    assert child.says() == 9, "it is the same memory"
    handle.close()
    assert handle.attached == 1 and lifetimes.lent(), "it lives until the other process is done with it"
    refused = "try: exchange.attach(sys.argv[1], 'cupy')\nexcept exchange.CannotShare as error: say(str(error))"
    with export(Array(numpy.ones(3, "f4"))) as other:
        again = Handle(other.path, handle.token, handle.uuid, handle.shape, handle.dtype)
        assert "the export is gone" in start(refused, str(again)).says()
    assert "the export is gone" in start(refused, str(handle)).says()
    x = None
    assert alive() is not None
    child.kill()
    within(10, lambda: not lifetimes.lent() and alive() is None)
    assert handle.attached is None


def test_a_block_that_nobody_attached_is_released_at_once(block: Callable[..., Array]) -> None:
    x = block(PIECE, PIECE)
    alive = weakref.ref(x)
    handle = export(x, copy=False)
    del x
    assert alive() is not None
    handle.close()
    assert not lifetimes.lent() and alive() is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nbytes": PIECE, "size": 10 * PIECE}, r"it lies in a block of 20\.0 MiB with other arrays; an IPC handle"),
        ({"nbytes": PIECE, "size": 2 * PIECE, "at": PIECE}, r"it lies in a block of 4\.0 MiB with other arrays"),
        ({"nbytes": PIECE - 256, "size": PIECE}, "with other arrays"),
        ({"nbytes": PIECE - 64, "size": PIECE, "at": 64}, "with other arrays"),
        ({"nbytes": 1 << 20, "size": 1 << 20}, r"its block of 1\.0 MiB shares a page with others"),
        ({"nbytes": PIECE, "size": PIECE, "base": 0}, "shares a page with others"),
        ({"nbytes": PIECE, "size": PIECE, "handle": False}, "the driver gives no IPC handle"),
    ],
)
def test_a_block_with_other_arrays_is_not_shared(
    options: dict[str, Any], reason: str, block: Callable[..., Array]
) -> None:
    with pytest.raises(CannotShare, match=reason) as caught:
        export(block(**options), copy=False)
    assert caught.value.remedy == "copy=True" and not lifetimes.lent() and not serving()


def test_handing_over_within_a_process_imports_no_sockets() -> None:
    code = (
        "import sys, memguard.exchange as exchange\nexchange.to\n"
        "late = ['memguard.exchange.ipc.' + name for name in ('sharing', 'server', 'wire')]\n"
        "assert not set(late) & set(sys.modules)\n"
        "assert 'socket' not in sys.modules\nexchange.export\nassert 'memguard.exchange.ipc.sharing' in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(sharing_doors.ROOT)}
    )


def test_the_public_names() -> None:
    assert {"Handle", "attach", "export"} < set(exchange.__all__) and all(
        hasattr(exchange, n) for n in exchange.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        exchange.exprot  # type: ignore[attr-defined]  # noqa: B018
