"""The exchange adapter of Numba's device arrays.

If Numba is the producer, the consumer waits for the array's stream or, if the array has no stream, for all work of
the context. If Numba is the consumer, the stream that the user passed waits for the producer and becomes the array's
stream; without a stream, the host waits.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar

from memguard._devices import contexts, copies, streams
from memguard._frameworks.arrays import array_interface
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import NUMPY_DTYPES, View


class NumbaArrays(Arrays):
    """Exports, imports and copies the device arrays of `numba.cuda` for `memguard.exchange`."""

    traits: ClassVar[Traits] = Traits("numba", NUMPY_DTYPES, Layout.FORWARD, repeats=False, strided=False)
    module: ClassVar[str] = "numba"
    call: ClassVar[str] = "numba.cuda.as_cuda_array"
    waits: ClassVar[str] = "host"
    copies_on: ClassVar[bool] = True
    compacts: ClassVar[Layout | None] = Layout.COMPACT

    def owns(self, x: Any) -> bool:
        cuda = sys.modules.get("numba.cuda")
        return cuda is not None and cuda.is_cuda_array(x) and hasattr(x, "copy_to_host")

    def offer(self, x: Any) -> Offer:
        view, stream, context = self._interface(x)
        return new_offer(("numba", view, x, stream, context, None, False))

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        make_wait(stream)
        cuda = sys.modules.get("numba.cuda") or importlib.import_module("numba.cuda")
        return cuda.as_cuda_array(array_interface.WithInterface(view, lifetime, stream), sync=False)

    def place(self, view: View, device: int | None) -> int | None:
        here = contexts.current()
        return super().place(view, device) if device is not None or here is None else here

    def copy(self, array: Any, device: int | None) -> Any:
        from numba import cuda

        with cuda.gpus[device]:
            made = cuda.device_array(array.shape, array.dtype)
        if array.size:
            copies.device(_address(made), _address(array), array.size * array.dtype.itemsize, device or 0)
        return made

    def copy_on(self, array: Any, device: int, stream: int) -> Any:
        from numba import cuda

        with cuda.gpus[device]:
            named = cuda.external_stream(stream or streams.LEGACY)
            named.owner = stream  # Numba's object does not keep the stream alive
            made = cuda.device_array(array.shape, array.dtype, stream=named)
            ordered = _in_order_of_default_stream(cuda)
        if array.size:
            if ordered:
                streams.follow_default(device, stream)
            nbytes, context = array.size * array.dtype.itemsize, contexts.primary(device)
            copies.queue(_address(made), _address(array), nbytes, context, stream)
        return made

    def compact(self, x: Any) -> Any:
        found = streams.place(_address(x))
        return self.copy(x, found[0] if found else 0)

    def upload(self, host: Any, device: int) -> Any:
        from numba import cuda

        with cuda.gpus[device]:
            return cuda.to_device(host)


def _in_order_of_default_stream(cuda: Any) -> bool:
    """True if Numba's memory manager may reuse freed memory while work on the default stream still uses the memory.

    True for RMM's pools, which order a free and the reuse on that stream. Numba's own manager frees by `cuMemFree`,
    which waits for all work, and memguard's pool reuses no block with unfinished work.
    """
    driver: Any = sys.modules.get("numba.cuda.cudadrv.driver")
    return not isinstance(cuda.current_context().memory_manager, getattr(driver, "NumbaCUDAMemoryManager", ()))


def _address(array: Any) -> int:
    address: int = array.__cuda_array_interface__["data"][0]
    return address
