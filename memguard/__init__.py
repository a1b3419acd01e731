"""GPU memory budgeting for Python processes that mix frameworks.

    import memguard
    memguard.init("budget.yaml")      # first line of the script

`__all__` lists the functions that a program calls and the errors that it may need to catch. `memguard.types` has the
types of arguments and results, `memguard.errors` all exceptions, `memguard.exchange` the exchange of arrays between
frameworks.

Importing memguard imports no framework, starts no thread and reads no file except its modules. Each name is imported at
its first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memguard import errors as errors
    from memguard import exchange as exchange
    from memguard import types as types
    from memguard._budget import Budget as Budget
    from memguard._guard.guard import Guard as Guard
    from memguard._node.suspend import resume as resume
    from memguard._node.suspend import suspend as suspend
    from memguard._node.suspend import suspended as suspended
    from memguard._oom.hooks import last_oom as last_oom
    from memguard._runtime.retry import retry as retry
    from memguard._timeline import load_timeline as load_timeline
    from memguard._tools.doctor import doctor as doctor
    from memguard._tools.simulate.recorder import record_trace as record_trace
    from memguard.api import checkpoint as checkpoint
    from memguard.api import guard as guard
    from memguard.api import init as init
    from memguard.api import ledger as ledger
    from memguard.api import on_event as on_event
    from memguard.api import on_sample as on_sample
    from memguard.api import reclaimable as reclaimable
    from memguard.api import require as require
    from memguard.api import resize as resize
    from memguard.api import shutdown as shutdown
    from memguard.api import trim as trim
    from memguard.api import workload as workload
    from memguard.errors import AlreadyActive as AlreadyActive
    from memguard.errors import BudgetExceeded as BudgetExceeded
    from memguard.errors import CannotResume as CannotResume
    from memguard.errors import CannotSuspend as CannotSuspend
    from memguard.errors import CapNotApplied as CapNotApplied
    from memguard.errors import ConfigError as ConfigError
    from memguard.errors import ConflictingSetting as ConflictingSetting
    from memguard.errors import DeviceError as DeviceError
    from memguard.errors import LeaseRefused as LeaseRefused
    from memguard.errors import MemguardError as MemguardError
    from memguard.errors import NotActive as NotActive
    from memguard.errors import PlanError as PlanError
    from memguard.errors import Suspended as Suspended
    from memguard.errors import UnderPressure as UnderPressure
    from memguard.notebook import load_ipython_extension as load_ipython_extension
    from memguard.notebook import unload_ipython_extension as unload_ipython_extension

__version__ = "0.2.0.dev0"

_ERRORS = (
    "AlreadyActive", "BudgetExceeded", "CannotResume", "CannotSuspend", "CapNotApplied", "ConfigError",
    "ConflictingSetting", "DeviceError", "LeaseRefused", "MemguardError", "NotActive", "PlanError", "Suspended",
    "UnderPressure",
)  # fmt: skip
_FUNCTIONS = (
    "checkpoint", "guard", "init", "ledger", "on_event", "on_sample", "reclaimable", "require", "resize", "shutdown",
    "trim", "workload",
)  # fmt: skip
_MODULES = ("errors", "exchange", "types")
_HOMES = {
    **dict.fromkeys(_ERRORS, "memguard.errors"),
    **dict.fromkeys(_FUNCTIONS, "memguard.api"),
    "Budget": "memguard._budget",
    "Guard": "memguard._guard.guard",
    "doctor": "memguard._tools.doctor",
    "last_oom": "memguard._oom.hooks",
    "load_timeline": "memguard._timeline",
    "record_trace": "memguard._tools.simulate.recorder",
    "retry": "memguard._runtime.retry",
    **dict.fromkeys(("resume", "suspend", "suspended"), "memguard._node.suspend"),
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "memguard.notebook"),  # for `%load_ext`
}

__all__ = [
    "AlreadyActive",
    "Budget",
    "BudgetExceeded",
    "CannotResume",
    "CannotSuspend",
    "CapNotApplied",
    "ConfigError",
    "ConflictingSetting",
    "DeviceError",
    "Guard",
    "LeaseRefused",
    "MemguardError",
    "NotActive",
    "PlanError",
    "Suspended",
    "UnderPressure",
    "checkpoint",
    "doctor",
    "exchange",
    "guard",
    "init",
    "last_oom",
    "ledger",
    "load_timeline",
    "on_event",
    "on_sample",
    "reclaimable",
    "record_trace",
    "require",
    "resize",
    "resume",
    "retry",
    "shutdown",
    "suspend",
    "suspended",
    "trim",
    "workload",
]

logging.getLogger("memguard").addHandler(logging.NullHandler())


if not TYPE_CHECKING:  # hidden from type checkers, which accept any name if `__getattr__` exists

    def __getattr__(name: str) -> object:
        if name in _MODULES:  # the import binds the module here
            return importlib.import_module(f"memguard.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'memguard' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "errors", "types"])
