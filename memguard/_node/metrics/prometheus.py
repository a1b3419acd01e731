"""For Prometheus: its text, at a port of this machine that only this machine can reach."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.text import visible
from memguard._budget import ranks
from memguard._node.metrics.figures import EVERY, Figure, Metric, figures
from memguard._node.metrics.server import ADDRESS, Server
from memguard._node.metrics.source import CannotExport

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._node.metrics.source import Source


def begin(source: Source, port: int, undo: Undo) -> None:
    """Listen at the port, and `undo` it. Raises CannotExport."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    except ImportError as error:
        raise CannotExport(
            f"prometheus-client cannot be imported: {text_of(error)}", "pip install 'prometheus-client>=0.20'"
        ) from None
    registry = CollectorRegistry()  # its own: the program's default one is not touched
    registry.register(Collector(source))
    at = port + local_rank(os.environ)
    server = Server(lambda: (generate_latest(registry), CONTENT_TYPE_LATEST), at)
    undo.add("the metrics for Prometheus", lambda: life.not_at_exit(server.end))
    undo.add("the metrics for Prometheus", server.end)
    life.at_exit(life.HookOrder.METRICS, server.end)  # before Python takes its modules apart
    try:
        server.begin()
    except (OSError, OverflowError) as error:
        raise _no_port(at, error) from None


def _no_port(port: int, error: Exception) -> CannotExport:
    if isinstance(error, OverflowError):
        return CannotExport(f"port {port} does not exist: the local rank was added", "write a lower port")
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        fix = f"write another port, or end what listens there: ss -ltnp 'sport = :{port}'"
        return CannotExport(f"port {port} of {ADDRESS} is taken: each process needs one of its own", fix)
    return CannotExport(f"cannot listen at {ADDRESS}:{port}: {text_of(error)}", "write another port")


def local_rank(environ: Mapping[str, str]) -> int:
    """The number of this process among those that a launcher has started on this machine; 0 without one.

    A value that is none is left out with a warning: another process may get the port that is meant for this one.
    """
    for name, value in ranks.local_numbers(environ):
        if (number := ranks.whole(value)) is not None and number < 10_000:
            return number
        said = f"{name}={visible(value[:40], keep='')!r} is no local rank, and is not added to the port of the metrics"
        _log.warning("%s\n    fix: set it to a whole number from 0 on, or remove it", said)
    return 0


class Collector:
    """What a registry of prometheus_client asks at each scrape."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        scene = self._source.scene()
        found: dict[Metric, list[Figure]] = {}
        for figure in figures(scene) if scene is not None else ():
            found.setdefault(figure.metric, []).append(figure)
        constant = self._source.constant
        for metric in EVERY:
            if metric in found:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = make(metric.name, metric.help, labels=[*metric.labels, *constant])
                for figure in found[metric]:
                    family.add_metric([*figure.values, *constant.values()], figure.value)
                yield family
