"""A Numba kernel whose arguments are copied to the GPU for the call."""

import numpy as np
from numba import cuda


@cuda.jit
def add(a, b, total):
    at = cuda.grid(1)
    if at < a.size:
        total[at] = a[at] + b[at]


a, b = (np.ones(1 << 27, np.float32) for _ in range(2))
total = cuda.device_array_like(a)
print("arrays made", flush=True)
add[a.size // 256, 256](cuda.to_device(a), cuda.to_device(b), total)
print("done", total[0])
