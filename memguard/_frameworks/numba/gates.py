"""Lists the Numba functions that memguard makes wait while the process is suspended.

Numba calls the driver through attributes of one `Driver` object. `Driver.__getattr__` creates an attribute when it is
first used. So the table lists every existing attribute, and `Driver.__getattr__` for the others. Numba frees memory,
events, streams and modules in batches (`_PendingDeallocs.clear`), also in finalizers; memguard defers this function
until the process resumes.
"""

from __future__ import annotations

from memguard._frameworks.cuda_python.gates import AT_ONCE
from memguard._frameworks.optional_modules import Gates, entries

_DRIVER = "numba.cuda.cudadrv.driver"
_UNREGISTERS = "driver.cuMemHostUnregister"

GATES = (
    Gates(
        hook="numba.cuda.cudadrv.driver",
        waits=(
            *entries(
                _DRIVER,
                "crash",
                "each function of the driver that does not answer at once",
                "driver.cu*",
                optional=True,
                but=(*AT_ONCE, "cuMemHostUnregister"),
            ),
            *entries(_DRIVER, "crash", "a function of the driver at its first use", "Driver.__getattr__"),
            *entries(_DRIVER, "crash", "cuCtxSynchronize", "Context.synchronize"),
            *entries(_DRIVER, "crash", "cuStreamSynchronize", "Stream.synchronize"),
            *entries(
                _DRIVER,
                "crash",
                "cuEventSynchronize, cuEventQuery, cuEventElapsedTime",
                "Event.synchronize Event.query Event.elapsed_time event_elapsed_time",
            ),
            *entries(_DRIVER, "fail", "cuMemGetInfo", "Context.get_memory_info"),
            *entries(_DRIVER, "wait", "cuModuleUnload of each module", "Context.reset"),
            *entries("numba.cuda.dispatcher", "wait", "cuLaunchKernelEx", "launch", optional=True),
        ),
        later=(
            *entries(_DRIVER, "crash", "cuModuleUnload, cuMemFree and the like", "_PendingDeallocs.clear"),
            *entries(_DRIVER, "wait", "cuMemHostUnregister", _UNREGISTERS, optional=True),
        ),
    ),
)
