"""TensorFlow reads a CuPy array in place: no host, no file, no CUDA IPC.

    python examples/exchange_cupy_to_tensorflow.py

Shows: the array is handed over while a stream still computes it, and TensorFlow reads the finished values; the dtype
stays; an array with gaps is copied on the GPU if you ask for it. Each step is checked, and the exit code is 1 if one
fails. CuPy has no host arrays, so there is no `--cpu`.
"""

from __future__ import annotations

import sys

import memguard
from memguard import exchange

budget = {
    "version": 1,
    "device": {"limit": "8GiB"},
    "frameworks": {"tensorflow": {"share": "50%"}, "cupy": {"share": "50%"}},
}


def main() -> int:
    if "--cpu" in sys.argv[1:]:
        print("CuPy has no arrays on the host: this example needs a GPU", file=sys.stderr)
        return 2
    memguard.init(budget)
    import cupy
    import tensorflow as tf

    rows, columns = 2048, 4096
    with cupy.cuda.Stream(non_blocking=True):
        table = cupy.zeros((rows, columns))  # float64
        for _ in range(200):  # still running below: no other stream waits for this one unless it is told to
            table += 1
        seen = exchange.to(table, "tensorflow")
        print(exchange.last_route())
    total = float(tf.reduce_sum(seen))
    back = exchange.to(tf.sqrt(seen), "cupy")
    finished = total == 200 * rows * columns and bool(cupy.allclose(back, 200**0.5))
    shared = exchange.to(seen, "cupy").data.ptr == table.data.ptr
    kept = seen.dtype == tf.float64

    every_second = exchange.to(table[:, ::2], "tensorflow", copy=True)
    print(exchange.last_route(), "because", exchange.last_route().reason)
    copied = tuple(every_second.shape) == (rows, columns // 2) and float(tf.reduce_mean(every_second)) == 200

    print(f"the same memory: {shared}; finished values: {finished}; still float64: {kept}; gaps copied: {copied}")
    return 0 if shared and finished and kept and copied else 1


if __name__ == "__main__":
    raise SystemExit(main())
