"""A compiled model on a batch that does not fit."""

import torch
from torch import nn

model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.Tanh()))).cuda()
model = torch.compile(model, dynamic=False)
images = torch.randn(131072, 1024, device="cuda")
print("model loaded", flush=True)
loss = model(images).sum()
print("forward done", flush=True)
loss.backward()
print("done")
