"""The monitor's figures for Prometheus and OpenTelemetry, where the budget asks for them (`metrics`).

Whoever asks for the figures gets those of the monitor's last sample: no call of CUDA, NVML or a framework is made for
them, and no lock is waited for. So an answer comes too while the process is suspended or a driver hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memguard._runtime.extensions import Extension
from memguard.errors import PlanError

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._runtime.extensions import SessionContext


class Metrics(Extension):
    before_monitor = True

    def start(self, session: SessionContext) -> None:
        of_budget(session, session.undo)


def of_budget(session: SessionContext, undo: Undo) -> None:
    """Begin to tell what the budget of `session` says, and `undo` it.

    Raises PlanError if a package is missing or the port cannot be had.
    """
    from memguard._node.metrics.source import CannotExport, Source

    budget = session.guard.budget
    wanted = budget.metrics
    assert wanted is not None
    source = Source(session, wanted.job)
    undo.add("the events for metrics", source.end)
    source.begin()
    try:
        key = "prometheus"
        if wanted.prometheus is not None:
            from memguard._node.metrics import prometheus

            prometheus.begin(source, wanted.prometheus, undo)
        key = "opentelemetry"
        if wanted.opentelemetry:
            from memguard._node.metrics import otel

            undo.add("the metrics of OpenTelemetry", lambda: otel.end(source))
            otel.begin(source)
    except CannotExport as error:
        problem = budget.problem(("metrics", key), error.reason, error.fix)
        raise PlanError([problem], budget.source or "init") from None
