"""PyTorch has let go of what it preprocessed with, and keeps it in its cache. Then CuPy needs memory."""

import cupy
import torch

scratch = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(14)]
cupy.zeros(1).sum().get()
del scratch
print("preprocessed", flush=True)
data = cupy.empty(6 << 30, cupy.uint8)
print("done")
