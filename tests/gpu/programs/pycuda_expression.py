"""An expression of GPUArrays: each subexpression allocates an array."""

import numpy as np
import pycuda.autoinit  # noqa: F401
import pycuda.gpuarray as gpuarray

a = gpuarray.to_gpu(np.ones(1 << 27, np.float32))
print("array loaded", flush=True)
total = (a * 2 + a * 3) - a / 4
print("done", total[0].get())
