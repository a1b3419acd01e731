"""One array through all six frameworks and back: the same memory at each, the same values.

    python examples/exchange_all_six.py [--cpu]

Each framework gets the array from the one before it and computes its sum. The array that PyTorch gets at the end has
the address of the first one. The exit code is 1 if something was copied or a sum is wrong. `--cpu` runs it on host
arrays: TensorFlow, JAX, NumPy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import memguard
from memguard import exchange

names = ("torch", "tensorflow", "jax", "cupy", "numba", "pycuda")
budget = {"version": 1, "device": {"limit": "12GiB"}, "frameworks": {name: {"share": "16%"} for name in names}}
SUMS: dict[str, Callable[[Any], float]] = {
    "torch": lambda x: float(x.sum()),
    "tensorflow": lambda x: float(__import__("tensorflow").reduce_sum(x)),
    "jax": lambda x: float(x.sum()),
    "cupy": lambda x: float(x.sum()),
    "numba": lambda x: float(x.copy_to_host().sum()),
    "pycuda": lambda x: float(x.get().sum()),
    "numpy": lambda x: float(x.sum()),
}


def main() -> int:
    on_host = "--cpu" in sys.argv[1:]
    way = ("tensorflow", "jax", "numpy", "torch") if on_host else (*names[1:], "torch")
    with contextlib.ExitStack() as stack:
        if not on_host:
            memguard.init(budget)
            stack.enter_context(exchange.pycuda_context(0))
        import torch

        start = torch.arange(4096, dtype=torch.float32, device="cpu" if on_host else "cuda")
        expected, array, fine = SUMS["torch"](start), start, True
        for name in way:
            array = exchange.to(array, name, copy=False)  # NumPy's view of JAX's array is read-only
            found, route = SUMS[name](array), exchange.last_route()
            print(f"{route}; {name} sums {found:.0f}")
            fine &= route.way == "shared" and found == expected
        there = array.data_ptr() == start.data_ptr()
        del array  # while PyCUDA's context, in which its view was made, is current
    print(f"all shared, all sums right: {fine}; at the end in the same memory: {there}")
    return 0 if fine and there else 1


if __name__ == "__main__":
    raise SystemExit(main())
