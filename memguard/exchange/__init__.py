"""Hand a GPU array to another framework without a copy, in this process and to others.

    y = memguard.exchange.to(x, "tensorflow")

No budget is needed for it; with one the ledger says who lends how much to whom. docs/exchange.md.
"""

from __future__ import annotations

from memguard.errors import CannotShare
from memguard.exchange.handover import Route, last_route, to

__all__ = ["CannotShare", "Route", "last_route", "to"]
