"""Adapters that only export arrays, for libraries with an array protocol, such as RMM and cuda.core."""

from __future__ import annotations

from typing import Any, ClassVar

from memguard._devices import streams
from memguard._frameworks.arrays import dlpack
from memguard._frameworks.arrays.base import Arrays, MakeWait
from memguard._frameworks.arrays.compatibility import Layout, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import View


class ProducerOnly(Arrays):
    """Base class of adapters that export arrays and import none."""

    module: ClassVar[str] = ""
    call: ClassVar[str] = ""
    waits: ClassVar[str] = ""
    compacts: ClassVar[Layout | None] = None

    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        raise NotImplementedError(self.name)

    def copy(self, array: Any, device: int | None) -> Any:
        raise NotImplementedError(self.name)

    def compact(self, x: Any) -> Any:
        raise NotImplementedError(self.name)


class ArrayInterface(ProducerOnly):
    """Any object with `__cuda_array_interface__`. If the interface names no stream, the consumer waits for all work in
    the CUDA context."""

    traits: ClassVar[Traits] = Traits("__cuda_array_interface__", frozenset(), title="the CUDA array interface")

    def owns(self, x: Any) -> bool:
        return hasattr(type(x), "__cuda_array_interface__") or hasattr(x, "__cuda_array_interface__")

    def offer(self, x: Any) -> Offer:
        view, stream, context = self._interface(x)
        return Offer(type(x).__module__.partition(".")[0], view, x, stream, context)


class DLPack(ProducerOnly):
    """Any object with `__dlpack__`. The consumer waits for all work in the CUDA context, because cuda.core's buffers
    name no stream."""

    traits: ClassVar[Traits] = Traits("__dlpack__", frozenset(), title="DLPack")

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def offer(self, x: Any) -> Offer:
        try:
            kind, _ = x.__dlpack_device__()
            on_gpu = int(kind) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
            capsule = x.__dlpack__(stream=streams.LEGACY) if on_gpu else x.__dlpack__()
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise self.refusal(
                f"its library does not export it: {error}", "see what its library says about it"
            ) from error
        try:
            view = dlpack.read(capsule)
        except dlpack.BadCapsule as error:
            raise self.refusal(str(error), "hand over an array of a plain dtype and layout") from error
        return Offer(type(x).__module__.partition(".")[0], view, capsule)
