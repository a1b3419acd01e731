"""Checks for `memguard doctor` that numba-cuda, or the CUDA part of an older Numba, finds its GPUs and computes."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    os.environ["NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS"] = "0"
    with report.stage("import"):
        import numba

        report.put(path=numba.__file__)
        report.put(version=numba.__version__, gpu=True)
        import numpy as np
        from numba import cuda
    with report.stage("devices"):
        devices = list(cuda.list_devices())
        report.put(gpus=len(devices), multiprocessors=[int(device.MULTIPROCESSOR_COUNT) for device in devices])
        report.put(cuda=".".join(str(part) for part in cuda.runtime.get_version()))
    try:
        with report.stage("compute"):
            _compute(cuda, np)
    except Exception:
        if hasattr(np, "row_stack"):
            raise
        # NumPy 2.5 removed `row_stack`, which numba-cuda 0.30 needs. The report has this error, and the result of a
        # second attempt with the function restored.
        np.row_stack = np.vstack
        with report.stage("compute with numpy.row_stack"):
            _compute(cuda, np)


def _compute(cuda: Any, np: Any) -> None:
    array = cuda.to_device(np.zeros(64, dtype=np.float32))
    _kernel(cuda)[2, 32](array)
    if array.copy_to_host().sum() != 64:
        raise RuntimeError("the kernel's result is wrong")


def _kernel(cuda: Any) -> Any:
    def add(array):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        array[i] += 1

    return cuda.jit(add)
