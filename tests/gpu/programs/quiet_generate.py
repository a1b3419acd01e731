"""Without a fault: GPT-2 generates texts one by one, each with a cache that grows and is freed."""

import os
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

until = time.monotonic() + float(os.environ.get("MOMENT_SECONDS", "120"))
torch.manual_seed(7)
model = GPT2LMHeadModel(GPT2Config()).half().cuda().eval()
texts = 0
while time.monotonic() < until:
    prompt = torch.randint(0, 50257, (16, 64), device="cuda")
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=400, do_sample=False,
                   pad_token_id=50256)  # fmt: skip
    texts += 16
most = torch.cuda.max_memory_allocated()
print("step", texts, "at most", most >> 20, "MiB in use, held", torch.cuda.memory_reserved() >> 20)
print("done")
