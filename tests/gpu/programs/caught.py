"""Inference that halves its batch until it fits: the program exits normally."""

import torch

layer = torch.nn.Linear(1024, 1024, device="cuda")


def answer(rows):
    return layer(torch.zeros(rows, 1024, device="cuda"))


rows = 1 << 20
with torch.no_grad():
    answer(8)
    while True:
        try:
            answer(rows)
        except torch.OutOfMemoryError:
            print(rows, "rows do not fit", flush=True)
            torch.cuda.empty_cache()
            rows //= 2
        else:
            break
print("step", rows)
print("done")
