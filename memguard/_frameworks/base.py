"""The contract between memguard and one framework: a subclass of `Framework` in a folder of its own.

Adding a framework takes a folder `memguard/_frameworks/<name>` and a fragment in `changes/`. In the folder:

1. `spec.py` with the framework's row, `SPEC`: the budget, the plan, the reports and the simulation read everything from
   it. It imports `memguard._base` alone.
2. `adapter.py` with a subclass of `Framework` whose `spec` is that row.
3. If it can do more: `arrays.py` for the exchange (`arrays/base.py`), `probe.py` for the doctor (`probing.py`),
   `gates.py` for suspension (`gated.py`), `in_process.py` for what a running process can tell (`in_process.py`).

The row makes `tests/contract` test the adapter. Also add its module to the import contract `frameworks` in
pyproject.toml, and what to import first to `MODULES` in `memguard/_tools/activation/_memguard_environment.py`: both
are literals, and a test compares them with the rows.

The rules for every method:

- Only the framework's own file imports the framework, inside methods, and only if `state()` is already `imported` or
  `live`. No method initialises the framework, a CUDA context or a device just to read a figure.
- `apply` sets the caps, reads them back, and raises CapNotApplied (reason, remedy) if one cannot hold as declared. It
  returns an undo, or says why there is none. If it raises, nothing stays applied. A Ctrl-C may come at any point, also
  right after the last change: so before each change it adds to `changes` what takes it back. An undo can be called
  again, and does then what is left of it.
- A setting that the user makes later, through the framework's public calls, meets the cap: the smaller of the two
  holds, and `_warn` says so at once (`replacements.py` is how). Where it cannot be held, `_changed` has `drift` tell it
  at once. The undo gives the user what was asked for meanwhile.
- `usage` reports what the framework knows: None if it holds nothing or is not live. A figure that it does not give is
  None, never 0.
- Every private symbol of the framework is probed before use, and has a fallback or a clear refusal.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from memguard._base.framework_spec import FrameworkSpec
from memguard._base.logs import log as _log
from memguard._base.types import (
    RECORD,
    Applied,
    Device,
    Enforcement,
    RefusedRequest,
    Shortage,
    State,
    TraceEvent,
    Usage,
)
from memguard._base.undo import Undo
from memguard._base.units import MIB, format_size
from memguard._devices.host import Host
from memguard.errors import CapNotApplied


class Framework(ABC):
    """One framework in this process. Caps are bytes by device UUID, one for each device of the plan."""

    spec: FrameworkSpec
    """Its row."""
    resizable = True
    """Whether a cap can change at run time. Not TensorFlow's and JAX's: what they have taken never comes back."""
    pooled = False
    """Whether it draws from the pool that several frameworks share: its usage is then what is live, without a cache."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.notes: list[str] = []
        """What was learned after `apply`, as sentences: the guard shows them with its own notes."""
        self.on_warning: Callable[[str], None] | None = None
        """Called with what `_warn` says, on the thread whose call led to it."""
        self.on_change: Callable[[], None] | None = None
        """Called after a call of the user may have changed whether the cap holds: `drift` answers."""
        self.changes = Undo()
        """Takes back what an `apply` changed that was interrupted. What has returned is taken back by its `undo`."""
        self.on_refusal: Callable[[RefusedRequest], str | None] | None = None
        """Told of each refused request by `_refused`; the guard sets it. Returns the id of the record."""
        self.on_shortage: Callable[[Shortage], bool] | None = None
        """Asked by `_short` for room before a request is refused; the guard sets it."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> str:
        """What is imported to have the framework."""
        return self.spec.module

    @property
    def asks(self) -> bool:
        """Whether its allocator calls `_short` before it refuses a request: those that memguard owns."""
        return self.spec.asks

    @property
    def hook(self) -> str:
        """The module after whose import the caps can be applied (often `module` itself)."""
        return self.spec.hook

    def state(self) -> State:
        """How far the framework is in this process. Imports and initialises nothing."""
        loaded = self._loaded()
        if loaded is not None:
            return State.LIVE if self._live(loaded) else State.IMPORTED
        return State.ABSENT if self.why_absent() else State.IMPORTABLE

    def why_absent(self) -> str | None:
        """Why the framework cannot hold GPU memory here (not installed, a CPU build); None if it can."""
        try:
            found = self.module in sys.modules or importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        return None if found else f"{self.module} is not installed"

    @abstractmethod
    def _live(self, module: ModuleType) -> bool:
        """Whether the imported framework has initialised CUDA (holds or can hold GPU memory)."""

    def prepare(self, undo: Undo) -> None:  # noqa: B027 (few have anything)
        """Set what the framework reads while it is imported. Called before that; first adds to `undo` what takes it
        back. What the user has set already stays, or raises ConflictingSetting."""

    @abstractmethod
    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        """Make the caps hold. Called once the framework is imported, live or not.

        `options` are the framework's settings of the budget, by name: those of its row that are `applied`.
        """

    @abstractmethod
    def usage(self, device: Device) -> Usage | None:
        """What the framework holds on the device; None if it is not live there."""

    @abstractmethod
    def trim(self, device: Device) -> None:
        """Give back to the driver what can be given back now, on this thread. Does nothing if nothing can."""

    def give_back(self, device: Device, needed: int) -> None:
        """As `trim`, but no more than `needed` bytes where the allocator can give a part; others give all they can."""
        self.trim(device)

    def resize(self, caps: Mapping[str, int]) -> None:
        """Change applied caps at run time. Lowering a cap evicts nothing by itself: the guard trims and reports."""
        raise CapNotApplied(
            self.name,
            "its limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def fixed(self) -> bool:
        """Whether its cap cannot move once it is applied, as this process is set up."""
        return not self.resizable

    def footprint(self, size: int) -> int:
        """The most that one more allocation of `size` bytes would make the framework take from the driver, in bytes."""
        return size

    def drift(self) -> list[str]:
        """What was changed since `apply` so that the cap no longer holds: sentences, mostly none."""
        return []

    def unseen(self) -> str | None:
        """Why a refused request is not seen if the program catches its error; None if each is told by `_refused`."""
        return "its allocator tells nobody of a refused request" if self.spec.refuses_silently else None

    def uncounted(self) -> str | None:
        """What this framework may take past its cap and its count; None if nothing is known. For `unaccounted`."""
        return None

    def _refused(
        self,
        error: BaseException | None,
        uuid: str | None,
        requested: int,
        source: Literal["refusal", "observer"] = "refusal",
        **known: Any,
    ) -> None:
        """Tell that a request was refused for good, on the thread that made it. Call it without a lock of the adapter.

        `known` are figures of the moment, by the names of `RefusedRequest`; the guard adds what this framework and the
        others hold. `error` is marked with the id of the record, to know it again. Raises nothing.
        """
        if self.on_refusal is None:
            return
        try:
            request = RefusedRequest(self.name, source, time.time(), uuid, requested, thread=threading.get_ident())
            record = self.on_refusal(request._replace(**known))
            if error is not None and record is not None:
                vars(BaseException)["__dict__"].__get__(error)[RECORD] = record
        except Exception as failure:
            _log.debug("%s: a refused request was not recorded: %s", self.name, failure)

    def _short(self, shortage: Shortage) -> bool:
        """Have room made for a request that is about to be refused: siblings give back cache, an elastic cap rises.

        True if that has changed something, so that the request is worth another try. Call it on the thread that asked,
        without a lock of the adapter, at most a few times for one request. It raises only what a signal handler does.
        """
        if self.on_shortage is None:
            return False
        try:
            return self.on_shortage(shortage)
        except Exception as failure:
            _log.debug("%s: no room could be made: %s", self.name, failure)
            return False

    def capturing(self) -> bool:
        """Whether this thread is capturing a CUDA graph with the framework: freeing memory would spoil the graph."""
        return False

    def libraries(self) -> frozenset[str]:
        """What it holds outside its cap beside the usual, by name in `OVERHEADS` (`nccl 1`, `nccl 2`)."""
        return frozenset()

    def communicating(self) -> bool:
        """Whether other processes may wait for this one's work on a GPU: its communicators of NCCL live. What gives
        memory back waits for that work, and holds the framework's allocator meanwhile."""
        return any(name.startswith("nccl ") for name in self.libraries())

    def contexts(self, device: Device) -> frozenset[int]:
        """Handles of the CUDA contexts that it allocates in on the device, if they may differ from the primary one."""
        return frozenset()

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        """Start recording allocations; the returned call stops and returns them (times as `time.time()`).

        None if the framework does not report single allocations: the recorder then samples `usage`.
        """
        return None

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.info("%s", note)

    def _warn(self, sentence: str) -> None:
        """Say at once, and once, that a setting which the user made after `apply` met the cap."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            _log.warning("%s", sentence)
            if self.on_warning is not None:
                self.on_warning(sentence)

    def _changed(self) -> None:
        """The user has changed what the cap rests on: it is checked now, not at the next reading."""
        if self.on_change is not None:
            self.on_change()

    def about(self) -> dict[str, str]:
        """What a trace records about the framework beside its version, such as its allocator."""
        return {}

    def forked(self) -> None:  # noqa: B027 (most have nothing to release)
        """In a forked child: stop capping, without taking a lock of the parent and without touching CUDA."""

    def _loaded(self) -> ModuleType | None:
        """The hook module if its import is complete; waits for an import that runs in another thread."""
        module = sys.modules.get(self.hook)
        if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
            module = importlib.import_module(self.hook)
        return module


def accept_standing(
    name: str, title: str, pool: str, standing: Mapping[str, tuple[int, int]], caps: Mapping[str, int]
) -> Applied:
    """For a framework that is live already, whose limits can no longer change: accept the limits that it has.

    They are accepted only if an earlier budget of this process set them and they fit these caps. `standing` is cap and
    limit by device UUID, in bytes. Raises CapNotApplied otherwise.
    """
    if not standing:
        raise CapNotApplied(
            name,
            f"it was live before memguard.init(): its {pool} exists and can no longer be limited",
            f"call memguard.init() before {title}'s first operation",
        )
    for uuid, (cap, limit) in standing.items():
        own = limit < cap // MIB * MIB  # the user's own limit: it fits every cap that is not stricter
        if caps.get(uuid) != cap and not (own and caps.get(uuid, 0) >= limit):
            raise CapNotApplied(
                name,
                f"it went live with a limit of {format_size(limit)}, which cannot change; this budget gives it "
                f"{format_size(caps.get(uuid))}",
                f"write {name}: {{limit: {limit // MIB}MiB}}, or restart the process",
            )
    return Applied(Enforcement.ENFORCED, permanent="its limit stays from the budget before")


def with_size(error: BaseException, asked: int) -> BaseException:
    """The error with the bytes asked for as `memguard_requested`. A call, so that no frame keeps the error alive."""
    error.memguard_requested = asked  # type: ignore[attr-defined]
    return error


def weakly(thing: Any) -> weakref.ref[Any] | None:
    """A weak reference, to know the object again without keeping it; None for a type that allows none."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return None
