"""What a framework is to memguard: one class in one file, with this contract.

Adding one: a file here, a line in `registry.py`, a line in CHANGELOG.md. `tests/contract` runs over all of them.

The rules every method keeps:

- The framework is imported only by its own file, inside methods, and only where `state()` is already
  `imported` or `live`. No method initialises the framework, a context or a device by looking at it.
- `apply` sets, reads back what it set, and raises CapNotApplied (reason, remedy) where a cap cannot hold as
  declared. It returns an undo, or says why there is none. After a raise nothing stays applied.
- `usage` answers for what the framework knows, None where it holds nothing or is not live. Figures it will not
  give are None, never 0.
- Every private symbol of the framework is probed before use and has a fallback or a clear refusal.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from memguard._devices.host import Host
from memguard._types import Applied, Device, Enforcement, State, TraceEvent, Usage
from memguard._units import MIB, format_size
from memguard.errors import CapNotApplied

_log = logging.getLogger("memguard")


class Framework(ABC):
    """One framework in this process. Caps are bytes by device UUID, one for every device of the plan."""

    name: ClassVar[str]
    module: ClassVar[str]
    hook: ClassVar[str]
    """The module after whose import the caps can be applied (often `module` itself)."""
    tested: ClassVar[tuple[str, ...]]
    """Versions that the GPU and native tests ran against."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.notes: list[str] = []
        """What turned out after `apply`, as sentences: the guard shows them with its own."""

    def state(self) -> State:
        """How far the framework is, found without importing or initialising anything."""
        loaded = self._loaded()
        if loaded is not None:
            return State.LIVE if self._live(loaded) else State.IMPORTED
        return State.ABSENT if self.why_absent() else State.IMPORTABLE

    def why_absent(self) -> str | None:
        """Why the framework cannot hold GPU memory here (not installed, a CPU build); None where it can."""
        try:
            found = self.module in sys.modules or importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        return None if found else f"{self.module} is not installed"

    @abstractmethod
    def _live(self, module: ModuleType) -> bool:
        """Whether the imported framework has initialised CUDA (holds or can hold GPU memory)."""

    @abstractmethod
    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        """Make the caps hold. Called once the framework is imported, live or not."""

    @abstractmethod
    def usage(self, device: Device) -> Usage | None:
        """What the framework holds on the device; None where it is not live there."""

    @abstractmethod
    def trim(self, device: Device) -> None:
        """Give back to the driver what can be given back now, on this thread. Does nothing where nothing can."""

    def resize(self, caps: Mapping[str, int]) -> None:
        """Change applied caps at run time. Lowering evicts nothing by itself: the guard trims and reports."""
        raise CapNotApplied(
            self.name,
            "its limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def footprint(self, size: int) -> int:
        """What one more allocation of `size` bytes would make the framework take from the driver, at most."""
        return size

    def oom_types(self) -> tuple[type[BaseException], ...]:
        """The framework's own out-of-memory exceptions, most specific first; empty where it is not imported."""
        return ()

    def drift(self) -> list[str]:
        """What no longer is as `apply` left it, so that the cap does not hold any more: sentences, mostly none."""
        return []

    def capturing(self) -> bool:
        """Whether this thread is capturing a CUDA graph with the framework: freeing memory would spoil it."""
        return False

    def libraries(self) -> frozenset[str]:
        """What lives outside the cap beside the usual, by its name in `policy` (NCCL communicators)."""
        return frozenset()

    def contexts(self, device: Device) -> frozenset[int]:
        """Handles of the CUDA contexts that it allocates in there, where those may be others than the primary one."""
        return frozenset()

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        """Start recording allocations; the returned call stops and gives them (times from `time.time()`).

        None where the framework reports no single allocations: the recorder then samples `usage`.
        """
        return None

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.info("%s", note)

    def about(self) -> dict[str, str]:
        """What a trace should say about the framework beside its version, such as its allocator."""
        return {}

    def forked(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """In a forked child: stop capping, without a lock of the parent's and without touching CUDA."""

    def _loaded(self) -> ModuleType | None:
        """The hook module where its import is complete; waits for one running in another thread."""
        module = sys.modules.get(self.hook)
        if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
            module = importlib.import_module(self.hook)
        return module


def accept_standing(
    name: str, title: str, pool: str, standing: Mapping[str, tuple[int, int]], caps: Mapping[str, int]
) -> Applied:
    """For a framework that is live already, whose limits cannot change any more.

    That is right only where an earlier budget of this process left the very limits that are wanted. `standing` is
    cap and limit by device. Raises CapNotApplied elsewhere.
    """
    if not standing:
        raise CapNotApplied(
            name,
            f"it was live before memguard.init(): its {pool} exists and cannot be limited any more",
            f"call memguard.init() before {title}'s first operation",
        )
    for uuid, (cap, limit) in standing.items():
        own = limit < cap // MIB * MIB  # the user's: it fits every cap that is not stricter
        if caps.get(uuid) != cap and not (own and caps.get(uuid, 0) >= limit):
            raise CapNotApplied(
                name,
                f"it went live with a limit of {format_size(limit)}, which stays; this budget gives it "
                f"{format_size(caps.get(uuid))}",
                f"write {name}: {{limit: {limit // MIB}MiB}}, or restart the process",
            )
    return Applied(Enforcement.ENFORCED, permanent="its limit stays from the budget before")


def with_size(error: BaseException, asked: int) -> BaseException:
    """The refusal, with the bytes asked for as `memguard_requested`. A call, so that no frame keeps the error alive."""
    error.memguard_requested = asked  # type: ignore[attr-defined]
    return error
