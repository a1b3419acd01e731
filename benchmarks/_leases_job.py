"""One process of `leases.py`: `python _leases_job.py NAME leased|free SECONDS`. It fills the caps of its budget.

It tells each step in a line: `has` once `memguard.init` has returned, `full` once its arrays are there, `checked` at
each line that it gets, with whether every value is still right. It ends when its input does.

With MEMGUARD_LEASES_REHEARSAL=FOLDER the card is simulated, and its memory is a counter in that folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from _run import GIB, MIB

JOBS: dict[str, dict[str, str]] = {
    "torch": {"torch": "100%"},
    "tensorflow": {"tensorflow": "100%"},
    "jax": {"jax": "100%"},
    "cupy and pycuda": {"cupy": "60%", "pycuda": "40%"},
}
"""The frameworks of each process, with their shares."""
LEASE = 34 * GIB
PIECE = 512 * MIB
REHEARSAL = os.environ.get("MEMGUARD_LEASES_REHEARSAL")
Piece = tuple[Any, int]
"""An array, and the value that all of it has."""


def left_over(cap: int) -> int:
    """What of a cap stays free: for the check of the values, and for how allocators round."""
    return max(cap // 20, GIB)


def budget(name: str, leased: bool, wait: float) -> dict[str, Any]:
    device: dict[str, Any] = {"limit": f"{LEASE // GIB}GiB"}
    if leased:
        device |= {"lease": True, "wait": f"{wait:.0f}s"}
    return {"version": 1, "device": device, "frameworks": {one: {"share": part} for one, part in JOBS[name].items()}}


def tell(step: str, **figures: Any) -> None:
    print("ANSWER " + json.dumps({"step": step, "at": time.monotonic(), **figures}), flush=True)


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
    """By the driver's own calls, which need no compiler. The values are looked at where a piece begins and ends."""
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


def stand_in_arrays() -> tuple[Callable[[int], Any], Callable[[Any, int], bool]]:
    from _leases_stand_in import Card

    card = Card(str(REHEARSAL))
    return lambda value: card.take(PIECE), lambda array, value: array == PIECE


ARRAYS = {
    "torch": torch_arrays, "tensorflow": tensorflow_arrays, "jax": jax_arrays, "cupy": cupy_arrays,
    "pycuda": pycuda_arrays,
}  # fmt: skip


def main() -> None:
    name, leased, wait = sys.argv[1], sys.argv[2] == "leased", float(sys.argv[3])
    import memguard

    began = time.monotonic()
    guard = memguard.init(budget(name, leased, wait), simulate="h200" if REHEARSAL else None)
    tell("has", waited=time.monotonic() - began)
    caps = guard.plan.devices[0].caps
    kept: list[tuple[Callable[[Any, int], bool], Any, int]] = []
    for framework in JOBS[name]:
        make, right = stand_in_arrays() if REHEARSAL else ARRAYS[framework]()
        for value in range((caps[framework] - left_over(caps[framework])) // PIECE):
            kept.append((right, make(value), value))
    tell("full", bytes=PIECE * len(kept), caps=dict(caps))
    for _ in sys.stdin:
        tell("checked", right=all(right(array, value) for right, array, value in kept))


if __name__ == "__main__":
    main()
