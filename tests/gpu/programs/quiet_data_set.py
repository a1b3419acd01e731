"""Without a fault: load a data set to 60 % of the cap of 6 GiB, then use it."""

import os
import time

import torch

until = time.monotonic() + float(os.environ.get("MOMENT_SECONDS", "120"))
wanted = int(0.6 * 6 * (1 << 30))
loading = (until - time.monotonic()) / 3
data, rows = [], 32 << 20
while len(data) * rows < wanted - rows:
    data.append(torch.randint(0, 256, (rows,), dtype=torch.uint8).cuda())
    time.sleep(loading * rows / wanted)
steps = 0
while time.monotonic() < until:
    batch = data[steps % len(data)][: 8 << 20].float()
    (batch * 2).mean().item()
    steps += 1
    time.sleep(0.01)
print("step", steps, "at most", torch.cuda.max_memory_allocated() >> 20, "MiB in use")
print("done")
