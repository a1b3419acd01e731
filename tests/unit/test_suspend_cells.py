"""What IPython's shell does with cells while the process is off its GPUs. The shell is real, the suspension is not."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from memguard._base.units import GIB
from memguard._devices import suspension
from memguard._devices.suspension import Off
from memguard._node.suspend import self_suspend
from memguard._node.suspend.triggers import notebook_cells, when_idle
from memguard._node.suspend.triggers.notebook_cells import Cells, is_magic_only
from memguard._node.suspend.types import Wait
from memguard.errors import CannotResume

WAIT = Wait("GPU-0", 4 * GIB, GIB, 2, ("alice 44.0 GiB", "bob 1.0 GiB"), 12.3)


class Process:
    """This process, off its GPUs from `leave` to `resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed = 0
        self.resume: Callable[[Any], None] = lambda progress: None
        monkeypatch.setattr(self_suspend, "resume", self._resume)
        monkeypatch.setattr(self_suspend, "current", lambda: object())
        monkeypatch.setattr(suspension, "now", None)

    def leave(self) -> None:
        suspension.now = Off({"GPU-0": 4 * GIB}, time.time())

    def _resume(self, timeout: None, progress: Any) -> None:
        self.resumed += 1
        self.resume(progress)
        suspension.now = None


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.fixture
def shell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config, user_module=ModuleType("cells_of_a_test"))
    made.ran = []
    made.user_ns["ran"] = made.ran
    made.register_magic_function(lambda line: made.ran.append(f"magic {line}"), "line", "memguard")
    yield made
    notebook_cells.detach(made)


def test_a_cell_runs_once_the_process_is_back(process: Process, shell: Any) -> None:
    notebook_cells.attach(shell)
    shell.run_cell("ran.append(1)")
    assert process.resumed == 0
    process.leave()
    assert shell.run_cell("ran.append(2)").success
    assert (process.resumed, shell.ran) == (1, [1, 2])


def test_a_refused_cell_does_not_run_and_the_next_one_tries_again(
    process: Process, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook_cells.attach(shell)
    process.leave()

    def refuse(progress: Any) -> None:
        raise CannotResume("process 7: the GPU is gone", fix="reset it")

    process.resume = refuse
    for n in (1, 2):
        result = shell.run_cell("ran.append(1)")
        assert not result.success and isinstance(result.error_before_exec, notebook_cells.NotRun)
        said = capsys.readouterr()
        assert "memguard: this cell did not run: process 7: the GPU is gone\n    fix: reset it" in said.out + said.err
        assert "Traceback" not in said.out + said.err
        assert (process.resumed, shell.ran) == (n, [])
    process.resume = lambda progress: None
    assert shell.run_cell("ran.append(1)").success and shell.ran == [1]


@pytest.mark.parametrize("when", ["waiting", "back already"])
def test_an_interruption_is_an_error_of_the_cell(process: Process, shell: Any, when: str) -> None:
    notebook_cells.attach(shell)
    process.leave()

    def interrupted(progress: Any) -> None:
        if when == "back already":
            suspension.now = None
        signal.raise_signal(signal.SIGINT)

    process.resume = interrupted
    error = shell.run_cell("ran.append(1)").error_before_exec
    assert shell.ran == [] and isinstance(error, notebook_cells.NotRun)
    says = "stays suspended, 4.00 GiB in host memory, whole" if when == "waiting" else "the process is on its GPUs"
    assert says in str(error) and "fix: run " in str(error)
    assert ("; %memguard shows who" in str(error)) is (when == "waiting")


def test_without_our_magic_the_fix_names_the_command(process: Process, shell: Any) -> None:
    del shell.magics_manager.magics["line"]["memguard"]
    notebook_cells.attach(shell)
    process.leave()

    def interrupted(progress: Any) -> None:
        raise KeyboardInterrupt

    process.resume = interrupted
    assert "; `memguard ps` in a shell shows who" in str(shell.run_cell("1").error_before_exec)


def test_ipykernel_transforms_a_refused_cell_twice_and_waits_once(process: Process, shell: Any) -> None:
    """It calls `transform_cell`, and after an error `run_cell`, which calls it again."""
    notebook_cells.attach(shell)
    process.leave()

    def interrupted(progress: Any) -> None:
        raise KeyboardInterrupt

    process.resume = interrupted
    with pytest.raises(notebook_cells.NotRun):
        shell.transform_cell("ran.append(1)")
    assert not shell.run_cell("ran.append(1)").success
    assert process.resumed == 1
    assert not shell.run_cell("ran.append(1)").success  # another try
    assert process.resumed == 2 and shell.ran == []


@pytest.mark.parametrize(
    "cell", ["%memguard", "%memguard resume", "%memguard\n%memguard plan\n", "memguard resume", ""]
)
def test_magics_of_ours_alone_run_while_it_is_suspended(process: Process, shell: Any, cell: str) -> None:
    notebook_cells.attach(shell)
    process.leave()
    assert shell.run_cell(cell).success
    assert process.resumed == 0 and len(shell.ran) == cell.count("memguard")


@pytest.mark.parametrize("cell", ["%memguard\nran.append(1)", "x = %memguard", "%time ran.append(1)", "ran"])
def test_anything_else_brings_it_back(process: Process, shell: Any, cell: str) -> None:
    notebook_cells.attach(shell)
    process.leave()
    shell.run_cell(cell)
    assert process.resumed == 1


def test_what_is_a_magic_of_ours() -> None:
    assert is_magic_only("get_ipython().run_line_magic('memguard', 'resume')\n")
    for other in ("", "# nothing", "1 +", "get_ipython().run_line_magic('time', 'x')", "a\0b", "memguard"):
        assert not is_magic_only(other)


def test_looking_is_not_running(process: Process, shell: Any) -> None:
    notebook_cells.attach(shell)
    process.leave()
    with provisionalcompleter():
        assert "append" in [one.text.rpartition(".")[2] for one in shell.Completer.completions("ran.app", 7)]
    assert "list" in shell.object_inspect_text("ran")
    assert shell.input_transformer_manager.check_complete("if True:")[0] == "incomplete"
    assert shell.check_complete("1 + 1")[0] == "complete"
    assert process.resumed == 0


def test_which_cells_run(process: Process, shell: Any) -> None:
    found = notebook_cells.attach(shell)
    shell.user_ns["found"] = found
    found.ran()
    assert not found.running and not found.ran()
    shell.run_cell("ran.append(found.running); get_ipython().run_cell(''); ran.append(found.running)")
    shell.run_cell("get_ipython().run_cell('ran.append(found.running)'); ran.append(found.running); 1 / 0")
    shell.run_cell("1 +")
    shell.run_cell("ran.append(found.running)", silent=True)
    assert shell.ran == [True] * 5 and not found.running
    assert found.ran() and not found.ran()


def test_a_cell_that_awaits_runs(process: Process, shell: Any) -> None:
    found = notebook_cells.attach(shell)
    seen = []

    async def main() -> None:
        begun = asyncio.Event()
        shell.user_ns["begun"] = begun
        code = "import asyncio\nbegun.set()\nawait asyncio.sleep(0.05)"
        task = asyncio.ensure_future(shell.run_cell_async(code, transformed_cell=code))
        await begun.wait()
        seen.append(found.running)
        assert (await task).success
        shell.events.trigger("post_execute")  # as ipykernel does

    asyncio.run(main())
    assert seen == [True] and not found.running


def test_a_cell_that_attaches_is_counted(process: Process, shell: Any) -> None:
    shell.user_ns["attach"] = lambda: notebook_cells.attach(shell)
    shell.run_cell("found = attach(); ran.append(found.running)")
    assert shell.ran == [True] and not shell.user_ns["found"].running


def test_none_begins_while_the_process_leaves(process: Process, shell: Any) -> None:
    found = notebook_cells.attach(shell)
    found.ran()
    begun, done = threading.Event(), threading.Event()

    def leave() -> None:
        with found.none() as free:
            assert free
            begun.set()
            time.sleep(0.2)
            process.leave()
        done.set()

    thread = threading.Thread(target=leave)
    thread.start()
    begun.wait(5)
    assert not done.is_set()
    shell.run_cell("ran.append(1)")
    assert done.is_set() and process.resumed >= 1 and suspension.now is None and shell.ran == [1]
    thread.join(5)
    with found.none() as free:
        assert not free  # a cell has run since it was asked last


def test_it_does_not_leave_while_a_cell_runs(process: Process, shell: Any) -> None:
    found = notebook_cells.attach(shell)

    def try_to_leave() -> bool:
        found.ran()
        with found.none() as free:
            return free

    shell.user_ns["leave"] = try_to_leave
    shell.run_cell("ran.append(leave())")
    assert shell.ran == [False] and try_to_leave()


def test_who_raises_and_who_waits(process: Process, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notebook_cells.owner() is None
    monkeypatch.setattr(notebook_cells, "shell_here", lambda: shell)
    main, seen = threading.main_thread().ident, []
    assert notebook_cells.owner() == main and isinstance(notebook_cells.of(shell), Cells)

    def beside() -> None:
        thread = threading.Thread(target=lambda: seen.append(notebook_cells.owner()))
        thread.start()
        thread.join()

    beside()
    shell.user_ns["beside"] = beside
    shell.run_cell("beside()")
    assert seen == [main, None]


def test_it_is_attached_once_and_detached_wholly(process: Process, shell: Any) -> None:
    before = {name: [*shell.events.callbacks[name]] for name in ("pre_execute", "post_execute")}
    others = [*shell.input_transformers_post]
    first = notebook_cells.attach(shell)
    assert notebook_cells.attach(shell) is first and len(shell.input_transformers_post) == len(others) + 1
    notebook_cells.detach(shell)
    assert shell.input_transformers_post == others and notebook_cells.of(shell) is None
    assert {name: [*shell.events.callbacks[name]] for name in before} == before


def test_what_brings_it_back_stays_while_it_is_off(process: Process, shell: Any) -> None:
    notebook_cells.attach(shell)
    process.leave()
    when_idle.let_go(shell)
    assert notebook_cells.of(shell) is not None
    suspension.now = None
    when_idle.let_go(shell)
    assert notebook_cells.of(shell) is None


def test_the_line_says_who_has_the_memory(
    process: Process, shell: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    notebook_cells.attach(shell)
    process.leave()
    process.resume = lambda progress: progress(WAIT)
    shell.run_cell("ran.append(1)")
    said = capsys.readouterr().err
    assert "\r" not in said.split("waits")[0] and said.count("waits for room") == 1
    assert "[#####---------------] 1.00 GiB of 4.00 GiB free; 12 s, interrupt to stop waiting" in said
    assert "2 before this one; held by alice 44.0 GiB, bob 1.0 GiB" in said
    assert said.endswith(": 4.00 GiB\n") and "memguard: back on the GPUs in " in said


def test_a_narrow_terminal_cuts_the_line(
    process: Process, shell: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    notebook_cells.attach(shell)
    process.leave()
    process.resume = lambda progress: progress(WAIT)
    shell.run_cell("ran.append(1)")
    first = capsys.readouterr().err.split("\r")[0]
    assert len(first) == 59 and first.endswith("…")
