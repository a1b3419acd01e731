"""An out-of-memory error that idle memory could have prevented, and the same with `memguard.retry`.

    python examples/retry.py              # on a simulated H200
    python examples/retry.py --real       # on this machine's GPU, with PyTorch and CuPy

CuPy caches most of the card and uses nothing of it. PyTorch then needs more than is left.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import memguard

GIB = 1 << 30
BUDGET = {
    "version": 1,
    "device": {"limit": "95%"},
    "frameworks": {"torch": {"min": "20%", "max": "80%"}, "cupy": {"min": "10%", "max": "80%"}},
}


class Array:
    """A simulated array: it goes back to its framework when Python lets go of it."""

    def __init__(self, guard: memguard.Guard, framework: str, size: int) -> None:
        self._framework = guard.frameworks[framework]
        self._id = self._framework.allocate(size)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            self._framework.free(self._id)  # type: ignore[attr-defined]


def simulated(guard: memguard.Guard) -> tuple[Callable[[int], object], Callable[[int], object]]:
    return (lambda size: Array(guard, "torch", size)), (lambda size: Array(guard, "cupy", size))


def real() -> tuple[Callable[[int], object], Callable[[int], object]]:
    import cupy
    import torch

    return (
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        lambda size: cupy.empty(size, dtype=cupy.uint8),
    )


def main(for_real: bool) -> int:
    guard = memguard.init(BUDGET, simulate=None if for_real else "h200")
    torch, cupy = real() if for_real else simulated(guard)
    free = guard.plan.devices[0].limit // GIB

    def idle() -> None:
        """CuPy works with seven tenths of the limit, and is done: its pool keeps them."""
        arrays = [cupy(GIB) for _ in range(free * 7 // 10)]
        del arrays

    def step(gib: int) -> str:
        arrays = [torch(GIB) for _ in range(gib)]
        return f"PyTorch held {len(arrays)} GiB"

    @memguard.retry(shrink="gib")
    def fitting(gib: int) -> str:
        return step(gib)

    idle()
    print("without memguard.retry:")
    try:
        print(f"  {step(free // 2)}")
    except Exception as error:
        print(f"  {type(error).__name__}")
    print("with it:")
    print(f"  {memguard.retry.call(step, free // 2)}")
    print("a batch that fits nowhere, halved until it does:")
    print(f"  {fitting(free * 2)}")
    print(memguard.ledger())
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="  memguard: %(message)s", level=logging.WARNING)
    raise SystemExit(main("--real" in sys.argv[1:]))
