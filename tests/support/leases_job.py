"""A process that fills its caps under a budget, one step per line of stdin: `python -m support.leases_job NAME`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
JOBS: dict[str, dict[str, str]] = {
    "torch": {"torch": "100%"}, "tensorflow": {"tensorflow": "100%"}, "jax": {"jax": "100%"},
    "cupy and pycuda": {"cupy": "60%", "pycuda": "40%"},
}  # fmt: skip
"""The frameworks of each process, with their shares."""
PIECE = 512 * MIB


def torch_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    import torch

    def make(value: int) -> Any:
        return torch.full((PIECE // 4,), value, dtype=torch.float32, device="cuda")

    return make, lambda array, value: bool((array == value).all())


def tensorflow_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    import tensorflow as tf

    def make(value: int) -> Any:
        with tf.device("GPU:0"):
            return tf.fill([PIECE // 4], float(value))

    return make, lambda array, value: bool(tf.reduce_all(tf.equal(array, float(value))))


def jax_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    import jax.numpy as jnp

    def make(value: int) -> Any:
        return jnp.full((PIECE // 4,), value, dtype=jnp.float32).block_until_ready()

    return make, lambda array, value: bool((array == value).all())


def cupy_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    import cupy

    def make(value: int) -> Any:
        return cupy.full(PIECE // 4, value, dtype=cupy.float32)

    return make, lambda array, value: bool((array == value).all())


def pycuda_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    """Allocates by the driver API, which needs no compiler. Checks the values at both ends of each block."""
    import atexit

    import numpy as np
    import pycuda.driver as drv

    drv.init()
    context = drv.Device(0).retain_primary_context()
    context.push()
    atexit.register(context.pop)
    edge = MIB

    def make(value: int) -> Any:
        array = drv.mem_alloc(PIECE)
        drv.memset_d32(array, value, PIECE // 4)
        return array

    def right(array: Any, value: int) -> bool:
        found = np.empty(edge // 4, dtype=np.int32)
        good = True
        for at in (0, PIECE - edge):
            drv.memcpy_dtoh(found, int(array) + at)
            good = good and bool((found == value).all())
        return good

    return make, right


ARRAYS = {
    "torch": torch_arrays, "tensorflow": tensorflow_arrays, "jax": jax_arrays, "cupy": cupy_arrays,
    "pycuda": pycuda_arrays,
}  # fmt: skip


class Job:
    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: list[tuple[Callable[[Any, int], bool], Any, int]] = []
        self.caps: dict[str, int] = {}

    def load(self) -> dict[str, Any]:
        """Do the slow imports, without touching the GPU."""
        import memguard  # noqa: F401

        if self.name == "torch":
            import torch  # noqa: F401
        return {}

    def claim(self, limit: int, leased: bool) -> dict[str, Any]:
        """Apply the budget; with `leased`, wait for the lease."""
        import memguard

        device: dict[str, Any] = {"limit": limit, **({"lease": True, "wait": "5min"} if leased else {})}
        shares = {one: {"share": part} for one, part in JOBS[self.name].items()}
        began = time.monotonic()
        guard: Any = memguard.init({"version": 1, "device": device, "frameworks": shares})
        self.caps = dict(guard.plan.devices[0].caps)
        return {"waited": time.monotonic() - began}

    def fill(self) -> dict[str, Any]:
        """Fill the caps to 19/20: the rest is for the value checks and the allocators' rounding."""
        for framework in JOBS[self.name]:
            make, right = ARRAYS[framework]()
            cap = self.caps[framework]
            for value in range((cap - max(cap // 20, GIB)) // PIECE):
                self.kept.append((right, make(value), value))
        return {"bytes": PIECE * len(self.kept)}

    def check(self) -> dict[str, Any]:
        return {"right": all(right(array, value) for right, array, value in self.kept)}


def main() -> None:
    job = Job(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(job, asked.pop("do"))(**asked)
        except Exception as error:
            answer = {"error": {"exception": type(error).__name__, "text": str(error)[:300]}}
        print("ANSWER " + json.dumps({"at": time.monotonic(), **answer}), flush=True)


if __name__ == "__main__":
    main()
