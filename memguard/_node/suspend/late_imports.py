"""The import of a framework waits too while the process is off its GPUs: some call the driver, and hold the GIL.

It waits where the module is made, and not where it is searched for: Python searches with a lock of every import.
"""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memguard._frameworks.gated import Gates
from memguard._frameworks.import_hook import _Loader, enter, leave

if TYPE_CHECKING:
    from memguard._node.suspend.gate import Gate


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
