"""Room for a restore: the turn among processes, the placeholder, and the wait."""

# ruff: noqa: N802 (the driver's own names)

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from ctypes import c_uint64
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.units import GIB, GRANULE, MIB
from memguard._devices import libcuda, proc
from memguard._devices.checkpoint import MARGIN, MemoryPlaceholder, pieces
from memguard._node.identity import folder, this_process
from memguard._node.suspend.course import room
from memguard._node.suspend.driver.channel import Answer, Card
from memguard._node.suspend.store.tickets import Turn
from memguard._node.suspend.types import Wait
from memguard.errors import DeviceError, MemguardError

GPU, OTHER = "GPU-a", "GPU-b"


# the turn


def test_first_come_first_served(tmp_path: Any) -> None:
    with Turn([GPU], str(tmp_path)) as first, Turn([GPU], str(tmp_path)) as second, Turn([GPU], str(tmp_path)) as third:
        assert first.ahead() == {}
        assert second.ahead() == {GPU: (os.getpid(),)}
        assert third.ahead() == {GPU: (os.getpid(),) * 2}
        second.__exit__()
        assert third.ahead() == {GPU: (os.getpid(),)}
        first.__exit__()
        assert third.ahead() == {}


def test_each_gpu_has_its_own_turn(tmp_path: Any) -> None:
    with Turn([GPU], str(tmp_path)), Turn([GPU, OTHER], str(tmp_path)) as both, Turn([OTHER], str(tmp_path)) as last:
        assert both.ahead() == {GPU: (os.getpid(),)}
        assert last.ahead() == {OTHER: (os.getpid(),)}


def test_who_died_is_not_waited_for(tmp_path: Any) -> None:
    code = (
        f"import sys; from memguard._node.suspend.store.tickets import Turn; "
        f"t = Turn([{GPU!r}], {str(tmp_path)!r}).__enter__(); "
        "print('there', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"there\n"
    with Turn([GPU], str(tmp_path)) as turn:
        assert turn.ahead() == {GPU: (child.pid,)}
        child.kill()
        child.communicate()
        assert turn.ahead() == {}


def test_the_folder_is_this_users_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert folder() == str(tmp_path / "memguard") == folder()
    assert os.stat(folder()).st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "memguard", 0o755)
    with pytest.raises(MemguardError, match="only this user can enter"):
        folder()
    os.rmdir(tmp_path / "memguard")
    os.symlink("/tmp", tmp_path / "memguard")
    with pytest.raises(MemguardError, match="fix: remove it"):
        folder()


# how much to hold


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 5))
def test_what_is_let_go_suffices(wanted: int, free: int, context: int) -> None:
    found = pieces(wanted * GRANULE, free * GRANULE, context * GRANULE)
    if found is None:
        assert free + context < wanted
        return
    size, stays = found
    assert size <= free * GRANULE, "no more is allocated than there is"
    assert size + (0 if stays else context * GRANULE) >= wanted * GRANULE
    assert stays is (free >= wanted)


class _Cuda:
    """libcuda of a process that holds nothing but what it allocates here."""

    def __init__(self, free: int, context: int, largest: int = 1 << 60) -> None:
        self.free, self.context, self.largest = free, context, largest
        self.blocks: dict[int, int] = {}
        self.contexts = self.pushed = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        if self.free < self.context:
            return 2
        if not self.contexts:
            self.free -= self.context
        self.contexts += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.contexts -= 1
        self.free += 0 if self.contexts else self.context
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.pushed += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.pushed -= 1
        return 0

    def cuMemAlloc_v2(self, address: c_uint64, size: int) -> int:
        assert self.pushed == 1
        if size > min(self.free, self.largest):
            return 2
        address.value = 4096 * (len(self.blocks) + 1)
        self.blocks[address.value] = size
        self.free -= size
        return 0

    def cuMemFree_v2(self, address: int) -> int:
        assert self.pushed == 1
        self.free += self.blocks.pop(address)
        return 0


def _holder(monkeypatch: pytest.MonkeyPatch, cuda: _Cuda) -> MemoryPlaceholder:
    class Nvml:
        def memory(self, uuid: str) -> Any:
            return SimpleNamespace(free=cuda.free)

        def processes(self, uuid: str) -> dict[int, int]:
            return {os.getpid(): (cuda.context if cuda.contexts else 0) + sum(cuda.blocks.values())}

    monkeypatch.setattr(libcuda, "load", lambda: cuda)
    monkeypatch.setattr(libcuda, "device_uuid", lambda _, device: (GPU, OTHER)[device])
    monkeypatch.setattr("memguard._devices.nvml.Nvml", Nvml)
    return MemoryPlaceholder()


def test_the_context_stays_where_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=10 * GIB, context=GIB)
    held = _holder(monkeypatch, cuda)
    assert held.hold({GPU: 4 * GIB}) == {GPU: 4 * GIB + MARGIN}
    assert cuda.free == 5 * GIB - MARGIN
    held.release()
    assert (cuda.free, cuda.contexts, cuda.pushed) == (9 * GIB, 1, 0)


def test_the_context_goes_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=4 * GIB + MARGIN, context=GIB)
    held = _holder(monkeypatch, cuda)
    assert held.hold({GPU: 4 * GIB}) == {GPU: 4 * GIB + MARGIN}
    assert cuda.free == 0
    held.release()
    assert (cuda.free, cuda.contexts, cuda.pushed) == (4 * GIB + MARGIN, 0, 0)


@pytest.mark.parametrize(("free", "largest"), [(4 * GIB, 1 << 60), (MIB, 1 << 60), (10 * GIB, MIB)])
def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch, free: int, largest: int) -> None:
    cuda = _Cuda(free=free, context=GIB, largest=largest)
    held = _holder(monkeypatch, cuda)
    with pytest.raises(DeviceError, match="are needed, and"):
        held.hold({GPU: 4 * GIB})
    assert (cuda.free, cuda.contexts, cuda.blocks) == (free, 0, {})


def test_a_split_memory_is_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(free=10 * GIB, context=GIB, largest=GIB)
    held = _holder(monkeypatch, cuda)
    held.hold({GPU: 4 * GIB})
    assert sum(cuda.blocks.values()) == 4 * GIB + MARGIN
    held.hold({GPU: GIB})
    assert sum(cuda.blocks.values()) == GIB + MARGIN, "another request replaces it"


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="fix: resume where the process ran"):
        _holder(monkeypatch, _Cuda(GIB, 0)).hold({"GPU-c": MIB})


# the wait


class _Door:
    """A GPU whose free bytes change with each look."""

    def __init__(self, *free: int, holds: tuple[bool, ...] = ()) -> None:
        self.free, self.holds = list(free), list(holds)
        self.held: dict[str, int] = {}
        self.releases = 0

    def usage(self, limit: float = 20.0) -> dict[str, Card]:
        free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return {GPU: Card(80 * GIB, free, 80 * GIB - free, {1: 80 * GIB - free})}

    def hold(self, sizes: dict[str, int], limit: float = 60.0) -> Answer:
        if self.holds and not self.holds.pop(0):
            return Answer(None, trouble="room", text="GPU-a: a stranger was faster")
        self.held = dict(sizes)
        return Answer(0)

    def release(self, limit: float = 60.0) -> None:
        self.releases += 1
        self.held = {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room, "_EVERY", 0.001)
    with contextlib.ExitStack() as stack:
        yield stack.close()


def _wait(door: _Door, tmp_path: Any, **options: Any) -> tuple[str, list[Wait]]:
    seen: list[Wait] = []
    cancel = options.pop("cancel", None)
    waiting = room.Waiting(progress=seen.append, where=str(tmp_path), **options)
    with waiting(this_process(), {GPU: 8 * GIB}, door, cancel) as lacking:  # type: ignore[arg-type]
        assert bool(door.held) is (lacking is None)
    assert not door.held and door.releases == 1
    return "" if lacking is None else str(lacking), seen


@pytest.mark.usefixtures("quick")
def test_it_waits_until_there_is_room(tmp_path: Any) -> None:
    lacking, seen = _wait(_Door(GIB, GIB, 9 * GIB), tmp_path)
    assert lacking == ""
    assert [wait.free for wait in seen] == [GIB, GIB]
    assert seen[0].needs == 8 * GIB + MARGIN
    assert seen[0].holders[0].startswith("79.00 GiB"), "says who holds it"


@pytest.mark.usefixtures("quick")
def test_a_stranger_may_be_faster(tmp_path: Any) -> None:
    lacking, seen = _wait(_Door(9 * GIB, holds=(False, False, True)), tmp_path)
    assert lacking == ""
    assert len(seen) == 2


@pytest.mark.usefixtures("quick")
def test_what_is_free_and_never_to_be_had_ends_the_wait(tmp_path: Any) -> None:
    """A GPU in exclusive mode, a driver that fails: no stranger is faster for ever."""
    lacking, seen = _wait(_Door(9 * GIB, holds=(False,) * 100), tmp_path)
    assert lacking == "GPU-a: a stranger was faster" and len(seen) == 20
    often = (*(False,) * 19, True)
    assert _wait(_Door(*(9 * GIB,) * 19, GIB, 9 * GIB, holds=(False,) * 19 + often), tmp_path)[0] == ""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_the_wait_can_end_without_room(tmp_path: Any, how: str) -> None:
    cancel = threading.Event()
    if how == "cancel":
        cancel.set()
    lacking, _ = _wait(_Door(GIB), tmp_path, cancel=cancel, timeout=0.01 if how == "timeout" else None)
    assert lacking.startswith(f"{GPU} has 1.00 GiB free, and it needs 8.00 GiB")
    _, fix, held, *holders = lacking.splitlines()
    me = os.getpid()
    assert fix.startswith("    fix: end or suspend one of those below, or wait longer (`memguard resume")
    assert f"resume {me} --wait" in fix and held == f"    {GPU} is held by" and "(PID 1" in holders[0]


@pytest.mark.usefixtures("quick")
def test_who_came_first_is_waited_for(tmp_path: Any) -> None:
    with Turn([GPU], str(tmp_path)):
        lacking, seen = _wait(_Door(9 * GIB), tmp_path, timeout=0.01)
        head, fix = lacking.splitlines()
        assert head == f"{GPU}: process {os.getpid()} came before it and waits for its turn"
        assert fix.startswith("    fix: wait longer"), "nobody who holds the room is to be ended: there is enough"
        assert fix.endswith(f"; if process {os.getpid()} stands still, all behind it wait until it is ended")
        assert seen[0].ahead == 1
        with Turn([GPU], str(tmp_path)):
            lacking, _ = _wait(_Door(9 * GIB), tmp_path, timeout=0.01)
        assert f"2 came before it and wait for their turns (processes {os.getpid()}, {os.getpid()})" in lacking
    assert _wait(_Door(9 * GIB), tmp_path)[0] == ""


@pytest.mark.usefixtures("quick")
def test_who_came_first_may_be_of_another_container(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows no PID of it."""
    monkeypatch.setattr(Turn, "ahead", lambda self: {GPU: (0,)})
    lacking, _ = _wait(_Door(9 * GIB), tmp_path, timeout=0.01)
    assert "a process of another container came before it and waits for its turn" in lacking
    assert "; if a process of another container stands still, all behind it wait" in lacking


@pytest.mark.usefixtures("quick")
def test_who_came_first_and_is_stopped_keeps_nobody_waiting(tmp_path: Any) -> None:
    """`memguard resume PID`, and Ctrl-Z while it waits for room."""
    code = (
        f"import os, signal, sys; from memguard._node.suspend.store.tickets import Turn; "
        f"t = Turn([{GPU!r}], {str(tmp_path)!r}).__enter__(); print('there', flush=True); "
        "os.kill(os.getpid(), signal.SIGSTOP); print('goes on', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        os.waitpid(child.pid, os.WUNTRACED)
        lacking, seen = _wait(_Door(GIB, 9 * GIB), tmp_path, timeout=10.0)
        assert lacking == "" and [wait.ahead for wait in seen] == [0]
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == b"goes on\n"
        lacking, _ = _wait(_Door(9 * GIB), tmp_path, timeout=0.01)
        assert f"process {child.pid} came before it" in lacking, "its place is kept"
    finally:
        child.kill()
        child.communicate()


def test_a_gpu_that_is_gone_is_not_waited_for(tmp_path: Any) -> None:
    waiting = room.Waiting(where=str(tmp_path))
    with waiting(this_process(), {OTHER: GIB}, _Door(GIB), None) as lacking:  # type: ignore[arg-type]
        assert "is not here any more" in str(lacking)


def test_nobody_knows_what_it_needs(tmp_path: Any) -> None:
    """Then the GPU must have what the process holds in host memory."""
    waiting = room.Waiting(timeout=0.0, where=str(tmp_path))
    with waiting(this_process(), None, _Door(MIB), None) as lacking:  # type: ignore[arg-type]
        assert str(lacking).startswith(f"{GPU} has 1.0 MiB free")


# who


def test_who_holds_the_memory() -> None:
    lines = proc.holders({os.getpid(): GIB, 4_000_000: 3 * GIB}, used=6 * GIB)
    assert lines[0] == "3.00 GiB  a process (PID 4000000)"
    assert lines[1].startswith("1.00 GiB  ") and f"(PID {os.getpid()}, " in lines[1]
    assert lines[2].startswith("2.00 GiB  processes that are not listed")
    assert len(proc.holders({1: None}, used=6 * GIB)) == 1


def test_a_command_line_is_short_and_printable() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "a\nb\033[31m" + "x" * 200], stdin=-1
    )
    try:
        for _ in range(200):
            line = proc.command(child.pid)
            if "import sys" in line:
                break
        assert len(line) <= 60 and line.isprintable()
    finally:
        child.communicate()
    assert proc.command(2**30) == ""
