"""Worker processes that import the script again, and with it run its `memguard.init` a second time.

`spawn` and `forkserver` (the default from Python 3.14 on) import the parent's script in each worker. An `init` at its
top would give every worker the whole budget once more, so it applies nothing there unless it is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memguard._guard import Guard
from memguard.errors import NotActive

ASKED = "MEMGUARD_CHILDREN"
"""The environment variable that makes the script's `init` apply in the workers too."""
WHY = (
    "no budget is active in this process: it is a worker, and memguard.init does nothing while multiprocessing "
    "imports the script again in it\n"
    "    fix: put this call under `if __name__ == '__main__':`; for a budget in the worker, call memguard.init in the "
    f"function that it runs, or set {ASKED}=1 and start workers with spawn: then the script's own applies in each"
)
SERVED = (
    "no budget is active in this process: it is a worker of multiprocessing's fork server, which imported the script "
    f"once for all of them, so that {ASKED}=1 does not reach them\n"
    "    fix: call memguard.init in the function that the worker runs, or start workers with spawn"
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


class PassiveGuard(Guard):
    """What `init` returns if it applied nothing: not active, and whatever needs a budget raises NotActive."""

    def __init__(self) -> None:  # not Guard's, which asks for GPUs
        self.notes, self.permanent = [], []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in _ANSWERED:
            return super().__getattribute__(name)
        raise NotActive(WHY)

    @property
    def active(self) -> bool:
        return False

    @property
    def frameworks(self) -> Mapping[str, Any]:
        return {}

    def start(self) -> None:
        raise NotActive(WHY)

    def stop(self) -> list[str]:
        return []

    def forked(self) -> None:
        pass

    def __repr__(self) -> str:
        return "<PassiveGuard, not active: print it for the reason>"

    def __str__(self) -> str:
        return WHY
