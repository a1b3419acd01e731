"""Arrays of NumPy given to a kernel of Numba: each is copied to the GPU for the time of the call."""

import numpy as np
from numba import cuda


@cuda.jit
def add(a, b, total):
    at = cuda.grid(1)
    if at < a.size:
        total[at] = a[at] + b[at]


a, b, total = (np.ones(1 << 27, np.float32) for _ in range(3))
print("arrays made", flush=True)
add[a.size // 256, 256](a, b, total)
print("done", total[0])
