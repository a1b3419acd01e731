"""Apply a budget in one Dask worker, publish its state, and undo both."""

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
"""The topic of the scheduler's events: `client.get_events("memguard")`."""

_using: set[int] = set()
_blocks: list[Block[Guard]] = []
"""The budget of this process. Workers that are threads of one process share it, and the last of them ends it."""


class Attached:
    """The budget of one worker, from `begin` to `end`. Both run on the worker's event loop."""

    def __init__(self, worker: Any, *, pause: bool) -> None:
        self._worker = worker
        self._undo = Undo()
        self._guard: Guard | None = None
        self._sample: Sample | None = None
        self._level: Pressure | None = None
        self._pause = Pause(worker, self._report_pause) if pause else None

    def begin(self, budget: Budget, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu) -> None:
        """Apply the budget, then publish. Raises the first failure; `end` then undoes the completed steps."""
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
        """Undo all steps. After an interruption the next call runs the remaining ones."""
        self._undo.run()

    def _enter(self, budget: Budget, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu) -> Guard:
        _using.add(id(self))
        block = memguard.guard(budget, simulate=simulate, missing_gpu=missing_gpu)
        _blocks.append(block)
        guard = block.__enter__()
        if not guard.active and not hasattr(guard, "why"):  # `why`: MEMGUARD_DISABLE, or no GPU
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

    # on the monitor's thread, and on tasks' threads

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
        """Called on the thread of the failed task."""
        from distributed.worker import get_worker, thread_state

        from memguard._oom.report import full_text

        with contextlib.suppress(ValueError):  # raised in `client.run`, where there is no task
            if get_worker() is not self._worker:  # one of several workers in this process
                return
        key = getattr(thread_state, "key", None)
        self._log({"kind": "report", "text": full_text(report), "task": None if key is None else str(key)})

    def _report_pause(self, what: str) -> None:
        self._log({"kind": what, "text": f"worker {self._worker.name} is {what}: pressure {self._level or 'unknown'}"})

    def _log(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the worker is closing; a lost event must not raise in the program
            self._worker.log_event(TOPIC, {**message, "name": self._worker.name})

    # in heartbeats, on the worker's event loop

    async def _ledger(self, worker: Any) -> dict[str, Any]:
        guard = self._guard
        if guard is None or not guard.active:
            if self._pause is not None:
                self._pause.release()  # the program ended the budget: no later sample would resume the worker
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
