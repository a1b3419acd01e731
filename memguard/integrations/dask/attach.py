"""A budget in one worker: applied, published, and undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import memguard
from memguard import api
from memguard._base.blocks import Block
from memguard._base.types import Event, Pressure, Sample
from memguard._base.undo import Undo
from memguard._devices import suspension
from memguard.errors import NotActive
from memguard.integrations import tables as common
from memguard.integrations.dask import tables, task_errors
from memguard.integrations.dask.pause import Pause

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._guard.guard import Guard
    from memguard._oom.report import Report
    from memguard._runtime.runtime import MissingGpu

TOPIC = "memguard"
"""Of the scheduler's events: `client.get_events("memguard")`."""

_using: set[int] = set()
_blocks: list[Block[Guard]] = []
"""Workers that are threads of one process share its budget: the last one ends it."""


class Attached:
    """memguard in one worker, from `begin` to `end`. Both run on the worker's event loop."""

    def __init__(self, worker: Any, *, pause: bool) -> None:
        self._worker = worker
        self._undo = Undo()
        self._guard: Guard | None = None
        self._sample: Sample | None = None
        self._level: Pressure | None = None
        self._pause = Pause(worker, self._report_pause) if pause else None

    def begin(self, budget: Budget, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu) -> None:
        """Apply the budget, then publish. What fails is raised; `end` takes back what was done."""
        undo = self._undo
        undo.add("the budget", self._leave)
        guard = self._guard = self._enter(budget, simulate, missing_gpu)
        if guard.active:
            if self._pause is not None:
                self._pause.begin(undo)
            task_errors.begin(self._reported, undo)
            undo.add("the events", memguard.on_event(self._on_event).remove)
            undo.add("the samples", memguard.on_sample(self._on_sample).remove)
        metrics: dict[str, Any] = {
            tables.METRIC: self._ledger,
            tables.HELD: self._held,
            tables.PRESSURE: self._pressure,
        }
        undo.add("the metrics", lambda: self._unpublish(metrics))
        self._worker.metrics.update(metrics)

    def end(self) -> None:
        """Undo it. If it is interrupted, the next call does what is left."""
        self._undo.run()

    def _enter(self, budget: Budget, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu) -> Guard:
        _using.add(id(self))
        block = memguard.guard(budget, simulate=simulate, missing_gpu=missing_gpu)
        _blocks.append(block)
        guard = block.__enter__()
        if not guard.active and not hasattr(guard, "why"):  # `why`: switched off, or no GPU, as asked for
            raise NotActive(str(guard))
        return guard

    def _leave(self) -> None:
        _using.discard(id(self))
        while not _using and _blocks:
            _blocks[-1].__exit__(None, None, None)
            _blocks.pop()

    def _unpublish(self, metrics: Mapping[str, Any]) -> None:
        for name, metric in metrics.items():
            if self._worker.metrics.get(name) == metric:
                del self._worker.metrics[name]

    # the monitor's thread, and those of tasks

    def _on_sample(self, sample: Sample) -> None:
        monitor = api.current_session().monitor
        if monitor is None:
            return
        state, self._sample = monitor.state, sample
        keys = [(one.uuid, name) for one in sample.devices for name in (None, *one.frameworks)]
        self._level = common.worst(state.level(uuid, name) for uuid, name in keys)
        if self._pause is not None:
            self._pause.set_pressure(self._level is Pressure.CRITICAL)

    def _on_event(self, event: Event) -> None:
        fields = {key: value for key, value in event._asdict().items() if value is not None}
        if event.level is not None:
            fields["level"] = str(event.level)
        self._log(fields)

    def _reported(self, report: Report) -> None:
        """On the thread of the task that failed."""
        from distributed.worker import get_worker, thread_state

        from memguard._oom.report import full_text

        with contextlib.suppress(ValueError):  # of `client.run`: the error is of no task
            if get_worker() is not self._worker:  # one of several workers in this process
                return
        key = getattr(thread_state, "key", None)
        self._log({"kind": "report", "text": full_text(report), "task": None if key is None else str(key)})

    def _report_pause(self, what: str) -> None:
        self._log({"kind": what, "text": f"worker {self._worker.name} is {what}: pressure {self._level or 'unknown'}"})

    def _log(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the worker is closing; nothing of this is the program's matter
            self._worker.log_event(TOPIC, {**message, "name": self._worker.name})

    # heartbeats, on the worker's event loop

    async def _ledger(self, worker: Any) -> dict[str, Any]:
        guard = self._guard
        if guard is None or not guard.active:
            if self._pause is not None:
                self._pause.release()  # the program has ended the budget: there are no more samples
            return {"active": False, "simulated": False, "why": getattr(guard, "why", None)}
        if self._sample is None:
            from distributed.utils import offload

            self._sample = await offload(guard.sample)
        return self._summary(guard)

    def _summary(self, guard: Guard) -> dict[str, Any]:
        more = {
            "active": True,
            "simulated": guard.host.simulated,
            "pid": os.getpid(),
            "suspended": suspension.now is not None,
            "pressure": None if self._level is None else str(self._level),
            "paused": self._pause is not None and self._pause.held,
        }
        devices = {part.device.uuid: part.device for part in guard.plan.devices}
        return common.summary(self._sample, devices, more)

    async def _held(self, worker: Any) -> str:
        return tables.held(await self._ledger(worker))

    async def _pressure(self, worker: Any) -> str:
        return tables.pressure(await self._ledger(worker))
