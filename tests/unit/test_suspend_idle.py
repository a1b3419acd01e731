"""When a process counts as idle, and what its watcher does about that."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._devices import suspension
from memguard._devices.suspension import Off
from memguard._node.suspend import self_suspend
from memguard._node.suspend.triggers import notebook_cells, when_idle
from memguard._node.suspend.triggers.idle import Look, Watcher, idle_for, patience
from memguard._node.suspend.triggers.when_idle import Usage, has_gpu
from memguard.errors import CannotSuspend, DeviceError, MemguardError

LOOKS = st.lists(
    st.builds(
        lambda step, cells, used, off: (step, cells, used, off),
        st.integers(0, 30),
        st.booleans(),
        st.sampled_from([None, False, True]),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=20,
).map(
    lambda seen: [
        Look(float(when), *rest)
        for when, rest in zip(itertools.accumulate(one[0] for one in seen), (one[1:] for one in seen), strict=True)
    ]
)


@given(LOOKS)
def test_idle_is_the_time_in_which_no_look_saw_anything(looks: list[Look]) -> None:
    idle = idle_for(looks)
    assert 0.0 <= idle <= (looks[-1].time - looks[0].time if looks else 0.0)
    if looks:
        began = looks[-1].time - idle
        assert not any(look.cells or look.used or look.off for look in looks if look.time > began)
        at = [look for look in looks if look.time == began]
        assert at[0] is looks[0] or any(look.cells or look.used or look.off for look in at)


@given(LOOKS)
def test_what_is_unknown_does_not_count_as_use(looks: list[Look]) -> None:
    assert idle_for(looks) == idle_for([look._replace(used=look.used or None) for look in looks])


def test_each_refusal_doubles_the_patience_up_to_an_hour() -> None:
    assert [patience(n) for n in range(9)] == [0, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert patience(10_000) == 3600


class World:
    """A clock, cells, a GPU, and what happens to a process that is to leave it."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.now, self.cell, self.busy = 0.0, False, False
        self.left, self.said = [0.0][:0], [""][:0]
        self.leave: Callable[[], bool] = lambda: True
        self.known = True
        self.watcher = Watcher(
            seconds,
            lambda: self.cell,
            lambda: self.busy if self.known else None,
            self._leave,
            self.said.append,
            lambda: self.now,
        )

    def _leave(self) -> bool:
        self.left.append(self.now)
        return self.leave()

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.watcher.look()


def refuse(*codes: str) -> Callable[[], bool]:
    def leave() -> bool:
        raise CannotSuspend([(code, f"because of {code}", "mend it") for code in codes])

    return leave


def test_it_leaves_after_that_long_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.passes(10)
    assert world.left == []
    world.passes(1)
    assert world.left == [11.0]
    monkeypatch.setattr(suspension, "now", Off({}, 0.0))
    world.passes(100)
    assert world.left == [11.0]  # never twice
    monkeypatch.setattr(suspension, "now", None)
    world.passes(9)
    assert world.left == [11.0]  # it counts from its return
    world.passes(1)
    assert world.left == [11.0, 121.0]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=60), st.integers(1, 12))
def test_it_never_leaves_while_anything_was_active_within_that_time(
    seen: list[tuple[bool, bool, bool]], seconds: int
) -> None:
    world = World(float(seconds))
    world.leave = lambda: False
    active = []
    for world.cell, world.busy, world.known in seen:
        world.passes(1)
        if world.cell or (world.busy and world.known):
            active.append(world.now)
    assert all(not any(when - seconds < one <= when for one in active) for when in world.left)
    assert all(when > seconds for when in world.left)


@pytest.mark.parametrize("what", ["cell", "busy"])
def test_a_cell_and_a_busy_gpu_keep_it(what: str) -> None:
    world = World()
    setattr(world, what, True)
    world.passes(50)
    assert world.left == []
    setattr(world, what, False)
    world.passes(10)
    assert world.left == [60.0]


def test_a_refusal_is_said_once_and_tried_again_later() -> None:
    world = World()
    world.leave = refuse("nccl", "host-memory")
    world.passes(10 + 1 + 60 + 120)
    assert world.left == [11.0, 71.0, 191.0]
    assert len(world.said) == 1
    assert "idle for 10 s, and stays on its GPUs: cannot suspend: because of nccl\n    fix: mend it" in world.said[0]
    world.leave = refuse("capture")  # another reason is news
    world.passes(240)
    assert world.left[3:] == [431.0] and len(world.said) == 2


def test_after_a_cell_the_reasons_may_have_changed() -> None:
    world = World()
    world.leave = refuse("nccl")
    world.passes(12)
    world.cell = True
    world.passes(1)
    world.cell, world.leave = False, lambda: True
    world.passes(10)
    assert world.left == [11.0, 23.0]


@pytest.mark.parametrize("error", [MemguardError("no helper"), RuntimeError("odd"), OSError(5, "disk")])
def test_any_other_failure_is_said_and_ends_nothing(error: Exception) -> None:
    world = World()

    def leave() -> bool:
        raise error

    world.leave = leave
    world.passes(100)
    assert world.left == [11.0, 71.0] and len(world.said) == 1 and str(error) in world.said[0]


def test_the_thread_ends_when_it_is_told_to() -> None:
    left = threading.Event()
    watcher = Watcher(0.05, lambda: False, lambda: None, lambda: bool(left.set()), print)
    watcher.start()
    thread = watcher._thread
    assert thread is not None and watcher.alive and thread.daemon
    assert left.wait(5)
    watcher.stop()
    thread.join(5)
    assert not thread.is_alive() and not watcher.alive


class FakeNvml:
    """GPUs by UUID: which processes are on it, and what NVML says of this one's use."""

    def __init__(self, **gpus: tuple[set[int], bool | None]) -> None:
        self.gpus, self.asked = gpus, [("", 0)][:0]
        self.lost = False

    def devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(uuid=uuid) for uuid in self.gpus]

    def processes(self, uuid: str) -> dict[int, int | None]:
        if self.lost:
            raise DeviceError("lost")
        return dict.fromkeys(self.gpus[uuid][0], 1)

    def used_since(self, uuid: str, pid: int, stamp: int) -> tuple[bool | None, int]:
        self.asked.append((uuid, stamp))
        return self.gpus[uuid][1], stamp + 100


ME = os.getpid()


@pytest.mark.parametrize(
    ("gpus", "answer"),
    [
        ({"a": ({ME, 1}, True), "b": ({ME}, False)}, True),
        ({"a": ({ME}, False), "b": ({1}, True)}, False),
        ({"a": ({ME}, False), "b": ({ME}, None)}, None),
        ({"a": ({ME}, None), "b": ({ME}, True)}, True),
        ({"a": ({1}, True)}, None),
        ({}, None),
    ],
    ids=["one of two", "others do not count", "unknown on one", "known is enough", "not named", "no GPU"],
)
def test_use_is_that_of_this_process_on_the_gpus_that_it_is_on(gpus: Any, answer: bool | None) -> None:
    assert Usage(FakeNvml(**gpus))() is answer  # type: ignore[arg-type]


def test_each_look_asks_for_what_came_after_the_one_before() -> None:
    nvml = FakeNvml(a=({ME}, False))
    usage = Usage(nvml)  # type: ignore[arg-type]
    assert [usage(), usage()] == [False, False] and nvml.asked == [("a", 0), ("a", 100)]
    nvml.lost = True
    assert usage() is None


def test_a_process_without_cuda_has_nothing_to_leave(tmp_path: Path) -> None:
    maps = tmp_path / "proc" / str(ME) / "maps"
    maps.parent.mkdir(parents=True)
    line = "7f00-7f01 rw-s 00000000 00:05 1 {}\n"
    maps.write_text(line.format("/usr/lib/libc.so.6"))
    assert not has_gpu(str(tmp_path))
    maps.write_text(line.format("/dev/nvidia-uvm"))
    assert has_gpu(str(tmp_path))


@pytest.fixture
def no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(when_idle, "shell_here", lambda: None)


def test_in_a_plain_script_when_idle_is_a_warning(no_shell: None, caplog: pytest.LogCaptureFixture) -> None:
    budget = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "suspend": {"when_idle": "10min"}}
    with caplog.at_level("WARNING", "memguard"), memguard.guard(budget, simulate="h200"):
        assert when_idle.seconds() is None
    (said,) = [one.getMessage() for one in caplog.records if "when_idle" in one.getMessage()]
    assert "nothing would bring it back" in said and "fix: " in said


def test_below_memguard_run_a_plain_script_hears_nothing(no_shell: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "memguard"):
        when_idle.of_environment("10min")
    assert when_idle.seconds() is None and caplog.records == []
    with pytest.raises(ValueError, match="is not between 1s and"):
        when_idle.of_environment("10ms")


@pytest.mark.parametrize("host_memory", ["check", "ignore"])
def test_what_the_budget_says_of_host_memory_goes_for_whoever_suspends(
    host_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(self_suspend, "suspend", lambda timeout, why, owner, ignored, **_: asked.append((why, ignored)))
    monkeypatch.setattr(notebook_cells, "owner", lambda: None)
    budget = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "suspend": {"host_memory": host_memory}}
    with memguard.guard(budget, simulate="h200"):
        memguard.suspend()
        memguard.suspend(host_memory="ignore")
        memguard.suspend(host_memory="check")
        shell = SimpleNamespace(input_transformers_post=[], events=SimpleNamespace(callbacks={}))
        assert when_idle._leave(notebook_cells.Cells(shell))
    ignored = host_memory == "ignore"
    assert asked == [("asked", ignored), ("asked", True), ("asked", False), ("idle", ignored)]


def test_a_forked_child_has_no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert notebook_cells.shell_here() is shell
    shell.kernel = SimpleNamespace(session=SimpleNamespace(pid=1))  # forked before memguard was imported
    assert notebook_cells.shell_here() is None
    shell.kernel = None
    pid = os.fork()
    if pid == 0:
        os._exit(0 if notebook_cells.shell_here() is None and not when_idle.alive() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_memguard_run_starts_shows_at_its_first_framework(
    no_shell: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("torch", "tensorflow", "cupy", "jax", "pycuda.driver", "numba.cuda"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "_memguard_child", ModuleType("_memguard_child"))
    before = [*sys.meta_path]
    when_idle.of_budget(600.0)
    assert caplog.records == []
    when_idle.end_of_budget()
    assert sys.meta_path == before
    when_idle.of_budget(600.0)
    begun = []
    monkeypatch.setattr(when_idle, "shell_here", lambda: "a shell")
    monkeypatch.setattr(when_idle, "begin", lambda *given: begun.append(given))
    importlib.import_module("cupy")
    assert begun == [(600.0, "a shell", "budget")] and caplog.records == [] and sys.meta_path == before
