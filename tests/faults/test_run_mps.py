"""`memguard run --mps` over stub libraries of NVML and CUDA, beside a socket such as the control daemon's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stub_gpus import MIB, TWO, UUIDS

ROOT = Path(__file__).resolve().parents[2]
LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
SEEN = """
import json, os, sys
import memguard
guard = memguard.init("budget.yaml")
limits = {part.device.uuid: part.limit for part in guard.plan.devices}
print(json.dumps([os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), limits]))
"""
BUDGET = """
version: 1
device: {limit: 10%}
devices: {Tesla T4: {limit: 4GiB}}
frameworks: {torch: {share: 50%}}
"""
Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """The folder of a daemon that listens."""
    pipes = tmp_path / "p"
    pipes.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind(str(pipes / "control"))
        one.listen(1)
        yield pipes


@pytest.fixture
def start(tmp_path: Path, build: Callable[..., Path], cuda: Path, daemon: Path) -> Start:
    def call(*before: str, shown: str = UUIDS[0], mig: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        scenario = tmp_path / "scenario"
        scenario.write_text("".join(f"{key}={value}\n" for key, value in {**TWO, "mig1": mig}.items()))
        (tmp_path / "budget.yaml").write_text(BUDGET)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MEMGUARD_"))}
        environ |= {
            "LD_LIBRARY_PATH": f"{cuda}{os.pathsep}{build()}",
            "NVML_STUB": str(scenario),
            "NVML_STUB_LOG": str(tmp_path / "log"),
            "CUDA_VISIBLE_DEVICES": shown,
            "CUDA_STUB_UUIDS": shown,  # what CUDA makes of that
            "CUDA_MPS_PIPE_DIRECTORY": str(daemon),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **more,
        }
        return subprocess.run(
            [sys.executable, "-m", "memguard", "run", "--mps", "-c", "budget.yaml", "--", *before, sys.executable,
             "-c", SEEN],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return call


def test_the_program_is_limited_on_the_gpus_that_it_sees(start: Start) -> None:
    done = start()
    assert done.returncode == 0, done.stderr
    value, limits = json.loads(done.stdout)
    assert limits == {UUIDS[0]: (143_771 - 615) * MIB // 10}
    assert value == f"{UUIDS[0]}={(143_771 - 615) // 10}M"
    assert (
        f"memguard: MPS lets each process have 13.98 GiB of NVIDIA H200, its CUDA context included: {LIMIT}={value}"
        in done.stderr
    )
    assert "under MPS this process may have" not in done.stderr  # the value and the budget are one


def test_each_gpu_has_its_own_limit(start: Start) -> None:
    done = start(shown=",".join(reversed(UUIDS)))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == f"{UUIDS[1]}=4096M,{UUIDS[0]}={(143_771 - 615) // 10}M"


def test_a_stricter_limit_stays_and_the_program_is_told(start: Start) -> None:
    done = start(**{LIMIT: "0=2G"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == f"{UUIDS[0]}=2048M"
    assert "under MPS this process may have 2.00 GiB of NVIDIA H200" in done.stderr


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0=100G", "allows 100.00 GiB"),
        ("0=2G,1=2G", "names 1, and MPS drops every memory limit"),  # CUDA shows one of the two
    ],
)
def test_a_limit_that_would_not_hold_is_refused(start: Start, value: str, says: str) -> None:
    done = start(**{LIMIT: value})
    assert done.returncode == 1 and done.stdout == ""
    assert says in done.stderr and "\n    fix: unset" in done.stderr


def test_without_a_daemon_nothing_starts(start: Start, tmp_path: Path) -> None:
    (tmp_path / "p" / "control").unlink()
    done = start()
    assert done.returncode == 2 and done.stdout == ""
    assert "no MPS control daemon" in done.stderr and "nvidia-cuda-mps-control -d" in done.stderr


def test_where_cuda_cannot_say_which_gpus_are_seen_nothing_starts(start: Start) -> None:
    done = start(CUDA_STUB_INIT="803")
    assert done.returncode == 3 and done.stdout == ""
    assert "if an entry names another, MPS drops every limit" in done.stderr


def test_a_gpu_that_mig_divides_is_refused(start: Start) -> None:
    done = start(shown=UUIDS[1], mig=1)
    assert done.returncode == 3 and done.stdout == ""
    assert "Tesla T4" in done.stderr and "MIG" in done.stderr and "fix: " in done.stderr


def test_a_command_that_changes_which_gpus_it_sees_is_not_started(start: Start) -> None:
    done = start("env", f"CUDA_VISIBLE_DEVICES={UUIDS[1]}")
    assert done.returncode == 2 and done.stdout == ""
    assert "env replaces CUDA_VISIBLE_DEVICES, which memguard has read" in done.stderr
