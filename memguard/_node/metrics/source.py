"""Where the figures come from: the monitor's last sample, and what the guard has counted."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from memguard._base.types import Event
from memguard._budget.ranks import rank_of
from memguard._budget.values import JOB, MAX_JOB
from memguard._devices import suspension
from memguard._node.metrics.figures import KINDS, Scene
from memguard._runtime.callbacks import Watch
from memguard._runtime.session import event_callbacks

if TYPE_CHECKING:
    from memguard._runtime.extensions import SessionContext

FRESH_FOR = 10.0, 3.0
"""A sample tells of now for so many seconds, and for so many intervals of the monitor if those are longer."""


class CannotExport(Exception):
    """Why metrics cannot be had here, and what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class Source:
    """The figures of one budget, until `end`. `scene` may be called on any thread; it waits for nobody."""

    def __init__(self, session: SessionContext, job: str | None) -> None:
        self._session: SessionContext | None = session
        self._events: Counter[str] = Counter()
        self._lock = threading.RLock()  # reentrant, for a signal handler, and held for one line
        self._watch = Watch(self._counted, event_callbacks)
        self.constant = constant(job, session.guard.host.simulated)

    def begin(self) -> None:
        event_callbacks.append(self._watch)

    def end(self) -> None:
        """Nothing is known from now on. May be called again."""
        self._session = None
        self._watch.remove()

    def scene(self) -> Scene | None:
        """What is known now; None if the budget is over, and in a forked child."""
        session = self._session
        if session is None or not session.active:
            return None
        guard, monitor, off = session.guard, session.monitor, suspension.now
        taken = monitor.last(0.0)[-1:] if monitor is not None else []
        fresh, levels, plan = None, {}, guard.plan
        if monitor is not None and taken and off is None and not monitor.failing:
            age = time.time() - taken[0].time
            if age <= max(FRESH_FOR[0], FRESH_FOR[1] * monitor.interval):
                fresh, state = taken[0], monitor.state
                for part in plan.devices:
                    uuid = part.device.uuid
                    levels.update({(name, uuid): state.level(uuid, name) for name in (None, *part.caps)})
        return Scene(
            plan=plan,
            version=version(),
            sample=fresh,
            taken=taken[0].time if taken else None,
            levels=levels,
            told=frozenset(name for name, one in guard.frameworks.items() if one.unseen() is None),
            refused=guard.refusals.totals(),
            trims=dict([*guard.trims.items()]),
            returned=dict([*guard.elastic.reclaimer.returned.items()]),
            lends=dict([*guard.elastic.reclaimer.lends.items()]),
            events=dict([*self._events.items()]),
            off=off,
        )

    def _counted(self, event: Event) -> None:
        with self._lock:
            self._events[event.kind if event.kind in KINDS else "other"] += 1


def version() -> str:
    """memguard's, without importing it from below."""
    return str(getattr(sys.modules["memguard"], "__version__", ""))


def constant(job: str | None, simulated: bool) -> dict[str, str]:
    """The labels that every figure of this process has."""
    rank = rank_of(os.environ)
    labels = {"job_name": job or script(sys.argv[0] if sys.argv else "")}
    labels |= {"rank": str(rank)} if rank is not None else {}
    return labels | ({"simulated": "true"} if simulated else {})


def script(path: str) -> str:
    """The name of a program, as a job may be called. Of a package's `__main__.py` it is the package."""
    folder, name = os.path.split(path)
    name = os.path.basename(folder) if name == "__main__.py" else name
    plain = re.sub(r"[^A-Za-z0-9._/:@-]", "_", name)[:MAX_JOB]
    return plain if re.fullmatch(JOB, plain) else "python"
