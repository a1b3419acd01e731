"""Export the ledger as gauges to Ray's metrics: Ray's agent serves them on the node's port and adds its own labels."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from memguard._base.types import Sample
from memguard._node.metrics.figures import EVERY, figures
from memguard._node.metrics.source import Source, script

if TYPE_CHECKING:
    from memguard._runtime.session import Session

_NAN = float("nan")
_gauges: dict[tuple[str, tuple[str, ...]], Any] = {}
"""The gauges of this process by name and labels: Ray allows one object for each."""


class Metrics:
    """The gauges of one budget. `update` runs on the monitor's thread; Ray's `Gauge.set` buffers and sends later."""

    def __init__(self, session: Session, job: str) -> None:
        self._source = Source(session, script(job))
        self._exported: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._ended = False
        self._lock = threading.RLock()  # re-entrant, because a signal handler may call `end` during `update`

    def update(self, sample: Sample | None = None) -> None:
        """Export the current figures, and end the series of figures that are no longer known."""
        with self._lock:
            self._export()

    def _export(self) -> None:
        scene = self._source.scene()
        now: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        for metric, values, value in figures(scene) if scene is not None else ():
            if metric.kind == "gauge" and not self._ended:
                tags = {**dict(zip(metric.labels, values, strict=True)), **self._source.constant}
                self._set(metric.name, tags, value)
                now[metric.name, values] = tags
        gone = {key: tags for key, tags in self._exported.items() if key not in now}
        self._exported = now
        for (name, _), tags in gone.items():
            self._set(name, tags, _NAN)  # ends the series: Ray omits NaN

    def end(self) -> None:
        """End all series, and export nothing from now on. May be called again."""
        with self._lock:
            self._ended = True
            self._source.end()
            self._export()

    def _set(self, name: str, tags: dict[str, str], value: float) -> None:
        from ray.util.metrics import Gauge

        key = name, tuple(tags)
        gauge = _gauges.get(key)
        if gauge is None:
            gauge = _gauges[key] = Gauge(name, description=_HELP[name], tag_keys=tuple(tags))
        gauge.set(value, tags=tags)


_HELP = {metric.name: metric.help for metric in EVERY}
