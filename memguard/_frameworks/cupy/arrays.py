"""The exchange adapter of CuPy's arrays: CuPy imports another framework's array through DLPack."""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar

from memguard._devices import streams
from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import NO_FLOAT8, View, new_view


class CuPyArrays(Arrays):
    """Exports, imports and copies `cupy.ndarray` objects for `memguard.exchange`."""

    traits: ClassVar[Traits] = Traits("cupy", NO_FLOAT8, Layout.FORWARD)
    module: ClassVar[str] = "cupy"
    call: ClassVar[str] = "cupy.from_dlpack"
    waits: ClassVar[str] = "stream"

    def owns(self, x: Any) -> bool:
        cupy = sys.modules["cupy"]
        return isinstance(x, cupy.ndarray) or hasattr(x, "todense")

    def offer(self, x: Any) -> Offer:
        if hasattr(x, "todense"):
            raise self.refusal(f"it is a sparse {type(x).__name__}", "x.toarray()")
        dtype, strides = self._layout(x)
        device = x.device.id
        view = new_view((x.data.ptr, tuple(x.shape), strides, dtype, device, False))
        return new_offer(("cupy", view, x, self.stream(device), None, None, False))

    def stream(self, device: int) -> int | None:
        cupy = sys.modules.get("cupy") or importlib.import_module("cupy")
        stream = cupy.cuda.get_current_stream(device)
        handle: int = stream.ptr
        return handle if handle <= streams.PER_THREAD else streams.StreamHandle(handle, stream)

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        make_wait(stream)
        cupy = sys.modules.get("cupy") or importlib.import_module("cupy")
        return cupy.from_dlpack(dlpack.capsule(view, lifetime, device=view.device))

    def copy(self, array: Any, device: int | None) -> Any:
        import cupy

        with cupy.cuda.Device(device):
            return array.copy(order="C")

    def compact(self, x: Any) -> Any:
        return x.copy(order="C")

    def flip(self, array: Any, axes: tuple[int, ...]) -> Any:
        import cupy

        return cupy.flip(array, axes)

    def upload(self, host: Any, device: int) -> Any:
        import cupy

        with cupy.cuda.Device(device):
            return cupy.asarray(host)
