"""Creates an allocator's model at its start on one GPU, and computes the driver bytes of one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memguard._base.types import Device
from memguard._base.units import MIB, round_up
from memguard._frameworks.simulated.allocators import (
    Allocator,
    BFCAllocator,
    alloc_size,
    bin_number,
    jax_default_limit,
    tensorflow_default_limit,
)


class Start(NamedTuple):
    """The parameters of an allocator when its framework starts on a GPU. `cap` is bytes; None: no cap."""

    take: Callable[[int], None]
    give: Callable[[int], None]
    cap: int | None
    gpu: Device
    free: int
    growth: bool


def bfc(start: Start) -> Allocator:
    limit = start.cap
    if limit is None:
        limit = tensorflow_default_limit(start.free, start.gpu.architecture)
    return BFCAllocator(start.take, start.give, limit, start.growth)


def xla(start: Start) -> Allocator:  # the budget switches its preallocation off
    limit = jax_default_limit(start.gpu.usable) if start.cap is None else start.cap
    return BFCAllocator(start.take, start.give, limit, growth=start.cap is not None, collects=False)


def torch_footprint(size: int) -> int:
    return 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else round_up(size)


def bfc_footprint(size: int) -> int:
    return round_up(size, 256)


def pool_footprint(size: int) -> int:
    return round_up(alloc_size(bin_number(max(size, 1))))
