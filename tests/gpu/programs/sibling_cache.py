"""CuPy's freed preprocessing arrays stay in its pool. Then PyTorch needs memory."""

import cupy
import torch

scratch = [cupy.zeros(1 << 30, cupy.uint8) for _ in range(14)]
torch.zeros(1, device="cuda").sum().item()
del scratch
print("preprocessed", flush=True)
data = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
print("done")
