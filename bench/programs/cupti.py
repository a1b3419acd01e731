"""What CUPTI's records say of the device memory that each framework's library took, beside the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from bench.programs import six
from bench.programs.six import MIB, NAMES, PAGE

SEED = 20261122
LIBRARIES = (
    ("tensorflow", "libtensorflow"), ("torch", "libc10_cuda"), ("torch", "libcudart"), ("jax", "xla_cuda_plugin"),
    ("cupy", "runtime.cpython"), ("pycuda", "_driver.cpython"), ("numba", "cydriver"),
)  # fmt: skip
"""The beginning of the file name of the library that takes memory for each framework (seen by CUPTI on an H200).
PyTorch alone takes memory through the shared CUDA runtime, which CUPTI names if TensorFlow is in the process too."""


class Cupti:
    """The device memory that each library has taken from the driver and not given back, as CUPTI's records tell it.
    Made before CUDA starts. CUPTI serves one subscriber, so nothing else in the process may use it."""

    def __init__(self) -> None:
        from cupti import cupti  # type: ignore[import-not-found]

        self.cupti, self.records = cupti, []  # type: ignore[var-annotated]
        cupti.activity_enable(cupti.ActivityKind.MEMORY2)
        cupti.activity_enable_allocation_source(1)
        cupti.activity_register_callbacks(lambda: (64 * MIB, 0), self._take)  # so few ask for a buffer

    def _take(self, activities: Iterable[Any]) -> None:
        kind = self.cupti.ActivityKind.MEMORY2
        for one in activities:
            if one.kind == kind:
                self.records.append(
                    (one.timestamp, one.memory_operation_type, one.memory_kind, one.address, one.bytes, one.source)
                )

    def live(self) -> dict[str, int]:
        """Bytes by framework, and by library for the others. An allocation above 1 MiB counts in whole pages."""
        self.cupti.activity_flush_all(1)
        operation, kind = self.cupti.ActivityMemoryOperationType, self.cupti.ActivityMemoryKind
        return live_bytes(self.records, int(operation.ALLOCATION), int(operation.RELEASE), int(kind.DEVICE))


def live_bytes(records: Iterable[tuple[Any, ...]], taken: int, given: int, device: int) -> dict[str, int]:
    """The sum of what was taken and not given back: (time, operation, kind, address, bytes, library) each."""
    live: dict[int, tuple[int, str]] = {}
    for _, operation, kind, address, size, source in sorted(records, key=lambda record: record[0]):
        if operation == taken and kind == device:
            live[address] = (size if size <= MIB else -(-size // PAGE) * PAGE, framework_of(source))
        elif operation == given:
            live.pop(address, None)
    found: dict[str, int] = {}
    for size, name in live.values():
        found[name] = found.get(name, 0) + size
    return found


def framework_of(source: str | None) -> str:
    """The framework of a library that takes memory; the library's own name if it is none of the six."""
    file = PurePosixPath(source or "unknown").name
    return next((name for name, begins in LIBRARIES if file.startswith(begins)), file)


def by_cupti(config: dict[str, Any]) -> dict[str, Any]:
    """All six live and with arrays: what each holds by the ledger, and what CUPTI saw its library take. Of JAX's pool
    CUPTI's records have a part only (260 of 518 MiB on an H200, of which the driver's figure has all). So that pool
    grows once more, and `pool` is what the ledger and the driver say after that and before. CUPTI is asked before: it
    has named Numba's library for 512 MiB of that growth."""
    seen = Cupti()
    guard, _ = six.all_live(config)
    caps = guard.plan.devices[0].caps
    driven = {name: six.Driven(name, caps[name], SEED) for name in NAMES}
    for one in driven.values():
        for _ in range(12):
            one.add(PAGE, 64 * MIB)
        for _ in range(20):
            one.add(1, MIB)
    held, taken = {name: one.held() for name, one in driven.items()}, seen.live()
    jax = driven["jax"]
    before = jax.held(), six.bytes_now()
    while jax.held() - before[0] < 512 * MIB and len(jax.live) < 100:
        jax.add(64 * MIB, 64 * MIB)
    pool = {"held": [jax.held(), before[0]], "nvml": [six.bytes_now(), before[1]]}
    return {"held": held, "pool": pool, "cupti": taken, "records": len(seen.records)}
