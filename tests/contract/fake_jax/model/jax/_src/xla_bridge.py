"""`jax._src.xla_bridge`: the backend reads its options when it starts. Its allocator is memguard's model of XLA's."""

from jax._src.config import config
from memguard._frameworks.simulated.allocators import BFCAllocator

TOTAL = 143_156 << 20
"""What CUDA reports as the total of an H200 (measured)."""
_backends = {}


class _Device:
    id = local_hardware_id = 0

    def __init__(self, options):
        limit = int(options.get("memory_fraction", 0.75) * TOTAL)
        growing = not options.get("preallocate", True)
        self.pool = BFCAllocator(lambda size: None, lambda size: None, limit, growing, collects=False)
        self.peak = 0

    def memory_stats(self):
        self.peak = max(self.peak, self.pool.in_use)
        return {
            "bytes_limit": self.pool.limit,
            "pool_bytes": self.pool.held,
            "bytes_in_use": self.pool.in_use,
            "peak_bytes_in_use": self.peak,
        }


class _Client:
    def __init__(self):
        self._local = [_Device(config.jax_pjrt_client_create_options or {})]

    def local_devices(self):
        return self._local


def backend():
    if "cuda" not in _backends:
        _backends["cuda"] = _Client()
    return _backends["cuda"]
