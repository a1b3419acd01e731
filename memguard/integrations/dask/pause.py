"""Pause a Dask worker while memguard's pressure is critical, with Dask's own worker status.

A paused worker finishes its running tasks and starts no others; the scheduler sends it none. Dask's memory monitor
checks the host's memory every `distributed.worker.memory.monitor-interval`, and resumes a paused worker if that memory
is low. Two mechanisms keep the worker paused: memguard wraps the monitor's decision for this worker, so that it does
not resume under critical pressure; and each sample of memguard's monitor pauses the worker again if other code
resumed it.

memguard does not undo a pause by Dask: if the host's memory is above Dask's threshold when the pressure falls, the
worker stays paused until Dask's monitor resumes it. The status of a closing worker does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from memguard._base.logs import log as _log
from memguard._base.undo import Undo

_DECIDE = "_maybe_pause_or_unpause"
"""The method of distributed's WorkerMemoryManager that pauses and resumes; private, since 2022."""


class Pause:
    """The pause of one worker. Calls `say` with "paused" or "resumed" on the worker's event loop."""

    def __init__(self, worker: Any, say: Callable[[str], None]) -> None:
        self._worker, self._say = worker, say
        self._states = type(worker.status)  # distributed's Status
        self._paused_by_memguard = self._ended = False
        self.held = False
        """Whether the pressure is critical, so that the worker stays paused."""

    def begin(self, undo: Undo) -> None:
        """Wrap the decision of Dask's memory monitor."""
        undo.add("the pause of the worker", self._end)
        manager = self._worker.memory_manager
        decide = getattr(manager, _DECIDE, None)
        if decide is None:
            _log.warning(
                "this version of distributed has no WorkerMemoryManager.%s: a worker that is paused under critical "
                "pressure may start tasks between two samples of memguard's monitor",
                _DECIDE,
            )
            return
        before = vars(manager).get(_DECIDE)

        def held(worker: Any, memory: int) -> None:
            if self.held and worker is self._worker and not self._high(memory):
                return  # Dask would resume the worker, or do nothing
            decide(worker, memory)

        def unwrap() -> None:
            if vars(manager).get(_DECIDE) is held:  # else other code wrapped it again, and `held` only calls on
                vars(manager).pop(_DECIDE) if before is None else setattr(manager, _DECIDE, before)

        undo.add("the decision of Dask's memory monitor", unwrap)
        setattr(manager, _DECIDE, held)

    def set_pressure(self, critical: bool) -> None:
        """Called after each sample, on any thread."""
        if critical is not self.held or (critical and self._worker.status is self._states.running):
            with contextlib.suppress(RuntimeError):  # the worker and its loop are closed
                self._worker.loop.add_callback(self._apply, critical)

    def release(self) -> None:
        """Called on the worker's event loop when no budget is active any more."""
        if self.held:
            self._apply(False)

    def _apply(self, critical: bool) -> None:
        if self._ended:
            return
        self._pause() if critical else self._resume()

    def _pause(self) -> None:
        first, self.held = not self.held, True
        if self._worker.status is self._states.running:
            self._paused_by_memguard = True
            self._worker.status = self._states.paused
        if first:
            self._say("paused")

    def _resume(self) -> None:
        was, self.held = self.held, False
        ours, self._paused_by_memguard = self._paused_by_memguard and self._worker.status is self._states.paused, False
        if ours and not self._high(self._worker.monitor.get_process_memory()):
            self._worker.status = self._states.running
        if was:
            self._say("resumed")

    def _high(self, memory: int) -> bool:
        """Whether Dask itself pauses a worker whose process uses `memory` bytes of host memory."""
        manager = self._worker.memory_manager
        limit, fraction = manager.memory_limit, manager.memory_pause_fraction
        return bool(limit) and fraction is not False and memory / limit > fraction

    def _end(self) -> None:
        """The last undo step, on the worker's event loop."""
        self._ended = True
        self._resume()
