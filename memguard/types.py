"""The types of what memguard's functions take and return, for annotations: `from memguard.types import Ledger, Watch`.

    def watched(name: FrameworkName) -> Watch: ...

`Budget` and `Guard` are names of `memguard` itself, exceptions of `memguard.errors`, and `Route` and `Handle` of
`memguard.exchange`. Importing this loads nothing else: each name is bound when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memguard._base.blocks import Block
    from memguard._base.framework_spec import FrameworkName
    from memguard._base.types import (
        Device,
        DevicePlan,
        DeviceSample,
        Event,
        FrameworkSample,
        Plan,
        Pressure,
        Sample,
        WorkloadReport,
    )
    from memguard._frameworks.specs import framework_name
    from memguard._guard.figures import DeviceReclaimable, FrameworkReclaimable, Reclaimable
    from memguard._ledger.types import DeviceLedger, Ledger, Row
    from memguard._node.suspend.types import Suspension, Wait
    from memguard._oom.report import Report
    from memguard._runtime.callbacks import Watch
    from memguard._runtime.retry import Attempt, Attempts
    from memguard._timeline.reader import Timeline
    from memguard._tools.doctor import DoctorReport
    from memguard._tools.doctor.finding import Finding, Severity

_HOMES = {
    name: home
    for home, names in {
        "memguard._base.blocks": ("Block",),
        "memguard._tools.doctor": ("DoctorReport",),
        "memguard._tools.doctor.finding": ("Finding", "Severity"),
        "memguard._ledger.types": ("DeviceLedger", "Ledger", "Row"),
        "memguard._runtime.callbacks": ("Watch",),
        "memguard._oom.report": ("Report",),
        "memguard._guard.figures": ("DeviceReclaimable", "FrameworkReclaimable", "Reclaimable"),
        "memguard._runtime.retry": ("Attempt", "Attempts"),
        "memguard._base.framework_spec": ("FrameworkName",),
        "memguard._frameworks.specs": ("framework_name",),
        "memguard._node.suspend.types": ("Suspension", "Wait"),
        "memguard._timeline.reader": ("Timeline",),
        "memguard._base.types": (
            "Device",
            "DevicePlan",
            "DeviceSample",
            "Event",
            "FrameworkSample",
            "Plan",
            "Pressure",
            "Sample",
            "WorkloadReport",
        ),
    }.items()
    for name in names
}

__all__ = [
    "Attempt",
    "Attempts",
    "Block",
    "Device",
    "DeviceLedger",
    "DevicePlan",
    "DeviceReclaimable",
    "DeviceSample",
    "DoctorReport",
    "Event",
    "Finding",
    "FrameworkName",
    "FrameworkReclaimable",
    "FrameworkSample",
    "Ledger",
    "Plan",
    "Pressure",
    "Reclaimable",
    "Report",
    "Row",
    "Sample",
    "Severity",
    "Suspension",
    "Timeline",
    "Wait",
    "Watch",
    "WorkloadReport",
    "framework_name",
]


if not TYPE_CHECKING:  # so that a type checker sees the names above, and no others

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'memguard.types' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
