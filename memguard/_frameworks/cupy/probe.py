"""Checks for `memguard doctor` that CuPy can be imported, finds its GPUs and computes."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    """Import CuPy, allocate and compute. NVRTC compiles a small kernel, which is not written to the user's cache."""
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    with report.stage("import"):
        import cupy

        report.put(path=cupy.__file__)
        runtime = cupy.cuda.runtime
        report.put(version=cupy.__version__, gpu=not runtime.is_hip)
        if not runtime.is_hip:
            report.put(cuda=report.cuda_version(cupy.cuda.driver.get_build_version()))
    with report.stage("devices"):
        count = runtime.getDeviceCount()
        each = [runtime.getDeviceProperties(i)["multiProcessorCount"] for i in range(count)]
        report.put(gpus=count, multiprocessors=each)
    if not count:
        return
    with report.stage("compute"):
        x = cupy.ones((64, 64), dtype="float32")
        float((x @ x + 1).sum())
