"""Whether one framework can be shown memory of another's as it lies there, and if not, why and what helps. Pure.

What each framework takes was measured on an H200 (docs/exchange.md): PyTorch aborts the process over negative
strides, TensorFlow over an address that is no multiple of 64, and XLA refuses one that is no multiple of 16 when
the array is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memguard.exchange.view import View

MOST_DIMENSIONS = 64
"""NumPy's, which makes the capsules."""


class Layout(Enum):
    """Which strides a framework's arrays may have."""

    FORWARD = "any strides that are not negative"
    DENSE = "no gaps, in any order of the dimensions"
    COMPACT = "row-major, no gaps"


@dataclass(frozen=True)
class Taker:
    """What a framework's arrays can be.

    alignment, host_alignment  what its addresses must be a multiple of, in bytes, on a GPU and on the host; on a GPU
                  an element's size anyway: a kernel that reads another ends the context for the whole process
    writes        whether an array can be written through: read-only memory may not become one
    on_gpu, on_host   where its arrays may lie
    repeats       whether a stride may be 0
    strided       whether it copies arrays that are not compact
    settles       whether it lets go of memory only once its work on it is done; else the lender has to wait for that
    """

    name: str
    title: str
    dtypes: frozenset[str]
    layout: Layout = Layout.FORWARD
    alignment: int = 1
    host_alignment: int = 1
    writes: bool = True
    on_gpu: bool = True
    on_host: bool = False
    repeats: bool = True
    strided: bool = True
    settles: bool = False


@dataclass(frozen=True)
class Obstacle:
    """Why memory cannot be shared as it is. `copied` says whether a copy can be had instead."""

    reason: str
    remedy: str
    copied: bool = True


def obstacle(view: View, taker: Taker, device: int | None) -> Obstacle | None:
    """What keeps `taker` from sharing this memory; None where nothing does. `device` is where its array should lie."""
    copy = "copy=True"
    alignment = taker.host_alignment if view.device is None else max(taker.alignment, view.itemsize)
    placed = view.device == device and (taker.on_host if device is None else taker.on_gpu)
    if (
        placed
        and view.dtype in taker.dtypes
        and len(view.shape) <= MOST_DIMENSIONS
        and view.compact
        and not view.address % alignment
        and not (view.readonly and taker.writes)
    ):
        return None  # most are: the rest is for the others
    if view.dtype not in taker.dtypes:
        return Obstacle(
            f"{taker.title} has no arrays of dtype {view.dtype} that can be handed over", _cast(view), False
        )
    if view.device is None and not taker.on_host:
        return Obstacle(f"it lies in host memory, and {taker.title}'s arrays lie on a GPU", f"{copy} uploads it")
    if view.device is not None and not taker.on_gpu:
        return Obstacle(f"it lies on a GPU, and {taker.title} never holds GPU memory", f"{copy} downloads it")
    if view.device != device:
        return Obstacle(f"it lies on {_place(view.device)}, not on {_place(device)}", f"{copy} copies it there")
    if len(view.shape) > MOST_DIMENSIONS:
        return Obstacle(
            f"it has {len(view.shape)} dimensions, and NumPy no more than {MOST_DIMENSIONS}", "reshape it", False
        )
    if not view.size:
        return None
    if taker.layout is Layout.COMPACT and not view.compact:
        return Obstacle(f"{taker.title} takes row-major arrays without gaps only, its strides are {view.strides}", copy)
    if taker.layout is Layout.DENSE and not view.dense:
        return Obstacle(f"{taker.title} takes arrays without gaps only, its strides are {view.strides}", copy)
    if view.backwards:
        return Obstacle(f"its strides are negative: {view.strides}", copy)
    if view.repeats and not taker.repeats:
        return Obstacle(
            f"{taker.title} misreads arrays that repeat their elements: its strides are {view.strides}", copy
        )
    if view.address % alignment:
        past = view.address % alignment
        return Obstacle(
            f"{taker.title} takes addresses that are multiples of {alignment} bytes, this one is {past} past one", copy
        )
    if view.readonly and taker.writes:
        return Obstacle(
            f"it is read-only, and {taker.title} would write through it", f"{copy}, or copy=False if nothing will write"
        )
    return None


def _place(device: int | None) -> str:
    return "the host" if device is None else f"cuda:{device}"


def _cast(view: View) -> str:
    if view.dtype == "bool":
        return "view it as uint8 where it comes from"
    return "cast it to float32 where it comes from" if "float" in view.dtype else "cast it where it comes from"
