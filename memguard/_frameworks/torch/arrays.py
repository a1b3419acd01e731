"""Shares PyTorch's tensors through DLPack.

`torch.from_dlpack` aborts the process if a stride is negative (measured).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Obstacle, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer, new_offer
from memguard._frameworks.arrays.view import DTYPES, View, new_view


class TorchArrays(Arrays):
    """The exchange adapter of strided tensors, on a GPU or the host."""

    traits: ClassVar[Traits] = Traits("torch", frozenset(DTYPES), Layout.FORWARD, on_host=True)
    module: ClassVar[str] = "torch"
    call: ClassVar[str] = "torch.from_dlpack"
    waits: ClassVar[str] = "stream"

    def owns(self, x: Any) -> bool:
        return isinstance(x, sys.modules["torch"].Tensor)

    def offer(self, x: Any) -> Offer:
        try:
            if x.is_nested:
                raise self.refusal("it is nested: tensors of several shapes", "its parts, x.unbind()")
            if x.is_quantized:
                raise self.refusal("it is quantised, which no other framework reads", "x.dequantize()")
            if x.layout is not sys.modules["torch"].strided:
                raise self.refusal(f"its layout is {x.layout}, which has no strides", "x.to_dense()")
            if x.is_conj() or x.is_neg():
                raise self.refusal(
                    "its values are conjugated or negated only when read", "x.resolve_conj() or x.resolve_neg()"
                )
            place = x.device
            where = place.type
            if where != "cuda" and where != "cpu":
                raise self.refusal(f"it lies on the device {place}", "move it to a CUDA device or the host")
            dtype = _name(x.dtype)
            if dtype not in DTYPES:
                raise self.unknown_dtype(x.dtype, "cast it")
            address = x.data_ptr()
            if not address and x.numel():
                raise self.refusal("it has no memory of its own", "hand over a real tensor")
            device = place.index if where == "cuda" else None
            view = new_view((address, tuple(x.shape), tuple(x.stride()), dtype, device, False))
            # The offer holds `x.detach()` instead of `x`, because assigning `x.data`, as `module.to(...)` does, gives
            # `x` other memory, while the detached tensor keeps this memory alive.
            stream = None if device is None else self.stream(device)
            return new_offer(("torch", view, x.detach(), stream, None, None, False))
        except (RuntimeError, ValueError) as error:  # a fake, functional or lazy tensor has no memory
            message = (str(error).splitlines() or [type(error).__name__])[0]
            raise self.refusal(f"it has no memory: {message}", "hand over a real tensor") from error

    def obstacle(self, x: Any) -> Obstacle | None:
        if x.requires_grad:
            return Obstacle("it requires a gradient, and autograd would not see what is written to it", "x.detach()")
        return None

    def stream(self, device: int) -> int | None:
        torch = sys.modules.get("torch") or importlib.import_module("torch")
        known = self._current
        if known is None or known[0] is not torch:
            known = self._current = torch, _current_stream(torch)
        handle: int = known[1](device)
        return handle

    _current: tuple[Any, Callable[[int], int]] | None = None
    """The torch module, and its function that returns a device's current stream."""

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        make_wait(stream)
        torch = sys.modules.get("torch") or importlib.import_module("torch")
        return torch.utils.dlpack.from_dlpack(dlpack.capsule(view, lifetime, device=view.device))

    def copy(self, array: Any, device: int | None) -> Any:
        import torch

        place = "cpu" if device is None else f"cuda:{device}"
        return array.detach().to(place, copy=True, memory_format=torch.contiguous_format)

    def compact(self, x: Any) -> Any:
        import torch

        return x.detach().clone(memory_format=torch.contiguous_format)

    def flip(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.flip(axes)

    def upload(self, host: Any, device: int) -> Any:
        import torch

        return torch.from_numpy(host).to(f"cuda:{device}")


def _current_stream(torch: Any) -> Callable[[int], int]:
    quick = getattr(
        getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None
    )  # takes a tenth of the public function's time
    return quick or (lambda device: torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
