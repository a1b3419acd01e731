"""Training with a batch whose activations do not fit."""

import torch
from torch import nn

model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
images = torch.randn(65536, 1024, device="cuda")
print("model loaded", flush=True)
loss = model(images).sum()
print("forward done", flush=True)
loss.backward()
print("done")
