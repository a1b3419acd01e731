"""A DataLoader with workers and pinned memory; every batch stays on the GPU."""

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 16 * 34

    def __getitem__(self, index):
        return torch.full((4, 1024, 1024), index % 256, dtype=torch.uint8)


if __name__ == "__main__":
    kept = []
    for number, batch in enumerate(DataLoader(Images(), batch_size=16, num_workers=2, pin_memory=True)):
        print("step", number, flush=True)
        kept.append(batch.to("cuda", non_blocking=True))
    torch.cuda.synchronize()
    print("done", len(kept))
