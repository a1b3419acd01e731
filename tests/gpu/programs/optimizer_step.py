"""Adam: its first step allocates two moments for every parameter."""

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16))).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
model(torch.randn(8, 4096, device="cuda")).sum().backward()
torch.cuda.synchronize()
print("backward done", flush=True)
optimizer.step()
print("done")
