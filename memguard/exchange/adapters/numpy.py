"""NumPy's arrays: host memory, never a GPU's. Read-only memory becomes a read-only array."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard.exchange.adapters import array_interface
from memguard.exchange.adapters.base import Arrays, Before
from memguard.exchange.compatibility import Layout, Taker
from memguard.exchange.lifetimes import Loan, Offer
from memguard.exchange.view import NUMPYS, View

_ALIGNED = 64


class NumPy(Arrays):
    """`numpy.ndarray`."""

    taker: ClassVar[Taker] = Taker("numpy", "NumPy", NUMPYS, Layout.FORWARD, writes=False, on_gpu=False, on_host=True)
    module: ClassVar[str] = "numpy"
    call: ClassVar[str] = "numpy.asarray"
    waits: ClassVar[str] = "host"
    told: ClassVar[bool] = False
    keeps_readonly: ClassVar[bool] = True

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["numpy"].ndarray)

    def offer(self, x: Any) -> Offer:
        if hasattr(x, "mask"):
            raise self.cannot("it is masked, which no framework here reads", "x.filled()")
        dtype, strides = self._layout(x)
        view = View(x.ctypes.data, tuple(x.shape), strides, dtype, None, not x.flags.writeable)
        return Offer(self.name, view, x)

    def place(self, view: View, device: int | None) -> int | None:
        return None

    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        import numpy

        before(None)
        return numpy.asarray(array_interface.Shown(view, loan))

    def copy(self, array: Any, device: int | None) -> Any:
        return array.copy(order="C")

    def compact(self, x: Any) -> Any:
        """At a multiple of 64 bytes, which NumPy's own memory mostly is not: TensorFlow aborts the process over it."""
        import numpy

        room: Any = numpy.empty(x.nbytes + _ALIGNED, numpy.uint8)
        start = -room.ctypes.data % _ALIGNED
        made = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        made[...] = x
        return made
