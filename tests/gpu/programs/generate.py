"""Text generation: each token extends the key-value cache by concatenation."""

import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, SIZE, BATCH, PROMPT, TOKENS = 8, 16, 1024, 64, 512, 1600


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))

    def forward(self, x, past):
        query, key, value = (
            part.view(BATCH, -1, HEADS, SIZE // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).reshape(BATCH, -1, SIZE))
        return x + self.mlp(x), (key, value)


blocks = [Block().half().cuda() for _ in range(LAYERS)]
past = (BATCH, HEADS, PROMPT, SIZE // HEADS)
with torch.inference_mode():
    cache = [tuple(torch.zeros(past, dtype=torch.half, device="cuda") for _ in range(2)) for _ in blocks]
    x = torch.randn(BATCH, 1, SIZE, dtype=torch.half, device="cuda")
    for token in range(TOKENS):
        print("step", token, flush=True)
        for number, block in enumerate(blocks):
            x, cache[number] = block(x, cache[number])
print("done")
