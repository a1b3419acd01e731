"""The toy's tensors: values in the host's memory."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from memguard._frameworks.arrays import array_interface
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import NUMPY_DTYPES, View


class ToyArrays(Arrays):
    """`toy.Tensor`."""

    traits: ClassVar[Traits] = Traits("toy", NUMPY_DTYPES, Layout.FORWARD, on_gpu=False, on_host=True)
    module: ClassVar[str] = "toy"
    call: ClassVar[str] = "toy.Tensor"
    waits: ClassVar[str] = "host"
    takes_stream: ClassVar[bool] = False

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["toy"].Tensor)

    def offer(self, x: Any) -> Offer:
        dtype, strides = self._layout(x.values)
        return Offer(self.name, View(x.values.ctypes.data, x.values.shape, strides, dtype, None, False), x)

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        import numpy

        import toy

        make_wait(None)
        return toy.Tensor(numpy.asarray(array_interface.WithInterface(view, lifetime)))

    def copy(self, array: Any, device: int | None) -> Any:
        return type(array)(array.values.copy())

    def compact(self, x: Any) -> Any:
        return type(x)(x.values.copy())
