"""A small network is trained; every tenth step has a batch of twice the size."""

import time

import torch
from torch import nn

DEVICE, WIDTH, LAYERS, BATCH, STEPS, SECONDS = "cuda", 2048, 12, 4096, 40, 2.0
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
net = nn.Sequential(*layers).to(DEVICE)
optimiser = torch.optim.AdamW(net.parameters())
step, until = 0, None
while step < STEPS or (until is not None and time.monotonic() < until):
    images = torch.randn(BATCH if step % 10 else 2 * BATCH, WIDTH, device=DEVICE)
    loss = net(images).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    loss.item()
    until = until or time.monotonic() + SECONDS
    step += 1
print("done", step)
