"""Array adapter for another process's memory that `memguard.exchange.attach` has mapped in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from memguard._frameworks.arrays.compatibility import Traits
from memguard._frameworks.arrays.lifetimes import Offer
from memguard._frameworks.arrays.view import View
from memguard.exchange.adapters.protocols import ProducerOnly

NAME = "another process"


class Attached:
    """An array in mapped memory. Its destructor, after the last view is freed, calls `release`, which must not
    block."""

    __slots__ = ("_release", "view")

    def __init__(self, view: View, release: Callable[[], None]) -> None:
        self.view, self._release = view, release

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # during finalization skip `release`: the kernel unmaps the memory at exit
            self._release()


class OtherProcess(ProducerOnly):
    """Adapter for mapped memory. The exporting process has waited for its own work on the memory. The offer names no
    stream, so memguard unmaps the memory only after the consumer's work on the memory is done."""

    traits: ClassVar[Traits] = Traits(NAME, frozenset(), title="memory of another process")

    def owns(self, x: Any) -> bool:
        return isinstance(x, Attached)

    def offer(self, x: Any) -> Offer:
        return Offer(self.name, x.view, x)

    def ready(self, offer: Offer, stream: int | None) -> None:
        return None
