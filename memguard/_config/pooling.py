"""What must hold between the values of a budget with `strategy: pool`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memguard._specs import SPECS

Found = tuple[tuple[str, ...], str, str, bool, bool]
"""Place, message, fix, and the two marks of a `Violation`: at its key, and alone."""


def check(frameworks: Mapping[str, Mapping[str, Any]]) -> Iterator[Found]:
    """What is wrong with the frameworks of a budget whose strategy is the pool."""
    for name, entry in frameworks.items():
        for key in ("min", "max"):
            if key in entry and joins(name, entry):
                message = (
                    f"{key} has no meaning under 'strategy: pool': the pool is shared already, and each may use all"
                )
                yield ("frameworks", name, key), message, "write one share or limit, or 'strategy: caps'", True, True
                break
    if frameworks and not any(joins(name, entry) for name, entry in frameworks.items()):
        able = " or ".join(name for name, spec in SPECS.items() if spec.joint)
        message = f"no framework of this budget can draw from one pool: {', '.join(frameworks)}"
        yield ("strategy",), message, f"name {able}, or write 'strategy: caps'", False, False


def joins(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the framework draws from the shared pool. Not with a CUDA context of its own."""
    return bool(SPECS[name].joint) and entry.get("context") != "own"
