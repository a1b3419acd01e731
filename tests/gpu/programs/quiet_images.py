"""Without a fault: train an image model of timm at increasing resolutions (progressive training)."""

import os
import time

import timm
import torch

until = time.monotonic() + float(os.environ.get("MOMENT_SECONDS", "120"))
model = timm.create_model("resnet50", pretrained=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
total = until - time.monotonic()
steps, most = 0, 0
while (left := until - time.monotonic()) > 0:
    side = 128 + 32 * int(4 * (1 - left / total))
    images = torch.randn(32, 3, side, side, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    steps, most = steps + 1, max(most, torch.cuda.max_memory_allocated())
    time.sleep(0.05)
print("step", steps, "at most", most >> 20, "MiB in use, held", torch.cuda.memory_reserved() >> 20)
print("done")
