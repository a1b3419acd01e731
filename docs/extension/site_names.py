"""Which names the reference must have."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import memguard

MODULES = (
    "memguard.errors",
    "memguard.exchange",
    "memguard.integrations.dask",
    "memguard.integrations.ray",
    "memguard.notebook",
    "memguard.pytest_plugin",
)


def names() -> Iterator[tuple[str, ...]]:
    """Each public name, as one of the names by which its entry may go."""
    for name in memguard.__all__:
        found = getattr(memguard, name)
        yield f"memguard.{name}", f"{getattr(found, '__module__', '')}.{name}"
    for place in MODULES:
        module = importlib.import_module(place)
        own = [name for name, value in vars(module).items() if inspect.getmodule(value) is module]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            yield f"{place}.{name}", f"{getattr(getattr(module, name), '__module__', '')}.{name}"
