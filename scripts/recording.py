"""Record the timeline for README's pictures: twenty seconds of PyTorch, JAX and CuPy on a GPU.

    python scripts/recording.py docs/pictures/recording.jsonl

PyTorch trains and validates, JAX scores, CuPy collects features. At half-time the program lowers PyTorch's cap. A
validation then runs out of memory; the program catches the error and continues with smaller batches. Later CuPy
concatenates its features into an array beyond its cap. Paths in the timeline are relative to the repository.
"""

import contextlib
import gc
import sys
import tempfile
import time
from pathlib import Path

import memguard

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 20.0
scratch = tempfile.TemporaryDirectory()
memguard.init(
    {
        "version": 1,
        "device": {"limit": "14GiB"},
        "frameworks": {"torch": {"limit": "5GiB"}, "jax": {"limit": "3GiB"}, "cupy": {"limit": "2GiB"}},
        "monitor": {"interval": "100ms", "timeline": f"{scratch.name}/run.jsonl"},
    }
)

import cupy  # noqa: E402 (init runs first)
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
    if part > 0.75 and not joined:  # concatenate into an array beyond the cap
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
memguard.shutdown()
(timeline,) = Path(scratch.name).glob("run-*.jsonl")
Path(sys.argv[1]).write_text(timeline.read_text().replace(f"{ROOT}/", "").replace(f"{scratch.name}/", ""))
scratch.cleanup()
print("done", validated)
