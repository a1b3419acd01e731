"""Ctrl-C at each point of an adapter's `apply`, and of its undo."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from memguard._base.undo import Undo
from memguard._frameworks.base import Framework

_spec = importlib.util.spec_from_file_location("interruptions", Path(__file__).parents[1] / "unit" / "interruptions.py")
assert _spec is not None and _spec.loader is not None
interruptions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(interruptions)
CAP = 1 << 26


def interrupt_at_each_point(make: Callable[[], Framework], state: Callable[[], object]) -> int:
    """Interrupt `apply` of a new adapter at each point, and its undo: another run of the steps restores `state`.

    Returns the number of points.
    """

    def apply(framework: Framework) -> None:
        framework.apply({gpu.uuid: CAP for gpu in framework.host.devices()}, {}, undo)

    before, undo = state(), Undo()
    apply(make())  # what is done once only
    undo.run()
    framework, applied, undone = make(), interruptions.Points(), interruptions.Points()
    applied.run(lambda: apply(framework))
    assert state() != before
    undone.run(undo.run)
    assert state() == before and undo.done
    for at in range(1, applied.count + 1):
        framework, points = make(), interruptions.Points(at)
        assert _interrupted(lambda: points.run(lambda: apply(framework)))  # noqa: B023
        undo.run()
        assert state() == before and undo.done, f"apply, {points.place}"
    for at in range(1, undone.count + 1):
        points = interruptions.Points(at)
        apply(make())
        assert _interrupted(lambda: points.run(undo.run))  # noqa: B023
        undo.run()
        assert state() == before and undo.done, f"undo, {points.place}"
    return int(applied.count + undone.count)


def _interrupted(call: Callable[[], object]) -> bool:
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False
