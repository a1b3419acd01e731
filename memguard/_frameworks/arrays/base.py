"""The contract of a framework's array adapter: one class in the `arrays.py` of the framework's folder.

The framework's `spec.py` names the class (`Exchanged`); `tests/contract` and `tests/gpu/test_exchange.py` test every
class.

- `arrays.py` imports the framework only inside methods. Callers call `owns` only after the framework has been imported.
- `offer` describes an array without waiting for GPU work on it. It raises CannotShare if not even a copy is possible
  (sparse, quantised, symbolic arrays). `ready` makes a stream, or the host, wait for the GPU work on the array.
- `import_view` creates an array on the producer's memory without a copy. `compatibility.obstacle` has already checked
  that the framework accepts the memory. If a framework may copy silently, its `import_view` checks for a copy.
- `copy` creates an array in the framework's own memory, on the same GPU or another.
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

MakeWait = Callable[["int | None"], None]
"""Makes a stream (None: the host) wait for the producer's work on the memory."""


class Arrays(ABC):
    """Exports one framework's arrays (as producer) and imports other frameworks' memory (as consumer)."""

    traits: ClassVar[Traits]
    module: ClassVar[str]
    """The module whose import loads the framework."""
    call: ClassVar[str]
    """The framework's public function that `import_view` calls, as the documentation names it."""
    waits: ClassVar[str]
    """Either `stream` or `host`, whichever waits for the producer's work when this framework imports an array."""
    takes_stream: ClassVar[bool] = True
    """True if a user can name the stream that will use the array, False if the framework chooses its streams itself."""

    own_contexts: ClassVar[bool] = False
    """True if the framework may use a context other than the GPU's primary one, so that callers must call `context`."""
    copies_on: ClassVar[bool] = False
    """Whether the framework can queue a copy on the user's stream. Otherwise the framework copies on its own
    stream, or the host waits for the copy."""
    direct: ClassVar[bool] = True
    """True if the framework copies directly between two GPUs when one can access the other's memory. Inferred from
    measured rates (264 to 377 GB/s on two H200s)."""
    immutable: ClassVar[bool] = False
    """Whether the framework never writes to an existing array."""
    keeps_readonly: ClassVar[bool] = False
    """Whether the framework supports read-only arrays, so that it may import read-only memory."""
    compacts: ClassVar[Layout | None] = Layout.FORWARD
    """`compact` can copy all arrays (FORWARD), only compact arrays, to an aligned address (COMPACT), or none (None)."""

    @property
    def name(self) -> str:
        return self.traits.name

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Whether `x` is one of the framework's arrays, symbolic ones included."""

    def owns_all_of(self, cls: type) -> bool:
        """True if `owns` returns the same for all objects of `cls`, so that callers may cache its result by class."""
        return True

    @abstractmethod
    def offer(self, x: Any) -> Offer:
        """Describe the array's memory, layout and stream. Raises CannotShare if not even a copy is possible."""

    def obstacle(self, x: Any) -> Obstacle | None:
        """Return a reason unrelated to the memory, such as autograd, why `x` must not be shared; None if there is
        none."""
        return None

    def ready(self, offer: Offer, stream: int | None) -> None:
        """Make `stream` (None: the host) wait for all work queued on the array so far."""
        _, shape, _, _, device, _ = offer.view
        if device is not None and 0 not in shape:
            streams.follow(device, offer.stream, stream, offer.context)

    def stream(self, device: int) -> int | None:
        """The stream on which the framework will queue its next work on the GPU; None if unknown."""
        return None

    def place(self, view: View, device: int | None) -> int | None:
        """The GPU on which the framework will create an array from `view`, which is `device` if given. None for the
        host."""
        if device is None and view.device is None and not self.traits.on_host:
            return contexts.current() or 0
        return view.device if device is None else device

    def context(self, device: int | None) -> int | None:
        """The CUDA context of the framework's next work; None for the GPU's primary one."""
        return None

    @abstractmethod
    def import_view(self, view: View, lifetime: Lifetime, make_wait: MakeWait, stream: int | None) -> Any:
        """Create an array on the memory of `view`. The array references `lifetime`. Calls `make_wait` once, with the
        stream that will use the array."""

    @abstractmethod
    def copy(self, array: Any, device: int | None) -> Any:
        """Copy one of the framework's arrays into the framework's own memory, on the GPU `device` (None: the host)."""

    @abstractmethod
    def compact(self, x: Any) -> Any:
        """A row-major copy without gaps, at an aligned address. See `compacts`."""

    def copy_on(self, array: Any, device: int, stream: int) -> Any:
        """Like `copy`, but on the array's own GPU, and queued on `stream` without waiting. See `copies_on`."""
        raise NotImplementedError(self.name)

    def flip(self, array: Any, axes: tuple[int, ...]) -> Any:
        """A view of the array, reversed along these axes."""
        raise NotImplementedError(self.name)

    def upload(self, host: Any, device: int) -> Any:
        """A copy of a NumPy array on the GPU."""
        raise NotImplementedError(self.name)

    def _interface(self, x: Any) -> tuple[View, int | None, int | None]:
        """Parse `x.__cuda_array_interface__` with `array_interface.read`. Raises CannotShare."""
        try:
            return array_interface.read(x.__cuda_array_interface__)
        except array_interface.Malformed as error:
            raise self.refusal(str(error), error.remedy) from error

    def _layout(self, x: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype, and strides in elements, of an array with NumPy's attributes `dtype` and `strides`."""
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
        """Create the CannotShare error for an array of this framework."""
        return CannotShare(self.name, None, reason, remedy)
