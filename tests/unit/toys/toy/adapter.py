"""The toy, capped by the limit of its pool."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

from memguard._frameworks.toy.spec import SPEC

from memguard._base.types import Applied, Device, Enforcement, Usage
from memguard._base.undo import Undo
from memguard._frameworks.base import Framework


class Toy(Framework):
    """The toy's pool."""

    spec = SPEC

    def _live(self, module: ModuleType) -> bool:
        return module.peak > 0

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        toy = sys.modules["toy"]
        undo.add(self.name, partial(setattr, toy, "limit", toy.limit))
        toy.limit, toy.tidy = min(caps.values()), options["tidy"]
        return Applied(Enforcement.ENFORCED)

    def usage(self, device: Device) -> Usage | None:
        toy = sys.modules.get("toy")
        if toy is None or not self._live(toy):
            return None
        return Usage(toy.used + toy.cached, toy.used, toy.cached, peak=toy.peak)

    def trim(self, device: Device) -> None:
        if "toy" in sys.modules:
            sys.modules["toy"].free_cache()

    def resize(self, caps: Mapping[str, int]) -> None:
        sys.modules["toy"].limit = min(caps.values())
