"""The table of frameworks, read from each folder of `_frameworks/` that contains a `spec.py`.

The budget, its schema, the plan, the ledger, the reports, the monitor, the doctor and the simulation all read this
table. To add a framework, add a folder whose `spec.py` defines `SPEC`, which names the adapter.

The budget and the plan import nothing else from `_frameworks/`. Each `spec.py` imports nothing but `_base`
(`tests/unit/test_framework_folders.py`). Discovery loads no adapter and imports no framework.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from memguard._base.framework_spec import FrameworkName, FrameworkSpec

_HOME = "memguard._frameworks"


@functools.cache  # because retries, suspensions and the leak check of each test call this again
def files(module: str) -> Mapping[str, str]:
    """The path of `{module}.py` by framework folder, for each folder that contains the file. Imports no framework."""
    found: dict[str, str] = {}
    for path in importlib.import_module(_HOME).__path__:
        for folder in os.listdir(path):
            file = os.path.join(path, folder, f"{module}.py")
            if os.path.isfile(file):
                found[folder] = file
    return MappingProxyType(found)


def modules(name: str) -> Iterator[Any]:
    """Import and yield the module `name` of each folder that contains one. The frameworks of `SPECS` come first.

    These modules import no framework.
    """
    folders = files(name)
    for folder in (*(row for row in SPECS if row in folders), *sorted(folders.keys() - SPECS.keys())):
        yield importlib.import_module(f"{_HOME}.{folder}.{name}")


def load(folder: str, module: str, name: str) -> Any:
    """The attribute `name` of the module `module` in a framework's folder."""
    return getattr(importlib.import_module(f"{_HOME}.{folder}.{module}"), name)


def _rows() -> list[FrameworkSpec]:
    rows: list[FrameworkSpec] = [importlib.import_module(f"{_HOME}.{folder}.spec").SPEC for folder in files("spec")]
    return sorted(rows, key=lambda row: (row.place, row.name))


SPECS: Mapping[str, FrameworkSpec] = MappingProxyType({row.name: row for row in _rows()})
"""The frameworks that a budget may name, by name, in the order of `place`."""

NEVER_GIVE_BACK = frozenset(row.name for row in SPECS.values() if row.never_gives_back)
"""The frameworks whose pools return nothing to the driver while the process lives."""

CONTEXT_MAKER = next(row for row in SPECS.values() if row.context_module)
"""The framework that can create CUDA contexts other than the primary one."""


OPTION_OWNERS: Mapping[str, str] = {option.name: row.name for row in SPECS.values() for option in row.options}
"""Maps each option to its framework; an option belongs to exactly one framework."""


def setting(option: str) -> str:
    """The path of a framework's option in the budget: `frameworks.torch.nccl` for `nccl`."""
    return f"frameworks.{OPTION_OWNERS[option]}.{option}"


def pool_capped(clients: Iterable[str]) -> bool:
    """True if the driver can cap the shared pool of these frameworks, because none of them allocates only from the
    default pool."""
    return not any(SPECS[name].default_pool for name in clients)


def framework_name(text: str) -> FrameworkName:
    """Narrow a run-time name to `FrameworkName` for type checkers. Raises ValueError for an unknown name."""
    if isinstance(text, str) and text in SPECS:
        return cast("FrameworkName", text)
    import difflib

    near = difflib.get_close_matches(str(text), SPECS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{text!r} is no framework that a budget may name: {', '.join(SPECS)}{hint}")
