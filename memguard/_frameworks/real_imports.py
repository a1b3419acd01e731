"""On simulated GPUs, warns once per process that a real framework imported by the program is not limited."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from memguard._base.specs import SPECS
from memguard._frameworks.import_hook import enter, found_by_others, leave

said = False
"""Whether stderr has this warning, or a similar one, already."""


def say(text: str) -> None:
    """Write a line to stderr. A closed, full or missing stderr raises nothing."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"memguard: {text}\n")
            sys.stderr.flush()
    except Exception:
        pass


class RealImports(importlib.abc.MetaPathFinder):
    """Detects the import of a real framework while simulated GPUs are in use; `gpus` is their name in the warning."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._modules = {spec.hook: name for name, spec in SPECS.items()}
        self._searched: set[str] = set()

    def start(self) -> None:
        """Warn at once if a framework is imported already; else wait for an import."""
        if said:
            return
        here = [module for module in self._modules if module in sys.modules]
        if here:
            self._imported(here[0])
        else:
            enter(self)

    def stop(self) -> None:
        """Remove the finder without a trace."""
        leave(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules or fullname in self._searched:
            return None
        self._searched.add(fullname)  # another finder may search for it again
        try:
            return found_by_others(self, self._imported, fullname, path, target)
        finally:
            self._searched.discard(fullname)

    def _imported(self, module: str) -> None:
        global said
        self.stop()
        if not said:
            said = True
            say(f"the GPUs are simulated ({', '.join(self._gpus)}): nothing limits {self._modules[module]}, a real one")
