"""GPU memory budgeting for Python processes that mix frameworks.

    import memguard
    memguard.init("budget.yaml")      # first line of the script

Importing this imports no framework, starts no thread and opens no file but its modules: each name is bound when it is
first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memguard import exchange as exchange
    from memguard._api import checkpoint as checkpoint
    from memguard._api import guard as guard
    from memguard._api import init as init
    from memguard._api import ledger as ledger
    from memguard._api import on_pressure as on_pressure
    from memguard._api import on_sample as on_sample
    from memguard._api import reclaimable as reclaimable
    from memguard._api import require as require
    from memguard._api import resize as resize
    from memguard._api import shutdown as shutdown
    from memguard._api import trim as trim
    from memguard._api import workload as workload
    from memguard._config import Budget as Budget
    from memguard._doctor import doctor as doctor
    from memguard._guard import Guard as Guard
    from memguard._ledger.types import Ledger as Ledger
    from memguard._oom.hooks import last_oom as last_oom
    from memguard._reclaim.figures import Reclaimable as Reclaimable
    from memguard._retry import attempts as attempts
    from memguard._retry import call as call
    from memguard._retry import retry as retry
    from memguard._simulation.recorder import record_trace as record_trace
    from memguard._suspend import resume as resume
    from memguard._suspend import suspend as suspend
    from memguard._suspend import suspended as suspended
    from memguard._suspend.types import Suspension as Suspension
    from memguard._timeline import load_timeline as load_timeline
    from memguard._types import Event as Event
    from memguard._types import Sample as Sample
    from memguard._types import WorkloadReport as WorkloadReport
    from memguard.errors import AlreadyActive as AlreadyActive
    from memguard.errors import BudgetExceeded as BudgetExceeded
    from memguard.errors import CannotResume as CannotResume
    from memguard.errors import CannotShare as CannotShare
    from memguard.errors import CannotSuspend as CannotSuspend
    from memguard.errors import CapNotApplied as CapNotApplied
    from memguard.errors import ConfigError as ConfigError
    from memguard.errors import ConflictingSetting as ConflictingSetting
    from memguard.errors import DeviceError as DeviceError
    from memguard.errors import FactsError as FactsError
    from memguard.errors import LeaseRefused as LeaseRefused
    from memguard.errors import MemguardError as MemguardError
    from memguard.errors import NotActive as NotActive
    from memguard.errors import PlanError as PlanError
    from memguard.errors import Suspended as Suspended
    from memguard.errors import TimelineError as TimelineError
    from memguard.errors import TraceError as TraceError
    from memguard.errors import UnderPressure as UnderPressure
    from memguard.notebook import load_ipython_extension as load_ipython_extension
    from memguard.notebook import unload_ipython_extension as unload_ipython_extension

__version__ = "0.1.0"

_ERRORS = (
    "AlreadyActive", "BudgetExceeded", "CannotResume", "CannotShare", "CannotSuspend", "CapNotApplied", "ConfigError",
    "ConflictingSetting", "DeviceError", "FactsError", "LeaseRefused", "MemguardError", "NotActive", "PlanError",
    "Suspended", "TimelineError", "TraceError", "UnderPressure",
)  # fmt: skip
_FUNCTIONS = (
    "checkpoint", "guard", "init", "ledger", "on_pressure", "on_sample", "reclaimable", "require", "resize", "shutdown",
    "trim", "workload",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ERRORS, "memguard.errors"),
    **dict.fromkeys(_FUNCTIONS, "memguard._api"),
    **dict.fromkeys(("Event", "Sample", "WorkloadReport"), "memguard._types"),
    "Budget": "memguard._config",
    "Guard": "memguard._guard",
    "Ledger": "memguard._ledger.types",
    "Reclaimable": "memguard._reclaim.figures",
    "doctor": "memguard._doctor",
    "last_oom": "memguard._oom.hooks",
    **dict.fromkeys(("attempts", "call", "retry"), "memguard._retry"),
    "load_timeline": "memguard._timeline",
    "record_trace": "memguard._simulation.recorder",
    **dict.fromkeys(("resume", "suspend", "suspended"), "memguard._suspend"),
    "Suspension": "memguard._suspend.types",
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "memguard.notebook"),
}

__all__ = [
    "AlreadyActive",
    "Budget",
    "BudgetExceeded",
    "CannotResume",
    "CannotShare",
    "CannotSuspend",
    "CapNotApplied",
    "ConfigError",
    "ConflictingSetting",
    "DeviceError",
    "Event",
    "FactsError",
    "Guard",
    "LeaseRefused",
    "Ledger",
    "MemguardError",
    "NotActive",
    "PlanError",
    "Reclaimable",
    "Sample",
    "Suspended",
    "Suspension",
    "TimelineError",
    "TraceError",
    "UnderPressure",
    "WorkloadReport",
    "attempts",
    "call",
    "checkpoint",
    "doctor",
    "exchange",
    "guard",
    "init",
    "last_oom",
    "ledger",
    "load_ipython_extension",
    "load_timeline",
    "on_pressure",
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
    "unload_ipython_extension",
    "workload",
]

logging.getLogger("memguard").addHandler(logging.NullHandler())


if not TYPE_CHECKING:  # so that a type checker sees the names above, and no others

    def __getattr__(name: str) -> object:
        if name == "exchange":  # a module, which its import binds here
            return importlib.import_module("memguard.exchange")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'memguard' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
