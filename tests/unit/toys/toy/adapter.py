"""The toy, capped by the limit of its pool."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from memguard._frameworks.toy.spec import SPEC

from memguard._base.types import Applied, Device, Enforcement, Usage
from memguard._frameworks.base import Framework


class Toy(Framework):
    """The toy's pool."""

    spec = SPEC

    def _live(self, module: ModuleType) -> bool:
        return module.peak > 0

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        toy = sys.modules["toy"]
        before, toy.limit = toy.limit, min(caps.values())
        toy.tidy = options["tidy"]
        return Applied(Enforcement.ENFORCED, lambda: setattr(toy, "limit", before))

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
