"""One row for each framework, found by discovery: the folders of `_frameworks/` that have a `spec.py`.

The budget, its schema, the plan, the ledger, the reports, the monitor, the doctor and the simulation all read these
rows. Adding a framework takes a folder: its row is `SPEC` in `spec.py`, and the row names its adapter.

The rooms below `_frameworks/` read the rows too: the budget's schema has a key for each. So the table is here, and each
`spec.py` imports nothing but `_base` (`tests/unit/test_framework_folders.py`). Finding them loads no adapter and
imports no framework.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from memguard._base.framework_spec import FrameworkName, FrameworkSpec

_HOME = "memguard._frameworks"


def files(module: str) -> dict[str, str]:
    """The path of the module of this name in each folder of `_frameworks/` that has one. Imports none."""
    found = {}
    for path in importlib.import_module(_HOME).__path__:
        for folder in os.listdir(path):
            file = os.path.join(path, folder, f"{module}.py")
            if os.path.isfile(file):
                found[folder] = file
    return found


def modules(name: str) -> Iterator[Any]:
    """The module of this name of each folder that has one: those of the frameworks of a budget first, in their order.

    Importing one imports no framework.
    """
    folders = files(name)
    for folder in (*(row for row in SPECS if row in folders), *sorted(folders.keys() - SPECS.keys())):
        yield importlib.import_module(f"{_HOME}.{folder}.{name}")


def load(folder: str, module: str, name: str) -> Any:
    """What is called so in a module of that folder."""
    return getattr(importlib.import_module(f"{_HOME}.{folder}.{module}"), name)


def _rows() -> list[FrameworkSpec]:
    rows: list[FrameworkSpec] = [importlib.import_module(f"{_HOME}.{folder}.spec").SPEC for folder in files("spec")]
    return sorted(rows, key=lambda row: (row.place, row.name))


SPECS: Mapping[str, FrameworkSpec] = MappingProxyType({row.name: row for row in _rows()})
"""The frameworks that a budget may name, by name, in the order in which they are listed."""

NEVER_GIVE_BACK = frozenset(row.name for row in SPECS.values() if row.never_gives_back)
"""The frameworks whose pools return nothing to the driver while the process lives."""

CONTEXT_MAKER = next(row for row in SPECS.values() if row.context_module)
"""The framework that can make a CUDA context beside the primary one."""


def setting(option: str) -> str:
    """The place in the budget of an option that one framework has: `frameworks.torch.nccl` for `nccl`."""
    owner = next(row.name for row in SPECS.values() if any(own.name == option for own in row.options))
    return f"frameworks.{owner}.{option}"


def framework_name(text: str) -> FrameworkName:
    """The name, checked, for a type checker: of a framework that is only known at run time. ValueError for another."""
    if isinstance(text, str) and text in SPECS:
        return cast("FrameworkName", text)
    import difflib

    near = difflib.get_close_matches(str(text), SPECS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{text!r} is no framework that a budget may name: {', '.join(SPECS)}{hint}")
