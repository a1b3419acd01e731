"""What the tests rest on: limits of time that end a test and what it started, and signals that are not ignored."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from pathlib import Path

import inner_pytest
import pytest
from waiting import until

TESTS = Path(__file__).parents[1]
HANGS = """
    import ctypes, subprocess, threading
    import pytest

    def sleeper(**more):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, **more)
        print(child.pid, file=open({log!r}, "a"), flush=True)
        return child

    @pytest.mark.time_limit(1)
    def test_waits():
        assert sleeper().wait() == 0

    @pytest.mark.time_limit(1)
    def test_does_not_notice():
        sleeper(env={{}}).wait()

    @pytest.mark.time_limit(1)
    def test_holds_the_gil():
        sleeper()
        while True:
            ctypes.PyDLL(None).sleep(600)

    @pytest.mark.parametrize("number", range(8))
    def test_runs(number): pass
"""


def ended(pid: int) -> bool:
    """A zombie is: its parent was killed before it could wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.long
def test_a_test_over_its_limit_ends_with_its_subprocesses(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(textwrap.dedent(HANGS.format(log=str(tmp_path / "log"))))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(":")])}
    done = inner_pytest.run(tmp_path, "-p", "conftest", "-n2", env=environ)
    assert re.search(r"^=+ 3 failed, 8 passed in", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "crashed while running 'test_hangs.py::test_holds_the_gil'" in done.stdout
    assert f'{tmp_path / "test_hangs.py"}", line' in done.stderr, "the stacks of a test that is aborted"
    started = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert len(started) == 3
    until(lambda: all(map(ended, started)), what="what the tests have started ends")


@pytest.mark.long
def test_tests_and_subprocesses_do_not_inherit_ignored_signals(tmp_path: Path) -> None:
    (tmp_path / "test_signals.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_here_and_in_a_child():\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    code = 'import signal; print(*map(signal.getsignal, (1, 2, 3, 15)))'\n"
        "    print(subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True).stdout)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(":")])}
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}  # a child inherits that
    try:
        done = inner_pytest.run(tmp_path, "-p", "conftest", "-n0", "-s", env=environ)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"^.*(0|SIG_DFL) <.*default_int_handler.*> .*(0|SIG_DFL) .*(0|SIG_DFL)$", done.stdout, re.MULTILINE
    )
