"""The array adapters by framework name. An adapter is imported when the first array needs it."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from typing import Any

from memguard._base.framework_spec import Exchanged
from memguard._frameworks import specs
from memguard._frameworks.arrays.base import Arrays
from memguard._frameworks.specs import SPECS
from memguard.errors import CannotShare

_KNOWN = {row.name: row.exchanged for row in SPECS.values() if row.exchanged is not None}
_KNOWN["numpy"] = Exchanged("NumPyArrays", short=("np",))
_PROTOCOLS = (
    "memguard.exchange.adapters.attached:OtherProcess",
    "memguard.exchange.adapters.protocols:ArrayInterface",
    "memguard.exchange.adapters.protocols:DLPack",
)
NAMES = tuple(_KNOWN)
_SHORT = {alias: row.name for row in SPECS.values() for alias in row.aliases}
_SHORT |= {short: name for name, known in _KNOWN.items() for short in known.short}
"""The framework name by alias, such as `numpy` by `np`."""
COMPACTORS = tuple(name for name, known in _KNOWN.items() if known.compacts)
"""Frameworks that accept any strides, and so can make compact copies for the others."""
_ROOTS = {package: name for name, known in _KNOWN.items() for package in known.packages}
"""The framework name by top-level package, where the two names differ."""


def by_name(name: str) -> Arrays:
    """The array adapter of the framework `name`. Raises ValueError for an unknown name."""
    if type(name) is str and name in _KNOWN:
        return _arrays(name)
    if not isinstance(name, str):  # the message omits the object: printing an array would wait for the GPU
        raise ValueError(
            f"the framework is given by its name, not as {type(name).__qualname__}\n"
            "    fix: memguard.exchange.to(x, 'torch')"
        )
    if name not in _KNOWN:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.7)
        meant = "" if name == "cuda" else _SHORT.get(name) or (near[0] if near else None)
        hint = f"did you mean {meant!r}?" if meant else f"one of {', '.join(NAMES)}"
        raise ValueError(f"no framework {name!r} to hand an array to\n    fix: {hint}")
    return _arrays(name)


def of(x: Any) -> Arrays:
    """The adapter of the framework of the array `x`. Raises CannotShare if `x` is not an array."""
    kind: Any = type(x)
    try:
        known = _owners.get(kind)
        if known is not None and known.module in sys.modules:
            return known
        names = _frameworks_of(kind)
    except TypeError:  # its metaclass has no hash
        names = _frameworks_of.__wrapped__(kind)
    for name in names:
        found = by_name(name)
        if found.module in sys.modules and found.owns(x):
            if found.owns_all_of(kind):
                _remember(kind, found)
            return found
    for protocol in () if isinstance(x, type) else _PROTOCOLS:
        found = _load(protocol)
        if found.owns(x):
            return found
    if kind.__module__.partition(".")[0] == "keras" and hasattr(x, "value"):
        remedy = "x.value"
    elif isinstance(x, (list, tuple, dict, set)):
        remedy = "one array in each call"
    elif hasattr(x, "to_numpy"):
        remedy = "x.to_numpy()"
    elif hasattr(x, "__array__") or isinstance(x, (int, float, complex, memoryview, bytes, bytearray)):
        remedy = "numpy.asarray(x)"
    else:
        remedy = "hand over one of its arrays"
    raise CannotShare(
        kind.__qualname__,
        None,
        f"it is not an array of {', '.join(NAMES)}, and has neither __cuda_array_interface__ nor __dlpack__",
        remedy,
    )


_owners: dict[Any, Arrays] = {}
"""Cache of `of`: the adapter by class of the array."""
_MOST = 1024
"""The most cached classes, because a program may create an unlimited number of classes."""


def _remember(kind: Any, owner: Arrays) -> None:
    if len(_owners) >= _MOST:
        _owners.clear()
    try:
        _owners[kind] = owner
    except TypeError:  # its metaclass has no hash
        return


@functools.lru_cache(maxsize=1024)
def _frameworks_of(cls: Any) -> tuple[str, ...]:
    """The names of the frameworks whose packages define the class or one of its bases. `of` imports only their
    adapters."""
    roots = (str(base.__module__).partition(".")[0] for base in cls.__mro__)
    return tuple(name for name in dict.fromkeys(_ROOTS.get(root, root) for root in roots) if name in _KNOWN)


@functools.cache
def _arrays(name: str) -> Arrays:
    known = _KNOWN[name]
    if name not in SPECS:
        return _load(f"memguard.exchange.adapters.{name}:{known.arrays}")
    made: Arrays = specs.load(name, "arrays", known.arrays)()
    return made


@functools.cache
def _load(path: str) -> Arrays:
    module, _, cls = path.partition(":")
    made: Arrays = getattr(importlib.import_module(module), cls)()
    return made
