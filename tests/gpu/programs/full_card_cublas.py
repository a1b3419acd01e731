"""Fill the GPU with a data set, then compute the first matrix product."""

import torch

weights, product = torch.ones(1024, 1024, device="cuda"), torch.empty(1024, 1024, device="cuda")
step = torch.zeros(1, device="cuda")
cached = []
for size in (16 << 20, 1 << 20):
    while len(cached) < 400 and torch.cuda.mem_get_info()[0] > size + (4 << 20):
        cached.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
print("data loaded", flush=True)
torch.mm(weights, weights, out=product)
print("done", float(product[0, 0]))
