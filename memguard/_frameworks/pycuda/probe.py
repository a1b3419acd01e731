"""Checks for `memguard doctor` that PyCUDA can be imported, finds its GPUs and computes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    """Import PyCUDA, list its devices and compute in the primary context. Pops that context at the end, because a
    context on PyCUDA's stack at exit aborts the process."""
    with report.stage("import"):
        import pycuda

        report.put(path=pycuda.__file__)
        import pycuda.driver as cuda

        report.put(version=pycuda.VERSION_TEXT, gpu=True)
        report.put(cuda=".".join(str(part) for part in cuda.get_version()[:2]))
    with report.stage("devices"):
        cuda.init()
        count = cuda.Device.count()
        attribute = cuda.device_attribute.MULTIPROCESSOR_COUNT
        report.put(gpus=count, multiprocessors=[cuda.Device(i).get_attribute(attribute) for i in range(count)])
    if not count:
        return
    with report.stage("compute"):
        context = cuda.Device(0).retain_primary_context()
        context.push()
        try:
            import numpy
            from pycuda import gpuarray

            array = gpuarray.to_gpu(numpy.ones(64, dtype=numpy.float32))
            if array.get().sum() != 64:
                raise RuntimeError("data copied to the GPU and back has changed")
            del array
        finally:
            context.pop()
