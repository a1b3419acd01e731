"""The contract between memguard and one framework: a subclass of `Framework` in a folder of its own.

Adding a framework takes a folder `memguard/_frameworks/<name>` and a fragment in `changes/`. In the folder:

1. `spec.py` with the framework's `FrameworkSpec`, `SPEC`, which the budget, the plan, the reports and the simulation
   read. It imports `memguard._base` alone.
2. `adapter.py` with a subclass of `Framework` whose `spec` is `SPEC`.
3. Optional: `arrays.py` for the exchange (`arrays/base.py`), `probe.py` for the doctor, `gates.py` for suspension,
   `in_process.py` for reading the framework's state in a running process; `optional_modules.py` has the types of the
   last three.

`tests/contract` finds the adapter by its `SPEC` and tests it. Also add its module to the import contract `frameworks`
in pyproject.toml, and the module to import first to `MODULES` in `memguard/_tools/activation/_memguard_environment.py`:
both are literals, and a test compares them with the specs.

Rules for all methods:

- Only modules of the framework's folder import the framework, inside methods, and only if `state()` is `imported` or
  `live`. No method initialises the framework, a CUDA context or a device just to read a figure.
- `apply` sets the caps, reads them back, and raises CapNotApplied (reason, remedy) if one cannot hold as declared. It
  may raise at any point, also by a Ctrl-C right after a change: so it adds a step to `undo` before each change. The
  caller runs the steps, last first, if `apply` raises or the budget ends. A step raises CapNotApplied if its change
  stays. See `Undo` for what else a step must do.
- A later setting of the user, through the framework's public calls, cannot exceed the cap: the smaller of the two
  holds, and `_warn` reports it at once (`replacements.py` implements this). Where the cap cannot hold,
  `_check_drift_now` makes the guard call `drift` at once. The undo steps restore the user's latest setting.
- `usage` reports the framework's own figures: None if it holds nothing or is not live. A figure that the framework
  does not report is None, never 0.
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
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

from memguard._base.framework_spec import FrameworkSpec
from memguard._base.logs import log as _log
from memguard._base.types import (
    RECORD,
    Applied,
    Device,
    Drift,
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


class Allocator(ABC):
    """The unit that one cap limits: the allocator of one framework, or a pool that several frameworks share."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The framework's name, or "shared pool"."""

    @property
    @abstractmethod
    def requests_room(self) -> bool:
        """True if the allocator requests room from siblings before it refuses a request, as memguard's own allocators
        do."""

    @abstractmethod
    def usage(self, device: Device) -> Usage | None:
        """The allocator's memory on the device; None if the allocator is not live there."""

    @abstractmethod
    def trim(self, device: Device) -> None:
        """Release all releasable memory to the driver, on this thread."""

    def trim_partly(self, device: Device, needed: int) -> None:
        """Release about `needed` bytes if the allocator can release a part; otherwise the same as `trim`."""
        self.trim(device)

    def reusable(self, usage: Usage) -> int:
        """The bytes of its cache that certainly serve the allocator's next request, computed from `usage`. 0 if
        unknown."""
        return usage.reclaimable or 0

    @abstractmethod
    def fixed(self) -> bool:
        """True if an applied cap cannot change in this process's configuration."""


class Framework(Allocator):
    """One framework in this process. Caps are bytes by device UUID, one for each device of the plan.

    The framework's cap limits this allocator, unless the framework is `pooled`.
    """

    spec: FrameworkSpec
    """memguard's description of the framework: name, measured sizes, error patterns."""
    resizable = True
    """Whether a cap can change at run time. False for TensorFlow and JAX, which never release memory to the driver."""
    pooled = False
    """True if the framework allocates from the shared pool. Its reported usage then is its live blocks, without a
    cache."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.notes: list[str] = []
        """Notes that the adapter adds after `apply`, as sentences. The guard shows them with its own notes."""
        self.on_warning: Callable[[str], None] | None = None
        """`_warn` calls this with the warning's sentence, on the thread that caused the warning."""
        self.on_change: Callable[[], None] | None = None
        """Called after a user's call that may have broken the cap, so that the guard calls `drift`."""
        self.on_refusal: Callable[[RefusedRequest], str | None] | None = None
        """Called by `_report_refusal` with each refused request; set by the guard. Returns the id of the record."""
        self.on_shortage: Callable[[Shortage], bool] | None = None
        """Called by `_request_room` before a request is refused: siblings release cache, or an elastic cap rises. Set
        by the guard."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> str:
        """The module whose import loads the framework."""
        return self.spec.module

    @property
    def requests_room(self) -> bool:
        """True if the framework's allocator calls `_request_room` before it refuses a request."""
        return self.spec.requests_room

    @property
    def hook(self) -> str:
        """The module after whose import the caps can be applied; often `module` itself."""
        return self.spec.hook

    def state(self) -> State:
        """How far the framework is loaded in this process. Imports and initialises nothing."""
        loaded = self._loaded()
        if loaded is not None and self._live(loaded):
            return State.LIVE
        if self.why_absent():
            return State.ABSENT
        return State.IMPORTABLE if loaded is None else State.IMPORTED

    def why_absent(self) -> str | None:
        """Why the framework cannot hold GPU memory here (not installed, a CPU build); None if it can."""
        try:
            found = self.module in sys.modules or importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        return None if found else f"{self.module} is not installed"

    @abstractmethod
    def _live(self, module: ModuleType) -> bool:
        """True if the imported framework has initialised CUDA, so that it may hold GPU memory."""

    def prepare(self, undo: Undo) -> None:
        """Set the variables that the framework reads during its import. Called before the import.

        Adds the undo step to `undo` before each change. Never replaces a user's setting; raises ConflictingSetting if
        it conflicts.
        """

    @abstractmethod
    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        """Apply the caps. Called once the framework is imported, live or not. Adds its undo steps to `undo`.

        `options` are the framework's settings in the budget, by name: the `applied` options of its spec.
        """

    def resize(self, caps: Mapping[str, int]) -> None:
        """Change applied caps at run time. A lower cap frees nothing by itself: the guard trims and reports."""
        raise CapNotApplied(
            self.name,
            "its limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def fixed(self) -> bool:
        return not self.resizable

    def footprint(self, size: int) -> int:
        """The most driver bytes that one more allocation of `size` bytes may take."""
        return size

    def drift(self) -> Sequence[Drift]:
        """Changes by other code since `apply` that broke the cap; usually empty."""
        return []

    def unseen(self) -> str | None:
        """Why memguard misses a refused request whose error the program catches; None if `_report_refusal` reports
        each."""
        return "its allocator tells nobody of a refused request" if self.spec.refuses_silently else None

    def uncounted(self) -> str | None:
        """A sentence about memory that this framework may take outside its cap and its count, to explain `unaccounted`.
        None if none is known."""
        return None

    def _report_refusal(
        self,
        error: BaseException | None,
        uuid: str | None,
        requested: int,
        source: Literal["refusal", "observer"] = "refusal",
        **known: Any,
    ) -> None:
        """Report a request that the allocator refuses after all retries, on the requesting thread. Callers hold no lock
        of the adapter.

        `known` are figures at the refusal, by the names of `RefusedRequest`; the guard adds the memory held by all
        frameworks. This marks `error` with the record's id, to recognise the error later. Raises nothing.
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

    def _request_room(self, shortage: Shortage) -> bool:
        """Request room before refusing a request: siblings release cache, an elastic cap rises.

        True if memory was freed or the cap raised, so that the allocator should retry. Call it on the requesting
        thread, without a lock of the adapter, at most a few times for one request. It raises only exceptions of signal
        handlers.
        """
        if self.on_shortage is None:
            return False
        try:
            return self.on_shortage(shortage)
        except Exception as failure:
            _log.debug("%s: no room could be made: %s", self.name, failure)
            return False

    def capturing(self) -> bool:
        """Whether this thread is capturing a CUDA graph with the framework. Freeing memory would break the capture."""
        return False

    def libraries(self) -> frozenset[str]:
        """Names in `OVERHEADS` (`nccl 1`, `nccl 2`) of additional library memory outside the framework's cap."""
        return frozenset()

    def communicating(self) -> bool:
        """True if this process has live NCCL communicators, so that other processes may wait for its GPU work.

        Releasing memory waits for that work, and blocks the framework's allocator.
        """
        return any(name.startswith("nccl ") for name in self.libraries())

    def contexts(self, device: Device) -> frozenset[int]:
        """Handles of the CUDA contexts in which the framework allocates on the device, if they may differ from the
        primary context."""
        return frozenset()

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        """Start recording allocations. The returned function stops and returns the events (times as `time.time()`).

        None if the framework does not report single allocations; the recorder then samples `usage`.
        """
        return None

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.info("%s", note)

    def _warn(self, sentence: str) -> None:
        """Log a warning, once for each sentence, that a later setting of the user exceeds the cap."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            _log.warning("%s", sentence)
            if self.on_warning is not None:
                self.on_warning(sentence)

    def _check_drift_now(self) -> None:
        """Make the guard call `drift` now instead of at the next reading, as the user changed a setting that the cap
        depends on."""
        if self.on_change is not None:
            self.on_change()

    def about(self) -> dict[str, str]:
        """The framework's entries in a trace's header other than its version, such as its allocator."""
        return {}

    def forked(self) -> None:
        """In a forked child: stop capping, without acquiring a lock of the parent and without a CUDA call."""

    def _loaded(self) -> ModuleType | None:
        """The hook module once its import is complete, else None. Waits for an import in another thread."""
        module = sys.modules.get(self.hook)
        if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
            module = importlib.import_module(self.hook)
        return module


def accept_permanent_limits(
    name: str, title: str, pool: str, existing: Mapping[str, tuple[int, int]], caps: Mapping[str, int]
) -> Applied:
    """Keep the existing limits of a live framework whose limits can no longer change.

    Raises CapNotApplied unless an earlier budget of this process set these limits and they fit the new caps. `existing`
    has the cap and the limit by device UUID, in bytes.
    """
    if not existing:
        raise CapNotApplied(
            name,
            f"it was live before memguard.init(): its {pool} exists and can no longer be limited",
            f"call memguard.init() before {title}'s first operation",
        )
    for uuid, (cap, limit) in existing.items():
        own = limit < cap // MIB * MIB  # the user's own limit, which a larger cap does not change
        if caps.get(uuid) != cap and not (own and caps.get(uuid, 0) >= limit):
            raise CapNotApplied(
                name,
                f"it went live with a limit of {format_size(limit)}, which cannot change; this budget gives it "
                f"{format_size(caps.get(uuid))}",
                f"write {name}: {{limit: {limit // MIB}MiB}}, or restart the process",
            )
    return Applied(Enforcement.ENFORCED, permanent="its limit stays from the budget before")


def attach_size(error: BaseException, requested: int) -> BaseException:
    """Set the error's `memguard_requested` to the requested bytes. A separate function, so that no caller's frame keeps
    the error alive."""
    error.memguard_requested = requested  # type: ignore[attr-defined]
    return error


def weak_reference(thing: Any) -> weakref.ref[Any] | None:
    """A weak reference, to recognise the object later without keeping it alive. None if its type does not support
    one."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


TRIES = 2
"""Retries of a request after siblings released memory, because another thread may allocate that memory first."""


def holds_lock(lock: Any) -> bool:
    """Whether this thread holds the lock, as in a signal handler or finalizer that interrupted an allocation."""
    return bool(lock._is_owned())


def attach_shortage(error: BaseException, requested: int, needed: int, *, full: bool) -> BaseException:
    """Attach a shortage to the error. A separate function, so that no caller's frame keeps the error alive."""
    error.memguard_short = needed, full  # type: ignore[attr-defined]
    return attach_size(error, requested)


def attached_shortage(error: BaseException, framework: str, uuid: str, requested: int) -> Shortage | None:
    """The shortage that is attached to the error, or None."""
    needed, full = getattr(error, "memguard_short", (None, False))
    return None if needed is None else Shortage(framework, uuid, requested, needed, full)
