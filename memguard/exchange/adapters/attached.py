"""Memory of another process that is mapped here, as a lender of arrays. `memguard.exchange.attach` makes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from memguard.exchange.adapters.protocols import _Lender
from memguard.exchange.compatibility import Taker
from memguard.exchange.lifetimes import Offer
from memguard.exchange.view import View

NAME = "another process"


class Attached:
    """An array in mapped memory. `release` is called once, when nobody has views of it any more; it may not wait."""

    __slots__ = ("_release", "view")

    def __init__(self, view: View, release: Callable[[], None]) -> None:
        self.view, self._release = view, release

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # what the process has mapped ends with it
            self._release()


class OtherProcess(_Lender):
    """Its memory is ready: the exporter has waited. It has no stream, so that nothing is unmapped under a kernel."""

    taker: ClassVar[Taker] = Taker(NAME, "memory of another process", frozenset())

    def owns(self, x: Any) -> bool:
        return isinstance(x, Attached)

    def offer(self, x: Any) -> Offer:
        return Offer(self.name, x.view, x)

    def ready(self, offer: Offer, then: int | None) -> None:
        return None
