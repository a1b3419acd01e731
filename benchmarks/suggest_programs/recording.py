"""Twenty seconds of PyTorch, JAX and CuPy under a budget that becomes tight: what a report of a run is shown on.

    python benchmarks/suggest_programs/recording.py BUDGET

PyTorch trains and validates, JAX scores, CuPy collects features. After half of the time PyTorch's cap is lowered: a
validation runs out of memory, which the program catches, and goes on with smaller batches.
"""

import contextlib
import gc
import sys
import time

import memguard

SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
memguard.init(sys.argv[1])

import cupy  # noqa: E402 (the budget first)
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

WIDTH, BATCH = 2048, 4096
net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(10)]).cuda()
optimiser = torch.optim.AdamW(net.parameters())
weights = [0.02 * jax.random.normal(jax.random.PRNGKey(at), (WIDTH, WIDTH)) for at in range(6)]
features: list[object] = []


@jax.jit
def score(images):
    for one in weights:
        images = jnp.tanh(images @ one)
    return images.mean(axis=1)


def train(rows):
    loss = net(torch.randn(rows, WIDTH, device="cuda")).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


def validate(rows):
    kept = []
    for _ in range(12):
        kept.append(net(torch.randn(rows, WIDTH, device="cuda")))
    return float(sum(one.mean() for one in kept))


began, tight, joined, rows, validated = time.monotonic(), False, False, 16384, 0
while (spent := time.monotonic() - began) < SECONDS:
    part = spent / SECONDS
    with memguard.workload("train", framework="torch"):
        for _ in range(4):
            train(BATCH)
    with memguard.workload("score", framework="jax"):
        jax.block_until_ready(score(jnp.ones((4 * BATCH, WIDTH)) * spent))
    if len(features) * 64 < 1472 * part:  # 64 MiB each, up to 1.4 GiB
        with memguard.workload("features", framework="cupy"):
            features.append(cupy.sort(cupy.random.standard_normal((8192, WIDTH), dtype=cupy.float32), axis=1))
    if part > 0.75 and not joined:  # into one array that is too large
        joined = True
        with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError), memguard.workload("join", framework="cupy"):
            cupy.concatenate(features * 2)
    if part > 0.5 and not tight:
        tight = True
        gc.collect()
        torch.cuda.empty_cache()
        memguard.resize("torch", "2GiB")
    if part * 8 > validated + 1:
        validated += 1
        try:
            with memguard.workload("validate", framework="torch"), torch.no_grad():
                validate(rows)
        except torch.OutOfMemoryError:
            rows //= 8
        gc.collect()
    time.sleep(0.05)
memguard.trim()
time.sleep(0.3)
print("done", validated)
