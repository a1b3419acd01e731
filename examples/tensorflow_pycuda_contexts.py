"""TensorFlow and PyCUDA in one process: three ways that the web recommends, and what is true of each.

    python examples/tensorflow_pycuda_contexts.py autoinit | make-context | limited | block | own

The first three are the recommended code with one line added, `memguard.init(...)`. With it all three work in one
CUDA context, TensorFlow's, and neither library can take more than its part. `block` does the same and changes the
thread's contexts for one block only, which suits a library. `own` opts out (`context: own` in the budget), and the
ledger then shows the second context with its cost.

What is wrong with the usual advice:

- "Get TensorFlow's context with tf.compat.v1.experimental.get_cuda_context_handle() and wrap it in
  pycuda.driver.Context(handle)": neither exists. TensorFlow works in the device's *primary* context, and PyCUDA
  joins it with `Device.retain_primary_context()`. memguard makes `make_context()` and `pycuda.autoinit` do that, and
  `memguard.exchange.pycuda_context()` does it for a block, with or without a budget.
- "Initialise TensorFlow first": the order does not matter. Without a limit TensorFlow takes the whole card at its
  first operation, whichever came first (141,350 of 143,156 MiB on an H200), and PyCUDA is then out of memory.
- "It is a question of peer access": peer access is about two GPUs. On one GPU a second context only costs memory,
  518 MiB on an H200. Each context can read the other's memory there, but not use its streams and kernels.
- "memory_limit caps the process": it caps TensorFlow's pool. The context and cuBLAS and cuDNN come on top.
"""

from __future__ import annotations

import sys

import numpy as np

import memguard

budget = {
    "version": 1,
    "device": {"limit": "8GiB"},
    "frameworks": {
        "tensorflow": {"share": "60%"},
        "pycuda": {"limit": "1GiB", "context": "own" if sys.argv[1:] == ["own"] else "primary"},
    },
}
memguard.init(budget)  # the one line

import pycuda.driver as cuda  # noqa: E402
import tensorflow as tf  # noqa: E402


def tensorflow_work() -> float:
    a = tf.random.uniform((256, 256))
    return float(tf.reduce_mean(tf.matmul(a, a)))


def add_one() -> float:
    """A PyCUDA kernel in whatever context is current."""
    from pycuda.compiler import SourceModule

    add = SourceModule("__global__ void add(float *a) { a[threadIdx.x] += 1.0f; }").get_function("add")
    host = np.zeros(32, dtype=np.float32)
    device = cuda.mem_alloc(host.nbytes)
    cuda.memcpy_htod(device, host)
    add(device, block=(32, 1, 1))
    cuda.memcpy_dtoh(host, device)
    return float(host.sum())


def autoinit() -> float:
    """`import pycuda.autoinit` beside TensorFlow: under the budget it gives the primary context."""
    import pycuda.autoinit  # noqa: F401

    tensorflow_work()
    return add_one()


def make_context() -> float:
    """An explicit context after TensorFlow's first operation, instead of the handle that does not exist."""
    tensorflow_work()
    cuda.init()
    context = cuda.Device(0).make_context()
    try:
        return add_one()
    finally:
        context.pop()


def limited() -> float:
    """A small share for TensorFlow, then PyCUDA: the budget is the limit, so none is set by hand."""
    cuda.init()
    context = cuda.Device(0).make_context()
    try:
        tensorflow_work()
        return add_one()
    finally:
        context.pop()


def block() -> float:
    """The primary context for a block: nested, on any thread, and always popped."""
    tensorflow_work()
    with memguard.exchange.pycuda_context():
        return add_one()


def own() -> float:
    """`context: own`: `pycuda.autoinit` makes its second context, and the ledger says what that costs."""
    return autoinit()


def main() -> int:
    ways = {"autoinit": autoinit, "make-context": make_context, "limited": limited, "block": block, "own": own}
    if len(sys.argv) != 2 or sys.argv[1] not in ways:
        print(f"usage: {sys.argv[0]} {' | '.join(ways)}", file=sys.stderr)
        return 2
    total = ways[sys.argv[1]]()
    reading = memguard.ledger()
    print(reading)
    print(f"kernel result: {total:g} (32 expected)")
    second = any(row.name == "second context" for row in reading.devices[0].rows)
    return 0 if total == 32 and second == (sys.argv[1] == "own") else 1


if __name__ == "__main__":
    raise SystemExit(main())
