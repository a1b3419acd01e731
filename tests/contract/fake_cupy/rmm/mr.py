"""`rmm.mr`. A refusal is the built-in MemoryError (measured)."""

import card
import fake_card


class DeviceMemoryResource:
    pass


class CudaMemoryResource(DeviceMemoryResource):
    """Each allocation is one of the driver's."""

    def allocate(self, size):
        try:
            return fake_card.gpu_here().card.take(size)
        except card.OutOfMemory:
            raise MemoryError("std::bad_alloc: out_of_memory: CUDA error") from None

    def deallocate(self, pointer, size, ordinal):
        card.give(pointer)


class UpstreamResourceAdaptor(DeviceMemoryResource):
    def __init__(self, upstream_mr):
        if not isinstance(upstream_mr, DeviceMemoryResource):
            raise TypeError("upstream_mr is no resource")
        self._upstream = upstream_mr

    def get_upstream(self):
        return self._upstream

    def allocate(self, size):
        return self._upstream.allocate(size)

    def deallocate(self, pointer, size, ordinal):
        self._upstream.deallocate(pointer, size, ordinal)


class LimitingResourceAdaptor(UpstreamResourceAdaptor):
    """Counts what is live, in steps of 256 bytes."""

    def __init__(self, upstream_mr, allocation_limit):
        super().__init__(upstream_mr)
        if allocation_limit < 0:
            raise OverflowError("can't convert negative value to size_t")
        self._limit, self._allocated = allocation_limit, 0

    def allocate(self, size):
        counted = -(-size // 256) * 256
        if self._allocated + counted > self._limit:
            raise MemoryError(f"std::bad_alloc: out_of_memory: RMM failure: Exceeded memory limit {self._limit}")
        pointer = super().allocate(size)
        self._allocated += counted
        return pointer

    def deallocate(self, pointer, size, ordinal):
        super().deallocate(pointer, size, ordinal)
        self._allocated -= -(-size // 256) * 256

    def get_allocated_bytes(self):
        return self._allocated

    def get_allocation_limit(self):
        return self._limit


class PoolMemoryResource(UpstreamResourceAdaptor):
    """Keeps what it has taken. (What it takes, and how it cuts it, does not matter here.)"""


class StatisticsResourceAdaptor(UpstreamResourceAdaptor):
    pass


_resources = {}


def get_per_device_resource(ordinal):
    return _resources.setdefault(ordinal, CudaMemoryResource())


def set_per_device_resource(ordinal, resource):
    if not isinstance(resource, DeviceMemoryResource):
        raise TypeError("no resource")
    _resources[ordinal] = resource
