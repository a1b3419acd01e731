"""Decides whether one framework can share another framework's memory in place; if not, returns reason and remedy. Pure.

The rules were measured on an H200 (docs/exchange.md): PyTorch aborts the process on negative strides, TensorFlow on an
address that is not a multiple of 64. XLA rejects an address that is not a multiple of 16 at the first use of the array.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

from memguard._frameworks.arrays.view import ITEM_SIZES, View, compact
from memguard._frameworks.specs import SPECS

MOST_DIMENSIONS = 64
"""NumPy's largest number of dimensions, which applies because NumPy creates the DLPack capsules."""


class Layout(Enum):
    """The strides that a framework accepts."""

    FORWARD = "any strides that are not negative"
    DENSE = "no gaps, in any order of the dimensions"
    COMPACT = "row-major, no gaps"


@dataclass(frozen=True)
class Traits:
    """The properties of a framework's arrays.

    title         the framework's name in messages; by default the title in its `FrameworkSpec`
    alignment, host_alignment  an array's address must be a multiple of this many bytes, on a GPU and on the host. A GPU
                  address must also be a multiple of the element size: a kernel that reads a misaligned address destroys
                  the context for the whole process
    writes        the framework may write to its arrays, so they must not use read-only memory
    on_gpu, on_host   the framework's arrays may use GPU memory, host memory
    repeats       the framework accepts strides of 0
    strided       the framework can copy arrays that are not compact
    releases_when_done  the framework releases imported memory only after its own work on the memory is done; otherwise
                  the producer must wait for this work
    """

    name: str
    dtypes: frozenset[str]
    layout: Layout = Layout.FORWARD
    alignment: int = 1
    host_alignment: int = 1
    writes: bool = True
    on_gpu: bool = True
    on_host: bool = False
    repeats: bool = True
    strided: bool = True
    releases_when_done: bool = False
    title: str = ""

    def __post_init__(self) -> None:
        if not self.title:
            object.__setattr__(self, "title", SPECS[self.name].title)

    @functools.cached_property
    def multiples(self) -> dict[str, int]:
        """The required alignment of a GPU array's address in bytes, by dtype."""
        return {dtype: max(self.alignment, ITEM_SIZES[dtype]) for dtype in self.dtypes}

    @functools.cached_property
    def host_multiples(self) -> dict[str, int]:
        """The required alignment of a host array's address in bytes, by dtype."""
        return dict.fromkeys(self.dtypes, self.host_alignment)


@dataclass(frozen=True)
class Obstacle:
    """A reason why memory cannot be shared in place. `copied`: True if `copy=True` would succeed."""

    reason: str
    remedy: str
    copied: bool = True


def obstacle(view: View, consumer: Traits, device: int | None) -> Obstacle | None:
    """The reason why `consumer` cannot share the memory of `view`, or None. `device` is the GPU of the consumer's
    array."""
    address, shape, strides, dtype, lies, readonly = view
    on_gpu = device is not None
    multiple = (consumer.multiples if on_gpu else consumer.host_multiples).get(dtype)
    if (
        lies == device
        and multiple is not None
        and not address % multiple
        and (consumer.on_gpu if on_gpu else consumer.on_host)
        and len(shape) <= MOST_DIMENSIONS
        and compact(shape, strides)
        and not (readonly and consumer.writes)
    ):
        return None  # fast path for ordinary arrays; for others the checks below find the reason
    copy = "copy=True"
    alignment = consumer.host_alignment if view.device is None else max(consumer.alignment, view.itemsize)
    title = consumer.title
    if view.dtype not in consumer.dtypes:
        return Obstacle(f"{title} has no arrays of dtype {view.dtype} that can be handed over", _cast(view), False)
    if view.device is None and not consumer.on_host:
        return Obstacle(f"it lies in host memory, and {title}'s arrays lie on a GPU", f"{copy} uploads it")
    if view.device is not None and not consumer.on_gpu:
        return Obstacle(f"it lies on a GPU, and {title} never holds GPU memory", f"{copy} downloads it")
    if view.device != device:
        return Obstacle(f"it lies on {_place(view.device)}, not on {_place(device)}", f"{copy} copies it there")
    if len(view.shape) > MOST_DIMENSIONS:
        return Obstacle(
            f"it has {len(view.shape)} dimensions, and NumPy allows at most {MOST_DIMENSIONS}", "reshape it", False
        )
    if not view.size:
        return None
    if consumer.layout is Layout.COMPACT and not view.compact:
        return Obstacle(f"{title} takes only row-major arrays without gaps, its strides are {view.strides}", copy)
    if consumer.layout is Layout.DENSE and not view.dense:
        return Obstacle(f"{title} takes only arrays without gaps, its strides are {view.strides}", copy)
    if view.backwards:
        return Obstacle(f"its strides are negative: {view.strides}", copy)
    if view.repeats and not consumer.repeats:
        return Obstacle(f"{title} misreads arrays that repeat their elements: its strides are {view.strides}", copy)
    if view.address % alignment:
        past = view.address % alignment
        return Obstacle(
            f"{title} takes only addresses that are multiples of {alignment} bytes, this one is {past} past one", copy
        )
    if view.readonly and consumer.writes:
        return Obstacle(
            f"it is read-only, and {title} could write to it", f"{copy}, or copy=False if nothing will write to it"
        )
    return None


def _place(device: int | None) -> str:
    return "the host" if device is None else f"cuda:{device}"


def _cast(view: View) -> str:
    if view.dtype == "bool":
        return "view it as uint8 in its own framework"
    return "cast it to float32 in its own framework" if "float" in view.dtype else "cast it in its own framework"
