"""What lies outside every cap, beside the constants of `_base/framework_spec.py` for `reserve: auto` and the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.child import main
from bench.measure import Run, measure
from bench.programs import six
from bench.programs.six import GIB, MIB, NAMES
from memguard._base.framework_spec import CONTEXT, OVERHEADS, SECOND_CONTEXT
from memguard._budget.policy import auto_reserve
from memguard._frameworks.specs import SPECS

SECOND = "second context"
AT_ONCE = 3
FIRST_USES = {
    "torch": ("cublas", "cudnn", "backward", "cusolver", "cufft"), "tensorflow": ("cublas", "cudnn"),
    "cupy": ("cublas", "cufft", "cusolver"), "jax": ("cublas", "cufft", "cusolver"),
}  # fmt: skip
"""In the order in which they are used. `backward` uses cuBLAS on a second thread."""


def _first_use(name: str, library: str) -> int:
    """The constant of one first use, in bytes."""
    sizes = [size for key, size in SPECS[name].first_uses if key == ("cublas" if library == "backward" else library)]
    return sizes[-1] if library == "backward" else sizes[0]


_WHOLE: dict[str, int] = {
    "context": CONTEXT, SECOND: OVERHEADS[SECOND_CONTEXT].workspace, **{name: SPECS[name].workspace for name in NAMES},
    "six": auto_reserve("hopper", NAMES),
}  # fmt: skip
"""Bytes that `reserve: auto` keeps."""
_PARTS = {f"{name}.{library}": _first_use(name, library) * 5 // 4 for name, uses in FIRST_USES.items()
          for library in uses}  # fmt: skip
"""The most bytes by which the ledger takes growth for a first use: a quarter more than was measured."""


@measure(
    "overheads", unit="MiB", bar={name: f"<= {size / MIB:g}" for name, size in {**_WHOLE, **_PARTS}.items()},
    seconds=35, beside=True,
)  # fmt: skip
def overheads(run: Run) -> dict[str, list[float]]:
    """Memory outside every cap: the CUDA context, each framework alone, the first uses of libraries, and all six."""
    with ThreadPoolExecutor(AT_ONCE) as threads:  # each has its own process's figures only
        six = threads.submit(run.program, "six", timeout=120)
        alone = dict(zip(NAMES, threads.map(lambda name: run.program("alone", name, timeout=120), NAMES), strict=True))
    found = {"six": [six.result()["outside"] / MIB], SECOND: [alone["pycuda"]["second"] / MIB]}
    found["context"] = [one["context"] / MIB for one in alone.values()]
    for name, one in alone.items():
        steps = one["outside"]  # rising
        found[name] = [max(size for _, size in steps) / MIB]
        for (_, before), (label, after) in itertools.pairwise(steps):
            if label in FIRST_USES.get(name, ()):
                found[f"{name}.{label}"] = [(after - before) / MIB]
    return found


def program_alone(name: str) -> dict[str, Any]:
    """One framework under a budget: what NVML says of the process beyond the context and what the framework holds. The
    context comes first, from the driver itself, as frameworks share it. Steps are labels with bytes."""
    import memguard

    more = {"growth": False} if name == "tensorflow" else {}
    memguard.init({"version": 1, "device": {"limit": 8 * GIB}, "frameworks": {name: {"limit": 4 * GIB, **more}}})
    raw = six.Raw()
    context = six.bytes_now()
    six.load(name)
    steps = []
    for label, work in globals()[f"_{name}"]():  # its uses that take memory outside its cap, in order
        kept.append(work())
        raw.wait()
        steps.append((label, six.bytes_now() - six.held(name) - context))
    found = {"context": context, "outside": steps}
    return {**found, "second": raw.second_context()} if name == "pycuda" else found


def program_six() -> dict[str, Any]:
    """All six live and used: what NVML says of the process beyond what they hold by the ledger."""
    _, readings = six.all_live(six.budget(40 * GIB, growth=False))
    rows = readings[-1]["frameworks"]
    return {"outside": six.bytes_now() - sum(row["held"] for row in rows.values())}


kept: list[Any] = []
"""What the steps made: freed memory would leave the caches as they are, but a handle may go with its array."""


def _torch() -> list[tuple[str, Callable[[], Any]]]:
    import torch

    on: dict[str, Any] = {"device": "cuda"}
    torch.zeros(1, **on)
    a, images, filters = torch.ones((512, 512), **on), torch.ones((4, 3, 32, 32), **on), torch.ones((8, 3, 3, 3), **on)

    def backward() -> Any:
        w = torch.ones((512, 512), requires_grad=True, **on)
        (a @ w).sum().backward()
        return w

    return [
        ("first tensor", lambda: a), ("cublas", lambda: a @ a),
        ("cudnn", lambda: torch.nn.functional.conv2d(images, filters)), ("backward", backward),
        ("cusolver", lambda: torch.linalg.svd(torch.rand((64, 64), **on))), ("cufft", lambda: torch.fft.fft(a)),
    ]  # fmt: skip


def _tensorflow() -> list[tuple[str, Callable[[], Any]]]:
    import tensorflow as tf

    with tf.device("GPU:0"):
        a, images, filters = tf.ones((1024, 1024)), tf.ones((4, 64, 64, 3)), tf.ones((3, 3, 3, 8))
        float(tf.reduce_sum(a))

    def within(work: Callable[[], Any]) -> Any:
        with tf.device("GPU:0"):
            return float(tf.reduce_sum(work()))

    return [
        ("first tensor", lambda: a),
        ("cublas", lambda: within(lambda: tf.matmul(a, a))),
        ("cudnn", lambda: within(lambda: tf.nn.conv2d(images, filters, 1, "SAME"))),
    ]


def _cupy() -> list[tuple[str, Callable[[], Any]]]:
    import cupy

    b = cupy.ones((512, 512), cupy.float32)
    c = b[:64, :64] + cupy.eye(64, dtype=cupy.float32)
    return [
        ("first tensor", lambda: c), ("cublas", lambda: b @ b), ("cufft", lambda: cupy.fft.fft(b)),
        ("cusolver", lambda: cupy.linalg.svd(c)), ("kernels", lambda: [cupy.sin(b), cupy.sort(b), b.sum()]),
    ]  # fmt: skip


def _jax() -> list[tuple[str, Callable[[], Any]]]:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((1024, 1024)).block_until_ready()
    c = (a[:256, :256] + jnp.eye(256)).block_until_ready()
    images, filters = jnp.ones((1, 3, 64, 64)), jnp.ones((8, 3, 3, 3))
    return [
        ("first tensor", lambda: c),
        ("cublas", lambda: jax.block_until_ready(a @ a)),
        ("cudnn", lambda: jax.block_until_ready(jax.lax.conv(images, filters, (1, 1), "SAME"))),
        ("cufft", lambda: jax.block_until_ready(jnp.fft.fft(a[0]))),
        ("cusolver", lambda: jax.block_until_ready(jnp.linalg.svd(c))),
    ]


def _pycuda() -> list[tuple[str, Callable[[], Any]]]:
    import numpy as np
    from pycuda import gpuarray

    a = gpuarray.to_gpu(np.ones(100_000, np.float32))
    return [("first tensor", lambda: a), ("kernels", lambda: [(a + a).get()])]


def _numba() -> list[tuple[str, Callable[[], Any]]]:
    from numba import cuda

    array = cuda.device_array(1)
    return [("first tensor", lambda: array), ("kernels", six.WORK["numba"])]


if __name__ == "__main__":
    main({"alone": program_alone, "six": program_six})
