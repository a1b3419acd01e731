"""With MEMGUARD_CONFIG a program does what it does without: its output, its exit code, its imports."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from environments import environ, make

from memguard._tools.activation import _memguard_environment as environment

BUDGET = "version: 1\nframeworks:\n  torch: {share: 50%}\n"
WARNS = BUDGET + "devices: {'A100*': {limit: 50%}}\n"  # names no GPU of this program: a warning is logged
PROGRAMS = {
    "imports": "import torch\nprint('done', torch.x)\n",
    "exits": "import sys, torch\nprint('done')\nsys.exit(3)\n",
}
STREAMS = {
    "none": "import sys\nsys.stderr = None\n",
    "without write": "import sys\nsys.stderr = object()\n",
    "raising": "import sys\nclass R:\n    def __getattr__(self, name): raise RuntimeError(name)\nsys.stderr = R()\n",
    "closed object": "import sys\nsys.stderr.close()\n",
    "ascii": "import io, sys\nsys.stderr = io.TextIOWrapper(io.BytesIO(), 'ascii', 'strict')\n",
    "bytes": "import io, sys\nsys.stderr = io.BytesIO()\n",
    "no descriptor": "import io, sys\nsys.stderr = sys.__stderr__ = io.StringIO()\n",
}
SHELLS = {"full": "2>/dev/full", "closed": "2>&-", "no streams": "2>&- <&-", "gone": "2> >(exec 0<&-; sleep 0.2)"}
STRAYS = {
    "memguard.py": "raise SystemExit('never imported')\n",
    "memguard/__init__.py": "",
    "memguard/readme.txt": "",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torch.py").write_text("x = 1\n")
    for name, text in (("good", BUDGET), ("warns", WARNS), ("broken", "frameworks: {torch: {shäre: 1%}}\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def run(python: Path, folder: Path, program: str, shell: str, config: str | None, **more: str) -> tuple[int, str, str]:
    (folder / "program.py").write_text(program)
    given = {"MEMGUARD_SIMULATE": "h200", **({} if config is None else {"MEMGUARD_CONFIG": config}), **more}
    done = subprocess.run(
        ["bash", "-c", f"exec {python} program.py {shell}"], cwd=folder, env=environ(**given), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("config", ["good.yaml", "warns.yaml", "broken.yaml", "missing.yaml"])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_stderr_that_takes_nothing(python: Path, folder: Path, shell: str, config: str) -> None:
    for program in PROGRAMS.values():
        plain = run(python, folder, program, SHELLS[shell], None)
        assert run(python, folder, program, SHELLS[shell], config)[:2] == plain[:2]
        assert plain[1].startswith("done")


@pytest.mark.parametrize("config", ["warns.yaml", "broken.yaml"])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_stderr_that_is_something_else(python: Path, folder: Path, stream: str, config: str) -> None:
    program = STREAMS[stream] + PROGRAMS["exits"]
    plain = run(python, folder, program, "", None)
    assert run(python, folder, program, "", config)[:2] == plain[:2]
    assert plain[1] == "done\n"


@pytest.mark.parametrize("stray", STRAYS)
def test_something_else_called_memguard_on_the_path(
    python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory, stray: str
) -> None:
    path = tmp_path_factory.mktemp("stray") / stray
    path.parent.mkdir(exist_ok=True)
    path.write_text(STRAYS[stray])
    top = path.parent.parent if "/" in stray else path.parent
    for program in PROGRAMS.values():
        plain = run(python, folder, program, "", None, PYTHONPATH=str(top))
        code, out, err = run(python, folder, program, "", "good.yaml", PYTHONPATH=str(top))
        assert (code, out) == plain[:2] and "Traceback" not in err and err.count("\n") <= 3, err


THREADS = """
import sys, threading, time
found, start = [], threading.Barrier(2)
def asks():
    start.wait()
    time.sleep({delay})
    import memguard
    try:
        found.append(bool(memguard.ledger().devices))
    except BaseException as error:
        found.append(repr(error))
thread = threading.Thread(target=asks)
thread.start()
start.wait()
import torch
thread.join(20)
print(found, thread.is_alive())
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_thread_that_asks_meanwhile_gets_the_budget(python: Path, folder: Path, delay: float) -> None:
    code, out, err = run(python, folder, THREADS.format(delay=delay), "", "good.yaml")
    assert (code, out) == (0, "[True] False\n"), err


def test_a_thread_within_an_import_that_the_activation_waits_for(python: Path, folder: Path) -> None:
    """It waits for the other thread, which waits for its import: not for ever."""
    (folder / "yaml.py").write_text(
        "import sys, time, memguard\ntime.sleep(0.5)\ntry:\n    memguard.ledger()\n"
        "except memguard.MemguardError as e:\n    print(type(e).__name__)\n"
    )
    program = (
        "import threading, time\nthread = threading.Thread(target=__import__, args=('yaml',))\nthread.start()\n"
        "time.sleep(0.2)\nimport torch\nthread.join(20)\nprint('done', thread.is_alive())\n"
    )
    code, out, err = run(python, folder, program, "", "good.yaml")
    assert (code, out.splitlines()[-1]) == (0, "done False"), (out, err)


def test_a_failure_is_said_whoevers_package_memguard_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("memguard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "memguard", types.ModuleType("memguard"))
    monkeypatch.setattr(environment, "why", None)
    environment._fail(ImportError("cannot import name '_api' from 'memguard'"))
    err = capfd.readouterr().err
    assert err.startswith("memguard: NO budget is active") and "cannot import name '_api'" in err
    assert "_memguard_child" not in sys.modules, "which says that `memguard run` started this process"


def test_a_fork_while_another_thread_activates() -> None:
    assert environment._busy.acquire(False)
    environment._forked()
    assert environment._busy.acquire(False)
    environment._busy.release()
    assert os.getpid()
