"""What a framework's arrays are to the exchange: one class in one file, with this contract.

Adding one: a file here and a line in `registry.py`; `tests/contract` and `benchmarks/exchange.py` go over all of them.

- A framework is imported only by its own file, inside methods. `owns` is asked only where it is imported already.
- `offer` reads an array without waiting for its work, and raises CannotShare for what no copy mends (sparse,
  quantised, symbolic). `ready` makes a stream, or the host, wait for the work.
- `take` makes an array of the memory and copies nothing. `rules` has said before that it can; it still checks where
  its framework is known to copy in silence.
- `copy` gives an array of the framework's own memory, on the same GPU or another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from memguard._devices import contexts, streams
from memguard.errors import CannotShare
from memguard.exchange.adapters import array_interface
from memguard.exchange.compatibility import Layout, Obstacle, Taker
from memguard.exchange.lifetimes import Loan, Offer
from memguard.exchange.view import DTYPES, View, dtype_name

Before = Callable[["int | None"], None]
"""Makes a stream wait until the memory is ready; None: the host."""


class Arrays(ABC):
    """One framework's arrays, as they are lent and as they are made of what another lends."""

    taker: ClassVar[Taker]
    module: ClassVar[str]
    call: ClassVar[str]
    """What `take` calls, for the documentation."""
    waits: ClassVar[str]
    """Who waits for the lender's work where an array of this framework is made: stream or host."""
    told: ClassVar[bool] = True
    """Whether a user can say which stream will use the array: not where the framework chooses its streams itself."""

    immutable: ClassVar[bool] = False
    """Whether the framework writes to no array once it is made."""
    keeps_readonly: ClassVar[bool] = False
    """Whether an array of read-only memory is read-only itself, and may therefore be made."""
    gathers: ClassVar[Layout | None] = Layout.FORWARD
    """Which arrays `compact` can copy: all, only those without gaps (to align them), or none."""

    @property
    def name(self) -> str:
        return self.taker.name

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether `x` is one of the framework's arrays, symbolic ones included."""

    @abstractmethod
    def offer(self, x: Any) -> Offer:
        """The array as it can be lent. Raises CannotShare where not even a copy can be had."""

    def reservation(self, x: Any) -> Obstacle | None:
        """What the framework says against sharing that is no matter of memory, as autograd."""
        return None

    def ready(self, offer: Offer, then: int | None) -> None:
        """Make the stream `then` wait for all work on the array given so far; None: the host waits."""
        if offer.view.device is not None and offer.view.size:
            streams.follow(offer.view.device, offer.stream, then, offer.context)

    def stream(self, device: int) -> int | None:
        """The stream that the framework's next work on the GPU goes to; None where it has none to tell."""
        return None

    def place(self, view: View, device: int | None) -> int | None:
        """Where an array made of this memory would lie: on `device` where one was asked for. None for the host."""
        if device is None and view.device is None and not self.taker.on_host:
            return contexts.current() or 0
        return view.device if device is None else device

    def context(self, device: int | None) -> int | None:
        """The context that the framework's next work is in, where that is not the GPU's primary one."""
        return None

    @abstractmethod
    def take(self, view: View, loan: Loan, before: Before, stream: int | None) -> Any:
        """An array over the loan's memory. Calls `before` with the stream that will use it, once."""

    @abstractmethod
    def copy(self, array: Any, device: int | None) -> Any:
        """A copy in memory of the framework's own: of one of its arrays, on the GPU `device`."""

    @abstractmethod
    def compact(self, x: Any) -> Any:
        """The same values, row-major and without gaps, in new memory that an allocator has aligned. See `gathers`."""

    def flipped(self, array: Any, axes: tuple[int, ...]) -> Any:
        """One of its arrays, turned round along these axes."""
        raise NotImplementedError(self.name)

    def upload(self, host: Any, device: int) -> Any:
        """A copy on the GPU of a NumPy array."""
        raise NotImplementedError(self.name)

    def _interface(self, x: Any) -> tuple[View, int | None, int | None]:
        """An array that shows itself by the CUDA array interface: `_interface.read`, or the refusal."""
        try:
            return array_interface.read(x.__cuda_array_interface__)
        except array_interface.Malformed as error:
            raise self.cannot(str(error), error.remedy) from error

    def _layout(self, x: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype and strides of an array that tells them as NumPy's do."""
        dtype, itemsize = dtype_name(x.dtype), x.dtype.itemsize
        if dtype not in DTYPES or not x.dtype.isnative:
            raise self.cannot(f"its dtype {x.dtype} is not one that can be handed over", "cast it with x.astype")
        if any(stride % itemsize for stride in x.strides):
            raise self.cannot("its strides are no multiples of its elements' size", f"{self.name}.ascontiguousarray(x)")
        return dtype, tuple(stride // itemsize for stride in x.strides)

    def cannot(self, reason: str, remedy: str) -> CannotShare:
        """The refusal of one of the framework's own arrays."""
        return CannotShare(self.name, None, reason, remedy)
