"""Calls a callback right after a module's first import, to apply caps to frameworks imported after `init`.

A finder at the front of `sys.meta_path` delegates the search to the other finders, and wraps the module's loader once.
The callback's exception propagates from the user's `import` statement. Removing the hook restores `sys.meta_path`. On
simulated GPUs a second finder, `RealImports`, warns that nothing limits a real framework.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from memguard._frameworks.specs import SPECS


class ImportHook(importlib.abc.MetaPathFinder):
    """Runs a callback after the first import of each watched module. If the callback raises, it runs again at the next
    import."""

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._lock = threading.RLock()  # not held while other finders search or the module's code runs
        self._finding = threading.local()

    def watch(self, module: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after the first import of `module`. Call the returned function to cancel."""
        with self._lock:
            self._waiting[module] = callback
            if self not in sys.meta_path:
                enter(self)

        def forget() -> None:
            with self._lock:
                if self._waiting.get(module) is callback:
                    del self._waiting[module]
                self._leave_when_idle()

        return forget

    def clear(self) -> None:
        """Cancel every callback. A forked child calls this too; it replaces the lock, because another thread of the
        parent may have held it."""
        self._lock = threading.RLock()
        self._waiting.clear()
        self._leave_when_idle()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        names: set[str] = vars(self._finding).setdefault("names", set())
        if fullname not in self._waiting or fullname in names:
            return None
        names.add(fullname)  # prevents recursion if another finder searches for this module again
        try:
            return found_by_others(self, self._imported, fullname, path, target)
        finally:
            names.discard(fullname)

    def _imported(self, module: str) -> None:
        with self._lock:
            callback = self._waiting.pop(module, None)
            self._leave_when_idle()
        if callback is None:
            return
        try:
            callback()
        except BaseException:
            if module not in self._waiting:  # the exception fails this import, so the next import must run the callback
                self.watch(module, callback)
            raise

    def _leave_when_idle(self) -> None:
        if not self._waiting:
            leave(self)


def found_by_others(
    finder: object,
    imported: Callable[[str], None],
    fullname: str,
    path: Sequence[str] | None,
    target: ModuleType | None,
) -> importlib.machinery.ModuleSpec | None:
    """The module spec that the other finders return, with a loader that calls `imported` once the module's code has
    run. None if no other finder finds the module."""
    for other in [*sys.meta_path]:
        if other is finder or not hasattr(other, "find_spec"):
            continue
        spec = other.find_spec(fullname, path, target)
        if spec is not None:
            if hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, imported)
            return spec
    return None


def enter(finder: importlib.abc.MetaPathFinder, *, last: bool = False) -> None:
    """Add the finder at the front of `sys.meta_path`, or with `last` at the end.

    `enter` and `leave` replace the list instead of changing it, because another thread's import may be iterating over
    the list. If a finder moved within the list, that import could skip the finder and not find its module.
    """
    # In a single statement, so that no other thread adds a finder between the read and the write of the list.
    sys.meta_path = [*sys.meta_path, finder] if last else [finder, *sys.meta_path]


def leave(finder: object) -> None:
    """Remove the finder from `sys.meta_path`, if it is there."""
    while True:
        now = sys.meta_path
        before = [*now]
        kept = [one for one in before if one is not finder]
        if len(kept) == len(before):
            return
        if sys.meta_path is now and now == before:  # else another thread has changed the list: retry
            sys.meta_path = kept
            return


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, imported: Callable[[str], None]) -> None:
        self._inner, self._imported = inner, imported

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restore the real loader first, so that the module's own code does not see this wrapper as its loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._imported(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


warned = False
"""True once this process has printed the warning that its GPUs are simulated."""


def to_stderr(text: str) -> None:
    """Write a line to stderr. A closed, full or missing stderr raises nothing."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"memguard: {text}\n")
            sys.stderr.flush()
    except Exception:
        pass


class RealImports(importlib.abc.MetaPathFinder):
    """On simulated GPUs, warns once per process that nothing limits an imported real framework.

    `gpus` are the names of the simulated GPUs, for the warning.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._modules = {spec.hook: name for name, spec in SPECS.items()}
        self._searched: set[str] = set()

    def start(self) -> None:
        """Warn immediately if a framework is imported already; else at the first import of a framework."""
        if warned:
            return
        here = [module for module in self._modules if module in sys.modules]
        if here:
            self._imported(here[0])
        else:
            enter(self)

    def stop(self) -> None:
        """Remove this finder from `sys.meta_path`."""
        leave(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules or fullname in self._searched:
            return None
        self._searched.add(fullname)  # prevents recursion if another finder searches for this module again
        try:
            return found_by_others(self, self._imported, fullname, path, target)
        finally:
            self._searched.discard(fullname)

    def _imported(self, module: str) -> None:
        global warned
        self.stop()
        if not warned:
            warned = True
            to_stderr(
                f"the GPUs are simulated ({', '.join(self._gpus)}): nothing limits {self._modules[module]}, a real one"
            )
