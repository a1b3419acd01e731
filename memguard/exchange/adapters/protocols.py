"""Arrays of nobody in the list that speak a protocol: RMM's and cuda.core's buffers, and any other. As lenders only."""

from __future__ import annotations

from typing import Any, ClassVar

from memguard._devices import streams
from memguard.exchange import dlpack
from memguard.exchange.adapters.base import Arrays, Before
from memguard.exchange.compatibility import Layout, Taker
from memguard.exchange.lifetimes import Loan, Offer
from memguard.exchange.view import View


class _Lender(Arrays):
    module: ClassVar[str] = ""
    call: ClassVar[str] = ""
    waits: ClassVar[str] = ""
    gathers: ClassVar[Layout | None] = None

    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        raise NotImplementedError(self.name)

    def copy(self, array: Any, device: int | None) -> Any:
        raise NotImplementedError(self.name)

    def compact(self, x: Any) -> Any:
        raise NotImplementedError(self.name)


class ArrayInterface(_Lender):
    """Anything with `__cuda_array_interface__`. Without a stream in it the whole context is waited for."""

    taker: ClassVar[Taker] = Taker("__cuda_array_interface__", "the CUDA array interface", frozenset())

    def owns(self, x: Any) -> bool:
        return hasattr(type(x), "__cuda_array_interface__") or hasattr(x, "__cuda_array_interface__")

    def offer(self, x: Any) -> Offer:
        view, stream, context = self._interface(x)
        return Offer(type(x).__module__.partition(".")[0], view, x, stream, context)


class DLPack(_Lender):
    """Anything with `__dlpack__`. The whole context is waited for: cuda.core's buffers know no stream to ask about."""

    taker: ClassVar[Taker] = Taker("__dlpack__", "DLPack", frozenset())

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def offer(self, x: Any) -> Offer:
        try:
            kind, _ = x.__dlpack_device__()
            on_gpu = int(kind) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
            capsule = x.__dlpack__(stream=streams.LEGACY) if on_gpu else x.__dlpack__()
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise self.cannot(f"its library does not export it: {error}", "as its library says") from error
        try:
            view = dlpack.read(capsule)
        except dlpack.Unreadable as error:
            raise self.cannot(str(error), "hand over an array of a plain dtype and layout") from error
        return Offer(type(x).__module__.partition(".")[0], view, capsule)
