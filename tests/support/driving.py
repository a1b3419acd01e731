"""Frameworks driven to their caps in one process, by their own allocators: what the tests of `tests/gpu` look at.

Nothing here judges. Sizes are bytes.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from support.arrays import put_row_stack_back
from support.independent import emptied, raw_memory

MIB, GIB = 1 << 20, 1 << 30
SEED = 20261121
SIX = {"tensorflow": "20%", "torch": "25%", "jax": "20%", "cupy": "15%", "pycuda": "10%", "numba": "10%"}
"""All six frameworks, with their shares of a limit, in the order of their import: TensorFlow first, on purpose."""
NAMES = tuple(SIX)
MAIN = {"tensorflow": "30%", "torch": "50%", "pycuda": "20%"}
"""The main job's."""
COUNTED = ("torch", "cupy", "pycuda", "numba")
"""The frameworks that give back what is freed: the driver's figure without them says what they held."""


def budget(shares: dict[str, str], limit: str = "40GiB", **tensorflow: Any) -> dict[str, Any]:
    """Each with its share, and more settings for TensorFlow (`growth=False`: then it says what it holds)."""
    frameworks: dict[str, dict[str, Any]] = {name: {"share": share} for name, share in shares.items()}
    if "tensorflow" in frameworks:
        frameworks["tensorflow"].update(tensorflow)
    return {"version": 1, "device": {"limit": limit}, "frameworks": frameworks}


def budget_of_six(**tensorflow: Any) -> dict[str, Any]:
    return budget(SIX, **tensorflow)


def capped(cap: str | int, *names: str, limit: str | int = "40GiB") -> dict[str, Any]:
    return {"version": 1, "device": {"limit": limit}, "frameworks": {name: {"limit": cap} for name in names}}


def reading(label: str) -> dict[str, Any]:
    """One ledger reading. Its rows add up to the total whatever they say: `unaccounted` is the remainder."""
    import memguard

    part = memguard.ledger().devices[0]
    return {
        "label": label,
        "sum_minus_total": sum(row.bytes for row in part.rows if row.bytes is not None) - part.device.total,
        "process": part.process,
        "unaccounted": part.row("unaccounted").bytes,
        "overhead": part.row("overhead").bytes,
        "frameworks": {
            row.name: {"held": row.bytes, "in_use": row.in_use} for row in part.rows if row.kind == "framework"
        },
    }


def row_of(name: str) -> dict[str, Any]:
    """What the ledger says of a framework."""
    row: dict[str, Any] = reading(name)["frameworks"][name]
    return row


# Each framework's own calls


def load(name: str) -> None:
    """Import the framework as a program does."""
    if name == "pycuda":
        import pycuda.autoinit  # noqa: F401
    elif name == "numba":
        import numba.cuda  # noqa: F401
    else:
        __import__(name)


def work_tensorflow() -> None:
    import tensorflow as tf

    with tf.device("GPU:0"):
        a = tf.random.normal((1024, 1024))
        kernel = tf.random.normal((3, 3, 3, 8))
        images = tf.random.normal((4, 64, 64, 3))
        float(tf.reduce_sum(tf.matmul(a, a))) + float(tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")))


def work_torch() -> None:
    import torch

    a = torch.randn(1024, 1024, device="cuda")
    conv = torch.nn.Conv2d(3, 8, 3, device="cuda")
    (conv(torch.randn(4, 3, 64, 64, device="cuda")).sum() + (a @ a).sum()).backward()
    torch.cuda.synchronize()


def work_jax() -> None:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((1024, 1024))
    assert float((a @ a)[0, 0]) == 1024.0
    kernel = jnp.ones((8, 3, 3, 3))
    jax.lax.conv(jnp.ones((1, 3, 64, 64)), kernel, (1, 1), "SAME").block_until_ready()
    jnp.linalg.svd(a[:256, :256] + jnp.eye(256))[1].block_until_ready()


def work_cupy() -> None:
    import cupy

    a = cupy.ones((1024, 1024), dtype=cupy.float32)
    assert float((a @ a)[0, 0]) == 1024.0
    cupy.linalg.svd(a[:256, :256] + cupy.eye(256, dtype=cupy.float32))


def work_pycuda() -> None:
    import numpy as np
    import pycuda.gpuarray as gpuarray

    a = gpuarray.to_gpu(np.ones(100_000, dtype=np.float32))
    (a + a).get()


def work_numba() -> None:
    import numpy as np

    put_row_stack_back()
    from numba import cuda

    @cuda.jit
    def double(values):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < values.size:
            values[i] *= 2

    values = cuda.to_device(np.ones(1000, dtype=np.float32))
    double[8, 128](values)
    assert values.copy_to_host().sum() == 2000.0


WORK: dict[str, Callable[[], None]] = {
    "tensorflow": work_tensorflow, "torch": work_torch, "jax": work_jax, "cupy": work_cupy, "pycuda": work_pycuda,
    "numba": work_numba,
}  # fmt: skip


def allocator(name: str) -> tuple[Callable[[int], Any], type[BaseException]]:
    """How to take n bytes, and the framework's own out-of-memory error."""
    if name == "torch":
        import torch

        return (lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")), torch.OutOfMemoryError
    if name == "tensorflow":
        import tensorflow as tf

        def allocate(n: int) -> Any:
            with tf.device("GPU:0"):
                return tf.zeros((max(n // 4, 1),), tf.float32)

        return allocate, tf.errors.ResourceExhaustedError
    if name == "jax":
        import jax
        import numpy as np

        source = np.zeros(300 * MIB, np.uint8)
        return (lambda n: jax.device_put(source[:n]).block_until_ready()), jax.errors.JaxRuntimeError
    if name == "cupy":
        import cupy

        return (lambda n: cupy.empty(n, cupy.uint8)), cupy.cuda.memory.OutOfMemoryError
    if name == "pycuda":
        import pycuda.driver as drv

        return (lambda n: drv.mem_alloc(n)), drv.MemoryError
    import numpy as np
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    return (lambda n: cuda.device_array(n, np.uint8)), CudaAPIError


# Driven to the caps


class Driven:
    """One framework at its cap: requests until it refuses, and what it holds by its own count."""

    def __init__(self, name: str, cap: int, seed: int = SEED) -> None:
        import memguard._api

        guard = memguard._api.current()
        self.name, self.cap, self.rng = name, cap, random.Random(seed)
        self.take, self.native = allocator(name)
        self.framework, self.device = guard.frameworks[name], guard.plan.devices[0].device
        self.live: list[Any] = []
        self.most = self.slack = 0  # slack: bytes of the cap that are not to be had
        self.refusals: list[dict[str, Any]] = []

    def held(self) -> int:
        usage = self.framework.usage(self.device)
        if usage is None:
            return 0
        size = usage.held if usage.held is not None else usage.held_at_least
        return size or 0

    def would_fit(self, size: int) -> bool | None:
        """By its own figures and rules, at its refusal; None for those that the driver is asked about (`refusals`) or
        whose own log says it (TensorFlow)."""
        if self.name == "torch":
            import torch

            rounded = -(-size // 512) * 512
            small, page = rounded <= MIB, 2 * MIB
            segment = page if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // page) * page
            return bool(torch.cuda.memory_stats()["reserved_bytes.all.current"] + segment <= self.cap - self.slack)
        if self.name != "jax":
            return None
        import jax

        stats = jax.local_devices()[0].memory_stats()
        rounded = -(-size // 256) * 256
        return bool(rounded <= max(stats["bytes_limit"] - stats["pool_bytes"], stats["largest_free_block_bytes"]))

    def until_refused(self, low: int, high: int) -> None:
        for _ in range(200_000):
            size = self.rng.randint(low, high)
            try:
                self.live.append(self.take(size))
            except Exception as error:
                self.refusals.append(
                    {
                        "refused_bytes": size,
                        "exception": f"{type(error).__module__}.{type(error).__qualname__}: {str(error)[:160]}",
                        "native": isinstance(error, self.native),
                        "would_have_fitted": self.would_fit(size),
                    }
                )
                return
            self.most = max(self.most, self.held())
        raise AssertionError(f"{self.name}: no refusal")

    def fill(self) -> None:
        self.until_refused(1 * MIB, 300 * MIB)
        self.until_refused(1, 1 * MIB)

    def free(self, count: int | None = None) -> None:
        if count is None:
            self.live.clear()
        else:
            self.rng.shuffle(self.live)
            del self.live[:count]

    def swap(self) -> None:
        """Free one array and take as much again, which fits where it was."""
        one = self.live.pop(self.rng.randrange(len(self.live)))
        size = one.nbytes if hasattr(one, "nbytes") else int(one.shape[0]) * 4  # JAX, TensorFlow
        del one
        self.live.append(self.take(size))

    def summary(self) -> dict[str, Any]:
        return {"cap": self.cap, "most_held": max(self.most, self.held()), "refusals": self.refusals}


def all_live(config: dict[str, Any], names: Iterable[str] = NAMES) -> tuple[Any, list[dict[str, Any]]]:
    """All imported in this order and each used; the guard and a reading after each step."""
    import memguard

    guard = memguard.init(config)
    readings = [reading("init")]
    for name in names:
        load(name)
    readings.append(reading("imported"))
    for name in names:
        WORK[name]()
        readings.append(reading(f"{name} live"))
    return guard, readings


def together(shares: dict[str, str], again: bool) -> dict[str, Any]:
    """Each filled in turn while the others stay full, each emptied in turn, and raw memory taken past all of them.

    again    each is emptied and driven to its refusal once more while the others are full; else PyTorch and PyCUDA free
             and ask in turn at their caps for six seconds
    """
    import memguard

    guard, readings = all_live(budget(shares), shares)
    caps = dict(guard.plan.devices[0].caps)
    driven = {name: Driven(name, caps[name], SEED + i) for i, name in enumerate(shares)}
    for name, one in driven.items():
        one.fill()
        readings.append(reading(f"{name} full"))
    time.sleep(1)  # all full: a sampler of 20 ms sees it
    churned = churn([driven[name] for name in ("torch", "pycuda")], 0 if again else 6)
    for name, one in driven.items() if again else ():
        one.free()
        one.fill()
        readings.append(reading(f"{name} full again"))
    readings.append(reading("all full"))
    time.sleep(1)
    in_turn = {
        name: emptied(
            name, lambda name=name: row_of(name)["held"], lambda name=name: (driven[name].free(), memguard.trim(name)),
            lambda: reading("emptied")["overhead"],
        )
        for name in shares if name in COUNTED
    }  # fmt: skip
    for one in driven.values():
        one.free()
    memguard.trim()
    readings.append(reading("freed and trimmed"))
    raw = raw_memory(lambda: int(reading("raw memory")["unaccounted"]))
    for name in shares:
        WORK[name]()
    readings.append(reading("works on"))
    return {
        "caps": caps, "reserve": guard.plan.devices[0].reserve, "churn": churned, "readings": readings,
        "driven": {name: one.summary() for name, one in driven.items()}, "emptied": in_turn, "raw": raw,
    }  # fmt: skip


def churn(driven: list[Driven], seconds: float) -> dict[str, int]:
    """Free a few and ask again, in turn at their caps, refusals included. TensorFlow would retry for ten seconds."""
    counts = {"allocated": 0, "refused": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for one in driven:
            one.free(one.rng.randint(1, 4))
            before = len(one.live)
            one.until_refused(1, 300 * MIB)
            counts["allocated"] += len(one.live) - before
            counts["refused"] += 1
    return counts


def loop(limit: str, seconds: float) -> dict[str, Any]:
    """All six at their caps, freeing and asking in turn, refusals included; a ledger each second.

    TensorFlow without growth: then it says what it holds, and nothing of its pool is in `unaccounted`.
    """
    guard, _ = all_live(budget(SIX, limit, growth=False))
    caps = guard.plan.devices[0].caps
    driven = {name: Driven(name, caps[name], SEED + 100 + i) for i, name in enumerate(NAMES)}
    for one in driven.values():
        one.fill()
    series = [reading("all full")]
    started = time.monotonic()
    refused = dict.fromkeys(NAMES, 0)
    slow_after = dict.fromkeys(("tensorflow", "jax"), 0.0)  # a refusal takes each of them ten seconds
    following = 0.0

    def look() -> None:
        """A reading, if the last one is a second old: asked after each refusal, as ten of them take seconds."""
        nonlocal following
        elapsed = time.monotonic() - started
        if elapsed >= following:
            series.append(reading(f"{elapsed:.0f} s"))
            following = elapsed + 1.0

    while time.monotonic() - started < seconds:
        for name, one in driven.items():
            look()
            elapsed = time.monotonic() - started
            slow = name in slow_after
            if slow and elapsed < slow_after[name]:
                for _ in range(20):
                    one.swap()
                continue
            for _ in range(1 if slow else 10):
                one.free(one.rng.randint(1, 8))
                one.until_refused(1 * MIB, 200 * MIB)
                refused[name] += 1
                look()
            if slow:
                slow_after[name] = elapsed + 60.0
    unaccounted = [r["unaccounted"] for r in series]
    outside = [r["unaccounted"] + r["overhead"] for r in series]  # a leak may hide in either
    return {
        "seconds": time.monotonic() - started,
        "refused": refused,
        "not_native": [r for one in driven.values() for r in one.refusals if not r["native"]],
        "fitted": [r for r in driven["jax"].refusals if r["would_have_fitted"]],
        "held": {name: (max(one.most, one.held()), one.cap) for name, one in driven.items()},
        "readings": len(series),
        "sum_minus_total": max(abs(r["sum_minus_total"]) for r in series),
        "unaccounted_drift": max(abs(value - unaccounted[0]) for value in unaccounted),
        "outside_drift": max(abs(value - outside[0]) for value in outside),
    }


def in_order(names: Iterable[str], cap: int = GIB) -> dict[str, Any]:
    """Frameworks imported in this order under one budget: each works, and each stops at its cap."""
    import memguard

    names = list(names)
    guard, _ = all_live(capped(cap, *names, limit=cap * len(names) + 2 * GIB), names)
    found: dict[str, Any] = {}
    for name in names:
        one = Driven(name, cap)
        one.until_refused(64 * MIB, 64 * MIB)
        found[name] = {**one.summary(), "allocated": 64 * MIB * len(one.live)}
        one.free()
    for name in reversed(names):
        WORK[name]()
    part = memguard.ledger().devices[0]
    return {
        "found": found,
        "enforcement": {name: part.row(name).enforcement for name in names},
        **reading("end"),
        "reserve": guard.plan.devices[0].reserve,
    }


def circumstance(name: str, when: str) -> dict[str, Any]:
    """Imported after `init`, before it, or live before it: does a cap of 2 GiB hold, and does `shutdown` undo it?"""
    import memguard

    if when == "imported" and name == "pycuda":
        import pycuda.driver
        import pycuda.gpuarray  # noqa: F401 (its defaults hold mem_alloc already)
    elif when != "later":
        load(name)
    take = allocator(name)[0] if when == "live" else None
    before = [take(64 * MIB) for _ in range(40)] if take is not None else []  # 2.5 GiB: above the cap
    try:
        guard = memguard.init(capped("2GiB", name, limit="8GiB"))
    except memguard.CapNotApplied as error:
        return {"too_late": str(error)}
    load(name)
    one = Driven(name, guard.plan.devices[0].caps[name])
    one.until_refused(64 * MIB, 64 * MIB)
    enforcement = memguard.ledger().devices[0].row(name).enforcement
    if name == "pycuda":
        import numpy as np
        import pycuda.gpuarray as gpuarray

        try:
            gpuarray.zeros(one.cap, np.uint8)
            one.refusals.append({"native": False, "exception": "gpuarray.zeros was not refused"})
        except one.native:
            pass
    summary = one.summary()
    stays = memguard.shutdown()
    beyond = []
    try:
        while len(beyond) < 40:
            beyond.append(one.take(64 * MIB))
    except one.native:
        pass
    return {
        **summary, "enforcement": enforcement, "notes": guard.notes, "stays": stays, "taken": len(one.live) * 64 * MIB,
        "before": len(before) * 64 * MIB, "undone": len(beyond) == 40,
    }  # fmt: skip


# What a framework's own texts say


def bfc_refusals(log: str) -> list[dict[str, Any]]:
    """What TensorFlow's allocator logs about itself at each refusal, as it prints it (two decimals)."""
    size = r"([\d.]+)([KMGT]i)?B"
    pattern = rf"Total size in pool: {size} memory_limit_: {size} available size: {size}"
    scale = {"": 1, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}
    found = []
    for match in re.finditer(pattern, log):
        pool, limit, available = (float(match[i]) * scale[match[i + 1] or ""] for i in (1, 3, 5))
        found.append({"text": match[0], "pool": int(pool), "memory_limit": int(limit), "available": int(available)})
    return found
