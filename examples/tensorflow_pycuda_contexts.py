"""TensorFlow and PyCUDA in one process: three ways that the web recommends, and what is true of each.

    python examples/tensorflow_pycuda_contexts.py autoinit | make-context | limited | block | own

`autoinit` and `limited` make the calls of two programs that are often recommended, in their order, with one line added,
`memguard.init(...)`: TensorFlow with a `memory_limit` of its own, `pycuda.autoinit`, and `make_context()` on top of it.
Both run unchanged. With that line there is one CUDA context, TensorFlow's, and neither library can take more than its
part; of TensorFlow's two limits the smaller one holds. `make-context` is what is left of a third program once the two
functions that do not exist (below) are gone. `block` changes the thread's contexts for one block only, which suits a
library. `own` opts out (`context: own` in the budget), and the ledger then shows the second context with its cost.

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


def limit_tensorflow(mib: int) -> None:
    """TensorFlow's own limit, before its first operation. It is below the budget's, so it holds."""
    gpus = tf.config.list_physical_devices("GPU")
    try:
        tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=mib)])
    except RuntimeError as error:  # after TensorFlow's first operation
        print(error)


def autoinit(mib: int = 1024) -> float:
    """`import pycuda.autoinit` beside TensorFlow, and one more context on top of it."""
    import pycuda.autoinit  # noqa: F401

    limit_tensorflow(mib)
    tensorflow_work()
    context = cuda.Device(0).make_context()
    try:
        return add_one()
    finally:
        context.pop()


def limited() -> float:
    """The same with a smaller limit for TensorFlow, which is said to leave room for PyCUDA's own context."""
    return autoinit(512)


def make_context() -> float:
    """An explicit context after TensorFlow's first operation, instead of the handle that does not exist."""
    tensorflow_work()
    cuda.init()
    context = cuda.Device(0).make_context()
    try:
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
    import pycuda.autoinit  # noqa: F401

    tensorflow_work()
    return add_one()


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
