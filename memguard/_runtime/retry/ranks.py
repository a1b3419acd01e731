"""Detects whether this process is one of several ranks of a distributed job, in which a rank must not retry alone.

The other ranks wait in a collective, which NCCL cannot cancel. If one rank repeats its collectives, they no longer
match the collectives of the other ranks. Detection imports nothing: it reads only `sys.modules` and the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._budget import ranks
from memguard._frameworks import specs

_HOROVOD = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras", "horovod.mxnet")


class Signs(NamedTuple):
    """The data for `several`: the number of ranks that each loaded library reports, and the environment variables."""

    libraries: Mapping[str, int]
    environ: Mapping[str, str]


def several(signs: Signs) -> str | None:
    """A clause with the evidence for more than one rank, for a message; None without evidence."""
    for name, size in signs.libraries.items():
        if size > 1:
            return f"{name} has {size} ranks"
    return ranks.several(signs.environ)


def signs() -> Signs:
    """Read the rank count that each loaded library reports, and the environment variables."""
    found = {}
    for name, ask in _ASK.items():
        try:
            size = ask()
        except Exception as failure:  # another version of the library may lack the function
            _log.debug("how many ranks %s has is unknown: %s", name, text_of(failure))
            continue
        if size is not None:
            found[name] = size
    return Signs(found, os.environ)


def _mpi() -> int | None:
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return int(module.COMM_WORLD.Get_size())


def _horovod() -> int | None:
    for name in _HOROVOD:
        module: Any = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return int(module.size())
    return None


_ASK: Mapping[str, Callable[[], int | None]] = {
    **{
        library: partial(ask, sys.modules)
        for library, ask in (module.IN_PROCESS.ranks or ("", None) for module in specs.modules("in_process"))
        if ask is not None
    },
    "MPI": _mpi,
    "Horovod": _horovod,
}
"""By library (frameworks, MPI, Horovod), the function that reads the number of ranks."""
