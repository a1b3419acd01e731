"""What is recorded of the real PyCUDA and Numba over a stub driver, by `memguard run --record` and at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver

import memguard

PROGRAM = """
import glob, sys, time
import pycuda.driver as cuda
cuda.init()
context = cuda.Device(0).retain_primary_context()
context.push()
held = cuda.mem_alloc(1 << 28)
from numba import cuda as numba
print(cuda.mem_alloc.__module__, numba.current_context().memory_manager.__class__.__module__)
print(sorted(name for name in sys.modules["os"].environ if name.startswith(("CUDA_", "PYTORCH", "XLA", "CUPY"))))
until = time.monotonic() + 30
while RECORDED and time.monotonic() < until and not any('"numba"' in open(p).read() for p in glob.glob(FILES)):
    time.sleep(0.05)
held.free()
context.pop()
sys.exit(9)
"""


LAST = """
import threading, time
import memguard
caps = {"pycuda": {"limit": "4GiB"}, "numba": {"limit": "4GiB"}}
guard = memguard.init({"version": 1, "frameworks": caps, "monitor": {"interval": "1h", "timeline": FILE}})
import pycuda.autoinit  # its exit function ends its context before memguard's is called
import pycuda.driver as cuda
from numba import cuda as numba
from memguard import api
while not api.current_session().monitor.last(1):  # its only sample
    time.sleep(0.01)
held = cuda.mem_alloc(1 << 28)
memory = numba.current_context().memalloc(1 << 27)
print("over", flush=True)
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = str(Path(memguard.__file__).parents[1])
    environ = stub_driver.one_gpu(tmp_path_factory.mktemp("stubs"))
    return {**{k: v for k, v in environ.items() if not k.startswith("MEMGUARD_")}, "PYTHONPATH": home}


def test_nothing_of_the_frameworks_changes(stubs: dict[str, str], tmp_path: Path) -> None:
    def run(recorded: bool) -> subprocess.CompletedProcess[str]:
        code = PROGRAM.replace("RECORDED", str(recorded)).replace("FILES", repr(str(tmp_path / "run-*.jsonl")))
        command = [sys.executable, "-W", "ignore", "-c", code]
        before = [sys.executable, "-m", "memguard", "run", "--record", str(tmp_path / "run.jsonl"), "--"]
        return subprocess.run(
            before + command if recorded else command, env=stubs, capture_output=True, text=True, timeout=120
        )

    plain, watched = run(False), run(True)
    assert plain.returncode == watched.returncode == 9, watched.stderr[-2000:]
    assert plain.stdout == watched.stdout and len(plain.stdout.splitlines()) == 2
    assert "nothing is recorded" not in watched.stderr
    (path,) = tmp_path.glob("run-*-0.jsonl")
    timeline = memguard.load_timeline(path)
    assert list(timeline.samples()) and timeline.plan.devices[0].caps == {} and not timeline.header.simulated
    assert {event.framework for event in timeline.events() if event.kind == "uncounted"} == {"pycuda", "numba"}
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_end_of_a_program_is_in_its_timeline_and_takes_nothing_from_it(
    stubs: dict[str, str], tmp_path: Path
) -> None:
    code = LAST.replace("FILE", repr(str(tmp_path / "run.jsonl")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=stubs, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr[-2000:]
    (path,) = tmp_path.glob("run-*.jsonl")
    timeline = memguard.load_timeline(path)
    last = list(timeline.samples())[-1].devices[0].frameworks
    assert (last["pycuda"].in_use or 0) >= 1 << 28 and (last["numba"].in_use or 0) >= 1 << 27
    peaks = {event.framework: event.bytes or 0 for event in timeline.events() if event.kind == "peak"}
    assert peaks["pycuda"] >= 1 << 28 and peaks["numba"] >= 1 << 27
