"""While the process is off its GPUs, the frameworks' functions wait in Python and not in the driver.

`close` replaces the functions that the frameworks' tables name (`_frameworks/*/gates.py`), of those frameworks that are
imported now. The replacements wait until `Gate.open`, and then call the original with the same arguments. On the thread
that is inside `with memguard.suspended():` they raise `Suspended`: it would wait for itself. So would a notebook's.

A function that somebody took by name before (`from torch.cuda import synchronize`) is gated where the table names
what it calls underneath.

The import of a framework waits too: some call the driver, and hold the GIL. It waits where the module is made, and not
where it is searched for: Python searches with a lock of every import.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memguard._base.logs import log as _log
from memguard._base.undo import Undo
from memguard._frameworks.import_hook import _Loader, enter, leave
from memguard._frameworks.optional_modules import GatedFunction, Gates, Touches
from memguard._node.suspend.gates import native_threads
from memguard._node.suspend.gates.keepalive import Kept
from memguard._node.suspend.gates.replaced import holders, swap
from memguard._node.suspend.gates.tables import tables
from memguard.errors import Suspended

_SLICE = 0.1
"""Seconds of each wait. A signal handler runs at once; an exception that another thread set comes after this long."""


class Gate:
    """The closed gate of one suspension. Its undo opens it, also if it was interrupted while it closed.

    `owner` is the thread (`threading.get_ident()`) on which calls raise instead of waiting; None if there is none.
    `left` are sentences on what no gate reaches, `unheld` libraries whose own threads cannot be answered
    (`native_threads`): with one of those the process must not leave.
    """

    def __init__(self, owner: int | None = None) -> None:
        self.owner = owner
        self.left: tuple[str, ...] = ()
        self.unheld: tuple[str, ...] = ()
        self.closed = False
        self._undo = Undo()
        self._waiting: list[threading.Lock] = []
        self._later: list[Callable[[], object]] = []
        self._kept = Kept()
        self._said = False
        self._tables: list[Gates] = []

    @property
    def inside(self) -> int:
        """How many calls wait now."""
        return len(self._waiting)

    def close(self, given: Iterable[Gates] | None = None) -> None:
        """Replace the functions. What is interrupted here is taken back by `open`."""
        chosen = [*(tables() if given is None else given)]
        self._tables = chosen
        self.closed = True
        left: list[str] = []
        imports = LateImports(chosen, self)
        self._undo.add("the imports that wait", imports.stop)
        imports.start()
        for table in chosen:
            if table.hook not in sys.modules:
                continue
            left += table.not_gated
            for entry in table.waits:
                left += self._replace(entry, self._waits)
            for entry in table.later:
                left += self._replace(entry, self._defers)
        self._kept.take(chosen)
        # After the gates: a framework that has not begun by now waits there.
        self.unheld = native_threads.hold(chosen, self._undo)
        self.left = tuple(left)
        if left:
            _log.debug("suspend: not gated: %s", "; ".join(left))

    def lift(self) -> None:
        """Let those who wait go on, and put everything back. A second call goes on where an interrupted one stopped."""
        self.closed = False
        for door in [*self._waiting]:
            with contextlib.suppress(RuntimeError):  # it has gone on already
                door.release()
        self._undo.run()

    def open(self) -> None:
        """Lift it, then run the finalizers that it deferred and destroy what it kept, on this thread. As `lift`."""
        self.lift()
        while self._later:
            call = self._later.pop(0)
            try:
                call()
            except Exception as error:  # what a finalizer raises goes nowhere either
                _log.debug("suspend: a finalizer failed: %s", error)
        self._kept.drop()

    def on_this_thread(self) -> contextlib.ExitStack:
        """Until the stack is closed, what no name reaches (operators) comes to `enter` too, on the calling thread."""
        with contextlib.ExitStack() as stack:
            for table in self._tables:
                if table.refuses is not None and table.hook in sys.modules:
                    stack.enter_context(table.refuses(self.enter))
            return stack.pop_all()

    def enter(self, what: str) -> None:
        """Wait until the gate opens; at once if it is open. Raises Suspended on the owner's thread."""
        if not self.closed:
            return
        if threading.get_ident() == self.owner:
            raise Suspended(
                f"{what} needs the GPU, and this process is suspended: it is off its GPUs",
                fix="end the `with memguard.suspended():` block; in a notebook run a cell or %memguard resume",
            )
        if not self._said:
            self._said = True
            _log.info("%s waits: this process is suspended; memguard.resume() brings it back", what)
        # A lock of its own for each call: a signal handler or a finalizer may wait here too, within this very wait.
        door = threading.Lock()
        door.acquire()
        self._waiting.append(door)
        try:
            while self.closed:
                door.acquire(timeout=_SLICE)
        finally:
            self._waiting.remove(door)

    def _replace(self, entry: GatedFunction, wrap: Callable[..., Callable[..., Any]]) -> list[str]:
        """Replace what the entry names. A sentence for each that stays as it was."""
        found = holders(entry.name, entry.but)
        if not found and not entry.optional:
            return [f"{entry.name.replace(':', '.')}: not in this version"]
        return [
            f"{what}: its type cannot be changed ({entry.why})"
            for owner, name, what in found
            if not swap(owner, name, partial(wrap, entry.touches, what), self._undo, what)
        ]

    def _waits(self, touches: Touches | None, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any, **kwargs: Any) -> Any:
            if self.closed and (touches is None or _needs(touches, args, kwargs)):
                self.enter(what)
            return original(*args, **kwargs)

        return waits

    def _defers(self, touches: Touches | None, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def defers(*args: Any, **kwargs: Any) -> Any:
            if not self.closed:
                return original(*args, **kwargs)
            self._later.append(partial(original, *args, **kwargs))
            return None

        return defers


def close(owner: int | None = None, undo: Undo | None = None, given: Iterable[Gates] | None = None) -> Gate:
    """Close a gate. `undo` gets the step that lifts it, before anything is replaced: for who may be interrupted."""
    gate = Gate(owner)
    if undo is not None:
        undo.add("the gate", gate.lift)
    try:
        gate.close(given)
    except BaseException:
        gate.open()
        raise
    return gate


def _needs(touches: Touches, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return touches(args, kwargs)
    except Exception:  # arguments that the function will refuse by itself
        return False


class LateImports(importlib.abc.MetaPathFinder):
    """A finder before the others, which finds what they do, with a loader that waits. Its undo is `stop`."""

    def __init__(self, tables: Iterable[Gates], gate: Gate) -> None:
        self._gate = gate
        self._modules: set[str] = set()
        self._finding = threading.local()
        for table in tables:
            named = {entry.name.partition(":")[0] for entry in (*table.waits, *table.later)}
            for module in {table.hook, table.hook.partition(".")[0], *table.imports, *named}:
                if module not in sys.modules:
                    self._modules.add(module)

    def start(self) -> None:
        """Wait for these imports from now on."""
        enter(self)

    def stop(self) -> None:
        """Leave no trace."""
        leave(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        names: set[str] = vars(self._finding).setdefault("names", set())
        if not self._gate.closed or fullname not in self._modules or fullname in names:
            return None
        names.add(fullname)  # another finder may search for it again, or import another one
        try:
            for finder in [*sys.meta_path]:
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Waits(spec.loader, self._gate)
                    return spec
        finally:
            names.discard(fullname)
        return None


class _Waits(_Loader):
    def __init__(self, inner: Any, gate: Gate) -> None:
        super().__init__(inner, lambda module: None)
        self._gate = gate

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._gate.enter(f"import {spec.name}")
        return super().create_module(spec)
