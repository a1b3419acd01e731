"""TensorFlow and PyCUDA work on the same memory, in the same context.

    python examples/exchange_pycuda_and_tensorflow.py

Shows: `exchange.pycuda_context` makes TensorFlow's context current for PyCUDA, so there is no second one; a PyCUDA
kernel reads TensorFlow's result, and TensorFlow reads the kernel's, both without a copy. Each step is checked, and the
exit code is 1 if one fails. PyCUDA has no host arrays, so there is no `--cpu`; its kernels need nvcc.

tensorflow_pycuda_contexts.py has the usual advice about contexts, and what is true of it.
"""

from __future__ import annotations

import sys

import memguard
from memguard import exchange

budget = {
    "version": 1,
    "device": {"limit": "8GiB"},
    "frameworks": {"tensorflow": {"share": "60%"}, "pycuda": {"limit": "1GiB"}},
}
SOURCE = "__global__ void half(float *to, const float *from) { int i = threadIdx.x; to[i] = from[i] / 2; }"


def main() -> int:
    if "--cpu" in sys.argv[1:]:
        print("PyCUDA has no arrays on the host: this example needs a GPU", file=sys.stderr)
        return 2
    memguard.init(budget)
    import numpy as np
    import tensorflow as tf

    with tf.device("/GPU:0"):
        squares = tf.square(tf.range(256, dtype=tf.float32))  # TensorFlow or PyCUDA first: the order does not matter

    with exchange.pycuda_context(0) as context:
        import pycuda.driver as drv
        from pycuda import gpuarray
        from pycuda.compiler import SourceModule

        one_context = context.handle == drv.Device(0).retain_primary_context().handle
        half = SourceModule(SOURCE).get_function("half")

        read = exchange.to(squares, "pycuda")
        print(exchange.last_route())
        halves = gpuarray.empty(256, np.float32)
        half(halves, read, block=(256, 1, 1))

        seen = exchange.to(halves, "tensorflow")
        print(exchange.last_route())
        shared = exchange.to(seen, "pycuda").ptr == halves.ptr
        expected = tf.constant(np.arange(256, dtype=np.float32) ** 2 / 2)
        right = bool(tf.reduce_all(seen == expected))
        del read, halves, seen  # PyCUDA frees memory in the thread and the context where it was allocated

    print(f"one context: {one_context}; the same memory: {shared}; values right: {right}")
    return 0 if one_context and shared and right else 1


if __name__ == "__main__":
    raise SystemExit(main())
