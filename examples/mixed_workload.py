"""TensorFlow prepares images, PyTorch trains on them, CuPy, JAX and Numba work on the scores, and a PyCUDA kernel
smooths them: six frameworks, one process, one budget.

    python examples/mixed_workload.py                      # with the budget of examples/mixed.yaml
    python examples/mixed_workload.py --without-memguard   # what happens otherwise
    python examples/mixed_workload.py --record trace.jsonl # write what is allocated, for `memguard replay`

Needs a GPU, tensorflow, torch, cupy, jax, numba-cuda, pycuda and nvcc. The images are made here, from a fixed seed.
No array passes through the host on its way from one framework to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
BATCHES, BATCH, SIDE = 40, 64, 64
ACTIVATIONS = 2 << 30  # PyTorch's working set in the middle of the job: 2 GiB in one piece

KERNEL = """
__global__ void smooth(const float *score, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float left = score[max(i - 1, 0)], right = score[min(i + 1, n - 1)];
        out[i] = (left + 2.0f * score[i] + right) / 4.0f;
    }
}
"""


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bright blobs on noise; the class says in which half the blob is."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0.0, 1.0, (count, SIDE, SIDE, 1)).astype(np.float32)
    classes = rng.integers(0, 2, count)
    for image, half in zip(images, classes):
        row, column = rng.integers(8, SIDE - 8), rng.integers(8, SIDE // 2 - 4) + half * SIDE // 2
        image[row - 4 : row + 4, column - 4 : column + 4] += 3.0
    return images, classes.astype(np.int64)


def prepare(images: np.ndarray) -> Any:
    """TensorFlow, on the GPU: blur, normalise, augment."""
    import tensorflow as tf

    with tf.device("GPU:0"):
        batch = tf.constant(images)
        blurred = tf.nn.avg_pool2d(batch, 3, 1, "SAME")
        normal = (blurred - tf.reduce_mean(blurred)) / tf.math.reduce_std(blurred)
        return tf.transpose(tf.concat([normal, tf.image.flip_up_down(normal)], 0), [0, 3, 1, 2])


def train(batches: int) -> tuple[list[float], Any]:
    """PyTorch: a small convolutional network on what TensorFlow prepared, handed over without the host."""
    import tensorflow as tf
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(32 * 16, 2),
    ).cuda()  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    losses = []
    scores = torch.empty(0, device="cuda")
    for step in range(batches):
        images, classes = make_images(BATCH, seed=step)
        prepared = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(prepare(images)))
        wanted = torch.from_numpy(np.concatenate([classes, classes])).cuda()
        if step == batches // 2:
            workspace = torch.empty(ACTIVATIONS, dtype=torch.uint8, device="cuda")
            workspace.zero_()
            del workspace
        answer = net(prepared)
        loss = nn.functional.cross_entropy(answer, wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        scores = answer.softmax(1)[:, 1].detach().contiguous()
    torch.cuda.synchronize()
    return losses, scores


def standardise(scores: Any) -> Any:
    """CuPy, on PyTorch's scores in place (DLPack): log-odds with mean 0 and deviation 1."""
    import cupy

    score = cupy.clip(cupy.from_dlpack(scores), 1e-6, 1 - 1e-6)
    odds = cupy.log(score / (1 - score))
    history = cupy.zeros(32 << 20, cupy.float32)  # 128 MiB of working memory, given back to CuPy's pool
    history[: odds.size] = odds
    odds = (history[: odds.size] - odds.mean()) / (odds.std() + 1e-6)
    cupy.cuda.get_current_stream().synchronize()
    return odds


def calibrate(odds: Any) -> Any:
    """JAX, on CuPy's log-odds (DLPack): a temperature found by gradient descent, compiled by XLA."""
    import jax
    import jax.numpy as jnp

    values = jax.dlpack.from_dlpack(odds)

    @jax.jit
    def descend(temperature: Any, values: Any) -> Any:
        loss = jax.grad(lambda t: jnp.mean((jax.nn.sigmoid(values / t) - jax.nn.sigmoid(values)) ** 2 + 0.01 * t**2))
        return jax.lax.fori_loop(0, 50, lambda _, t: t - 0.5 * loss(t), temperature)

    calibrated = jax.nn.sigmoid(values / jnp.maximum(descend(jnp.float32(1.5), values), 0.1))
    return calibrated.block_until_ready()


def mark(calibrated: Any) -> Any:
    """Numba, a kernel of our own over JAX's array: certain scores are pulled to 0 and 1."""
    from numba import cuda

    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack  # numba-cuda 0.30 uses a name that NumPy 2.5 removed

    @cuda.jit
    def pull(score: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < score.size:
            out[i] = 0.0 if score[i] < 0.1 else 1.0 if score[i] > 0.9 else score[i]

    score = cuda.as_cuda_array(calibrated)
    out = cuda.device_array(score.size, np.float32)
    pull[(score.size + 127) // 128, 128](score, out)
    cuda.synchronize()
    return out


def post_process(marked: Any) -> np.ndarray:
    """PyCUDA: a kernel of our own over Numba's array, read in place."""
    import pycuda.gpuarray as gpuarray
    from pycuda.compiler import SourceModule

    smooth = SourceModule(KERNEL).get_function("smooth")
    count = marked.size
    out = gpuarray.zeros(count, np.float32)
    smooth(
        np.intp(marked.device_ctypes_pointer.value),
        out,
        np.int32(count),
        block=(128, 1, 1),
        grid=((count + 127) // 128, 1),
    )
    history = gpuarray.zeros(64 << 20, np.float32)  # 256 MiB of results kept on the GPU
    history[:count] = out
    return out.get()


def job() -> dict[str, Any]:
    import pycuda.autoinit  # noqa: F401  (served by the primary context: no second one)
    import tensorflow as tf  # noqa: F401  (before torch: with both in the budget, memguard makes that work)
    import torch

    prepare(make_images(4, seed=0)[0])
    torch.cuda.init()
    losses, scores = train(BATCHES)
    smoothed = post_process(mark(calibrate(standardise(scores))))
    return {
        "first_loss": round(losses[0], 3),
        "last_loss": round(float(np.mean(losses[-5:])), 3),
        "scores": int(smoothed.size),
        "mean_score": round(float(smoothed.mean()), 3),
    }


def with_memguard(record: str | None) -> int:
    import memguard

    print(memguard.init(HERE / "mixed.yaml"))
    print("\nledger before the work\n")
    print(memguard.ledger())
    import tensorflow as tf  # noqa: F401
    import torch

    torch.cuda.init()
    import cupy  # noqa: F401
    import jax  # noqa: F401
    import numba.cuda  # noqa: F401
    import pycuda.autoinit  # noqa: F401

    recording = memguard.record_trace(record) if record else contextlib.nullcontext()
    with recording, memguard.workload("train", framework="torch", needs=ACTIVATIONS) as report:
        result = job()
    print("\nresult:", json.dumps(result))
    print(f"torch: peak {(report.peak or 0) >> 20} MiB in use, {(report.delta or 0) >> 20} MiB left behind")
    print("\nledger after the work\n")
    print(memguard.ledger())
    memguard.shutdown()
    return 0


def without_memguard() -> int:
    """The same job; then NVML's figure for this process, the only one that there is without memguard."""
    import pynvml

    code = 0
    try:
        print("result:", json.dumps(job()))
    except Exception as error:
        code = 1
        print(f"died: {type(error).__module__}.{type(error).__name__}: {str(error)[:300]}")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    own = next(
        (p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()), 0
    )
    free = pynvml.nvmlDeviceGetMemoryInfo(handle).free
    print(f"this process holds {own >> 20} MiB by NVML, {free >> 20} MiB are free; nothing says which framework has it")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-memguard", action="store_true")
    parser.add_argument("--record", metavar="PATH")
    arguments = parser.parse_args()
    return without_memguard() if arguments.without_memguard else with_memguard(arguments.record)


if __name__ == "__main__":
    raise SystemExit(main())
