"""Which frameworks are installed for this Python. None of them is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from memguard._frameworks.specs import SPECS


def frameworks() -> dict[str, str | None]:
    """The version of each by name, None if not known."""
    return {name: _version(spec.module, spec.install) for name, spec in SPECS.items() if _is_there(spec.module)}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # a module that a program put there without a spec
        return False


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name.partition("[")[0])
        except Exception:  # not there, or its metadata are damaged
            continue
    return None
