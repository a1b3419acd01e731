"""What tests of leases share: claims on a GPU that is not there, made by this process and by others."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import waiting

from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Part

GPU = "GPU-0a"
TOTAL = 100


def parts(size: int, gpu: str = GPU) -> dict[str, Part]:
    return {gpu: Part(gpu, size, TOTAL, 0, "NVIDIA H200")}


def lease(size: int, before: Lease | None = None) -> Lease:
    return Lease(parts(size), "budget.yaml", before)


OTHER = """
import sys, time
sys.path.insert(0, {here!r})
from leasing import lease
one = lease(int(sys.argv[1]))
one.take(float(sys.argv[2]), lambda text: print(text, flush=True))
print("held", flush=True)
sys.stdin.readline()
one.close()
print("given back", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def other(folder: Path, size: int, wait: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """Another process that claims so much. It says `held`, gives it back at a line, and ends at another."""
    code = OTHER.format(here=str(Path(__file__).parent))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(size), str(wait)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "MEMGUARD_LEASES": str(folder)},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().rstrip("\n")


def told(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


until = functools.partial(waiting.until, seconds=20.0)
"""However busy the machine is."""
