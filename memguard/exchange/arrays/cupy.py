"""CuPy's arrays, shared through DLPack."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard.devices import streams
from memguard.exchange import dlpack
from memguard.exchange.arrays.base import Arrays, Before
from memguard.exchange.loans import Loan, Offer
from memguard.exchange.rules import Layout, Taker
from memguard.exchange.view import DTYPES, View, dtype_name

_DTYPES = frozenset(name for name in DTYPES if not name.startswith("float8"))


class CuPy(Arrays):
    """`cupy.ndarray`."""

    taker: ClassVar[Taker] = Taker("cupy", "CuPy", _DTYPES, Layout.FORWARD)
    module: ClassVar[str] = "cupy"
    call: ClassVar[str] = "cupy.from_dlpack"
    waits: ClassVar[str] = "stream"

    def owns(self, x: Any) -> bool:
        cupy = sys.modules["cupy"]
        return isinstance(x, cupy.ndarray) or hasattr(x, "todense")

    def offer(self, x: Any) -> Offer:
        if hasattr(x, "todense"):
            raise self.cannot(f"it is a sparse {type(x).__name__}", "x.toarray()")
        dtype, itemsize = dtype_name(x.dtype), x.dtype.itemsize
        if dtype not in DTYPES or not x.dtype.isnative:
            raise self.cannot(f"its dtype {x.dtype} is not one that can be handed over", "cast it with x.astype")
        if any(stride % itemsize for stride in x.strides):
            raise self.cannot("its strides are no multiples of its elements' size", "cupy.ascontiguousarray(x)")
        strides = tuple(stride // itemsize for stride in x.strides)
        device = x.device.id
        view = View(x.data.ptr, tuple(x.shape), strides, dtype, device)
        return Offer(self.name, view, x, self.stream(device))

    def stream(self, device: int) -> int | None:
        import cupy

        stream = cupy.cuda.get_current_stream(device)
        return streams.Handle(stream.ptr, stream)

    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        import cupy

        before(stream)
        return cupy.from_dlpack(dlpack.capsule(view, loan, device=view.device))

    def copy(self, array: Any, device: int | None) -> Any:
        import cupy

        with cupy.cuda.Device(device):
            return array.copy(order="C")

    def compact(self, x: Any) -> Any:
        return x.copy(order="C")

    def flipped(self, array: Any, axes: tuple[int, ...]) -> Any:
        import cupy

        return cupy.flip(array, axes)

    def upload(self, host: Any, device: int) -> Any:
        import cupy

        with cupy.cuda.Device(device):
            return cupy.asarray(host)
