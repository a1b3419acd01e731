"""The fact files beside this, with what was edited in them."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from memguard._tools.doctor.examine import every, examine
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Finding

HERE = Path(__file__).parent / "facts"
FILES = sorted(path.name for path in HERE.glob("*.json"))


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396: null removes, objects are merged, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@cache
def entry(name: str) -> dict[str, Any]:
    found = json.loads((HERE / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def plain(name: str) -> dict[str, Any]:
    """The facts of a file, those of the files that it was edited from underneath."""
    found = entry(name)
    if "facts" in found:
        facts = found["facts"]
    else:
        facts = {**merged(plain(found["edited_from"]), found["changes"]), "label": found["label"]}
    assert isinstance(facts, dict)
    return facts


def load(name: str) -> Facts:
    return Facts.from_json(json.dumps(plain(name)), name)


def findings(name: str) -> tuple[Finding, ...]:
    return examine(load(name))


def of(facts: Facts, *modules: ModuleType) -> list[Finding]:
    """What the checks of these modules find."""
    return [finding for check in every() if inspect.getmodule(check.function) in modules for finding in check(facts)]


def edited(name: str, changes: dict[str, Any]) -> Facts:
    """The facts of a file with a JSON merge patch on top."""
    return Facts.from_json(json.dumps(merged(plain(name), changes)), name)
