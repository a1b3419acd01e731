"""What a framework's arrays are to the exchange: one class in `arrays.py` of its folder, with this contract.

Its row names the class (`Exchanged`); `tests/contract` and `tests/gpu/test_exchange.py` go over all.

- A framework is imported only in its own file, inside methods. `owns` is called only if it is imported already.
- `offer` reads an array and does not wait for work on it. It raises CannotShare if not even a copy helps (sparse,
  quantised, symbolic arrays). `ready` makes a stream, or the host, wait for the work.
- `import_view` makes an array of the memory and copies nothing. `compatibility` has found that the framework can take
  it. If a framework is known to copy without saying so, its method still checks.
- `copy` makes an array in the framework's own memory, on the same GPU or another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from memguard._devices import contexts, streams
from memguard._frameworks.arrays import array_interface
from memguard._frameworks.arrays.compatibility import Layout, Obstacle, Traits
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import DTYPES, View, dtype_name, in_elements
from memguard.errors import CannotShare

Before = Callable[["int | None"], None]
"""Makes a stream wait until the memory is ready; None: the host."""


class Arrays(ABC):
    """One framework's arrays, as producer and as consumer."""

    traits: ClassVar[Traits]
    module: ClassVar[str]
    """What is imported to have the framework."""
    call: ClassVar[str]
    """What `import_view` calls, for the documentation."""
    waits: ClassVar[str]
    """Who waits for the producer's work when this framework is the consumer: `stream` or `host`."""
    takes_stream: ClassVar[bool] = True
    """Whether a user can say which stream will use the array: not if the framework chooses its streams itself."""

    own_contexts: ClassVar[bool] = False
    """Whether it may work in another context than the GPU's primary one: then `context` is asked."""
    copies_on: ClassVar[bool] = False
    """Whether it can queue a copy on a stream that the user names; else its own stream makes it, or the host waits."""
    direct: ClassVar[bool] = True
    """Whether its copies from GPU to GPU go directly wherever one reaches the other's memory, as rates show (264 to
    377 GB/s, measured on two H200s)."""
    immutable: ClassVar[bool] = False
    """Whether the framework never writes to an array after making it."""
    keeps_readonly: ClassVar[bool] = False
    """Whether it can have read-only arrays, so that it may take read-only memory."""
    compacts: ClassVar[Layout | None] = Layout.FORWARD
    """Which arrays `compact` can copy: all, only those without gaps (to align them), or none."""

    @property
    def name(self) -> str:
        return self.traits.name

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether `x` is one of the framework's arrays, symbolic ones included."""

    def owns_all_of(self, cls: type) -> bool:
        """Whether `owns` says the same of every object of the class of one that it owns: then it is asked once."""
        return True

    @abstractmethod
    def offer(self, x: Any) -> Offer:
        """The array as the framework offers it. Raises CannotShare if not even a copy is possible."""

    def obstacle(self, x: Any) -> Obstacle | None:
        """Why this array may not be shared, if the reason is not in its memory: autograd, for example."""
        return None

    def ready(self, offer: Offer, stream: int | None) -> None:
        """Make `stream` wait for all work on the array that was queued so far; None: the host waits."""
        _, shape, _, _, device, _ = offer.view
        if device is not None and 0 not in shape:
            streams.follow(device, offer.stream, stream, offer.context)

    def stream(self, device: int) -> int | None:
        """The stream that the framework's next work on the GPU goes to; None if it does not say."""
        return None

    def place(self, view: View, device: int | None) -> int | None:
        """Where an array of this memory would lie: on `device` if that was asked for. None for the host."""
        if device is None and view.device is None and not self.traits.on_host:
            return contexts.current() or 0
        return view.device if device is None else device

    def context(self, device: int | None) -> int | None:
        """The context of the framework's next work, if that is not the GPU's primary one."""
        return None

    @abstractmethod
    def import_view(self, view: View, lifetime: Lifetime, before: Before, stream: int | None) -> Any:
        """An array over this memory, which keeps `lifetime`. Calls `before` once, with the stream that will use it."""

    @abstractmethod
    def copy(self, array: Any, device: int | None) -> Any:
        """A copy of one of its arrays in the framework's own memory, on the GPU `device` (None: the host)."""

    @abstractmethod
    def compact(self, x: Any) -> Any:
        """The same values, row-major and without gaps, in new memory that an allocator has aligned. See `compacts`."""

    def copy_on(self, array: Any, device: int, stream: int) -> Any:
        """The same as `copy`, on the GPU where the array lies, queued on `stream`: nobody waits. See `copies_on`."""
        raise NotImplementedError(self.name)

    def flip(self, array: Any, axes: tuple[int, ...]) -> Any:
        """One of its arrays, reversed along these axes."""
        raise NotImplementedError(self.name)

    def upload(self, host: Any, device: int) -> Any:
        """A copy of a NumPy array on the GPU."""
        raise NotImplementedError(self.name)

    def _interface(self, x: Any) -> tuple[View, int | None, int | None]:
        """`array_interface.read` of an array with the CUDA array interface, or the refusal."""
        try:
            return array_interface.read(x.__cuda_array_interface__)
        except array_interface.Malformed as error:
            raise self.refusal(str(error), error.remedy) from error

    def _layout(self, x: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype and strides of an array whose attributes are NumPy's."""
        kind = x.dtype
        dtype = dtype_name(kind)
        if dtype not in DTYPES or not kind.isnative:
            raise self.unknown_dtype(kind, "cast it with x.astype")
        strides = in_elements(x.strides, kind.itemsize)
        if strides is None:
            raise self.refusal("its strides are not multiples of its item size", f"{self.name}.ascontiguousarray(x)")
        return dtype, strides

    def unknown_dtype(self, dtype: Any, remedy: str) -> CannotShare:
        return self.refusal(f"its dtype {dtype} cannot be handed over", remedy)

    def refusal(self, reason: str, remedy: str) -> CannotShare:
        """The error for one of the framework's own arrays."""
        return CannotShare(self.name, None, reason, remedy)
