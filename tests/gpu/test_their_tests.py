"""PyCUDA's and numba-cuda's own tests, without memguard and under `memguard run`: each test must end the same way.

PyCUDA's tests are in its sdist, in `test/` (`--pycuda-tests FOLDER`); numba-cuda's are in its wheel. A test may differ
only if it needs more memory than the cap, or if it also varies without memguard: `support.their_tests.reason` decides
this from memguard's refusal and from three more runs each, with and without it. Without `--thorough` only numba-cuda's
memory tests run.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from support.suites import Suite

OF_MEMORY = [
    f"cudadrv/test_{name}.py"
    for name in ("cuda_ndarray", "cuda_memory", "deallocations", "context_stack", "emm_plugins", "host_alloc", "pinned",
                 "reset_device")
]  # fmt: skip


def test_numba_cudas_own(tmp_path: Path, thorough: bool) -> None:
    spec = importlib.util.find_spec("numba_cuda")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("numba-cuda is not installed")
    root = Path(next(iter(spec.submodule_search_locations))) / "numba" / "cuda" / "tests"
    Suite("numba", root, tmp_path).ends_alike(["cudadrv", "cudapy"] if thorough else OF_MEMORY, 16 if thorough else 4)


def test_pycudas_own(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("--pycuda-tests", default=os.environ.get("MEMGUARD_PYCUDA_TESTS"))
    if not folder:
        pytest.skip("needs --pycuda-tests: the folder test/ of PyCUDA's sdist")
    root = Path(folder).resolve()
    Suite("pycuda", root, tmp_path).ends_alike(sorted(path.name for path in root.glob("test_*.py")), 16)
