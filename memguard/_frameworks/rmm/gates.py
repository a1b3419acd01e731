"""Lists the RMM functions that memguard makes wait while the process is suspended.

RMM calls the driver from C; whether these functions release the GIL is unknown. The table omits methods whose names
start with two underscores, because such methods of types written in C cannot be replaced.
"""

from __future__ import annotations

from memguard._frameworks.optional_modules import Gates, entries, kinds

GATES = (
    Gates(
        hook="rmm",
        waits=(
            *entries(
                "rmm.pylibrmm.stream",
                "crash",
                "cuStreamSynchronize, cuStreamQuery",
                "Stream.synchronize Stream.is_done",
                optional=True,
            ),
            *entries(
                "rmm.pylibrmm.memory_resource",
                "crash",
                "cuMemAllocAsync with an asynchronous resource",
                "DeviceMemoryResource.allocate DeviceMemoryResource.deallocate",
                optional=True,
            ),
            *entries(
                "rmm.pylibrmm.device_buffer",
                "wait",
                "cuMemcpyAsync, then cuStreamSynchronize",
                "DeviceBuffer.copy_to_host DeviceBuffer.copy_from_host DeviceBuffer.copy_from_device"
                " DeviceBuffer.tobytes DeviceBuffer.reserve DeviceBuffer.resize to_device copy_ptr_to_host"
                " copy_host_to_ptr copy_device_to_ptr",
                optional=True,
            ),
        ),
        kept_alive=kinds("rmm.pylibrmm.device_buffer", "cuMemFreeAsync", "DeviceBuffer"),
    ),
)
