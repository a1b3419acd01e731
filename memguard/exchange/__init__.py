"""Hand a GPU array to another framework without a copy, in this process or to another one.

    y = memguard.exchange.to(x, "tensorflow")

    handle = memguard.exchange.export(x)           # pass str(handle), or the pickled handle, to the other process
    y = memguard.exchange.attach(handle, "cupy")   # in the other process

Works without a budget. In a session with a budget, the ledger reports the bytes that two frameworks share. Guide:
docs/exchange.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from memguard.errors import CannotShare
from memguard.exchange.pycuda_context import pycuda_context
from memguard.exchange.transfer import Route, last_route, to

if TYPE_CHECKING:
    from memguard.exchange.ipc.sharing import Handle as Handle
    from memguard.exchange.ipc.sharing import attach as attach
    from memguard.exchange.ipc.sharing import export as export

_BETWEEN_PROCESSES = ("Handle", "attach", "export")
__all__ = ["CannotShare", "Handle", "Route", "attach", "export", "last_route", "pycuda_context", "to"]


if not TYPE_CHECKING:  # lazy import: `to` needs no sockets

    def __getattr__(name: str) -> object:
        if name not in _BETWEEN_PROCESSES:
            raise AttributeError(f"module 'memguard.exchange' has no attribute {name!r}")
        value = getattr(importlib.import_module("memguard.exchange.ipc.sharing"), name)
        globals()[name] = value
        return value
