"""NumPy's arrays, which lie in host memory. An array over read-only memory is read-only."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard._frameworks.arrays import array_interface
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import NUMPY_DTYPES, View

_ALIGNED = 64


class NumPyArrays(Arrays):
    """Array adapter of `numpy.ndarray`."""

    traits: ClassVar[Traits] = Traits(
        "numpy", NUMPY_DTYPES, Layout.FORWARD, writes=False, on_gpu=False, on_host=True, title="NumPy"
    )
    module: ClassVar[str] = "numpy"
    call: ClassVar[str] = "numpy.asarray"
    waits: ClassVar[str] = "host"
    takes_stream: ClassVar[bool] = False
    keeps_readonly: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["numpy"].ndarray)

    def offer(self, x: Any) -> Offer:
        if hasattr(x, "mask"):
            raise self.refusal("it is masked, and no other framework reads masks", "x.filled()")
        dtype, strides = self._layout(x)
        view = View(x.ctypes.data, tuple(x.shape), strides, dtype, None, not x.flags.writeable)
        return Offer(self.name, view, x)

    def place(self, view: View, device: int | None) -> int | None:
        return None

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        import numpy

        make_wait(None)
        return numpy.asarray(array_interface.WithInterface(view, lifetime))

    def copy(self, array: Any, device: int | None) -> Any:
        return array.copy(order="C")

    def compact(self, x: Any) -> Any:
        """Copy to an address that is a multiple of 64, because TensorFlow aborts the process on any other address, and
        NumPy aligns to less."""
        import numpy

        room: Any = numpy.empty(x.nbytes + _ALIGNED, numpy.uint8)
        start = -room.ctypes.data % _ALIGNED
        made = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        made[...] = x
        return made
