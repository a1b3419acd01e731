"""Where `memguard.init` applies nothing: in worker processes, with MEMGUARD_DISABLE, and without a GPU.

Workers import the script again, and with it run its `memguard.init` a second time.

`spawn` and `forkserver` (the default from Python 3.14 on) import the parent's script in each worker. An `init` at its
top would give every worker the whole budget once more, so it applies nothing there unless it is asked to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from memguard._base.advice import Advice
from memguard._base.blocks import End
from memguard._base.types import Device, Event, Plan, Room, Sample, WorkloadReport
from memguard._guard.guard import Guard
from memguard._ledger.types import Ledger
from memguard._oom.refusal import RefusalCounts
from memguard.errors import NotActive

if TYPE_CHECKING:
    from memguard._guard.figures import Reclaimable

ASKED = "MEMGUARD_CHILDREN"
"""The environment variable that makes the script's `init` apply in the workers too."""
DISABLE, SIMULATE = "MEMGUARD_DISABLE", "MEMGUARD_SIMULATE"
WHY = Advice(
    "no budget is active in this process: it is a worker, and memguard.init does nothing while multiprocessing "
    "imports the script again in it",
    "put this call under `if __name__ == '__main__':`; for a budget in the worker, call memguard.init in the "
    f"function that it runs, or set {ASKED}=1 and start workers with spawn: then the script's own applies in each",
)
SERVED = Advice(
    "no budget is active in this process: it is a worker of multiprocessing's fork server, which imported the "
    f"script once for all of them, so that {ASKED}=1 does not reach them",
    "call memguard.init in the function that the worker runs, or start workers with spawn",
)
# multiprocessing (torch's and joblib's pools too), its copy that pickles with dill, and Celery's.
_POOLS = ("multiprocessing.process", "multiprocess.process", "billiard.process")
_ANSWERED = {"active", "frameworks", "notes", "permanent", "start", "stop", "forked"}


def reimporting(modules: Mapping[str, object]) -> bool:
    """Whether multiprocessing is importing the parent's script in this process. Imports nothing.

    multiprocessing itself reads `_inheriting`, to refuse to start processes during that import.
    """
    for name in _POOLS:
        current = getattr(modules.get(name), "current_process", None)
        if callable(current) and getattr(current(), "_inheriting", False):
            return True
    return False


def from_fork_server(modules: Mapping[str, object], command: Sequence[str]) -> bool:
    """In a forked child: whether multiprocessing's server forked it, and not one of the workers."""
    parent = getattr(modules.get("multiprocessing.process"), "parent_process", None)
    return any("multiprocessing.forkserver" in word for word in command) and callable(parent) and parent() is None


def wanted(reimporting: bool, environ: Mapping[str, str]) -> bool:
    """Whether `init` should apply its budget: always, except in a worker that has not asked for it."""
    return not reimporting or environ.get(ASKED, "") not in ("", "0")


def disabled(environ: Mapping[str, str]) -> bool:
    """Whether MEMGUARD_DISABLE is set, so that nothing is applied."""
    return environ.get(DISABLE, "") not in ("", "0")


def simulated(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs of MEMGUARD_SIMULATE; None if there are none."""
    return [name.strip() for name in environ.get(SIMULATE, "").split(",") if name.strip()] or None


class _Inactive(Guard):
    """A guard that caps nothing, and has nothing to undo."""

    def _repr_html_(self) -> str:
        from memguard._base.displays import html

        return f"<pre>{html(str(self))}</pre>"

    @property
    def active(self) -> bool:
        return False

    @property
    def frameworks(self) -> Mapping[str, Any]:
        return {}

    def stop(self) -> list[str]:
        return []

    def forked(self) -> None:
        pass


class PassiveGuard(_Inactive):
    """What `init` returns if it applied nothing: not active, and whatever needs a budget raises NotActive."""

    def __init__(self) -> None:  # not Guard's, which asks for GPUs
        self.notes, self.permanent = [], []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in _ANSWERED:
            return super().__getattribute__(name)
        raise NotActive(WHY)

    def start(self) -> None:
        raise NotActive(WHY)

    def __repr__(self) -> str:
        return "<PassiveGuard, not active: print it for the reason>"

    def __str__(self) -> str:
        return str(WHY)


class IdleGuard(_Inactive):
    """What `init` returns if a program is to run on without a budget. Its calls do nothing.

    `why` says why nothing is applied, `given` is what `init` was given: `budget` reads it when it is asked for.
    `ledger()` and `sample()` are empty, what is unknown is None. Where there is no value without a GPU,
    `part` and `set_cap` raise NotActive, and `host` is an AttributeError with the reason.
    """

    def __init__(self, why: str, given: Any) -> None:  # not Guard's, which asks for GPUs
        self.why, self.given = why, given
        self.notes, self.permanent = [why], []
        self.plan = Plan((), notes=(why,))
        self.sharing, self.trims, self.refusals = None, Counter(), RefusalCounts()

    def __getattr__(self, name: str) -> Any:
        if name != "budget":
            raise AttributeError(f"{name}: {self.why}")
        from memguard import _budget

        return _budget.of(self.given)

    @property
    def undone(self) -> bool:
        return True

    def start(self) -> None:
        pass

    def ledger(self) -> Ledger:
        return Ledger(time.time(), (), notes=(self.why,))

    def sample(self) -> Sample:
        return Sample(time.time(), ())

    def last_sample(self) -> Sample | None:
        return None

    def part(self, uuid: str) -> NoReturn:
        self._refuse()

    def movable(self, name: str) -> bool:
        return False

    def set_cap(self, name: str, uuid: str, cap: int) -> NoReturn:
        self._refuse()

    def settle(self, sample: Sample) -> Sample:
        return sample

    def moved(self) -> list[Event]:
        return []

    def make_room(self, framework: str, needed: int, device: Device | None = None) -> Room:
        return Room({}, None, 0, {})  # no cap is in the way

    def require(self, framework: str, size: int | str, device: Device | None = None) -> None:
        pass

    def _begin_workload(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return WorkloadReport(name, framework), lambda error: None

    async def _begin_workload_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return self._begin_workload(name, framework, needs, wait)

    def open_bytes(self, framework: str, uuid: str) -> int:
        return 0

    def promised(self, name: str, uuid: str, in_use: int | None) -> int:
        return 0

    def reclaimable(self) -> Reclaimable:
        from memguard._guard.figures import Reclaimable

        return Reclaimable(time.time(), ())

    def resize(self, framework: str, size: int | str) -> None:
        pass

    def trim(self, framework: str | None = None) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise NotActive(self.why)

    def __repr__(self) -> str:
        return "<IdleGuard, not active: print it for the reason>"

    def __str__(self) -> str:
        return self.why
