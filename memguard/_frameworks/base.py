"""Defines `Framework`, the base class of all framework adapters, and the rules for writing an adapter.

Adding a framework takes a folder `memguard/_frameworks/<name>` and a fragment in `changes/`. In the folder:

1. `spec.py` defines `SPEC`, the framework's `FrameworkSpec`, which the budget, the plan, the reports and the simulation
   read. Of memguard, it imports only `memguard._base`.
2. `adapter.py` defines a subclass of `Framework` whose `spec` is `SPEC`.
3. Optional: `arrays.py` for sharing arrays with other frameworks (`arrays/base.py`), `probe.py` for the doctor,
   `gates.py` for suspension, `in_process.py` for reading the framework's state in a running process.
   `optional_modules.py` defines the types that `probe.py`, `gates.py` and `in_process.py` use.

`tests/contract` discovers `SPEC` and tests its adapter. Also add the framework's Python module to the import contract
`frameworks` in pyproject.toml, and the spec's `hook` to `MODULES` in
`memguard/_tools/activation/_memguard_environment.py`; a test compares both lists with the specs.

Rules for all methods:

- Only modules of the framework's folder import the framework, inside methods, and only if `state()` is `imported` or
  `live`. No method initialises the framework, a CUDA context or a device just to read memory usage.
- `apply` sets the caps, reads them back, and raises CapNotApplied (reason, remedy) if a cap cannot be enforced as
  declared. Because a Ctrl-C can interrupt `apply` right after any change, `apply` adds a step to `undo` before each
  change. The guard, which applies the budget, runs the steps, last first, if `apply` raises or the budget ends. A step
  raises CapNotApplied if its change cannot be undone. `Undo` documents the other duties of a step.
- If the user later sets a limit above the cap through the framework's public functions, the cap stays in effect, and
  `_warn` reports the attempt (`replacements.py` implements this). If such a call can break the cap, the adapter calls
  `_check_drift_now`, so that the guard calls `drift` immediately. The undo steps restore the user's latest setting.
- `usage` returns the byte counts that the framework reports; None if the framework holds no memory or is not live. A
  count that the framework does not report is None, never 0.
- An adapter tests that a private symbol of the framework exists before it uses the symbol. If the symbol is missing,
  the adapter uses a fallback or raises an error with reason and remedy.
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
    """Base class of the framework adapters and of `SharedPool`, the pool that several frameworks share. Each has one
    cap."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The framework's name, or "shared pool"."""

    @property
    @abstractmethod
    def requests_room(self) -> bool:
        """True if the allocator, before it refuses a request, calls the guard, which makes other frameworks release
        memory. True for the allocators that memguard implements."""

    @abstractmethod
    def usage(self, device: Device) -> Usage | None:
        """The allocator's held and in-use bytes on the device; None if the allocator is not initialised there."""

    @abstractmethod
    def trim(self, device: Device) -> None:
        """Release all idle memory that the allocator can release to the driver. Runs on the calling thread."""

    def trim_partly(self, device: Device, needed: int) -> None:
        """Release about `needed` bytes if the allocator can release part of its idle memory; otherwise call `trim`."""
        self.trim(device)

    def reusable(self, usage: Usage) -> int:
        """The cached bytes, computed from `usage`, that the allocator's next request can certainly use; 0 if
        unknown."""
        return usage.reclaimable or 0

    @abstractmethod
    def fixed(self) -> bool:
        """True if, with the framework's settings in this process, an applied cap can no longer change."""


class Framework(Allocator):
    """Base class of the adapters. Each adapter represents one framework in this process.

    A cap limits the framework's own allocator on one GPU, unless the framework is `pooled`. The parameter `caps` of
    `apply` and `resize` maps each GPU's UUID to the framework's cap on that GPU, in bytes.
    """

    spec: FrameworkSpec
    """memguard's description of the framework: name, measured sizes, error patterns."""
    resizable = True
    """True if a cap can change at run time. False for TensorFlow and JAX, which never release memory to the driver."""
    pooled = False
    """True if the framework allocates from the shared pool. `usage` then reports only its live blocks, because cached
    memory belongs to the pool."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.notes: list[str] = []
        """Notes for the user that `_add_note` and `_warn` add. The guard's report includes these notes."""
        self.on_warning: Callable[[str], None] | None = None
        """`_warn` calls this with the warning's sentence, on the thread that caused the warning."""
        self.on_change: Callable[[], None] | None = None
        """`_check_drift_now` calls this. Set by the guard, which then calls `drift`."""
        self.on_refusal: Callable[[RefusedRequest], str | None] | None = None
        """`_report_refusal` calls this with each refused request. Set by the guard, which returns the id of its record
        of the request, or None."""
        self.on_shortage: Callable[[Shortage], bool] | None = None
        """`_request_room` calls this before the allocator refuses a request. Set by the guard, which makes other
        frameworks release cache or raises an elastic cap."""

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
        """Returns whether the framework is absent, importable, imported or live. Imports and initialises nothing."""
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
        """Set the environment variables that the framework reads during its import. Called before the import.

        Adds a step to `undo` before each change. Never replaces a user's setting; raises ConflictingSetting if
        the user's setting conflicts with the budget.
        """

    @abstractmethod
    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        """Apply the caps. Called after the framework's import, live or not. Adds an undo step before each change.

        `options` maps names of options to the budget's values, for those of the spec's options whose `applied` is True.
        Returns how the caps are enforced, with notes for the user.
        """

    def resize(self, caps: Mapping[str, int]) -> None:
        """Change applied caps at run time. A lower cap frees no memory by itself; the guard also calls `trim`."""
        raise CapNotApplied(
            self.name,
            "its limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def fixed(self) -> bool:
        return not self.resizable

    def footprint(self, size: int) -> int:
        """The most bytes that the driver may have to allocate for one more request of `size` bytes."""
        return size

    def drift(self) -> Sequence[Drift]:
        """Changes by other code since `apply` that broke the cap; usually empty."""
        return []

    def unseen(self) -> str | None:
        """The reason why memguard cannot notice a refused request if the program catches its error; None if the adapter
        reports every refused request."""
        return "its allocator tells nobody of a refused request" if self.spec.refuses_silently else None

    def uncounted(self) -> str | None:
        """A sentence about memory that this framework may allocate outside its cap and its `usage`, to explain the
        unaccounted bytes of a reading. None if no such memory is known."""
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

        `known` are further fields of `RefusedRequest`; the guard adds the memory held by all frameworks. The method
        stores the id of the guard's record in `error`, so that memguard recognises the error later. Raises nothing.
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
        """Call the guard before refusing a request, so that other frameworks release cache or an elastic cap rises.

        True if memory was freed or the cap raised, so that the allocator should retry. Call it on the requesting
        thread, without a lock of the adapter, at most a few times for one request. The method raises only exceptions of
        signal handlers that interrupt the call.
        """
        if self.on_shortage is None:
            return False
        try:
            return self.on_shortage(shortage)
        except Exception as failure:
            _log.debug("%s: no room could be made: %s", self.name, failure)
            return False

    def capturing(self) -> bool:
        """True if this thread is capturing a CUDA graph with the framework, so that a free would break the capture."""
        return False

    def libraries(self) -> frozenset[str]:
        """Keys of `OVERHEADS` (`nccl 1`, `nccl 2`) for libraries in use whose memory lies outside the cap."""
        return frozenset()

    def communicating(self) -> bool:
        """True if this process has live NCCL communicators, so that other processes may wait for its GPU work.

        Releasing memory waits for that GPU work, and blocks the framework's allocator meanwhile.
        """
        return any(name.startswith("nccl ") for name in self.libraries())

    def contexts(self, device: Device) -> frozenset[int]:
        """Handles of the CUDA contexts in which the framework allocates on the device; empty if the framework uses only
        the primary context."""
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
        """Log a warning that the user has set a limit above the cap. Logs each sentence once."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            _log.warning("%s", sentence)
            if self.on_warning is not None:
                self.on_warning(sentence)

    def _check_drift_now(self) -> None:
        """Make the guard call `drift` immediately instead of at the next reading. Call it after the user changed a
        setting that the cap depends on."""
        if self.on_change is not None:
            self.on_change()

    def about(self) -> dict[str, str]:
        """The framework's entries for the header of a recorded trace, such as its allocator, without its version."""
        return {}

    def forked(self) -> None:
        """Stop enforcing the caps. Called in a forked child. Implementations must not acquire a lock that a thread of
        the parent may have held, nor call CUDA."""

    def _loaded(self) -> ModuleType | None:
        """The hook module, or None if it is not imported. Waits while another thread is importing the module."""
        module = sys.modules.get(self.hook)
        if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False):
            module = importlib.import_module(self.hook)
        return module


def accept_permanent_limits(
    name: str, title: str, pool: str, existing: Mapping[str, tuple[int, int]], caps: Mapping[str, int]
) -> Applied:
    """Accept the existing limits of a live framework, which can no longer be changed.

    Raises CapNotApplied unless an earlier budget of this process set these limits and they fit the new caps. `existing`
    maps each device UUID to the earlier budget's cap and to the limit, in bytes. `name`, `title` and `pool` (a word for
    the framework's memory pool) appear in the error message.
    """
    if not existing:
        raise CapNotApplied(
            name,
            f"it was live before memguard.init(): its {pool} exists and can no longer be limited",
            f"call memguard.init() before {title}'s first operation",
        )
    for uuid, (cap, limit) in existing.items():
        own = limit < cap // MIB * MIB  # the user set this stricter limit; a larger cap does not change it
        if caps.get(uuid) != cap and not (own and caps.get(uuid, 0) >= limit):
            raise CapNotApplied(
                name,
                f"it went live with a limit of {format_size(limit)}, which cannot change; this budget gives it "
                f"{format_size(caps.get(uuid))}",
                f"write {name}: {{limit: {limit // MIB}MiB}}, or restart the process",
            )
    return Applied(Enforcement.ENFORCED, permanent="its limit stays from the budget before")


def attach_size(error: BaseException, requested: int) -> BaseException:
    """Set the error's `memguard_requested` to the requested bytes, and return the error. A separate function, so that
    no local variable of a caller keeps the error alive."""
    error.memguard_requested = requested  # type: ignore[attr-defined]
    return error


def weak_reference(thing: Any) -> weakref.ref[Any] | None:
    """A weak reference, to recognise the object later without keeping the object alive. None if the object's type does
    not support weak references."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


TRIES = 2
"""Maximum number of retries of a request after other frameworks released memory. More than one, because another thread
may allocate the released memory first."""


def holds_lock(lock: Any) -> bool:
    """True if this thread already holds the RLock, as in a signal handler or finalizer that interrupted an
    allocation."""
    return bool(lock._is_owned())


def attach_shortage(error: BaseException, requested: int, needed: int, *, full: bool) -> BaseException:
    """Store `requested`, `needed` and `full` in the error, for `attached_shortage`. Returns the error. A separate
    function, so that no local variable of a caller keeps the error alive."""
    error.memguard_short = needed, full  # type: ignore[attr-defined]
    return attach_size(error, requested)


def attached_shortage(error: BaseException, framework: str, uuid: str, requested: int) -> Shortage | None:
    """The `Shortage` built from the values that `attach_shortage` stored in the error; None if it stored none."""
    needed, full = getattr(error, "memguard_short", (None, False))
    return None if needed is None else Shortage(framework, uuid, requested, needed, full)
