"""The ledger in Ray's metrics: gauges that Ray's agent shows on the node's port, with Ray's own labels beside ours."""

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
"""By name and labels: Ray has one of each in a process."""


class Metrics:
    """Of one budget. `tell` is called on the monitor's thread; Ray's `Gauge.set` writes to memory and sends later."""

    def __init__(self, session: Session, job: str) -> None:
        self._source = Source(session, script(job))
        self._exported: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._ended = False
        self._lock = threading.RLock()  # reentrant, for a signal handler: the end must not come amid a `tell`

    def update(self, sample: Sample | None = None) -> None:
        """The figures of now. One that is not known any more is no longer told."""
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
            self._set(name, tags, _NAN)  # which ends a series: Ray leaves it out

    def end(self) -> None:
        """Tell nothing from now on. May be called again."""
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
