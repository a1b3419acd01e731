"""A Jupyter kernel that leaves its (simulated) GPU when it is idle, and is back before the next cell runs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import environ
from notebooks import Notebook, error, kernel, text

BUDGET = """version: 1
device: {limit: 40GiB}
frameworks:
  torch: {limit: 10GiB}
"""
SETUP = """
import os, signal, threading, time
import memguard
from memguard import api
from memguard._devices import suspension
from memguard._node.suspend import self_suspend; from memguard._node.suspend.triggers import progress, when_idle
ways, made = [], self_suspend.chosen_way
def chosen():
    ways.append(made())
    open(f"leaves-{len(ways)}", "w").close()
    return ways[-1]
self_suspend.chosen_way = chosen
waits = threading.Event()
def shown(line, wait, before=progress.Line.show):
    before(line, wait)
    waits.set()
progress.Line.show = shown
def others(size):
    driver = ways[-1].driver
    driver.others = dict.fromkeys(driver.others, size)
def once_it_waits(do):
    waits.clear()
    threading.Thread(target=lambda: (waits.wait(30), time.sleep(0.1), do()), daemon=True).start()
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
api.current().frameworks["torch"].allocate(5 << 30)
"""


def leaves(folder: Path, times: int = 1) -> None:
    """Wait until the kernel in the folder leaves its GPU for that time. A cell that asked would keep it busy."""
    until = time.monotonic() + 30
    while not (folder / f"leaves-{times}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Notebook]:
    (folder / "budget.yaml").write_text(BUDGET)
    with kernel(folder, MEMGUARD_CONFIG="budget.yaml", MEMGUARD_SIMULATE="h200") as started:
        started.run("%load_ext memguard", *SETUP.splitlines())
        yield started


@pytest.fixture
def nb(shared: Notebook) -> Iterator[Notebook]:
    yield shared
    shared.run("%memguard suspend --when-idle never", "%memguard resume")


def test_the_next_cell_brings_the_process_back_before_it_runs(nb: Notebook) -> None:
    said = r"suspended in .*: 5\.\d+ GiB left GPU.*; the next cell brings it back"
    assert re.match(said, nb.text("%memguard suspend"))
    shown = nb.text("print(suspension.now, ways[-1].driver.targets[os.getpid()].state.name)")
    assert "None RUNNING" in shown and "back on the GPUs in" in shown


def test_magics_alone_do_not_bring_it_back(nb: Notebook) -> None:
    nb.run("%memguard suspend")
    assert "suspended, 5" in nb.text("%memguard")
    assert "suspended, 5" in nb.text("%memguard")
    assert "back on the GPUs: 5" in nb.text("%memguard resume")
    assert "this process is on its GPUs" in nb.text("%memguard resume")


def test_idle_and_back(nb: Notebook, folder: Path) -> None:
    before = int(nb.text("%memguard suspend --when-idle 1s", "print(len(ways))").splitlines()[-1])
    leaves(folder, before + 1)
    shown = nb.text("print(suspension.now, ways[-1].driver.targets[os.getpid()].calls)")
    assert shown.endswith("None ['lock', 'checkpoint', 'restore', 'unlock']\n")
    leaves(folder, before + 2)  # idle again
    assert "suspended, 5" in nb.text("%memguard")


def test_a_cell_that_awaits_is_no_idleness(nb: Notebook) -> None:
    nb.run("%memguard suspend --when-idle 1s", "before, end = len(ways), time.monotonic() + 2.5")
    assert nb.text("import asyncio", "await asyncio.sleep(2.5)", "print(len(ways) - before)") == "0\n"
    nb.run("%memguard suspend --when-idle never")


def test_completion_and_inspection_do_not_bring_it_back(nb: Notebook) -> None:
    nb.run("%memguard suspend")
    client = nb._client.kc
    assert client is not None
    client.complete("memguard.led", 12)  # answered in this order, before the next cell
    client.inspect("memguard", 8)
    client.is_complete("1 + 1")
    client.kernel_info()
    assert "suspended, 5" in nb.text("%memguard")


def test_a_cell_waits_for_room_and_says_who_has_it(nb: Notebook) -> None:
    nb.run("once_it_waits(lambda: others(0))", "%memguard suspend", "others(136 << 30)")
    said = nb.text("print('ran', suspension.now)")
    assert re.search(r"back on the GPUs in .*: 5\.\d+ GiB", said) and said.endswith("ran None\n")


def test_an_interrupted_wait_leaves_it_suspended_and_the_cell_does_not_run(nb: Notebook, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    then = "once_it_waits(lambda: (interrupt(), once_it_waits(lambda: others(0))))"
    nb.run(then, "%memguard suspend", "others(136 << 30)")
    outputs = nb.fails(f"open({str(file)!r}, 'w')")
    assert re.search(r"waits for room on GPU-0000.* \[#*-+\] .* of 5\.\d+ GiB free", text(outputs))
    assert "interrupted; the process stays suspended, 5." in error(outputs) and "fix: run a cell" in error(outputs)
    assert "Traceback" not in error(outputs) and not file.exists()
    assert "suspended, 5." in nb.text("%memguard")
    assert "back on the GPUs" in nb.text(f"open({str(file)!r}, 'w').close()")
    assert file.exists()


def test_a_kernel_below_memguard_run_is_watched_without_the_extension(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text(BUDGET)
    given = {"MEMGUARD_CONFIG": "budget.yaml", "MEMGUARD_SIMULATE": "h200", "MEMGUARD_WHEN_IDLE": "1s"}
    with kernel(tmp_path, **given) as nb:
        nb.run(*SETUP.splitlines())
        leaves(tmp_path)
        shown = nb.text("print(len(ways), suspension.now, when_idle.seconds())")
        assert "back on the GPUs in" in shown and "1 None 1.0" in shown


def test_a_kernel_under_a_budget_with_when_idle_is_watched_until_the_budget_ends(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text(BUDGET + "suspend: {when_idle: 1s}\n")
    with kernel(tmp_path, MEMGUARD_CONFIG="budget.yaml", MEMGUARD_SIMULATE="h200") as nb:
        nb.run(*SETUP.splitlines())
        leaves(tmp_path)
        assert "1 None 1.0" in nb.text("print(len(ways), suspension.now, when_idle.seconds())")
        assert "None False" in nb.text("memguard.shutdown()", "print(when_idle.seconds(), when_idle.alive())")


def test_without_a_budget_a_kernel_is_watched_from_its_first_framework_on_and_a_script_is_not(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").touch()
    see = "import cupy, sys; print('memguard' in sys.modules)"
    with kernel(tmp_path, MEMGUARD_WHEN_IDLE="1s") as nb:
        assert nb.text("import sys; print('memguard' in sys.modules)") == "False\n"
        assert (
            nb.text(see, "from memguard._node.suspend.triggers import when_idle", "print(when_idle.seconds())")
            == "True\n1.0\n"
        )
        time.sleep(1.5)  # without CUDA there is nothing to leave, and nothing is said
        assert nb.text("from memguard._devices import suspension; print(suspension.now)") == "None\n"
    script = subprocess.run(
        [tmp_path / "python" / "bin" / "python", "-c", see],
        env=environ(MEMGUARD_WHEN_IDLE="1s"), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (script.stdout, script.stderr) == ("False\n", "")
